"""No peer makes a turn of the event loop long: each kind of message at its legal limits, by the work of the longest turn.

Work is counted, since it is the same on every machine: lines of Python that the server's tasks run within a turn, and bytes
that they allocate on top of what they hold when a step begins. Opcodes would say no more than lines, and take twice as
long to count. Of what C code does the bytes tell, as msgpack makes objects; a search that makes nothing is not seen.
The test's own steps do not count.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import msgpack
import numpy as np
import pytest
import structlog
import trio
from tests.entries import Execute, Failure, ResultEntry, SlotHello, WorkerHello, WorkerWelcome
from tests.pipeline.serving.chain_server import CHAIN, chain_served, outputs_of, played, tensors_of
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, done, model_settings, request
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, hello_of
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from tests.pipeline.telemetry.runs import ran
from trio.testing import wait_all_tasks_blocked

from shapestream.slices import Slices, at_once
from shapestream.telemetry.metrics import read_metrics
from shapestream.wire.codec import encode
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS
from shapestream_engine.layout import Buffer
from shapestream_engine.signature import ModelSignature

# Lines of Python in a turn: a quarter to a half more than the longest turn has today, as versions of Python differ by a
# seventh. A line takes 15 to 130 ns, so that the bounds are 5 to 15 ms where the old limit, 20 ms, was measured.
OF_CLIENTS = 150_000
"""Today 118,000: requests of 64 tensors of 32 dimensions."""
OF_QUESTIONS = 350_000
"""Today 262,000: the slowest of 16,384 requests that are queued."""
OF_READINGS = 90_000
"""Today 60,000: the counters of 200 models."""
OF_GREETINGS = 260_000
"""Today 189,000: a worker of 256 models."""
OF_WORKERS = 380_000
"""Today 282,000: a report of 1,024 outputs and calls."""
OF_ARRAYS = 600_000
"""Today 450,000: a worker's arrays up to the limit, whose lines are the quickest, 14 ns each."""
OF_REPORTS = 330_000
"""Today 227,000: of 1,024 requests."""
MOST_BYTES = 12_000_000
"""Allocated in a turn. An unknown entry of 1 MB takes most today, 8.4 MB: msgpack makes the objects of a piece at once."""
MANY = 16_384
LAYOUT = msgpack.packb([[0, "f32", [1, 4]], [1, "f32", [1]]])
SMALL = [bytes(16), bytes(4)]
Messages = list[list[Buffer]]


class Turns(trio.abc.Instrument):
    """The most work of one turn so far: of the tasks of others than the one that made this."""

    def __init__(self) -> None:
        self.most_lines = self.most_bytes = 0
        self._own = trio.lowlevel.current_task()
        self._counts = False
        self._lines = self._bytes = self._held = 0
        # A closure counts a line twice as fast as a method.
        lines = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal lines
            lines += 1

        def take() -> int:
            nonlocal lines
            taken, lines = lines, 0
            return taken

        self._count, self._take = count, take

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Let the lines of this frame be counted, unless it is of the test's own task (for `sys.settrace`)."""
        return self._count if self._counts else None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Begin to count."""
        tracemalloc.reset_peak()
        self._held, _ = tracemalloc.get_traced_memory()
        self._take()
        self._counts = task is not self._own

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step."""
        if self._counts:
            self._counts = False
            self._lines += self._take()
            self._bytes += tracemalloc.get_traced_memory()[1] - self._held

    def before_io_wait(self, timeout: float) -> None:
        """End a turn."""
        self.most_lines, self._lines = max(self.most_lines, self._lines), 0
        self.most_bytes, self._bytes = max(self.most_bytes, self._bytes), 0


@asynccontextmanager
async def watched(most_lines: int) -> AsyncIterator[trio.Nursery]:
    """The turns of the block, and the assertion that none was longer. What the nursery runs counts as the server's."""
    gc.collect()
    gc.disable()
    turns, outer = Turns(), sys.gettrace()
    tracemalloc.start()
    trio.lowlevel.add_instrument(turns)
    sys.settrace(turns.trace)
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
        await wait_all_tasks_blocked()
    finally:
        sys.settrace(outer)
        trio.lowlevel.remove_instrument(turns)
        tracemalloc.stop()
        gc.enable()
    assert turns.most_lines <= most_lines
    assert turns.most_bytes <= MOST_BYTES


async def read(work: Slices[Any]) -> None:
    """Read an answer in slices, as the admin port has it read: a slice per turn."""
    for _ in work:
        await trio.lowlevel.checkpoint()


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """What a log costs is limited elsewhere."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(wrapper_class=before)


def full(
    row: Callable[[int], list[Any]], frames: int = 0, most: int = CLIENT_LIMITS.max_entries
) -> list[Buffer]:
    """A message of as many of these entries as the limits allow, and at most so many."""
    rows: list[list[Any]] = []
    room = CLIENT_LIMITS.max_header_bytes - 16
    while len(rows) < most:
        rows.append(row(len(rows)))
        room -= len(msgpack.packb(rows[-1]))
        if room < 0:
            rows.pop()
            break
    return [msgpack.packb([1, rows]), *[bytes(1025)] * frames]


def ask(sequence: int, layout: bytes = LAYOUT, inline: list[Any] | None = None, **fields: Any) -> list[Any]:
    """A request as it travels."""
    inline = SMALL if inline is None else inline
    tags = [fields["tags"]] if "tags" in fields else []
    return [12, fields.get("frames", 0), sequence, fields.get("model", 0), None, 0, layout, inline, *tags]


def wide(number: int) -> bytes:
    """The layout of 64 tensors of 32 dimensions, none of which was seen before."""
    return msgpack.packb([[port, "f32", [0, *[1] * 30, 300 + number]] for port in range(64)])


FLAGS = msgpack.packb([[port, "boolean", [1024]] for port in range(64)])
FRAMED_FLAGS = msgpack.packb([[port, "boolean", [1025]] for port in range(4)])
FLOODS: dict[str, Messages] = {
    "requests of 64 tensors of 32 dimensions": [full(lambda n: ask(n, wide(n), [b""] * 64), most=64)],
    "requests that are served": [full(lambda n, part=part: ask(256 * part + n)) for part in range(4)],
    "requests of other sizes each": [
        full(
            lambda n: ask(
                n, msgpack.packb([[0, "f32", [1, n + 1]], [1, "f32", [1]]]), [bytes(4 * n + 4), bytes(4)]
            )
        )
    ],
    "requests with tags": [full(lambda n: ask(n, tags={f"{n}-{tag}": "x" * 100 for tag in range(8)}))],
    "requests with one number": [full(lambda n: ask(0))] * 4,
    "requests for no model": [full(lambda n: ask(n, model=99))] * 4,
    "requests of 64 truth tensors": [full(lambda n: ask(n, FLAGS, [bytes(1024)] * 64))] * 4,
    "requests of 4 frames": [full(lambda n: ask(n, FRAMED_FLAGS, [None] * 4, frames=4), 1024)] * 4,
    "greetings": [full(lambda n: [10, 0, os.urandom(16), "x" * 512])] * 4,
    "models by name": [full(lambda n: [11, 0, f"{n}" + "x" * 500])] * 4,
    "cancels": [full(lambda n, part=part: [13, 0, 256 * part + n]) for part in range(4)],
    "statistics": [full(lambda n: [14, 0])] * 4,
    "questions about no request": [full(lambda n: [15, 0, n, "x" * 512, 0])] * 4,
    "credits": [full(lambda n: [26, 0, 2**63 - 1, 2**63 - 1])] * 4,
    "clocks": [full(lambda n: [2, 0, n])] * 4,
    "audits acknowledged": [full(lambda n: [17, 0, "x" * 512])] * 4,
    "unknown kinds": [full(lambda n: [99, 0, [n] * 1000])] * 4,
    "unknown kinds with maps": [full(lambda n: [99, 0, {f"{key}": n for key in range(64)}])] * 4,
    "a long unknown entry": [[msgpack.packb([1, [[99, 0, *[[[]] * 1000] * 127]]])]],
    "an endless unknown entry": [[msgpack.packb([1, [[99, 0, *[[[]] * 1000] * 1000]]])]],
}


@pytest.mark.parametrize("kind", list(FLOODS))
@virtual_time
async def test_no_message_of_a_client_makes_a_turn_long(kind: str) -> None:
    """Full messages of one kind, from a client that has 1,024 requests in the queue."""
    async with memory_serving(ScriptedSlots()) as running:
        peer = await running.greeted()
        if kind == "cancels":
            for message in FLOODS["requests that are served"]:
                peer.connection.send_nowait(message)
        peer.say(request(2**40))  # imports what the first request imports
        await wait_all_tasks_blocked()
        async with watched(OF_CLIENTS):
            for message in FLOODS[kind]:
                peer.connection.send_nowait(message)


async def many_alike(running: Running, slots: ScriptedSlots, *, served: bool) -> RawPeer:
    """A client that has sent 16,384 requests with one id."""
    peer = await running.greeted()
    for part in range(MANY // 256):
        rows = full(lambda n, part=part: ask(256 * part + n, tags={"request_id": "same"}))
        peer.connection.send_nowait(rows)
    await wait_all_tasks_blocked()
    left = MANY if served else 0
    while left:
        batch = await slots.next_batch()
        left -= len(batch.members)
        slots.finish(batch)
        await wait_all_tasks_blocked()
    peer.take_arrived()
    return peer


async def _none(running: Running, slots: ScriptedSlots) -> RawPeer:
    return await running.greeted()


async def _queued(running: Running, slots: ScriptedSlots) -> RawPeer:
    return await many_alike(running, slots, served=False)


async def _served(running: Running, slots: ScriptedSlots) -> RawPeer:
    return await many_alike(running, slots, served=True)


Beginning = Callable[[Running, ScriptedSlots], Awaitable[RawPeer]]


@pytest.mark.parametrize("beginning", [_none, _queued, _served])
@pytest.mark.parametrize("question", ["same", "", f"{'0' * 32}-1"], ids=["an id", "the slowest", "nothing"])
@virtual_time
async def test_no_question_about_requests_makes_a_turn_long(beginning: Beginning, question: str) -> None:
    """Of 16,384 with one id, queued or answered; 256 questions at once, and the admin port's way."""
    slots = ScriptedSlots()
    async with memory_serving(slots, window_requests=MANY, max_queued_requests=MANY) as running:
        peer = await beginning(running, slots)
        async with watched(OF_QUESTIONS):
            peer.connection.send_nowait(full(lambda n: [15, 0, n, question, 2**63 - 1], most=4))
        async with watched(OF_QUESTIONS) as nursery:
            nursery.start_soon(read, running.server.readings.explain(question, 9999))


@virtual_time
async def test_no_answer_about_many_busy_models_makes_a_turn_long() -> None:
    """Statistics, metrics and the page of 200 models whose histograms are full, and the snapshots of the last minute."""
    plain = SIGNATURE.to_dict()
    names = [f"m{number}" for number in range(200)]
    async with memory_serving() as running:
        worker = running.worker()
        await worker.greet_as_worker(
            hello_of(worker="w", models={name: plain | {"name": name} for name in names})
        )
        peer = await running.greeted(model=None)
        for number, name in enumerate(names):
            counters = running.server.readings.counters.models[name]
            for histogram in vars(counters).values():
                for exponent in range(2 * number % 40, 40) if hasattr(histogram, "record") else ():
                    histogram.record(3 << exponent)
        for name in names * 200:  # not counted yet, where nobody has read the counters
            running.server.readings.counters.count_batch(ran(name, (1, 1)))
        async with watched(OF_READINGS):
            assert 200 == len((await peer.statistics())["models"])
        server = running.server
        for work in (
            server.readings.statistics(),
            server.readings.live(0),
            read_metrics(server.readings.snapshot()),
        ):
            async with watched(OF_READINGS) as nursery:
                nursery.start_soon(read, work)
        async with watched(OF_READINGS):
            await trio.sleep(20.0)
        assert 200 == len(at_once(server.readings.statistics())["models"])


def offering(models: int, slots: int = 1) -> WorkerHello:
    """The greeting of a worker with so many models."""
    plain = replace(SIGNATURE, name="m").to_dict()
    named = {f"m{number}": plain | {"name": f"m{number}"} for number in range(models)}
    points = [[[rows, size], 0.001, 0.1] for rows in range(1, 9) for size in range(1, 9)]
    costs = {name: {"key": "k", "dimensions": ["batch", "n"], "points": points} for name in named}
    return hello_of(worker="w", slots=slots, models=named, costs=costs if models <= 64 else {})


@pytest.mark.parametrize(("models", "slots"), [(1, 256), (8, 256), (32, 16), (64, 1), (256, 8), (1024, 1)])
@virtual_time
async def test_no_greeting_of_a_worker_makes_a_turn_long(models: int, slots: int) -> None:
    """With as many models and slots as a worker may have; one with more is refused before its models are read."""
    async with memory_serving() as running:
        (await running.joined("first")).say()
        worker = running.worker()
        frames = encode([offering(models, slots)], limits=WORKER_LIMITS)
        async with watched(OF_GREETINGS):
            worker.connection.send_nowait(frames)
        with suppress(trio.TooSlowError), trio.fail_after(1.0):
            welcome = await worker.hear(WorkerWelcome)
            async with watched(OF_GREETINGS):
                for slot in range(slots):
                    greeting = encode([SlotHello(token=welcome.token, slot=slot)], limits=WORKER_LIMITS)
                    running.workers.connect().send_nowait(greeting)
        assert 1 + (slots if models <= 256 else 0) == running.server.statistics()["slots_in_all"]


def wide_offer() -> WorkerHello:
    """The greeting of a worker with 16 models of 64 inputs of 32 dimensions."""
    shape = ", ".join(["batch:1..8", *[f"d{axis}:1..{axis + 2}" for axis in range(31)]])
    inputs = [{"name": f"x{port}", "element_type": "f32", "shape": shape} for port in range(64)]
    plain = SIGNATURE.to_dict() | {
        "inputs": inputs,
        "outputs": [{"name": "y", "element_type": "f32", "shape": "batch"}],
    }
    return hello_of(worker="w", models={f"m{n}": plain | {"name": f"m{n}"} for n in range(16)})


def large_offer(**fields: Any) -> WorkerHello:
    """A greeting with other fields than a worker sends."""
    return replace(hello_of(worker="w"), **fields)


POINTS = [[[n, 1], 1.0, 1.0] for n in range(4096)]


def report(outputs: list[Any], calls: list[Any]) -> list[Buffer]:
    """A report of a batch that the slot was never sent, as it travels."""
    return [msgpack.packb([1, [[41, 0, 1, 1, 1, 1, 0, 0, calls, outputs, 0]]])]


FROM_WORKERS: dict[str, list[Buffer]] = {
    "16 models of 64 inputs of 32 dimensions": encode([wide_offer()], limits=WORKER_LIMITS),
    "a model of 8 MB of arrays": encode(
        [large_offer(models={"m": {"inputs": [[[]] * 4096] * 2000}})], limits=WORKER_LIMITS
    ),
    "a model of 2 MB of maps": encode(
        [large_offer(models={"m": {"inputs": [[{}] * 4096] * 512}})], limits=WORKER_LIMITS
    ),
    "arrays up to the limit": encode(
        [large_offer(models={"m": {"inputs": [[[]] * 4000] * 8}})], limits=WORKER_LIMITS
    ),
    "maps up to the limit": encode(
        [large_offer(models={"m": {"inputs": [[{}] * 3000] * 4}})], limits=WORKER_LIMITS
    ),
    "costs up to the limit": encode(
        [
            large_offer(
                costs={
                    "echo": {
                        "key": "k",
                        "dimensions": ["batch", "n"],
                        "points": [[[n, 1], 1.0, 1.0] for n in range(4096)],
                    }
                }
            )
        ],
        limits=WORKER_LIMITS,
    ),
    "costs beyond the limit": encode(
        [large_offer(costs={"echo": {"key": "k", "dimensions": ["batch", "n"], "points": POINTS}})],
        limits=WORKER_LIMITS,
    ),
    "16,384 outputs": report([None] * 16_384, []),
    "1,024 outputs and calls": report([[LAYOUT, SMALL]] * 1024, [[1, [1] * 32]] * 1024),
    "8 MB of nothing": [msgpack.packb([1, [[99, 0, [[0] * 4096] * 2000]]])],
}


@pytest.mark.parametrize("kind", list(FROM_WORKERS))
@virtual_time
async def test_no_message_of_a_worker_makes_a_turn_long(kind: str) -> None:
    """On the connection of a slot, and on one that has not greeted."""
    most_lines = OF_ARRAYS if kind == "arrays up to the limit" else OF_WORKERS
    async with memory_serving() as running:
        joined = await running.joined("first")
        for connection in (joined.slots[0], running.workers.connect()):
            async with watched(most_lines):
                connection.send_nowait(FROM_WORKERS[kind])


@virtual_time
async def test_no_report_makes_a_turn_long() -> None:
    """Of a batch with as many requests as one may have; each of them is answered."""
    most = WORKER_LIMITS.max_members
    inputs = [
        port | {"shape": port["shape"].replace("1..64", "1..99999")} for port in SIGNATURE.to_dict()["inputs"]
    ]
    signature = ModelSignature.from_dict(SIGNATURE.to_dict() | {"inputs": inputs})
    limits = {"window_requests": MANY, "max_queued_requests": MANY}
    async with memory_serving(models={"echo": model_settings(max_batch=99_999)}, **limits) as running:
        worker = running.worker()
        await worker.join_as_worker("w", signature=signature)
        peer = await running.greeted()
        peer.say(request(MANY))
        first = await worker.hear(Execute)
        for part in range(2 * most // 256):
            peer.connection.send_nowait(full(lambda n, part=part: ask(256 * part + n)))
        await wait_all_tasks_blocked()
        async with watched(OF_REPORTS):
            worker.say(done(first))
        batch = await worker.hear(Execute)
        assert most == len(batch.members)
        async with watched(OF_REPORTS):
            worker.say(done(batch))
        assert 1 + most == len(await peer.ends(1 + most))


OF_LISTS = 20_000
"""Today 1,900: the number stands in the shape of what holds the arrays' shapes."""


@virtual_time
async def test_no_list_makes_a_turn_long() -> None:
    """More arrays than the next stage of a chain may have requests."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3)
        batch = await slots.next_batch()
        arrays = tensors_of(np.zeros(0, np.float32), np.zeros((262_144, 1), np.int64))
        async with watched(OF_LISTS):
            slots.finish(batch, [arrays])
        assert "too_large" == (await client.peer.hear(Failure)).code


OF_STAGES = 290_000
"""Today 217,000: a stage that begins with 2,048 requests, of which it submits 64 in a turn."""


@virtual_time
async def test_no_stage_makes_a_turn_long() -> None:
    """Its requests are made in slices, and all of them run."""
    stages = [CHAIN.stages[0], replace(CHAIN.stages[1], at_most=2048)]
    async with chain_served(replace(CHAIN, stages=stages), max_queued_requests=10_000) as (_, client, slots):
        client.ask(1, 3)
        batch = await slots.next_batch()
        rows = tensors_of(np.arange(2048, dtype=np.float32), np.ones((2048, 1), np.int64))
        async with watched(OF_STAGES):
            slots.finish(batch, [rows])
        async with played(slots):
            assert [[*map(float, range(2048))]] == outputs_of(await client.peer.hear(ResultEntry))
