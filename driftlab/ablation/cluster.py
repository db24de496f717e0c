"""Cells on a Ray cluster (``pip install "driftlab[ray]"``): many machines, CPUs and GPUs by request, lost machines made good.

Tables travel to the process that called ``ablate``; only what ``run`` itself reads and writes (recordings, trainings) must be
where every machine finds it.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from driftlab.ablation.cells import Cell
from driftlab.ablation.executors import Event, Executor, Run, Session, lost, perform
from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class Ray(Executor):
    """On a Ray cluster.

    ``address``: "auto", or "host:port" of a running cluster; None: one is started on this machine, for this call. A program
    that has called ``ray.init`` keeps its cluster.
    ``retries``: how often a cell is tried again whose worker or machine was lost. A cell that raises is not.
    ``grows``: the cluster adds machines when work waits: submit everything at once, also what no machine there can take.
    """

    address: str | None = None
    retries: int = 3
    grows: bool = False

    @contextmanager
    def session(self, run: Run) -> Iterator[Session]:
        """See :class:`Executor`."""
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise DriftlabError(f'Ray is not installed ({error}): pip install "driftlab[ray]"') from error
        ours = not ray.is_initialized()
        if ours:
            try:
                # the dashboard's processes are for clusters that stay
                alone = {"include_dashboard": False} if self.address is None else {}
                ray.init(address=self.address, log_to_driver=False, **alone)
            except Exception as error:  # Ray raises Exception itself where a node does not come up in time
                raise DriftlabError(f"no Ray cluster (address {self.address}): {error}") from error
        session = _OnRay(ray, run, self)
        try:
            yield session
        finally:
            session.close()
            if ours:
                ray.shutdown()


class _OnRay(Session):
    def __init__(self, ray: Any, run: Run, settings: Ray) -> None:
        self._ray, self._run, self._settings = ray, run, settings
        self._running: dict[Any, tuple[Cell, int, float]] = {}
        self._refused: list[Event] = []
        self._by_value = _own_modules(run)
        for module in self._by_value:
            ray.cloudpickle.register_pickle_by_value(module)
        self._task = ray.remote(max_retries=0)(perform)
        self._sent = ray.put(run)

    def room(self, cell: Cell) -> bool:
        if self._settings.grows or not self._running:
            return True
        there = self._ray.cluster_resources()
        wanted = [cell.resources, *(other.resources for other, _, _ in self._running.values())]
        fits = sum(need.cpus for need in wanted) <= there.get("CPU", 0)
        return fits and sum(need.gpus for need in wanted) <= there.get("GPU", 0)

    def submit(self, cell: Cell) -> None:
        for module in _own_modules(type(cell)):
            if module not in self._by_value:
                self._ray.cloudpickle.register_pickle_by_value(module)
                self._by_value.append(module)
        need = cell.resources
        if not self._settings.grows and not any(_has(node, need) for node in self._ray.nodes() if node["Alive"]):
            reason = (
                f"no machine of the cluster has {need.cpus:g} CPUs, {need.gpus:g} GPUs and {need.memory} bytes at once"
            )
            self._refused.append(Event(cell.key, None, reason, "", 0.0))
            return
        self._send(cell, 1)

    def wait(self, seconds: float) -> list[Event]:
        found, self._refused = self._refused, []
        if found or not self._running:
            return found
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        for reference in ready:
            cell, attempts, began = self._running.pop(reference)
            try:
                found.append(self._ray.get(reference))
            except (
                self._ray.exceptions.RayTaskError
            ) as error:  # perform raises nothing: what it was sent could not be read
                reason = f"the worker could not begin ({' '.join(str(error.cause).split())})"
                found.append(Event(cell.key, None, reason, str(error), time.perf_counter() - began, attempts))
            except self._ray.exceptions.RayError as error:  # worker, machine, or a result with its machine
                if attempts <= self._settings.retries:
                    self._send(cell, attempts + 1)
                else:
                    how = str(error).strip().splitlines()[0]
                    found.append(lost(cell, how, time.perf_counter() - began, attempts))
        return found

    @property
    def parallel(self) -> float:
        return float(max(1, len(self._running)))

    def close(self) -> None:
        """Cancel what runs."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        for module in self._by_value:
            self._ray.cloudpickle.unregister_pickle_by_value(module)

    def _send(self, cell: Cell, attempts: int) -> None:
        need = cell.resources
        options: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus, "name": cell.key}
        if need.memory:
            options["memory"] = need.memory
        reference = self._task.options(**options).remote(self._sent, cell, attempts)
        self._running[reference] = (cell, attempts, time.perf_counter())


def _has(node: dict[str, Any], need: Any) -> bool:
    there = node["Resources"]
    enough = need.cpus <= there.get("CPU", 0) and need.gpus <= there.get("GPU", 0)
    return enough and need.memory <= there.get("memory", 0)


def _own_modules(thing: Any) -> list[Any]:
    """The modules that a user's functions and cells come from: other machines have no copy, so they are sent along.

    Installed packages are there, and a script (``__main__``) is sent anyway.
    """
    while hasattr(thing, "func"):  # functools.partial
        thing = thing.func
    module = sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)
    if module is None or module.__name__ in ("__main__", "builtins") or "site-packages" in (module.__file__ or ""):
        return []
    return [] if module.__name__.partition(".")[0] == "driftlab" else [module]
