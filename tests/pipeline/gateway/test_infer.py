"""Inference over the protocol: JSON and binary data both ways, options, and errors of the server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import trio
from tests.pipeline.gateway.gateway_site import GatewaySite, on_site, x_input, x_request
from trio.testing import wait_all_tasks_blocked


@on_site
async def test_json_in_and_out(site: GatewaySite) -> None:
    """Nested or flat data, integers for a floating port; an id is echoed where it is given."""
    for data in ([[1, 2, 3.5]], [1, 2, 3.5]):
        reply = await site.infer({"id": "seven", **x_request(data)})
        assert "application/json" == reply.response.content_type
        assert {
            "id": "seven",
            "model_name": "double",
            "model_version": "1",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2.0, 4.0, 7.0]}],
        } == reply.content
    assert "id" not in (await site.infer(x_request())).content
    assert "id" not in (await site.infer({"id": "", **x_request()})).content, "as at Triton"


def binary_input(array: Any, name: str = "x", datatype: str = "FP32") -> dict[str, Any]:
    """An input that is sent as binary data."""
    size = {"binary_data_size": array.nbytes}
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": size}


@on_site
async def test_binary_in_and_out(site: GatewaySite) -> None:
    """The data follow the JSON, in the order of the tensors; a mixture of both forms as each output asks."""
    ids, flags = np.array([[2**62, -1]]), np.array([[True, False]])
    inputs = [binary_input(flags, "flags", "BOOL"), binary_input(ids, "ids", "INT64")]
    outputs = [
        {"name": "half", "parameters": {"binary_data": False}},
        {"name": "not", "parameters": {"binary_data": True}},
        {"name": "twice"},
    ]
    for by_default in (False, True):
        request = {"inputs": inputs, "outputs": outputs, "parameters": {"binary_data_output": by_default}}
        reply = await site.infer(request, flags.tobytes() + ids.tobytes(), model="pair")
        assert "application/octet-stream" == reply.response.content_type
        half, inverted, twice = reply.content["outputs"]
        assert {"name": "half", "datatype": "FP16", "shape": [1, 2], "data": [0.5, 0.0]} == half
        assert {"binary_data_size": 2} == inverted["parameters"]
        assert b"\0\1" == reply.binary[:2]
        assert by_default == (b"" != reply.binary[2:])
        doubled = np.frombuffer(reply.binary[2:]).view(np.int64).tolist() if by_default else twice["data"]
        assert (ids * 2).ravel().tolist() == doubled


@on_site
async def test_binary_data_are_not_copied_on_their_way(site: GatewaySite) -> None:
    """The answer's pieces are views of the result, also where its bytes are at an odd address."""
    x = np.arange(100_000, dtype=np.float32).reshape(1, -1)
    request = {"inputs": [binary_input(x)], "parameters": {"binary_data_output": True}}
    reply = await site.infer(request, x.tobytes())
    *_, piece = reply.response.body
    assert isinstance(piece, memoryview)
    assert (x * 2).tobytes() == piece
    assert x.nbytes == reply.content["outputs"][0]["parameters"]["binary_data_size"]
    assert (x * 2).ravel().tolist() == (await site.infer(x_request(x.ravel().tolist(), x.shape))).content[
        "outputs"
    ][0]["data"]


@on_site
async def test_outputs_that_are_chosen_are_sent_in_their_order(site: GatewaySite) -> None:
    """Those that are not asked for are not sent."""
    inputs = [
        {"name": "ids", "datatype": "INT64", "shape": [1, 1], "data": [7]},
        {"name": "flags", "datatype": "BOOL", "shape": [1, 2], "data": [True, 0]},
    ]
    reply = await site.infer(
        {"inputs": inputs, "outputs": [{"name": "not"}, {"name": "twice"}]}, model="pair"
    )
    told = [(output["name"], output["data"]) for output in reply.content["outputs"]]
    assert [("not", [False, True]), ("twice", [14])] == told


@on_site
async def test_shapes_without_axes_or_elements(site: GatewaySite) -> None:
    """A scalar, and lists without numbers."""
    for data, shape in (([2.5], []), ([1], [])):
        request = {"inputs": [{"name": "x", "datatype": "FP64", "shape": shape, "data": data}]}
        output = (await site.infer(request, model="scalar")).content["outputs"][0]
        assert (shape, [float(data[0])]) == (output["shape"], output["data"])
    for data, shape in (([], [0, 3]), ([[], []], [2, 0]), ([], [2, 0])):
        request = {"inputs": [{"name": "x", "datatype": "INT64", "shape": shape, "data": data}]}
        output = (await site.infer(request, model="any")).content["outputs"][0]
        assert (shape, []) == (output["shape"], output["data"])


@on_site
async def test_numbers_that_json_does_not_have_go_as_binary_data(site: GatewaySite) -> None:
    """NaN and infinity; asked for as JSON they are refused, with the way to get them."""
    x = np.array([[np.nan, np.inf, 1]], np.float32)
    request = {"inputs": [binary_input(x)]}
    reply = await site.infer(request, x.tobytes())
    assert (400, True) == (reply.status, "binary data" in reply.content["error"])
    reply = await site.infer({**request, "parameters": {"binary_data_output": True}}, x.tobytes())
    np.testing.assert_array_equal(x[0] * 2, np.frombuffer(reply.binary, np.float32))


@on_site
async def test_tags_and_priorities_reach_the_server(site: GatewaySite) -> None:
    """`x-request-id`, or the id, where it can be sent; the trace; Triton's levels as priorities, 2 being the default."""
    trace = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=b", "x-request-id": "header"}
    for level, priority in ((0, 0), (1, 1), (2, 0), (5, -3), (2**62, 1 - 2**31)):
        await site.infer({"id": "body", "parameters": {"priority": level}, **x_request()}, headers=trace)
        assert priority == site.server.requests[-1].priority
    caller = {"caller": "127.0.0.1"}
    tags = {**caller, "request_id": "header", "traceparent": trace["traceparent"], "tracestate": "a=b"}
    assert tags == site.server.requests[-1].tags
    for unusable in ("", "ä", "x" * 129, "\n"):
        await site.infer({"id": "body", **x_request()}, headers={"x-request-id": unusable})
        assert {**caller, "request_id": "body"} == site.server.requests[-1].tags
        await site.infer({"id": unusable, **x_request()})
        assert caller == site.server.requests[-1].tags


@on_site
async def test_an_answer_tells_the_id_in_stories(site: GatewaySite) -> None:
    """The caller's own, or the one that the client of the server chose; errors of the server tell it, too."""
    header = {"x-request-id": "mine"}
    for request, status in ((x_request(), 200), (x_request([-1, 0, 0]), 500)):
        reply = await site.infer(request, headers=header)
        assert (status, "mine") == (reply.status, reply.headers["x-request-id"])
        reply = await site.infer(request)
        client, _, number = reply.headers["x-request-id"].rpartition("-")
        assert (32, True) == (len(client), number.isdecimal())


@on_site
async def test_a_timeout_is_a_deadline_in_microseconds(site: GatewaySite) -> None:
    """A request that takes 30 s, with 10 s and with 40; 0 is no deadline."""
    begin = trio.current_time()
    reply = await site.infer({"parameters": {"timeout": 10_000_000}, **x_request()}, model="slow")
    assert 504 == reply.status
    assert pytest.approx(begin + 10) == trio.current_time()
    for timeout in (40_000_000, 0, 2**63 - 1):
        reply = await site.infer({"parameters": {"timeout": timeout}, **x_request()}, model="slow")
        assert 200 == reply.status


@on_site
async def test_parameters_that_are_not_served(site: GatewaySite) -> None:
    """Unknown ones are ignored; those that a client relies on are refused by name."""
    known = {"mine": [1], "triton_enable_empty_final_response": True, "binary_data_output": False}
    assert 200 == (await site.infer({"parameters": known, **x_request()})).status
    for name in ("sequence_id", "sequence_start", "triton_final_response"):
        assert name in await site.refused(400, {"parameters": {name: 1}, **x_request()})
    for wrong in (
        {"timeout": -1},
        {"timeout": "1"},
        {"timeout": 1.5},
        {"priority": True},
        {"priority": 2**63},
    ):
        await site.refused(400, {"parameters": wrong, **x_request()})
    for wrong in (1, [], "a"):
        await site.refused(400, {"parameters": wrong, **x_request()})
    await site.refused(400, {"parameters": {"binary_data_output": 1}, **x_request()})
    memory = {"shared_memory_region": "r"}
    await site.refused(400, {"inputs": [x_input(parameters=memory)]})
    for parameters in (memory, {"classification": 2}, {"binary_data": "yes"}):
        await site.refused(400, {"outputs": [{"name": "y", "parameters": parameters}], **x_request()})


@on_site
async def test_a_caller_that_leaves_withdraws_its_request(site: GatewaySite) -> None:
    """The handler's scope is cancelled when the connection closes."""
    site.server.hold()
    with trio.move_on_after(1):
        await site.infer(x_request())
    await wait_all_tasks_blocked()
    assert [site.server.requests[0].sequence] == site.server.cancelled


@on_site
async def test_errors_of_the_server_have_statuses(site: GatewaySite) -> None:
    """A model that fails is 500, a request that does not fit it 400, a model that is not there 404."""
    reply = await site.infer(x_request([-1, 0, 0]))
    assert (500, "negative numbers overwhelm this model") == (reply.status, reply.content["error"])
    assert "'n'" not in await site.refused(400, x_request([1.0], [1]))
    assert "missing input 'x'" in await site.refused(400, {"inputs": []})
    assert "missing" in await site.refused(400, {})
    assert "nix" in await site.refused(404, x_request(), model="nix")
    assert 1 == len(json.loads((await site.infer(x_request(), model="n" * 600)).body))


@on_site
async def test_many_numbers_are_read_and_written_in_slices(site: GatewaySite) -> None:
    """All of them come, and a string among the last ones is refused as among the first."""
    many: list[Any] = [1.5] * 150_000
    shape = [1, len(many)]
    reply = await site.infer(x_request(many, shape))
    assert [3.0] * len(many) == reply.content["outputs"][0]["data"]
    assert "FP32" in await site.refused(400, x_request([*many[:-1], "1"], shape))
