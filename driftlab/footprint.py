"""What a request takes in memory at the least, so that one that cannot fit is refused before it starts.

Estimates are lower bounds: of what is held at once, the large parts that follow from shapes alone. Nothing that could fit is
refused, and what fits narrowly may still fail.
"""

from __future__ import annotations

from pathlib import Path

import torch

from driftlab.errors import DriftlabError

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device | str = "cpu") -> int | None:
    """Return the bytes that can be had on a device, None where nobody says.

    CPU, on Linux: what the system calls available, within the limit of a control group (version 2), each with the swap that it
    has left. CUDA: what is free, and what torch holds for later.
    """
    device = torch.device(device)
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if device.type != "cpu":
        return None
    system = _of_the_system()
    if system is None:
        return None
    available, swap = system
    group = _of_the_group(swap)
    return available + swap if group is None else min(available + swap, group)


def _of_the_system() -> tuple[int, int] | None:
    """Available memory, and free swap."""
    try:
        lines = [line.split() for line in _MEMINFO.read_text().splitlines()]
        held = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return held["MemAvailable"], held.get("SwapFree", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _of_the_group(swap: int) -> int | None:
    """What the limit of the control group leaves: files' pages and slabs can go, swap (of the system: ``swap``) can be used."""
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        words = [line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines()]
        held = {name: int(value) for name, value in words}
        can_go = held["file"] + held.get("slab_reclaimable", 0)
    except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
        return None
    try:
        most, swapped = (int((_CGROUP / f"memory.swap.{name}").read_text()) for name in ("max", "current"))
        swap = min(swap, max(0, most - swapped))
    except (OSError, ValueError):
        pass  # no limit of its own
    return max(0, limit - used + can_go) + swap


def refuse_beyond(needed: int, what: str, advice: str, device: torch.device | str = "cpu") -> None:
    """Raise DriftlabError if ``needed`` bytes cannot be had on a device.

    Args:
        needed: a lower bound.
        what: subject of the sentence, e.g. "drafting 3 sequences".
        advice: what to do.
        device: where they are wanted.
    """
    free = free_memory(device)
    if free is not None and needed > free:
        raise DriftlabError(
            f"{what} takes at least {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free on {device}: {advice}"
        )


def draft_bytes(
    sequences: int, starts: int, tokens: int, *, depth: int = 0, ranks: int = 0, temperatures: int = 0
) -> int:
    """Bytes of a draft of ``sequences``, padded to ``starts`` each.

    Args:
        sequences: number of them.
        starts: the most that one has.
        tokens: 8-byte numbers a start: K of a chain, three a node of a tree.
        depth: of sampled drafts, K.
        ranks: of sampled drafts, logits kept a depth.
        temperatures: of sampled drafts, log-sum-exps kept a depth.
    """
    return sequences * starts * (8 * tokens + depth * 4 * (1 + ranks + temperatures))


def training_bytes(
    *,
    weights: int,
    tokens: int,
    states: int,
    target_width: int,
    starts: int,
    layers: int,
    width: int,
    inner: int,
    depth: int,
    stride: int,
    itemsize: int,
    computed: int,
) -> int:
    """Bytes of one training step beside the drafter itself.

    Gradient and two moments of every weight; a micro-batch's recorded states; and of every unrolled row, layer by layer, what
    its gradient needs for certain: two states, and the feed-forward block's gate and product.

    Args:
        weights: trained numbers.
        tokens: of a micro-batch, padded.
        states: recorded states a token that the batch holds.
        target_width: of them.
        starts: of a micro-batch, padded; all are unrolled at depth 1, one in ``stride`` deeper.
        layers: of the drafter.
        width: d_model.
        inner: of the feed-forward block.
        depth: unrolled.
        stride: see ``starts``.
        itemsize: bytes of a weight and of a state.
        computed: bytes of an activation.
    """
    unrolled = layers * (starts + starts // stride * (depth - 1))
    return (
        3 * weights * itemsize
        + tokens * states * target_width * itemsize
        + unrolled * (2 * width + 2 * inner) * computed
    )
