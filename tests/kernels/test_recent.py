"""The mass on the last w keys from lse, against the specification's own."""

from __future__ import annotations

import pytest
import torch

WINDOWS = (1, 2, 5, 9, 40)


def problem_of(own, window=0, carried=0, controls=None, sink=None, seed=0):
    from driftlab.kernels.problem import Controls, Problem, Stats

    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5

    return Problem(
        **{"q": random(2, 4, 6, 8), "context_k": random(2, 2, 11, 8), "context_v": random(2, 2, 11, 8)},
        **{"own_k": random(2, 2, 6, own, 8), "own_v": random(2, 2, 6, own, 8)},
        rows=torch.tensor([[0, 1, 4, 7, 9, 10], [10, 3, 3, 5, 2, 8]]),
        segments=torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2], [1, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2]]),
        **{"scale": 0.4, "window": window, "carried": carried, "controls": controls or Controls()},
        **{"sink_logit": sink, "stats": Stats(recent=WINDOWS)},
    )


@pytest.mark.parametrize("own", [0, 1, 4, 12])
@pytest.mark.parametrize(("window", "carried"), [(0, 0), (3, 0), (6, 2), (1, 0)])
@pytest.mark.parametrize("controlled", [False, True])
def test_it_is_the_specifications(own, window, carried, controlled):
    from driftlab.kernels import reference
    from driftlab.kernels.problem import Controls
    from driftlab.kernels.recent import recent_mass

    generator = torch.Generator().manual_seed(5)
    controls, sink = Controls(), None
    if controlled:
        bias = torch.randn(2, 4, 6, 4, generator=generator, dtype=torch.float64)
        bias[..., 1] = -torch.inf
        drop = torch.rand(2, 6, 11, generator=generator) < 0.3
        controls = Controls(bias, drop, torch.rand(2, 1, 6, generator=generator, dtype=torch.float64) + 0.5)
        sink = torch.tensor([0.0, -1.0, 2.0, 1.0], dtype=torch.float64)
    problem = problem_of(own, window, carried, controls, sink)
    expected = reference.attend(problem)
    assert expected.recent.max() > 0.05
    torch.testing.assert_close(recent_mass(problem, expected.lse, WINDOWS), expected.recent, rtol=0, atol=1e-12)
