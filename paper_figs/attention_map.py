"""Mean attention mass on single keys by depth, for fig_attention_map (needs torch; the figure does not).

    python -m paper_figs.attention_map RECORDING [DRAFTER ...] --out RUN/attention_map.csv

Some starts of every prompt, their own tokens fed, the mean of heads of the last layer. Keys are lined up by what they have in
common: the first positions of the prompt by absolute place, the last keys of the context by their distance from the start's
row (0 is the row itself), own keys by the depth that wrote them; what is between is summed ("rest"). Starts weigh the same.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from driftlab import Drafter, Trajectory
from driftlab.heatmaps import KeyMasses, key_masses
from paper_figs.style import COMMAND, Table, short
from paper_figs.tables import write

DRAFTERS = ("smollm2-eagle3", "smollm2-eagle31")
FIRST, LAST = 24, 8


def group(one: KeyMasses) -> dict[tuple[str, int], np.ndarray]:
    """Sum a start's masses, mean of heads, last layer, into the map's columns: (kind, key) -> [depth], NaN where not there."""
    found: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(len(one.mass)))
    mean = one.mass[:, -1].mean(1)
    for place, key in enumerate(one.keys):
        column = mean[:, place]
        if key.kind == "own":
            found["own", key.place - one.row + 1] = column
        elif key.kind == "learned sink":
            found["learned sink", 0] = column
        elif key.kind.startswith("rest"):
            found["rest", 0] = found["rest", 0] + column
        elif key.place < FIRST:
            found["first", key.place] = column
        elif key.place > one.row - LAST:
            found["context", key.place - one.row] = column
        else:
            found["rest", 0] = found["rest", 0] + column
    return dict(found)


def measure(recording: Trajectory, drafter: Drafter, name: str, depth: int, starts: int) -> pd.DataFrame:
    """Return columns drafter, depth, place (column of the map), kind, key, mass, n (starts)."""
    sums: dict[tuple[str, int], np.ndarray] = {}
    counts: dict[tuple[str, int], np.ndarray] = {}
    for entry in recording.entries:
        wide = {"prompt_keys": 10**6, "context_keys": 10**6}
        for one in key_masses(drafter, recording, entry.id, depth=depth, starts=starts, **wide):
            for key, column in group(one).items():
                there = ~np.isnan(column)
                sums[key] = sums.get(key, 0) + np.where(there, column, 0.0)
                counts[key] = counts.get(key, 0) + there.astype(int)
    order = ("first", "rest", "context", "own", "learned sink")
    rows = []
    for place, key in enumerate(sorted(sums, key=lambda key: (order.index(key[0]), key[1]))):
        for k, (total, n) in enumerate(zip(sums[key], counts[key], strict=True), 1):
            if n:
                rows.append({"depth": k, "place": place, "kind": key[0], "key": key[1], "mass": total / n, "n": n})
    return pd.DataFrame(rows).assign(drafter=short(name))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("drafters", nargs="*", default=DRAFTERS)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    recording = Trajectory.open(chosen.recording)
    frames = [
        measure(recording, Drafter.load(name, recording).eval(), name, chosen.depth, chosen.starts)
        for name in chosen.drafters
    ]
    words = (
        f"{recording.spec.label} · greedy, own-fed, K = {chosen.depth} · mean of heads and of {chosen.starts} starts of each "
        f"of {len(recording)} prompts, no interval"
    )
    command = f"python -m paper_figs.attention_map RECORDING {' '.join(chosen.drafters)}"
    columns = ["drafter", "depth", "place", "kind", "key", "mass", "n"]
    write(Table(pd.concat(frames)[columns], f"{words}{COMMAND}{command}"), chosen.out)


if __name__ == "__main__":
    main()
