"""The drafters that come with the package: one layer each for SmolLM2-135M-Instruct, trained by experiments/train_drafters.py.

All from the same first weights on the same batches of the target's own text; their folders hold the log and the settings.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

SHIPPED = {
    "smollm2-eagle3": ("eagle3", 4),
    "smollm2-fc_norm": ("fc_norm", 4),
    "smollm2-norm_output": ("norm_output", 4),
    "smollm2-eagle31": ("eagle31", 4),
    "smollm2-eagle3-ttt2": ("eagle3", 2),
    "smollm2-eagle31-ttt2": ("eagle31", 2),
}
"""name -> (variant, depths unrolled in training)"""


def shipped_path(name: str) -> Path:
    """Return the folder of a shipped drafter."""
    return Path(str(resources.files("driftlab").joinpath("data", "drafters", name)))
