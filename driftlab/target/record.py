"""Record a target: continue the prompts (or take given answers), then one teacher-forced pass that keeps the states.

Written piece by piece: stopped at any moment, the same call goes on where it stopped. The last hidden state is stored
after the final norm, so head(last_hidden) are the target's logits (SpecForge-style readers that forget the norm train on
another distribution: TorchSpec#169).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.files import cache_dir, locked, read_json, sweep, write_json
from driftlab.footprint import refuse_beyond
from driftlab.pieces import finish_recording, piece_entries, piece_is_whole, piece_path, read_entries, write_piece
from driftlab.progress import Progress
from driftlab.prompts import Prompt
from driftlab.recorded import FORMAT_VERSION, Recorded, TargetHead, TargetSpec
from driftlab.results import provenance
from driftlab.target.adapter import Adapter
from driftlab.target.sampling import Sampling, continue_prompts, streams
from driftlab.trajectory import Trajectory

_SINK_SEQUENCES = 8
_AS_MUCH, _STANDS_OUT = 0.5, 5.0
_SINK_POSITIONS = 8


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides what a recording contains."""

    spec: TargetSpec
    aux_layers: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...] | None
    own_answers: bool
    max_new_tokens: int
    sampling: Sampling
    template: str
    target_dtype: str
    store_dtype: str
    attention: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What is written into the recording, and shown."""
        return {
            "max_new_tokens": self.max_new_tokens,
            **dataclasses.asdict(self.sampling),
            "template": self.template,
            "answers": "target" if self.answers is None else "own" if self.own_answers else "given",
            "target_dtype": self.target_dtype,
            "store_dtype": self.store_dtype,
            # absent where the target attends as it does: the names of recordings made so do not change
            **({"attention": self.attention} if self.attention else {}),
        }

    @property
    def fingerprint(self) -> str:
        """Hash of all of it. Batch and piece size are left out: they do not change a text."""
        content = {
            "format": FORMAT_VERSION,
            "target": self.spec.fingerprint,
            "aux_layers": self.aux_layers,
            "ids": [prompt.id for prompt in self.prompts],
            "tokens": self.prompt_ids,
            "answers": self.answers,
            "settings": self.settings,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run(
    adapter: Adapter, tokenizer: Any, job: Job, *, out: Path | None, piece_size: int, progress: Progress
) -> Trajectory:
    """Do the job, or what is left of it, and open the result."""
    folder = out or cache_dir() / "recordings" / job.fingerprint[:16]
    if _is_done(folder, job):
        return Trajectory.open(folder)
    if adapter.hooked:
        warnings.warn(
            "the target has forward hooks: they change what is recorded but not the recording's name, so give it an out= "
            "folder of its own",
            stacklevel=3,
        )
    with locked(folder):
        sweep(folder)
        if not (
            folder / "recording.json"
        ).is_file():  # refused before the size is written down, so that another one may be given
            _refuse_without_memory(job, _pieces(job, piece_size), "lower piece_size")
        claim(folder, job, piece_size, len(job.prompts))
        piece_size = read_json(folder / "recording.json")["piece_size"]
        pieces = _pieces(job, piece_size)
        write_head(adapter, job, folder)
        missing = [i for i in range(len(pieces)) if not piece_is_whole(piece_path(folder, i), job.fingerprint)]
        if missing or not (folder / "trajectory.json").is_file():
            adapter.check_head(torch.tensor([list(job.prompt_ids[0])[:64]], device=adapter.device))
            _refuse_without_space(job, folder, [index for number in missing for index in pieces[number]])
            advice = f"record into another folder (out=) with a piece_size below the {piece_size} that this one was begun with"
            _refuse_without_memory(job, [pieces[number] for number in missing], advice)
            _record_pieces(adapter, job, folder, pieces, missing, progress)
            finish_recording(
                folder,
                spec=job.spec,
                aux_layers=job.aux_layers,
                settings=job.settings,
                sink=find_sink(adapter, tokenizer, folder, len(pieces)),
                pieces=len(pieces),
                head=head_name(job),
                fingerprint=job.fingerprint,
                provenance=provenance(job.settings),
            )
    return Trajectory.open(folder)


def bytes_per_token(job: Job) -> int:
    """Bytes of a recorded token: its id, the aux states, the last hidden state and a log-sum-exp, the last two in float32."""
    return 4 + job.spec.hidden_size * (len(job.aux_layers) * getattr(torch, job.store_dtype).itemsize + 4) + 4


def _tokens(job: Job, indices: Sequence[int]) -> tuple[int, int]:
    """Tokens of some prompts with their answers: at the least, and at the most."""
    prompts = sum(len(job.prompt_ids[index]) for index in indices)
    if job.answers is None:
        return prompts + len(indices), prompts + len(indices) * job.max_new_tokens
    return (prompts + sum(len(job.answers[index]) for index in indices),) * 2


def _pieces(job: Job, size: int) -> list[range]:
    return [range(i, min(i + size, len(job.prompts))) for i in range(0, len(job.prompts), size)]


def _refuse_without_memory(job: Job, pieces: Sequence[range], advice: str) -> None:
    """Raise DriftlabError if a piece with the shortest answers cannot be held: its sequences, and their copy end to end."""
    least, size = max(((_tokens(job, piece)[0], len(piece)) for piece in pieces), default=(0, 0))
    refuse_beyond(
        2 * least * bytes_per_token(job),
        f"recording {size} prompts at once, of at least {least} tokens and {bytes_per_token(job)} bytes a token,",
        advice,
    )


def _refuse_without_space(job: Job, folder: Path, indices: Sequence[int]) -> None:
    """Raise DriftlabError if the disk cannot hold even the shortest answers; warn if it cannot hold the longest."""
    least, most = _tokens(job, indices)
    one, free = bytes_per_token(job), shutil.disk_usage(folder).free
    if most * one <= free:
        return
    told = (
        f"recording {len(indices)} prompts in {folder} takes {least * one / 1e9:.3g} to {most * one / 1e9:.3g} GB ({one} "
        f"bytes a token), and {free / 1e9:.3g} GB are free there"
    )
    if least * one > free:
        raise DriftlabError(f"{told}: record fewer prompts or aux layers, store_dtype float16, or another out=")
    warnings.warn(f"{told}: it stops if answers are long; what is finished then is kept", stacklevel=4)


def _is_done(folder: Path, job: Job) -> bool:
    """Whether ``folder`` holds this very recording, whole; then nothing is written, not even a lock."""
    if not (folder / "trajectory.json").is_file() or not (folder / "recording.json").is_file():
        return False
    if read_json(folder / "recording.json").get("fingerprint") != job.fingerprint:
        return False
    try:
        return len(Trajectory.open(folder)) == len(job.prompts) and head_is_whole(folder.parent / head_name(job))
    except DriftlabError:
        return False


def claim(folder: Path, job: Any, piece_size: int, prompts: int) -> None:
    """Write what is being recorded, or refuse a folder that holds another recording."""
    marker = folder / "recording.json"
    ours = {"fingerprint": job.fingerprint, "piece_size": piece_size, "settings": job.settings}
    ours |= {"target": job.spec.label, "aux_layers": list(job.aux_layers), "prompts": prompts}
    if not marker.is_file():
        write_json(marker, ours)
        return
    theirs = read_json(marker)
    if theirs.get("fingerprint") == job.fingerprint:
        return
    flat = [{**{k: v for k, v in d.items() if k != "settings"}, **d.get("settings", {})} for d in (theirs, ours)]
    differing = sorted(
        key
        for key in flat[0].keys() | flat[1].keys()
        if key not in ("fingerprint", "piece_size") and flat[0].get(key) != flat[1].get(key)
    )
    what = ", ".join(f"{key}: {flat[0].get(key)} there, {flat[1].get(key)} asked" for key in differing)
    raise DriftlabError(
        f"{folder} holds another recording ({what or 'other prompts, answers or weights'}): choose another folder"
    )


def head_name(job: Any) -> str:
    """Name of the file beside a recording that holds the target's tables."""
    return f"head-{job.spec.fingerprint[:12]}.safetensors"


def write_head(adapter: Adapter, job: Any, folder: Path) -> None:
    """Write the target's tables unless they are there."""
    path = folder.parent / head_name(job)
    if not head_is_whole(path):
        adapter.head().save(path)


def head_is_whole(path: Path) -> bool:
    """Whether a file of tables can be read."""
    try:
        TargetHead.load(path)
    except DriftlabError:
        return False
    return True


def _record_pieces(
    adapter: Adapter,
    job: Job,
    folder: Path,
    pieces: Sequence[range],
    missing: Sequence[int],
    progress: Progress,
) -> None:
    total = len(job.prompts)
    done = total - sum(len(pieces[i]) for i in missing)
    generators = streams(job.prompt_ids, job.sampling.seed)
    progress("recording", done, total)
    for number in missing:
        indices, before = pieces[number], done
        prompts = [list(job.prompt_ids[i]) for i in indices]
        if job.answers is None:
            answers = continue_prompts(
                adapter,
                prompts,
                max_new_tokens=job.max_new_tokens,
                stop_ids=job.spec.eos_ids,
                sampling=job.sampling,
                generators=[generators[i] for i in indices],
                report=lambda finished, before=before: progress("recording", before + finished // 2, total),
            )
        else:
            answers = [list(job.answers[i]) for i in indices]
        sequences = capture(adapter, job, indices, prompts, answers)
        write_piece(piece_path(folder, number), sequences, job.fingerprint)
        done += len(indices)
        progress("recording", done, total)


@torch.inference_mode()
def capture(
    adapter: Adapter,
    job: Job,
    indices: Sequence[int],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Recorded]:
    """One teacher-forced pass over right-padded texts, in batches of like length; states kept by position."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    dtype, head = getattr(torch, job.store_dtype), adapter.head()
    sequences: dict[int, Recorded] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for group in (order[i : i + 4] for i in range(0, len(order), 4)):
        longest = max(len(texts[i]) for i in group)
        tokens = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in group])
        with adapter.capturing(job.aux_layers) as states:
            last = adapter.hidden(tokens.to(adapter.device))
        for row, i in enumerate(group):
            length, prompt = len(texts[i]), job.prompts[indices[i]]
            aux = torch.stack([states[k][row, :length].cpu() for k in job.aux_layers], 1)
            hidden = last[row, :length]
            check_finite(aux, hidden, job.aux_layers, job.store_dtype, prompt.id)
            lse = torch.full((length,), float("nan"))
            first = len(prompts[i]) - 1
            lse[first:] = head.lse(hidden[first:].to(head.lm_head.device)).cpu()
            sequences[i] = Recorded(
                id=prompt.id,
                category=prompt.category or "",
                prompt_length=len(prompts[i]),
                finish="stop" if answers[i][-1] in job.spec.eos_ids else "length",
                tokens=tokens[row, :length].clone(),
                aux=aux.to(dtype),
                last_hidden=hidden.float().cpu(),
                lse=lse,
            )
    return [sequences[i] for i in range(len(texts))]


def check_finite(aux: Tensor, last: Tensor, aux_layers: Sequence[int], store_dtype: str, prompt_id: str) -> None:
    """Raise DriftlabError if a state is not finite, or would not be once it is stored."""
    stored = [(f"layer {k}", aux[:, i], getattr(torch, store_dtype)) for i, k in enumerate(aux_layers)]
    for name, states, dtype in [*stored, ("last hidden", last, torch.float32)]:
        for what, value in (
            ("the target's state", states),
            (f"that state stored as {store_dtype}", states.to(dtype)),
        ):
            bad = (~value.isfinite()).any(-1).nonzero()
            if len(bad):
                raise DriftlabError(
                    f"prompt {prompt_id!r}, token {int(bad[0])}, {name}: {what} is not finite; finished pieces are kept. "
                    "Try dtype float32 (half precision overflows at 65504)"
                )


def find_sink(adapter: Adapter, tokenizer: Any, folder: Path, pieces: int) -> dict[str, Any]:
    """Search the target's sinks over all positions that the prompts share; position 0 if they cannot be watched.

    A position counts in the layers where every query from the prompt's end on sees it: a key that slides out of a window is no
    sink. The sink is the position with most mass; another is one as well if it holds at least half as much, and five times the
    mean of the positions searched (a second BOS shares the first one's mass).
    """
    entries = (entry for number in range(pieces) for entry in piece_entries(piece_path(folder, number), number))
    sequences = read_entries(folder, list(itertools.islice(entries, _SINK_SEQUENCES)))
    shared = max(1, min(s.prompt_length for s in sequences) - 1)
    try:
        masses = [
            adapter.position_mass(s.tokens[None].to(adapter.device), s.prompt_length - 1, seen_by_all=True)
            for s in sequences
        ]
    except DriftlabError as error:
        return {"positions": [0], "found": False, "reason": str(error)}
    if not masses[0]:
        return {"positions": [0], "found": False, "reason": "no layer with softmax attention was seen"}
    stacked = {layer: torch.stack([m[layer][:shared] for m in masses]).mean(0) for layer in masses[0]}
    by_layer = {layer: mass for layer, mass in stacked.items() if not bool(mass.isnan().all())}
    if not by_layer:
        reason = "every layer attends through a window, and no shared position is seen from all of the answer"
        return {"positions": [0], "found": False, "reason": reason}
    mean = torch.stack(list(by_layer.values())).nanmean(0).nan_to_num(0)
    top = mean.topk(min(_SINK_POSITIONS, shared)).indices.tolist()
    least = max(_AS_MUCH * float(mean.max()), _STANDS_OUT * float(mean.mean()))
    tokens = sequences[0].tokens
    return {
        "positions": sorted({top[0], *(p for p in top if float(mean[p]) >= least)}),
        "found": True,
        "sequences": len(sequences),
        "searched_positions": shared,
        "top": [{"position": p, "token": tokenizer.decode([int(tokens[p])]), "mass": float(mean[p])} for p in top],
        "by_layer": {str(layer): float(mass[top[0]].nan_to_num(0)) for layer, mass in by_layer.items()},
    }
