"""The command line: each subcommand is a thin wrapper over functions that a notebook calls.

Nothing heavy is imported before a subcommand runs, so ``driftlab --help`` answers at once.
"""

from __future__ import annotations

import sys

import tyro

from driftlab.cli.ablating import ablate
from driftlab.cli.checkpoints import export, inspect
from driftlab.cli.doctoring import doctor
from driftlab.cli.measuring import simulate
from driftlab.cli.probing import probe
from driftlab.cli.recording import demo, record, train
from driftlab.errors import DriftlabError


def main() -> None:
    """Entry point: dispatch, and turn a DriftlabError into one message on stderr (exit 2)."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                **{"demo": demo, "record": record, "train": train, "probe": probe, "simulate": simulate},
                "inspect": inspect,
                "export": export,
                "doctor": doctor,
                "ablate": ablate,
            },
            prog="driftlab",
            description="Measure attention drift in speculative decoding.",
        )
    except DriftlabError as error:
        print(f"driftlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("driftlab: stopped. What was finished is kept; the same command goes on from there", file=sys.stderr)
        sys.exit(130)
