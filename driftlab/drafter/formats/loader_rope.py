"""Rules on the rotary settings of config.json, engine by engine; a part of :mod:`rules`."""

from __future__ import annotations

from typing import Any

_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
KINDS = {
    "vllm": ("default", "linear", "llama3", "yarn"),
    "sglang": ("default", "linear", "llama3", "yarn"),
    "speculators": ("default", "linear", "llama3", "yarn"),
    "safeailab": ("default", "linear", "dynamic"),
}
"""kinds that mean in the engine what they mean in transformers"""


def rope_findings(values: dict[str, Any], form: str) -> list[str]:
    """Return findings on rope_theta, rope_scaling and rope_parameters."""
    older, newer = dict(values.get("rope_scaling") or {}), dict(values.get("rope_parameters") or {})
    findings = _disagreements(values, older, newer)
    block = newer or older
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in KINDS[form]:
        findings.append(f"rope: {kind!r} is not read as it is meant, only {', '.join(KINDS[form])}")
    absent = [name for name in _NEEDED.get(kind, ()) if block.get(name) is None]
    if absent:
        findings.append(f"rope: {kind} without {', '.join(absent)}")
    return findings + (_safeailab(values, older, newer) if form == "safeailab" else [])


def _disagreements(values: dict[str, Any], older: dict[str, Any], newer: dict[str, Any]) -> list[str]:
    findings = []
    thetas = {float(t) for t in (values.get("rope_theta"), newer.get("rope_theta"), older.get("rope_theta")) if t}
    if len(thetas) > 1:
        findings.append(f"rope: bases {sorted(thetas)} contradict each other")
    if "type" in older and older.get("rope_type", older["type"]) != older["type"]:
        findings.append("rope: rope_scaling has two kinds")
    if newer and "rope_scaling" in values:
        said = {name: value for name, value in older.items() if name not in ("type", "rope_theta")}
        said["rope_type"] = older.get("rope_type") or older.get("type") or "default"
        new = {name: value for name, value in newer.items() if name not in ("type", "rope_theta")}
        new.setdefault("rope_type", newer.get("type") or "default")
        wrong = sorted(name for name in set(said) | set(new) if said.get(name) != new.get(name))
        if wrong:
            findings.append(f"rope: rope_scaling and rope_parameters differ in {', '.join(wrong)}")
    return findings


def _safeailab(values: dict[str, Any], older: dict[str, Any], newer: dict[str, Any]) -> list[str]:
    findings = []
    if older and set(older) != {"type", "factor"}:
        findings.append(
            f"rope_scaling has {', '.join(sorted(older))}: SafeAILab's code reads type and factor, and only them"
        )
    if older and values.get("rope_theta", 10000) != 10000:
        findings.append("rope_theta: SafeAILab's scaled rotary embeddings have base 10000 whatever it says")
    if newer and "rope_theta" not in values and newer.get("rope_theta", 10000) != 10000:
        findings.append("rope_parameters: SafeAILab's code does not read them and takes base 10000: write rope_theta")
    return findings
