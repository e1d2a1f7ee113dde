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

from shapestream_engine.arrays import InputArrays
from shapestream_engine.compiled_model import CompiledModel, Preparations, PreparedSizes
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError, SignatureError
from shapestream_engine.infer_request import InferRequest, InferResults
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.port_names import VECTORS, vectors_among
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array, Tensor, TensorLike

POOLED = "sentence_embedding"
"""Name of the output with the pooled vectors."""
MODES = ("mean", "cls", "last", "max")
"""The ways to pool."""
_FLOATS = ("f16", "f32", "f64")
"""Element types that NumPy computes with."""
_LEAST_TOKENS = np.float32(1e-9)
_LEAST_VALUE = np.float32(-1e9)
_LEAST_LENGTH = np.float32(1e-12)
_Vectors: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The pooling of a model: how, of which output, and under which input as mask.

    Pooling(mode="mean", normalize=True)
    """

    mode: str
    of: str | None = None
    """The output with a vector per token, [batch, seq, hidden]. Default: by its usual name, or the only output."""
    mask: str = "attention_mask"
    """The input that is not 0 where a token is, [batch, seq]. `cls` needs none."""
    normalize: bool = False
    """True: each vector gets the length 1."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SignatureError(
                f"unknown pooling {self.mode!r}; known are {', '.join(MODES)}", key=("pooling", "mode")
            )

    def signature(self, own: ModelSignature) -> ModelSignature:
        """Return the signature with `sentence_embedding` in place of `of`; raises `SignatureError` where it does not fit."""
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
        """Return the number of the output `of`; raises `SignatureError` if it is no table of vectors per token."""
        names = [port.name for port in own.outputs]
        of = vectors_among(names) if self.of is None else self.of
        if of not in names:
            wanted = " or ".join(map(repr, VECTORS)) if of is None else repr(of)
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
        return [port.name for port in own.inputs].index(self.mask)

    def _check_mask(self, own: ModelSignature, port: OutputPort) -> None:
        found = [each for each in own.inputs if each.name == self.mask]
        if not found:
            names = ", ".join(each.name for each in own.inputs)
            words = f"the mode {self.mode} needs a mask, and there is no input {self.mask!r}; it has {names}"
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


class PooledModel(CompiledModel):
    """A compiled model of any engine whose requests pool one output."""

    def __init__(self, model: CompiledModel, pooling: Pooling) -> None:
        """Wrap a model; raises `SignatureError` if the pooling does not fit it."""
        super().__init__(pooling.signature(model.signature), model.properties)
        self._model = model
        self._pooling = pooling
        self.prepares = model.prepares
        self.states = model.states

    @property
    def nbytes(self) -> int:
        """Memory of the engine's model in bytes."""
        return self._model.nbytes

    @property
    def preparations(self) -> Preparations | None:
        """Preparations of the engine's model."""
        return self._model.preparations

    def prepare(self, sizes: PreparedSizes) -> CompiledModel:
        """Compile the engine's model for calls of these sizes, with the same pooling."""
        return PooledModel(self._model.prepare(sizes), self._pooling)

    def create_infer_request(self) -> PooledRequest:
        """Create a request of the engine's model that pools after each call."""
        return PooledRequest(self.signature, self._model.create_infer_request(), self._pooling)

    def close(self) -> None:
        """Close the engine's model."""
        self._model.close()


class PooledRequest(InferRequest):
    """A request of an engine, with its tensors, and the pooled output in place of the engine's."""

    def __init__(self, signature: ModelSignature, request: InferRequest, pooling: Pooling) -> None:
        super().__init__(signature)
        self._request = request
        self._pooling = pooling
        own = request.signature
        self._number = pooling.output_number(own)
        self._mask_number = pooling.mask_number(own)
        size = own.outputs[self._number].shape.dimensions[2]
        self._pooled: Array = np.zeros((0, 0 if size.is_dynamic else size.minimum), dtype_of("f32"))
        self._started = False

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The engine's input tensors."""
        return self._request.input_tensors

    def infer(self, inputs: InputArrays | None = None) -> InferResults:
        """Run a call of the engine, in this thread where the engine can do that, and pool."""
        self._request.infer(inputs)
        self._pool()
        return self._results

    def start_async(self) -> None:
        """Start a call of the engine; `wait` pools."""
        self._request.start_async()
        self._started = True

    def wait(self) -> None:
        """Wait for the engine's call, and pool. Without a call, return at once."""
        started, self._started = self._started, False
        self._request.wait()
        if started:
            self._pool()

    def outputs(self) -> list[Array]:
        """Return the outputs of the last call, the pooled one among them; copy them before the next call."""
        outputs = list(self._request.outputs())
        outputs[self._number] = self._pooled
        return outputs

    def _pool(self) -> None:
        hidden = self._request.outputs()[self._number]
        mask = None if self._mask_number is None else self.input_tensors[self._mask_number].data
        fits = mask is None or mask.shape == hidden.shape[:2]
        if hidden.ndim != 3 or hidden.shape[1] == 0 or not fits:
            under = "" if mask is None else f" under a mask {list(mask.shape)}"
            name = self._request.signature.outputs[self._number].name
            words = f"output {name!r} has the shape {list(hidden.shape)}{under}, which cannot be pooled"
            raise InferenceError(words)
        self._pooled = self._pooling.pool(hidden, mask)

    def _use_input(self, number: int, tensor: TensorLike | None) -> None:
        self._request.set_input_tensor(number, tensor)

    def _use_output(self, number: int, tensor: Tensor) -> None:
        if number == self._number:
            super()._use_output(number, tensor)
        self._request.set_output_tensor(number, tensor)
