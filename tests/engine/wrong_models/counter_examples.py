"""Wrong models that a proof once called proved, each with the company under which its answers are wrong.

Careful models refuse, crash on or hang at inputs that the proof makes up. Tables have one element that rounding moves
beside others that are wrong. Row-count models exchange rows only in calls of some counts.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.probing.inputs import Integers, Normal, Uniform, Values

Array: TypeAlias = np.ndarray[Any, Any]


# ---------------------------------------------------------------- careful models


def _require_whole(x: Array) -> None:
    if not (x == np.rint(x)).all():
        raise ValueError("counts are whole numbers")


def whole_and_row_before(x: Array) -> Array:
    """Take whole numbers only; add half of the row before."""
    _require_whole(x)
    return np.asarray(x + 0.5 * np.concatenate([np.zeros_like(x[:1]), x[:-1]]), np.float32)


def whole_mean(x: Array) -> Array:
    """Take whole numbers only; the mean over all positions, padding included."""
    _require_whole(x)
    return np.asarray(x.mean(1, keepdims=True), np.float32)


def whole_class_of_row_before(x: Array) -> Array:
    """Take whole numbers only; a class by the mean of the row and of the one before."""
    _require_whole(x)
    own = x.mean(1, keepdims=True)
    before = np.concatenate([own[:1], own[:-1]])
    return np.asarray((own + before) // 20, np.int64)


def dies_between(x: Array) -> Array:
    """End the process on values of 200 to 2,000; the smallest value, padding included."""
    if ((x >= 200) & (x <= 2000)).any():
        os._exit(9)
    return np.asarray(x.min(1, keepdims=True), np.float32)


def hangs_between(x: Array) -> Array:
    """Never return on values of 200 to 2,000; the largest value, padding included."""
    while ((x >= 200) & (x <= 2000)).any():
        pass
    return np.asarray(-np.max(-x, axis=1, keepdims=True), np.float32)


# ---------------------------------------------------------------- tables with a sensitive neighbour


def _hash(rows: Array) -> Array:
    found = [zlib.crc32(np.ascontiguousarray(row).tobytes()) / 2**32 for row in rows]
    return np.array(found, np.float32)[:, None]


def classes_of_counts(x: Array) -> Array:
    """A right model: a distribution over 64 classes, most of them rare. Rounding follows the number of rows, as sums do."""
    weights = np.random.default_rng(0).normal(size=(x.shape[1], 64))
    logits = np.clip(np.nan_to_num(x), 0, 9) @ weights
    logits *= 1.0 + 1e-6 * np.sin(np.arange(64)) * (len(x) > 1)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True), np.float32)


def scores_of_the_call(x: Array) -> Array:
    """Boxes [batch, n, 3], the best score first, of unsteady places; scores are divided by the largest of the call."""
    if not (np.abs(x) < 100).all():
        raise ValueError("no picture")
    scores = 1 / (1 + np.exp(-x.astype(np.float64)))
    order = np.argsort(-scores, axis=1, kind="stable")
    ordered = np.take_along_axis(x.astype(np.float64), order, 1)
    places = np.stack([ordered * 1e4 % 1 * 100, ordered * 3e4 % 1 * 100], axis=-1)
    best = np.take_along_axis(scores, order, 1) / max(scores.max(), 1e-9)
    return np.concatenate([best[..., None], places], -1).astype(np.float32)


def least_beside_hash(x: Array) -> Array:
    """The smallest value, padding included, beside a hash of the row without its zeros at the end."""
    rows = [row[: np.flatnonzero(row)[-1] + 1] if row.any() else row[:0] for row in x]
    return np.concatenate([x.min(1, keepdims=True), _hash(rows)], 1).astype(np.float32)


def boxes_by_width(x: Array) -> Array:
    """The place of the largest value, and the same divided by the padded width, beside a hash of the place's value."""
    place = np.nan_to_num(x, nan=-np.inf).argmax(1)[:, None]
    value = np.take_along_axis(x, place, 1)
    return np.concatenate([place / x.shape[1], _hash(list(value))], 1).astype(np.float32)


def rare_class_of_row_before(x: Array) -> Array:
    """A distribution over three classes; the row before decides the rarest of them."""
    before = np.concatenate([x[:1], x[:-1]])
    logits = np.stack([2 * x[:, 0], 2 * x[:, 1], 3 * before[:, 0] - 5], axis=1)
    return np.asarray(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), np.float32)


# ---------------------------------------------------------------- row-count models


def _exchanged(x: Array, *, wrong: bool) -> Array:
    return np.asarray(x[::-1] if wrong else x, np.float32)


def wrong_at_five(x: Array) -> Array:
    """Exchange rows in calls of 5."""
    return _exchanged(x, wrong=len(x) == 5)


def wrong_at_multiples(x: Array) -> Array:
    """Exchange rows in calls of multiples of 5 and of 12."""
    return _exchanged(x, wrong=len(x) % 5 == 0 or len(x) % 12 == 0)


def wrong_in_a_band(x: Array) -> Array:
    """Exchange rows in calls of 9 to 15."""
    return _exchanged(x, wrong=9 <= len(x) <= 15)


def wrong_from_hundred(x: Array) -> Array:
    """Exchange rows in calls of 100 and more that are no power of two."""
    return _exchanged(x, wrong=len(x) >= 100 and len(x) & (len(x) - 1) != 0)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterExample:
    """A wrong model, its `probe`, and the treatment that must not be proved."""

    call: Callable[[Array], Array]
    shape: str
    output: str
    treatment: str = "batching"
    element_type: str = "f32"
    pad: float | None = None
    probe: Values | None = None
    requests: Values = field(default_factory=lambda: Uniform(0.0, 1.0))
    """Values of the requests in service; those of `probe` if there is one."""
    hang_s: float = 30.0

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.call.__name__

    def spec(self) -> ModelSpec:
        """Return the model as a configuration would describe it."""
        pad = {} if self.pad is None else {"n": self.pad}
        return ModelSpec(
            name=self.name,
            function=f"{__name__}:{self.name}",
            inputs={"x": InputSpec(shape=self.shape, element_type="f32", pad=pad)},
            outputs={"y": OutputSpec(shape=self.output, element_type=self.element_type)},
        )

    def options(self, **changes: Any) -> ProbeOptions:
        """Return the probe's description of realistic inputs."""
        values = {} if self.probe is None else {"x": self.probe}
        return ProbeOptions(**{"values": values, "hang_s": self.hang_s, **changes})

    def wrong_of(self, requests: int = 128, seed: int = 0) -> int:
        """Count the requests that get another answer in company than alone, in NumPy alone."""
        random = np.random.default_rng(seed)
        values = self.probe or self.requests
        assert isinstance(values, Integers | Normal | Uniform)
        most = int(self.shape.split("batch:1..")[1].split(",")[0])
        wrong = 0
        for _ in range(requests):
            length = int(random.integers(3, 20)) if "n:" in self.shape else int(self.shape.split(", ")[1])
            rows = [np.asarray(values.draw((1, length), random), np.float32) for _ in range(most)]
            alone = self.call(rows[0])
            if self.treatment == "batching":
                counts = range(2, most + 1)
                got = [self.call(np.concatenate(rows[:count][::-1]))[-1:] for count in counts]
            else:
                wide = np.full((1, 64), self.pad, np.float32)
                wide[:, :length] = rows[0]
                got = [self.call(wide)]
            wrong += any(not np.allclose(each, alone, rtol=1e-3, atol=1e-3) for each in got)
        return wrong


_ROWS = "batch:1..8, n:1..64"
_MANY = "batch:1..32, 8"
_WHOLE = Integers(0, 99)

COUNTER_EXAMPLES: Sequence[CounterExample] = (
    CounterExample(call=whole_and_row_before, shape=_ROWS, output="batch, n", probe=_WHOLE),
    CounterExample(
        call=whole_mean, shape=_ROWS, output="batch, 1", pad=0, probe=_WHOLE, treatment="padding of n"
    ),
    CounterExample(
        call=whole_class_of_row_before, shape=_ROWS, output="batch, 1", element_type="i64", probe=_WHOLE
    ),
    CounterExample(
        call=dies_between, shape=_ROWS, output="batch, 1", pad=0, treatment="padding of n",
        requests=Uniform(0.5, 100.0),
    ),
    CounterExample(
        call=hangs_between, shape=_ROWS, output="batch, 1", pad=0, treatment="padding of n",
        requests=Uniform(0.5, 100.0), hang_s=2.0,
    ),
    CounterExample(
        call=scores_of_the_call,
        shape="batch:1..8, 300",
        output="batch, 300, 3",
        requests=Normal(0.0, 1.0),
    ),
    CounterExample(
        call=least_beside_hash, shape=_ROWS, output="batch, 2", pad=0, treatment="padding of n",
        probe=Uniform(0.0, 1.0),
    ),
    CounterExample(call=rare_class_of_row_before, shape="batch:1..8, 2", output="batch, 3"),
    CounterExample(call=boxes_by_width, shape=_ROWS, output="batch, 2", pad=0, treatment="padding of n"),
    CounterExample(call=wrong_at_five, shape=_MANY, output="batch, 8"),
    CounterExample(call=wrong_at_multiples, shape=_MANY, output="batch, 8"),
    CounterExample(call=wrong_in_a_band, shape=_MANY, output="batch, 8"),
    CounterExample(call=wrong_from_hundred, shape="batch:1..256, 8", output="batch, 8"),
)  # fmt: skip

BY_NAME: Mapping[str, CounterExample] = {each.name: each for each in COUNTER_EXAMPLES}
