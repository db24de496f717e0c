"""What other estimators say in place of tau, by K, on one and the same text.

Reads estimator_bias.csv: biases relative to tau_uncensored, and the change in acceptance of a round's first draft from K = 1.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import COLORS, GREY, MARKERS
from paper_figs import style

TABLES = ("estimator_bias",)
LABELS = {
    "bias_tau": "tau, cut rounds out",
    "bias_all_starts_mean": "mean of all starts",
    "bias_product_of_rates": "product of rates",
    "bias_iid_formula": "independence formula",
}
CHANGE = "first_draft_change"


def draw(data: Path = style.DATA) -> Figure:
    """Draw a panel of biases a drafter, and the first draft of all drafters below."""
    table = style.read(data, "estimator_bias")
    frame, drafters = table.frame, list(dict.fromkeys(table.frame["drafter"]))
    figure = style.figure(1.2 + 1.35 * (len(drafters) + 1))
    *panels, last = figure.subplots(len(drafters) + 1, 1, sharex=True)
    for ax, drafter in zip(panels, drafters, strict=True):
        for place, (quantity, label) in enumerate(LABELS.items()):
            rows = frame[(frame["drafter"] == drafter) & (frame["quantity"] == quantity)]
            rows = rows.assign(**{name: 100 * rows[name] for name in ("value", "low", "high")})
            style.line(ax, rows, label, x="k", color=COLORS[(0, 1, 2, 4)[place]], marker=MARKERS[place])
        style.title(ax, style.short(drafter))
        ax.set_ylabel("bias, %")
    looks = style.looks(drafters)
    for drafter in drafters:
        rows = frame[(frame["drafter"] == drafter) & (frame["quantity"] == CHANGE)]
        style.line(last, rows, style.short(drafter), x="k", **looks[drafter])
    style.title(last, "acceptance of a first draft")
    last.set_ylabel("change from K = 1")
    style.above(last)
    for ax in (*panels, last):
        ax.axhline(0, color=GREY, linewidth=0.7, zorder=1)
    style.depth_axis(last, frame["k"], "K, drafted tokens a round")
    style.legend(figure, panels)
    style.note(
        figure, "Bias relative to tau of the walk without the length limit's effect (tau_uncensored)", table.words,
        f"rounds, or starts: {style.span(frame['n'])}",
    )  # fmt: skip
    return figure
