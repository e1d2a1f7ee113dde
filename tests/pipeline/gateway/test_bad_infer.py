"""Inference requests that are refused: before any array is made, and before the server hears of them."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.gateway.gateway_site import GatewaySite, on_site, x_input, x_request

from shapestream.gateway.json_text import MOST_JSON_BYTES

BODY = json.dumps({"inputs": [x_input(parameters={"binary_data_size": 12})]}).encode()


@on_site
async def test_head_lengths(site: GatewaySite) -> None:
    """Only a number of bytes from 1 to the length of the body is one."""
    for stated in ("-5", "abc", "0", "", " 1", "1.0", "+1", "1" * 5000, "\u0661", str(len(BODY) + 1)):
        error = await site.refused(400, BODY, headers={"inference-header-content-length": stated})
        assert "Inference-Header-Content-Length" in error


@on_site
async def test_texts_that_are_no_request(site: GatewaySite) -> None:
    """No JSON, JSON that no standard admits, and JSON of another form."""
    nan = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[%s]}]}'
    for text in (b"", b"{", b"\xff", b"{} {}", b'{"a":"\xed\xa0\x80"}', *(nan % word for word in WORDS)):
        assert "no JSON" in await site.refused(400, text)
    for deep in (b"[" * 40_000, b'{"a":' * 40_000, b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}"):
        await site.refused(400, deep)
    for content in ([], 1, "a", None, True, {"inputs": 1}, {"inputs": {}}, {"inputs": [1]}, {"inputs": [{}]}):
        await site.refused(400, content)
    for content in ({"id": 1}, {"outputs": "y"}, {"outputs": [{"name": 1}]}, {"outputs": [{"name": "z"}]}):
        await site.refused(400, {**x_request(), **content})
    assert "twice" in await site.refused(400, {**x_request(), "outputs": [{"name": "y"}] * 2})


WORDS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"1,", b"9" * 5000)


@on_site
async def test_inputs_that_contradict_themselves(site: GatewaySite) -> None:
    """Names, datatypes, shapes and data."""
    assert "twice" in await site.refused(400, {"inputs": [x_input()] * 2})
    assert "'z'" in await site.refused(400, {"inputs": [x_input(), x_input() | {"name": "z"}]})
    assert "BYTES" in await site.refused(400, x_request(datatype="BYTES"))
    for datatype in ("FP64", "fp32", "", None, 1, "X" * 10_000):
        assert "FP32" in await site.refused(400, x_request(datatype=datatype))
    for shape in (
        3,
        "1,3",
        [1.0, 3],
        [True, 3],
        [None],
        ["1"],
        [[1], 3],
        [-1, -3],
        [1] * 33,
        [2**63],
        [2**70],
    ):
        await site.refused(400, x_request(shape=shape))
    for shape in ([2**32, 2**32], [2**62, 2], [0, 2**62, 2**62], [2**31, 2**31, 2**31]):
        await site.refused(400, x_request(shape=shape))
        request = x_request(shape=shape, parameters={"binary_data_size": 0})
        del request["inputs"][0]["data"]
        await site.refused(400, request)
    for data in ([], [1], [1] * 4, [[1], [2], [3]], [[1, 2]], [[[1, 2, 3]]], [1, [2], 3], [[1, 2, 3], 4]):
        assert "data" in await site.refused(400, x_request(data=data)) or data == [1, [2], 3]
    for data in (3, "abc", {}, {"a": 1}, ["a", 1, 2], [None, 1, 2], [{}, 1, 2], [1e39, 1, 2], [-1e39, 1, 2]):
        await site.refused(400, x_request(data=data))


@on_site
async def test_numbers_that_an_element_type_does_not_hold(site: GatewaySite) -> None:
    """Fractions and large numbers for integers, and anything but truth for booleans."""
    ids = {"name": "ids", "datatype": "INT64", "shape": [1, 1]}
    flags = {"name": "flags", "datatype": "BOOL", "shape": [1, 2], "data": [True, False]}
    for value in (1.5, 2**63, -(2**63) - 1, "1"):
        await site.refused(400, {"inputs": [{**ids, "data": [value]}, flags]}, model="pair")
    for value in (2, -1, 256, 0.5, "true"):
        request = {"inputs": [{**ids, "data": [1]}, {**flags, "data": [True, value]}]}
        await site.refused(400, request, model="pair")


@on_site
async def test_binary_sizes_that_do_not_fit(site: GatewaySite) -> None:
    """The size must be that of the shape, and all of the body's bytes must be some input's."""

    def request(size: Any, **more: Any) -> dict[str, Any]:
        entry = x_input(parameters={"binary_data_size": size})
        del entry["data"]
        return {"inputs": [{**entry, **more}]}

    assert 200 == (await site.infer(request(12), b"\0" * 12)).status
    for size in (11, 13, 0, -12, 12.0, "12", None, 2**63):
        await site.refused(400, request(size), b"\0" * 12)
    for sent in (11, 13, 1):
        await site.refused(400, request(12), b"\0" * sent)
    assert "both" in await site.refused(400, request(12, data=[1, 2, 3]), b"\0" * 12)
    assert "follow" in await site.refused(400, x_request(), b"\0")
    assert "follow" in await site.refused(400, {}, b"\0")


@on_site
async def test_what_is_too_much_takes_little_memory(site: GatewaySite) -> None:
    """A million tensors, a million lists, a long string beside many numbers, megabytes of JSON."""
    tensors = b'{"inputs":[' + b"1," * 900_000 + b"1]}"
    strings = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,300001],"data":["%s"%s]}]}'
    await site.refused(400, b"{}")
    tracemalloc.start()
    try:
        await site.refused(400, tensors)
        await site.refused(413, b'{"inputs":[' + b"{}," * 500_000 + b"1]}")
        await site.refused(413, b"[" * 1_000_000)
        await site.refused(400, strings % (b"a" * 1_000_000, b",1" * 300_000))
        await site.refused(413, b" " * (2 * 1024 * 1024) + b"{}")
        await site.refused(413, b'{"a":{' + b'"":1,' * 100_000 + b'"":1}}')
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 64 * 1024 * 1024 > peak


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "ids", ""]) | plain,
        "datatype": st.sampled_from(["FP32", "INT64", "BYTES"]) | plain,
        "shape": st.lists(st.integers(-2, 4) | st.integers(), max_size=3) | plain,
        "data": st.lists(st.integers() | st.floats(), max_size=4) | plain,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(0, 16) | plain})
        | plain,
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "id": plain,
        "inputs": st.lists(entries | plain, max_size=3) | plain,
        "outputs": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["y"]) | plain}) | plain, max_size=2
        ),
        "parameters": st.dictionaries(
            st.sampled_from(["timeout", "priority", "binary_data_output", "triton_x"]), plain, max_size=3
        )
        | plain,
    },
)


@pytest.mark.parametrize("model", ["double", "any"])
@given(content=requests, binary=st.binary(max_size=16), cut=st.integers(0, 40))
def test_whatever_comes_is_answered_or_refused(model: str, content: Any, binary: bytes, cut: int) -> None:
    """No request raises anything but an HTTP error that blames it."""

    @on_site
    async def play(site: GatewaySite) -> None:
        text = json.dumps(content, allow_nan=True).encode()
        for body in (text, text[:cut], text[cut:]):
            reply = await site.infer(body, binary, model=model)
            assert reply.status in (200, 400, 413, 504)
            assert (200 == reply.status) == ("error" not in reply.content)

    play()


@on_site
async def test_a_view_of_the_body_at_any_address_is_an_input(site: GatewaySite) -> None:
    """The bytes behind a JSON text of any length are not aligned."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    entry = {"name": "x", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}}
    for blanks in range(8):
        text = json.dumps({"inputs": [entry]}).encode() + b" " * blanks
        reply = await site.infer(text, x.tobytes())
        assert (x * 2).ravel().tolist() == reply.content["outputs"][0]["data"]


@on_site
async def test_a_refused_request_keeps_no_body(site: GatewaySite) -> None:
    """Nor does its error, once it is answered: no garbage collection has to free the bytes."""
    texts = (
        b'{"inputs":1}',
        b"[]",
        b"{",
        b" " * (MOST_JSON_BYTES + 1),
        b'{"inputs":[' + b" " * 100_000 + b"2]}",
    )
    gc.collect()
    gc.disable()
    try:
        for text in texts:
            whole = np.frombuffer(text, np.uint8).copy()
            freed: list[None] = []
            weakref.finalize(whole, freed.append, None)
            assert 400 <= (await site.ask("POST", "/v2/models/double/infer", memoryview(whole))).status
            del whole
            assert [None] == freed, text[:20]
    finally:
        gc.enable()
