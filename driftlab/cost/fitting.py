r"""Few parameters, fitted on some points of a curve and tried on the others.

    minimise  sum over fitted points of r_i^2,    r_i = predicted_i / measured_i - 1,    lower <= theta <= upper

Relative errors, because a curve spans decades. A parameter that the points do not determine is reported as such. What a
parameter may be is its 95 % profile range: the values at which, all others fitted anew, the sum stays within

    smallest sum + 3.84 sigma^2,     sigma^2 = max(noise^2, smallest sum / (points - parameters))

(3.84: chi-square with one degree of freedom). ``noise`` is the assumed relative error of one published number; with as many
parameters as points nothing else is known about it. ``determined``: the range is inside the bounds and its ends are within a
factor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares, lsq_linear

from driftlab.errors import DriftlabError

CHI_SQUARE_95 = 3.841458820694124
FACTOR = 2.0
#: a descent is tried from these multiples of the starting values
STARTS = (1.0, 0.2, 3.0)


@dataclass(frozen=True)
class Parameter:
    """A parameter before and after the fit; ``value`` and its profile range ``low`` to ``high`` in the unit of ``start``."""

    name: str
    start: float | int
    lower: float | int = 0.0
    upper: float | int = 1.0
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")

    def __post_init__(self) -> None:
        if not (
            0 <= self.lower < self.upper < float("inf") and self.lower <= self.start <= self.upper and self.start > 0
        ):
            raise DriftlabError(
                f"{self.name}: needs 0 <= lower < upper, finite, and a start above 0 between them, not "
                f"{self.lower}, {self.upper}, {self.start}"
            )

    @property
    def determined(self) -> bool:
        """Whether the profile range is inside the bounds and spans less than a factor of two."""
        inside = self.low > self.lower and self.high < self.upper
        return bool(inside and self.high < FACTOR * self.low)


@dataclass(frozen=True)
class FitPoint:
    """One point: measured, predicted, and whether it was fitted or held out."""

    label: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def relative_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class FitReport:
    """A fitted curve: its parameters and every point's error."""

    curve: str
    parameters: tuple[Parameter, ...]
    points: tuple[FitPoint, ...]

    @property
    def values(self) -> np.ndarray:
        """The fitted values, in the order of the parameters."""
        return np.array([p.value for p in self.parameters])

    def errors(self, *, fitted: bool) -> np.ndarray:
        """Absolute relative errors of the fitted points, or of those held out."""
        return np.array([abs(p.relative_error) for p in self.points if p.fitted == fitted])

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Names of the parameters that the fitted points do not determine."""
        return tuple(p.name for p in self.parameters if not p.determined)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one row a point."""
        for p in self.points:
            row = {"measured": p.measured, "predicted": p.predicted, "relative_error": p.relative_error}
            yield {"curve": self.curve, "point": p.label, "part": "fitted" if p.fitted else "held out", **row}


def fit(
    curve: str,
    predict: Callable[[np.ndarray], np.ndarray],
    parameters: Sequence[Parameter],
    labels: Sequence[str],
    measured: np.ndarray,
    fitted: np.ndarray,
    *,
    noise: float = 0.02,
    linear: bool = False,
) -> FitReport:
    """Fit a curve on the points where ``fitted`` is true; predict all.

    Args:
        curve: its name in the report.
        predict: parameter values -> predictions of all points, in the unit of ``measured``.
        parameters: names, starts and bounds.
        labels: of the points.
        measured: all above 0.
        fitted: bool, as long as ``measured``.
        noise: assumed relative error of one measured value.
        linear: the predictions are linear in the parameters: then the minimum is found exactly. Otherwise the best of a few
            descents is taken, which need not be the smallest there is.

    Raises:
        DriftlabError: fewer fitted points than parameters, measured values not above 0, or lengths that differ.
    """
    measured, fitted = np.asarray(measured, float), np.asarray(fitted, bool)
    if not len(labels) == len(measured) == len(fitted):
        raise DriftlabError(f"{curve}: {len(labels)} labels, {len(measured)} values, {len(fitted)} marks")
    if not (measured > 0).all():
        raise DriftlabError(f"{curve}: measured values must be above 0, since errors are relative")
    if fitted.sum() < len(parameters):
        raise DriftlabError(f"{curve}: {len(parameters)} parameters on {fitted.sum()} points; fit more points or fewer")
    problem = _Problem(predict, list(parameters), measured, fitted, linear)
    best, smallest = problem.minimise()
    freedom = int(fitted.sum()) - len(parameters)
    sigma2 = max(noise**2, smallest / freedom if freedom else 0.0)
    limit = smallest + CHI_SQUARE_95 * sigma2
    done = tuple(
        Parameter(p.name, p.start, p.lower, p.upper, float(best[j]), *problem.profile(j, best, limit))
        for j, p in enumerate(parameters)
    )
    values = predict(best)
    points = (FitPoint(*row) for row in zip(labels, measured.tolist(), values.tolist(), fitted.tolist(), strict=True))
    return FitReport(curve, done, tuple(points))


class _Problem:
    """The sum of squared relative errors over the fitted points, minimised with any one parameter held."""

    def __init__(
        self,
        predict: Callable[[np.ndarray], np.ndarray],
        parameters: list[Parameter],
        measured: np.ndarray,
        fitted: np.ndarray,
        linear: bool,
    ) -> None:
        self.predict, self.measured, self.fitted, self.linear = predict, measured, fitted, linear
        # every parameter in units of its start: seconds and pure numbers side by side
        self.scale = np.array([float(p.start) for p in parameters])
        self.lower = np.array([float(p.lower) for p in parameters]) / self.scale
        self.upper = np.array([float(p.upper) for p in parameters]) / self.scale
        if linear:
            self.design, self.offset = self._linearise()

    def residual(self, unit: np.ndarray) -> np.ndarray:
        """Relative errors of the fitted points at parameters in units of their starts."""
        if self.linear:
            return self.design @ unit + self.offset
        return (self.predict(unit * self.scale) / self.measured - 1)[self.fitted]

    def _linearise(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a linear residual, from predictions inside the bounds; refuse one that is not linear."""
        low, high = self.lower, np.minimum(self.upper, self.lower + 1)
        at = [(self.predict(u * self.scale) / self.measured - 1)[self.fitted] for u in (low, high)]
        columns = []
        for j in range(len(low)):
            unit = low.copy()
            unit[j] = high[j]
            here = (self.predict(unit * self.scale) / self.measured - 1)[self.fitted]
            columns.append((here - at[0]) / (high[j] - low[j]))
        design = np.stack(columns, axis=1)
        offset = at[0] - design @ low
        if not np.allclose(design @ high + offset, at[1], rtol=1e-6, atol=1e-9):
            raise DriftlabError("the predictions are not linear in the parameters: fit with linear=False")
        return design, offset

    def minimise(self, held: int | None = None, value: float = 0.0, start: np.ndarray | None = None) -> Any:
        """Return the best parameters and the sum; parameter ``held`` stays at ``value``."""
        free = [j for j in range(len(self.scale)) if j != held]
        unit = np.ones(len(self.scale)) if start is None else start / self.scale
        if held is not None:
            unit[held] = value / self.scale[held]
        if free and self.linear:
            rest = self.design[:, [held]] @ unit[[held]] if held is not None else 0.0
            bounds = (self.lower[free], self.upper[free])
            unit[free] = lsq_linear(self.design[:, free], -self.offset - rest, bounds=bounds, method="bvls").x
        elif free:
            factors = (1.0,) if start is not None else STARTS
            tries = [self._descend(unit, free, factor) for factor in factors]
            unit = min(tries, key=lambda whole: float((self.residual(whole) ** 2).sum()))
        return unit * self.scale, float((self.residual(unit) ** 2).sum())

    def _descend(self, unit: np.ndarray, free: list[int], factor: float) -> np.ndarray:
        """Return the parameters that a descent from ``factor`` times ``unit`` ends at; only ``free`` ones move."""

        def whole(x: np.ndarray) -> np.ndarray:
            moved = unit.copy()
            moved[free] = x
            return moved

        bounds = (self.lower[free], self.upper[free])
        first = np.clip(factor * unit[free], bounds[0] + 1e-6, bounds[1] - 1e-6)
        found = least_squares(lambda x: self.residual(whole(x)), first, bounds=bounds, x_scale="jac", max_nfev=200)
        return whole(found.x)

    def profile(self, held: int, best: np.ndarray, limit: float) -> tuple[float, float]:
        """Return the ends of the range of one parameter within which the others can keep the sum below ``limit``."""

        def above(value: float) -> float:
            return self.minimise(held, value, best.copy())[1] - limit

        ends = []
        for bound in (self.lower[held] * self.scale[held], self.upper[held] * self.scale[held]):
            inside = above(bound) <= 0 or bound == best[held]
            ends.append(bound if inside else brentq(above, bound, best[held], xtol=1e-4 * self.scale[held], rtol=1e-4))
        return float(min(ends)), float(max(ends))
