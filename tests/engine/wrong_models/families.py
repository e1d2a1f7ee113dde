"""Random models as NumPy functions: an input, a map of its values, a reduction along `seq`, and a head.

Each part is drawn with its own axes, scales, offsets, thresholds, masks and types. Nothing here knows what the product
tries; `truth` decides what a drawn model does to its requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.probing.inputs import Integers, Uniform, Values

Array: TypeAlias = np.ndarray[Any, Any]
Reduction: TypeAlias = Callable[[Array, Array], Array]
"""From values [batch, seq, features] and the positions that are present [batch, seq]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The input of a model: its name, type, features per position, padding and values."""

    name: str
    element_type: str
    features: int | None
    pad: float
    domain: Values | None
    """Declared to the probe; None: the proof is told nothing."""
    vocabulary: int | None
    """Ids that the model takes; None: any numbers."""
    has_mask: bool
    most: int
    """The upper bound of `seq`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A model, and how it is configured."""

    words: str
    source: Source
    call: Callable[..., Array]
    exact: Callable[..., Array]
    """The same, computed in f64: its rounding shows nowhere."""
    output: OutputSpec

    @property
    def spec(self) -> ModelSpec:
        """The model as a configuration would describe it."""
        source = self.source
        last = "" if source.features is None else f", {source.features}"
        inputs = {
            source.name: InputSpec(
                shape=f"batch:1..8, seq:1..{source.most}{last}",
                element_type=source.element_type,
                pad={"seq": int(source.pad) if source.element_type == "i64" else source.pad},
            )
        }
        if source.has_mask:
            inputs["mask"] = InputSpec(shape="batch, seq", element_type="i64", mask_of=source.name)
        return ModelSpec(name="drawn", model=self.call, inputs=inputs, outputs={"y": self.output})

    @property
    def options(self) -> ProbeOptions:
        """What the proof is told about values."""
        source = self.source
        return ProbeOptions(values={} if source.domain is None else {source.name: source.domain})


# ---------------------------------------------------------------- reductions along seq


def _lowest(v: Array, p: Array) -> Array:
    return np.where(p[..., None], v, np.inf).min(1)


def _highest(v: Array, p: Array) -> Array:
    return np.where(p[..., None], v, -np.inf).max(1)


def _sum(v: Array, p: Array) -> Array:
    return np.where(p[..., None], v, 0).sum(1)


def _mean(v: Array, p: Array) -> Array:
    return _sum(v, p) / p.sum(1)[:, None]


def _std(v: Array, p: Array) -> Array:
    return np.sqrt(_mean((v - _mean(v, p)[:, None]) ** 2, p))


def _norm(v: Array, p: Array) -> Array:
    return np.sqrt(_sum(v * v, p))


def _median(v: Array, p: Array) -> Array:
    return np.stack([np.median(own[there], axis=0) for own, there in zip(v, p, strict=True)])


def _length(v: Array, p: Array) -> Array:
    return np.repeat(p.sum(1)[:, None], v.shape[2], 1).astype(v.dtype)


def _first(v: Array, p: Array) -> Array:
    return v[:, 0]


def _last(v: Array, p: Array) -> Array:
    return v[np.arange(len(v)), p.sum(1) - 1]


def _log_sum_exp(v: Array, p: Array) -> Array:
    most = _highest(v, p)
    return most + np.log(_sum(np.exp(v - most[:, None]), p))


def _highest_place(v: Array, p: Array) -> Array:
    return np.where(p[..., None], v, -np.inf).argmax(1)


def _lowest_place(v: Array, p: Array) -> Array:
    return np.where(p[..., None], v, np.inf).argmin(1)


def _all_positions(v: Array, p: Array) -> Array:
    return v


def _ascending(v: Array, p: Array) -> Array:
    return np.sort(np.where(p[..., None], v, np.inf), axis=1)


def _descending(v: Array, p: Array) -> Array:
    return -np.sort(np.where(p[..., None], -v, np.inf), axis=1)


def _running_sum(v: Array, p: Array) -> Array:
    return np.cumsum(np.where(p[..., None], v, 0), axis=1)


def _remaining_sum(v: Array, p: Array) -> Array:
    return _running_sum(v[:, ::-1], p[:, ::-1])[:, ::-1]


def _running_maximum(v: Array, p: Array) -> Array:
    return np.maximum.accumulate(np.where(p[..., None], v, -np.inf), axis=1)


def _remaining_maximum(v: Array, p: Array) -> Array:
    return _running_maximum(v[:, ::-1], p[:, ::-1])[:, ::-1]


def _softmax(v: Array, p: Array) -> Array:
    e = np.where(p[..., None], np.exp(v - _highest(v, p)[:, None]), 0)
    return e / e.sum(1, keepdims=True)


def _centred(v: Array, p: Array) -> Array:
    return v - _mean(v, p)[:, None]


def _first_difference(v: Array, p: Array) -> Array:
    return v - v[:, :1]


REDUCTIONS: dict[str, Reduction] = {
    "min": _lowest,
    "max": _highest,
    "sum": _sum,
    "mean": _mean,
    "std": _std,
    "norm": _norm,
    "median": _median,
    "length": _length,
    "first": _first,
    "last": _last,
    "logsumexp": _log_sum_exp,
    "argmax": _highest_place,
    "argmin": _lowest_place,
    "identity": _all_positions,
    "sort": _ascending,
    "sort descending": _descending,
    "cumsum": _running_sum,
    "cumsum from the end": _remaining_sum,
    "cummax": _running_maximum,
    "cummax from the end": _remaining_maximum,
    "softmax": _softmax,
    "centred": _centred,
    "difference to the first": _first_difference,
}


def kth(k: int) -> Reduction:
    """The value of that place from the top."""

    def reduce(v: Array, p: Array) -> Array:
        return _descending(v, p)[:, k - 1]

    return reduce


def top_sum(k: int) -> Reduction:
    """The sum of the largest values; an error where there are fewer."""

    def reduce(v: Array, p: Array) -> Array:
        if v.shape[1] < k:
            raise ValueError(f"fewer than {k} positions")
        top = _descending(v, p)[:, :k]
        return np.where(np.isfinite(top), top, 0).sum(1)

    return reduce


def any_above(threshold: float) -> Reduction:
    """True where some value lies above."""
    return lambda v, p: ((v > threshold) & p[..., None]).any(1)


def all_above(threshold: float) -> Reduction:
    """True where every value lies above."""
    return lambda v, p: ((v > threshold) | ~p[..., None]).all(1)


def count_above(threshold: float) -> Reduction:
    """Values that lie above."""
    return lambda v, p: ((v > threshold) & p[..., None]).sum(1)


def recurrent(keep: float) -> Reduction:
    """The last state of a recurrent network."""

    def reduce(v: Array, p: Array) -> Array:
        state = np.zeros_like(v[:, 0])
        for place in range(v.shape[1]):
            state = np.where(p[:, place, None], np.tanh(keep * state + v[:, place]), state)
        return state

    return reduce


def convolution(taps: int, dilation: int, bias: float, *, causal: bool) -> Reduction:
    """Two layers with zeros around them."""
    weights = np.cos(np.arange(taps) * 1.3) + 0.5

    def layer(v: Array) -> Array:
        reach = (taps - 1) * dilation
        before = reach if causal else reach // 2
        wide = np.pad(v, ((0, 0), (before, reach - before), (0, 0)))
        total = sum(
            weight * wide[:, tap * dilation : tap * dilation + v.shape[1]]
            for tap, weight in enumerate(weights)
        )
        return np.maximum(total + bias, 0).astype(v.dtype)

    def reduce(v: Array, p: Array) -> Array:
        first = layer(np.where(p[..., None], v, 0))
        return layer(np.where(p[..., None], first, 0))

    return reduce


def attention(penalty: float, pooled: str) -> Reduction:
    """Attention of all positions to those that are present, and what is taken of it."""

    def reduce(v: Array, p: Array) -> Array:
        scores = v @ v.transpose(0, 2, 1) / np.sqrt(v.shape[2])
        # A finite penalty heeds the mask only as far as it outweighs the scores.
        scores = (
            scores - penalty * ~p[:, None, :]
            if np.isfinite(penalty)
            else np.where(p[:, None], scores, -np.inf)
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        return {"first": _first, "mean": _mean, "all": _all_positions}[pooled](mixed, p)

    return reduce


def far_ahead(distance: int) -> Reduction:
    """Each position and the one that lies so far ahead, if there is one: shows only where calls are long."""

    def reduce(v: Array, p: Array) -> Array:
        ahead = np.zeros_like(v)
        if v.shape[1] > distance:
            ahead[:, :-distance] = np.cos(np.where(p[..., None], v, np.pi / 2))[:, distance:]
        return v + ahead

    return reduce


def _relative_position(v: Array, p: Array) -> Array:
    share = np.cumsum(p, axis=1) / p.sum(1, keepdims=True)
    return _sum(v * share[..., None], p)


# ---------------------------------------------------------------- drawing


def draw(random: np.random.Generator) -> Drawn:
    """A random model."""
    source = _source(random)
    values, values_words = _values_of(source, random)
    name, reduction, scale = _reduction(source, random)
    mask = (
        str(random.choice(["heeded", "heeded", "heeded", "ignored", "late", "shifted"]))
        if source.has_mask
        else ""
    )
    mixing, mixing_words = _mixing(random)
    head, head_words, element_type = _head(name, scale, random)
    keeps_seq = name in _LONG or name.startswith(_LONG_PREFIXES)
    declared = "nothing declared" if source.domain is None else f"declared {source.domain}"
    words = ", ".join(
        part
        for part in (
            f"{name} of {source.element_type} {values_words}",
            f"pad {source.pad:g}, up to {source.most}",
            mask and f"mask {mask}",
            mixing_words,
            head_words,
            declared,
        )
        if part
    )
    return assembled(
        words,
        source,
        lambda given: mixing(values(given)),
        reduction,
        mask,
        head,
        element_type,
        keeps_seq=keeps_seq,
        # The head's arg max takes the features away.
        keeps_features=head_words != "argmax over features",
    )


def assembled(
    words: str,
    source: Source,
    values: Callable[[Array], Array],
    reduction: Reduction,
    mask: str,
    head: Callable[[Array], Array],
    element_type: str,
    *,
    keeps_seq: bool,
    keeps_features: bool = True,
) -> Drawn:
    """A model of these parts. `mask` is `heeded`, `late`, `shifted` or anything else for a mask that is ignored."""

    def run(inputs: dict[str, Array], precision: str | None) -> Array:
        given = inputs[source.name]
        present = inputs["mask"] != 0 if source.has_mask else np.ones(given.shape[:2], bool)
        with np.errstate(all="ignore"):
            v = values(given) if precision is None else values(given).astype(precision)
            match mask:
                case "heeded":
                    result = reduction(v, present)
                case "late":
                    result = reduction(v * present[..., None], np.ones_like(present))
                case "shifted":
                    result = reduction(v, np.roll(present, 1, axis=1))
                case _:
                    result = reduction(v, np.ones(v.shape[:2], bool))
            return np.ascontiguousarray(head(result))

    axes = ["batch", *(["seq"] if keeps_seq else []), *(["?"] if keeps_features else [])]
    output = OutputSpec(shape=", ".join(axes), element_type=element_type)
    return Drawn(
        words=words,
        source=source,
        call=lambda **inputs: run(inputs, None),
        exact=lambda **inputs: run(inputs, "f8"),
        output=output,
    )


def _source(random: np.random.Generator) -> Source:
    has_mask = bool(random.random() < 0.5)
    most = int(random.choice([64, 64, 128, 512]))
    if random.random() < 0.35:
        vocabulary = int(random.choice([2, 10, 50, 100, 1000, 30000]))
        declared = random.random() < 0.5
        low = int(random.random() < 0.3)
        return Source(
            name="ids",
            element_type="i64",
            features=None,
            pad=0.0 if random.random() < 0.8 else 1.0,
            domain=Integers(low, vocabulary - 1) if declared else None,
            vocabulary=vocabulary,
            has_mask=has_mask,
            most=most,
        )
    scale = float(random.choice([1, 1, 10, 80, 255]))
    low = float(random.choice([0, 0, -1, -1.5, 0.25])) * scale
    domain: Values | None = None
    if random.random() < 0.4:
        domain = Uniform(low, low + scale * float(random.choice([0.5, 1, 2])))
    return Source(
        name="x",
        element_type=str(random.choice(["f32", "f32", "f32", "f64"])),
        features=None if random.random() < 0.5 else int(random.integers(1, 6)),
        pad=float(random.choice([0, 0, 0, 0, -1, 1, -100, 255])),
        domain=domain,
        vocabulary=None,
        has_mask=has_mask,
        most=most,
    )


def _values_of(source: Source, random: np.random.Generator) -> tuple[Callable[[Array], Array], str]:
    """From the input to values [batch, seq, features]."""
    if source.vocabulary is not None and random.random() < 0.6:
        rows = np.random.default_rng(int(random.integers(1 << 30)))
        table = rows.normal(size=(source.vocabulary, int(random.integers(1, 6)))).astype(np.float32)
        blank = random.random() < 0.5
        if blank:
            table[int(source.pad)] = 0
        return lambda ids: table[ids], f"embedded ({source.vocabulary}{', padding is zero' if blank else ''})"
    factor = float(random.choice([1, 1, 1, 0.1, 3, -1]))
    offset = float(random.choice([0, 0, 0, 0, 0.5, -0.5, 3, -30]))
    shape = str(random.choice(["plain", "plain", "plain", "relu", "abs", "tanh", "square"]))
    bend: Callable[[Array], Array] = {
        "plain": lambda v: v,
        "relu": lambda v: np.maximum(v, 0),
        "abs": np.abs,
        "tanh": np.tanh,
        "square": np.square,
    }[shape]

    def values(given: Array) -> Array:
        floats = given.astype(np.float32) if given.dtype.kind == "i" else given
        if source.vocabulary is not None and floats.size and given.max() >= source.vocabulary:
            raise ValueError("an id beyond the vocabulary")
        lifted = floats if source.features is not None else floats[..., None]
        return bend(lifted * factor + offset)

    return values, f"{shape}({factor:g}x{offset:+g})"


_LONG = frozenset(
    {
        "identity",
        "sort",
        "sort descending",
        "cumsum",
        "cumsum from the end",
        "cummax",
        "cummax from the end",
        "softmax",
        "centred",
        "difference to the first",
    }
)
_LONG_PREFIXES = ("convolution", "ahead", "attention to all")


def _reduction(source: Source, random: np.random.Generator) -> tuple[str, Reduction, float]:
    """Its name, the reduction, and about how large its results are."""
    scale = 1.0 if source.vocabulary is None else min(30.0, source.vocabulary / 2)
    if isinstance(source.domain, Uniform):
        scale = max(abs(source.domain.low), abs(source.domain.high)) / 2
    threshold = float(random.choice([0, 0.1, 1, 3])) * scale * float(random.choice([1, 1, -1]))
    taps, dilation, bias = (
        int(random.choice([3, 5])),
        int(random.choice([1, 4, 12])),
        float(random.choice([0, 0.3])),
    )
    k = int(random.integers(2, 6))
    keep = float(random.choice([0.3, 0.9]))
    penalty = float(random.choice([np.inf, np.inf, 1e9, 8.0]))
    pooled = str(random.choice(["first", "mean", "all"]))
    causal = bool(random.random() < 0.5)
    distance = int(random.choice([16, 40]))
    found: dict[str, Reduction] = {
        **REDUCTIONS,
        f"value {k} from the top": kth(k),
        f"sum of the top {k}": top_sum(k),
        f"any above {threshold:g}": any_above(threshold),
        f"all above {threshold:g}": all_above(threshold),
        f"count above {threshold:g}": count_above(threshold),
        f"recurrent state ({keep:g})": recurrent(keep),
        f"convolution ({'causal' if causal else 'centred'}, {taps} taps by {dilation}, bias {bias:g})": convolution(
            taps, dilation, bias, causal=causal
        ),
        f"attention to {pooled}, penalty {penalty:g}": attention(penalty, pooled),
        f"ahead by {distance}": far_ahead(distance),
        "sum by relative position": _relative_position,
    }
    name = str(random.choice(list(found)))
    return name, found[name], scale


def _mixing(random: np.random.Generator) -> tuple[Callable[[Array], Array], str]:
    """What a model does to the values of one request by those of the others."""
    if random.random() < 0.88:
        return lambda v: v, ""
    part = float(random.choice([1, 0.1, 0.02]))
    kind = str(random.choice(["mean", "maximum", "neighbour", "first"]))
    if kind == "mean":
        return (
            lambda v: v - part * (v.mean(0, keepdims=True) - v) * (len(v) > 1),
            f"{part:g} of the batch's mean",
        )
    if kind == "maximum":
        return lambda v: v + part * (v.max(0, keepdims=True) - v), f"{part:g} of the batch's maximum"
    if kind == "neighbour":
        return lambda v: v + part * (np.roll(v, 1, axis=0) - v), f"{part:g} of the neighbour"
    return lambda v: v + part * (v[:1] - v), f"{part:g} of the first row"


def _head(name: str, scale: float, random: np.random.Generator) -> tuple[Callable[[Array], Array], str, str]:
    """The last step, in words, and the element type that it gives."""
    if name.startswith(("any", "all above")):
        return lambda r: r, "", "boolean"
    if name.startswith(("arg", "count")):
        return lambda r: r.astype(np.int64), "", "i64"
    threshold = float(random.choice([0, 0.1, 0.5, 2])) * scale * float(random.choice([1, 1, -1]))
    match str(random.choice(["plain", "plain", "plain", "above", "whole", "argmax", "gate", "steep"])):
        case "above":
            return lambda r: r > threshold, f"above {threshold:g}", "boolean"
        case "whole":
            step = scale / 2
            return (
                lambda r: np.floor(np.nan_to_num(np.clip(r / step, -1e6, 1e6))).astype(np.int64),
                f"in whole {step:g}",
                "i64",
            )
        case "argmax":
            return lambda r: r.argmax(-1).astype(np.int64), "argmax over features", "i64"
        case "gate":
            return (
                lambda r: np.where(r > threshold, r, 0).astype(np.float32),
                f"0 unless above {threshold:g}",
                "f32",
            )
        case "steep":
            return (
                lambda r: np.tanh((r - threshold) * (20 / scale)).astype(np.float32),
                f"steep at {threshold:g}",
                "f32",
            )
    return lambda r: r.astype(np.float32), "", "f32"
