"""The target's own last-layer update, h^(N) - h^(N-1): which way its last layer moved the stream at each position."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.recorded import Batch
from driftlab.trajectory import Trajectory

Updates = Callable[[str], Tensor]
"""from a prompt's id to [pos d_target]"""


def last_updates(data: Trajectory | Batch, num_layers: int | None = None) -> Updates:
    """Return a function from prompt id to the target's last-layer updates h^(N) - h^(N-1), [pos d_target] in float64.

    Args:
        data: a recording (read when asked for) or a batch, whose aux layers hold N - 1 and N.
        num_layers: N, for a batch; a recording knows it.

    Raises:
        DriftlabError: layers that are not recorded, with what to record; a batch without N.
    """
    layers = data.spec.num_layers if isinstance(data, Trajectory) else num_layers
    if layers is None:
        raise DriftlabError("a batch does not know how many layers its target has: pass num_layers=")
    held = tuple(data.aux_layers)
    if lacking := [layer for layer in (layers - 1, layers) if layer not in held]:
        raise DriftlabError(
            f"the last layer's update is the state after layer {layers} less that after layer {layers - 1}; the recording "
            f"holds {list(held)} and lacks {lacking}: record with aux_layers={sorted({*held, layers - 1, layers})}"
        )
    before, after = held.index(layers - 1), held.index(layers)
    ids = [entry.id for entry in data.entries] if isinstance(data, Trajectory) else list(data.ids)

    def update(name: str) -> Tensor:
        if name not in ids:
            raise DriftlabError(f"prompt {name!r} is not in the recording that the updates are from")
        place = ids.index(name)
        aux = data[place].aux if isinstance(data, Trajectory) else data.aux[place, : int(data.lengths[place])]
        return aux[:, after].double() - aux[:, before].double()

    return update
