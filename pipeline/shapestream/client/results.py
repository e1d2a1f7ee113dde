"""A result, whose arrays are made when they are looked up, or a failed item of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy.typing as npt

from shapestream.errors import InternalError, RequestError
from shapestream.wire.messages import ResultEntry as Answer
from shapestream.wire.messages import Timings
from shapestream.wire.tensor_frames import to_array
from shapestream_engine.array_lists import unpack
from shapestream_engine.errors import ShapeError
from shapestream_engine.string_arrays import STRING_TYPES


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
