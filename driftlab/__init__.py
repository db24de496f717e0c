"""driftlab: measure attention drift in speculative decoding.

The public names. Each is imported on first use, so that results and plots start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftlab.acceptance import Acceptance, accept
    from driftlab.comparisons import compare
    from driftlab.divergence import Divergence, first_divergence
    from driftlab.draft import Chain, Draft, all_starts, chain
    from driftlab.drafter import SHIPPED, VARIANTS, Drafter, DrafterConfig
    from driftlab.drift import Recorder, Verdict, drift_rows, verdict
    from driftlab.engines import beside, engine_report, read_engine_log
    from driftlab.errors import BackendWarning, DriftlabError
    from driftlab.histogram import RequestHistogram
    from driftlab.interventions import intervened, parse_intervention
    from driftlab.perturbations import Perturbation
    from driftlab.plotting import (
        plot_acceptance,
        plot_magnitude,
        plot_mass,
        plot_mass_grid,
        plot_match,
        plot_quantity,
        plot_recent,
        plot_tau,
    )
    from driftlab.probes import AttentionMass, SinkSearch, StateNorm
    from driftlab.progress import ProgressBar
    from driftlab.prompts import Prompt, load_prompts
    from driftlab.results import read_rows, write_rows
    from driftlab.sampling import Sampling
    from driftlab.simulation import Expected, Simulation, difference, simulate
    from driftlab.speculation import speculate
    from driftlab.stored import load_draft, save_draft
    from driftlab.target import Target
    from driftlab.training import TrainConfig, split, train
    from driftlab.trajectory import Trajectory
    from driftlab.trees import DynamicTree, StaticTree, tree_all_starts
    from driftlab.vocabulary import choose_draft_vocab

_HOME = {
    "acceptance": ("Acceptance", "accept"),
    "comparisons": ("compare",),
    "divergence": ("Divergence", "first_divergence"),
    "drift": ("Recorder", "Verdict", "drift_rows", "verdict"),
    "draft": ("Chain", "Draft", "all_starts", "chain"),
    "drafter": ("SHIPPED", "VARIANTS", "Drafter", "DrafterConfig"),
    "engines": ("beside", "engine_report", "read_engine_log"),
    "errors": ("BackendWarning", "DriftlabError"),
    "interventions": ("intervened", "parse_intervention"),
    "histogram": ("RequestHistogram",),
    "perturbations": ("Perturbation",),
    "plotting": (
        *("plot_acceptance", "plot_magnitude", "plot_mass", "plot_mass_grid", "plot_match", "plot_quantity"),
        *("plot_recent", "plot_tau"),
    ),
    "probes": ("AttentionMass", "SinkSearch", "StateNorm"),
    "progress": ("ProgressBar",),
    "prompts": ("Prompt", "load_prompts"),
    "results": ("read_rows", "write_rows"),
    "sampling": ("Sampling",),
    "simulation": ("Expected", "Simulation", "difference", "simulate"),
    "speculation": ("speculate",),
    "stored": ("load_draft", "save_draft"),
    "target": ("Target",),
    "training": ("TrainConfig", "split", "train"),
    "trajectory": ("Trajectory",),
    "trees": ("DynamicTree", "StaticTree", "tree_all_starts"),
    "vocabulary": ("choose_draft_vocab",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (names are strings, made from _HOME)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'driftlab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"driftlab.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
