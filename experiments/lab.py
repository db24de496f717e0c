"""The lab on the shipped drafters: what changes when one thing is changed, beside what the paper reports.

    python experiments/lab.py [--prompts 32] [--out runs/lab] [--only template window noise pin depth]

eagle3 is the paper's pre-norm drafter, norm_output its post-norm one; eagle31 (fc_norm as well) stands beside them. Target:
SmolLM2-135M-Instruct, greedy, K = 8. Each section writes one table, ``runs/lab/<section>.csv``, as soon as it is done, and is
skipped when its table is there and was made with the same settings; recordings are cached.

    template  tau under other inputs, with what the target's own text says beside it, and stability
    window    tau on prompts far longer than those trained on: full attention, windows, with what is carried
    noise     accepted drafts under noise on one input path, in % of those without
    pin       magnitude pins, attention pins at the drafter's own sink with their controls
    depth     the feedback and the attention by depth, text-fed match, and the verdict

``claims.csv`` has one row a contrast: the paper's number, ours with its 95 % interval over prompts, and in words whether it
points the same way. An interval that holds 0 is undecided, whatever its middle.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import tyro

from driftlab import Drafter, ProgressBar, Target, Trajectory, accept, all_starts, load_prompts, simulate
from driftlab.drift import Recorder, drift_rows, verdict
from driftlab.errors import DriftlabError
from driftlab.files import atomic, write_json, write_text
from driftlab.intervals import Interval, percentile_interval
from driftlab.interventions import PinReport, intervened, parse_intervention
from driftlab.measure import drafter_sink
from driftlab.perplexity import text_records
from driftlab.perturbations import BOS_GRID, Perturbation, applicable
from driftlab.prompts import Prompt, evenly
from driftlab.results import provenance
from driftlab.stability import compare_stability, stability

PRE, POST, BOTH = "smollm2-eagle3", "smollm2-norm_output", "smollm2-eagle31"
TTT2 = ("smollm2-eagle3-ttt2", "smollm2-eagle31-ttt2")
INPUTS = (
    *("chat", "none", *BOS_GRID, "system=empty", "system=foreign", "system=long", "system=ood"),
    *("format=llama3", "format=mistral", "whitespace=double", "roles=human", "turns=2", "language=de"),
)
ALPHAS = (0.1, 0.25, 0.5, 1.0, 2.0)
PAPER = Path(__file__).parent / "data" / "paper_numbers.csv"
Section = Literal["template", "window", "noise", "pin", "depth"]


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Sizes."""

    prompts: int = 32
    """of the project's own"""
    answer_tokens: int = 64
    depth: int = 8
    context: int = 900
    """tokens of prompt of the window section, at least; the drafters were trained on some 300"""
    context_prompts: int = 10
    window: int = 128
    out: Path = Path("runs/lab")
    only: tuple[Section, ...] = ("template", "window", "noise", "pin", "depth")


def main(lab: Lab) -> None:
    """Run the sections, print tables and sentences."""
    target = Target.load("smollm2", progress=ProgressBar())
    prompts = evenly(load_prompts("default"), lab.prompts)
    for name in lab.only:
        began = time.perf_counter()
        table, claims = _kept(lab, name, lambda name=name: SECTIONS[name](lab, target, prompts))
        print(f"\n## {name} ({time.perf_counter() - began:.0f} s)\n")
        print(table.to_string(index=False, float_format=lambda x: f"{x:.3f}", na_rep=""))
        for line in claims.itertuples():
            print(f"- {_sentence(line)}")
    done = [pd.read_csv(path) for name in SECTIONS if (path := lab.out / f"{name}.claims.csv").exists()]
    with atomic(lab.out / "claims.csv") as temporary:
        pd.concat(done).to_csv(temporary, index=False, float_format="%.6g")
    words = pd.concat(done)["word"].value_counts()
    print(f"\nclaims: {', '.join(f'{n} {word}' for word, n in words.items())}; {lab.out / 'claims.csv'}")


def _kept(lab: Lab, name: str, make: Callable[[], tuple[pd.DataFrame, pd.DataFrame]]) -> tuple[Any, Any]:
    """Return a section's table and claims, from disk where the same settings made them."""
    settings = {key: str(value) for key, value in dataclasses.asdict(lab).items() if key not in ("only", "out")}
    paths, told = [lab.out / f"{name}.csv", lab.out / f"{name}.claims.csv"], lab.out / f"{name}.run.json"
    if told.exists() and json.loads(told.read_text())["settings"] == settings and all(p.exists() for p in paths):
        return tuple(pd.read_csv(path) for path in paths)
    frames = make()
    for path, frame in zip(paths, frames, strict=True):
        with atomic(path) as temporary:
            frame.to_csv(temporary, index=False, float_format="%.6g")
    write_json(told, provenance(settings))
    return tuple(pd.read_csv(path) for path in paths)


# ---------------------------------------------------------------------------------------------- contrasts and words


Counts = tuple[np.ndarray, np.ndarray]
"""numerator and denominator of a pooled ratio, per prompt"""


def rounds_of(simulation: Any) -> Counts:
    """Emitted tokens and rounds: their ratio is tau."""
    return np.asarray(simulation.emitted, dtype=float), np.asarray(simulation.verify_rounds, dtype=float)


def deep_match_of(simulation: Any) -> Counts:
    """Matches and judged drafts at depths 2..K of all starts: sees a change deep in the chain where rounds seldom get."""
    told = simulation.acceptance
    valid = told.valid[..., 1:]
    return tuple(x.sum((1, 2)).double().numpy() for x in (told.match[..., 1:] & valid, valid))


def contrast(statistic: Callable[[np.ndarray], Any], counts: Sequence[Counts], *, samples: int = 2000) -> Interval:
    """Return a function of several pooled ratios with its 95 % interval over prompts, the same in all.

    ``statistic``: ``[... ratio]`` to ``[...]``.
    """
    top, bottom = (np.stack([pair[i] for pair in counts]) for i in (0, 1))

    def ratios(chosen: np.ndarray) -> np.ndarray:
        sums = [a[:, chosen].sum(-1) for a in (top, bottom)]
        return np.moveaxis(np.divide(*sums, out=np.full(sums[0].shape, np.nan), where=sums[1] > 0), 0, -1)

    value = float(statistic(ratios(np.arange(top.shape[1])[None]))[0])
    informative = int((bottom > 0).sum(1).min())
    return percentile_interval(value, lambda c: statistic(ratios(c)), top.shape[1], informative, samples, 0, 0.95)


def gained(t: np.ndarray) -> np.ndarray:
    """Second less first."""
    return t[..., 1] - t[..., 0]


def claim(what: str, ours: Interval, paper: float | None, hand: str = "", source: str = "") -> dict[str, Any]:
    """Return one row: do we see a contrast of the paper's sign?"""
    low, high = ours.low, ours.high
    if paper is None:
        word = "no published number"
    elif not (low > 0 or high < 0):
        word = "undecided"
    else:
        word = "same direction" if (ours.value > 0) == (paper > 0) else "opposite"
    return {
        "claim": what,
        "paper": paper,
        "hand": hand,
        "source": source,
        "ours": ours.value,
        "low": low,
        "high": high,
        "word": word,
    }


def _sentence(line: Any) -> str:
    ours = f"{line.ours:+.3f} [{line.low:+.3f}, {line.high:+.3f}]"
    if np.isnan(line.paper):
        return f"{line.claim}: {ours}; no published number."
    return f"{line.claim}: paper {line.paper:+.3f} ({line.source}, read at {line.hand} hand), here {ours}: {line.word}."


def _paper(section: str) -> pd.DataFrame:
    return pd.read_csv(PAPER, comment="#").query("claim == @section")


def published(section: str, drafter: str, setting: str, quantity: str, depth: int = 0) -> float:
    """One published number."""
    found = _paper(section).query(
        "drafter == @drafter and setting.fillna('') == @setting and quantity == @quantity and depth == @depth"
    )
    return float(found["value"].iloc[0])


def _replayed(drafter: Drafter, answers: Trajectory, depth: int, keys: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """Simulation, and what the interventions report."""
    with intervened(drafter, [parse_intervention(key) for key in keys]) as reports:
        draft = all_starts(drafter, answers, depth)
    return simulate(accept(draft, answers)), reports


def _drafters(names: Sequence[str], answers: Trajectory) -> dict[str, Drafter]:
    return {name: Drafter.load(name, answers).eval() for name in names}


def _tau_row(simulation: Any) -> dict[str, float]:
    tau, deep = simulation.tau_interval(), contrast(lambda t: t[..., 0], [deep_match_of(simulation)]).within(0, 1)
    row = {"tau": tau.value, "low": tau.low, "high": tau.high, "rounds": float(simulation.verify_rounds.sum())}
    return {**row, "match_2_to_K": deep.value, "match_low": deep.low, "match_high": deep.high}


def _changes(what: str, plain: Any, changed: Any, paper: float | None = None, **told: str) -> list[dict[str, Any]]:
    """Claims about tau, and about the match deep in the chain, of one change."""
    tau = contrast(gained, [rounds_of(plain), rounds_of(changed)])
    match = contrast(gained, [deep_match_of(plain), deep_match_of(changed)])
    return [claim(f"{what}: tau", tau, paper, **told), claim(f"{what}: match at depths 2 to K", match, None)]


# ---------------------------------------------------------------------------------------------- sections


def template(lab: Lab, target: Target, prompts: Sequence[Prompt]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tau under other inputs, perplexity and repetition of the text, and stability of each drafter.

    "held": the answer given to the plain input is kept, and only what stands before it is changed; the target would have
    answered otherwise (without its template this one often ends at once), so the text is no longer its own.
    """
    kept, refused = applicable(INPUTS, prompts, target.tokenizer)
    for key, why in refused.items():
        print(f"left out: {key}: {why}")
    own = {one.key: _answers(lab, target, prompts, one) for one in kept}
    plain = own["chat"]
    texts = [plain.tokens(i)[entry.prompt_length :].tolist() for i, entry in enumerate(plain.entries)]
    held = {
        f"{one.key}, text held": _answers(lab, target, prompts, one, answers=texts)
        for one in kept
        if one.key in ("none", *BOS_GRID)
    }
    names, rows, sims = (PRE, POST, BOTH), [], {name: {} for name in (PRE, POST, BOTH)}
    for key, answers in {**own, **held}.items():
        text = _of_the_text(answers)
        for name, drafter in _drafters(names, answers).items():
            sims[name][key], _ = _replayed(drafter, answers, lab.depth)
            rows.append({"drafter": name, "input": key, **_tau_row(sims[name][key]), **text})
    table = pd.DataFrame(rows)
    with_rounds = [key for key in own if all(sims[name][key].verify_rounds.sum() for name in names)]
    found = {name: stability({key: sims[name][key] for key in with_rounds}) for name in names}
    for row in table.itertuples():
        if row.input in with_rounds:
            table.loc[row.Index, "loss"] = _loss(sims[row.drafter], row.input)

    def relative_loss(t: np.ndarray) -> np.ndarray:
        return 1 - t[..., 1] / t[..., 0]

    claims = []
    for key, theirs in (("none+bos=on, text held", "no template, BOS"), ("none, text held", "no template, no BOS")):
        lost = [
            1
            - published("template", d, theirs, "accept length")
            / published("template", d, "template, BOS", "accept length")
            for d in ("eagle3", "norm_output")
        ]
        four = [rounds_of(sims[name][which]) for name in (PRE, POST) for which in ("chat", key)]
        told = {"hand": "first", "source": f"{theirs}, Llama 3.1 8B"}
        claims += [
            claim(f"pre-norm: relative loss of tau, {key}", contrast(relative_loss, four[:2]), lost[0], **told),
            claim(f"post-norm: relative loss of tau, {key}", contrast(relative_loss, four[2:]), lost[1], **told),
            claim(
                f"pre-norm loses more than post-norm, {key}",
                contrast(lambda t: relative_loss(t[..., :2]) - relative_loss(t[..., 2:]), four),
                lost[0] - lost[1],
                **told,
            ),
        ]
    for name in (POST, BOTH):
        for quantity, interval in compare_stability(found[PRE], found[name]).items():
            if quantity.startswith("tau_loss"):
                what = f"{quantity} over {len(found[name].keys)} inputs: eagle3 less {name.removeprefix('smollm2-')}"
                claims.append(claim(what, interval, None))
    return table, pd.DataFrame(claims)


def _loss(sims: dict[str, Any], key: str) -> float:
    """Relative loss of tau on the prompts that have a round under both inputs."""
    if key == "chat":
        return 0.0
    return stability({"chat": sims["chat"], key: sims[key]}, least=0).loss(key).value


def _answers(
    lab: Lab, target: Target, prompts: Sequence[Prompt], perturbation: Perturbation, **more: Any
) -> Trajectory:
    options = {"max_new_tokens": lab.answer_tokens, "perturbation": perturbation, "progress": ProgressBar()}
    return target.record(prompts, **options, **more)


def _of_the_text(answers: Trajectory) -> dict[str, float]:
    """Perplexity, and how much the answers repeat themselves, means over prompts."""
    frame = pd.DataFrame(text_records(answers))
    told = {"perplexity": frame.query("quantity == 'perplexity' and prompt.fillna('') == ''")["value"].mean()}
    return told | {q: frame.loc[frame["quantity"] == q, "value"].mean() for q in ("repeated_ngrams", "periodic_tail")}


def window(lab: Lab, target: Target, prompts: Sequence[Prompt]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Contexts far beyond the trained length: full attention, windows, carried keys, positions kept and re-numbered."""
    chosen = {prompt.id for prompt in prompts[: lab.context_prompts]}
    others = [p.messages[-1].content for p in load_prompts("default") if p.id not in chosen]
    write_text(lab.out / "filler.txt", "\n\n".join(others))
    long = Perturbation.parse(f"before={lab.context}@{lab.out / 'filler.txt'}")
    answers = _answers(lab, target, prompts[: lab.context_prompts], long)
    plain = [*zip(*Perturbation().encode(prompts, target.tokenizer), strict=False)]
    system = next(i for i, tokens in enumerate(plain) if len(set(tokens)) > 1)  # what all prompts begin with
    w = lab.window
    keys = {
        "full": (),
        "window": (f"window:{w}",),
        "window + BOS": (f"window:{w}:carried=sink",),
        "window + system prompt": (f"window:{w}:carried={system}",),
        "window + BOS, re-numbered": (f"window:{w}:carried=sink:positions=renumbered",),
        "window x 2": (f"window:{2 * w}",),
    }
    rows, sims = [], {}
    for name, drafter in _drafters((PRE, POST, BOTH), answers).items():
        for setting, key in keys.items():
            sims[name, setting], _ = _replayed(drafter, answers, lab.depth, key)
            rows.append({"drafter": name, "setting": setting, "key": " + ".join(key), **_tau_row(sims[name, setting])})
    claims = []
    for name, theirs in ((PRE, "eagle3"), (POST, "norm_output")):
        for setting in ("window", "window + BOS", "window + system prompt"):
            paper = [published("window", theirs, s, "accept length") for s in ("full", setting)]
            told = {"hand": "second", "source": "long context"}
            pair = sims[name, "full"], sims[name, setting]
            claims += _changes(f"{theirs}: {setting} less full attention", *pair, paper[1] - paper[0], **told)
    return pd.DataFrame(rows), pd.DataFrame(claims)


def noise(lab: Lab, target: Target, prompts: Sequence[Prompt]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Gaussian noise on one input path: accepted drafts a round, in % of those without noise."""
    answers = target.record(prompts, max_new_tokens=lab.answer_tokens, progress=ProgressBar())
    rows, sims, claims = [], {}, []

    def percent(t: np.ndarray) -> np.ndarray:
        return 100 * (t[..., 1] - 1) / (t[..., 0] - 1)

    for name, drafter in _drafters((PRE, POST, BOTH), answers).items():
        clean, _ = _replayed(drafter, answers, lab.depth)
        for path in ("hidden", "embedding"):
            for alpha in ALPHAS:
                key = f"noise:{path}:{alpha:g}"
                sims[name, key], _ = _replayed(drafter, answers, lab.depth, [key])
                left = contrast(percent, [rounds_of(clean), rounds_of(sims[name, key])])
                row = {"drafter": name, "path": path, "alpha": alpha, **_tau_row(sims[name, key])}
                rows.append({**row, "percent": left.value, "percent_low": left.low, "percent_high": left.high})
        sims[name, "clean"] = clean
    for path in ("hidden", "embedding"):
        for alpha in ALPHAS:
            key = f"noise:{path}:{alpha:g}"
            four = [rounds_of(sims[name, which]) for name in (PRE, POST) for which in ("clean", key)]
            ours = contrast(lambda t: percent(t[..., 2:]) - percent(t[..., :2]), four)
            paper = [published("noise", d, key, "percent") for d in ("eagle3", "norm_output")]
            what = f"{key}: % of accepted drafts kept, post-norm less pre-norm"
            if paper[0] != paper[1]:
                claims.append(claim(what, ours, paper[1] - paper[0], "first", "Table 3, Llama 3.1 8B"))
    return pd.DataFrame(rows), pd.DataFrame(claims)


def pin(lab: Lab, target: Target, prompts: Sequence[Prompt]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Magnitude pins; attention pins at the position where the drafter itself rests at depth 1, with their controls."""
    answers = target.record(prompts, max_new_tokens=lab.answer_tokens, progress=ProgressBar())
    rows, claims = [], []
    attention = ("pin:sink", "pin:equal", "pin:sink:state=rescaled", "sink:drop")
    for name, drafter in _drafters((PRE, POST, BOTH), answers).items():
        short = name.removeprefix("smollm2-")
        (position, held), *_ = drafter_sink(drafter, answers, 1)
        own = answers.with_sinks((position,))
        clean, _ = _replayed(drafter, answers, lab.depth)
        rows.append({"drafter": name, "setting": "plain", **_tau_row(clean)})
        for key in ("magnitude:fused", "magnitude:depth1", "gain", "held"):
            changed, _ = _replayed(drafter, answers, lab.depth, [key])
            rows.append({"drafter": name, "setting": key, **_tau_row(changed)})
            paper = None
            if key == "magnitude:fused" and name != BOTH:
                paper = published("pin", short, key, "accept length") - published(
                    "pin", short, "plain", "accept length"
                )
            told = {"hand": "first", "source": "Table 4, Llama 3.1 8B"}
            claims += _changes(f"{short}: {key} less plain", clean, changed, paper, **told)
        pinned = {}
        for key in attention:
            try:
                pinned[key], reports = _replayed(drafter, own, lab.depth, [key])
            except DriftlabError as error:
                rows.append(
                    {"drafter": name, "setting": key, "sink": position, "sink_mass": held, "report": str(error)}
                )
                continue
            told = "; ".join(str(report) for report in reports if isinstance(report, PinReport))
            row = {"drafter": name, "setting": key, **_tau_row(pinned[key]), "sink": position}
            rows.append({**row, "sink_mass": held, "report": told})
            what = f"{short}: {key} less plain (sink at {position}, {held:.3f} of depth 1's mass)"
            claims += _changes(what, clean, pinned[key])
        if {"pin:sink", "pin:equal"} <= set(pinned):
            claims += _changes(f"{short}: pin:sink less its control", pinned["pin:equal"], pinned["pin:sink"])
    return pd.DataFrame(rows), pd.DataFrame(claims)


def depth(lab: Lab, target: Target, prompts: Sequence[Prompt]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measures of drift by depth with intervals, the verdict, and the match far beyond the trained depth."""
    answers = target.record(prompts, max_new_tokens=lab.answer_tokens, progress=ProgressBar())
    rows, claims = [], []
    for name, drafter in _drafters((PRE, POST, BOTH, *TTT2), answers).items():
        trained, short = drafter.config.ttt, name.removeprefix("smollm2-")
        with Recorder(drafter, depth=lab.depth) as recorder:
            all_starts(drafter, answers, lab.depth)
        record = recorder.record()
        deep = accept(all_starts(drafter, answers, 16), answers)
        frame = drift_rows(record).query("prompt == '' and head == -1")
        kept = frame[["layer", "depth", "window", "quantity", "value", "low", "high", "n"]]
        rows.append(kept.assign(drafter=name))
        found = verdict(record, deep, trained)
        rows.append(
            pd.DataFrame([{"drafter": name, "quantity": f"verdict: {found.word} ({', '.join(found.because)})"}])
        )
        for one in found.signs:
            rows.append(
                pd.DataFrame([{"drafter": name, "quantity": f"sign {one.name}: {one.state}", **one.interval._asdict()}])
            )
        growth = frame.query("quantity == 'growth' and depth == @lab.depth").iloc[0]
        grown = Interval(growth["value"] - 1, growth["low"] - 1, growth["high"] - 1)
        theirs = {PRE: "eagle3", POST: "norm_output"}.get(name)
        paper = None
        if theirs:
            first, last = (published("magnitude", theirs, "", "rms", k) for k in (1, 8))
            paper = last / first - 1
        source = {"hand": "first", "source": "Table 2, Llama 3.1 8B"}
        claims.append(claim(f"{short}: growth of the feedback's RMS, depth 1 to {lab.depth}", grown, paper, **source))
        for quantity, measure in (("sink", "sink_loss"), ("recent", "recent_gain")):
            mine = frame.query("quantity == @measure and depth == @lab.depth").iloc[0]
            paper = None
            if theirs:
                first, last = (published("attention", theirs, "", quantity, k) for k in (1, 8))
                paper = first - last if quantity == "sink" else last - first
            interval = Interval(mine["value"], mine["low"], mine["high"])
            claims.append(claim(f"{short}: {measure} at depth {lab.depth}, equal position", interval, paper, **source))
    return pd.concat(rows, ignore_index=True), pd.DataFrame(claims)


SECTIONS: dict[str, Callable[[Lab, Target, Sequence[Prompt]], tuple[pd.DataFrame, pd.DataFrame]]] = {
    "template": template,
    "window": window,
    "noise": noise,
    "pin": pin,
    "depth": depth,
}


if __name__ == "__main__":
    main(tyro.cli(Lab, description=__doc__))
