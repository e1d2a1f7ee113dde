"""Random models of four parts that are drawn independently: mixing, padding, what shares the output, and care.

- *mixing*: what other rows of a call do to a row, and at which numbers of rows;
- *padding*: what becomes of the positions that are padded with 0;
- *output*: numbers, a class, or a table in which a hash or an order stands beside the numbers;
- *care*: inputs that the model refuses, ends the process on, or never returns from.

The truth is found in NumPy alone, on requests drawn from the declared values. A model is wrong where at least a tenth of
the requests get another answer, at one number of rows up to 32 or in a band of three numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.probe import prove
from shapestream_engine.probing.cases import EVERY_COUNT
from shapestream_engine.probing.evidence import Finding
from shapestream_engine.probing.examination import ProbeOptions, examine
from shapestream_engine.probing.inputs import Integers, Normal, Uniform, Values

Array: TypeAlias = np.ndarray[Any, Any]

WRONG_SHARE = 0.1
"""Least share of requests with another answer of a model that is wrong."""
REQUESTS = 60
"""Requests of the truth."""
MOST_REFUSED = 0.03
"""Largest share of right models that are not batched."""
_BAND = 3
"""Wrong numbers of rows beside each other that must be found beyond `EVERY_COUNT`."""
_LONGEST = 20
_BOUND = 48
"""Upper bound of `n`."""
_HANG_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Careful:
    """One drawn model."""

    words: str
    name: str
    call: Callable[[Array], Array]
    values: Values | None
    """Declared to the probe; None: requests are normal, and the proof is told nothing."""
    most_rows: int
    has_n: bool
    is_padded: bool
    columns: str
    element_type: str
    ends_processes: bool

    @property
    def spec(self) -> ModelSpec:
        """The model as a configuration would describe it; another process finds it by its name."""
        shape = f"batch:1..{self.most_rows}, {'n:1..' + str(_BOUND) if self.has_n else '8'}"
        port = InputSpec(shape=shape, element_type="f32", pad={"n": 0} if self.is_padded else {})
        output = OutputSpec(shape=f"batch, {self.columns}", element_type=self.element_type)
        if self.ends_processes:
            return ModelSpec(
                name="drawn", function=f"{__name__}:{self.name}", inputs={"x": port}, outputs={"y": output}
            )
        return ModelSpec(name="drawn", model=self.call, inputs={"x": port}, outputs={"y": output})

    def findings(self, budget_s: float, seed: int = 0) -> list[Finding]:
        """Return the findings of its proof, in this process unless the model ends processes."""
        values = {} if self.values is None else {"x": self.values}
        options = ProbeOptions(values=values, budget_s=budget_s, hang_s=_HANG_S, seed=seed)
        model = compile_model(self.spec)
        try:
            if self.ends_processes:
                return list(prove(self.spec, model, options).findings)
            found: list[Finding] = []
            examine(model, options, found.extend)
            return found
        finally:
            model.close()


# ---------------------------------------------------------------- the parts


def _rows_where(random: np.random.Generator, most: int) -> tuple[Callable[[int], bool], str]:
    """Draw the numbers of rows at which a model mixes."""
    match str(random.choice(["all", "all", "one", "multiples", "band", "from"])):
        case "one":
            only = int(random.integers(2, min(most, EVERY_COUNT) + 1))
            return (lambda rows: rows == only), f"at {only} rows"
        case "multiples":
            of = int(random.integers(3, 8))
            return (lambda rows: rows % of == 0), f"at multiples of {of}"
        case "band":
            first = int(random.integers(2, most - 1))
            last = first + int(random.integers(2, 7))
            return (lambda rows: first <= rows <= last), f"at {first} to {last} rows"
        case "from":
            least = int(random.integers(2, most + 1))
            return (lambda rows: rows >= least), f"from {least} rows"
    return (lambda rows: rows > 1), "at all numbers of rows"


def _mixing(random: np.random.Generator, most: int) -> tuple[Callable[[Array], Array], str]:
    where, words = _rows_where(random, most)
    part = float(random.choice([1.0, 0.3, 0.05]))
    kind = str(random.choice(["before", "mean", "largest", "exchanged", "first"]))
    mixes: dict[str, Callable[[Array], Array]] = {
        "before": lambda v: v + part * (np.roll(v, 1, axis=0) - v),
        "mean": lambda v: v + part * (v.mean(0, keepdims=True) - v),
        "largest": lambda v: v + part * (v.max(0, keepdims=True) - v),
        "exchanged": lambda v: v[::-1],
        "first": lambda v: v + part * (v[:1] - v),
    }
    mix = mixes[kind]
    return (lambda v: mix(v) if where(len(v)) else v), f"{part:g} of {kind} {words}"


_RIGHT = ("sum", "sum of squares", "first")
_WRONG = ("mean", "smallest", "last", "by length", "spread")


def _reduced(kind: str) -> Callable[[Array], Array]:
    """Return a map from [rows, n] to [rows, 1]; those of `_RIGHT` are right under padding with 0."""
    return {
        "sum": lambda v: v.sum(1, keepdims=True, dtype=np.float64),
        "sum of squares": lambda v: np.square(v, dtype=np.float64).sum(1, keepdims=True),
        "first": lambda v: v[:, :1],
        "mean": lambda v: v.mean(1, keepdims=True, dtype=np.float64),
        "smallest": lambda v: v.min(1, keepdims=True),
        "last": lambda v: v[:, -1:],
        "by length": lambda v: v.sum(1, keepdims=True) / np.sqrt(v.shape[1]),
        "spread": lambda v: v.std(1, keepdims=True),
    }[kind]


def _hashes(x: Array) -> Array:
    """A number per row that any change of the row changes; zeros at its end do not count."""
    rows = [row[: np.flatnonzero(row)[-1] + 1] if row.any() else row[:0] for row in x]
    found = [zlib.crc32(np.ascontiguousarray(row).tobytes()) / 2**32 for row in rows]
    return np.array(found)[:, None]


def _output(random: np.random.Generator, scale: float) -> tuple[str, str, Callable[[Array, Array], Array]]:
    """Draw the words, the element type, and the map from the input and reduced values to the output."""
    kind = str(random.choice(["numbers", "numbers", "class", "beside a hash", "in unsteady order"]))
    if kind == "class":
        return kind, "i64", lambda x, r: np.floor(np.nan_to_num(r.clip(-1e9, 1e9)) / scale).astype(np.int64)
    if kind == "beside a hash":
        return kind, "f32", lambda x, r: np.concatenate([r / scale, _hashes(x)], 1).astype(np.float32)
    if kind == "in unsteady order":

        def ordered(x: Array, r: Array) -> Array:
            # The order of two places depends on the last digits of the row; the number stands beside.
            places = np.where(_hashes(x) > 0.5, [[0.0, 1.0]], [[1.0, 0.0]])
            return np.concatenate([r / scale, places], 1).astype(np.float32)

        return kind, "f32", ordered
    return kind, "f32", lambda x, r: np.asarray(r, np.float32)


_COLUMNS = {"numbers": "1", "class": "1", "beside a hash": "2", "in unsteady order": "3"}


def _care(random: np.random.Generator, values: Values | None) -> tuple[Callable[[Array], None], str]:
    """Draw what the model does with inputs that no declaration contains."""
    low, high = (-6.0, 6.0) if values is None else values.range()
    kinds = ["none", "none", "range", "range", "whole", "ends", "ends", "hangs"]
    kind = str(random.choice(kinds))

    def is_outside(x: Array) -> bool:
        return not bool(((x >= low) & (x <= high)).all())

    def require_range(x: Array) -> None:
        if is_outside(x):
            raise ValueError("out of range")

    def require_whole(x: Array) -> None:
        if not (x == np.rint(x)).all():
            raise ValueError("counts are whole numbers")

    def end(x: Array) -> None:
        if (np.abs(x) > 2 * max(abs(low), abs(high))).any():
            os._exit(9)

    def hang(x: Array) -> None:
        while (np.abs(x) > 20 * max(abs(low), abs(high))).any():
            pass

    if kind == "whole" and not isinstance(values, Integers):
        kind = "range"
    checks = {
        "none": lambda x: None,
        "range": require_range,
        "whole": require_whole,
        "ends": end,
        "hangs": hang,
    }
    return checks[kind], kind


def draw(seed: int, number: int) -> Careful:
    """Draw a model; equal arguments draw the same one."""
    random = np.random.default_rng([seed, number, 45])
    values: Values | None = [None, Uniform(0.0, 1.0), Uniform(0.0, 255.0), Integers(0, 99), Integers(0, 99)][
        int(random.integers(5))
    ]
    scale = 1.0 if values is None else (values.range()[1] - values.range()[0]) / 4
    most = int(random.choice([8, 16, 32, 48]))
    has_n = bool(random.random() < 0.75)
    is_padded = has_n and bool(random.random() < 0.7)
    mixing, mixing_words = (lambda v: v), ""
    if random.random() < 0.4:
        mixing, mixing_words = _mixing(random, most)
    reduction = str(random.choice([*_RIGHT, *(_WRONG if random.random() < 0.5 else _RIGHT)]))
    reduced = _reduced(reduction)
    output_words, element_type, output = _output(random, scale)
    check, care = _care(random, values)

    def call(x: Array) -> Array:
        check(x)
        with np.errstate(all="ignore"):
            return output(x, reduced(mixing(x.astype(np.float64))))

    declared = "nothing declared" if values is None else str(values)
    words = (
        f"{reduction}, {mixing_words or 'no mixing'}, {output_words}, care {care}, up to {most}, {declared}"
    )
    return Careful(
        words=words,
        name=f"drawn_{seed}_{number}",
        call=call,
        values=values,
        most_rows=most,
        has_n=has_n,
        is_padded=is_padded,
        columns=_COLUMNS[output_words],
        element_type=element_type,
        ends_processes=care in ("ends", "hangs"),
    )


def __getattr__(name: str) -> Callable[..., Array]:
    """Return the drawn model of this name: the process of a proof imports it."""
    kind, _, rest = name.partition("_")
    if kind != "drawn":
        raise AttributeError(name)
    seed, _, number = rest.partition("_")
    drawn = draw(int(seed), int(number))
    return lambda x: drawn.call(x)


# ---------------------------------------------------------------- the truth


@dataclass(frozen=True, slots=True)
class Truth:
    """The share of wrong answers by the number of rows, and under padding."""

    by_rows: dict[int, float]
    padded: float

    @property
    def wrong_rows(self) -> list[int]:
        """Numbers of rows at which the model is wrong, as far as a proof must find it."""
        wrong = [rows for rows, share in self.by_rows.items() if share >= WRONG_SHARE]
        return [
            rows
            for rows in wrong
            if rows <= EVERY_COUNT
            or any(all(first + step in wrong for step in range(_BAND)) for first in range(rows - 2, rows + 1))
        ]

    @property
    def is_right(self) -> bool:
        """Tell whether no answer was wrong."""
        return self.padded == 0 and not any(self.by_rows.values())

    @property
    def is_wrong(self) -> bool:
        """Tell whether a proof must find it."""
        return bool(self.wrong_rows) or self.padded >= WRONG_SHARE


def truth_of(drawn: Careful, seed: int = 0) -> Truth:
    """Return the truth about a drawn model, on requests of the declared values."""
    random = np.random.default_rng(seed)
    values = drawn.values or Normal(0.0, 1.0)

    def rows_of(count: int, length: int) -> Array:
        return np.asarray(values.draw((count, length), random), np.float32)

    wrong = dict.fromkeys(range(2, drawn.most_rows + 1), 0)
    padded = 0
    for _ in range(REQUESTS):
        length = int(random.integers(1, _LONGEST + 1)) if drawn.has_n else 8
        rows = rows_of(drawn.most_rows, length)
        place = int(random.integers(2))
        alone = drawn.call(rows[:1] if place == 0 else rows[1:2])
        for count in wrong:
            wrong[count] += _differ(alone, drawn.call(rows[:count])[place : place + 1])
        if drawn.is_padded:
            wide = np.zeros((1, int(random.integers(length + 1, _BOUND + 1))), np.float32)
            wide[:, :length] = rows[place]
            padded += _differ(alone, drawn.call(wide))
    return Truth({count: found / REQUESTS for count, found in wrong.items()}, padded / REQUESTS)


def _differ(one: Array, other: Array) -> bool:
    if one.dtype.kind == "i":
        return not np.array_equal(one, other)
    return not np.allclose(one, other, rtol=1e-3, atol=1e-3 * float(np.abs(one).max()))


# ---------------------------------------------------------------- the judgement


@dataclass(slots=True)
class Tally:
    """The figures so far."""

    wrong: int = 0
    right: int = 0
    unclear: int = 0
    false_proofs: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Tell whether the proof holds what the documents promise."""
        return not self.false_proofs and len(self.refused) <= MOST_REFUSED * self.right

    def lines(self) -> list[str]:
        """The figures in words."""
        return [
            *(f"SERVED, AND WRONG: {words}" for words in self.false_proofs),
            *(f"not batched, and right: {words}" for words in self.refused),
            f"wrong models: {self.wrong}, of which served batched or padded where they are wrong: {len(self.false_proofs)}",
            f"right models: {self.right}, of which not batched or not padded: {len(self.refused)}",
            f"left out: {self.unclear} that are wrong for few requests; "
            f"{self.total_s / max(1, self.wrong + self.right):.1f} s per proof",
        ]

    def count(self, drawn: Careful, truth: Truth, findings: list[Finding]) -> None:
        """Add one model."""
        by_kind = {finding.treatment.kind: finding for finding in findings}
        told = f"{drawn.name}: {drawn.words}: {'; '.join(map(str, findings))}"
        if not truth.is_wrong:
            self.right += 1
            if any(finding.verdict not in ("proved", "unproved") for finding in findings):
                self.refused.append(told)
            return
        self.wrong += 1
        batching = by_kind["batching"]
        is_batched = batching.verdict in ("proved", "unproved")
        served_wrong = [rows for rows in truth.wrong_rows if is_batched and rows <= batching.rows]
        padding = by_kind.get("padding")
        is_padded = padding is not None and padding.verdict == "proved" and truth.padded >= WRONG_SHARE
        if served_wrong or is_padded:
            self.false_proofs.append(f"{told} (wrong at rows {served_wrong}, padded {truth.padded:.0%})")


def run(wrong: int, right: int, seed: int, *, budget_s: float, verbose: bool = False) -> Tally:
    """Draw until so many wrong and so many right models were tried."""
    tally = Tally()
    number = 0
    while tally.wrong < wrong or tally.right < right:
        number += 1
        drawn = draw(seed, number)
        truth = truth_of(drawn)
        if not truth.is_wrong and not truth.is_right:
            tally.unclear += 1
            continue
        if (tally.wrong if truth.is_wrong else tally.right) >= (wrong if truth.is_wrong else right):
            continue
        began = monotonic()
        findings = drawn.findings(budget_s)
        tally.total_s += monotonic() - began
        tally.count(drawn, truth, findings)
        if verbose:
            print(f"{drawn.name}: {'wrong' if truth.is_wrong else 'right'}: {drawn.words}", flush=True)
            print("   ", "; ".join(map(str, findings)), flush=True)
    return tally
