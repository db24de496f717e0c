r"""Train a drafter by train-time test: unroll it over the recorded text and learn the target's distribution at each depth.

    loss = sum_k w_k * (sum over rows of loss_{t,k}) / n_k,       w_k = decay^(k-1)

with one of the losses of :mod:`driftlab.losses` and n_k the rows that count at depth k in the whole optimiser step, however
it is cut into micro-batches. Row t counts at depth k iff t >= P - 1 and token t + k + 1 exists. The feedback of one depth
is the input of the next, gradients included (EAGLE-3, arXiv 2503.01840, section 3).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.acceptance import accept
from driftlab.draft import all_starts, check_fits, text_at, unroll
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.files import locked, sweep, write_json, write_text
from driftlab.footprint import refuse_beyond, training_bytes
from driftlab.losses import LOSSES, TargetDistribution, draft_loss
from driftlab.progress import Progress, silent
from driftlab.recorded import Batch, Entry
from driftlab.sealed import open_tensors, save_sealed, sealed_tensors
from driftlab.simulation import simulate
from driftlab.trajectory import Trajectory

STATE_VERSION = 2
HELD_OUT_DEPTH = 8
"""K of the tau by which checkpoints are compared"""
_STATE = "train_state.safetensors"
_BEST = "train_best.safetensors"
_ANEW = "remove it to train from the start"
_BUCKET = 8


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The same values give the same weights, bit for bit, on the same machine."""

    ttt: int = 4
    """depths unrolled in training"""
    loss: str = "soft_ce"
    """soft_ce, kl, alpha or lambda: see :mod:`driftlab.losses`"""
    eta: float = 3.0
    """of the lambda loss, whose weight is a micro-batch's own: with ``accumulate`` it is not that of one large batch"""
    lr: float = 1e-3
    batch_size: int = 8
    """sequences a micro-batch"""
    accumulate: int = 1
    """micro-batches an optimiser step"""
    epochs: float = 1.0
    warmup: float = 0.05
    """share of the steps over which the rate rises; a cosine to a tenth follows"""
    weight_decay: float = 0.01
    """on matrices, not on gains"""
    clip: float = 1.0
    depth_decay: float = 0.8
    negatives: int = 0
    """0: exact sums over the draft vocabulary. Else an estimate from all columns that carry probability and a sample of so
    many of the rest: several times faster for large vocabularies"""
    stride: int = 1
    """beyond depth 1 one start in so many is unrolled, others each step: neighbours teach much the same"""
    autocast: str = "auto"
    """auto, bfloat16 or none. auto: bfloat16 where the device multiplies it faster than float32"""
    seed: int = 0
    """of the order of the data"""
    save_every: int = 100
    """steps between saved states; 0: only at the end"""
    evaluate_every: int = 0
    """steps between measurements on held-out text; 0: an eighth of the steps"""
    log_every: int = 20
    """steps that a row of the log is the mean of"""

    def __post_init__(self) -> None:
        counts = min(self.ttt, self.batch_size, self.accumulate, self.log_every, self.stride) >= 1
        counts = counts and min(self.save_every, self.evaluate_every, self.negatives) >= 0
        if not (
            counts
            and min(self.lr, self.epochs, self.clip) > 0
            and min(self.weight_decay, self.eta) >= 0
            and 0 <= self.warmup <= 1
            and 0 < self.depth_decay <= 1
        ):
            raise DriftlabError(
                f"{self}: ttt, batch_size, accumulate, stride and log_every are at least 1, lr, epochs and clip above 0, "
                "warmup in 0..1, depth_decay in (0, 1], all else not negative"
            )
        if self.loss not in LOSSES:
            raise DriftlabError(f"loss {self.loss!r}: choose from {', '.join(LOSSES)}")
        if self.autocast not in ("auto", "bfloat16", "none"):
            raise DriftlabError(f"autocast {self.autocast!r}: choose from auto, bfloat16, none")


def train(
    drafter: Drafter,
    trajectory: Trajectory,
    config: TrainConfig | None = None,
    *,
    out: str | Path,
    held_out: Trajectory | None = None,
    stop_after: int | None = None,
    progress: Progress = silent,
) -> Drafter:
    """Train ``drafter`` in place on a recording, save it to ``out`` and return it.

    Stopped at any moment, the same call goes on from the last saved state and ends with the same bits. With ``held_out``
    the weights kept are those with the largest tau there (training loss overstates what a longer training is worth).

    Args:
        drafter: on the device to train on.
        trajectory: the recording; its head gives the target's distribution.
        config: see :class:`TrainConfig`.
        out: folder for config.json, model.safetensors, train_log.csv, train_config.json (loss and all other settings), and the
            state while training.
        held_out: sequences of the same source, not trained on (see :func:`split`), measured at intervals.
        stop_after: stop (and save the state) after so many steps in all; for tests and time limits.
        progress: called with ("training <out's name>", steps done, steps).

    Raises:
        DriftlabError: drafter and recording do not fit, a step that memory cannot hold, a loss that is not finite, or a state
            of another training.
    """
    config, out = config or TrainConfig(), Path(out)
    for data in (trajectory, *([] if held_out is None else [held_out])):
        check_fits(drafter, data)
    if not len(trajectory) or (held_out is not None and not len(held_out)):
        raise DriftlabError("there is no sequence to train on, or none held out")
    if held_out is not None:
        _refuse_shared(trajectory, held_out)
    if (out / "trajectory.json").exists():
        raise DriftlabError(f"{out} holds a recording: give the drafter a folder of its own")
    _refuse_too_large(drafter, trajectory, config)
    run = _Run(drafter, trajectory, config, held_out)
    with locked(out / "training"):
        sweep(out)
        step = run.resume(out)
        name = f"training {out.name}"
        progress(name, step, run.steps)
        while step < (run.steps if stop_after is None else min(run.steps, stop_after)):
            run.step(step)
            step += 1
            if step % run.evaluate_every == 0 or step == run.steps:
                run.evaluate(step, out)
            progress(name, step, run.steps)
            if config.save_every and step % config.save_every == 0:
                run.save_state(out, step)
        if step < run.steps:
            if step:
                run.save_state(out, step)
            return drafter
        longest = max(entry.length for entry in trajectory.entries)
        drafter.config = dataclasses.replace(drafter.config, ttt=config.ttt, trained_length=longest)
        write_json(out / "train_config.json", dataclasses.asdict(config))
        write_text(out / "train_log.csv", pd.DataFrame(run.log).to_csv(index=False, float_format="%.6g"))
        run.save_state(out, step)
        run.restore_best(out)
        drafter.trained_for = {"label": trajectory.spec.label, "fingerprint": trajectory.spec.fingerprint}
        drafter.save(out)
    return drafter


def _refuse_too_large(drafter: Drafter, trajectory: Trajectory, config: TrainConfig) -> None:
    """Raise DriftlabError if a step that an epoch must take cannot be held.

    Which sequences meet in a batch is drawn. Every epoch has the longest one in some batch, and every full batch has at least
    the tokens of the shortest ones together; with less than an epoch the shortest one alone is certain.
    """
    shapes, entries = drafter.config, sorted(trajectory.entries, key=lambda entry: entry.length)
    certain = [entries[:1]] if config.epochs < 1 else [entries[-1:]]
    if config.epochs >= 1 and len(entries) >= config.batch_size:
        certain.append(entries[: config.batch_size])
    narrow = config.autocast == "bfloat16" or (config.autocast == "auto" and uses_bfloat16(drafter.device))

    def needed(batch: Sequence[Entry]) -> int:
        return training_bytes(
            weights=sum(p.numel() for p in drafter.parameters() if p.requires_grad),
            tokens=sum(entry.length for entry in batch),
            states=len(trajectory.aux_layers) + 1,
            target_width=trajectory.spec.hidden_size,
            starts=sum(entry.length - entry.prompt_length for entry in batch),
            layers=shapes.num_hidden_layers,
            width=shapes.hidden_size,
            inner=0 if shapes.experts else shapes.intermediate_size,
            depth=config.ttt,
            stride=config.stride,
            itemsize=drafter.dtype.itemsize,
            computed=2 if narrow else drafter.dtype.itemsize,
        )

    batch = max(certain, key=needed)
    refuse_beyond(
        needed(batch),
        f"training on {len(batch)} sequence(s) of up to {batch[-1].length} tokens at once, {config.ttt} deep,",
        "lower batch_size (and raise accumulate), ttt, or raise stride; or leave the longest sequences out",
        drafter.device,
    )


def _refuse_shared(trajectory: Trajectory, held_out: Trajectory) -> None:
    """Raise DriftlabError if what is held out is trained on, or is another target's."""
    if trajectory.spec.fingerprint != held_out.spec.fingerprint:
        raise DriftlabError(f"held out is text of {held_out.spec.label}, trained is on text of {trajectory.spec.label}")
    seen = {_prompt_digest(trajectory, index) for index in range(len(trajectory))}
    shared = [e.id for i, e in enumerate(held_out.entries) if _prompt_digest(held_out, i) in seen]
    if shared:
        raise DriftlabError(
            f"{len(shared)} held-out prompts are trained on too, the first is {shared[0]!r}: a tau there would say nothing; "
            "divide a recording with split()"
        )


def _prompt_digest(trajectory: Trajectory, index: int) -> bytes:
    prompt = trajectory.tokens(index)[: trajectory.entries[index].prompt_length]
    return hashlib.sha256(prompt.numpy().tobytes()).digest()


class _Run:
    """The training loop's moving parts."""

    def __init__(
        self, drafter: Drafter, trajectory: Trajectory, config: TrainConfig, held_out: Trajectory | None
    ) -> None:
        self.drafter, self.trajectory, self.config, self.held_out = drafter, trajectory, config, held_out
        self.device, self.dtype = drafter.device, drafter.dtype
        wide = torch.promote_types(self.dtype, torch.float32)
        self.head_rows = trajectory.head.lm_head[drafter.draft_vocab.cpu()].to(self.device, wide)
        self.autocast = uses_bfloat16(self.device) if config.autocast == "auto" else config.autocast == "bfloat16"
        self.log: list[dict[str, int | float]] = []
        self._recent: list[dict[str, float]] = []
        self._order: tuple[int, list[list[list[int]]]] | None = None
        self.best_tau = -math.inf
        self.named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        matrices = [p for p in self.named.values() if p.ndim > 1]
        gains = [p for p in self.named.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.per_epoch = len(self.order(0))
        self.steps = max(1, round(config.epochs * self.per_epoch))
        self.evaluate_every = config.evaluate_every or max(1, math.ceil(self.steps / 8))
        self.fingerprint = self._fingerprint()

    def order(self, epoch: int) -> list[list[list[int]]]:
        """Return the micro-batches of every step of an epoch: sequences of like length together, in an order of the seed."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        lengths = [entry.length for entry in self.trajectory.entries]
        shuffled = torch.randperm(len(lengths), generator=generator).tolist()
        size, batches = self.config.batch_size, []
        for bucket in (shuffled[i : i + _BUCKET * size] for i in range(0, len(shuffled), _BUCKET * size)):
            bucket.sort(key=lambda index: lengths[index])
            batches += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        return [mixed[i : i + self.config.accumulate] for i in range(0, len(mixed), self.config.accumulate)]

    def step(self, step: int) -> None:
        """One optimiser step, and a row of the log at intervals."""
        epoch, place = divmod(step, self.per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.order(epoch))
        groups = self._order[1][place]
        offset = step % self.config.stride
        counts = self.counts([index for group in groups for index in group], offset)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * schedule(step, self.steps, self.config.warmup)
        self.optimizer.zero_grad(set_to_none=True)
        logged: dict[str, float] = defaultdict(float)
        for number, indices in enumerate(groups):
            batch = self.trajectory.batch(indices).to(self.device, self.dtype)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss, parts = batch_loss(
                    self.drafter,
                    batch,
                    self.head_rows,
                    self.config,
                    counts=counts,
                    offset=offset,
                    seed=step * 1009 + number,
                )
            if not math.isfinite(float(loss.detach())):
                raise DriftlabError(
                    f"the loss at step {step} is {float(loss.detach())}: lower lr ({self.config.lr}); the last saved state is "
                    "kept"
                )
            loss.backward()
            logged["loss"] += float(loss.detach())
            for name, value in parts.items():
                logged[name] += value
        norm = torch.nn.utils.clip_grad_norm_(list(self.named.values()), self.config.clip)
        if not math.isfinite(float(norm)):
            raise DriftlabError(
                f"the gradient at step {step} is not finite: lower lr ({self.config.lr}); the last saved state is kept"
            )
        self.optimizer.step()
        self._recent.append({"grad_norm": float(norm), **logged, **{f"rows_{k}": n for k, n in enumerate(counts, 1)}})
        if (step + 1) % self.config.log_every == 0 or step + 1 == self.steps:
            rate = self.optimizer.param_groups[0]["lr"]
            self.log.append({"step": step + 1, "lr": rate, **_pooled(self._recent)})
            self._recent = []

    def counts(self, indices: Sequence[int], offset: int) -> list[int]:
        """n_k of some sequences, by depth: T - P - k rows of each have a token to predict; deeper, every stride-th."""
        answers = [self.trajectory.entries[i].length - self.trajectory.entries[i].prompt_length for i in indices]
        first, stride = sum(max(0, length - 1) for length in answers), self.config.stride
        return [first] + [
            sum(len(range(offset, length - k, stride)) for length in answers) for k in range(2, self.config.ttt + 1)
        ]

    def evaluate(self, step: int, out: Path) -> None:
        """Measure tau and match on held-out text, exactly; keep the weights if all earlier ones had a smaller tau."""
        if self.held_out is None:
            return
        measured = held_out_numbers(self.drafter, self.held_out)
        self.log.append({"step": step, **measured})
        if measured["held_out_tau"] > self.best_tau:
            self.best_tau = measured["held_out_tau"]
            tensors = {name: p.detach().cpu().contiguous() for name, p in self.named.items()}
            metadata = {"step": str(step), "tau": repr(self.best_tau), "fingerprint": self.fingerprint}
            save_sealed(out / _BEST, tensors, metadata)

    def restore_best(self, out: Path) -> None:
        """Load the weights with the largest held-out tau."""
        if self.best_tau == -math.inf:  # nothing held out, or too short for a round: a file there is another training's
            return
        if not (out / _BEST).is_file():
            raise DriftlabError(f"{out / _BEST} is gone: remove {out / _STATE} too, to train from the start")
        with open_tensors(out / _BEST, _ANEW) as file:
            tensors = sealed_tensors(file, out / _BEST, _ANEW)
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(_fitting(tensors, name, parameter, out / _BEST))

    def _fingerprint(self) -> str:
        """Hash of what a saved state must have been made with to be continued. Before the first step."""
        content = {
            "version": STATE_VERSION,
            "config": {k: v for k, v in dataclasses.asdict(self.config).items() if k != "save_every"},
            "autocast": self.autocast,
            "held_out": None if self.held_out is None else _texts(self.held_out),
            "drafter": {k: v for k, v in self.drafter.config.to_dict().items() if k not in ("ttt", "trained_length")},
            "initial": _digest(self.drafter.state_dict()),
            "data": _texts(self.trajectory),
            "recorded": self.trajectory.settings,
            "target": self.trajectory.spec.fingerprint,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save_state(self, out: Path, step: int) -> None:
        """Write weights, optimiser moments and the log, whole or not at all."""
        tensors = {}
        for name, parameter in self.named.items():
            tensors[f"weight.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        log = json.dumps([self.log, self._recent])
        metadata = {"step": str(step), "fingerprint": self.fingerprint, "log": log}
        save_sealed(out / _STATE, tensors, metadata)

    def resume(self, out: Path) -> int:
        """Restore the last state if there is one; return the steps done."""
        path = out / _STATE
        if not path.is_file():
            return 0
        with open_tensors(path, _ANEW) as file:
            metadata = file.metadata() or {}
            if metadata.get("fingerprint") != self.fingerprint:
                raise DriftlabError(
                    f"{path} is the state of another training (other settings, data or first weights): choose another folder, "
                    "or, to go on with that training, build the drafter anew as it was before its first step"
                )
            tensors = sealed_tensors(file, path, _ANEW)
        try:
            step, (self.log, self._recent) = int(metadata["step"]), json.loads(metadata["log"])
            taus = [row["held_out_tau"] for row in self.log if "held_out_tau" in row]
            self.best_tau = max((tau for tau in taus if not math.isnan(tau)), default=-math.inf)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DriftlabError(f"{path}: what it says of its steps cannot be read ({error!r}): {_ANEW}") from error
        for name, parameter in self.named.items():
            with torch.no_grad():
                parameter.copy_(_fitting(tensors, f"weight.{name}", parameter, path))
            count = _fitting(tensors, f"step.{name}", None, path)
            moments = {key: _fitting(tensors, f"{key}.{name}", parameter, path) for key in ("exp_avg", "exp_avg_sq")}
            # the step count too lies with the weights: the fused optimiser wants it there
            self.optimizer.state[parameter] = {
                "step": count.to(parameter.device),
                **{key: value.to(parameter) for key, value in moments.items()},
            }
        return step


def _fitting(tensors: dict[str, Tensor], name: str, like: Tensor | None, path: Path) -> Tensor:
    """Return a tensor of a state. Raises DriftlabError if it is not there or of another shape than ``like`` (None: [])."""
    shape = () if like is None else tuple(like.shape)
    if name not in tensors or tuple(tensors[name].shape) != shape:
        raise DriftlabError(f"{path} holds no {name} of shape {list(shape)}: {_ANEW}")
    return tensors[name]


def batch_loss(
    drafter: Drafter,
    batch: Batch,
    head_rows: Float[Tensor, "draft_vocab d_target"],
    config: TrainConfig,
    *,
    counts: Sequence[int] | None = None,
    offset: int = 0,
    seed: int = 0,
) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted loss of a batch and, by depth, its mean loss, acceptance rate (for losses that form it) and match.

    ``counts``: n_k, the rows that the means are over; default those of this batch. ``offset``: first start of the stride.
    ``seed``: of the sampled columns. The target's probabilities are computed once per batch; depth k reads them k rows
    further on. The match is left out where columns are sampled: an arg max over some of them would flatter it.
    """
    starts = batch.starts
    answer, index = answer_rows(batch)
    with torch.no_grad():
        target = TargetDistribution.of(
            batch.last_hidden[answer], batch.lse[answer], head_rows, negatives=config.negatives, seed=seed
        )
    total: Tensor | float = 0.0
    logged: dict[str, float] = {}
    deeper = None
    if config.stride > 1:
        deeper = torch.arange(min(offset, starts.rows.shape[1] - 1), starts.rows.shape[1], config.stride)
        deeper = deeper.to(starts.rows.device)
    for state, _ in unroll(drafter, batch, config.ttt, feed="text", deeper=deeper):
        starts = state.starts
        position = starts.rows + state.depth
        counting = starts.valid & (position + 1 < batch.lengths[:, None])
        rows = index.gather(1, position.minimum(batch.lengths[:, None] - 2))[counting]
        loss, accepted, best = draft_loss(
            state.normed[counting], drafter.lm_head.weight, target, rows, loss=config.loss, eta=config.eta
        )
        n = max(len(rows) if counts is None else counts[state.depth - 1], 1)
        total = total + config.depth_decay ** (state.depth - 1) * loss / n
        logged[f"loss_{state.depth}"] = float(loss.detach()) / n
        if config.loss in ("alpha", "lambda"):
            logged[f"alpha_{state.depth}"] = float(accepted) / n
        if target.columns is None:
            hit = drafter.to_target(best) == text_at(batch, position + 1)[counting]
            logged[f"match_{state.depth}"] = float(hit.sum()) / n
    return total, logged


def answer_rows(batch: Batch) -> tuple[Tensor, Int[Tensor, "batch pos"]]:
    """Return where a batch's answer rows P - 1..T - 2 are, [batch pos], and their numbers in that order."""
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    answer = (position >= batch.prompt_lengths[:, None] - 1) & (position <= batch.lengths[:, None] - 2)
    return answer, (answer.flatten().cumsum(0) - 1).view(answer.shape).clamp(min=0)


def held_out_numbers(drafter: Drafter, held_out: Trajectory, depth: int = HELD_OUT_DEPTH) -> dict[str, float]:
    """Replay a drafter on held-out text: tau at K = ``depth``, and the text-fed match at depths 1, 2, 4, ... up to it."""
    acceptance = accept(all_starts(drafter, held_out, depth), held_out)
    hits, of = acceptance.match.sum((0, 1)), acceptance.valid.sum((0, 1))
    numbers = {"held_out_tau": simulate(acceptance).tau}
    for k in (1 << i for i in range(depth.bit_length())):
        numbers[f"held_out_match_{k}"] = float(hits[k - 1] / of[k - 1])
    return numbers


def uses_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are the faster ones: on GPUs, and on CPUs with AMX or AVX-512 BF16 units."""
    if device.type != "cpu":
        return True
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def split(trajectory: Trajectory, share: float = 0.05) -> tuple[Trajectory, Trajectory]:
    """Return (training, held-out) views; which side a sequence is on depends on its prompt's tokens alone.

    So a prompt that occurs twice is on one side, and a longer recording of the same source keeps its split. Of a recording
    that is too short for the share one prompt is held out.

    Raises:
        DriftlabError: a share outside (0, 1), or nothing left to train on.
    """
    if not 0 < share < 1:
        raise DriftlabError(f"held-out share {share}: give a number between 0 and 1")
    numbers = [int.from_bytes(_prompt_digest(trajectory, i)[:4], "little") for i in range(len(trajectory))]
    limit = max(share * 2**32, min(numbers, default=0) + 1)
    sides: tuple[list[int], list[int]] = ([], [])
    for index, number in enumerate(numbers):
        sides[number < limit].append(index)
    if not all(sides):
        raise DriftlabError(
            f"holding out a share of {share} of {len(trajectory)} sequences leaves nothing to train on: record more"
        )
    return trajectory.subset(sides[0]), trajectory.subset(sides[1])


def _pooled(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Pool what some steps logged: by-depth values over all their rows (NaN where there was none), the rest by step."""
    pooled: dict[str, float] = {}
    for name in steps[0]:
        kind, _, depth = name.rpartition("_")
        if kind == "rows":
            continue
        weights = [step.get(f"rows_{depth}", 1) for step in steps]
        total = sum(weights)
        pooled[name] = sum(w * s[name] for w, s in zip(weights, steps, strict=True)) / total if total else math.nan
    return pooled


def schedule(step: int, steps: int, warmup: float) -> float:
    """Return the factor on the learning rate: linear warm-up, then a cosine from 1 to 0.1."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    share = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


def _texts(trajectory: Trajectory) -> list[object]:
    """What tells the sequences of one recording from those of another."""
    names = [(e.id, e.length, e.prompt_length) for e in trajectory.entries]
    return [names, _digest({str(i): trajectory.tokens(i) for i in range(len(trajectory))})]


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
