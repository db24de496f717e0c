r"""Stability under perturbation, as numbers, and what the target's own text says beside it.

With tau_i the tau of one drafter under input i of a set, tau_0 under the plain one, pooled over the same prompts,

    loss_i = 1 - tau_i / tau_0,     worst = min_i tau_i,     spread = max_i tau_i - min_i tau_i,

the last two over the whole set, the plain input included. Intervals resample prompts, the same ones under every input, so
what the prompts have in common cancels; the texts differ, since the target answers each input in its own way. The worst and the
best input stay those of the sample in every resample. They were chosen by their numbers: of inputs that are really alike the
smallest tau lies below the common one, and the spread, though really 0, is above 0 with its whole interval. ``selection`` says
by how much a smallest tau falls when prompts are drawn again, and ``spread_null`` how large a spread chance alone makes.

A text that the target itself finds unlikely, or that goes in circles, is a broken text, not a broken drafter:

    perplexity = exp( - sum log p(x_t | x_<t) / sum 1 ),    p = softmax of the target's logits: temperature 1, nothing cut,

over all answer tokens, EOS included; repetition is that of :mod:`driftlab.breakdown` (``repeated_ngrams`` is 1 - distinct-n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.breakdown import repetition_records
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio, limits, percentile_interval
from driftlab.simulation import Expected, Simulation
from driftlab.trajectory import Trajectory

# ---------------------------------------------------------------------------------------------- the text


def text_nll(
    last_hidden: Float[Tensor, "pos d_target"],
    lse: Float[Tensor, " pos"],
    tokens: Int[Tensor, " pos"],
    prompt_length: int,
    lm_head: Float[Tensor, "vocab d_target"],
) -> Float[Tensor, " row"]:
    """Return -log p of each answer token in nats, float64, unprocessed (temperature 1, no cut), whatever chose the tokens.

    Args:
        last_hidden: the target's states after its final norm.
        lse: log-sum-exp of the target's logits at the answer rows.
        tokens: prompt and answer.
        prompt_length: tokens of the prompt, at least 1.
        lm_head: the target's head.
    """
    rows = slice(prompt_length - 1, len(tokens) - 1)
    logits = (last_hidden[rows].double() * lm_head[tokens[prompt_length:]].double()).sum(-1)
    return (lse[rows].double() - logits).clamp(min=0)  # a probability above 1 is rounding


def text_records(trajectory: Trajectory, *, samples: int = 2000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield tidy rows of a recording's text: per prompt ``nll`` (nats a token) and the repetition; the pooled ``perplexity``.

    ``n`` counts tokens. The interval of the perplexity resamples prompts.
    """
    head = trajectory.head.lm_head
    sums, counts = [], []
    for entry, one in zip(trajectory.entries, trajectory, strict=True):
        nll = text_nll(one.last_hidden, one.lse, one.tokens, one.prompt_length, head)
        sums.append(float(nll.sum()))
        counts.append(len(nll))
        at = {"prompt": entry.id, "category": entry.category}
        yield {**at, "quantity": "nll", "value": sums[-1] / counts[-1], "n": counts[-1]}
    yield from repetition_records(trajectory)
    pooled = bootstrap_ratio(sums, counts, samples=samples, seed=seed).within(0, np.inf)
    value, low, high = (float(end) for end in np.exp(pooled))  # a monotone function of the ratio keeps its interval
    yield {"prompt": "", "quantity": "perplexity", "value": value, "low": low, "high": high, "n": sum(counts)}


# ---------------------------------------------------------------------------------------------- stability

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
    ``left_out``: inputs under which no text has a round (all ended at once), so that there is no tau to count.
    """

    keys: tuple[str, ...]
    plain: str
    depth: int
    ids: tuple[str, ...]
    emitted: np.ndarray
    rounds: np.ndarray
    texts: tuple[Any, ...] = ()
    left_out: tuple[str, ...] = ()
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
        taus = taus[~np.isnan(taus).any(1)]
        return float(taus.min(1).mean() - self.tau.min()) if len(taus) else float("nan")

    def spread_null(self, level: float = 0.95) -> float:
        """Quantile of the spread if the input did not matter: within each prompt the inputs change places, at random."""
        generator = np.random.default_rng(self.seed)
        spreads = []
        for _ in range(self.samples):
            order = generator.random(self.rounds.shape).argsort(0)
            top, bottom = (np.take_along_axis(a, order, 0).sum(1) for a in (self.emitted, self.rounds))
            if bottom.all():
                spreads.append(np.ptp(top / bottom))
        return float(np.quantile(spreads, level)) if spreads else float("nan")

    def table(self) -> pd.DataFrame:
        """One row an input: ``template``, ``tau``, ``low``, ``high``, ``loss``, ``loss_low``, ``loss_high``, ``rounds``, and
        ``prompts``, those with rounds: a text that ends at once has none, and its prompt is then missing from this tau alone.
        """
        lines = []
        for key, rounds in zip(self.keys, self.rounds, strict=True):
            tau, loss = self.interval(key), self.loss(key)
            ends = {"tau": tau.value, "low": tau.low, "high": tau.high}
            ends |= {"loss": loss.value, "loss_low": loss.low, "loss_high": loss.high}
            lines.append({"template": key, **ends, "rounds": float(rounds.sum()), "prompts": int((rounds > 0).sum())})
        lines += [{"template": key, "rounds": 0.0, "prompts": 0} for key in self.left_out]
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
        informative = int((self.rounds > 0).sum(1).min())
        value = float(statistic(self.tau))

        def resampled(chosen: np.ndarray) -> np.ndarray:
            return statistic(_tau(self, chosen))

        return percentile_interval(value, resampled, len(self.ids), informative, self.samples, self.seed, 0.95)

    def _limits(self, quantity: str) -> tuple[float, float]:
        """tau is in [1, K + 1]."""
        if quantity == "tau_worst":
            return limits("tau", self.depth)
        if quantity == "tau_spread":
            return 0.0, float(self.depth)
        return -float(self.depth), self.depth / (self.depth + 1)


def stability(
    simulations: Mapping[str, Simulation | Expected], *, plain: str = "chat", samples: int = 2000, seed: int = 0
) -> Stability:
    """Put the replays of one drafter under several inputs together.

    Args:
        simulations: key of the input to the replay of what was recorded under it.
        plain: the input that the others are compared with.
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
    some = [bool(of_input.sum()) for of_input in rounds]
    if not some[keys.index(plain)]:
        raise DriftlabError(f"no text has a round under the plain input {plain!r}: there is no tau to compare with")
    left_out = tuple(key for key, there in zip(keys, some, strict=True) if not there)
    emitted, rounds = ([x for x, there in zip(arrays, some, strict=True) if there] for arrays in (emitted, rounds))
    kept = tuple(key for key in keys if key not in left_out)
    told = (kept, plain, first.depth, first.ids, np.stack(emitted), np.stack(rounds), texts, left_out)
    return Stability(*told, samples, seed)


def compare_stability(a: Stability, b: Stability) -> dict[str, Interval]:
    """Return the summary of ``a`` minus that of ``b``, two drafters on the same recordings: paired, 95 %.

    Each drafter's worst and best input are its own. Raises DriftlabError for other inputs, prompts or texts.
    """
    if (a.keys, a.plain, a.ids, a.texts) != (b.keys, b.plain, b.ids, b.texts):
        raise DriftlabError(
            "stability is compared between drafters on the same recordings: same inputs, prompts and texts"
        )
    plain = a.keys.index(a.plain)
    places = [(plain, int(x.tau.argmin()), int(x.tau.argmax())) for x in (a, b)]
    informative = int(min((x.rounds > 0).sum(1).min() for x in (a, b)))

    def difference(name: str, chosen: np.ndarray) -> np.ndarray:
        first, second = (_STATISTICS[name](_tau(x, chosen), *p) for x, p in zip((a, b), places, strict=True))
        return first - second

    everyone = np.arange(len(a.ids))[None]
    return {
        name: percentile_interval(
            float(difference(name, everyone)[0]),
            lambda chosen, name=name: difference(name, chosen),
            len(a.ids),
            informative,
            a.samples,
            a.seed,
            0.95,
        )
        for name in _STATISTICS
    }


def _tau(found: Stability, chosen: np.ndarray) -> np.ndarray:
    """tau ``[resample input]`` of the prompts ``chosen [resample prompt]``; NaN without rounds."""
    top = np.stack([row[chosen].sum(1) for row in found.emitted], 1)
    bottom = np.stack([row[chosen].sum(1) for row in found.rounds], 1)
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)


def _mean_of_others(tau: np.ndarray, plain: int) -> np.ndarray | np.floating:
    """NaN where no other is left."""
    others = tau.shape[-1] - 1
    return np.delete(tau, plain, axis=-1).sum(-1) / (others or np.nan)


# ---------------------------------------------------------------------------------------------- by prompt length


def by_prompt_length(
    rows: pd.DataFrame,
    lengths: Mapping[str, int],
    edges: Sequence[int],
    *,
    trained_length: int = 0,
    samples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Pool rows of prompts by the length of the prompt.

    Args:
        rows: tidy rows with ``prompt``, ``quantity``, ``value``, ``n``; values are ratios over ``n``. Of ``emitted`` rows,
            which hold tokens over rounds, tau is made. Rows without a prompt, and ``rounds``, are left out.
        lengths: tokens of each prompt.
        edges: first length of each bucket, ascending, and one past the last; prompts outside are left out.
        trained_length: longest sequence that the drafter was trained on, in tokens (0: unknown). It becomes an edge, and
            longer prompts are marked. (A shorter prompt's answer may still reach beyond: see ``breakdown.buckets``.)
        samples: of the bootstraps.
        seed: of the bootstraps.

    Returns:
        Columns ``quantity``, ``layer``, ``head``, ``depth``, ``window`` (those that ``rows`` has), ``begin``, ``end``
        (inclusive), ``beyond_trained``, ``value``, ``low``, ``high`` (95 %), ``n``, ``prompts``.

    Raises:
        DriftlabError: a prompt without a length, edges that do not ascend.
    """
    edges = list(edges)
    if len(edges) < 2 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise DriftlabError(f"edges {edges}: give at least two, ascending")
    if trained_length and edges[0] < trained_length + 1 < edges[-1]:
        edges = sorted({*edges, trained_length + 1})
    rows = rows[(rows["prompt"] != "") & (rows["quantity"] != "rounds") & rows["value"].notna() & (rows["n"] > 0)]
    if lacking := sorted(set(rows["prompt"]) - set(lengths)):
        raise DriftlabError(f"no length is known of prompt {lacking[0]!r}")
    emitted = rows["quantity"] == "emitted"
    total = rows["value"].where(emitted, rows["value"] * rows["n"])
    length = rows["prompt"].map(lengths)
    rows = rows.assign(quantity=rows["quantity"].where(~emitted, "tau"), total=total, length=length)
    keys = ["quantity", *(name for name in ("layer", "head", "depth", "window") if name in rows.columns)]
    lines = []
    for place, group in rows.groupby(keys, sort=True):
        for begin, past in zip(edges, edges[1:], strict=False):
            inside = group[(group["length"] >= begin) & (group["length"] < past)]
            if inside.empty:
                continue
            by_prompt = inside.groupby("prompt", sort=False)[["total", "n"]].sum()
            found = bootstrap_ratio(by_prompt["total"], by_prompt["n"], samples=samples, seed=seed)
            found = found.within(*limits(str(place[0])))
            bucket = {
                "begin": begin,
                "end": past - 1,
                "beyond_trained": bool(trained_length) and begin > trained_length,
            }
            numbers = {**found._asdict(), "n": float(by_prompt["n"].sum()), "prompts": len(by_prompt)}
            lines.append({**dict(zip(keys, place, strict=True)), **bucket, **numbers})
    columns = [*keys, "begin", "end", "beyond_trained", "value", "low", "high", "n", "prompts"]
    return pd.DataFrame(lines, columns=columns)
