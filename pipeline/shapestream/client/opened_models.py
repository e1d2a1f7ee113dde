"""An opened model, as the faces use it: its inputs, encoded for sending, and its results, whose arrays are made when used.

Callers pass NumPy arrays, plain numbers or strings by name. Inputs that the signature does not admit are refused here,
before they cost a round trip; the server checks them all again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from shapestream.client.tickets import ModelHandle
from shapestream.errors import InternalError, InvalidRequest, RequestError, TooLarge
from shapestream.versions import ONLY
from shapestream.wire.messages import ResultEntry as Answer
from shapestream.wire.messages import Timings
from shapestream.wire.tensor_frames import COPY_BELOW_BYTES, check_strings_fit, from_array, to_array
from shapestream_engine import string_arrays
from shapestream_engine.array_lists import unpack
from shapestream_engine.arrays import plain_array, same_numbers
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ElementTypeError, EngineError, ShapeError
from shapestream_engine.layout import REMEMBERED, Buffer, Layout, RequestShape, Tensors
from shapestream_engine.output_rules import List
from shapestream_engine.ports import InputPort, shapes_of
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import STRING_TYPES


class Model(ModelHandle):
    """An opened model that encodes requests. Its signature is read when it is first needed."""

    @cached_property
    def signature(self) -> ModelSignature:
        """The model's inputs and outputs; raises `InternalError` where they cannot be read."""
        try:
            return ModelSignature.from_dict(self.described)
        except EngineError as error:
            raise InternalError(f"the server's signature of {self.name!r} cannot be read: {error}") from error

    @cached_property
    def outputs(self) -> dict[int, str]:
        """Names of the outputs by their numbers."""
        return {number: port.name for number, port in enumerate(self.signature.outputs)}

    @cached_property
    def lists(self) -> dict[str, str]:
        """Names of the outputs that are lists of arrays, each with the output of its arrays' shapes."""
        return {
            port.name: shapes_of(port.name) for port in self.signature.outputs if isinstance(port.rule, List)
        }

    @cached_property
    def _resolve(self) -> Callable[[Layout], RequestShape]:
        return lru_cache(REMEMBERED)(self.signature.resolve)

    @cached_property
    def _ports(self) -> list[tuple[int, InputPort, str, np.dtype[Any] | None]]:
        """Each input with its number, its name and its type; None for strings."""
        return [
            (number, port, port.name, None if port.is_string else dtype_of(port.element_type))
            for number, port in enumerate(self.signature.inputs)
        ]

    @cached_property
    def _takes_strings(self) -> bool:
        return any(port.is_string for port in self.signature.inputs)

    def encode(self, inputs: Mapping[str, Any]) -> tuple[Tensors, int]:
        """Return the tensors, in the order of the model's ports, and their number of bytes.

        Raises `InvalidRequest`, and `TooLarge` for strings.

        Arrays of numbers of 64 KiB and more are not copied: they must not change until the result is there.
        """
        if type(inputs) is not dict and not isinstance(inputs, Mapping):
            raise InvalidRequest(f"inputs must be a mapping of names to arrays, not {type(inputs).__name__}")
        rows: list[tuple[int, str, tuple[int, ...]]] = []
        buffers: list[Buffer] = []
        for number, port, name, dtype in self._ports:
            value = inputs.get(name)
            if value is None:
                continue
            element_type = port.element_type
            if dtype is None:
                shape, strings = encoded_strings(port, value)
                rows.append((number, element_type, shape))
                buffers.append(strings)
                continue
            if type(value) is not np.ndarray or value.dtype != dtype:
                value = _converted(name, value, element_type, dtype)
            rows.append((number, element_type, value.shape))
            buffers.append(value.tobytes() if value.nbytes < COPY_BELOW_BYTES else from_array(value)[2])
        if len(rows) != len(inputs):
            self._refuse_names(inputs)
        layout: Layout = tuple(rows)
        try:
            request = self._resolve(layout)
        except ShapeError as error:
            raise InvalidRequest(f"model {self.name!r}: {error}") from error
        tensors = Tensors(layout=layout, buffers=buffers)
        if self._takes_strings:
            check_strings_fit(self.signature.inputs, tensors)
        return tensors, request.total_nbytes

    def encoded_anew(self, before: ModelHandle, tensors: Tensors) -> tuple[Tensors, int]:
        """Return a request as this model takes it, by the names of its inputs; otherwise as `encode` does.

        It reads what was encoded, not what the caller gave: small arrays may have changed since.
        """
        assert isinstance(before, Model)
        names = [port.name for port in before.signature.inputs]
        rows = zip(tensors.layout, tensors.buffers, strict=True)
        inputs = {names[number]: to_array(kind, shape, buffer) for (number, kind, shape), buffer in rows}
        try:
            return self.encode(inputs)
        except (InvalidRequest, TooLarge) as error:
            raise type(error)(f"the model has changed since: {error.message}") from error

    def _refuse_names(self, inputs: Mapping[str, Any]) -> None:
        names = [name for _, _, name, _ in self._ports]
        extra = [str(name) for name in inputs if name not in names]
        if extra:
            known = ", ".join(names)
            raise InvalidRequest(
                f"model {self.name!r} has no input {', '.join(map(repr, extra))}; it takes {known}"
            )
        empty = [name for name in names if name in inputs and inputs[name] is None]
        raise InvalidRequest(f"model {self.name!r}: input {empty[0]!r} is None; give it an array")


def _converted(name: str, value: Any, element_type: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `value` as an array of `dtype`, where that loses nothing; raises `InvalidRequest` otherwise.

    Plain numbers and lists take the port's type: integers where they fit exactly, floats rounded as usual, which makes no
    number infinite or zero.
    Arrays know their type: it is changed only where nothing can be lost, or to integers that hold all values.
    """
    plain = not hasattr(value, "dtype")
    try:
        array: npt.NDArray[Any] = plain_array(value)
    except ElementTypeError as error:
        raise InvalidRequest(f"input {name!r}: {error}") from None
    except Exception as error:  # ragged lists; foreign code, where an object's __array__ may raise anything
        raise InvalidRequest(f"input {name!r} is no array: {error}") from error
    if array.dtype == dtype:
        return array
    kinds = array.dtype.kind, "f" if element_type == "bf16" else dtype.kind
    if array.size == 0 and plain:
        return array.astype(dtype)
    if kinds[0] not in "biuf":
        raise InvalidRequest(f"input {name!r} takes {element_type}; {array.dtype} cannot be sent")
    # Of NumPy's "safe" casts those of 64-bit integers to f64 are not, so the values are looked at.
    if np.can_cast(array.dtype, dtype, "safe") or (plain and kinds in _PLAIN) or kinds in _INTEGERS:
        with np.errstate(all="ignore"):
            converted = array.astype(dtype)
        if kinds in _INTEGERS:
            # Compared as Python would: a negative number is no large unsigned one.
            fits = bool(np.all(converted == array)) and bool(np.all((converted < 0) == (array < 0)))
        else:
            fits = same_numbers(array, converted, element_type)
        if fits:
            return converted
        raise InvalidRequest(
            f"input {name!r} takes {element_type}, which cannot hold all of the given values: they are from "
            f"{array.min()} to {array.max()}"
        )
    raise InvalidRequest(
        f"input {name!r} takes {element_type}, not {array.dtype}; convert it where you mean to, "
        f"with .astype({dtype.name!r})"
    )


_INTEGERS = {("i", "i"), ("i", "u"), ("u", "i"), ("u", "u")}
_PLAIN = _INTEGERS | {("i", "f"), ("u", "f"), ("f", "f")}


def encoded_strings(port: InputPort, value: Any) -> tuple[tuple[int, ...], bytes]:
    """Return the layout's shape and the buffer of an input's strings.

    Raises `InvalidRequest` for other elements and another number of axes, with the input's name.
    """
    element_type = port.element_type
    try:
        array = string_arrays.as_strings(element_type, value)
        shape, buffer = string_arrays.pack(element_type, array)
    except ElementTypeError as error:
        raise InvalidRequest(f"input {port.name!r}: {error}") from None
    except Exception as error:  # ragged lists; foreign code, where an object's __array__ may raise anything
        raise InvalidRequest(f"input {port.name!r} is no array: {error}") from error
    if array.ndim != port.shape.rank:
        wanted = f"a list or array of {element_type}" if port.shape.rank else f"one {element_type}"
        raise InvalidRequest(
            f"input {port.name!r} has {port.shape.rank} dimensions, [{port.shape}], not {array.ndim}: give {wanted}"
        )
    return shape, buffer


class Result(Mapping[str, Any]):
    """The outputs of one request, by name, as read-only arrays (`numpy.ndarray`) over the received bytes.

    Strings are arrays of objects, `str` or `bytes`, which are made when they are looked up.

    An output with the rule `list` is a `list` of such arrays. It replaces its two tensors, which `tensor` gives.

    `key` is the item's key in a stream (its position where it has none; None for `infer`), `sequence` the
    request's number in this session, `request_id` its id for `shapestream why`, `timings` the parts of its time at the
    server. An array is made when it is looked up, without a copy; copy it before you write to it.
    """

    __slots__ = ("_answer", "_arrays", "_client", "_lists", "_outputs", "_own_id", "_values", "key")

    ok: Literal[True] = True
    """Whether this is a result; type checkers tell `Result` from `Failed` by `ok is True` (mypy also by `ok` alone)."""

    def __init__(
        self,
        key: Any,
        answer: Answer,
        outputs: Mapping[int, str],
        client: str = "",
        own_id: str | None = None,
        *,
        lists: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`client`: the beginning of the request's id, where its caller gave it no `own_id`.

        `lists`: for each output that is a list of arrays the output with their shapes.
        """
        self.key = key
        self._answer = answer
        self._client = client
        self._own_id = own_id
        self._outputs = outputs
        self._lists = lists
        self._arrays: dict[str, npt.NDArray[Any]] | None = None
        self._values: Mapping[str, Any] | None = None

    @property
    def sequence(self) -> int:
        """The request's number in this session, as in the server's logs."""
        return self._answer.sequence

    @property
    def request_id(self) -> str:
        """The id that the server knows the request by: its caller's own, or one made of client and number."""
        return self._own_id or f"{self._client}-{self.sequence}"

    @property
    def timings(self) -> Timings:
        """The parts of this request's time at the server."""
        return self._answer.timings

    @property
    def version(self) -> str:
        """The version of the model that answered; "1" where it states none."""
        return self._answer.timings.version or ONLY

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return one tensor of the answer as it was received: of a list, its elements, and as `NAME.shapes` its shapes."""
        return self._tensors()[name]

    def __getitem__(self, name: str) -> Any:
        values = self._values
        return (self._all() if values is None else values)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all() if self._lists else self._answer.tensors.layout)

    def _all(self) -> Mapping[str, Any]:
        if self._values is None:
            tensors = self._tensors()
            self._values = _with_lists(tensors, self._lists) if self._lists else tensors
        return self._values

    def _tensors(self) -> dict[str, npt.NDArray[Any]]:
        if self._arrays is None:
            tensors, outputs = self._answer.tensors, self._outputs
            arrays: dict[str, npt.NDArray[Any]] = {}
            for (number, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True):
                arrays[outputs.get(number) or f"output{number}"] = to_array(element_type, shape, buffer)
            self._arrays = arrays
        return self._arrays

    # Comparing arrays element by element says nothing about two results.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{self._outputs.get(number, number)}: {element_type} "
            f"{list(shape[:-1] if element_type in STRING_TYPES else shape)}"
            for number, element_type, shape in self._answer.tensors.layout
        )
        return f"<Result {self.key!r} {shapes}>"


def _with_lists(
    tensors: Mapping[str, npt.NDArray[Any]], lists: Mapping[str, str]
) -> dict[str, npt.NDArray[Any] | list[npt.NDArray[Any]]]:
    """Return the outputs with each list as its arrays; raises `InternalError` for one that cannot be taken apart."""
    values: dict[str, npt.NDArray[Any] | list[npt.NDArray[Any]]] = {}
    made = set(lists.values())
    for name, tensor in tensors.items():
        if name in lists:
            try:
                values[name] = unpack(tensor, tensors[lists[name]])
            except KeyError:
                raise InternalError(
                    f"the server sent the list {name!r} without {lists[name]!r}, the shapes of its arrays"
                ) from None
            except ShapeError as error:
                raise InternalError(f"the server's list {name!r} cannot be read: {error}") from error
        elif name not in made:
            values[name] = tensor
    return values


class Failed:
    """An item of a stream that has no result, in its place, with `on_error="yield"`.

    Looking up an output raises the error.
    """

    __slots__ = ("error", "key", "sequence")

    ok: Literal[False] = False
    """Whether this is a result: see `Result.ok`."""

    def __init__(self, key: Any, error: RequestError, sequence: int) -> None:
        self.key = key
        self.error = error
        self.sequence = sequence
        """The request's number in this session; 0 where it was refused before it was sent."""

    def __getitem__(self, name: str) -> NoReturn:
        raise self.error

    @property
    def timings(self) -> NoReturn:
        """Raise the error: a failed item has no timings."""
        raise self.error

    def __repr__(self) -> str:
        return f"<Failed {self.key!r} {self.error}>"
