"""Other tools' numbers: what they would print from our record, and what their logs say, in the same terms."""

from driftlab.engines.conventions import CONVENTIONS, engine_report
from driftlab.engines.logs import beside, read_engine_log

__all__ = ["CONVENTIONS", "beside", "engine_report", "read_engine_log"]
