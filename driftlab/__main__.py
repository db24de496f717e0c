"""``python -m driftlab`` is the command line."""

from driftlab.cli import main

main()
