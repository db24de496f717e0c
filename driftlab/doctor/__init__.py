"""The doctor: which reading of a drafter's checkpoint predicts the target's text best, by measurement."""

from driftlab.doctor.diagnosis import Diagnosis, diagnose
from driftlab.doctor.files import read_for
from driftlab.doctor.recording import record_for, states_wanted

__all__ = ["Diagnosis", "diagnose", "read_for", "record_for", "states_wanted"]
