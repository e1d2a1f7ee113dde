"""The routes before the product's server, in one event loop and on a clock that jumps; scripted slots run the batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from tests.pipeline.gateway.gateway_site import Reply, asked
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import model_settings
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

import shapestream
from shapestream.gateway.model_pages import FRESH_S
from shapestream.gateway.routes import PAGE_S, READY_S, Routes
from shapestream.web.tokens import Tokens
from shapestream_engine.batch import BatchInputs

TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
ONE_BY_ONE = {"echo": model_settings(max_batch=1)}
INFER = "/v2/models/echo/infer"
UNAVAILABLE_AFTER_S = 5.0
CALLERS = "web one\nnight two\n"


def echo_body(value: float = 1.0, **more: Any) -> bytes:
    """A request for the model `echo`, whose rows begin with this number."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, 0]}
    scale = {"name": "scale", "datatype": "FP32", "shape": [1], "data": [1]}
    return json.dumps({"inputs": [x, scale], **more}).encode()


def first_number(batch: BatchInputs) -> float:
    """The number with which the rows of a batch's first request begin."""
    return float(np.frombuffer(batch.members[0].buffers[0], np.float32)[0])


class Place:
    """A gateway's routes, the server behind them, and its slots."""

    def __init__(
        self,
        running: Running,
        slots: ScriptedSlots,
        client: shapestream.Client,
        nursery: trio.Nursery,
        **options: Any,
    ) -> None:
        self.running = running
        self.slots = slots
        self.client = client
        self.routes = Routes(client, **options)
        self._nursery = nursery

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The answer to a request, errors included."""
        return await asked(self.routes, method, path, body, headers)

    def infer_soon(self, body: bytes, headers: Mapping[str, str] | None = None) -> list[Reply]:
        """Begins a request; its answer appears in the list."""
        answers: list[Reply] = []

        async def infer() -> None:
            answers.append(await self.ask("POST", INFER, body, headers))

        self._nursery.start_soon(infer)
        return answers

    async def run_next(self) -> float:
        """Runs the next batch, and returns the number with which it begins."""
        batch = await self.slots.next_batch()
        self.slots.finish(batch)
        await wait_all_tasks_blocked()
        return first_number(batch)

    async def status_of(self, path: str, method: str = "GET") -> int:
        """What a page answers."""
        return (await self.ask(method, path)).status


@asynccontextmanager
async def place(
    *, local: bool = True, gateway: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[Place]:
    """A server with one scripted slot, or without any, and a gateway's routes before it."""
    slots = ScriptedSlots()
    async with (
        memory_serving(slots if local else None, **options) as running,
        shapestream.connect(running.clients.connect, unavailable_after=UNAVAILABLE_AFTER_S) as client,
        trio.open_nursery() as nursery,
    ):
        yield Place(running, slots, client, nursery, **(gateway or {}))
        nursery.cancel_scope.cancel()


@virtual_time
async def test_pages_follow_the_server_from_its_first_worker_to_its_drain() -> None:
    """Without a worker no model is ready, and its pages say so within bounds; a drain ends readiness, not life."""
    models = {"echo": model_settings(), "later": model_settings()}
    async with place(local=False, models=models) as site:
        assert 200 == await site.status_of("/v2/health/live")
        for path, seconds in (("", PAGE_S), ("/config", PAGE_S), ("/stats", PAGE_S), ("/ready", READY_S)):
            began = trio.current_time()
            reply = await site.ask("GET", f"/v2/models/echo{path}")
            assert (503, "1") == (reply.status, reply.headers["Retry-After"])
            assert "echo" in reply.content["error"]
            assert pytest.approx(began + seconds) == trio.current_time()
        reply = await site.ask("GET", "/v2/health/ready")
        assert 503 == reply.status
        assert "'echo'" in reply.content["error"]
        assert ["UNAVAILABLE"] * 2 == [
            row["state"] for row in (await site.ask("POST", "/v2/repository/index")).content
        ]

        await site.running.joined()
        await trio.sleep(2 * FRESH_S)  # what the server said before serves all callers for so long
        for path in ("", "/config", "/stats", "/ready", "/versions/1/ready"):
            assert 200 == await site.status_of(f"/v2/models/echo{path}"), path
        assert 503 == await site.status_of("/v2/models/later/ready")
        index = (await site.ask("POST", "/v2/repository/index")).content
        assert {"echo": "READY", "later": "UNAVAILABLE"} == {row["name"]: row["state"] for row in index}
        index = (await site.ask("POST", "/v2/repository/index", b'{"ready": true}')).content
        assert ["echo"] == [row["name"] for row in index]

        site.running.server.model_given_up("later", "its workers die")
        await trio.sleep(2 * FRESH_S)
        for path in ("", "/ready"):
            reply = await site.ask("GET", f"/v2/models/later{path}")
            assert (503, True) == (reply.status, "its workers die" in reply.content["error"])
        site.running.server.drain()
        await wait_all_tasks_blocked()
        assert 200 == await site.status_of("/v2/health/live")


@virtual_time
async def test_a_request_waits_for_the_first_worker_of_its_model_as_long_as_it_says() -> None:
    """Its deadline counts from its arrival; without one it waits until a worker comes, or its caller leaves."""
    async with place(local=False, models={"echo": model_settings()}) as site:
        began = trio.current_time()
        reply = await site.ask("POST", INFER, echo_body(parameters={"timeout": 3_000_000}))
        assert 504 == reply.status
        assert pytest.approx(began + 3) == trio.current_time()
        answers = site.infer_soon(echo_body())
        await trio.sleep(20)
        assert [] == answers
        worker = await site.running.joined()
        await worker.run_next()
        await wait_all_tasks_blocked()
        assert [200] == [reply.status for reply in answers]


@virtual_time
async def test_the_deadline_covers_the_queue_and_the_call() -> None:
    """One request runs too long, another is queued behind it; the gateway answers both in time."""
    async with place(models=ONE_BY_ONE) as site:
        began = trio.current_time()
        running = site.infer_soon(echo_body(1, parameters={"timeout": 2_000_000}))
        await site.slots.next_batch()
        queued = site.infer_soon(echo_body(2, parameters={"timeout": 1_000_000}))
        await trio.sleep(1.5)
        assert [504] == [reply.status for reply in queued]
        await trio.sleep(1)
        assert [504] == [reply.status for reply in running]
        assert "Retry-After" not in running[0].headers
        reply = await site.ask("POST", INFER, echo_body(parameters={"timeout": 1}))
        assert 504 == reply.status
        assert trio.current_time() < began + 3


@virtual_time
async def test_a_lower_level_of_priority_goes_first() -> None:
    """Triton's 1 is the highest; 0, and none, stand for the default level, here 3."""
    levels = {1.0: 5, 2.0: 0, 3.0: None, 4.0: 3, 5.0: 1, 6.0: 2}
    async with place(models=ONE_BY_ONE, prefetch=False, gateway={"default_priority_level": 3}) as site:
        site.infer_soon(echo_body(0))
        first = await site.slots.next_batch()
        for value, level in levels.items():
            site.infer_soon(
                echo_body(value, **({} if level is None else {"parameters": {"priority": level}}))
            )
            await wait_all_tasks_blocked()
        site.slots.finish(first)
        assert [5.0, 6.0, 2.0, 3.0, 4.0, 1.0] == [await site.run_next() for _ in levels]


@virtual_time
async def test_ids_traces_and_callers_reach_the_stories() -> None:
    """The header's id goes before the body's; the caller is the token's name, and else the peer's address.

    The trace is told by the lines of the log, and by spans where they are collected.
    """
    async with place(gateway={"tokens": Tokens(CALLERS)}) as site:
        headers = {"authorization": "Bearer two", "traceparent": TRACE}
        for own_id in ({"x-request-id": "of-header"}, {}):
            with capture_logs() as lines:
                answers = site.infer_soon(echo_body(id="of-body"), {**headers, **own_id})
                await site.run_next()
            assert [200] == [reply.status for reply in answers]
            (arrived,) = [line for line in lines if "request arrived" == line["event"]]
            assert "1" * 32 == arrived["trace"]
        for request_id in ("of-body", "of-header"):
            (story,) = await site.client.stories(request_id)
            assert ("night", request_id) == (story["caller"], story["request_id"])
        told = await site.client.stories("1" * 32)
        assert ["of-header", "of-body"] == [story["request_id"] for story in told]
    async with place() as site:
        site.infer_soon(echo_body(id="mine"), {"authorization": "Bearer two", "traceparent": "nonsense"})
        await site.run_next()
        (story,) = await site.client.stories("mine")
        assert "127.0.0.1" == story["caller"]


@virtual_time
async def test_tokens_guard_all_pages_but_those_of_probes() -> None:
    """A page that is not there, and a method that is not allowed, are told without one."""
    async with place(gateway={"tokens": Tokens(CALLERS)}) as site:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert 200 == await site.status_of(path)
        for path in ("/v2", "/v2/models/echo", "/v2/models/nix", "/v2/models/echo/ready", "/openapi.json"):
            reply = await site.ask("GET", path)
            assert (401, "Bearer") == (reply.status, reply.headers["WWW-Authenticate"])
            assert "error" in reply.content
        reply = await site.ask("POST", INFER, echo_body(), {"authorization": "Bearer three"})
        assert 401 == reply.status
        assert [] == site.slots.started
        assert 200 == (await site.ask("GET", "/v2", headers={"authorization": "Bearer one"})).status


@virtual_time
async def test_a_server_with_a_full_queue_says_when_to_come_again() -> None:
    """Nothing of the queue suffers."""
    async with place(models=ONE_BY_ONE, max_queued_requests=2, prefetch=False) as site:
        answers = []
        for value in (1, 2, 3):
            answers.append(site.infer_soon(echo_body(value)))
            await wait_all_tasks_blocked()
        reply = await site.ask("POST", INFER, echo_body(4))
        assert 503 == reply.status
        assert 1 <= int(reply.headers["Retry-After"])
        for _ in answers:
            await site.run_next()
        assert [[200]] * 3 == [[reply.status for reply in answer] for answer in answers]
        (told,) = (await site.ask("GET", "/v2/models/echo/stats")).content["model_stats"]
        assert [3, 1] == [told["inference_stats"][key]["count"] for key in ("success", "fail")]


@virtual_time
async def test_a_draining_server_answers_what_it_has_and_refuses_what_is_new() -> None:
    """503 with Retry-After, of requests and of readiness; afterwards there is no server, which is 503 as well."""
    async with place(models=ONE_BY_ONE) as site:
        answers = site.infer_soon(echo_body())
        batch = await site.slots.next_batch()
        site.running.server.drain()
        await wait_all_tasks_blocked()
        for path in ("/v2/health/ready", "/v2/models/echo/ready"):
            reply = await site.ask("GET", path)
            assert (503, "1") == (reply.status, reply.headers["Retry-After"]), path
            assert "the server leaves" in reply.content["error"]
        # A server may come in its place meanwhile.
        began = trio.current_time()
        reply = await site.ask("POST", INFER, echo_body())
        assert (503, "1") == (reply.status, reply.headers["Retry-After"])
        assert trio.current_time() <= began + UNAVAILABLE_AFTER_S
        site.slots.finish(batch)
        await wait_all_tasks_blocked()
        assert [200] == [reply.status for reply in answers]
        await trio.sleep(1)
        reply = await site.ask("POST", INFER, echo_body())
        assert (503, "1") == (reply.status, reply.headers["Retry-After"])
        assert 503 == await site.status_of("/v2/health/ready")
        assert 200 == await site.status_of("/v2/health/live")


@virtual_time
async def test_a_gateway_that_leaves_is_not_ready_and_serves_all_the_same() -> None:
    """Its balancers are told so although its server is ready."""
    async with place() as site:
        assert 200 == await site.status_of("/v2/models/echo/ready")
        site.routes.leaves = True
        for path in ("/v2/health/ready", "/v2/models/echo/ready"):
            reply = await site.ask("GET", path)
            assert (503, "this gateway leaves") == (reply.status, reply.content["error"]), path
        assert 200 == await site.status_of("/v2/health/live")
        answers = site.infer_soon(echo_body(7))
        assert 7.0 == await site.run_next()
        assert [200] == [reply.status for reply in answers]


@virtual_time
async def test_a_failed_call_is_500_with_the_words_of_the_engine() -> None:
    """The next request is served."""
    async with place() as site:
        answers = site.infer_soon(echo_body())
        site.slots.fail(await site.slots.next_batch(), message="no such luck")
        await wait_all_tasks_blocked()
        (reply,) = answers
        assert (500, True) == (reply.status, "no such luck" in reply.content["error"])
        assert "Retry-After" not in reply.headers
        answers = site.infer_soon(echo_body(7))
        assert 7.0 == await site.run_next()
        assert [7.0, 0.0] == answers[0].content["outputs"][0]["data"]


@virtual_time
async def test_a_caller_that_leaves_withdraws_its_request_from_the_queue() -> None:
    """It never runs."""
    async with place(models=ONE_BY_ONE, prefetch=False) as site:
        site.infer_soon(echo_body(1))
        first = await site.slots.next_batch()
        with trio.move_on_after(1):
            await site.ask("POST", INFER, echo_body(2))
        site.infer_soon(echo_body(3))
        await wait_all_tasks_blocked()
        site.slots.finish(first)
        assert 3.0 == await site.run_next()
        assert [] == site.slots.started


@virtual_time
async def test_a_flood_of_one_caller_leaves_its_gateway_to_the_others() -> None:
    """Half of the credit is its own; the rest of the flood is told to come again."""
    async with place(
        gateway={"tokens": Tokens(CALLERS)}, models=ONE_BY_ONE, prefetch=False, window_requests=8
    ) as site:
        one, two = ({"authorization": f"Bearer {token}"} for token in ("one", "two"))
        flood = [site.infer_soon(echo_body(1), one) for _ in range(40)]
        await wait_all_tasks_blocked()
        assert [429] * 36 == [reply.status for answers in flood for reply in answers]
        other = site.infer_soon(echo_body(2), two)
        await wait_all_tasks_blocked()
        assert [] == other, "it is queued"
        for _ in range(5):
            await site.run_next()
        assert [200] == [reply.status for reply in other]
        assert {429: 36, 200: 4} == Counter(reply.status for answers in flood for reply in answers)


@virtual_time
async def test_statistics_count_the_requests_of_all_clients() -> None:
    """Of this gateway and of a client without one; a call of two requests counts once, and its time for both."""
    async with place() as site:
        empty = (await site.ask("GET", "/v2/models/stats")).content["model_stats"]
        assert [("echo", 0, 0)] == [
            (row["name"], row["inference_count"], row["last_inference"]) for row in empty
        ]
        answers = [site.infer_soon(echo_body(1))]
        first = await site.slots.next_batch()
        answers += [site.infer_soon(echo_body(value)) for value in (2, 3)]
        await wait_all_tasks_blocked()
        site.slots.finish(first)
        batch = await site.slots.next_batch()
        await trio.sleep(0.5)
        site.slots.finish(batch)
        await wait_all_tasks_blocked()
        site.infer_soon(echo_body(4))
        site.slots.fail(await site.slots.next_batch())
        await wait_all_tasks_blocked()
        (told,) = (await site.ask("GET", "/v2/models/echo/stats")).content["model_stats"]
        assert [[200]] * 3 == [[reply.status for reply in answer] for answer in answers]
        assert (3, 2) == (told["inference_count"], told["execution_count"])
        counts = {name: part["count"] for name, part in told["inference_stats"].items()}
        assert (3, 1, 3, 3) == tuple(counts[name] for name in ("success", "fail", "queue", "compute_infer"))
        assert 10**9 <= told["inference_stats"]["success"]["ns"]
        assert told.keys() == empty[0].keys()
        assert 0 < told["last_inference"]
