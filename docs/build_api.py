"""Build the API reference from the docstrings: one page a module, and a search over all of them.

python docs/build_api.py [OUT]
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pdoc

import driftlab

HERE = Path(__file__).parent


def modules() -> list[str]:
    """Return the package and its modules; those of Triton source are left out: nothing in them is called from Python."""
    found = [module.name for module in pkgutil.walk_packages(driftlab.__path__, "driftlab.")]
    return ["driftlab", *(name for name in found if not name.endswith(("__main__", "_kernels")))]


def resolve() -> None:
    """Import every public name: they are imported on first use, and pdoc sees only what is there."""
    for name in driftlab.__all__:
        getattr(driftlab, name)


def build(out: Path, names: Sequence[str]) -> Path:
    """Write the pages of modules to a folder; return the first one."""
    resolve()
    pdoc.render.configure(docformat="google", show_source=False, footer_text="driftlab")
    with warnings.catch_warnings():
        # pdoc walks a package that does not hide its modules, so these come twice
        warnings.filterwarnings("ignore", message="The module specification .* adds a module")
        # names that are imported for type checkers only are shown as they are written
        warnings.filterwarnings("ignore", message="Error parsing type annotation")
        pdoc.pdoc(*names, output_directory=out)
    return out / f"{names[0].replace('.', '/')}.html"


def main() -> None:
    """Build into docs/api/, or the folder named on the command line."""
    first = build(Path(sys.argv[1]) if sys.argv[1:] else HERE / "api", modules())
    sys.stdout.write(f"{first}\n")


if __name__ == "__main__":
    main()
