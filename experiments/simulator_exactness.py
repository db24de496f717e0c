"""Is the simulator exact, rule by rule and tree by tree, and would it notice a wrong rule?

    python experiments/simulator_exactness.py [--prompts 6] [--rounds 12000] [--seed 0]

Exact, each a check that holds or does not:
  enumeration   every draft, verdict and redraw of a round on random distributions over 2 to 5 tokens: the text has the
                target's distribution, and replay's P(at least k accepted | text) is that of the enumeration
  siblings      children sampled without replacement: the same for one node
  live          SmolLM2-135M-Instruct, greedy: the live loop's list of rounds is replay's, for chains and trees, and its text
                that of plain decoding; under exact match and with trees of a sampling target too

Sampled: the live loop under each rule on tiny random targets, against what replay expects of its texts; z in standard
deviations, bound three of them corrected for the number of z's.

Wrong mixes: acceptance of one rule with the fallback of another, by the same enumeration and by a chi-square of texts drawn
with dice. Each has to fail both.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro
from live_common import SETTINGS, tiny, worst_z
from scipy.stats import chi2

from driftlab import (
    Drafter,
    DynamicTree,
    ProgressBar,
    Sampling,
    StaticTree,
    Target,
    Trajectory,
    accept,
    all_starts,
    load_prompts,
    simulate,
    speculate,
    tree_all_starts,
)
from driftlab.files import atomic
from driftlab.prompts import evenly
from driftlab.rules import SAMPLED_RULES, WRONG_MIXES, Law, TokenRule, given_text, round_law, verify
from driftlab.siblings import sibling_law
from driftlab.trees import Tree
from driftlab.workers import run_jobs

TREES: tuple[Tree, ...] = (
    StaticTree.chains(4, 4),
    DynamicTree.eagle(depth=5, top_k=6, total_tokens=24),
    DynamicTree(depth=8, top_k=1, total=8),
)
Table = dict[tuple[int, ...], torch.Tensor]


def main(
    drafters: tuple[str, ...] = ("smollm2-eagle3", "smollm2-eagle31"),
    prompts: int = 6,
    max_new_tokens: int = 48,
    rounds: int = 12000,
    seed: int = 0,
    out: Path = Path("runs/simulator_exactness"),
) -> None:
    """Run all checks, write them, print those that failed; the last line is the verdict."""
    bar = ProgressBar()
    checks = enumeration() + siblings()
    target = Target.load("smollm2", progress=bar)
    checks += live(target, drafters, evenly(load_prompts("default"), prompts), max_new_tokens, out, bar)
    exact = pd.DataFrame(checks, columns=["kind", "what", "holds"])
    each = rounds // (len(SAMPLED_RULES) * len(SETTINGS))
    pairs = itertools.product(range(len(SETTINGS)), SAMPLED_RULES)
    jobs = [(index, rule, each, seed, out / f"{rule}-{index}") for index, rule in pairs]
    counts = pd.concat(run_jobs(tiny, jobs, what="live, tiny targets", progress=bar))
    caught = {name: caught_by(rule) for name, rule in WRONG_MIXES.items()}
    for name, table in (("exact", exact), ("sampled", counts)):
        with atomic(out / f"{name}.csv") as temporary:
            table.to_csv(temporary, index=False)

    for kind, rows in exact.groupby("kind", sort=False):
        print(f"{kind}: {int(rows['holds'].sum())}/{len(rows)}")
    print(exact[~exact["holds"]].to_string(index=False) if not exact["holds"].all() else "no check failed")
    counts = counts.assign(rule=counts["run"].str.extract(r", (\w+):")[0])
    for rule, rows in counts.groupby("rule", sort=False):
        n = int(rows[rows["quantity"] == "rounds"]["live"].sum())
        print(f"{rule}: {n} live rounds, max |z| = {rows['z'].abs().max():.2f}")
    for name, (distance, p_value) in caught.items():
        print(f"wrong mix {name}: texts off by up to {distance:.3f}, chi-square p = {p_value:.1e}")
    worst, bound = worst_z(counts)
    found = sum(distance > 0.01 and p_value < 1e-6 for distance, p_value in caught.values())
    total = int(counts[counts["quantity"] == "rounds"]["live"].sum())
    holds = int(exact["holds"].sum())
    print(
        f"exact: {holds}/{len(exact)}; sampled: max |z| = {worst:.2f} over {total} rounds; wrong mixes caught: "
        f"{found}/{len(caught)}"
    )
    if holds < len(exact) or not worst < bound or found < len(caught):
        raise SystemExit(1)


# ---- enumeration


def tables(vocab: int, depth: int, seed: int) -> tuple[Table, Table]:
    """Random p and q after every prefix of up to ``depth`` tokens; odd seeds have zeros in both."""
    generator = np.random.default_rng(seed)
    found: list[Table] = []
    for _ in range(2):
        table: Table = {}
        for prefix in itertools.chain.from_iterable(
            itertools.product(range(vocab), repeat=length) for length in range(depth + 1)
        ):
            weights = generator.dirichlet(np.full(vocab, 0.7))
            if seed % 2:
                weights[generator.integers(vocab)] = 0
            table[prefix] = torch.tensor(weights / weights.sum())
        found.append(table)
    return found[0], found[1]


def product(table: Table, text: tuple[int, ...], places: range) -> float:
    """Product of the table's values along the text at some places."""
    return math.prod(float(table[text[:k]][text[k]]) for k in places)


def off_by(law: Law, p: Table, vocab: int, length: int, at_least: int = 0) -> dict[tuple[int, ...], float]:
    """Probability of each text of ``length`` tokens, rounds with fewer accepted left out; the target goes on after one."""
    total = dict.fromkeys(itertools.product(range(vocab), repeat=length), 0.0)
    for text in total:
        for (tokens, accepted), chance in law.items():
            if accepted >= at_least and tokens == text[: len(tokens)]:
                total[text] += chance * product(p, text, range(len(tokens), length))
    return total


def enumeration() -> list[tuple[str, str, bool]]:
    """Each rule on each table: losslessness, and replay given every text."""
    found = []
    for rule, (vocab, depth), seed in itertools.product(SAMPLED_RULES, ((2, 4), (3, 3), (4, 2), (5, 1)), range(6)):
        p, q = tables(vocab, depth, seed)
        law = round_law(rule, p.__getitem__, q.__getitem__, depth)
        what = f"{rule}, {vocab} tokens, K {depth}, seed {seed}"
        truth = {text: product(p, text, range(depth + 1)) for text in off_by(law, p, vocab, depth + 1)}
        texts = off_by(law, p, vocab, depth + 1)
        found.append(("lossless", what, all(abs(texts[t] - truth[t]) < 1e-12 for t in truth)))
        holds = True
        for k in range(1, depth + 1):
            reached = off_by(law, p, vocab, depth + 1, k)
            for text, chance in truth.items():
                if chance:
                    qs, ps = (torch.stack([t[text[:j]][text[j]] for j in range(depth)]) for t in (q, p))
                    replayed = float(given_text(rule, qs, ps).cumprod(-1)[k - 1])
                    holds &= abs(replayed - reached[text] / chance) < 1e-11
        found.append(("replay", what, holds))
    return found


def siblings() -> list[tuple[str, str, bool]]:
    """Recursive rejection with the conditional q is lossless; with the unconditional q it is not, and that is seen."""
    found, gaps = [], []
    for vocab, children, seed in itertools.product((3, 6), (2, 3), range(4)):
        p, q = (table[()] for table in tables(vocab, 0, 2 * seed))
        _, output = sibling_law(p, q, children)
        holds = float((output - p).abs().max()) < 1e-12
        found.append(("siblings", f"{vocab} tokens, {children} children, seed {seed}", holds))
        gaps.append(float((sibling_law(p, q, children, conditional=False)[1] - p).abs().max()))
    return [*found, ("siblings", "the unconditional q is seen", max(gaps) > 0.01)]


# ---- the live loop


def live(
    target: Target, names: tuple[str, ...], prompts: list[Any], limit: int, out: Path, bar: ProgressBar
) -> list[tuple[str, str, bool]]:
    """Greedy and sampled texts of the target, chains and trees: text and rounds, prompt for prompt."""
    found = []
    for sampling in (Sampling(), Sampling(0.8, seed=1)):
        trajectory = target.record(
            prompts,
            max_new_tokens=limit,
            temperature=sampling.temperature,
            seed=sampling.seed,
            out=out / f"T{sampling.temperature:g}",
            progress=bar,
        )
        for name in names:
            drafter = Drafter.load(name, trajectory).eval()
            chain = simulate(accept(all_starts(drafter, trajectory, 6), trajectory))
            found += compare(target, drafter, trajectory, prompts, f"{name}, chain", sampling, chain, bar, depth=6)
            if sampling.temperature:
                how = {"depth": 4, "rule": "exact"}
                found += compare(target, drafter, trajectory, prompts, f"{name}, exact", sampling, None, bar, **how)
            for tree in TREES if sampling.temperature == 0 else TREES[1:2]:
                replayed = simulate(accept(tree_all_starts(drafter, trajectory, tree), trajectory))
                what = f"{name}, {tree.label}"
                found += compare(target, drafter, trajectory, prompts, what, sampling, replayed, bar, tree=tree)
    return found


def compare(
    target: Target,
    drafter: Drafter,
    trajectory: Trajectory,
    prompts: list[Any],
    what: str,
    sampling: Sampling,
    replayed: Any,
    bar: ProgressBar,
    **how: Any,
) -> list[tuple[str, str, bool]]:
    """One check a prompt. Under rules other than exact match arg-max chains of a sampling target have texts of their own."""
    found = []
    own_text = sampling.temperature > 0 and "depth" in how and how.get("rule") != "exact"
    for index, entry in enumerate(trajectory.entries):
        tokens = trajectory.tokens(index).tolist()
        prompt, answer = tokens[: entry.prompt_length], tokens[entry.prompt_length :]
        run = speculate(
            target, drafter, prompt, max_new_tokens=trajectory.settings["max_new_tokens"], sampling=sampling, **how
        )
        holds = own_text or list(run.tokens) == answer
        if replayed is not None and not own_text:
            holds &= run.rounds == replayed.rounds[index]
        if own_text:
            holds = _own_text(target, drafter, run, prompts[index], prompt, sampling, how["depth"])
        found.append(("live", f"{what}, T {sampling.temperature:g}, {entry.id}", bool(holds)))
        bar(f"live: {what}", index + 1, len(trajectory))
    return found


def _own_text(
    target: Target, drafter: Drafter, run: Any, prompt: Any, ids: list[int], sampling: Sampling, depth: int
) -> bool:
    """Record the text that came out and replay it: arg-max drafts are accepted iff they are the text."""
    with tempfile.TemporaryDirectory() as folder:
        trajectory = target.record(
            [prompt],
            answers=[run.tokens],
            own_answers=True,
            max_new_tokens=len(run.tokens),
            temperature=sampling.temperature,
            out=Path(folder) / "own",
        )
        if trajectory.tokens(0).tolist() != [*ids, *run.tokens]:
            return False
        (rounds,) = simulate(accept(all_starts(drafter, trajectory, depth), trajectory)).rounds
    return run.rounds == rounds


# ---- wrong mixes


def caught_by(rule: TokenRule, rounds: int = 4000) -> tuple[float, float]:
    """Distance of the texts' distribution from the target's, and the p-value of texts drawn with dice."""
    vocab, depth = 3, 2
    p, q = tables(vocab, depth, seed=4)
    law = round_law(rule, p.__getitem__, q.__getitem__, depth)
    texts = off_by(law, p, vocab, depth + 1)
    truth = {text: product(p, text, range(depth + 1)) for text in texts}
    generator = torch.Generator().manual_seed(0)

    def roll() -> torch.Tensor:
        return torch.rand(1, generator=generator, dtype=torch.float64)

    def drawn(weights: torch.Tensor) -> int:
        return int(torch.searchsorted(weights.cumsum(0), float(roll()), right=True).clamp(max=vocab - 1))

    seen = dict.fromkeys(texts, 0)
    for _ in range(rounds):
        drafts: list[int] = []
        for _ in range(depth):
            drafts.append(drawn(q[tuple(drafts)]))
        heads = [tuple(drafts[:k]) for k in range(depth + 1)]
        accepted, last = verify(
            rule, drafts, torch.stack([p[h] for h in heads]), torch.stack([q[h] for h in heads[:-1]]), roll
        )
        text = [*drafts[:accepted], last]
        while len(text) <= depth:
            text.append(drawn(p[tuple(text)]))
        seen[tuple(text)] += 1
    often = [t for t, chance in truth.items() if chance * rounds >= 10]
    cells = [(seen[t], rounds * truth[t]) for t in often]
    cells.append((rounds - sum(n for n, _ in cells), rounds - sum(n for _, n in cells)))
    statistic = sum((n - expected) ** 2 / expected for n, expected in cells if expected > 0)
    return max(abs(texts[t] - truth[t]) for t in texts), float(chi2.sf(statistic, len(cells) - 1))


if __name__ == "__main__":
    tyro.cli(main)
