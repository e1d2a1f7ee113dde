"""The trio core over memory endpoints, under a clock that jumps: calls, streams, the inbox and the end of a client."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from tests.held import held
from tests.pipeline.client.bench import Caller
from tests.pipeline.client.virtual_time import ROW, serving, until

import shapestream
from shapestream.client.core import Posted, SubmissionQueue, Withdraw
from shapestream.client.tickets import AnyTicket, OpenTicket, RequestTicket
from shapestream.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest
from shapestream.testing import ScriptedModel, identity_signature
from shapestream.wire import tensor_entries
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


async def test_a_deadline_passes_on_time_while_the_server_is_silent() -> None:
    """The core wakes for it by itself; nothing needs to arrive."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        server.go_silent()
        start = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await client.infer("identity", ROW, deadline=3)
        assert 3 == pytest.approx(trio.current_time() - start)


async def test_what_is_ready_together_travels_together() -> None:
    """Sixty-four calls in one turn are one message there."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        before = server.messages
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(client.infer, "identity", ROW)
        assert 64 == len(server.requests)
        assert 1 == server.messages - before


async def test_calls_that_came_one_by_one_leave_at_once() -> None:
    """Of calls in one turn the first leaves alone then, and the others travel together, as all do in the next turn."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        for _ in range(2):
            await client.infer("identity", ROW)
        before = server.messages
        for messages in (2, 1):
            async with trio.open_nursery() as nursery:
                for _ in range(64):
                    nursery.start_soon(client.infer, "identity", ROW)
            assert messages == server.messages - before
            before = server.messages


async def test_a_cancelled_call_is_cancelled_at_the_server() -> None:
    """Whether it waits for its result or for its model, nothing of it is left behind."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        server.hold()
        with trio.move_on_after(1) as scope:
            await client.infer("identity", ROW)
        assert scope.cancelled_caught
        await until(lambda: server.cancelled == [1])
        server.go_silent()
        with trio.move_on_after(1) as scope:
            await client.infer("other", ROW)
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert [] == [thing for thing in held(client) if isinstance(thing, OpenTicket | RequestTicket)]


async def test_the_result_of_a_call_that_is_cancelled_in_the_same_turn_is_not_lost_on_another() -> None:
    """Cancellation and answer race in every order; the other calls get their own answers."""
    async with serving() as (_, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        answers: dict[int, float] = {}

        async def call(number: int, give_up_after: float) -> None:
            with trio.move_on_after(give_up_after):
                result = await client.infer("identity", {"x": np.full((1, 16), number, np.float32)})
                answers[number] = float(result["y"][0, 0])

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(call, number, 0 if number % 3 == 0 else 10)
        assert all(number == answer for number, answer in answers.items())
        assert {number for number in range(100) if number % 3} <= answers.keys()


async def test_a_call_that_is_cancelled_at_its_deadline_ends_once() -> None:
    """In one turn of the event loop, in either order."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        server.hold()
        for _ in range(20):  # trio takes its tasks in any order
            with trio.move_on_after(1), contextlib.suppress(DeadlineExceeded):
                await client.infer("identity", ROW, deadline=1)


async def test_leaving_while_calls_run_ends_them() -> None:
    """Tasks outside the block that wait for a result get `Cancelled`; the server hears goodbye."""
    errors: list[Exception] = []

    async def call(client: shapestream.Client) -> None:
        try:
            await client.infer("identity", ROW)
        except Cancelled as error:
            errors.append(error)

    async with serving() as (server, endpoint), trio.open_nursery() as nursery:
        server.hold()
        async with shapestream.connect(endpoint.connect) as client:
            for _ in range(3):
                nursery.start_soon(call, client)
            await until(lambda: len(server.held) == 3)
        await until(lambda: server.goodbyes == 1)
    assert 3 == len(errors)


async def test_a_group_that_the_block_raises_stays_one_group() -> None:
    """Only the client's own nursery is taken away from around an exception."""
    async with serving() as (_, endpoint):
        with pytest.raises(ExceptionGroup) as caught:
            async with shapestream.connect(endpoint.connect):
                raise ExceptionGroup("mine", [LookupError(), ValueError()])
        assert "mine" == caught.value.message


async def test_ctrl_c_ends_the_block_and_the_server_is_told() -> None:
    """A real SIGINT while a call waits: KeyboardInterrupt comes out, not in a group, after a goodbye."""
    async with serving() as (server, endpoint):
        server.hold()

        async def press() -> None:
            await until(lambda: server.held)
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the block is the point
            async with shapestream.connect(endpoint.connect) as client:
                trio.lowlevel.spawn_system_task(press)
                await client.infer("identity", ROW)
        await until(lambda: server.goodbyes == 1)
        assert [1] == server.cancelled


async def test_a_request_that_cannot_be_written_down_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tensors than the protocol allows: it is refused, and its neighbours in the turn are served."""
    # A signature allows no more than the protocol does, so the protocol is made to allow less.
    monkeypatch.setattr(tensor_entries, "MAX_TENSORS", 1)
    shape = NamedShape.parse("300")
    wide = ModelSignature(
        name="wide",
        inputs=tuple(InputPort(f"x{number}", "f32", shape) for number in range(2)),
        outputs=(OutputPort("y", "f32", shape, Whole()),),
    )

    array = np.zeros(300, np.float32)
    inputs = {port.name: array for port in wide.inputs}
    models = ScriptedModel(wide), ScriptedModel(identity_signature())
    async with serving(*models) as (_, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        await client.signature("wide")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.infer, "identity", ROW)
            with pytest.raises(InvalidRequest, match="at most 1 "):
                await client.infer("wide", inputs)
            nursery.start_soon(client.infer, "identity", ROW)


async def test_a_signature_that_cannot_be_read_is_the_servers_fault() -> None:
    """Nonsense where a signature should be is `InternalError`, not a crash of the client."""

    class Nonsense(ModelSignature):
        def to_dict(self) -> dict[str, Any]:
            return {"name": "identity", "inputs": 7}

    plain = identity_signature()
    nonsense = ScriptedModel(Nonsense(plain.name, plain.inputs, plain.outputs))

    async with serving(nonsense) as (_, endpoint), shapestream.connect(endpoint.connect) as client:
        with pytest.raises(InternalError, match="signature"):
            await client.infer("identity", ROW)


async def test_a_stream_of_a_client_that_is_closed_says_so() -> None:
    """Whether its source is awaited or not."""

    async def items() -> AsyncIterator[Any]:
        yield ROW

    async with serving() as (_, endpoint):
        async with shapestream.connect(endpoint.connect) as client:
            await client.signature("identity")
        for source in (items(), [ROW]):
            async with client.stream("identity", source) as results:
                with pytest.raises(Cancelled, match="closed"):
                    await anext(results)


OWNER = Caller()


def ticket() -> OpenTicket:
    """A question."""
    return OpenTicket(OWNER, name="m")


def test_while_it_closes_each_thing_is_taken_or_refused_once() -> None:
    """Four threads post for as long as it takes; nothing is lost between the last turn and the end."""
    refused: list[AnyTicket] = []
    inbox = SubmissionQueue(refused.extend, lambda: None)
    posted = [[ticket() for _ in range(500)] for _ in range(4)]
    start = threading.Barrier(5)

    def poster(tickets: list[OpenTicket]) -> None:
        start.wait()
        for one in tickets:
            inbox.post(one)

    threads = [threading.Thread(target=poster, args=(tickets,)) for tickets in posted]
    for thread in threads:
        thread.start()
    start.wait()
    taken: list[Posted] = []
    while len(taken) < 300:
        queue = inbox.items
        while queue:
            taken.append(queue.popleft())
    inbox.close()
    for thread in threads:
        thread.join()
    fates = sorted(id(item) for item in [*taken, *refused])
    assert sorted(id(one) for tickets in posted for one in tickets) == fates


async def test_a_post_from_another_thread_wakes_the_core_and_a_second_one_does_not_again() -> None:
    """What comes before the turn begins is taken by that turn; a withdrawal always wakes."""
    turns: list[int] = []
    inbox = SubmissionQueue(lambda tickets: None, lambda: turns.append(len(inbox.items)))
    inbox.open()
    items = [ticket(), ticket(), Withdraw(ticket())]
    for item, taken in zip(items, ([1], [1], [1, 3]), strict=True):
        await trio.to_thread.run_sync(inbox.post, item)
        await trio.testing.wait_all_tasks_blocked()
        assert taken == turns
    assert items == list(inbox.items)


async def test_a_wake_up_that_finds_nothing_does_not_keep_the_next_post_waiting() -> None:
    """A turn has taken the item before its poster woke the core: the next post wakes it again."""
    turns: list[int] = []
    inbox = SubmissionQueue(lambda tickets: None, lambda: turns.append(len(inbox.items)))
    inbox.open()
    inbox.post(ticket())
    inbox.items.clear()
    await trio.testing.wait_all_tasks_blocked()
    inbox.post(ticket())
    await trio.testing.wait_all_tasks_blocked()
    assert [0, 1] == turns
