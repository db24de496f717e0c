"""The exactness experiment's own parts, on tiny models: it must be able to pass, and to fail."""

import dataclasses
import sys
from pathlib import Path

import pytest

from driftlab import Sampling, accept, all_starts, simulate, tree_all_starts
from driftlab.progress import ProgressBar
from driftlab.rules import WRONG_MIXES
from driftlab.trees import DynamicTree

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))
import live_common  # noqa: E402
import simulator_exactness as experiment  # noqa: E402


def test_enumerations_hold_and_are_many():
    checks = experiment.siblings()
    assert len(checks) > 15
    assert all(holds for _, _, holds in checks)


def test_every_wrong_mix_is_caught():
    for rule in WRONG_MIXES.values():
        distance, p_value = experiment.caught_by(rule, rounds=2000)
        assert distance > 0.01
        assert p_value < 1e-6


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1)])
def test_live_checks_pass_for_the_right_replay_and_fail_for_another(sampling, tmp_path):
    target, drafter = live_common.tiny_pair(1)
    prompts = ["hello", "zebra", "abc", "question"]
    trajectory = target.record(
        prompts,
        max_new_tokens=16,
        template=False,
        temperature=sampling.temperature,
        seed=sampling.seed,
        out=tmp_path / "r",
    )
    tree = DynamicTree(3, 3, 8)
    common = (target, drafter, trajectory, prompts, "tiny", sampling)
    right = simulate(accept(tree_all_starts(drafter, trajectory, tree), trajectory))
    assert all(holds for _, _, holds in experiment.compare(*common, right, ProgressBar(), tree=tree))
    place = next(i for i, rounds in enumerate(right.rounds) if rounds)
    rounds = list(right.rounds)
    rounds[place] = (dataclasses.replace(rounds[place][0], row=rounds[place][0].row + 1), *rounds[place][1:])
    wrong = dataclasses.replace(right, rounds=tuple(rounds))
    assert not all(holds for _, _, holds in experiment.compare(*common, wrong, ProgressBar(), tree=tree))
    if not sampling.temperature:
        chain = simulate(accept(all_starts(drafter, trajectory, 4), trajectory))
        assert all(holds for _, _, holds in experiment.compare(*common, chain, ProgressBar(), depth=4))
    else:
        found = experiment.compare(*common, None, ProgressBar(), depth=3, rule="exact")
        assert all(holds for _, _, holds in found)


def test_counts_that_cannot_vary_have_no_z_and_those_that_should_not_have_an_infinite_one():
    import pandas as pd

    rows = pd.DataFrame(
        {"live": [5, 3, 4], "expected": [5.0, 2.0, 3.0], "variance": [0.0, 0.0, 4.0], "quantity": ["rounds"] * 3}
    )
    z = live_common.with_z(rows)["z"].tolist()
    assert z[0] != z[0]
    assert z[1] == float("inf")
    assert z[2] == pytest.approx(0.5)
