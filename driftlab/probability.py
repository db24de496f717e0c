"""The processed probability with which the target chose each token of a recorded text."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.files import atomic
from driftlab.pieces import piece_entries, piece_path
from driftlab.sampling import Sampling
from driftlab.trajectory import Trajectory

_BLOCK_BYTES = 64 * 2**20
_EDGE = 1e-3
_RULE_VERSION = 1
"""of what is computed here and in Sampling.process: a change makes what is kept stale"""


def text_probabilities(trajectory: Trajectory) -> list[Float[Tensor, " row"]]:
    """Return :func:`text_probability` of every sequence. They are kept beside the recording's pieces, where it can be
    written, so that it takes the target's head once.
    """
    kept: dict[int, dict[str, Tensor]] = {}
    fresh: set[int] = set()
    for index, entry in enumerate(trajectory.entries):
        place, piece = f"{entry.offset}", entry.piece
        if piece not in kept:
            kept[piece] = _read_probabilities(trajectory, piece)
        if place in kept[piece]:
            trajectory._opened.setdefault(f"p {piece} {place}", kept[piece][place])
        else:
            kept[piece][place] = text_probability(trajectory, index)
            fresh.add(piece)
    for piece in fresh:
        with contextlib.suppress(DriftlabError), atomic(_probability_path(trajectory, piece)) as temporary:
            # a folder that cannot be written costs time and nothing else
            save_file(kept[piece], temporary, metadata={"key": _probability_key(trajectory, piece)})
    return [text_probability(trajectory, index) for index in range(len(trajectory))]


def _probability_path(trajectory: Trajectory, piece: int) -> Path:
    return trajectory.path / f"text-probability-{piece:05d}.safetensors"


def _probability_key(trajectory: Trajectory, piece: int) -> str:
    """What the numbers are of: a recording that was made again in the same folder has other ones."""
    settings = trajectory.settings
    told = [_RULE_VERSION, trajectory.spec.fingerprint, *(settings[name] for name in ("temperature", "top_k", "top_p"))]
    digest = hashlib.sha256(repr(told).encode())
    for entry in piece_entries(piece_path(trajectory.path, piece), piece):
        digest.update(f"{entry}".encode())
    digest.update(trajectory._file(piece).get_tensor("tokens").numpy())
    return digest.hexdigest()


def _read_probabilities(trajectory: Trajectory, piece: int) -> dict[str, Tensor]:
    path = _probability_path(trajectory, piece)
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") == _probability_key(trajectory, piece):
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        pass  # not there or cut short: made again
    return {}


@torch.no_grad()
def text_probability(trajectory: Trajectory, index: int) -> Float[Tensor, " row"]:
    """Return the processed probability with which each answer token of a sequence was chosen; float64, in row order P - 1...

    Computed once per sequence from the recorded last hidden state; logits exist for a block of rows at a time. A token at
    the very edge of a cut, which rounding puts outside, counts as inside.

    Raises:
        DriftlabError: a token that the recording's settings could not have chosen.
    """
    entry = trajectory.entries[index]
    key = f"p {entry.piece} {entry.offset}"
    if key not in trajectory._opened:
        settings, sequence, head = trajectory.settings, trajectory[index], trajectory.head
        sampling = Sampling(settings["temperature"], settings["top_k"], settings["top_p"])
        rows = slice(entry.prompt_length - 1, entry.length - 1)
        hidden, chosen = sequence.last_hidden[rows], sequence.tokens[entry.prompt_length :]
        block = max(1, _BLOCK_BYTES // (8 * trajectory.spec.vocab_size))
        parts: list[Tensor] = []
        for states, tokens in zip(hidden.split(block), chosen.split(block), strict=True):
            logits = head.logits(states).double()
            p = sampling.process(logits).gather(1, tokens[:, None])[:, 0]
            for place in (p <= 0).nonzero()[:, 0].tolist():
                p[place] = _at_the_edge(sampling, logits[place], int(tokens[place]))
                if not p[place] > 0:
                    position = entry.prompt_length + sum(map(len, parts)) + place
                    raise DriftlabError(
                        f"sequence {entry.id!r}, token {position}: with temperature {sampling.temperature}, top_k "
                        f"{sampling.top_k}, top_p {sampling.top_p} the target cannot have chosen token "
                        f"{int(tokens[place])}: the recording's settings are not those that made its text"
                    )
            parts.append(p)
        trajectory._opened[key] = torch.cat(parts)
    return trajectory._opened[key]


def _at_the_edge(sampling: Sampling, logits: Float[Tensor, " vocab"], token: int) -> float:
    """Probability of a token just outside a cut, as if it were inside; 0 if it is further off than rounding goes."""
    gap = float(logits.max() - logits[token])
    if sampling.temperature == 0:
        return 1.0 if gap <= _EDGE else 0.0
    scores = logits / sampling.temperature
    p = sampling.process(logits[None])[0]
    if sampling.top_k and float(scores.topk(min(sampling.top_k, len(scores))).values[-1] - scores[token]) > _EDGE:
        return 0.0
    before = Sampling(sampling.temperature, sampling.top_k).process(logits[None])[0][scores > scores[token]].sum()
    if sampling.top_p < 1 and float(before) > sampling.top_p + _EDGE:
        return 0.0
    best = int(scores.argmax())
    kept = scores[best] - p[best].log()  # log-sum-exp of the scores inside the cut
    return float((scores[token] - torch.logaddexp(kept, scores[token])).exp())
