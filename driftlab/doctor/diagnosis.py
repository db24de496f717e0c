"""What a checkpoint really does: the declared reading, the one that predicts the recorded text best, and how sure that is.

    diagnosis = diagnose(read_checkpoint("path"), trajectory)
    print(diagnosis.words())

Four outcomes: the declared reading is best; another one is better, by an amount that is shown; one looks better and more text
would have to be recorded to show it; the drafter predicts the text too weakly, in any reading tried, to tell.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from driftlab.doctor.evidence import LEAST, LEVEL, ONE_SIDED, contrast, information
from driftlab.doctor.factors import Factors, Level, plausible, same
from driftlab.doctor.remedies import remedies
from driftlab.doctor.scoring import Bench, candidates, cut
from driftlab.doctor.search import Search, Tried
from driftlab.doctor.stored import Stored, View, check_outside
from driftlab.drafter.formats.reading import Reading
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval
from driftlab.progress import Progress, silent
from driftlab.simulation import difference
from driftlab.trajectory import Trajectory

Outcome = Literal["declared", "another", "more text", "too weak"]

TOGETHER = ("same", "no matter")
"""verdicts of a reading that is one with the best"""
DEPTH = 3
"""deepest depth scored, unless the drafter says that it was trained for fewer"""
WEAK = 0.1
"""nats of information below which nothing is told"""
WEAK_TAU = 1.1
"""tau of the best reading below which nothing is told: another target's drafter, or broken weights"""
SIZES = ((16, 8), (28, 16), (48, 30), (96, 128))
"""prompts and answer tokens of what is scored: all readings; those that may be better; those where it is open whether that
matters; and the few of them that do best"""
_BEYOND = 5
"""answer tokens scored beyond the deepest depth, at least"""
_ROWS = 20000
"""padded rows of the largest bench: what 3 minutes and 2 GB hold"""


@dataclass(frozen=True)
class Row:
    """One reading that was tried: its changes, and how it does beside the best one."""

    changes: tuple[tuple[str, str], ...]
    """factor and value"""
    difference: Interval
    """nats a token, this reading minus the best, 95 % over prompts"""
    by_depth: tuple[float, ...]
    """the same at depth 1, 2, ... alone"""
    tokens: int
    """answer tokens that the two were compared on"""
    verdict: str
    """same (no text can tell), no matter (less than 0.02 nats either way), worse, open (this text does not tell)"""
    more_tokens: int
    """answer tokens to record before what is open is settled"""
    view: View


@dataclass(frozen=True)
class Diagnosis:
    """See the module; ``words()`` for a person, ``to_dict()`` for a program."""

    name: str
    outcome: Outcome
    declared: View
    best: View
    changes: tuple[tuple[str, str, str], ...]
    """factor, declared value, best value"""
    gain: Interval | None
    """nats a token, best minus declared"""
    p: float
    """adjusted for the readings tried when a change was taken; the largest where there were several changes"""
    tau_declared: Interval
    tau_best: Interval
    """of the best reading tried, also where nothing is told of it"""
    tau_gain: Interval
    depth: int
    information: float
    rows: tuple[Row, ...]
    """around the best reading, best first"""
    more_tokens: int
    """answer tokens to record before what looks better is shown to be, or else before what is open is settled"""
    one_class: tuple[str, ...]
    """what no text can tell from the best reading"""
    remedies: dict[str, str]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    """what the reader says of the file"""
    tried: int
    prompts: int
    tokens: int
    seconds: float

    @property
    def open(self) -> tuple[Row, ...]:
        """The readings that this text does not tell from the best, though the difference may matter; best first."""
        return tuple(row for row in self.rows if row.verdict == "open")

    @property
    def together(self) -> tuple[Row, ...]:
        """The readings that are one with the best: with the same scores, or a difference too small to matter."""
        return tuple(row for row in self.rows if row.verdict in TOGETHER)

    def words(self) -> str:
        """Return what a person reads."""
        from driftlab.doctor.words import diagnosis_words

        return diagnosis_words(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain JSON values."""
        from driftlab.doctor.words import diagnosis_values

        return diagnosis_values(self)


def diagnose(
    reading: Reading,
    trajectory: Trajectory,
    *,
    outside: dict[str, Any] | None = None,
    d2t: torch.Tensor | None = None,
    depth: int | None = None,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    progress: Progress = silent,
) -> Diagnosis:
    """Measure which reading of a checkpoint predicts a recorded text best.

    Args:
        reading: of the file, as it is declared (``read_checkpoint(path, norm_output=False)``, ...).
        trajectory: of its target: several prompts, with the states that its readings take (:mod:`driftlab.doctor.recording`).
        outside: what is declared beyond the configuration, fields of :class:`View` (``{"token_shift": 0}``).
        d2t: as the file holds it, where the reader has converted it.
        depth: deepest depth scored; default 3, or what the drafter was trained for if that is less.
        sizes: prompts and answer tokens of each, of what all, the promising and the open readings are scored on.
        progress: see :class:`driftlab.doctor.search.Search`.

    Raises:
        DriftlabError: a drafter of another target, a recording without the declared states or with a single prompt.
    """
    began = time.monotonic()
    config = reading.config_for(trajectory)
    check_outside(outside or {}, config)
    _check(config, trajectory)
    declared = View(config=config, **(outside or {}))
    stored = Stored.of(reading.tensors, trajectory.head, d2t=d2t)
    depth = min(DEPTH, config.ttt or DEPTH) if depth is None else depth
    if depth < 1:
        raise DriftlabError(f"depth {depth}: the deepest draft depth that is scored is 1 or more")
    benches = _benches(stored, trajectory, depth, sizes)
    factors = plausible(declared, stored, trajectory.spec, trajectory.aux_layers, depth)
    search = Search(factors, benches, progress)
    if search.score(len(benches) - 1, declared) is None and search.score(0, declared) is None:
        raise DriftlabError(f"the declared reading cannot be run: {next(iter(search.failed.values()), '')}")
    point, around = search.run()
    progress("readings", len(search.tried), len(search.tried))
    best = factors.view(point)
    return _diagnosis(reading, search, best, around, began)


def _check(config: Any, trajectory: Trajectory) -> None:
    lacking = sorted(set(config.aux_layers) - set(trajectory.aux_layers))
    if lacking:
        raise DriftlabError(
            f"the declared reading takes target states {list(config.aux_layers)}, the recording holds "
            f"{list(trajectory.aux_layers)}: give the target, and the states are recorded"
        )
    spec = trajectory.spec
    if (spec.hidden_size, spec.vocab_size) != (config.target_hidden_size, config.vocab_size):
        raise DriftlabError(
            f"it is the drafter of another target: width {config.target_hidden_size} and vocabulary {config.vocab_size}, "
            f"{spec.label} has {spec.hidden_size} and {spec.vocab_size}"
        )


def _benches(
    stored: Stored, trajectory: Trajectory, depth: int, sizes: tuple[tuple[int, int], ...]
) -> tuple[Bench, ...]:
    entries = trajectory.entries
    long = [i for i, e in enumerate(entries) if e.length - e.prompt_length > depth]
    usable = list({tuple(trajectory.tokens(i).tolist()): i for i in reversed(long)}.values())[::-1]
    if len(usable) < 2:
        raise DriftlabError(
            f"{len(usable)} different text(s) with an answer of more than {depth} tokens: readings are compared over prompts, "
            "record several"
        )
    benches, among = [], None
    for prompts, answer in sorted(((count, max(answer, depth + _BEYOND)) for count, answer in sizes), reverse=True):
        chosen = _short(trajectory, usable, prompts, answer)
        batch = cut(trajectory, chosen, answer)
        if among is None:
            vocab = trajectory.spec.vocab_size
            among = candidates(batch, vocab, vocab // 8 if vocab > 16384 else vocab)
        benches.insert(0, Bench(stored, batch, depth, among))
    return tuple(benches)


def _short(trajectory: Trajectory, usable: list[int], prompts: int, answer: int) -> list[int]:
    """Return the first prompts that fit in the rows that there is time for, long ones left out; at least two."""
    lengths = sorted(trajectory.entries[i].prompt_length for i in usable)
    longest = lengths[int(0.9 * (len(lengths) - 1))]
    chosen = [i for i in usable if trajectory.entries[i].prompt_length <= longest]
    fitting = max(2, _ROWS // (longest + answer))
    return chosen[: min(prompts, fitting)]


def _diagnosis(reading: Reading, search: Search, best: View, around: list[Tried], began: float) -> Diagnosis:
    declared = search.factors.declared
    stage = search.largest(best, declared)
    held, other = (search.score(stage, view) for view in (best, declared))
    if held is None or other is None:
        raise DriftlabError(f"the declared reading cannot be run: {next(iter(search.failed.values()), '')}")
    told = information(held)
    full = _whole(search.benches[stage])
    scores = {view: full.score(view) for view in (declared, best)}
    runs = {view: full.simulate(score) for view, score in scores.items()}
    few = told.mean >= WEAK and told.better > LEVEL
    weak = told.mean < WEAK or runs[best].tau < WEAK_TAU
    tau_best = runs[best].tau_interval()
    if weak or few:  # which of its readings is least bad says nothing of its conventions
        best, around, search.moves = declared, [], []
    against = contrast(held, other)
    rows = tuple(sorted((_row(search, tried, best) for tried in around), key=lambda row: -row.difference.value))
    open_ = [row for row in rows if row.verdict == "open"]
    outcome: Outcome = "declared" if best == declared else "another"
    promising = [row for row in open_ if row.difference.value >= LEAST]
    if best == declared and promising:
        outcome = "more text"
    if few:
        outcome = "more text"
    if weak:
        outcome = "too weak"
    return Diagnosis(
        name=reading.name,
        outcome=outcome,
        declared=declared,
        best=best,
        changes=_changes(search.factors, best),
        gain=None if best == declared else against.interval(),
        p=max((p for _, p in search.moves), default=float("nan")),
        tau_declared=runs[declared].tau_interval(),
        tau_best=tau_best,
        tau_gain=difference(runs[best], runs[declared]),
        depth=full.depth,
        information=told.mean,
        rows=rows,
        more_tokens=told.tokens_wanted(LEVEL)
        if few
        else max((row.more_tokens for row in promising or open_), default=0),
        one_class=() if weak or few else same(best, full.depth),
        remedies={} if best == declared else remedies(declared, best, _together(rows)),
        skipped=(*search.factors.skipped, *search.failed),
        notes=tuple(reading.notes),
        tried=len(search.tried),
        prompts=told.prompts,
        tokens=told.tokens,
        seconds=time.monotonic() - began,
    )


def _together(rows: Sequence[Row]) -> dict[str, View]:
    """Return the readings that are one with the best, by what they change of it."""
    one = [row for row in rows if row.verdict in TOGETHER]
    return {", ".join(f"{factor} {label}" for factor, label in row.changes): row.view for row in one}


def _whole(bench: Bench) -> Bench:
    """Return the same bench with all rows of the head: what tau is made with."""
    return Bench(bench.stored, bench.batch, bench.depth)


def _row(search: Search, tried: Tried, best: View) -> Row:
    view = search.factors.view(tried.point)
    stage = search.largest(view, best)
    mine, held = search.score(stage, view), search.score(stage, best)
    # the reading held before was compared the other way round, perhaps on more text
    c = tried.against if mine is None or held is None or stage <= tried.stage else contrast(mine, held)
    return Row(
        changes=tuple((level.factor, level.label) for level in tried.changes),
        difference=c.interval(),
        by_depth=c.by_depth,
        tokens=c.tokens,
        verdict=c.verdict,
        more_tokens=c.tokens_wanted(search.level) if c.mean >= LEAST else c.tokens_to_settle(ONE_SIDED),
        view=view,
    )


def _changes(factors: Factors, best: View) -> tuple[tuple[str, str, str], ...]:
    """Return factor, declared and best value of each factor in which the two differ."""
    found = []
    for name, levels in factors.levels.items():
        now = next((level for level in levels if _holds(level, best)), None)
        if now is not None and now is not levels[0]:
            found.append((name, levels[0].label, now.label))
    return tuple(found)


def _holds(level: Level, view: View) -> bool:
    """Whether a view has the level's value."""
    return all(getattr(view.config, k) == v for k, v in level.config.items()) and all(
        getattr(view, k) == v for k, v in level.view.items()
    )


__all__ = ["Diagnosis", "Outcome", "Row", "diagnose"]
