"""Which code computes, and that the choice changes no result."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

VARIANT_NAMES = ("eagle3", "fc_norm", "norm_output", "eagle31")


@pytest.fixture
def compiled(monkeypatch):
    """As in a process without the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_auto_is_torch_on_a_cpu_and_triton_on_cuda(compiled):
    from driftlab.kernels.backend import wants_triton

    assert not wants_triton("auto", torch.device("cpu"))
    assert wants_triton("auto", torch.device("cuda"))
    assert not wants_triton("torch", torch.device("cuda"))


def test_auto_never_takes_the_interpreter(monkeypatch):
    from driftlab.kernels.backend import wants_triton

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not wants_triton("auto", torch.device("cuda"))
    assert wants_triton("triton", torch.device("cpu"))


def test_triton_without_a_gpu_says_what_to_do(compiled, make_drafter, tiny_trajectory):
    from driftlab import DriftlabError, all_starts

    with pytest.raises(DriftlabError, match="kernels run on CUDA devices.*TRITON_INTERPRET=1"):
        all_starts(make_drafter(), tiny_trajectory, 2, backend="triton")


def test_without_triton_auto_is_torch_and_triton_an_error(monkeypatch, compiled):
    from driftlab import DriftlabError
    from driftlab.kernels import backend

    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert not backend.wants_triton("auto", torch.device("cuda"))
    with pytest.raises(DriftlabError, match=r"triton is not installed; pip install .driftlab\[gpu\]"):
        backend.wants_triton("triton", torch.device("cuda"))


def test_a_variable_set_after_triton_was_imported_is_an_error(tmp_path):
    """As in a cell of a notebook."""
    program = (
        "import os, torch, triton.language\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from driftlab.kernels.backend import wants_triton\n"
        "wants_triton('triton', torch.device('cpu'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "DriftlabError: TRITON_INTERPRET is '1' now, and was another when Triton was imported" in done.stderr


def test_bfloat16_in_an_interpreter_that_truncates_runs_in_torch(monkeypatch, make_drafter, tiny_trajectory):
    from driftlab import BackendWarning, all_starts, chain
    from driftlab.kernels import backend

    drafter = make_drafter().to(torch.bfloat16)
    assert not backend.cannot_compute(torch.bfloat16)  # the tests' own interpreter is mended
    monkeypatch.setattr(backend, "_interpreter_rounds", lambda: False)
    assert not backend.cannot_compute(torch.float16)
    (batch,) = tiny_trajectory.subset([0]).batches(2048)
    with pytest.warns(BackendWarning, match="triton#11584"):
        fused = all_starts(drafter, batch, 2, feed="own", backend="triton")
    assert torch.equal(fused.tokens, all_starts(drafter, batch, 2, feed="own").tokens)
    with pytest.warns(BackendWarning, match="triton#11584") as said:
        chain(drafter, batch, batch.prompt_lengths.tolist(), 2, backend="triton")
    assert any("a chain's step" in str(warning.message) for warning in said)


def test_the_warning_points_at_the_line_that_asked(tmp_path):
    """In a process of its own: the tests' import hook puts frames between."""
    program = tmp_path / "user.py"
    program.write_text(
        "import driftlab.draft, driftlab.kernels.backend as backend\n"
        "inside = compile('def ask(): backend.say_torch(1, 2)', driftlab.draft.__file__, 'exec')\n"
        "exec(inside)\n"
        "ask()  # the line\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert f"{program}:4: BackendWarning: 1 runs in plain torch, not in a Triton kernel: 2" in done.stderr


def test_an_unknown_backend_is_refused(make_drafter, tiny_trajectory):
    from driftlab import DriftlabError, all_starts

    with pytest.raises(DriftlabError, match="backend 'cuda': it is one of auto, torch, triton"):
        all_starts(make_drafter(), tiny_trajectory, 2, backend="cuda")


def test_the_backend_holds_for_the_block_alone(make_drafter):
    drafter = make_drafter()
    block = drafter.layers[0].self_attn
    with drafter.using("torch"):
        assert block.backend == "torch"
        with drafter.using(None):
            assert block.backend == "torch"
    assert block.backend == "auto"


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_both_backends_give_the_same_tokens_accept_lengths_and_masses(variant, make_drafter, tiny_trajectory):
    from driftlab import AttentionMass, StateNorm, accept, all_starts, simulate

    data = tiny_trajectory.subset([0, 2])
    drafter, seen = make_drafter(variant), {}
    for backend in ("torch", "triton"):
        with (
            warnings.catch_warnings(),
            AttentionMass(drafter, recent=(2, 4), null_depth=3) as mass,
            StateNorm(drafter) as norm,
        ):
            warnings.simplefilter("error")
            own = all_starts(drafter, data, 3, feed="own", backend=backend)
        text = all_starts(drafter, data, 3, backend=backend)
        seen[backend] = own, text, simulate(accept(text, data)), mass.frame(), norm.frame()
    (own, text, result, mass, norm), (own2, text2, result2, mass2, norm2) = seen["torch"], seen["triton"]
    assert torch.equal(own.tokens[own.valid], own2.tokens[own2.valid])
    assert torch.equal(text.tokens[text.valid], text2.tokens[text2.valid])
    assert result.tau == result2.tau
    for frame, other in ((mass, mass2), (norm, norm2)):
        assert len(frame) == len(other) > 0
        keys = ["prompt", "layer", "head", "depth", "quantity", "window"]
        merged = frame.merge(other, on=keys, suffixes=("", "_2"), validate="one_to_one")
        assert len(merged) == len(frame)
        both = merged.dropna(subset=["value"])
        torch.testing.assert_close(
            torch.tensor(both["value"].to_numpy()), torch.tensor(both["value_2"].to_numpy()), rtol=1e-5, atol=2e-6
        )


def test_what_the_kernel_cannot_honour_runs_in_torch_and_says_so(make_drafter, tiny_trajectory):
    from driftlab import SinkSearch, all_starts
    from driftlab.kernels.backend import BackendWarning

    drafter, data = make_drafter(), tiny_trajectory.subset([0])
    found = {}
    with SinkSearch(drafter) as search:
        all_starts(drafter, data, 1, backend="torch")
    found["torch"] = search.top(3)
    with SinkSearch(drafter) as search, pytest.warns(BackendWarning, match="plain torch, not in a Triton kernel"):
        all_starts(drafter, data, 1, backend="triton")
    assert search.top(3) == found["torch"]


def test_a_hook_that_only_reads_cannot_replace(make_drafter, tiny_trajectory):
    from driftlab import all_starts

    drafter, data = make_drafter(), tiny_trajectory.subset([0])
    plain = all_starts(drafter, data, 3, feed="own")
    point = drafter.hook_dict["hook_feedback"]
    with drafter.hooks([("hook_feedback", lambda value, hook: value * 0)], read_only=True):
        assert point.watched
        assert not point.replaceable
        assert torch.equal(all_starts(drafter, data, 3, feed="own").tokens, plain.tokens)
    with drafter.hooks([("hook_feedback", lambda value, hook: value * 0)]):
        assert point.replaceable
        assert not torch.equal(all_starts(drafter, data, 3, feed="own").tokens, plain.tokens)
    assert not point.watched
    assert not point.replaceable
