"""What ``driftlab probe`` says: tables and notes of what :mod:`driftlab.probing` measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from driftlab.breakdown import buckets
from driftlab.drift import Verdict
from driftlab.errors import DriftlabError
from driftlab.intervals import weighted_mean
from driftlab.perturbations import Perturbation, token_diff
from driftlab.plotting_probe import plain_or
from driftlab.probing import Probed
from driftlab.prompts import Prompt
from driftlab.stability import compare_stability

LONG_DIFF = 250_000
"""product of the lengths of what differs between two prompts, beyond which their tokens are not matched one by one"""
_DIFF_LINE = re.compile(r"(.) +(\d+) +(\d+) (.*)", re.DOTALL)
_MEASURES = (
    *("drift_tv", "drift_tv_null", "drift_tv_excess", "drift_js", "sink_loss", "sink_loss_relative", "self_gain"),
    *("recent_gain", "entropy_relative_gain", "growth", "log_rms_slope", "cosine_successive", "cosine_imitation"),
    *("spread_kept", "effective_rank"),
)
_BY_HEAD = ("mass_sink", "mass_self", "recent", "entropy_relative")

NOTES = [
    "tau: emitted tokens / verify rounds, bonus token included, over the rounds that a decoder makes; a round cut by the "
    "length limit is left out. Without a drafter it is 1. It counts rounds, not time: a speed-up is tau x (time of a decoding "
    "step / time of a round), which the drafter's cost and the batch decide.",
    "A drafter against none, a drafter against another and a setting against plain are three different numbers and stand in "
    "three tables. Differences are of tau on the same prompts; intervals (95 %, bootstrap over prompts) and p (relabelling "
    "prompt by prompt, adjusted by Holm for the number of lines of its table) are different methods. "
    "mdd: smallest difference that these prompts show in four of five cases.",
    "Every quantity is defined in docs/method.md of the project, under its name. Drift is measured fed the text, at twice the "
    "depth that training unrolled to, which may be deeper than K: K is what a decoder drafts in a round.",
    "Match is over all starts and fed the text; mass, entropy and magnitude are over all starts. SELF grows with the number of "
    "own keys by itself: read it beside its null, the same keys at depth 1.",
]


def tables(found: Probed) -> dict[str, pd.DataFrame]:
    """Return the tables by title, the most important first."""
    made = {"tau: a drafter against none (none: 1)": tau_table(found)}
    for key, table in found.versus.items():
        made[f"tau: a drafter against another, plain{_under(found, key)}"] = table
    if found.comparisons:
        lines = [_named(t, d, i) for (d, i), t in found.comparisons.items()]
        made["tau: a setting against plain"] = _settings(pd.concat(lines, ignore_index=True))
    if found.stabilities:
        lines = [s.table().assign(drafter=d, setting=plain_or(key)) for (d, key), s in found.stabilities.items()]
        text = text_table(found)
        whole = pd.concat(lines, ignore_index=True).merge(text, on="template", how="left")
        first = ["drafter", "setting", "template"]
        made["Stability: tau under each input, loss against chat, and the target's own text"] = whole[
            [*first, *(name for name in whole.columns if name not in first)]
        ]
        made["Stability of each drafter over these inputs"] = stability_table(found)
        if (table := stability_differences(found)) is not None:
            made["Stability: a drafter less the first, plain"] = table
    else:
        made["The target's own text"] = text_table(found)
    made["Drift: verdict"] = verdict_table(found)
    if (signs := sign_table(found)) is not None:
        made["Drift: signs and thresholds"] = signs
    if not (measures := drift_table(found)).empty:
        made["Drift: measures, at the trained depth and the deepest looked at"] = measures
    made["tau by context, plain"] = context_table(found)
    made[f"By depth, plain, {found.plain_input}"] = depth_table(found)
    return made


def tau_table(found: Probed) -> pd.DataFrame:
    """tau of every run: ``drafter``, ``template``, ``setting``, ``tau``, ``low``, ``high``, ``rounds``, ``prompts``."""
    lines = []
    for run, replay in found.replays.items():
        interval = replay.tau_interval()
        rounds = np.asarray(replay.verify_rounds, dtype="float64")
        numbers = {"tau": interval.value, "low": interval.low, "high": interval.high}
        counts = {"rounds": round(float(rounds.sum())), "prompts": int((rounds > 0).sum())}
        where = {"drafter": run.drafter, "template": run.input, "setting": plain_or(run.setting)}
        lines.append({**where, **numbers, **counts})
    return pd.DataFrame(lines)


def text_table(found: Probed) -> pd.DataFrame:
    """The target's perplexity and repetition under each input: a broken text is not a broken drafter."""
    rows = found.rows[found.rows["drafter"] == ""]
    means = weighted_mean(rows[rows["quantity"] != "nll"], ["template", "quantity"])
    wide = means.pivot(index="template", columns="quantity", values="value")
    wide = wide.reindex(list(found.inputs))[
        [name for name in ("perplexity", "repeated_ngrams", "periodic_tail") if name in wide]
    ]
    return wide.rename_axis(columns=None).reset_index()


def stability_table(found: Probed) -> pd.DataFrame:
    """Worst input, its tau, spread and relative losses with intervals, and what chance alone would make of them."""
    lines = []
    for (drafter, setting), one in found.stabilities.items():
        line: dict[str, Any] = {"drafter": drafter, "setting": plain_or(setting), "worst": one.worst}
        for name, interval in one.summary().items():
            short = name.removeprefix("tau_")
            line |= {short: interval.value, f"{short}_low": interval.low, f"{short}_high": interval.high}
        lines.append({**line, "selection": one.selection, "spread_null": one.spread_null()})
    return pd.DataFrame(lines)


def stability_differences(found: Probed) -> pd.DataFrame | None:
    """Which drafter is more stable: the summary of each less that of the first, plain, paired over prompts."""
    plain = {drafter: one for (drafter, setting), one in found.stabilities.items() if not setting}
    (base, first), *others = plain.items() if plain else [("", None)]
    lines = []
    for drafter, one in others:
        try:
            differences = compare_stability(one, first)
        except DriftlabError:  # the two have no rounds in common
            continue
        line: dict[str, Any] = {"drafter": drafter, "base": base}
        for name, interval in differences.items():
            short = name.removeprefix("tau_")
            line |= {short: interval.value, f"{short}_low": interval.low, f"{short}_high": interval.high}
        lines.append(line)
    return pd.DataFrame(lines) if lines else None


def drift_table(found: Probed) -> pd.DataFrame:
    """Pooled measures of drift with intervals, plain, first input: at the depth of training and the deepest that was run."""
    rows = plain_rows(found)
    rows = rows[rows["quantity"].isin(_MEASURES) & (rows["prompt"] == "") & (rows["depth"] > 0)]
    lines = []
    for drafter, mine in rows.groupby("drafter", sort=False, observed=True):
        depths = {int(mine["depth"].max()), found.config.trained(found.drafters[str(drafter)])}
        lines.append(mine[mine["depth"].isin(depths)])
    shown = pd.concat(lines) if lines else rows
    several = shown["layer"].nunique() > 2  # -1: of all layers, or of what has none
    keys = ["drafter", "depth", *(["layer"] if several else []), "quantity", "window"]
    shown = shown.sort_values("depth", kind="stable")[[*keys, "value", "low", "high"]].reset_index(drop=True)
    return shown.assign(window=[str(width) if width else "" for width in shown["window"]])


def verdict_table(found: Probed) -> pd.DataFrame:
    """The word for each drafter, the signs that decide, and the depths they were taken at; or why there is none."""
    lines = []
    for name, one in found.verdicts.items():
        if isinstance(one, str):
            lines.append({"drafter": name, "verdict": "none", "because": one, "trained": None, "beyond": None})
            continue
        because = ", ".join(one.because)
        lines.append(
            {"drafter": name, "verdict": one.word, "because": because, "trained": one.trained, "beyond": one.beyond}
        )
    return pd.DataFrame(lines).astype({"trained": "Int64", "beyond": "Int64"})


def sign_table(found: Probed) -> pd.DataFrame | None:
    """Each sign with its interval, the thresholds between which it is the same, and how it came out."""
    lines = [
        {
            "drafter": name,
            "sign": s.name,
            **s.interval._asdict(),
            "same_from": s.least,
            "same_to": s.most,
            "state": s.state,
        }
        for name, one in found.verdicts.items()
        if isinstance(one, Verdict)
        for s in one.signs
    ]
    return pd.DataFrame(lines) if lines else None


def context_table(found: Probed) -> pd.DataFrame:
    """tau of the plain drafter by context length; what lies beyond the trained length is marked where that is known."""
    lines = []
    for run, replay in found.replays.items():
        if not run.setting:
            length = found.drafters[run.drafter].config.trained_length
            table = buckets(replay, "context", trained_length=length).drop(columns="by")
            lines.append(_named(table, run.drafter, run.input).assign(trained_length=length or "unknown"))
    return pd.concat(lines, ignore_index=True)


def depth_table(found: Probed) -> pd.DataFrame:
    """Means by depth of what was probed, and match: plain, first input; the rows hold all runs."""
    wanted = ("match", "accept_conditional", "entropy", "entropy_relative", "recent")
    rows = plain_rows(found)
    rows = rows[rows["quantity"].isin(wanted) | rows["quantity"].str.startswith(("mass_", "rms_"))]
    rows = rows[(rows["depth"] > 0) & (rows["prompt"] != "")]
    keys = ["drafter", "quantity", "window"]
    means = weighted_mean(rows, [*keys, "depth"])
    wide = means.pivot(index=keys, columns="depth", values="value").rename_axis(columns=None).reset_index()
    wide = wide.rename(columns={d: f"d{d}" for d in means["depth"].unique()})
    return wide.assign(window=[str(width) if width else "" for width in wide["window"]])


def head_table(found: Probed, heads: Sequence[int]) -> pd.DataFrame:
    """Masses and entropy of single heads at depths 1 and K, plain, first input."""
    rows = plain_rows(found)
    last = int(rows.loc[rows["quantity"] == "mass_sink", "depth"].max())
    rows = rows[rows["quantity"].isin(_BY_HEAD) & rows["head"].isin(list(heads)) & rows["depth"].isin([1, last])]
    rows = rows[(rows["window"] == 0) | (rows["window"] == found.config.recent[0])] if found.config.recent else rows
    means = weighted_mean(rows, ["drafter", "layer", "head", "quantity", "depth"])
    means = means.assign(column=means["quantity"].str.removeprefix("mass_") + "_d" + means["depth"].astype(str))
    wide = means.pivot(index=["drafter", "layer", "head"], columns="column", values="value").rename_axis(columns=None)
    order = [f"{name.removeprefix('mass_')}_d{depth}" for name in _BY_HEAD for depth in dict.fromkeys((1, last))]
    return wide[[name for name in order if name in wide]].reset_index()


def diff_table(perturbation: Perturbation, prompts: Sequence[Prompt], tokenizer: Any) -> pd.DataFrame:
    """Token diff of the first prompt: ``mark`` (+ added, - removed), ``place``, ``id``, ``token``. What is too long to be
    matched token by token is cut.
    """
    one = perturbation.apply(list(prompts), tokenizer)[0]
    before, after, cut = one.plain, one.ids, ""
    if _inner(before, after) > LONG_DIFF:
        size = math.isqrt(LONG_DIFF)
        cut = f"only the first {size} tokens of each prompt were compared; they are {len(before)} and {len(after)} long"
        before, after = before[:size], after[:size]
    lines = []
    for line in token_diff(before, after, tokenizer):
        parts = _DIFF_LINE.fullmatch(line)
        mark, place, token, text = parts.groups() if parts else ("", "", "", line.strip())
        lines.append({"mark": mark.strip(), "place": place, "id": token, "token": text})
    return pd.DataFrame(lines + ([{"mark": "", "place": "", "id": "", "token": cut}] if cut else []))


def _inner(before: Sequence[int], after: Sequence[int]) -> int:
    """Product of the lengths of what is left of two texts without what they begin and end with."""
    shorter = min(len(before), len(after))
    head = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    tail = next((i for i in range(shorter - head) if before[-1 - i] != after[-1 - i]), shorter - head)
    return (len(before) - head - tail) * (len(after) - head - tail)


def plain_rows(found: Probed) -> pd.DataFrame:
    """Rows of the plain drafters on the first input."""
    rows = found.rows
    return rows[(rows["drafter"] != "") & (rows["intervention"] == "") & (rows["template"] == found.plain_input)]


def notes(found: Probed, refused: Mapping[str, str], dropped: Sequence[str] = ()) -> list[str]:
    """Say what the numbers are, what pins did, where the sinks are, what was left out and why."""
    said = []
    for name, one in found.verdicts.items():
        said.append(f"{name}: {verdict_words(one)}")
    for run, reports in found.pins.items():
        said += [f"{run.drafter}, {run.input}, {run.setting}: {words}" for words in reports]
    said += [f"perturbation {key} was left out: {why}" for key, why in refused.items()]
    for name, drafter in found.drafters.items():
        length, depth = drafter.config.trained_length, found.config.trained(drafter)
        said.append(
            f"{name}: trained to depth {depth or 'unknown'}, on texts of "
            + (
                f"up to {length} tokens; what lies beyond is marked"
                if length
                else "unknown length, so none can be marked"
            )
        )
        if own := found.sinks.get(name):
            places = ", ".join(f"{position} ({mass:.2f})" for position, mass in own)
            said.append(
                f"{name}: most of its own depth-1 mass among shared positions lies at {places}; SINK is the target's sink"
            )
    said += few_words(found)
    return [*said, *NOTES, *dropped]


def few_words(found: Probed) -> list[str]:
    """Say of which inputs tau rests on fewer prompts than on others: texts that ended at once have no rounds."""
    table = tau_table(found)
    counts = table[table["setting"] == "plain"].groupby("template", sort=False)["prompts"].min()
    total = len(next(iter(found.inputs.values())))
    return [
        f"under {key} tau rests on {count} of {total} prompts: the other texts ended at once or had no complete round, so it "
        "is not over the same prompts as the rest"
        for key, count in counts.items()
        if count < max(counts.max(), 1)
    ]


def verdict_words(one: Verdict | str) -> str:
    """Say a verdict in a sentence."""
    if isinstance(one, str):
        return f"no verdict on drift: {one}"
    how = {"undecided": "open", "depth-invariant": "the same"}.get(one.word, "changed")
    words = f"drift verdict {one.word}, trained depth {one.trained}, looked at to depth {one.beyond}"
    return "; ".join([words, f"{how}: {', '.join(one.because)}", *one.notes])


def _under(found: Probed, key: str) -> str:
    return f", {key}" if len(found.inputs) > 1 else ""


def _settings(table: pd.DataFrame) -> pd.DataFrame:
    """Name the column and the plain drafter."""
    return table.rename(columns={"name": "setting"}).assign(base=table["base"].map(plain_or))


def _named(table: pd.DataFrame, drafter: str, key: str) -> pd.DataFrame:
    return table.assign(drafter=drafter, template=key)[["drafter", "template", *table.columns]]


def check_heads(text: str, drafters: Mapping[str, Any]) -> list[int]:
    """Read a list of heads: "all", or numbers with commas.

    Raises:
        DriftlabError: something else, or a head that none of the drafters has.
    """
    most = max(drafter.config.num_attention_heads for drafter in drafters.values())
    if text == "all":
        return list(range(most))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < most for word in words):
        raise DriftlabError(
            f'--heads {text}: "all", or numbers of heads with commas, such as 0,3; there are 0..{most - 1}'
        )
    return sorted({int(word) for word in words})
