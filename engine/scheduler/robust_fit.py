"""A small linear model fitted online to noisy times: non-negative, robust, able to forget.

Owns: the last observations and the coefficients. Must not know: what the features are.

Least absolute deviations over a sliding window, by iteratively reweighted least squares: each refit is one iteration,
from where the last one left off. A step that took 2 s because a graph was compiled weighs no more than one that was a
little late, and after a change of speed (a hot machine halves its clock) the new level wins once it fills half of the
window. Each refit is held lightly to the last coefficients: a feature that did not vary lately keeps its cost instead
of becoming arbitrary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_WINDOW = 64
_REFIT_EVERY = 16
_HOLD = 1e-3
# Residuals below this share of a typical value count alike: noise is no reason to prefer one observation.
_EQUAL_SHARE = 0.02


class RobustFit:
    """``predict(x) = sum(c * x)`` with ``c >= 0``. ``scales`` bring each feature to the order of one."""

    def __init__(self, scales: Sequence[float]) -> None:
        self._scales = tuple(scales)
        self._coefficients = [0.0] * len(scales)
        self._window: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_WINDOW)
        self._num_observed = 0

    @property
    def num_observed(self) -> int:
        """Observations so far."""
        return self._num_observed

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Cost per unit of each feature."""
        return tuple(c / scale for c, scale in zip(self._coefficients, self._scales, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        """The fitted value; 0 before the first observation."""
        return sum(c * x / s for c, x, s in zip(self._coefficients, features, self._scales, strict=True))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Add one observation. The coefficients follow at once while there are few, then every few observations."""
        self._window.append((tuple(x / s for x, s in zip(features, self._scales, strict=True)), value))
        self._num_observed += 1
        if self._num_observed <= _REFIT_EVERY or self._num_observed % _REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        values = sorted(value for _, value in self._window)
        equal = max(_EQUAL_SHARE * values[len(values) // 2], 1e-9)
        self._coefficients = _solve_non_negative(*self._normal_equations(equal))

    def _normal_equations(self, equal: float) -> tuple[list[list[float]], list[float]]:
        """Weighted by one over the present residual, and held to the present coefficients."""
        held = self._coefficients
        size = len(held)
        matrix = [[_HOLD if i == j else 0.0 for j in range(size)] for i in range(size)]
        vector = [_HOLD * c for c in held]
        for x, value in self._window:
            residual = abs(value - sum(map(float.__mul__, held, x)))
            weight = equal / max(equal, residual)
            for i, xi in enumerate(x):
                weighted = weight * xi
                vector[i] += weighted * value
                row = matrix[i]
                for j in range(i + 1):
                    row[j] += weighted * x[j]
        for i in range(size):
            for j in range(i):
                matrix[j][i] = matrix[i][j]
        return matrix, vector


def _solve_non_negative(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve for non-negative coefficients by leaving out, one after the other, the most negative one."""
    active = list(range(len(vector)))
    while active:
        solved = _solve([[matrix[i][j] for j in active] for i in active], [vector[i] for i in active])
        worst = min(range(len(active)), key=solved.__getitem__)
        if solved[worst] >= 0.0:
            by_index = dict(zip(active, solved, strict=True))
            return [by_index.get(i, 0.0) for i in range(len(vector))]
        del active[worst]
    return [0.0] * len(vector)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination. The matrix is symmetric and positive definite, so no pivoting is needed."""
    size = len(vector)
    rows = [[*row, right] for row, right in zip(matrix, vector, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
