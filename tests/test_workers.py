import os
import time

import pytest
import torch

from driftlab import DriftlabError
from driftlab.workers import run_jobs


def square(number, report):
    report(1, 2)
    report(2, 2)
    return number * number, os.getpid(), torch.get_num_threads()


def fail_on_two(number, report):
    if number == 2:
        raise DriftlabError("job two is broken")
    return number


def test_results_come_in_order_from_other_processes():
    seen = []
    results = run_jobs(square, [(3,), (4,), (5,)], what="w", processes=2, progress=lambda *a: seen.append(a))
    assert [value for value, _, _ in results] == [9, 16, 25]
    assert os.getpid() not in {pid for _, pid, _ in results}
    assert len({pid for _, pid, _ in results}) <= 2
    cores = len(os.sched_getaffinity(0))
    assert {threads for _, _, threads in results} == {max(1, cores // 2)}
    assert seen[-1] == ("w", 6, 6)


def test_the_first_error_reaches_the_caller():
    with pytest.raises(DriftlabError, match="job two is broken"):
        run_jobs(fail_on_two, [(1,), (2,), (3,)], what="w", processes=1)


def fail_or_sleep(number, report):
    if number == 1:
        raise DriftlabError("the first is broken")
    time.sleep(300)


def test_an_error_ends_the_jobs_that_still_run():
    """Hours of training beside it are not waited for: they go on where they stopped."""
    began = time.monotonic()
    with pytest.raises(DriftlabError, match="the first is broken"):
        run_jobs(fail_or_sleep, [(1,), (2,)], what="w", processes=2)
    assert time.monotonic() - began < 200


def die(number, report):
    os._exit(1)


def test_a_killed_worker_is_explained():
    with pytest.raises(DriftlabError, match="ended before its time.*__main__"):
        run_jobs(die, [(1,)], what="w", processes=1)
