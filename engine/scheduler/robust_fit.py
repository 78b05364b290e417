"""A small linear model fitted online to noisy times: non-negative, robust, able to forget.

Owns: the last observations and the coefficients. Must not know: what the features are.

Least absolute deviations over a sliding window, by iteratively reweighted least squares with coordinate descent and a
floor of zero. A step that took 2 s because a graph was compiled weighs no more than one that was a little late, and
after a change of speed (a hot machine halves its clock) the new level wins once it fills half of the window.
Each refit starts from the last coefficients and is held to them lightly: a feature that did not vary lately keeps its
cost instead of becoming arbitrary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_WINDOW = 96
_REFIT_EVERY = 16
_NUM_REWEIGHTINGS = 3
_NUM_SWEEPS = 12
_HOLD = 1e-3
_SMALLEST_RESIDUAL = 0.02


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
        weights = [1.0] * len(self._window)
        for _ in range(_NUM_REWEIGHTINGS):
            self._solve(weights)
            typical = sorted(value for _, value in self._window)[len(self._window) // 2]
            floor = max(_SMALLEST_RESIDUAL * typical, 1e-9)
            weights = [
                floor / max(floor, abs(value - sum(map(float.__mul__, self._coefficients, x))))
                for x, value in self._window
            ]
        self._solve(weights)

    def _solve(self, weights: Sequence[float]) -> None:
        """Weighted least squares with non-negative coefficients, held to the present ones."""
        size = len(self._coefficients)
        matrix = [[0.0] * size for _ in range(size)]
        vector = [0.0] * size
        for (x, value), weight in zip(self._window, weights, strict=True):
            for i in range(size):
                wx = weight * x[i]
                if wx:
                    vector[i] += wx * value
                    row = matrix[i]
                    for j in range(size):
                        row[j] += wx * x[j]
        held = list(self._coefficients)
        for _ in range(_NUM_SWEEPS):
            for i in range(size):
                rest = vector[i] - sum(map(float.__mul__, matrix[i], self._coefficients))
                rest += matrix[i][i] * self._coefficients[i]
                self._coefficients[i] = max(0.0, (rest + _HOLD * held[i]) / (matrix[i][i] + _HOLD))
