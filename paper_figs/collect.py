"""Make the small committed tables of data/ from runs.

    python -m paper_figs.collect RUN [RUN ...] [--only TABLE ...]

Each table is made from the first RUN that has what it needs (:mod:`paper_figs.tables` says what); a table that no RUN can give
stays as it is, and that is said. Tables of published numbers are made anew each time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paper_figs.style import DATA
from paper_figs.tables import FROM_REPOSITORY, FROM_RUN, Missing, write


def main() -> None:
    """Write what can be made, and say what cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument(
        "--only", nargs="+", choices=[*FROM_RUN, *FROM_REPOSITORY], default=[*FROM_RUN, *FROM_REPOSITORY]
    )
    chosen = parser.parse_args()
    for name in chosen.only:
        if name in FROM_REPOSITORY:
            write(FROM_REPOSITORY[name](), DATA / f"{name}.csv")
            print(f"{name}: published numbers")
            continue
        reasons = []
        for run in chosen.runs:
            try:
                table = FROM_RUN[name](run)
            except Missing as missing:
                reasons.append(str(missing))
                continue
            write(table, DATA / f"{name}.csv")
            print(f"{name}: {len(table.frame)} rows from {run}")
            break
        else:
            print(f"{name}: left as it is ({'; '.join(reasons) or 'no run given'})")


if __name__ == "__main__":
    main()
