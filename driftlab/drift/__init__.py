"""What counts as drift: a recorder of arrays by start, measures on them, and a verdict (definitions in docs/method.md)."""

from driftlab.drift.distances import (
    band,
    drift,
    jensen_shannon,
    normalised_entropy,
    null,
    over_heads,
    recent_gain,
    relabelled,
    relative_entropy_gain,
    segment_gain,
    total_variation,
)
from driftlab.drift.extrapolation import accuracy_rows, conditional_kept, match_kept
from driftlab.drift.geometry import (
    contributions,
    cosine,
    effective_rank,
    growth,
    log_slopes,
    magnitude_shares,
    projection_shares,
    spread_kept,
    spread_share,
)
from driftlab.drift.record import Record
from driftlab.drift.recorder import Recorder
from driftlab.drift.tables import by_sinks, drift_rows, excess, relative_sink_loss, sink_before
from driftlab.drift.updates import last_updates
from driftlab.drift.verdicts import Sign, Thresholds, Verdict, verdict

__all__ = [
    "Record",
    "Recorder",
    "Sign",
    "Thresholds",
    "Verdict",
    "accuracy_rows",
    "band",
    "by_sinks",
    "conditional_kept",
    "contributions",
    "cosine",
    "drift",
    "drift_rows",
    "effective_rank",
    "excess",
    "growth",
    "jensen_shannon",
    "last_updates",
    "log_slopes",
    "magnitude_shares",
    "match_kept",
    "normalised_entropy",
    "null",
    "over_heads",
    "projection_shares",
    "recent_gain",
    "relabelled",
    "relative_entropy_gain",
    "relative_sink_loss",
    "segment_gain",
    "sink_before",
    "spread_kept",
    "spread_share",
    "total_variation",
    "verdict",
]
