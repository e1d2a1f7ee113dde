"""A result, whose arrays are made when they are looked up, or a failed item of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import numpy.typing as npt

from shapestream.errors import RequestError
from shapestream.wire.messages import ResultEntry as Answer
from shapestream.wire.messages import Timings
from shapestream.wire.tensor_frames import to_array


class Result(Mapping[str, npt.NDArray[Any]]):
    """The outputs of one request, by name, as read-only arrays over the received bytes.

    `key` is the item's key in a stream (its position where it has none; None for `infer`), `sequence` the
    request's number in this session, `request_id` its id for `shapestream why`, `timings` the parts of its time at the
    server. An array is made when it is looked up, without a copy; copy it before you write to it.
    """

    __slots__ = ("_answer", "_arrays", "_client", "_outputs", "_own_id", "key")

    ok: Literal[True] = True
    """Whether this is a result; type checkers tell `Result` from `Failed` by `ok is True` (mypy also by `ok` alone)."""

    def __init__(
        self,
        key: Any,
        answer: Answer,
        outputs: Mapping[int, str],
        client: str = "",
        own_id: str | None = None,
    ) -> None:
        """`client`: the beginning of the request's id, where its caller gave it no `own_id`."""
        self.key = key
        self._answer = answer
        self._client = client
        self._own_id = own_id
        self._outputs = outputs
        self._arrays: dict[str, npt.NDArray[Any]] | None = None

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

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        arrays = self._arrays
        return (self._all() if arrays is None else arrays)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._answer.tensors.layout)

    def _all(self) -> dict[str, npt.NDArray[Any]]:
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
            f"{self._outputs.get(number, number)}: {element_type} {list(shape)}"
            for number, element_type, shape in self._answer.tensors.layout
        )
        return f"<Result {self.key!r} {shapes}>"


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
