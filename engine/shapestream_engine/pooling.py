"""Pooling: the vectors of a text's tokens become one vector, on any engine.

A text encoder gives a vector per token, [batch, seq, hidden]. `Pooling` makes one per row of it, [batch, hidden], after each
call and in the same thread. The engine's output then never leaves the slot: only the small result is divided and sent.

    mean   sum of the tokens' vectors / number of tokens; 1e-9 at least is divided by
    cls    the vector of the first token, and no mask is needed
    last   the vector of the last token; 0 for a row without tokens
    max    the largest value of each component; -1e9 for a row without tokens

Tokens are the positions where the mask is not 0. These are the formulas of `sentence_transformers.models.Pooling`, and
`normalize` is that of `sentence_transformers.models.Normalize`: a vector is divided by its length, 1e-12 at least.

Padding has the mask 0, so it has no influence, as far as the model keeps it from the other tokens. The proof compares the
pooled output, and so covers both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.errors import InferenceError, SignatureError
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.output_step import Run
from shapestream_engine.port_names import VECTORS, vectors_among
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array, TensorLike

POOLED = "sentence_embedding"
"""Name of the output with the pooled vectors."""
MASK = "attention_mask"
"""Name of the input that is not 0 where a token is. `cls` needs none."""
MODES = ("mean", "cls", "last", "max")
"""The ways to pool."""
POOLINGS = 'mean, cls, last or max, and "normalize" after it for vectors of length 1'
"""The texts that `Pooling.parse` reads."""
_FLOATS = ("f16", "f32", "f64")
"""Element types that NumPy computes with."""
_LEAST_TOKENS = np.float32(1e-9)
_LEAST_VALUE = np.float32(-1e9)
_LEAST_LENGTH = np.float32(1e-12)
_Vectors: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The pooling of a model's vectors per token, [batch, seq, hidden], under its input `attention_mask`, [batch, seq].

    The output with the vectors has a usual name, or is the only one.

    Pooling(mode="mean", normalize=True)
    """

    mode: str
    normalize: bool = False
    """True: each vector gets the length 1."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SignatureError(
                f"unknown pooling {self.mode!r}; known are {', '.join(MODES)}", key=("pooling",)
            )

    @classmethod
    def parse(cls, text: str) -> Pooling:
        """Read a mode, and `normalize` after a comma: "mean, normalize". Raises `ValueError`."""
        mode, *rest = (part.strip() for part in text.split(","))
        if mode not in MODES or rest not in ([], ["normalize"]):
            raise ValueError(f"expected {POOLINGS}, not {text!r}")
        return cls(mode=mode, normalize=bool(rest))

    def signature(self, own: ModelSignature) -> ModelSignature:
        """Return the signature with `sentence_embedding` in place of the output; raises `SignatureError` for a misfit."""
        number = self.output_number(own)
        port = own.outputs[number]
        if self.mode != "cls":
            self._check_mask(own, port)
        names, sizes = port.shape.names, port.shape.dimensions
        pooled = OutputPort(POOLED, "f32", NamedShape((names[0], None), (sizes[0], sizes[2])), port.rule)
        outputs = (*own.outputs[:number], pooled, *own.outputs[number + 1 :])
        if any(other.name == POOLED for other in own.outputs):
            raise self._misfit(own, f"it has an output {POOLED!r} already; remove the pooling")
        return replace(own, outputs=outputs)

    def output_number(self, own: ModelSignature) -> int:
        """Return the number of the output that is pooled; raises `SignatureError` if it is no table of vectors per token."""
        names = [port.name for port in own.outputs]
        of = vectors_among(names)
        if of is None:
            wanted = " or ".join(map(repr, VECTORS))
            raise self._misfit(own, f"there is no output {wanted}; it has {', '.join(names)}")
        port = own.outputs[names.index(of)]
        if port.shape.rank != 3:
            raise self._misfit(own, f"{port} has no shape [batch, seq, hidden]")
        if port.element_type not in _FLOATS:
            raise self._misfit(own, f"{port} is none of {', '.join(_FLOATS)}")
        if not isinstance(port.rule, Rows | Whole) or port.batch_axis not in (0, None):
            raise self._misfit(own, f"{port} has no row of the batch at each index of its first axis")
        return names.index(of)

    def mask_number(self, own: ModelSignature) -> int | None:
        """Return the number of the input that is the mask; None for `cls`, which needs none."""
        if self.mode == "cls":
            return None
        return [port.name for port in own.inputs].index(MASK)

    def replaced(self, own: ModelSignature) -> frozenset[str]:
        """Return the name of the output that is pooled."""
        return frozenset([own.outputs[self.output_number(own)].name])

    def bind(self, own: ModelSignature) -> Run:
        """Return what makes the pooled output of a call's inputs and outputs."""
        number, mask_number = self.output_number(own), self.mask_number(own)
        name = own.outputs[number].name

        def run(inputs: Sequence[TensorLike], outputs: Sequence[Array]) -> list[Array]:
            hidden = outputs[number]
            mask = None if mask_number is None else inputs[mask_number].data
            fits = mask is None or mask.shape == hidden.shape[:2]
            if hidden.ndim != 3 or hidden.shape[1] == 0 or not fits:
                under = "" if mask is None else f" under a mask {list(mask.shape)}"
                words = f"output {name!r} has the shape {list(hidden.shape)}{under}, which cannot be pooled"
                raise InferenceError(words)
            return [*outputs[:number], self.pool(hidden, mask), *outputs[number + 1 :]]

        return run

    def _check_mask(self, own: ModelSignature, port: OutputPort) -> None:
        found = [each for each in own.inputs if each.name == MASK]
        if not found:
            names = ", ".join(each.name for each in own.inputs)
            words = f"the mode {self.mode} needs a mask, and there is no input {MASK!r}; it has {names}"
            raise self._misfit(own, words)
        (mask,) = found
        if not _alike(mask, port):
            raise self._misfit(own, f"{mask} is no mask of {port}: both need [batch, seq]")

    @staticmethod
    def _misfit(own: ModelSignature, words: str) -> SignatureError:
        return SignatureError(f"model {own.name!r}: pooling: {words}", key=("pooling",))

    def pool(self, hidden: Array, mask: Array | None) -> _Vectors:
        """Return the pooled vectors, f32 [batch, hidden], of `hidden`, [batch, seq, hidden], under `mask`, [batch, seq]."""
        vectors = np.asarray(hidden, np.float32)
        pooled = vectors[:, 0].copy() if mask is None else _POOLS[self.mode](vectors, mask)
        if self.normalize:
            # The product of each row with itself, without a table of squares.
            lengths = np.sqrt(np.einsum("bh,bh->b", pooled, pooled))
            pooled /= np.maximum(lengths, _LEAST_LENGTH)[:, None]
        return pooled


def _alike(mask: InputPort, port: OutputPort) -> bool:
    """Tell whether the axes of the mask can be the first two of the output."""
    if mask.shape.rank != 2:
        return False
    return all(
        own == name or own is None or name is None
        for own, name in zip(mask.shape.names, port.shape.names, strict=False)
    )


def _mean(vectors: _Vectors, mask: Array) -> _Vectors:
    weights = np.asarray(mask, np.float32)
    # A product of matrices per row: no table of vectors x mask is made.
    totals: _Vectors = np.matmul(weights[:, None, :], vectors)[:, 0]
    totals /= np.maximum(weights.sum(axis=1, keepdims=True), _LEAST_TOKENS)
    return totals


def _last(vectors: _Vectors, mask: Array) -> _Vectors:
    tokens = mask != 0
    last = mask.shape[1] - 1 - np.argmax(tokens[:, ::-1], axis=1)
    pooled: _Vectors = vectors[np.arange(len(vectors)), last]
    pooled[~tokens.any(axis=1)] = 0
    return pooled


def _max(vectors: _Vectors, mask: Array) -> _Vectors:
    tokens = mask != 0
    if tokens.all():
        return np.asarray(vectors.max(axis=1))
    return np.asarray(np.where(tokens[..., None], vectors, _LEAST_VALUE).max(axis=1))


_POOLS = {"mean": _mean, "last": _last, "max": _max}
