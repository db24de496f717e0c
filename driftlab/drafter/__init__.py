"""The hookable drafter: configuration, layers, model, checkpoint files."""

from driftlab.drafter.config import VARIANTS, DrafterConfig, Variant, variant_name
from driftlab.drafter.model import Drafter, DraftState
from driftlab.drafter.shipped import SHIPPED

__all__ = ["SHIPPED", "VARIANTS", "DraftState", "Drafter", "DrafterConfig", "Variant", "variant_name"]
