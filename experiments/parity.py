"""Does a loaded drafter compute what its own engine computes?

    python experiments/parity.py [--depth 5]

Four judges, none of which shares code with the package:

a) values that SafeAILab's and TorchSpec's own code computed on tiny random drafters (tests/data/oracles);
b) the same from speculators (tests/data/oracles/speculators);
c) transformers' DeepseekV3Attention in the place of latent attention, on TorchSpec's MLA folders;
d) forwards written by hand, in float64 and without a cache, of each engine's rules on a tiny folder in that project's layout
   (tests/format_folders.py, engine_forwards.py, engine_rules.py): text-fed and own-fed from every row.

A difference is the largest |ours - theirs| over fused states, logits and feedback of all depths and rows, each divided by the
largest |theirs| of its kind where that is above 1. Drafters are run as loaded, in float32; against (c) and (d) in float64 too,
where only the rules and not the rounding can differ. In (d) the greedy tokens must be the same as well. The last line is the
verdict: the largest float32 difference; above 1e-5 the exit code is 1.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import load_file
from torch import Tensor

from driftlab import Drafter
from driftlab.segments import Starts

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import format_tensors as formats  # noqa: E402 (found by the path set above)
from engine_forwards import Attend, Drafted, Engine  # noqa: E402 (found by the path set above)
from format_folders import FOLDERS  # noqa: E402 (found by the path set above)

ORACLES = TESTS / "data" / "oracles"
BOUND = 1e-5


@dataclass(frozen=True)
class Line:
    """One comparison: float32 as loaded and, where the judge is exact, float64."""

    where: str
    difference: float
    exact: float | None = None
    same_tokens: bool = True

    def words(self) -> str:
        """The line as printed."""
        exact = "" if self.exact is None else f"  float64 {self.exact:.1e}"
        return f"{self.where:<44} float32 {self.difference:.1e}{exact}{'' if self.same_tokens else '  OTHER TOKENS'}"


@torch.no_grad()
def main(depth: int = 5) -> None:
    """Compare, print one line each; the last line is the verdict."""
    torch.set_num_threads(1)
    lines = []
    for part in (engine_values(), speculators_values(), transformers_attention(depth), by_hand(depth)):
        for line in part:
            print(line.words(), flush=True)
            lines.append(line)
    worst = max(lines, key=lambda line: line.difference)
    print(f"{len(lines)} comparisons; largest difference in float64: {max(line.exact or 0.0 for line in lines):.1e}")
    print(f"largest difference: {worst.difference:.1e} ({worst.where})")
    if not worst.difference < BOUND or not all(line.same_tokens for line in lines):
        raise SystemExit(1)


# ---- a), b): values of engines' own code


def engine_values() -> Iterator[Line]:
    """SafeAILab and TorchSpec."""
    values = load_file(ORACLES / "safeailab" / "expected.safetensors")
    states, ids = values["aux"].view(len(values["aux"]), 3, -1), values["ids"][1:]
    drafter = Drafter.load(ORACLES / "safeailab", num_layers=12).eval()
    ours = drafted(drafter, ids, states, 6, own=True)
    pairs = [(ours.logits[0], values["logits_prefill"][0]), (ours.feedback[0], values["hidden_prefill"][0])]
    pairs += [(ours.logits[:, -1], values["chain_logits"]), (ours.feedback[:, -1], values["chain_feedback"])]
    same = torch.equal(ours.tokens[:, -1], values["chain_tokens"])
    yield Line("a) SafeAILab's values, greedy chain of 6", largest(pairs), same_tokens=same)
    for folder in sorted(ORACLES.glob("torchspec_*")):
        values = load_file(folder / "expected.safetensors")
        states = values["aux"].view(len(values["aux"]), 3, -1)
        yield _forced(
            f"a) TorchSpec's values, {folder.name}", Drafter.load(folder), values["ids_shifted"], states, values, "ttt_"
        )


def speculators_values() -> Iterator[Line]:
    """speculators, as far as its values are there."""
    folders = sorted((ORACLES / "speculators").glob("*/expected.safetensors"))
    if not folders:
        print(
            f"b) no values of speculators: {ORACLES / 'speculators'} is absent (tests/speculators_oracle.py writes them)"
        )
    for path in folders:
        values = load_file(path)
        states = values["aux"].view(len(values["aux"]), 3, -1)
        name = f"b) speculators' values, {path.parent.name}"
        yield _forced(name, Drafter.load(path.parent), values["tokens"], states, values, "")


def _forced(name: str, drafter: Drafter, ids: Tensor, states: Tensor, values: dict[str, Tensor], prefix: str) -> Line:
    theirs = values[f"{prefix}logits"], values[f"{prefix}feedback"]
    ours = drafted(drafter.eval(), ids, states, len(theirs[0]), own=False)
    fused = drafter.fuse(states[None])[0], values["fused"]
    return Line(name, largest([fused, (ours.logits, theirs[0]), (ours.feedback, theirs[1])]))


# ---- c), d): engines by hand


def transformers_attention(depth: int) -> Iterator[Line]:
    """Latent attention by transformers, everything around it by hand."""
    for name in ("torchspec_mla", "torchspec_mla_no_q_lora"):
        yield _compare(f"c) DeepseekV3Attention, {name}", name, depth, deepseek_attention)


def by_hand(depth: int) -> Iterator[Line]:
    """Every folder against the engine that it is for."""
    for name in FOLDERS:
        yield _compare(f"d) {name}", name, depth)


def _compare(where: str, name: str, depth: int, attend: Attend | None = None) -> Line:
    folder = FOLDERS[name]
    given, ids = formats.lent(folder.family), formats.text()
    with tempfile.TemporaryDirectory() as temporary:
        path = folder.write(Path(temporary) / name)
        engine = folder.engine(path, given)
        with warnings.catch_warnings():  # two files do not say their rotary base: that the target has another is meant
            warnings.filterwarnings("ignore", message="rope_theta: 10000")
            drafter = Drafter.load(path, formats.target_of(given), **folder.given).eval()
    assert drafter.config.aux_layers == engine.boundaries == folder.boundaries, (name, drafter.config.aux_layers)
    engine = engine if attend is None else replace(engine, attend=attend)
    fused = engine.fused()
    theirs = [engine.every_start(ids, fused, depth, own=own) for own in (False, True)]
    found = []
    for dtype in (torch.float32, torch.float64):
        drafter = drafter.to(dtype)
        states = engine.states.to(dtype)
        ours = [drafted(drafter, ids, states, depth, own=own) for own in (False, True)]
        pairs = [(drafter.fuse(states[None])[0], fused)]
        for mine, judge in zip(ours, theirs, strict=True):
            pairs += [(mine.logits, judge.logits), (mine.feedback, judge.feedback)]
        same = all(torch.equal(mine.tokens, judge.tokens) for mine, judge in zip(ours, theirs, strict=True))
        found.append((largest(pairs), same))
    return Line(where, found[0][0], found[1][0], found[0][1] and found[1][1])


def deepseek_attention(engine: Engine, layer: int, x: Tensor) -> Tensor:
    """The attention of ``layer`` by transformers. Its queries read 2H, so it is built that wide, and its output cut to H."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config, start = engine.config, f"layers.{layer}.self_attn."
    names = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    scaling = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    scaling["rope_type"] = scaling.pop("type", scaling["rope_type"])
    theirs = DeepseekV3Config(
        **{name: config[name] for name in names},
        **{"hidden_size": x.shape[-1], "num_key_value_heads": config["num_attention_heads"], "attention_bias": False},
        **{"max_position_embeddings": config["max_position_embeddings"], "attn_implementation": "eager"},
        rope_parameters={**scaling, "rope_theta": config["rope_theta"]},
    )
    block = DeepseekV3Attention(theirs, layer).double().eval()
    block.o_proj = torch.nn.Linear(block.o_proj.in_features, config["hidden_size"], bias=False).double()
    weights = {name.removeprefix(start): t for name, t in engine.tensors.items() if name.startswith(start)}
    # their latent norms have 1e-6 built in; ours is the drafter's
    for norm in (module for name, module in block.named_modules() if name.endswith("a_layernorm")):
        norm.variance_epsilon = config["rms_norm_eps"]
    block.load_state_dict(weights)
    positions = torch.arange(len(x))[None]
    rotation = DeepseekV3RotaryEmbedding(theirs)(x[None], positions)
    mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    return block(x[None], position_embeddings=rotation, attention_mask=mask)[0][0]


# ---- ours


def drafted(drafter: Drafter, ids: Tensor, states: Tensor, depth: int, *, own: bool) -> Drafted:
    """Drafts from every row: ``ids [row]`` holds the token after each row, ``states [row, aux, width]``."""
    rows = len(ids)
    text = torch.cat([ids, ids.new_zeros(depth)])
    index = torch.arange(rows)[None]
    starts = Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("text",))
    state = drafter.first(ids[None], states[None], starts)
    logits, feedback, tokens = [], [], []
    for k in range(depth):
        logits.append(drafter.logits(state.normed)[0])
        feedback.append(state.feedback[0])
        tokens.append(drafter.to_target(logits[-1].argmax(-1)))
        if k + 1 < depth:
            state = drafter.next(state, (tokens[-1] if own else text[k + 1 : k + 1 + rows])[None])
    return Drafted(torch.stack(logits), torch.stack(feedback), torch.stack(tokens))


def largest(pairs: list[tuple[Any, Any]]) -> float:
    """The largest difference of pairs (ours, theirs), relative to the largest of theirs where that is above 1."""
    return max(float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)) for ours, theirs in pairs)


if __name__ == "__main__":
    tyro.cli(main)
