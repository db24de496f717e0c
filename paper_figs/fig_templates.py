"""Other inputs than the drafters were trained on: published accept length by prompt form, and our tau by perturbation.

Reads published.csv and template.csv. "text held": the plain input's answer is kept and only what stands before it changes.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figs import style

TABLES = ("published", "template")


def draw(data: Path = style.DATA) -> Figure:
    """Draw published points above, ours below."""
    published, ours = (style.read(data, name) for name in TABLES)
    theirs = published.frame[published.frame["claim"] == "template"]
    inputs = ours.frame["input"].nunique()
    figure = style.figure(2.2 + 0.19 * inputs)
    top, bottom = figure.subplots(2, 1, gridspec_kw={"height_ratios": (4, inputs)})
    style.dots(top, theirs, "setting")
    style.title(top, "published, Llama 3.1 8B")
    top.set_xlabel("accept length")
    style.dots(bottom, ours.frame, "input", y="tau")
    style.title(bottom, "ours")
    bottom.set_xlabel("tau, bonus token included")
    style.legend(figure, [bottom], columns=3)
    empty = sorted(set(ours.frame.loc[ours.frame["tau"].isna(), "input"]))
    style.note(
        figure, "Published: no interval stated; whether the bonus token counts is not stated either", f"Ours: {ours.words}",
        f"rounds: {style.span(ours.frame['rounds'])}",
        f"no round to count (the answer ends at once): {', '.join(empty)}" if empty else "",
    )  # fmt: skip
    return figure
