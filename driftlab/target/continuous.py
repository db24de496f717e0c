"""Record conversations that the target makes up itself, in slots: a finished one is replaced at once.

(Magpie, arXiv 2406.08464.) Each slot of a batch feeds one token a step, whether it is one that the target just chose or
one of the template's, so no prefill interrupts the others and no slot waits for the longest. The states that the
recording keeps are those of the decoding itself: there is no second pass.

Conversation i draws from a stream of its own, keyed by the seed and i, and is the same in any batch, slot or process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.files import locked, read_json, sweep
from driftlab.pieces import finish_recording, piece_is_whole, piece_path, write_piece
from driftlab.progress import Progress, silent
from driftlab.recorded import FORMAT_VERSION, Recorded, TargetSpec
from driftlab.results import provenance
from driftlab.target.adapter import Adapter
from driftlab.target.caches import SlotCache
from driftlab.target.record import check_finite, claim, find_sink, head_is_whole, head_name, write_head
from driftlab.target.sampling import Sampling, choose
from driftlab.trajectory import Trajectory
from driftlab.workers import run_jobs

PIECE = 32
"""conversations a piece"""
_SHORTEST_MESSAGE = 4
_ATTEMPTS = 50


@dataclass(frozen=True)
class SelfJob:
    """Everything that decides what conversation i is. The count is left out: a recording can be made longer."""

    spec: TargetSpec
    aux_layers: tuple[int, ...]
    prefix: tuple[int, ...]
    """the template up to where the user speaks"""
    suffix: tuple[int, ...]
    """from the token that ends the user's message to where the assistant speaks"""
    user: Sampling
    user_tokens: int
    sampling: Sampling
    max_new_tokens: int
    target_dtype: str
    store_dtype: str

    @property
    def settings(self) -> dict[str, Any]:
        """What is written into the recording, and shown."""
        return {
            "max_new_tokens": self.max_new_tokens,
            **dataclasses.asdict(self.sampling),
            "template": "chat",
            "answers": "target",
            "prompts": "self",
            "user_temperature": self.user.temperature,
            "user_top_k": self.user.top_k,
            "user_tokens": self.user_tokens,
            "target_dtype": self.target_dtype,
            "store_dtype": self.store_dtype,
        }

    @property
    def fingerprint(self) -> str:
        """Hash of all of it."""
        content = {
            "format": FORMAT_VERSION,
            "target": self.spec.fingerprint,
            "aux_layers": self.aux_layers,
            "template": [self.prefix, self.suffix],
            "settings": self.settings,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def length(self) -> int:
        """Longest possible conversation, in tokens."""
        return len(self.prefix) + self.user_tokens + len(self.suffix) + self.max_new_tokens


@dataclass
class _Slot:
    """A conversation in the making."""

    number: int
    generator: torch.Generator
    tokens: list[int]
    stage: Literal["user", "template", "answer", "done"] = "user"
    prompt_length: int = 0
    attempts: int = 1
    pending: list[int] = field(default_factory=list)


def converse(adapter: Adapter, job: SelfJob, numbers: Sequence[int], slots: int) -> Iterator[tuple[int, Recorded]]:
    """Yield (number, conversation) as they end, ``slots`` at a time.

    Raises:
        DriftlabError: a message that never ends, states that are not finite, or a model whose one-token-a-slot pass is
            not its ordinary pass.
    """
    waiting = list(numbers)[::-1]
    slots = min(slots, len(waiting))
    if not slots:
        return
    batch = _Batch(adapter, job, slots)
    active = [_new(job, waiting.pop()) for _ in range(slots)]
    checked = False
    while active:
        logits, lse = batch.step([slot.tokens[-1] for slot in active], [len(slot.tokens) - 1 for slot in active])
        for place in (~lse.isfinite()).nonzero()[:, 0].tolist():  # nothing can be chosen from these
            batch.check(place, active[place])
            raise DriftlabError(f"conversation {active[place].number}: the target's logits are not finite")
        chosen = _chosen(logits, job, active)
        leaving = []
        for place, slot in enumerate(active):
            if slot.stage in ("answer", "done"):
                batch.lse[place, len(slot.tokens) - 1] = lse[place]
            if slot.stage == "done":
                recorded = batch.recorded(place, slot)
                if not checked:
                    _check_same_pass(adapter, recorded, job.aux_layers)
                    checked = True
                yield slot.number, recorded
                if waiting:
                    active[place] = _new(job, waiting.pop())
                else:
                    leaving.append(place)
            else:
                _advance(slot, chosen[place], job)
        if leaving:
            keep = [place for place in range(len(active)) if place not in leaving]
            active = [active[place] for place in keep]
            batch.keep(keep)


def _new(job: SelfJob, number: int) -> _Slot:
    digest = hashlib.sha256(f"self|{job.sampling.seed}|{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return _Slot(number, generator, list(job.prefix))


def _chosen(logits: Tensor, job: SelfJob, active: Sequence[_Slot]) -> list[int]:
    """Next token of every slot: the user's turn and the answer have samplings of their own."""
    chosen = [-1] * len(active)
    for stage, sampling in (("user", job.user), ("answer", job.sampling)):
        places = [place for place, slot in enumerate(active) if slot.stage == stage]
        if not places:
            continue
        rows = logits if len(places) == len(active) else logits[places]
        tokens = choose(rows, sampling, [active[place].generator for place in places])
        for place, token in zip(places, tokens, strict=True):
            chosen[place] = token
    return chosen


def _advance(slot: _Slot, token: int, job: SelfJob) -> None:
    """Append what comes next in a conversation, and change its stage where a part ends."""
    end = job.suffix[0]
    if slot.stage == "template":
        slot.tokens.append(slot.pending.pop(0))
    elif slot.stage == "user":
        length = len(slot.tokens) - len(job.prefix)
        ended = token == end or token in job.spec.eos_ids
        if (ended and length < _SHORTEST_MESSAGE) or (not ended and length >= job.user_tokens):
            if slot.attempts >= _ATTEMPTS:
                raise DriftlabError(
                    f"conversation {slot.number}: {_ATTEMPTS} user messages were empty or did not end within "
                    f"{job.user_tokens} tokens: raise user_tokens"
                )
            slot.attempts, slot.tokens = slot.attempts + 1, list(job.prefix)
            return
        slot.tokens.append(end if ended else token)
        if ended:
            slot.stage, slot.pending = "template", list(job.suffix[1:])
    else:
        slot.tokens.append(token)
        answered = len(slot.tokens) - slot.prompt_length
        if token in job.spec.eos_ids or answered >= job.max_new_tokens:
            slot.stage = "done"
    if slot.stage == "template" and not slot.pending:
        slot.stage, slot.prompt_length = "answer", len(slot.tokens)


class _Batch:
    """Keys, values and states of the slots; slots all share the prefix, which is computed once."""

    def __init__(self, adapter: Adapter, job: SelfJob, slots: int) -> None:
        self.adapter, self.job = adapter, job
        self.dtype = getattr(torch, job.store_dtype)
        self.cache = SlotCache(slots, job.length)
        width, device = job.spec.hidden_size, adapter.device
        self.aux = torch.zeros(slots, job.length, len(job.aux_layers), width, dtype=self.dtype, device=device)
        self.last = torch.zeros(slots, job.length, width, device=device)
        self.lse = torch.zeros(slots, job.length, device=device)
        self._share_prefix()

    @torch.inference_mode()
    def _share_prefix(self) -> None:
        prefix = torch.tensor([self.job.prefix[:-1]], device=self.adapter.device)
        if prefix.shape[1]:
            plain = self.adapter.new_cache()
            with self.adapter.capturing(self.job.aux_layers) as states:
                last = self.adapter.hidden(prefix, cache=plain)
            self._store(states, last, slice(None), torch.arange(prefix.shape[1], device=last.device)[None])
            self.cache.share(plain)

    def _store(self, states: dict[int, Tensor], last: Tensor, rows: Any, positions: Tensor) -> None:
        aux = torch.stack([states[k].to(last.device) for k in self.job.aux_layers], 2)
        self.aux[rows, positions] = aux.to(self.dtype)
        self.last[rows, positions] = last.float()

    @torch.inference_mode()
    def step(
        self, tokens: Sequence[int], positions: Sequence[int]
    ) -> tuple[Float[Tensor, "slot vocab"], Float[Tensor, " slot"]]:
        """Feed one token a slot; return logits and their log-sum-exp, and keep the states."""
        device = self.adapter.device
        at = torch.tensor(positions, device=device)
        with self.adapter.capturing(self.job.aux_layers) as states, self.adapter.slotted():
            last = self.adapter.hidden_slots(torch.tensor(tokens, device=device), at, self.cache)
        rows = torch.arange(len(tokens), device=device)[:, None]
        self._store(states, last, rows, at[:, None])
        logits = self.adapter.logits(last[:, 0])
        return logits, logits.logsumexp(-1)

    def name(self, slot: _Slot) -> str:
        """Id of a conversation in the recording."""
        return f"self-{self.job.sampling.seed}-{slot.number:06d}"

    def check(self, place: int, slot: _Slot) -> None:
        """Raise DriftlabError if a state of the slot's conversation so far is not finite."""
        aux, last = self.aux[place, : len(slot.tokens)], self.last[place, : len(slot.tokens)]
        check_finite(aux, last, self.job.aux_layers, self.job.store_dtype, self.name(slot))

    @torch.inference_mode()
    def recorded(self, place: int, slot: _Slot) -> Recorded:
        """Copy a finished conversation out of its slot."""
        self.check(place, slot)
        length, first = len(slot.tokens), slot.prompt_length - 1
        lse = torch.full((length,), float("nan"))
        if self.adapter.dtype == torch.float32:
            lse[first:] = self.lse[place, first:length].cpu()
        else:  # that of half-precision logits is off by up to a tenth
            head = self.adapter.head()
            lse[first:] = head.lse(self.last[place, first:length].to(head.lm_head.device)).cpu()
        return Recorded(
            id=self.name(slot),
            category="self",
            prompt_length=slot.prompt_length,
            finish="stop" if slot.tokens[-1] in self.job.spec.eos_ids else "length",
            tokens=torch.tensor(slot.tokens),
            aux=self.aux[place, :length].cpu().clone(),
            last_hidden=self.last[place, :length].cpu().clone(),
            lse=lse,
        )

    def keep(self, places: Sequence[int]) -> None:
        """Drop all other slots."""
        index = torch.tensor(places, dtype=torch.long, device=self.aux.device)
        self.cache.keep(index)
        self.aux, self.last, self.lse = self.aux[index], self.last[index], self.lse[index]


@torch.inference_mode()
def _check_same_pass(adapter: Adapter, recorded: Recorded, aux_layers: Sequence[int]) -> None:
    """Raise DriftlabError unless an ordinary pass over a conversation gives the states that its slot gave."""
    with adapter.capturing(aux_layers) as states:
        last = adapter.hidden(recorded.tokens[None].to(adapter.device))[0].float().cpu()
    aux = torch.stack([states[k][0].float().cpu() for k in aux_layers], 1)
    rounding = torch.finfo(recorded.aux.dtype).eps
    for name, plain, slot, extra in (("last", last, recorded.last_hidden, 0.0), ("aux", aux, recorded.aux, rounding)):
        worst = float(((plain - slot.float()).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-6)).max())
        if not worst <= (1e-3 if adapter.dtype == torch.float32 else 0.1) + extra:  # so that NaN is refused too
            raise DriftlabError(
                f"{type(adapter.model).__name__} decoded in slots differs from its ordinary pass: a state ({name}) by "
                f"{worst:.2g} of its length. Its attention cannot be run that way. Make prompts with target.self_prompts() "
                "and record those"
            )


def record_pieces(
    adapter: Adapter,
    job: SelfJob,
    folder: Path,
    pieces: Sequence[int],
    slots: int,
    report: Callable[[int], None] = lambda finished: None,
) -> None:
    """Make and write the given pieces, :data:`PIECE` consecutive conversations each, each when its last one ends."""
    numbers = [number for piece in pieces for number in range(piece * PIECE, (piece + 1) * PIECE)]
    finished: dict[int, dict[int, Recorded]] = {piece: {} for piece in pieces}
    done = 0
    for number, recorded in converse(adapter, job, numbers, slots):
        piece, done = number // PIECE, done + 1
        finished[piece][number] = recorded
        if len(finished[piece]) == PIECE:
            whole = finished.pop(piece)
            write_piece(piece_path(folder, piece), [whole[n] for n in sorted(whole)], job.fingerprint)
        report(done)


@dataclass(frozen=True)
class Source:
    """Where a process of its own gets the same target from: the arguments of ``Target.load``."""

    name: str
    dtype: torch.dtype
    revision: str | None
    trust_remote_code: bool


def record_self(
    adapter: Adapter,
    tokenizer: Any,
    job: SelfJob,
    count: int,
    *,
    out: Path,
    slots: int,
    source: Source | None,
    processes: int,
    progress: Progress = silent,
) -> Trajectory:
    """Record ``count`` conversations, rounded up to whole pieces, or what is missing of them, and open the result.

    With ``processes`` > 1 each loads the target from ``source`` and makes pieces of its own.
    """
    pieces = -(-count // PIECE)
    if _is_done(out, job, pieces):
        return Trajectory.open(out)
    adapter.check_slots()
    if adapter.hooked:
        warnings.warn(
            "the target has forward hooks: they change what is recorded but not the recording's name, so give it an out= "
            "folder of its own",
            stacklevel=3,
        )
    with locked(out):
        sweep(out)
        claim(out, job, PIECE, count)
        write_head(adapter, job, out)
        missing = [i for i in range(pieces) if not piece_is_whole(piece_path(out, i), job.fingerprint)]
        name, before = "self-prompts", (pieces - len(missing)) * PIECE
        processes = min(processes, len(missing))
        if processes > 1:
            jobs = [(source, job, out, missing[i::processes], slots) for i in range(processes)]
            run_jobs(
                _work,
                jobs,
                what=name,
                processes=processes,
                progress=lambda what, done, _: progress(what, before + done, pieces * PIECE),
            )
        elif missing:
            adapter.check_head(torch.tensor([list(job.prefix)], device=adapter.device))
            record_pieces(adapter, job, out, missing, slots, lambda done: progress(name, before + done, pieces * PIECE))
        finish_recording(
            out,
            spec=job.spec,
            aux_layers=job.aux_layers,
            settings=job.settings,
            sink=find_sink(adapter, tokenizer, out, pieces),
            pieces=pieces,
            head=head_name(job),
            fingerprint=job.fingerprint,
            provenance=provenance(job.settings),
        )
    return Trajectory.open(out)


def _is_done(folder: Path, job: SelfJob, pieces: int) -> bool:
    path = folder / "trajectory.json"
    if not path.is_file() or not head_is_whole(folder.parent / head_name(job)):
        return False
    try:
        written = read_json(path)
        same = (written.get("fingerprint"), written.get("pieces")) == (job.fingerprint, pieces)
        return same and bool(Trajectory.open(folder))
    except DriftlabError:
        return False


def _work(
    source: Source, job: SelfJob, folder: Path, pieces: Sequence[int], slots: int, report: Callable[[int, int], None]
) -> None:
    """Make some pieces in a process of its own."""
    from driftlab.target import Target

    target = Target.load(
        source.name,
        dtype=source.dtype,
        aux_layers=job.aux_layers,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    if target.spec.fingerprint != job.spec.fingerprint:
        raise DriftlabError(
            f"target {source.name!r}, loaded again, is not the one in use (its weights were changed): pass processes=1"
        )
    target.adapter.check_head(torch.tensor([list(job.prefix)]))
    total = len(pieces) * PIECE
    record_pieces(target.adapter, job, folder, pieces, slots, lambda done: report(done, total))
