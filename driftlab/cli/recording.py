"""What makes recordings and drafters: demo, record, train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from driftlab.cli.common import DType, dtype_of, load_target, progress_bar, sink_words
from driftlab.errors import DriftlabError


def demo(out: Path = Path("runs/demo"), device: str = "cpu") -> None:
    """Record SmolLM2, replay and probe the six shipped drafters, write report, panels and rows.

    Args:
        out: folder for report.html, summary.csv, rows.parquet and the panels.
        device: where target and drafters run.
    """
    from driftlab.demo import run_demo

    summary = run_demo(out, device=device, progress=progress_bar())
    print(summary.to_string(index=False, float_format=lambda x: f"{x:.3f}"))
    print(f"\n{out / 'report.html'}")


def record(
    out: Positional[Path],
    prompts: str = "default",
    self_prompts: int | None = None,
    target: str = "smollm2",
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: bool = True,
    limit: int | None = None,
    drafters: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
    aux_layers: tuple[int, ...] | None = None,
    device: str = "cpu",
    dtype: DType = "float32",
    store_dtype: DType | None = None,
    processes: int | None = None,
    slots: int = 96,
) -> None:
    """Let a target answer prompts and keep its states. Stopped at any moment, the same command goes on after the last piece
    that was finished (16 prompts; 32 conversations with --self-prompts).

    Args:
        out: folder to write.
        prompts: a .jsonl or .json file (MT-Bench, ShareGPT or OpenAI shape), or "default": the project's 80.
        self_prompts: let the target write that many user messages itself, rounded up to whole pieces, and answer them, in
            place of ``prompts``: training text. States are then stored in bfloat16 by default.
        target: "smollm2", a Hugging Face id, or a local folder.
        max_new_tokens: length limit of an answer; default 128, with --self-prompts 192.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        seed: of the sampling.
        template: render the chat template; off: raw text.
        limit: take that many prompts, spread evenly over the categories.
        drafters: keep the states that these drafters read (folders, files, Hugging Face ids).
        given: conventions that you know better than their files, as name=value (see `driftlab inspect`).
        aux_layers: captured states, beside those of --drafters; default 2, N/2, N-3.
        device: where the target runs.
        dtype: of the target.
        store_dtype: of the stored aux states; default the target's.
        processes: with --self-prompts, each with a copy of the target; default one a core.
        slots: with --self-prompts, conversations that each process decodes together.
    """
    from driftlab.prompts import evenly, load_prompts

    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise DriftlabError(
            f"--temperature {temperature:g} --top-k {top_k} --top-p {top_p:g}: the first two are 0 or more (0: greedy; off), "
            "top-p is above 0 and at most 1"
        )
    if given and not drafters:
        raise DriftlabError("--given says how the files of --drafters are read: name them")
    store = {} if store_dtype is None else {"store_dtype": dtype_of(store_dtype)}
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if self_prompts is not None:
        if prompts != "default" or limit is not None or not template:
            raise DriftlabError(
                "--self-prompts makes its own prompts with the chat template: leave out the options of others"
            )
        model = load_target(target, device, dtype, aux_layers, drafters, given)
        trajectory = model.record_self_prompts(
            self_prompts,
            max_new_tokens=192 if max_new_tokens is None else max_new_tokens,
            processes=processes,
            slots=slots,
            out=out,
            progress=progress_bar(),
            **sampling,
            **store,
        )
    else:
        loaded = load_prompts(prompts)
        loaded = loaded if limit is None else evenly(loaded, limit)
        model = load_target(target, device, dtype, aux_layers, drafters, given)
        trajectory = model.record(
            loaded,
            max_new_tokens=128 if max_new_tokens is None else max_new_tokens,
            template=template,
            out=out,
            progress=progress_bar(),
            **sampling,
            **store,
        )
    stops = sum(entry.finish == "stop" for entry in trajectory.entries)
    print(f"{out}: {len(trajectory)} sequences, {trajectory.answer_tokens} answer tokens, {stops} ended by EOS")
    print(f"target {trajectory.spec.label}; states {list(trajectory.aux_layers)}; sink {sink_words(trajectory)}")


def train(
    recording: Positional[Path],
    out: Positional[Path],
    variant: Literal["eagle3", "fc_norm", "norm_output", "eagle31"] = "eagle31",
    draft_vocab: int = 8192,
    ttt: int = 4,
    loss: Literal["soft_ce", "kl", "alpha", "lambda"] = "soft_ce",
    lr: float = 1e-3,
    batch_size: int = 8,
    accumulate: int = 1,
    epochs: float = 1.0,
    negatives: int = 0,
    stride: int = 1,
    held_out: float = 0.05,
    checked: int = 32,
    seed: int = 0,
    order_seed: int | None = None,
    device: str = "cpu",
) -> None:
    """Train a drafter of a variant on a recording. Stopped at any moment, the same command goes on.

    Args:
        recording: folder that `driftlab record` wrote.
        out: folder for the drafter.
        variant: setting of the two switches.
        draft_vocab: size of the draft vocabulary, chosen on the recording.
        ttt: depths unrolled in training.
        loss: soft cross-entropy, KL, or the acceptance losses alpha and lambda.
        lr: learning rate.
        batch_size: sequences a micro-batch.
        accumulate: micro-batches an optimiser step.
        epochs: passes over the recording.
        negatives: 0: exact sums over the draft vocabulary; else sample so many columns (faster).
        stride: beyond depth 1 unroll one start in so many (faster).
        held_out: share of the conversations that is not trained on; the weights with the largest tau there are kept. 0: none.
        checked: held-out conversations measured at intervals.
        seed: of the first weights and, by default, of the order of the data.
        order_seed: of the order of the data.
        device: where to train.
    """
    from driftlab import VARIANTS, Drafter, TrainConfig, Trajectory, choose_draft_vocab
    from driftlab import train as run
    from driftlab.devices import usable_device
    from driftlab.training import held_out_numbers, split
    from driftlab.vocabulary import coverage

    trajectory = Trajectory.open(recording)
    learning, held = split(trajectory, held_out) if held_out else (trajectory, None)
    size = min(draft_vocab, trajectory.spec.vocab_size)
    vocab = choose_draft_vocab(learning, size)
    config = VARIANTS[variant].for_target(trajectory, draft_vocab_size=size)
    drafter = Drafter(config, trajectory, draft_vocab=vocab, seed=seed).to(usable_device(device))
    settings = TrainConfig(
        ttt=ttt,
        loss=loss,
        lr=lr,
        batch_size=batch_size,
        accumulate=accumulate,
        epochs=epochs,
        negatives=negatives,
        stride=stride,
        seed=seed if order_seed is None else order_seed,
    )
    few = None if held is None else held.subset(range(min(checked, len(held))))
    run(drafter, learning, settings, out=out, held_out=few, progress=progress_bar())
    print(
        f"{out}: {variant}; the draft vocabulary holds {coverage(vocab, learning):.1%} of the answers trained on",
        end="",
    )
    if held is None:
        print("; nothing was held out")
        return
    rest = held.subset(range(checked, len(held))) if len(held) > checked else held
    who = (
        f"the {len(rest)} held-out conversations that chose no weights"
        if len(held) > checked
        else (f"the {len(rest)} held-out conversations, which chose the weights: a little flattering")
    )
    numbers = ", ".join(f"{k.removeprefix('held_out_')} {v:.3f}" for k, v in held_out_numbers(drafter, rest).items())
    print(f" and {coverage(vocab, held):.1%} of those held out\n{who}, K = 8: {numbers}")
