r"""Train a drafter by train-time test: unroll it over the recorded text and learn the target's distribution at each depth.

    loss = sum_k w_k * mean over rows of  - sum_x p_{t+k}(x) ln q_{t,k}(x),       w_k = decay^(k-1)

p is the target's distribution over its whole vocabulary, summed over the draft vocabulary: what the drafter cannot
propose carries no gradient. Row t counts at depth k iff t >= P - 1 and token t + k + 1 exists. The feedback of one depth
is the input of the next, gradients included (EAGLE-3, arXiv 2503.01840, section 3).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from driftlab.draft import check_fits, text_at, unroll
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.files import atomic, locked, sort_metadata, sweep, write_text
from driftlab.progress import Progress, silent
from driftlab.trajectory import Batch, Trajectory

STATE_VERSION = 1
_STATE = "train_state.safetensors"
_BUCKET = 8
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The same values give the same weights, bit for bit, on the same machine."""

    ttt: int = 4
    """depths unrolled in training"""
    lr: float = 1e-3
    batch_size: int = 8
    """sequences a step"""
    epochs: float = 1.0
    warmup: float = 0.05
    """share of the steps over which the rate rises; a cosine to a tenth follows"""
    weight_decay: float = 0.01
    """on matrices, not on gains"""
    clip: float = 1.0
    depth_decay: float = 0.8
    seed: int = 0
    """of the order of the data"""
    save_every: int = 100
    """steps between saved states; 0: only at the end"""

    def __post_init__(self) -> None:
        counts = min(self.ttt, self.batch_size) >= 1 and self.save_every >= 0
        if not (
            counts and min(self.lr, self.epochs, self.clip) > 0 and 0 <= self.warmup <= 1 and 0 < self.depth_decay <= 1
        ):
            raise DriftlabError(
                f"{self}: ttt and batch_size are at least 1, lr, epochs and clip above 0, warmup in 0..1, depth_decay in (0, 1]"
            )


def train(
    drafter: Drafter,
    trajectory: Trajectory,
    config: TrainConfig | None = None,
    *,
    out: str | Path,
    stop_after: int | None = None,
    progress: Progress = silent,
) -> Drafter:
    """Train ``drafter`` in place on a recording, save it to ``out`` and return it.

    Stopped at any moment, the same call goes on from the last saved state and ends with the same bits.

    Args:
        drafter: on the device to train on.
        trajectory: the recording; its head gives the target's distribution.
        config: see :class:`TrainConfig`.
        out: folder for config.json, model.safetensors, train_log.csv, and the state while training.
        stop_after: stop (and save the state) after so many steps in all; for tests and time limits.
        progress: called with ("training <out's name>", steps done, steps).

    Raises:
        DriftlabError: drafter and recording do not fit, a loss that is not finite, or a state of another training.
    """
    config, out = config or TrainConfig(), Path(out)
    check_fits(drafter, trajectory)
    if not len(trajectory):
        raise DriftlabError("there is no sequence to train on")
    if (out / "trajectory.json").exists():
        raise DriftlabError(f"{out} holds a recording: give the drafter a folder of its own")
    run = _Run(drafter, trajectory, config)
    with locked(out / "training"):
        sweep(out)
        step, log = run.resume(out)
        name = f"training {out.name}"
        progress(name, step, run.steps)
        while step < (run.steps if stop_after is None else min(run.steps, stop_after)):
            log.append({"step": step, **run.step(step)})
            step += 1
            progress(name, step, run.steps)
            if config.save_every and step % config.save_every == 0:
                run.save_state(out, step, log)
        if step < run.steps:
            if step:
                run.save_state(out, step, log)
            return drafter
        longest = max(entry.length for entry in trajectory.entries)
        drafter.config = dataclasses.replace(drafter.config, ttt=config.ttt, trained_length=longest)
        write_text(out / "train_log.csv", pd.DataFrame(log).to_csv(index=False))
        drafter.save(out)
        run.save_state(out, step, log)
    return drafter


class _Run:
    """The training loop's moving parts."""

    def __init__(self, drafter: Drafter, trajectory: Trajectory, config: TrainConfig) -> None:
        self.drafter, self.trajectory, self.config = drafter, trajectory, config
        self.device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        self.head_rows = trajectory.head.lm_head[drafter.draft_vocab.cpu()].to(self.device, self.dtype)
        self.named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        matrices = [p for p in self.named.values() if p.ndim > 1]
        gains = [p for p in self.named.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
        )
        self.per_epoch = len(self.order(0))
        self.steps = max(1, round(config.epochs * self.per_epoch))
        self.fingerprint = self._fingerprint()

    def order(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch: sequences of like length together, in an order fixed by the seed."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        lengths = [entry.length for entry in self.trajectory.entries]
        shuffled = torch.randperm(len(lengths), generator=generator).tolist()
        size, batches = self.config.batch_size, []
        for bucket in (shuffled[i : i + _BUCKET * size] for i in range(0, len(shuffled), _BUCKET * size)):
            bucket.sort(key=lambda index: lengths[index])
            batches += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def step(self, step: int) -> dict[str, float]:
        """One optimiser step; return what is logged."""
        epoch, place = divmod(step, self.per_epoch)
        batch = self.trajectory.batch(self.order(epoch)[place]).to(self.device, self.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * schedule(step, self.steps, self.config.warmup)
        loss, logged = batch_loss(self.drafter, batch, self.head_rows, self.config)
        if not math.isfinite(float(loss.detach())):
            raise DriftlabError(
                f"the loss at step {step} is {float(loss.detach())}: lower lr ({self.config.lr}); the last saved state is kept"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.named.values()), self.config.clip)
        self.optimizer.step()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), **logged}

    def _fingerprint(self) -> str:
        """Hash of what a saved state must have been made with to be continued. Before the first step."""
        content = {
            "version": STATE_VERSION,
            "config": {k: v for k, v in dataclasses.asdict(self.config).items() if k != "save_every"},
            "drafter": {k: v for k, v in self.drafter.config.to_dict().items() if k not in ("ttt", "trained_length")},
            "initial": _digest(self.drafter.state_dict()),
            "data": [(e.id, e.length, e.prompt_length) for e in self.trajectory.entries],
            "texts": _digest({str(i): self.trajectory.tokens(i) for i in range(len(self.trajectory))}),
            "recorded": self.trajectory.settings,
            "target": self.trajectory.spec.fingerprint,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save_state(self, out: Path, step: int, log: list[dict[str, int | float]]) -> None:
        """Write weights, optimiser moments and the log, whole or not at all."""
        tensors = {}
        for name, parameter in self.named.items():
            tensors[f"weight.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        metadata = {"step": str(step), "fingerprint": self.fingerprint, "log": json.dumps(log)}
        with atomic(out / _STATE) as temporary:
            save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, temporary, metadata=metadata)
            sort_metadata(temporary)

    def resume(self, out: Path) -> tuple[int, list[dict[str, int | float]]]:
        """Restore the last state if there is one; return (steps done, log)."""
        path = out / _STATE
        if not path.is_file():
            return 0, []
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise DriftlabError(f"{path} is not a whole file ({error}): remove it to train from the start") from error
        metadata = file.metadata()
        if metadata["fingerprint"] != self.fingerprint:
            raise DriftlabError(
                f"{path} is the state of another training (other settings, data or first weights): choose another folder, or, "
                "to go on with that training, build the drafter anew as it was before its first step"
            )
        for name, parameter in self.named.items():
            with torch.no_grad():
                parameter.copy_(file.get_tensor(f"weight.{name}"))
            moments = {key: file.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter) for key, value in moments.items()
            }
        return int(metadata["step"]), json.loads(metadata["log"])


def batch_loss(
    drafter: Drafter, batch: Batch, head_rows: Float[Tensor, "draft_vocab d_target"], config: TrainConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted loss of a batch and, by depth, the mean loss and top-1 match with the text.

    The target's probabilities are computed once per batch; depth k reads them k rows further on.
    """
    starts = batch.starts
    p, index = target_probabilities(batch, head_rows)
    total: Tensor | float = 0.0
    logged: dict[str, float] = {}
    for state, _ in unroll(drafter, batch, config.ttt, feed="text"):
        position = starts.rows + state.depth
        counts = starts.valid & (position + 1 < batch.lengths[:, None])
        rows = index.gather(1, position.minimum(batch.lengths[:, None] - 2))[counts]
        loss, best = SoftCrossEntropy.apply(state.normed[counts], drafter.lm_head.weight, p, rows)
        mean = loss / max(len(rows), 1)
        total = total + config.depth_decay ** (state.depth - 1) * mean
        hit = drafter.to_target(best) == text_at(batch, position + 1)[counts]
        logged[f"loss_{state.depth}"] = float(mean.detach())
        logged[f"match_{state.depth}"] = float(hit.float().mean()) if len(rows) else float("nan")
    return total, logged


@torch.no_grad()
def target_probabilities(
    batch: Batch, head_rows: Float[Tensor, "draft_vocab d_target"]
) -> tuple[Float[Tensor, "answer_row draft_vocab"], Int[Tensor, "batch pos"]]:
    """Return p over the draft vocabulary at every answer row P - 1..T - 2, and the index [batch pos] into them.

    p(x) = exp(logit_x - lse) with the recorded log-sum-exp over the whole vocabulary, so a row sums to its coverage.
    """
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    answer = (position >= batch.prompt_lengths[:, None] - 1) & (position <= batch.lengths[:, None] - 2)
    index = (answer.flatten().cumsum(0) - 1).view(answer.shape).clamp(min=0)
    logits = batch.last_hidden[answer] @ head_rows.T
    return (logits.float() - batch.lse[answer][:, None]).exp(), index


class SoftCrossEntropy(torch.autograd.Function):
    """sum_i ( m_i lse(z_i) - p_i . z_i ), z = h W^T, m_i = sum_x p_i(x); also arg max z.

    Logits exist for a block of rows at a time: the gradient, m softmax(z) - p, is formed in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the draft id with the largest logit of each row."""
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        loss, best = torch.zeros((), device=hidden.device), torch.empty_like(rows)
        block = max(1, _BLOCK_BYTES // (4 * weight.shape[0]))
        for first in range(0, len(rows), block):
            span = slice(first, first + block)
            logits, target = (hidden[span] @ weight.T).float(), p[rows[span]]
            best[span] = logits.argmax(-1)
            lse, mass = logits.logsumexp(-1, keepdim=True), target.sum(-1, keepdim=True)
            loss += (mass * lse).sum() - (target * logits).sum()
            gradient = ((logits - lse).exp_().mul_(mass) - target).to(hidden.dtype)
            grad_hidden[span] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.T @ hidden[span]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients formed in the forward pass."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, None if grad_weight is None else grad_weight * grad_loss, None, None


def schedule(step: int, steps: int, warmup: float) -> float:
    """Return the factor on the learning rate: linear warm-up, then a cosine from 1 to 0.1."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    share = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


def choose_draft_vocab(trajectory: Trajectory, size: int) -> list[int]:
    """Return ``size`` target ids, ascending: the most frequent answer tokens, EOS always, then the rest by frequency in
    the prompts and by id (in a BPE vocabulary low ids are the common pieces).
    """
    spec = trajectory.spec
    if not 0 < size <= spec.vocab_size:
        raise DriftlabError(f"draft vocabulary of {size}: the target has {spec.vocab_size} tokens")
    answers, prompts = torch.zeros(spec.vocab_size), torch.zeros(spec.vocab_size)
    for index, entry in enumerate(trajectory.entries):
        tokens = trajectory.tokens(index)
        answers += torch.bincount(tokens[entry.prompt_length :], minlength=spec.vocab_size)
        prompts += torch.bincount(tokens[: entry.prompt_length], minlength=spec.vocab_size)
    keys = [
        (token not in spec.eos_ids, -a, -p, token)
        for token, (a, p) in enumerate(zip(answers.tolist(), prompts.tolist(), strict=True))
    ]
    return sorted(key[-1] for key in sorted(keys)[:size])


def coverage(draft_vocab: Sequence[int] | Tensor, trajectory: Trajectory) -> float:
    """Return the share of the answers' tokens that the draft vocabulary holds: no drafter can accept more."""
    inside = torch.zeros(trajectory.spec.vocab_size, dtype=torch.bool)
    inside[torch.as_tensor(draft_vocab).cpu()] = True
    hits = total = 0
    for index, entry in enumerate(trajectory.entries):
        answer = trajectory.tokens(index)[entry.prompt_length :]
        hits, total = hits + int(inside[answer].sum()), total + len(answer)
    return hits / total if total else float("nan")


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
