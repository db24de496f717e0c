"""One side of ``bench_training.py``, in a process of its own: a training step of driftlab or of speculators.

Started by that script with a JSON job as its argument, under the interpreter that has the library. Both sides make the
same tables, first weights, tokens and target states from the same seed, and take the same optimiser with the same clip.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bench_common import peak_mib, serve

AUX = 3
THETA, EPS = 100_000.0, 1e-5
DECAY, CLIP = 0.8, 1.0
LIVE = 3000
"""columns of the draft vocabulary that carry probability in some row (about as many as in 1,024 tokens of text)"""


def build(job: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return the step of the job's library."""
    import torch

    make = {"driftlab": driftlab_side, "speculators": speculators_side}[job["library"]]
    prepare = make(job)  # imports
    baseline = peak_mib()
    parameters, loss_of, tokens = prepare(random_data(job))
    matrices = [p for p in parameters if p.ndim > 1]
    gains = [p for p in parameters if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": gains, "weight_decay": 0.0}],
        lr=1e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    autocast = job["precision"] == "bfloat16"
    count = sum(p.numel() for p in parameters)

    def step() -> dict[str, Any]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return {
            **{"loss": float(loss.detach()), "tokens": tokens, "trained": count, "baseline_mib": baseline},
            **{"threads": torch.get_num_threads(), "torch": torch.__version__},
        }

    return step


def random_data(job: dict[str, Any]) -> SimpleNamespace:
    """Tables, first weights, tokens and states from the seed: the same on both sides."""
    import torch

    generator = torch.Generator().manual_seed(job["seed"])
    width, heads, kv_heads, d_head = job["hidden"], job["heads"], job["kv_heads"], job["hidden"] // job["heads"]

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.empty(shape).normal_(0, scale, generator=generator)

    draft_vocab = torch.randperm(job["vocab"], generator=generator)[: job["draft_vocab"]].sort().values
    embed = normal(job["vocab"], width, scale=0.1)
    head = torch.zeros(job["vocab"], width)
    live = draft_vocab[torch.randperm(len(draft_vocab), generator=generator)[:LIVE]]
    head[live] = normal(len(live), width, scale=3.5 / width**0.5)
    shapes = {
        "fc.weight": (width, AUX * width),
        "layers.0.self_attn.q_proj.weight": (heads * d_head, 2 * width),
        "layers.0.self_attn.k_proj.weight": (kv_heads * d_head, 2 * width),
        "layers.0.self_attn.v_proj.weight": (kv_heads * d_head, 2 * width),
        "layers.0.self_attn.o_proj.weight": (width, heads * d_head),
        "layers.0.mlp.gate_proj.weight": (job["intermediate"], width),
        "layers.0.mlp.up_proj.weight": (job["intermediate"], width),
        "layers.0.mlp.down_proj.weight": (width, job["intermediate"]),
    }
    return SimpleNamespace(
        draft_vocab=draft_vocab,
        embed=embed,
        head=head,
        weights={name: normal(*shape, scale=0.02) for name, shape in shapes.items()},
        tokens=torch.randint(job["vocab"], (1, job["tokens"]), generator=generator),
        aux=normal(1, job["tokens"], AUX, width, scale=1.0),
        last=normal(1, job["tokens"], width, scale=1.0),  # before the target's final norm, whose gain is one
    )


def driftlab_side(job: dict[str, Any]) -> Callable[[SimpleNamespace], tuple[Any, Any, int]]:
    """driftlab: ``batch_loss`` of one sequence whose every row is a start."""
    import torch

    from driftlab import Drafter, DrafterConfig, TrainConfig
    from driftlab.recorded import Batch, TargetHead
    from driftlab.training import batch_loss

    def prepare(data: SimpleNamespace) -> tuple[Any, Any, int]:
        config = DrafterConfig(
            **{"hidden_size": job["hidden"], "target_hidden_size": job["hidden"], "aux_layers": (2, 15, 27)},
            **{"intermediate_size": job["intermediate"], "head_dim": job["hidden"] // job["heads"]},
            **{"num_attention_heads": job["heads"], "num_key_value_heads": job["kv_heads"]},
            **{"vocab_size": job["vocab"], "draft_vocab_size": job["draft_vocab"], "lm_head": "target"},
            **{"rope_theta": THETA, "rms_norm_eps": EPS, "fc_norm": False, "norm_output": False},
        )
        lent = SimpleNamespace(head=TargetHead(data.embed, data.head, torch.ones(job["hidden"])))
        drafter = Drafter(config, lent, draft_vocab=data.draft_vocab)
        load(drafter, data.weights)
        last = data.last * torch.rsqrt(data.last.square().mean(-1, keepdim=True) + EPS)
        rows = data.head[data.draft_vocab]
        batch = Batch(
            tokens=data.tokens,
            aux=data.aux,
            last_hidden=last,
            lse=(last @ rows.T).logsumexp(-1),  # recorded; here over the draft vocabulary, as speculators has it
            lengths=torch.tensor([job["tokens"]]),
            prompt_lengths=torch.tensor([1]),
            ids=("random",),
            finish=("length",),
            sinks=(0,),
        )
        settings = TrainConfig(
            ttt=job["ttt"], loss="kl", depth_decay=DECAY, negatives=job["negatives"], stride=job["stride"]
        )
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        return parameters, lambda: batch_loss(drafter, batch, rows, settings)[0], job["tokens"]

    return prepare


def speculators_side(job: dict[str, Any]) -> Callable[[SimpleNamespace], tuple[Any, Any, int]]:
    """speculators: ``Eagle3DraftModel.forward`` with eager attention and eager loss, as its trainer calls it."""
    import torch
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig, SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    def prepare(data: SimpleNamespace) -> tuple[Any, Any, int]:
        layer = LlamaConfig(
            **{"hidden_size": job["hidden"], "intermediate_size": job["intermediate"], "num_hidden_layers": 1},
            **{"num_attention_heads": job["heads"], "num_key_value_heads": job["kv_heads"]},
            **{"vocab_size": job["vocab"], "rms_norm_eps": EPS, "head_dim": job["hidden"] // job["heads"]},
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            max_position_embeddings=8192,
        )
        layer._attn_implementation = "eager"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=job["draft_vocab"],
            eagle_aux_hidden_state_layer_ids=[2, 15, 27],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job["ttt"])],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        model = Eagle3DraftModel(config).train()
        t2d = torch.zeros(job["vocab"], dtype=torch.bool)
        t2d[data.draft_vocab] = True
        model.load_vocab_mappings(t2d, data.draft_vocab - torch.arange(job["draft_vocab"]))
        rows = data.head[data.draft_vocab]
        load(
            model,
            data.weights
            | {"embed_tokens.weight": data.embed, "lm_head.weight": rows, "verifier_lm_head.weight": rows}
            | {"verifier_norm.weight": torch.ones(job["hidden"])},
        )
        count = job["tokens"]
        shifted = shift_batch(
            {
                "input_ids": data.tokens[0],
                "hidden_states": data.aux[0].flatten(1),
                "verifier_last_hidden_states": data.last[0],
                # the last row would predict a token beyond the text, which driftlab does not count
                "loss_mask": torch.arange(count) < count - 1,
                "lengths": torch.tensor([count]),
                "position_ids": torch.arange(count),
            }
        )
        del shifted["lengths"]
        inputs = {name: value[None] for name, value in shifted.items()}
        inputs["document_ids"] = torch.zeros_like(inputs["input_ids"])
        loss_config = resolve_loss_config("kl_div", "eager")

        def loss_of() -> torch.Tensor:
            return model(**inputs, ttt_steps=job["ttt"], ttt_step_loss_decay=DECAY, loss_config=loss_config)[1]

        return [p for p in model.parameters() if p.requires_grad], loss_of, count

    return prepare


def load(model: Any, weights: dict[str, Any]) -> None:
    """Copy the weights in by name; gains stay at one."""
    import torch

    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(value)
        untouched = [n for n, p in model.named_parameters() if p.requires_grad and n not in weights]
        for name in untouched:
            if named[name].ndim != 1:
                raise SystemExit(f"{name} {list(named[name].shape)} has no counterpart in the other library")
            named[name].fill_(1.0)


if __name__ == "__main__":
    serve(build)
