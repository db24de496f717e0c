r"""Stability under perturbation, as numbers.

With tau_i the tau of one drafter under input i of a set, tau_0 under the plain one, pooled over the same prompts, those that
have a complete round under every input (a text that ends at once has none),

    loss_i = 1 - tau_i / tau_0,     worst = min_i tau_i,     spread = max_i tau_i - min_i tau_i,

the last two over the whole set, the plain input included. Intervals resample prompts, the same ones under every input, so
what the prompts have in common cancels; the texts differ, since the target answers each input in its own way. The worst and the
best input stay those of the sample in every resample. They were chosen by their numbers: of inputs that are really alike the
smallest tau lies below the common one, and the spread, though really 0, is above 0 with its whole interval. ``selection`` says
by how much a smallest tau falls when prompts are drawn again, and ``spread_null`` how large a spread chance alone makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio, limits, percentile_interval
from driftlab.simulation import Expected, Simulation

#: statistic of the taus of a set [... input] and the places of plain, worst and best input
_STATISTICS: dict[str, Callable[[np.ndarray, int, int, int], np.ndarray]] = {
    "tau_worst": lambda tau, plain, worst, best: tau[..., worst],
    "tau_spread": lambda tau, plain, worst, best: tau[..., best] - tau[..., worst],
    "tau_loss_worst": lambda tau, plain, worst, best: 1 - tau[..., worst] / tau[..., plain],
    "tau_loss_mean": lambda tau, plain, worst, best: 1 - _mean_of_others(tau, plain) / tau[..., plain],
}


@dataclass(frozen=True)
class Stability:
    """One drafter under a set of inputs, on the same prompts. ``emitted``, ``rounds``: ``[input prompt]``, of complete rounds.

    ``keys``: the inputs; ``plain``: the one that the others are compared with; ``depth``: K; ``texts``: what was replayed;
    ``ids``: the prompts that have a round under every one of ``keys``; ``prompts``: how many there were; ``left_out``: inputs
    under which too few of plain's prompts have one, with the number of those that do.
    """

    keys: tuple[str, ...]
    plain: str
    depth: int
    ids: tuple[str, ...]
    emitted: np.ndarray
    rounds: np.ndarray
    texts: tuple[Any, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    prompts: int = 0
    samples: int = 2000
    seed: int = 0

    @property
    def tau(self) -> np.ndarray:
        """tau under each input."""
        return _tau(self, np.arange(len(self.ids))[None])[0]

    @property
    def worst(self) -> str:
        """The input with the smallest tau (of equals the first)."""
        return self.keys[int(self.tau.argmin())]

    def loss(self, key: str) -> Interval:
        """Relative loss of tau under an input, 1 - tau / tau of the plain one (negative: a gain), 95 %, paired."""
        place, plain = self._place(key), self.keys.index(self.plain)
        return self._interval(lambda tau: 1 - tau[..., place] / tau[..., plain]).within(*self._limits("tau_loss"))

    def interval(self, key: str) -> Interval:
        """tau under an input, 95 %."""
        place = self._place(key)
        found = bootstrap_ratio(self.emitted[place], self.rounds[place], samples=self.samples, seed=self.seed)
        return found.within(*limits("tau", self.depth))

    def summary(self) -> dict[str, Interval]:
        """``tau_worst``, ``tau_spread``, ``tau_loss_worst`` (relative, of the worst), ``tau_loss_mean`` (of all but plain)."""
        places = self.keys.index(self.plain), int(self.tau.argmin()), int(self.tau.argmax())
        return {
            name: self._interval(lambda tau, f=f: f(tau, *places)).within(*self._limits(name))
            for name, f in _STATISTICS.items()
        }

    @property
    def selection(self) -> float:
        """By how much the smallest tau falls, on average, when prompts are drawn again and the worst input with them (<= 0).

        A lower bound of how much too low ``tau_worst`` is because the worst was chosen by its number: about half of it in
        simulations of nine inputs that are alike, and 0, which is right, where one input is far below the rest.
        """
        generator = np.random.default_rng(self.seed)
        taus = _tau(self, generator.integers(0, len(self.ids), (self.samples, len(self.ids))))
        return float(taus.min(1).mean() - self.tau.min())

    def spread_null(self, level: float = 0.95) -> float:
        """Quantile of the spread if the input did not matter: within each prompt the inputs change places, at random."""
        generator = np.random.default_rng(self.seed)
        spreads = []
        for _ in range(self.samples):
            order = generator.random(self.rounds.shape).argsort(0)
            top, bottom = (np.take_along_axis(a, order, 0).sum(1) for a in (self.emitted, self.rounds))
            spreads.append(np.ptp(top / bottom))
        return float(np.quantile(spreads, level))

    def table(self) -> pd.DataFrame:
        """One row an input: ``template``, ``tau``, ``low``, ``high``, ``loss``, ``loss_low``, ``loss_high``, ``rounds``, and
        ``prompts``, the same ones for all; of an input that is left out, how many have a round.
        """
        lines = []
        for key, rounds in zip(self.keys, self.rounds, strict=True):
            tau, loss = self.interval(key), self.loss(key)
            ends = {"tau": tau.value, "low": tau.low, "high": tau.high}
            ends |= {"loss": loss.value, "loss_low": loss.low, "loss_high": loss.high}
            lines.append({"template": key, **ends, "rounds": float(rounds.sum()), "prompts": len(self.ids)})
        lines += [{"template": key, "prompts": count} for key, count in self.left_out.items()]
        return pd.DataFrame(lines)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield tidy rows: ``tau_loss`` of each input but the plain one; with the whole set as ``template`` the summary,
        ``tau_selection`` and ``tau_spread_null``.
        """
        for key, rounds in zip(self.keys, self.rounds.sum(1), strict=True):
            if key != self.plain:
                found = self.loss(key)._asdict()
                yield {"template": key, "quantity": "tau_loss", **found, "n": float(rounds)}
        whole = {"template": " | ".join(self.keys), "n": float(self.rounds.sum())}
        for name, found in self.summary().items():
            yield {**whole, "quantity": name, **found._asdict()}
        yield {**whole, "quantity": "tau_selection", "value": self.selection}
        yield {**whole, "quantity": "tau_spread_null", "value": self.spread_null()}

    def _place(self, key: str) -> int:
        if key not in self.keys:
            raise DriftlabError(f"no input {key!r} in this set; there are {', '.join(self.keys)}")
        return self.keys.index(key)

    def _interval(self, statistic: Callable[[np.ndarray], np.ndarray]) -> Interval:
        value, prompts = float(statistic(self.tau)), len(self.ids)

        def resampled(chosen: np.ndarray) -> np.ndarray:
            return statistic(_tau(self, chosen))

        return percentile_interval(value, resampled, prompts, prompts, self.samples, self.seed, 0.95)

    def _limits(self, quantity: str) -> tuple[float, float]:
        """tau is in [1, K + 1]."""
        if quantity == "tau_worst":
            return limits("tau", self.depth)
        if quantity == "tau_spread":
            return 0.0, float(self.depth)
        return -float(self.depth), self.depth / (self.depth + 1)


def stability(
    simulations: Mapping[str, Simulation | Expected],
    *,
    plain: str = "chat",
    least: float = 0.5,
    samples: int = 2000,
    seed: int = 0,
) -> Stability:
    """Put the replays of one drafter under several inputs together, on the prompts that have a round under each.

    An input under which a smaller share than ``least`` of the plain one's prompts have a round is left out: the others would
    have to be compared on the few prompts that it leaves.

    Args:
        simulations: key of the input to the replay of what was recorded under it.
        plain: the input that the others are compared with.
        least: share of plain's prompts that an input must have, 0..1. (For one pair of inputs alone: 0.)
        samples: of the bootstraps.
        seed: of the bootstraps.

    Raises:
        DriftlabError: fewer than two inputs, no plain one, or replays of other prompts or at another K.
    """
    keys = tuple(simulations)
    if len(keys) < 2 or plain not in keys:
        raise DriftlabError(
            f"stability is over two or more inputs, {plain!r} among them; these are {', '.join(keys) or 'none'}"
        )
    first = simulations[plain].acceptance
    emitted, rounds = [], []
    for key, one in simulations.items():
        ids = one.acceptance.ids
        if sorted(ids) != sorted(first.ids) or len(set(ids)) < len(ids):
            raise DriftlabError(
                f"input {key!r} is not over the same prompts as {plain!r}: record the same prompts under each"
            )
        if one.depth != first.depth:
            raise DriftlabError(
                f"input {key!r} was replayed at K = {one.depth}, {plain!r} at {first.depth}: replay at one K"
            )
        order = [ids.index(name) for name in first.ids]
        emitted.append(np.asarray(one.emitted, dtype="float64")[order])
        rounds.append(np.asarray(one.verify_rounds, dtype="float64")[order])
    texts = tuple((key, one.acceptance.ids, one.acceptance.digests) for key, one in simulations.items())
    there = np.stack(rounds) > 0
    of_plain = there[keys.index(plain)]
    if not of_plain.any():
        raise DriftlabError(f"no text has a round under the plain input {plain!r}: there is no tau to compare with")
    shared = (there & of_plain).sum(1)
    kept = [i for i in range(len(keys)) if shared[i] >= max(1.0, least * of_plain.sum())]
    common = there[kept].all(0)
    if not common.any():
        raise DriftlabError(
            f"no prompt has a round under each of {', '.join(keys[i] for i in kept)}: give fewer inputs"
        )
    return Stability(
        keys=tuple(keys[i] for i in kept),
        plain=plain,
        depth=first.depth,
        ids=tuple(name for name, whole in zip(first.ids, common, strict=True) if whole),
        emitted=np.stack(emitted)[kept][:, common],
        rounds=np.stack(rounds)[kept][:, common],
        texts=texts,
        left_out={key: int(n) for i, (key, n) in enumerate(zip(keys, shared, strict=True)) if i not in kept},
        prompts=len(first.ids),
        samples=samples,
        seed=seed,
    )


def compare_stability(a: Stability, b: Stability) -> dict[str, Interval]:
    """Return the summary of ``a`` minus that of ``b``, two drafters on the same recordings: paired, 95 %.

    Each drafter's worst and best input are its own. Prompts and inputs that one of them lacks (it has no complete round there)
    are left out of both. Raises DriftlabError for other inputs, prompts or texts, and if none is left.
    """
    if (a.plain, a.depth, a.texts) != (b.plain, b.depth, b.texts):
        raise DriftlabError(
            "stability is compared between drafters on the same recordings: same inputs, prompts, texts and K"
        )
    keys, ids = [key for key in a.keys if key in b.keys], [name for name in a.ids if name in b.ids]
    if len(keys) < 2 or not ids:
        raise DriftlabError("the two drafters have no two inputs, or no prompt, with rounds in common")
    a, b = (_part(one, keys, ids) for one in (a, b))
    plain, prompts = a.keys.index(a.plain), len(ids)
    places = [(plain, int(x.tau.argmin()), int(x.tau.argmax())) for x in (a, b)]

    def difference(name: str, chosen: np.ndarray) -> np.ndarray:
        first, second = (_STATISTICS[name](_tau(x, chosen), *p) for x, p in zip((a, b), places, strict=True))
        return first - second

    everyone = np.arange(prompts)[None]
    return {
        name: percentile_interval(
            float(difference(name, everyone)[0]),
            lambda chosen, name=name: difference(name, chosen),
            prompts,
            prompts,
            a.samples,
            a.seed,
            0.95,
        )
        for name in _STATISTICS
    }


def _part(one: Stability, keys: Sequence[str], ids: Sequence[str]) -> Stability:
    """Some inputs and prompts of it."""
    rows, columns = [one.keys.index(key) for key in keys], [one.ids.index(name) for name in ids]
    emitted, rounds = (array[rows][:, columns] for array in (one.emitted, one.rounds))
    return dataclasses.replace(one, keys=tuple(keys), ids=tuple(ids), emitted=emitted, rounds=rounds)


def _tau(found: Stability, chosen: np.ndarray) -> np.ndarray:
    """tau ``[resample input]`` of the prompts ``chosen [resample prompt]``, each of which has a round under every input."""
    top = np.stack([row[chosen].sum(1) for row in found.emitted], 1)
    return top / np.stack([row[chosen].sum(1) for row in found.rounds], 1)


def _mean_of_others(tau: np.ndarray, plain: int) -> np.ndarray | np.floating:
    """NaN where no other is left."""
    others = tau.shape[-1] - 1
    return np.delete(tau, plain, axis=-1).sum(-1) / (others or np.nan)
