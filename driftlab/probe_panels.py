"""Panels of ``driftlab probe``: drawn from what :mod:`driftlab.probing` measured, and heat maps of single keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from driftlab import plotting, plotting_probe
from driftlab.heatmaps import Key, KeyMasses, key_masses
from driftlab.plotting_probe import visible_text
from driftlab.probe_report import plain_rows, tau_table
from driftlab.probing import Probed
from driftlab.progress import Progress, silent

HEADS_DRAWN = 16
"""heads in one figure at most"""


def panels(found: Probed, folder: Path, progress: Progress = silent) -> dict[str, Path]:
    """Draw every panel into ``folder``; return title -> PNG. ``progress`` counts panels."""
    rows, plain = found.rows[found.rows["drafter"] != ""], plain_rows(found)
    recent = found.config.recent
    drawn: dict[str, tuple[str, Callable[[], Any]]] = {
        "tau of every run": ("tau", lambda: plotting_probe.plot_taus(tau_table(found), found.config.depth)),
        "Attention mass by segment and depth, plain": ("mass", lambda: plotting.plot_mass_grid(plain)),
        "Match by depth, text-fed, all starts, plain": ("match", lambda: plotting.plot_match(plain).figure),
        "Magnitude of the feedback by depth, plain": (
            "magnitude",
            lambda: plotting.plot_magnitude(plain, log=True).figure,
        ),
        "Entropy of the attention, relative to ln of the keys seen, plain": (
            "entropy",
            lambda: plotting.plot_quantity(plain, "entropy_relative", ylabel="entropy / ln(keys)").figure,
        ),
    }
    for width in recent:
        drawn[f"Mass on the last {width} keys, plain"] = (
            f"recent{width}",
            lambda w=width: plotting.plot_recent(plain, window=w).figure,
        )
    if found.config.settings:
        chat = rows[rows["template"] == found.plain_input]
        drawn |= _by(chat, "intervention", "settings", recent)
    if len(found.inputs) > 1:
        drawn |= _by(
            rows[(rows["intervention"] == "") & rows["template"].isin(list(found.inputs))], "template", "inputs", recent
        )
    made = {}
    for count, (title, (name, draw)) in enumerate(drawn.items()):
        progress("drawing panels", count, len(drawn))
        made[title] = folder / f"{name}.png"
        plotting.save_panel(draw(), made[title])
    progress("drawing panels", len(drawn), len(drawn))
    return made


def _by(rows: pd.DataFrame, by: Any, what: str, recent: Sequence[int]) -> dict[str, tuple[str, Callable[[], Any]]]:
    wanted = [("match", "match", "top-1 match, all starts", 0), ("magnitude", "rms_feedback", "RMS of the feedback", 0)]
    wanted += [("sink", "mass_sink", "mass on SINK", 0), ("self", "mass_self", "mass on SELF", 0)]
    wanted += [("recent", "recent", f"mass on the last {recent[0]} keys", recent[0])] if recent else []
    return {
        f"{label} by depth, {what}": (
            f"{name}_{what}",
            lambda q=quantity, label=label, w=window: plotting_probe.plot_by(
                rows, q, by, ylabel=label, window=w, log=q == "rms_feedback", trained=q == "match"
            ),
        )
        for name, quantity, label, window in wanted
        if (rows["quantity"] == quantity).any()
    }


def heat_panels(
    found: Probed, folder: Path, prompt: str, heads: Sequence[int], decode: Callable[[int], str] | None, starts: int = 3
) -> dict[str, Path]:
    """Draw the masses on single keys of some starts of a prompt, plain, first input: mean of heads, and listed heads."""
    made = {}
    recorded = found.inputs[found.plain_input]
    for name, drafter in found.drafters.items():
        with drafter.using(found.config.backend):
            maps = key_masses(
                drafter,
                recorded,
                prompt,
                depth=found.config.depth,
                starts=starts,
                feed=found.config.feed,
                decode=decode or str,
            )
        safe = re.sub(r"[^\w.-]+", "_", name)
        title = f"Mass on single keys, {name}, prompt {prompt}, mean of heads"
        made[title] = folder / f"heat_{safe}.png"
        titles = [_start_words(one) for one in maps]
        figure = _drawn(maps, [one.mass[:, -1].mean(1) for one in maps], titles, decode, found.config.feed)
        plotting.save_panel(figure, made[title])
        shown = [head for head in heads if head < drafter.config.num_attention_heads][:HEADS_DRAWN]
        if shown:
            one = maps[-1]
            title = f"Mass on single keys, {name}, prompt {prompt}, {_start_words(one)}, by head"
            made[title] = folder / f"heat_{safe}_heads.png"
            masses = [one.mass[:, -1, head] for head in shown]
            names = [f"head {head}" for head in shown]
            figure = _drawn([one] * len(shown), masses, names, decode, found.config.feed, _start_words(one))
            plotting.save_panel(figure, made[title])
    return made


def _start_words(one: KeyMasses) -> str:
    drafts = " ".join(visible_text(text) for text in one.drafted)
    return f"start at row {one.row}, fed {visible_text(one.token)}: drafts {drafts}"


def _drawn(
    maps: Sequence[KeyMasses],
    masses: Sequence[np.ndarray],
    titles: Sequence[str],
    decode: Any,
    feed: str,
    shared: str = "",
) -> Any:
    longest = max(mass.shape[1] for mass in masses)
    whole = np.stack([np.pad(m, ((0, 0), (0, longest - m.shape[1])), constant_values=np.nan) for m in masses])
    labels = [[_label(key) for key in one.keys] for one in maps]
    groups = [[key.kind.removeprefix("rest of ") for key in one.keys] for one in maps]
    note = f"{shared}\n" if shared else ""
    note += "columns: sink, prompt, context, own keys of depths 2, 3, ...; shown are the last keys of prompt and context and "
    note += "those with most mass; context\nkeys by the token at their position, own keys by "
    note += "the draft" if feed == "own" else "the token of the text"
    note += " that was fed; colour: root of the mass; each row is a softmax over all keys; blank: not seen" + (
        "" if decode else "; token ids"
    )
    return plotting_probe.plot_keys(whole, labels, titles, groups=groups, note=note)


def _label(key: Key) -> str:
    if key.kind.startswith("rest"):
        return f"{key.place} more"
    return f"{visible_text(key.text)} {key.place}"
