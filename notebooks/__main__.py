"""Run every notebook of this folder from top to bottom, in a fresh kernel; the files are not changed.

    python -m notebooks [NAME ...]

The first cell that fails ends the run with its traceback.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Execute the notebooks named on the command line, or all."""
    folder = Path(__file__).parent
    names = sys.argv[1:]
    paths = [folder / name for name in names] if names else sorted(folder.glob("*.ipynb"))
    if not paths:
        sys.exit("no notebooks found")
    for path in paths:
        began = time.perf_counter()
        NotebookClient(
            nbformat.read(path, as_version=4), timeout=300, resources={"metadata": {"path": folder}}
        ).execute()
        print(f"{path.name}: {time.perf_counter() - began:.0f} s")
    print(f"{len(paths)} notebooks ran")


if __name__ == "__main__":
    main()
