"""Draft attention on long prompts: full, windows, what is carried; published accept length, our tau and match.

Reads published.csv and window.csv.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figs import style

TABLES = ("published", "window")


def draw(data: Path = style.DATA) -> Figure:
    """Draw published points above, ours below: tau, and the match at depths 2 to K."""
    published, ours = (style.read(data, name) for name in TABLES)
    theirs = published.frame[published.frame["claim"] == "window"]
    settings = ours.frame["setting"].nunique()
    figure = style.figure(2.3 + 0.27 * settings)
    axes = figure.subplot_mosaic([["published", "published"], ["tau", "match"]], height_ratios=(4, 1.2 * settings))
    style.dots(axes["published"], theirs, "setting")
    axes["published"].set_xlabel("accept length")
    style.title(axes["published"], "published")
    style.dots(axes["tau"], ours.frame, "setting", y="tau")
    axes["tau"].set_xlabel("tau")
    style.title(axes["tau"], "ours")
    style.dots(axes["match"], ours.frame, "setting", y="match_2_to_K", low="match_low", high="match_high")
    axes["match"].set_yticklabels([])
    axes["match"].set_xlabel("match, 2 to K")
    style.legend(figure, [axes["tau"]], columns=3)
    style.note(
        figure, "Published: another target and other prompts, read at second hand, no interval", f"Ours: {ours.words}",
        f"rounds: {style.span(ours.frame['rounds'])}",
    )  # fmt: skip
    return figure
