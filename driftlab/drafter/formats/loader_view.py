"""What the rules of all engines share: sizes, layer ids, tables, names; a part of :mod:`rules`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from driftlab.drafter.formats.loader_rope import rope_findings
from driftlab.drafter.formats.loader_tensors import Shape, Sizes, whole

Shapes = dict[str, Shape]

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "tie_word_embeddings")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_RANKS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass
class View:
    """Findings, and the sizes if config.json gives them."""

    findings: list[str] = field(default_factory=list)
    sizes: Sizes | None = None


def has_sizes(config: dict[str, Any]) -> bool:
    """Whether config.json says how large things are."""
    return all(whole(config.get(name)) for name in _NEEDED)


def common(config: dict[str, Any], form: str) -> View:
    """What all engines want of a flat config.json."""
    view = View()
    view.findings += [f"{name}: {config.get(name)!r} in config.json" for name in _NEEDED if not whole(config.get(name))]
    if not isinstance(config.get("rms_norm_eps"), float) or config["rms_norm_eps"] <= 0:
        view.findings.append(f"rms_norm_eps: {config.get('rms_norm_eps')!r}; without it engines take a default")
    if form != "safeailab" and not whole(config.get("max_position_embeddings")):
        view.findings.append("max_position_embeddings: not said; transformers takes 2048")
    if config.get("hidden_act", "silu") != "silu":
        view.findings.append(f"hidden_act: {config['hidden_act']!r}, drafters have silu only")
    for name in (*FLAGS, "attention_bias", "mlp_bias"):
        if not isinstance(config.get(name, False), bool):
            view.findings.append(f"{name}: {config[name]!r} is not true or false")
    draft, vocab = config.get("draft_vocab_size"), config.get("vocab_size")
    if draft is not None and (not whole(draft) or (whole(vocab) and draft > vocab)):
        view.findings.append(f"draft_vocab_size: {draft!r} is not in 1..vocab_size")
    view.findings += rope_findings(config, form)
    return view


def sizes_of(config: dict[str, Any], *, view: View, latent: bool = False, **more: Any) -> Sizes | None:
    """Return the sizes that config.json gives, ``more`` of them as the engine takes them; None if it does not give them."""
    if not has_sizes(config):
        return None
    ranks = {name: config.get(name) for name in _RANKS} if latent else None
    if ranks is not None and not all(whole(value) for value in ranks.values()):
        view.findings.append(f"MLA needs {', '.join(_RANKS)} as whole numbers; here {ranks}")
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    vocab = config["vocab_size"]
    draft = config.get("draft_vocab_size")
    more.setdefault("fc_norm", bool(config.get("fc_norm")))
    return Sizes(
        hidden=hidden,
        inner=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        layers=config.get("num_hidden_layers", 1),
        vocab=vocab,
        draft_vocab=draft if whole(draft) else vocab,
        target_hidden=config.get("target_hidden_size") or hidden,
        latent=ranks,
        **more,
    )


def tables(found: Shapes, sizes: Sizes, view: View, engine: str) -> None:
    """Embedding, head and vocabulary maps: when they may and when they must be there."""
    sizes.extra["embed_tokens.weight"] = (sizes.vocab, sizes.hidden)
    sizes.extra["lm_head.weight"] = (sizes.draft_vocab, sizes.hidden)
    if sizes.hidden != sizes.target_hidden and "embed_tokens.weight" not in found:
        view.findings.append(f"embed_tokens.weight: not in the file, and the target's is {sizes.target_hidden} wide")
    if sizes.reduced:
        sizes.extra["d2t"] = (sizes.draft_vocab,)
        for name, why in (
            ("lm_head.weight", "a head for part of the vocabulary cannot be lent"),
            ("d2t", "draft ids mean nothing"),
        ):
            if name not in found:
                view.findings.append(f"{name}: not in the file; {why}")
    elif "d2t" in found and engine != "vLLM":
        sizes.extra["d2t"] = (sizes.draft_vocab,)


def first_layer(name: str) -> str:
    """Return a tensor's name with layers.0 for midlayer, its other name."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def renamed_shapes(shapes: Shapes, rename: Callable[[str], str], view: View) -> Shapes:
    """Return the shapes under new names; two old ones for a new one are a finding."""
    found: Shapes = {}
    for name, shape in shapes.items():
        if rename(name) in found:
            view.findings.append(f"{name}: a second name of {rename(name)}")
        found[rename(name)] = shape
    return found


def check_ids(ids: Any, sizes: Sizes, view: View) -> None:
    """Check layer ids against the number of states that fc takes."""
    if not ids:
        if sizes.states != 3:
            view.findings.append(
                f"{IDS}: not said, and engines capture three states by default, fc takes {sizes.states}"
            )
        return
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        view.findings.append(f"{IDS}: {ids} are not all layers >= 0")
    elif list(ids) != sorted(set(ids)):
        view.findings.append(f"{IDS}: {ids} do not ascend; engines concatenate the states in the order of layers")
    if len(ids) != sizes.states:
        view.findings.append(f"{IDS}: {len(ids)} ids, fc takes {sizes.states} states")
