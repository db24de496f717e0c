"""Where a drafter looks, by draft depth: the mean attention mass on single keys.

Reads attention_map.csv. The first keys of the prompt stand one by one, then the rest summed, the last context keys up to the
start's row, and the drafter's own keys by the depth that wrote them. Colour is the root of the mass. The rest is many keys
together, so it stands in the title and is blank in the map.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from paper_figs import style

TABLES = ("attention_map",)


def draw(data: Path = style.DATA) -> Figure:
    """Draw one panel a drafter."""
    table = style.read(data, "attention_map")
    frame, drafters = table.frame, list(dict.fromkeys(table.frame["drafter"]))
    figure = style.figure(0.9 + 1.3 * len(drafters))
    axes = figure.subplots(len(drafters), 1, squeeze=False)[:, 0]
    top = float(frame.loc[frame["kind"] != "rest", "mass"].max())
    for ax, drafter in zip(axes, drafters, strict=True):
        mine = frame[frame["drafter"] == drafter]
        rest = mine[mine["kind"] == "rest"].sort_values("depth")["mass"]
        grid = mine.assign(mass=mine["mass"].where(mine["kind"] != "rest"))
        grid = grid.pivot(index="depth", columns="place", values="mass").to_numpy()
        image = ax.imshow(grid, aspect="auto", cmap="viridis", norm=PowerNorm(0.5, 0, top), interpolation="none")
        keys = mine.drop_duplicates("place").sort_values("place")
        kinds = keys["kind"].tolist()
        for place in range(1, len(kinds)):
            if kinds[place] != kinds[place - 1]:
                ax.axvline(place - 0.5, color="white", linewidth=1.2)
        ticks = _ticks(kinds, keys["key"].tolist())
        ax.set_xticks(list(ticks), list(ticks.values()), fontsize=6)
        ax.set_yticks(range(0, len(grid), 1 + len(grid) // 9), range(1, len(grid) + 1, 1 + len(grid) // 9))
        ax.set_ylabel("draft depth")
        ax.grid(False)
        told = f"; rest (…) {rest.iloc[0]:.2f} at depth 1, {rest.iloc[-1]:.2f} at {len(rest)}" if len(rest) else ""
        style.title(ax, f"{style.short(drafter)}{told}")
    axes[-1].set_xlabel("key: prompt's first · rest · context's last · own, by depth")
    bar = figure.colorbar(image, ax=list(axes), aspect=30, pad=0.02)
    bar.set_label("attention mass", fontsize=6.5)
    bar.ax.tick_params(labelsize=6)
    starts = mine["n"].max()
    style.note(figure, f"n = {starts:g} starts a drafter", table.words)
    return figure


def _ticks(kinds: list[str], keys: list[int]) -> dict[int, str]:
    """Name some columns: every eighth of the first, the rest, the ends of the others."""
    named = {}
    for place, (kind, key) in enumerate(zip(kinds, keys, strict=True)):
        ends = place + 1 == len(kinds) or kinds[place + 1] != kind
        begins = place == 0 or kinds[place - 1] != kind
        if kind == "first" and (key % 5 == 0 and not ends):
            named[place] = str(key)
        elif kind == "rest":
            named[place] = "…"
        elif kind == "context" and ends:
            named[place] = "row"
        elif kind == "own" and not begins and (keys[-1] - key) % 3 == 0:
            named[place] = str(key)
        elif kind == "learned sink":
            named[place] = "sink"
    return named
