"""Layer ids of an EAGLE-3 file: where they stand, and how the project that wrote the file counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.drafter.formats.layerids import NAMES, Counting, LayerIds
from driftlab.drafter.formats.marker import MARKER
from driftlab.drafter.formats.provenance import FORMATS
from driftlab.errors import DriftlabError

if TYPE_CHECKING:
    from driftlab.drafter.formats.eagle3 import File

_IDS = "eagle_aux_hidden_state_layer_ids"
_BOTH = "the same list at the top level and in eagle_config, as in files for vLLM, whose two runners look in one each"


def read_layer_ids(file: File, count: int) -> LayerIds:
    """Return the layer ids and how they are counted.

    Args:
        file: settings, shapes, provenance.
        count: A, how many states fc takes.

    Raises:
        DriftlabError: no list, or two that contradict each other.
    """
    settings, source = file.settings, file.source
    top, nested = settings.get(_IDS) or None, settings.nested.get(_IDS) or None
    for ids, place in ((top, _IDS), (nested, f"eagle_config.{_IDS}")):
        if ids is not None and not isinstance(ids, list):
            raise DriftlabError(f"config.json: {place} is {ids!r}, not a list")
    chosen = file.ledger.given.get("layer_ids")
    if chosen is not None and chosen not in NAMES:
        raise DriftlabError(f"layer_ids={chosen!r}: give 'boundary' or 'output'")
    counting, why, sure = _counting(file, top, nested)
    ids = top if top is not None else nested
    return LayerIds(
        ids=None if ids is None else tuple(ids),
        count=count,
        counting=chosen or counting,
        why="given by the user" if chosen else why,
        sure=sure,
        nested=top is None,
        project=source.name,
        family=_family(file, top),
        given=chosen is not None,
        exact=None if source.states is None or chosen else source.states,
        exact_why=f"{MARKER} says so",
    )


def _counting(file: File, top: list[int] | None, nested: list[int] | None) -> tuple[Counting | None, str, bool]:
    """Return the counting (None: to be told by the ids), why, and whether that is certain."""
    source = file.source
    why, shifted = f"{source.name} counts so", top is not None and nested is not None and top == [i + 1 for i in nested]
    if None not in (top, nested) and top != nested and not shifted:
        raise DriftlabError(
            f"config.json: {_IDS} is {top}, and {nested} in eagle_config: make the two agree, or pass aux_layers="
        )
    if source.counting == "boundary":
        return "boundary", why, True
    if top is not None and top == nested:
        return "boundary", f"{_BOTH}; pass aux_layers= to override", source.name in ("vLLM", "TorchSpec")
    if shifted:
        return "boundary", f"eagle_config has {nested} for SGLang, which counts outputs: the same states", True
    if source.counting is None and source.name == "vLLM" and top is not None:
        return FORMATS["vLLM"], "vLLM reads them so at the top level", True
    ambiguous = source.name == "SGLang" and _family(file, top) == "latent"  # there it depends on the target
    return source.counting, why, source.sure and not ambiguous


def _family(file: File, top: list[int] | None) -> str:
    """Tell whether SGLang's rule for DeepSeek and Kimi targets may apply: a drafter with MLA may be any target's."""
    if file.source.name in ("speculators", "vLLM") or top is not None:
        return ""
    kind = file.settings.get("model_type")
    if kind == "kimi_k2":
        return "kimi"
    return "latent" if file.latent or kind in ("deepseek_v2", "deepseek_v3") else ""
