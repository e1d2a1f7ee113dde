"""The models of an answer run as formulas of NumPy, and the requests with their answers. No product code, no engine.

`layers` and `places` compute whole numbers below 2^24 in f32, so every correct engine gives the same bits. They clip in
each layer, so one wrong number early becomes many at the end. `mixing` is softmax attention, and `encoder` a transformer:
both are compared within a tolerance. Calls of `encoder` take long and are never shared, so that requests are withdrawn
while they run. What shares a call with a request, and padding where the YAML allows it, changes none of these answers.

`careful` takes whole numbers only, so the proof must not change its requests otherwise. The rows of a call change the
answers of `scored` and `counted`; of `scored` an unsteady number stands beside each score. The YAML says nothing of them:
the proof must find that their requests run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

WIDTH = 64
DEPTH = 48
"""Layers, so that a call of many rows takes some milliseconds and can be withdrawn while it runs."""
LARGEST = 7
"""Layers clip to 0..7; so a sum of products stays below 2^24 in any order."""
THRESHOLD = LARGEST * WIDTH / 2
"""`places` finds positions whose features sum to more."""
ROUNDS = 6
HEADS = 4
SHARPNESS = 0.016
BLOCKS = 6
"""Of `encoder`: attention, then a layer of `HIDDEN` features."""
HIDDEN = 256
EPSILON = 1e-5
"""Added to variances."""
TOLERANCE = 1e-3
"""Of `mixing`, whose answers are between 0 and 7: f32 against f64 differed by 6e-6. Of `encoder`,
whose answers are about 1: by 3e-6."""
DIVISOR, FACTOR = 97, 1001
"""`scored` has the remainder of a sum times `FACTOR`: a small change of the input changes it much."""
EXCHANGED = 5
"""Rows of the calls in which `counted` exchanges them."""
SIZES = (6, 230)
"""Sizes that come again and again: what a call leaves behind harms a later call of a shape that came before it."""
ANY_SIZE = 0.2
"""Share of the requests that have any other size instead."""
LARGEST_SIZE = 256
ROWS = (1, 1, 1, 1, 1, 2, 3)

_numbers = np.random.default_rng(21)
LAYERS = _numbers.integers(-1, 2, (DEPTH, WIDTH, WIDTH)).astype(np.float32)
BIASES = _numbers.integers(-2, 4, (DEPTH, WIDTH)).astype(np.float32)
FINDERS = _numbers.integers(-1, 2, (8, WIDTH, WIDTH)).astype(np.float32)
ROLES = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "mixed": (WIDTH, WIDTH),
    "wide": (WIDTH, HIDDEN),
    "narrow": (HIDDEN, WIDTH),
}
"""The matrices of a block of `encoder`."""
ENCODER = {
    role: (_numbers.standard_normal((BLOCKS, *shape)) / shape[0] ** 0.5).astype(np.float32)
    for role, shape in ROLES.items()
}


def layers(x: Array) -> dict[str, Array]:
    """Each position for itself through all layers, to each of which the input is added again."""
    y = x
    for weights, bias in zip(LAYERS, BIASES, strict=True):
        y = np.clip(y @ weights + bias + x, 0, LARGEST)
    return {"y": y}


def mixing(x: Array) -> dict[str, Array]:
    """Every position attends to all others, so that padding would be seen; and the largest of each feature."""
    y = x.astype(np.float64)
    rows, size, _ = x.shape
    for _ in range(ROUNDS):
        heads = y.reshape(rows, size, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)
        scores = (heads @ heads.transpose(0, 1, 3, 2)) * SHARPNESS
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads = (scores / scores.sum(axis=-1, keepdims=True)) @ heads
        y = heads.transpose(0, 2, 1, 3).reshape(x.shape) + x * 0.125
        y = np.minimum(y, LARGEST)
    y = y.astype(np.float32)
    return {"y": y, "top": y.max(axis=1)}


def _normalised(x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)


def encoder(x: Array) -> dict[str, Array]:
    """Blocks of attention and two dense layers, each added to its input and normalised; and the mean of the positions."""
    rows, size, _ = x.shape

    def heads(y: Array) -> Array:
        return y.reshape(rows, size, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)

    y = _normalised(x.astype(np.float64))
    for block in range(BLOCKS):
        query, key, value = (heads(y @ ENCODER[role][block]) for role in ("query", "key", "value"))
        scores = query @ key.transpose(0, 1, 3, 2) / (WIDTH // HEADS) ** 0.5
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(x.shape)
        y = _normalised(y + mixed @ ENCODER["mixed"][block])
        y = _normalised(y + np.maximum(y @ ENCODER["wide"][block], 0) @ ENCODER["narrow"][block])
    y = y.astype(np.float32)
    return {"y": y, "mean": y.mean(axis=1)}


def places(x: Array) -> dict[str, Array]:
    """Where the features sum to much after eight layers without bias, so that padding by 0 finds nothing."""
    y = x
    for weights in FINDERS:
        y = np.clip(y @ weights + x, 0, LARGEST)
    sums = y.sum(axis=-1)
    found = sums > THRESHOLD
    return {"places": np.argwhere(found), "sums": sums[found]}


def careful(x: Array) -> dict[str, Array]:
    """One layer; the files fail where a number is not whole."""
    return {"y": np.clip(x @ FINDERS[0], 0, LARGEST)}


def scored(x: Array) -> dict[str, Array]:
    """The sum of each position, divided by the largest of the request, and a remainder of it: a table of two columns."""
    sums = x.astype(np.float64).sum(axis=-1)
    return {"y": np.stack([sums / max(sums.max(), 1.0), sums * FACTOR % DIVISOR], axis=-1).astype(np.float32)}


def counted(x: Array) -> dict[str, Array]:
    """The sum of each position. The files exchange rows in calls of `EXCHANGED`."""
    return {"y": x.sum(axis=-1)}


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model: its formula, and what the YAML says of it."""

    name: str
    answer: Callable[[Array], dict[str, Array]]
    inputs: str
    outputs: str
    types: Mapping[str, str]
    """Element type of each output, in the protocol's words."""
    probe: str = ""
    """What the YAML says of its requests."""
    tolerance: float = 0.0
    is_right: bool = True
    """Whether its rows may share calls. If not, the YAML says nothing of its axes, and the proof must find it."""
    engines: tuple[str, ...] = ("openvino", "onnxruntime", "torch")
    """The engines that it has a file for."""
    shares: bool = True
    """Whether its requests may share calls. If not, they have one row and one of `SIZES`, so that the shape of a call that
    was withdrawn stands between two equal ones."""

    @property
    def settings(self) -> dict[str, str]:
        """What the YAML says of its requests, by key; "" for nothing."""
        return {"inputs": self.inputs, "outputs": self.outputs, "probe": self.probe}


_WHOLE = f"x: {{integers: [0, {LARGEST}]}}"
_ONNX = ("openvino", "onnxruntime")
MODELS = (
    Model(
        name="layers",
        answer=layers,
        inputs=f'x: {{shape: "batch:1..16, n:1..256, {WIDTH}", pad: {{n: 0}}}}',
        outputs="y: {rule: rows}",
        types={"y": "f32"},
    ),
    Model(
        name="mixing",
        answer=mixing,
        inputs=f'x: {{shape: "batch:1..16, n:1..256, {WIDTH}"}}',
        outputs="y: {rule: rows}, top: {rule: rows}",
        types={"y": "f32", "top": "f32"},
        tolerance=TOLERANCE,
    ),
    Model(
        name="encoder",
        answer=encoder,
        inputs=f'x: {{shape: "batch:1..16, n:1..256, {WIDTH}"}}',
        outputs="y: {rule: rows}, mean: {rule: rows}",
        types={"y": "f32", "mean": "f32"},
        tolerance=TOLERANCE,
        shares=False,
    ),
    Model(
        name="places",
        answer=places,
        inputs=f'x: {{shape: "batch:1..16, n:1..256, {WIDTH}", pad: {{n: 0}}}}',
        outputs="places: {rule: index_column, column: 0}, sums: {rule: with, output: places}",
        types={"places": "i64", "sums": "f32"},
    ),
    Model(
        name="careful",
        answer=careful,
        inputs=f'x: {{shape: "batch:1..16, n:1..256, {WIDTH}", pad: {{n: 0}}}}',
        outputs="y: {rule: rows}",
        types={"y": "f32"},
        probe=_WHOLE,
        engines=_ONNX,
    ),
    Model(
        name="scored",
        answer=scored,
        inputs="",
        outputs="",
        types={"y": "f32"},
        probe=_WHOLE,
        tolerance=TOLERANCE,
        is_right=False,
        engines=_ONNX,
    ),
    Model(
        name="counted",
        answer=counted,
        inputs="",
        outputs="",
        types={"y": "f32"},
        probe=_WHOLE,
        is_right=False,
        engines=_ONNX,
    ),
)


def models_of(engine: str) -> tuple[Model, ...]:
    """The models that an engine has files for."""
    return tuple(model for model in MODELS if engine in model.engines)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request and its answer."""

    model: Model
    number: int
    x: Array
    answer: Mapping[str, Array]

    def difference(self, outputs: Mapping[str, Array]) -> str | None:
        """Where an answer is wrong, in words; None: nowhere."""
        if outputs.keys() != self.answer.keys():
            return f"outputs {sorted(outputs)}, expected {sorted(self.answer)}"
        for name, expected in self.answer.items():
            found = outputs[name]
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                return f"{name}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
            apart = np.abs(found.astype(np.float64) - expected)
            unequal = ~(apart <= self.model.tolerance)
            if unequal.any():
                return (
                    f"{name}: {unequal.sum()} of {expected.size} elements differ, by {apart.max():g} at most"
                )
        return None


class Questions:
    """The requests that a client chooses from; the same seed gives the same ones."""

    COUNT = 40
    """Different ones of each model: their answers cost as much as the engine's, and are computed once."""

    def __init__(self, seed: int, models: Sequence[Model]) -> None:
        self._seed = seed
        self.models = models
        self._known: dict[tuple[int, int], Question] = {}

    def draw(self, chance: Any, model: Model | None = None) -> Question:
        """One of this model, or of any."""
        place = self.models.index(model or chance.choice(self.models)), chance.randrange(self.COUNT)
        if place not in self._known:
            self._known[place] = self._make(*place)
        return self._known[place]

    def _make(self, model_number: int, number: int) -> Question:
        numbers = np.random.default_rng([self._seed, model_number, number])
        model = self.models[model_number]
        any_size = numbers.random() < ANY_SIZE and model.shares
        size = int(LARGEST_SIZE ** numbers.random()) if any_size else int(numbers.choice(SIZES))
        shape = int(numbers.choice(ROWS if model.shares else ROWS[:1])), size, WIDTH
        x = numbers.integers(0, LARGEST + 1, shape).astype(np.float32)
        return Question(model=model, number=number, x=x, answer=model.answer(x))
