"""Distributions of token counts and pauses, as a person writes them in a workload file.

Owns: the kinds, their means, second moments and draws. Must not know: what is being counted.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class _Kind(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fixed(_Kind):
    """Always ``value``."""

    kind: Literal["fixed"] = "fixed"
    value: float = Field(ge=0)

    @property
    def mean(self) -> float:
        """Expected value."""
        return self.value

    @property
    def second_moment(self) -> float:
        """Expected square."""
        return self.value**2

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return self.value

    def scaled(self, factor: float) -> Fixed:
        """The same shape, ``factor`` times as large."""
        return Fixed(value=self.value * factor)


class Uniform(_Kind):
    """Every value from ``low`` to ``high`` alike."""

    kind: Literal["uniform"]
    low: float = Field(ge=0)
    high: float

    @model_validator(mode="after")
    def _check(self) -> Uniform:
        return _ordered(self)

    @property
    def mean(self) -> float:
        """Expected value."""
        return (self.low + self.high) / 2

    @property
    def second_moment(self) -> float:
        """Expected square."""
        return (self.low**2 + self.low * self.high + self.high**2) / 3

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return rng.uniform(self.low, self.high)

    def scaled(self, factor: float) -> Uniform:
        """The same shape, ``factor`` times as large."""
        return Uniform(kind="uniform", low=self.low * factor, high=self.high * factor)


class LogUniform(_Kind):
    """Every order of magnitude between ``low`` and ``high`` alike: many short values, some long ones."""

    kind: Literal["log_uniform"]
    low: float = Field(gt=0)
    high: float

    @model_validator(mode="after")
    def _check(self) -> LogUniform:
        return _ordered(self)

    @property
    def mean(self) -> float:
        """Expected value."""
        return _log_uniform_moment(self.low, self.high, 1)

    @property
    def second_moment(self) -> float:
        """Expected square."""
        return _log_uniform_moment(self.low, self.high, 2)

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))

    def scaled(self, factor: float) -> LogUniform:
        """The same shape, ``factor`` times as large."""
        return LogUniform(kind="log_uniform", low=self.low * factor, high=self.high * factor)


class LogNormal(_Kind):
    """Lognormal by mean and coefficient of variation; ``cv`` 0 is the fixed value. Draws stop at ``max``."""

    kind: Literal["lognormal"]
    mean: float = Field(gt=0)
    cv: float = Field(ge=0)
    max: float | None = Field(default=None, gt=0)

    @property
    def second_moment(self) -> float:
        """Expected square, of the distribution without its cap."""
        return self.mean**2 * (1 + self.cv**2)

    def draw(self, rng: random.Random) -> float:
        """One value."""
        variance = math.log1p(self.cv**2)
        value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return value if self.max is None else min(self.max, value)

    def scaled(self, factor: float) -> LogNormal:
        """The same shape, ``factor`` times as large."""
        cap = None if self.max is None else self.max * factor
        return LogNormal(kind="lognormal", mean=self.mean * factor, cv=self.cv, max=cap)


class Mixture(_Kind):
    """One of a few values, each with its weight: ``{6000: 0.75, 24000: 0.25}``."""

    kind: Literal["mixture"]
    values: dict[float, float] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Mixture:
        if min(self.values) < 0 or min(self.values.values()) < 0 or sum(self.values.values()) <= 0:
            raise ValueError("values and weights must not be negative, and some weight must be above zero")
        return self

    @property
    def mean(self) -> float:
        """Expected value."""
        return self._moment(1)

    @property
    def second_moment(self) -> float:
        """Expected square."""
        return self._moment(2)

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return rng.choices(list(self.values), list(self.values.values()))[0]

    def scaled(self, factor: float) -> Mixture:
        """The same shape, ``factor`` times as large."""
        return Mixture(kind="mixture", values={value * factor: weight for value, weight in self.values.items()})

    def _moment(self, order: int) -> float:
        total = sum(self.values.values())
        return sum(weight * value**order for value, weight in self.values.items()) / total


_Bounds = TypeVar("_Bounds", Uniform, LogUniform)


def _ordered(bounds: _Bounds) -> _Bounds:
    if bounds.high < bounds.low:
        raise ValueError(f"high is {bounds.high}, below low {bounds.low}")
    return bounds


def _log_uniform_moment(low: float, high: float, order: int) -> float:
    if low == high:
        return low**order
    return (high**order - low**order) / (order * math.log(high / low))


def _from_number(value: object) -> object:
    if isinstance(value, int | float):
        return {"kind": "fixed", "value": value}
    return value


Lengths = Annotated[
    Annotated[Fixed | Uniform | LogUniform | LogNormal | Mixture, Field(discriminator="kind")],
    BeforeValidator(_from_number),
]
