"""No slice of a body that is read, or of an answer that is written, is long: by the bytes and lines of Python of each.

A slice is a turn of the gateway's event loop. Work is counted as in tests/pipeline/serving/test_long_turns.py, since it is
the same on every machine.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import trio
from tests.entries import result_of
from tests.pipeline.gateway.infer_bodies import entry, posted, signature_of
from trio.testing import MockClock

from shapestream.client.opened_models import Result
from shapestream.gateway.infer_request import (
    AskedOutput,
    infer_response,
    read_body,
    read_tensors,
)
from shapestream.gateway.infer_tensors import to_json
from shapestream.gateway.json_text import MOST_CONTAINERS, read_object
from shapestream.gateway.openai_api import read_request
from shapestream.gateway.tei_api import read_embed, tokenize_response
from shapestream.slices import LONG_BYTES, LongSteps, Slices
from shapestream.testing import tensors_of
from shapestream.web.messages import HttpResponse

MOST_BYTES = 8_000_000
"""Allocated in a slice, besides the arrays that are made once. Today 6.6 MB: a list of 400,000 elements that grows."""
MOST_LINES = 60_000
"""Lines of Python of a slice. Today 41,000: strings are written one by one."""
MILLION = 1_000_000


def infer(element_type: str, rank: int, datatype: str, shape: list[int], data: str) -> Slices[Any]:
    """An inference's body, read."""
    told = json.dumps(entry(datatype, shape))[:-1] + ',"data":' + data + "}"
    body = yield from read_body(posted(b'{"inputs":[' + told.encode() + b"]}"), 1)
    inputs, _ = yield from read_tensors(body, signature_of(element_type, rank))
    return inputs["x"]


def answer(array: np.ndarray[Any, Any]) -> Slices[Any]:
    """An output, written as JSON."""
    result = Result(None, result_of(1, tensors_of([array])), {0: "y"})
    response = yield from infer_response("m", "i", [AskedOutput(name="y", binary=False)], result)
    return response


def strings(array: np.ndarray[Any, Any]) -> Slices[Any]:
    """An output of strings, written as JSON lists, in an answer of these."""
    lists = yield from to_json("y", array)
    return HttpResponse(body=lists)


def row(of: str, times: int) -> str:
    """A list of so many of the same."""
    return "[" + ",".join([of] * times) + "]"


LISTS = MOST_CONTAINERS - 10
READ: dict[str, Callable[[], Slices[Any]]] = {
    "a row of digits": lambda: infer("f32", 2, "FP32", [1, MILLION], row("1", MILLION)),
    "a row of digits in a list": lambda: infer("f32", 2, "FP32", [1, MILLION], f"[{row('1', MILLION)}]"),
    "numbers of f16": lambda: infer("f16", 1, "FP16", [500_000], row("2.5", 500_000)),
    "integers": lambda: infer("i64", 1, "INT64", [400_000], row("1000", 400_000)),
    "booleans": lambda: infer("boolean", 1, "BOOL", [400_000], row("true", 400_000)),
    "short rows": lambda: infer("i32", 2, "INT32", [LISTS, 1], row("[1]", LISTS)),
    "long rows": lambda: infer("f64", 3, "FP64", [20, 10, 2000], row(row(row("1.5", 2000), 10), 20)),
    "strings": lambda: infer("str", 1, "BYTES", [65_536], row('"some words"', 65_536)),
    "members": lambda: read_object(b"{" + b",".join(b'"%d":{}' % number for number in range(LISTS)) + b"}"),
    "texts": lambda: read_request(json.dumps({"model": "m", "input": ["hello world " * 80] * 2048}).encode()),
    "tokens of a text": lambda: read_embed(b'{"inputs":' + row("1000", 400_000).encode() + b"}"),
    "tokens of many": lambda: read_embed(b'{"inputs":' + row(row("1000", 200), 2000).encode() + b"}"),
}
WRITTEN: dict[str, Callable[[], Slices[Any]]] = {
    "a row of numbers": lambda: answer(np.full((1, MILLION), 1.5, np.float32)),
    "a row of integers": lambda: answer(np.full((1, MILLION), 10_000, np.int64)),
    "texts": lambda: strings(np.array(["some words"] * 200_000, object)),
    "tokens": lambda: tokenize_response([np.arange(150)] * 2048, "i"),
}


def most_of(work: Slices[Any]) -> tuple[Any, int, int, int]:
    """The result of the work, the most bytes and lines of a slice, and the number of slices."""
    lines = most_lines = most_bytes = slices = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    outer = sys.gettrace()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        while True:
            slices, lines = slices + 1, 0
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            sys.settrace(count)
            try:
                next(work)
            except StopIteration as end:
                return end.value, most_bytes, most_lines, slices
            finally:
                sys.settrace(outer)
                most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[1] - held)
                most_lines = max(most_lines, lines)
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("kind", list(READ))
def test_no_slice_of_a_body_is_long(kind: str) -> None:
    """Each kind at the limits of docs/http.md. The array of an input is made once, at its whole size."""
    value, nbytes, lines, slices = most_of(READ[kind]())
    array_bytes = value.nbytes if isinstance(value, np.ndarray) else 0
    lists = getattr(getattr(value, "inputs", None), "lists", ())
    array_bytes += max([each.nbytes for each in lists], default=0)
    assert nbytes - array_bytes <= MOST_BYTES
    assert lines <= MOST_LINES
    assert slices >= 8


@pytest.mark.parametrize("kind", list(WRITTEN))
def test_no_slice_of_an_answer_is_long(kind: str) -> None:
    """Nor are its pieces put together at the end."""
    response, nbytes, lines, slices = most_of(WRITTEN[kind]())
    assert nbytes <= MOST_BYTES
    assert lines <= MOST_LINES
    assert slices >= 8
    assert max(map(len, response.body)) <= 1 << 20


def test_one_long_text_is_begun_at_a_time() -> None:
    """Another one begins when it has ended, so that the objects of one are there; what goes on with it waits for none."""
    order: list[str] = []

    def work(name: str) -> Slices[str]:
        for _ in range(3):
            order.append(name)
            yield
        return name

    async def main() -> None:
        steps = LongSteps()
        async with trio.open_nursery() as nursery:
            for name in ("first", "second"):
                nursery.start_soon(steps.finish_slices, LONG_BYTES, work(name))
            nursery.start_soon(partial(steps.finish_slices, LONG_BYTES, work("going on"), goes_on=True))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    begun = {name: order.index(name) for name in order}
    ended = {name: len(order) - order[::-1].index(name) for name in order}
    first, second = sorted(("first", "second"), key=begun.__getitem__)
    assert ended[first] <= begun[second]
    assert begun["going on"] < ended[second]
