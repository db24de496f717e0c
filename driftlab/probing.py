"""Everything that ``driftlab probe`` measures: drafters x inputs x settings, as rows, replays, a verdict each.

An input is the recording of the same prompts under one perturbation (``chat``: none); a setting is what is laid on the drafter
(nothing, "", is always measured as well: the plain drafter). Replay is fed the text, probes by default the drafter's own
tokens; the verdict is of the plain drafter on the first input, text-fed. :mod:`driftlab.probe_report` shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from driftlab.acceptance import accept
from driftlab.comparisons import compare
from driftlab.draft import Feed, all_starts
from driftlab.drafter import Drafter
from driftlab.drift import Recorder, Verdict, drift_rows, verdict
from driftlab.errors import DriftlabError
from driftlab.interventions import Intervention, PinReport, intervened, key_of, parse_intervention
from driftlab.measure import MIXED, drafter_sink, probe_rows, replay_rows, settings
from driftlab.perplexity import text_records
from driftlab.perturbations import Perturbation, applicable
from driftlab.progress import Progress, silent
from driftlab.prompts import Prompt
from driftlab.results import as_rows, combine
from driftlab.simulation import Simulation
from driftlab.stability import Stability, stability
from driftlab.trajectory import Trajectory

VARIES = (*MIXED, "intervention", "template", "depth_max", "ttt", "dtype")
"""settings in which the rows of one probe may differ"""
_SAMPLES = 1000
"""resamples of the intervals of the measures of drift: there are hundreds"""

Setting = tuple[Intervention, ...]


class Run(NamedTuple):
    """One run: name of the drafter, key of the input, key of the setting ("" plain)."""

    drafter: str
    input: str
    setting: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How to measure. ``settings``: besides the plain drafter; ``drafts``: folder in which drafts are kept; ``trained_depth``:
    of drafters whose files do not say to what depth training unrolled.
    """

    depth: int = 8
    feed: Feed = "own"
    recent: tuple[int, ...] = (8,)
    settings: tuple[Setting, ...] = ()
    drafts: Path | None = None
    trained_depth: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        keys = [key_of(setting) for setting in self.settings]
        if doubled := [key for key in keys if keys.count(key) > 1 or not key]:
            raise DriftlabError(
                f"two settings are called {doubled[0]!r}, and runs are kept by that name: give one of them another "
                "(TorchHook has name=)"
            )

    def trained(self, drafter: Drafter) -> int:
        """Depth that training unrolled to, 0 if nothing says so."""
        return drafter.config.ttt or self.trained_depth or 0


@dataclass(frozen=True)
class Probed:
    """What was measured.

    ``rows``: tidy; ``replays``: of every run; ``verdicts``: of each drafter, or why there is none; ``pins``: of each run with
    attention pins, what they did.
    """

    config: ProbeConfig
    inputs: Mapping[str, Trajectory]
    drafters: Mapping[str, Drafter]
    rows: pd.DataFrame
    replays: Mapping[Run, Simulation]
    verdicts: Mapping[str, Verdict | str]
    pins: Mapping[Run, tuple[str, ...]]
    sinks: Mapping[str, Sequence[tuple[int, float]]]
    """where each plain drafter itself puts most mass at depth 1, first input: (position, mass)"""
    stabilities: Mapping[tuple[str, str], Stability] = field(default_factory=dict)
    """by drafter and setting, where there are two inputs or more, and the plain one has rounds"""
    comparisons: Mapping[tuple[str, str], pd.DataFrame] = field(default_factory=dict)
    """by drafter and input: each setting with plain, where there are settings"""
    versus: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """by input: each plain drafter with the first, where there are several"""

    @property
    def plain_input(self) -> str:
        """The input that others are compared with."""
        return next(iter(self.inputs))


def parse_settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Read settings, each of one intervention or several joined by " + ".

    Raises:
        DriftlabError: a text that is no intervention, one setting twice.
    """
    found = [tuple(parse_intervention(part) for part in text.split(" + ")) for text in texts]
    keys = [key_of(setting) for setting in found]
    if doubled := [key for key in keys if keys.count(key) > 1]:
        raise DriftlabError(f"the setting {doubled[0]!r} is given twice")
    return tuple(found)


def check_settings(drafters: Mapping[str, Drafter], wanted: Sequence[Setting]) -> None:
    """Lay each setting on each drafter once, without running it. Raises DriftlabError where it has no meaning there."""
    for name, drafter in drafters.items():
        for setting in wanted:
            try:
                with intervened(drafter, setting):
                    pass
            except DriftlabError as error:
                raise DriftlabError(f"{key_of(setting)} on {name}: {error}") from error


def usable_inputs(
    keys: Sequence[str], prompts: Sequence[Prompt], tokenizer: Any, *, room: int
) -> tuple[list[Perturbation], dict[str, str]]:
    """Return the perturbations that can be recorded, the plain one first, and why the others are left out, by key.

    Plain is ``chat``, or ``none`` where the tokenizer has no chat template.

    Args:
        keys: of perturbations.
        prompts: to be perturbed.
        tokenizer: the target's.
        room: tokens that a prompt may have, so that the answer still fits.

    Raises:
        DriftlabError: a key that is none.
    """
    plain = "chat" if tokenizer.chat_template else "none"
    kept, refused = applicable(dict.fromkeys([plain, *keys]), prompts, tokenizer)
    if not kept or kept[0].key != plain:
        raise DriftlabError(f"these prompts cannot be encoded: {refused.get(plain, 'no reason is known')}")
    fits = []
    for perturbation in kept:
        longest = max(map(len, perturbation.encode(prompts, tokenizer)))
        if perturbation.key != plain and longest > room:
            refused[perturbation.key] = f"makes a prompt of {longest} tokens, and {room} leave room for the answer"
            continue
        fits.append(perturbation)
    return fits, refused


def probe(
    drafters: Mapping[str, Drafter],
    inputs: Mapping[str, Trajectory],
    config: ProbeConfig,
    *,
    progress: Progress = silent,
) -> Probed:
    """Measure drafters under every input and setting.

    Args:
        drafters: by name.
        inputs: recordings of the same prompts by the key of their input (``template`` in the rows), the plain one first.
        config: how.
        progress: called with (which run and what, done, total).

    Raises:
        DriftlabError: no drafter or input, one that does not fit, what executors and probes raise.
    """
    if not drafters or not inputs:
        raise DriftlabError("probe wants a drafter and an input at least")
    frames, replays, pins = [], {}, {}
    verdicts: dict[str, Verdict | str] = {}
    sinks: dict[str, list[tuple[int, float]]] = {}
    runs = [(Run(d, i, key_of(s)), s) for d in drafters for i in inputs for s in ((), *config.settings)]
    for count, (run, setting) in enumerate(runs, 1):
        drafter, recorded = drafters[run.drafter], inputs[run.input]
        told = _told(progress, f"{count}/{len(runs)} {' · '.join(filter(None, run))}")
        with drafter.using(config.backend):
            with intervened(drafter, setting) as reports:
                frame, replays[run] = replay_rows(
                    drafter, recorded, run.drafter, depth=config.depth, drafts=config.drafts, progress=told
                )
            probed = probe_rows(
                drafter, recorded, run.drafter, depth=config.depth, feed=config.feed, recent=config.recent,
                interventions=setting, progress=told,
            )  # fmt: skip
            frames += [frame.assign(intervention=run.setting, template=run.input), probed.assign(template=run.input)]
            if any(isinstance(report, PinReport) for report in reports):
                pins[run] = tuple(str(report) for report in reports if isinstance(report, PinReport))
            if not setting and run.input == next(iter(inputs)):
                rows, verdicts[run.drafter] = _judged(drafter, recorded, run.drafter, config, told)
                frames += [one.assign(template=run.input) for one in rows]
                sinks[run.drafter] = _own_sink(drafter, recorded)
    found = Probed(
        config, dict(inputs), dict(drafters), combine(frames, varying=VARIES), replays, verdicts, pins, sinks
    )
    return _compared(found, progress)


def _own_sink(drafter: Drafter, recorded: Trajectory) -> list[tuple[int, float]]:
    if min(entry.prompt_length for entry in recorded.entries) < 2:  # no row before the answer that all prompts have
        return []
    return drafter_sink(drafter, recorded, 3)


def _told(progress: Progress, where: str) -> Progress:
    return lambda what, done, total: progress(f"{where}: {what}", done, total)


def _judged(
    drafter: Drafter, recorded: Trajectory, name: str, config: ProbeConfig, progress: Progress
) -> tuple[list[pd.DataFrame], Verdict | str]:
    trained = config.trained(drafter)
    depth = max(config.depth, 2 * trained)
    try:
        with Recorder(drafter, depth=depth, recent=config.recent) as recorder:
            draft = all_starts(drafter, recorded, depth, feed="text", progress=progress)
        record = recorder.record()
        known = settings(drafter, recorded, name, depth=depth, feed="text")
        frames = [drift_rows(record, heads=False, samples=_SAMPLES, **known)]
        if not trained:
            return frames, "its file does not say to what depth training unrolled it: give --trained-depth"
        found = verdict(record, accept(draft, recorded), trained, samples=_SAMPLES)
    except DriftlabError as error:
        return [], str(error)
    lines = [
        {"quantity": f"verdict_{sign.name}", "depth": found.beyond, **sign.interval._asdict()} for sign in found.signs
    ]
    return [*frames, as_rows(lines, **known, starts="all")], found


def _compared(found: Probed, progress: Progress) -> Probed:
    """Add what is made of several runs, and its rows."""
    inputs, first = tuple(found.inputs), found.plain_input
    keys = [key_of(setting) for setting in found.config.settings]
    stabilities, comparisons, versus, frames = {}, {}, {}, [found.rows]
    for count, name in enumerate(found.drafters):
        progress("comparing runs", count, len(found.drafters))
        for setting in ("", *keys):
            # without a round under the plain input there is nothing to compare with, and all else is still worth having
            if len(inputs) > 1 and found.replays[Run(name, first, setting)].verify_rounds.sum():
                one = stability({i: found.replays[Run(name, i, setting)] for i in inputs}, plain=first)
                stabilities[name, setting] = one
                lines = list(one.records())
                known = _known(found, name, first) | {"intervention": setting}
                frames.append(as_rows(lines, **{k: v for k, v in known.items() if k != "template"}))
        if keys:
            for i in inputs:
                runs = {setting: found.replays[Run(name, i, setting)] for setting in ("", *keys)}
                comparisons[name, i] = compare(runs, "")
                frames.append(as_rows(_differences(comparisons[name, i]), **_known(found, name, i)))
    if len(found.drafters) > 1:
        for i in inputs:
            versus[i] = compare(
                {name: found.replays[Run(name, i)] for name in found.drafters}, next(iter(found.drafters))
            )
    progress("comparing runs", len(found.drafters), len(found.drafters))
    for i, recorded in found.inputs.items():
        said = recorded.settings
        shared = {name: said[name] for name in ("temperature", "top_k", "top_p", "template", "seed")}
        frames.append(as_rows(list(text_records(recorded)), target=recorded.spec.label, **{**shared, "template": i}))
    return dataclasses.replace(
        found,
        rows=combine(frames, varying=(*VARIES, "drafting", "target")),
        stabilities=stabilities,
        comparisons=comparisons,
        versus=versus,
    )


def _known(found: Probed, name: str, key: str) -> dict[str, Any]:
    known = settings(found.drafters[name], found.inputs[key], name, depth=found.config.depth, feed="text")
    return {**known, "template": key, "rule": "argmax", "starts": "walk"}


def _differences(table: pd.DataFrame) -> list[dict[str, Any]]:
    """tau of a setting less that of the plain drafter, and the p-values, as records."""
    lines = []
    for row in table.itertuples():
        at = {"intervention": row.name, "n": row.prompts}
        lines.append({**at, "quantity": "tau_difference", "value": row.difference, "low": row.low, "high": row.high})
        for name in ("p", "p_adjusted"):
            lines.append({**at, "quantity": f"tau_difference_{name}", "value": getattr(row, name)})
    return lines
