"""Postprocessing: probabilities, the largest class, or the largest few, of an output's last axis, on any engine.

A recogniser gives a number for each class at each position, a tagger for each label and token: a megabyte, of which a client
needs the largest. Steps make that of an output after each call, and in the same thread:

    softmax   the probabilities of the classes: exp(x - largest) / sum
    argmax    NAME: the class with the largest value, i64, without the last axis
    topk K    NAME: the K classes with the largest values, i64, the largest first

argmax and topk also give NAME.values: the values of these classes, of argmax that of the next one as well. Of equal values
the one with the smaller index comes first. NaN counts as the largest value, as NumPy has it.

A *choice*, argmax or topk, flips where two values are equal up to rounding, and the number of rows of a call decides
rounding. So a model is proved without its choice: the values before it are compared by tolerance, and a choice follows from
the values of its own row alone. Audits compare NAME.values by tolerance, and NAME only where its margin, the difference to
the values beside it, exceeds what both may move (`tolerances` and `without_ties`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError, SignatureError
from shapestream_engine.output_rules import Rows, Shared, Whole
from shapestream_engine.ports import OutputPort
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array, TensorLike

SOFTMAX, ARGMAX, TOPK = "softmax", "argmax", "topk"
FORMS = "softmax, argmax, topk K, or softmax before one of the others"
VALUES = ".values"
"""Ending of the name of the output with the values of a choice."""
_FLOATS = ("f16", "f32", "f64")
"""Element types that NumPy computes with."""
_TOPK = re.compile(r"topk ([1-9]\d{0,5})")
_FEW = 8
"""Classes up to which one after the other is looked for. Of 640 rows of 6,625 values, each takes 4 to 8 ms, a partition for
any number 0.1 s, and a stable sort of all 1.9 s."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one output."""

    softmax: bool = False
    choice: str = ""
    """`argmax`, `topk`, or "" for none."""
    count: int = 0
    """Classes of `topk`."""

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Read `softmax, topk 5`. Raises ValueError."""
        words = [" ".join(word.split()) for word in text.split(",")]
        softmax = words[0] == SOFTMAX
        match words[softmax:]:
            case [] if softmax:
                return cls(softmax=True)
            case [word] if word == ARGMAX:
                return cls(softmax, ARGMAX)
            case [word] if found := _TOPK.fullmatch(word):
                return cls(softmax, TOPK, int(found[1]))
            case _:
                raise ValueError(f'"{text}" is none of {FORMS}')

    def __str__(self) -> str:
        choice = f"{TOPK} {self.count}" if self.choice == TOPK else self.choice
        return ", ".join(([SOFTMAX] if self.softmax else []) + ([choice] if choice else []))

    def run(self, values: Array) -> list[Array]:
        """Return the outputs that stand for `values`; raises `InferenceError` for too few classes."""
        if self.softmax:
            values = softmax(values)
        if not self.choice:
            return [values]
        if values.ndim < 1 or values.shape[-1] < max(1, self.count):
            raise InferenceError(f"an output {list(values.shape)} has too few classes for {self}")
        if self.choice == TOPK:
            return list(largest(values, self.count))
        classes, best = largest(values, min(2, values.shape[-1]))
        return [np.ascontiguousarray(classes[..., 0]), best]


@dataclass(frozen=True, slots=True)
class Postprocess:
    """The steps of a model's outputs, by name.

    Postprocess({"logits": Steps.parse("softmax, topk 5")})
    """

    steps: Mapping[str, Steps]

    @property
    def judged(self) -> Postprocess | None:
        """The steps that a proof compares: all but choices."""
        kept = {name: Steps(softmax=True) for name, steps in self.steps.items() if steps.softmax}
        return Postprocess(kept) if kept else None

    def signature(self, own: ModelSignature) -> ModelSignature:
        """Return the signature with what the steps make; raises `SignatureError` where a step does not fit."""
        names = [port.name for port in own.outputs]
        for name in self.steps:
            if name not in names:
                raise self._misfit(own, name, f"there is no output {name!r}; it has {', '.join(names)}")
        outputs = [made for port in own.outputs for made in self._ports(own, port)]
        found = [port.name for port in outputs]
        for name in self.steps:
            if found.count(name + VALUES) > 1:
                raise self._misfit(own, name, f"it has an output {name + VALUES!r} already: rename that one")
        return replace(own, outputs=tuple(outputs))

    def _ports(self, own: ModelSignature, port: OutputPort) -> list[OutputPort]:
        """Return the outputs that stand for one."""
        steps = self.steps.get(port.name)
        if steps is None:
            return [port]
        self._check(own, port, steps)
        if not steps.choice:
            return [port]
        names, sizes = port.shape.names[:-1], port.shape.dimensions[:-1]
        last = port.shape.dimensions[-1]

        def shaped(count: int) -> NamedShape:
            return NamedShape((*names, None), (*sizes, Dimension(count, count)))

        if steps.choice == TOPK:
            classes, values = shaped(steps.count), shaped(steps.count)
        else:
            classes = NamedShape(names, sizes)
            values = (
                NamedShape((*names, None), (*sizes, Dimension(1, 2)))
                if last.is_dynamic
                else shaped(min(2, last.minimum))
            )
        return [
            replace(port, element_type="i64", shape=classes),
            replace(port, name=port.name + VALUES, shape=values),
        ]

    def _check(self, own: ModelSignature, port: OutputPort, steps: Steps) -> None:
        """Raise `SignatureError` where the steps do not fit an output."""
        if port.element_type not in _FLOATS or port.item is not None:
            raise self._misfit(own, port.name, f"{port} is none of {', '.join(_FLOATS)}")
        if not port.shape.rank or not isinstance(port.rule, Rows | Whole | Shared):
            raise self._misfit(own, port.name, f"{port} has no row of the batch for each row of classes")
        name, last = port.shape.names[-1], port.shape.dimensions[-1]
        if name == BATCH or port.batch_axis == port.shape.rank - 1:
            raise self._misfit(
                own, port.name, f"the last axis of {port} is the batch, and no axis of classes"
            )
        padded = [each for each, may in zip(own.dimensions, own.paddable, strict=True) if may]
        if last.is_dynamic and padded and (name is None or name in padded):
            raise self._misfit(
                own,
                port.name,
                f"{port}: nothing says how many classes it has, and padding could be among them (state it, as in "
                f"outputs: {{{port.name}: {{shape: '…, 10'}}}})",
            )
        if last.maximum is not None and last.maximum < max(1, steps.count):
            remedy = f"write topk {last.maximum} or less" if last.maximum else "remove the step"
            raise self._misfit(own, port.name, f"{port} has {last.maximum} classes ({remedy})")

    @staticmethod
    def _misfit(own: ModelSignature, output: str, words: str) -> SignatureError:
        return SignatureError(f"model {own.name!r}: postprocess: {words}", key=("postprocess", output))

    def replaced(self, own: ModelSignature) -> frozenset[str]:
        """Return the names of the outputs that have steps."""
        return frozenset(self.steps)

    def bind(self, own: ModelSignature) -> Callable[[Sequence[TensorLike], Sequence[Array]], list[Array]]:
        """Return what makes the outputs of a call's outputs."""
        steps = [self.steps.get(port.name) for port in own.outputs]

        def run(inputs: Sequence[TensorLike], outputs: Sequence[Array]) -> list[Array]:
            return [
                made
                for output, own_steps in zip(outputs, steps, strict=True)
                for made in ([output] if own_steps is None else own_steps.run(output))
            ]

        return run

    def tolerances(self, proved: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return the tolerances of these outputs, as `OutputTolerance.to_dict` has them; `proved`: before the choices.

        The largest of some values moves no further than each of them. Which class it is of is another question at each
        request, so what is known of single classes, or of all of them together, does not count.
        """
        found: dict[str, Mapping[str, Any]] = {}
        for name, plain in proved.items():
            steps = self.steps.get(name)
            if steps is None or not steps.choice:
                found[name] = plain
            elif not plain:
                found[name] = found[name + VALUES] = plain
            else:
                last = max([axis for axis, _ in plain["spreads"]], default=0)
                kept = [[axis, spread] for axis, spread in plain["spreads"] if axis != last]
                found[name] = {"margins": name + VALUES}
                of_all = {key: plain[key] for key in ("of_spread", "of_magnitude", "overall", "mark")}
                found[name + VALUES] = {**dict.fromkeys(plain), **of_all, "spreads": kept}
        return found


def softmax(values: Array) -> Array:
    """Return the probabilities along the last axis, of the element type of `values`."""
    wide = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32)
    with np.errstate(invalid="ignore"):  # of infinity less infinity, which is NaN
        powers: Array = np.subtract(wide, wide.max(axis=-1, keepdims=True, initial=-np.inf))
        np.exp(powers, out=powers)
        np.divide(powers, powers.sum(axis=-1, keepdims=True), out=powers)
    return powers.astype(values.dtype, copy=False)


def largest(values: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` classes with the largest values along the last axis, i64, and these values."""
    rows = values.reshape(-1, values.shape[-1])
    classes = np.empty((len(rows), count), dtype_of("i64"))
    if count <= _FEW:
        left, at = rows.copy(), np.arange(len(rows))
        for place in range(count):
            best = left.argmax(axis=1)
            classes[:, place] = best
            found_before = left[at, best] == -np.inf
            left[at, best] = -np.inf
        if count > 1 and found_before.any():  # of what is left, all is -infinity, as what was found before
            classes[found_before] = _sorted(rows[found_before])[:, :count]
    else:
        has_nan = np.isnan(rows).any(axis=1)
        classes[has_nan] = _sorted(rows[has_nan])[:, :count]
        classes[~has_nan] = _partitioned(rows[~has_nan], count)
    shape = (*values.shape[:-1], count)
    return classes.reshape(shape), np.take_along_axis(rows, classes, 1).reshape(shape)


def _partitioned(rows: Array, count: int) -> Array:
    """Return the classes of rows without NaN: those above the last value that counts, and the first ones that equal it."""
    last = np.partition(rows, rows.shape[1] - count, axis=1)[:, -count, None]
    above, equal = rows > last, rows == last
    above |= equal & (np.cumsum(equal, axis=1) <= count - above.sum(axis=1, keepdims=True))
    kept = np.nonzero(above)[1].reshape(len(rows), count)
    order = np.argsort(-np.take_along_axis(rows, kept, 1), axis=1, kind="stable")
    return np.take_along_axis(kept, order, 1)


def _sorted(rows: Array) -> Array:
    """Return the classes of each row by their values, NaN first; equal ones keep their order."""
    is_nan = np.isnan(rows)
    return np.lexsort((-np.where(is_nan, 0, rows), ~is_nan), axis=-1)
