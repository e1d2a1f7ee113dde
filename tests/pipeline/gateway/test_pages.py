"""The pages about the server and its models, and what other paths and methods get."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from tests.entries import result_of, timings_of
from tests.pipeline.gateway.gateway_site import PAIR, GatewaySite, on_site, port_of
from trio.testing import MockClock

from shapestream.client.opened_models import Result
from shapestream.gateway.infer_request import infer_response
from shapestream.gateway.infer_tensors import DATATYPES, config_datatype
from shapestream.gateway.model_pages import (
    FRESH_S,
    PAGE_S,
    READY_S,
    SLICE_MODELS,
    ServerCounters,
    max_batch_size,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    versions_of,
    why_not_ready,
    why_server_is_not_ready,
)
from shapestream.slices import LongSteps, at_once
from shapestream.web.messages import HttpResponse
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import PaddedCounts, Rows
from shapestream_engine.ports import OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import STRING_TYPES

COUNTED = (
    "results",
    "failures",
    "rows",
    "calls",
    "last_ms",
    "total_us",
    "queue_us",
    "gather_us",
    "run_us",
    "split_us",
)
"""What the server sums for each model."""


def model(inputs: str, outputs: str) -> ModelSignature:
    """A model of one input and one output of these shapes."""
    return ModelSignature(
        "m", (port_of(inputs, "input", "x", "f32"),), (port_of(outputs, "output", "y", "f32"),)
    )


def test_each_element_type_has_a_datatype() -> None:
    """The one that needs an optional package included."""
    assert {*ELEMENT_TYPES, "bf16", *STRING_TYPES} == set(DATATYPES)
    assert len(set(DATATYPES.values())) == len(DATATYPES) - 1  # both kinds of strings are BYTES
    assert ["TYPE_STRING"] * 2 == [config_datatype(name) for name in STRING_TYPES]


@on_site
async def test_the_server(site: GatewaySite) -> None:
    """Its name, version and extensions, and that it lives."""
    told = await site.get("/v2")
    assert ["extensions", "name", "version"] == sorted(told)
    extensions = {
        "binary_tensor_data",
        "model_configuration",
        "parameters",
        "schedule_policy",
        "statistics",
    }
    assert extensions == set(told["extensions"])
    assert {"live": True} == await site.get("/v2/health/live")


@on_site
async def test_a_model_and_its_version(site: GatewaySite) -> None:
    """Its ports, with -1 for open sizes; the version 1 is the same, another is not there."""
    told = await site.get("/v2/models/pair")
    assert {
        "name": "pair",
        "versions": ["1"],
        "platform": "shapestream",
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "flags", "datatype": "BOOL", "shape": [-1, 2]},
        ],
        "outputs": [
            {"name": "twice", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "not", "datatype": "BOOL", "shape": [-1, 2]},
            {"name": "half", "datatype": "FP16", "shape": [-1, 2]},
        ],
    } == told
    assert told == await site.get("/v2/models/pair/versions/1")
    assert await site.get("/v2/models/pair/config") == await site.get("/v2/models/pair/versions/1/config")
    for path in ("/versions/2", "/versions/2/ready", "/versions/", "/versions", "/versions/01"):
        assert 404 == (await site.ask("GET", f"/v2/models/pair{path}")).status


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "dims"),
    [
        ("batch:1..64, n", "batch, 3", 64, [[-1], [3]]),
        ("batch, n:7", "batch", 2**31 - 1, [[7], []]),
        ("n, batch:1..64", "batch, 3", 0, [[-1, -1], [-1, 3]]),
        ("batch:1..64, n", "n, batch", 0, [[-1, -1], [-1, -1]]),
        ("n, 4", "n, 4", 0, [[-1, 4], [-1, 4]]),
    ],
)
def test_dims_lack_the_batch_where_it_is_axis_0_of_all_ports(
    inputs: str, outputs: str, rows: int, dims: list[list[int]]
) -> None:
    """Elsewhere clients have to state it as any other axis."""
    signature = model(inputs, outputs)
    config = model_config(signature)
    assert rows == max_batch_size(signature) == config["max_batch_size"]
    assert dims == [port["dims"] for port in config["input"] + config["output"]]
    assert "TYPE_FP32" == config["input"][0]["data_type"]


def test_no_size_is_told_of_an_axis_along_which_the_data_decides() -> None:
    """A table for 300 entries of each row, of which a request gets those that are counted."""
    signature = ModelSignature(
        "m",
        (port_of("batch:1..8, n", "input", "x", "f32"),),
        (
            OutputPort("count", "i32", NamedShape.parse("batch"), Rows()),
            OutputPort("boxes", "f32", NamedShape.parse("batch, 300, 4"), PaddedCounts("count")),
        ),
    )
    assert [[-1], [-1, -1, 4]] == [port["shape"] for port in model_metadata(signature)["outputs"]]
    assert [[], [-1, 4]] == [port["dims"] for port in model_config(signature)["output"]]


@on_site
async def test_a_server_that_tells_no_counts(site: GatewaySite) -> None:
    """As to a gateway with the key of an ordinary client. A model that is not there is 404 all the same."""
    for path in ("/v2/models/double/stats", "/v2/models/stats"):
        reply = await site.ask("GET", path)
        assert (403, True) == (reply.status, "role gateways" in reply.content["error"])
    assert 404 == (await site.ask("GET", "/v2/models/nix/stats")).status


def test_readiness_is_what_the_server_says() -> None:
    """Its own, and that of each model, with all reasons."""
    ready = {"models": ["a"], "not_ready": [], "models_not_ready": {}}
    assert why_server_is_not_ready(ready) is None
    assert why_not_ready("a", ready) is None
    assert "'z'" in str(why_not_ready("z", ready))
    told = {"models": ["a", "b"], "not_ready": ["it drains", "no slot"], "models_not_ready": {"b": ["gone"]}}
    assert "it drains; no slot" == why_server_is_not_ready(told)
    assert [None, "gone"] == [why_not_ready(name, told) for name in "ab"]
    index = repository_index(told, ready_only=False)
    assert [("a", "READY", None), ("b", "UNAVAILABLE", "gone")] == [
        (row["name"], row["state"], row.get("reason")) for row in index
    ]
    assert ["a"] == [row["name"] for row in repository_index(told, ready_only=True)]


@on_site
async def test_other_paths_and_methods(site: GatewaySite) -> None:
    """404 for a path, 405 for a method, with those that are allowed."""
    for path in (
        "/",
        "",
        "/v1",
        "/v2/",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models/pair/",
    ):
        assert 404 == (await site.ask("GET", path)).status, path
    for path in (
        "/v2/models/pair/unload",
        "/v2/models/pair/infer/x",
        "/v2/models/pair/versions/1/",
        "/x" * 9000,
    ):
        assert 404 == (await site.ask("POST", path)).status, path
    for name in ("nix", "n" * 600, "\ud800", " "):
        for end in ("", "/ready", "/config", "/stats"):
            assert 404 == (await site.ask("GET", f"/v2/models/{name}{end}")).status
    assert "GET, HEAD" == (await site.ask("POST", "/v2")).headers["Allow"]
    assert "POST" == (await site.ask("GET", "/v2/models/pair/infer")).headers["Allow"]
    assert 200 == (await site.ask("HEAD", "/v2/health/live")).status


@on_site
async def test_the_index_of_the_repository(site: GatewaySite) -> None:
    """Its body may be empty, or ask for ready models alone."""
    for body in (b"", b"{}", b'{"ready":true}', b'{"ready":false,"other":1}'):
        reply = await site.ask("POST", "/v2/repository/index", body)
        assert (200, []) == (reply.status, reply.content)  # a scripted server tells of no models
    for body in (b"[]", b'{"ready":1}', b"{"):
        assert 400 == (await site.ask("POST", "/v2/repository/index", body)).status


@on_site
async def test_a_server_that_is_silent_is_not_ready(site: GatewaySite) -> None:
    """The gateway lives on, and says so at once."""
    await site.get(f"/v2/models/{PAIR.name}")
    await trio.sleep(2 * FRESH_S)
    site.server.go_silent()
    assert {"live": True} == await site.get("/v2/health/live")
    for method, path in (
        ("GET", "/v2/health/ready"),
        ("GET", "/v2/models/pair/ready"),
        ("GET", "/v2/models/any/ready"),
        ("POST", "/v2/repository/index"),
    ):
        reply = await site.ask(method, path)
        assert (503, "1") == (reply.status, reply.headers["Retry-After"])
    assert "pair" == (await site.get("/v2/models/pair"))["name"]
    assert "error" in json.loads((await site.ask("GET", "/v2/models/any")).body)


def test_however_many_ask_the_server_is_asked_once() -> None:
    """Together and one after the other; later it is asked anew, also for a page that was written before."""
    told = _Told({"totals": {}})

    async def ask() -> None:
        counters, steps = ServerCounters(told), LongSteps()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(counters.read, READY_S)
                nursery.start_soon(counters.statistics_page, steps)
        for _ in range(20):
            await counters.read(PAGE_S)
        assert 1 == told.asked
        await trio.sleep(2 * FRESH_S)
        await counters.statistics_page(steps)
        assert 2 == told.asked

    trio.run(ask, clock=MockClock(autojump_threshold=0))


def test_the_page_of_all_models_is_written_in_slices() -> None:
    """With as many models as a server may have; it is what `model_statistics` tells."""
    names = ("results", "failures", "rows", "calls", "last_ms")
    times = ("queue_us", "gather_us", "run_us", "split_us", "total_us")
    totals = {f"m{number}": dict.fromkeys((*names, *times), number) for number in range(1024)}

    async def write() -> HttpResponse:
        counters = ServerCounters(_Told({"totals": totals}))
        page = await counters.statistics_page(LongSteps())
        assert page is await counters.statistics_page(LongSteps())
        return page

    page = trio.run(write, clock=MockClock(autojump_threshold=0))
    assert json.loads(b"".join(page.body)) == model_statistics(None, {"totals": totals})
    assert 1024 // SLICE_MODELS == len([piece for piece in page.body if len(piece) > 10_000])


class _Told:
    """A client whose server tells this of itself."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self.asked = 0

    async def statistics(self, deadline: float) -> dict[str, Any]:
        """The same each time, after a while."""
        self.asked += 1
        await trio.sleep(FRESH_S / 4)
        return self._told


def test_versions_on_the_pages() -> None:
    """Each is a row of index and statistics; a name without versions has the version 1."""
    told = {
        "models": ["m", "m@3", "m@10", "plain"],
        "models_not_ready": {"m@10": ["no slot"]},
        "versions": {"m": {"3": 900_000, "10": 100_000}},
        "totals": {name: dict.fromkeys(COUNTED, 1) for name in ("m@3", "m@10", "plain")},
    }
    rows = [(row["name"], row["version"], row["state"]) for row in repository_index(told, ready_only=False)]
    assert [("m", "3", "READY"), ("m", "10", "UNAVAILABLE"), ("plain", "1", "READY")] == rows
    assert [None, None, "no slot", None, None] == [
        why_not_ready(name, told) for name in ("m", "m@3", "m@10", "plain", "plain@1")
    ]
    assert all("no model" in str(why_not_ready(name, told)) for name in ("m@1", "m@4", "plain@2"))
    for name, expected in {
        "m": [("m", "3"), ("m", "10")],
        "m@10": [("m", "10")],
        "plain": [("plain", "1")],
        "plain@1": [("plain", "1")],
    }.items():
        found = model_statistics(name, told)["model_stats"]
        assert expected == [(row["name"], row["version"]) for row in found]
    assert [["3", "10"], ["3", "10"], ["1"]] == [versions_of(name, told) for name in ("m", "m@3", "plain")]


@pytest.mark.parametrize(("version", "told"), [(None, ("1", None)), ("4", ("4", "4"))])
def test_an_answer_names_its_version(version: str | None, told: tuple[str, str | None]) -> None:
    """In its body, and in a header where the model states one."""
    timings = timings_of(version=version)
    result = Result(None, result_of(1, Tensors(layout=(), buffers=()), timings), {})
    response = at_once(infer_response("m", None, [], result))
    content = json.loads(b"".join(response.body))
    assert told == (content["model_version"], dict(response.headers).get("x-model-version"))
