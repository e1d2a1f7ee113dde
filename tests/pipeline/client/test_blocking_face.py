"""What only the blocking face can get wrong: Ctrl-C, and several threads at one client."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from shapestream import blocking
from shapestream.client.blocking_client import Inference, Stream
from shapestream.client.streaming import Item, OwnItem, StreamOptions
from shapestream.errors import Cancelled, DeadlineExceeded, InvalidRequest
from shapestream.testing import ScriptedServer

AGAIN_S = 10.0
"""Longer than any machine takes from a signal to its KeyboardInterrupt."""
ROW = {"x": np.ones((1, 3), np.float32)}


@contextmanager
def ctrl_c_when(server: ScriptedServer, condition: Callable[[ScriptedServer], Any]) -> Iterator[None]:
    """A real SIGINT for this thread as soon as the condition holds, and again where nothing comes of it.

    Python drops a KeyboardInterrupt that meets a callback of the garbage collector, such as Hypothesis has.
    """
    here, interrupted = threading.get_ident(), threading.Event()

    def press() -> None:
        server.wait_until(condition)
        signal.pthread_kill(here, signal.SIGINT)
        while not interrupted.wait(AGAIN_S):
            signal.pthread_kill(here, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        interrupted.set()
        thread.join()


def test_ctrl_c_interrupts_a_call_and_withdraws_it(server: ScriptedServer, address: str) -> None:
    """KeyboardInterrupt is raised where the call waits, the server is told, and the client goes on."""
    with blocking.connect(address) as client:
        client.signature("double")
        server.hold()
        with ctrl_c_when(server, lambda server: server.held):
            with pytest.raises(KeyboardInterrupt):
                client.infer("double", ROW)
        server.wait_until(lambda server: server.cancelled == [1])
        server.release()
        client.infer("double", ROW)


def test_ctrl_c_interrupts_a_stream_and_withdraws_what_is_unfinished(
    server: ScriptedServer, address: str
) -> None:
    """The block is left as by any exception."""
    with blocking.connect(address) as client:
        server.hold()
        with ctrl_c_when(server, lambda server: len(server.held) == 4):
            with pytest.raises(KeyboardInterrupt):
                with client.stream("double", [ROW] * 9, max_in_flight=4) as results:
                    next(results)
        server.wait_until(lambda server: len(server.cancelled) == 4)


def test_ctrl_c_interrupts_connecting_and_leaves_no_thread(server: ScriptedServer, address: str) -> None:
    """A client that never was keeps nothing running."""
    server.go_silent()
    before = set(threading.enumerate())
    with ctrl_c_when(server, lambda server: server.messages > 0):
        with pytest.raises(KeyboardInterrupt):
            blocking.connect(address)
    left = set(threading.enumerate()) - before
    assert [] == [thread.name for thread in left if thread.name == "shapestream-client"]


def test_many_threads_share_a_client(address: str) -> None:
    """Each gets its own answer."""
    with blocking.connect(address) as client, ThreadPoolExecutor(8) as pool:

        def call(number: int) -> float:
            return float(client.infer("double", {"x": [[number]]})["y"][0, 0])

        assert [2.0 * number for number in range(300)] == list(pool.map(call, range(300)))


def test_closing_ends_the_calls_of_other_threads(server: ScriptedServer, address: str) -> None:
    """They get `Cancelled`; the server hears goodbye."""
    with ThreadPoolExecutor(2) as pool:
        client = blocking.connect(address)
        server.hold()
        calls = [pool.submit(client.infer, "double", ROW) for _ in range(2)]
        server.wait_until(lambda server: len(server.held) == 2)
        client.close()
        assert [Cancelled, Cancelled] == [type(call.exception(10)) for call in calls]
    server.wait_until(lambda server: server.goodbyes == 1)
    client.close()


def inference(client: blocking.Client) -> Inference:
    """A request that is not sent yet."""
    return Inference(
        client, "double", ROW, deadline=None, priority=0, request_id=None, trace=None, caller=None
    )


def test_a_request_is_withdrawn_by_another_thread(server: ScriptedServer, address: str) -> None:
    """Before it is sent, while it waits, and in vain after its result; the client goes on."""
    with ThreadPoolExecutor(1) as pool, blocking.connect(address) as client:
        early = inference(client)
        early.withdraw()
        with pytest.raises(Cancelled):
            early.result()
        assert not server.requests
        server.hold()
        waiting = inference(client)
        call = pool.submit(waiting.result)
        server.wait_until(lambda server: len(server.held) == 1)
        for _ in range(3):
            waiting.withdraw()
        assert Cancelled is type(call.exception(10))
        server.release()
        answered = inference(client)
        assert [2.0] * 3 == answered.result()["y"][0].tolist()
        answered.withdraw()
        assert [2.0] * 3 == client.infer("double", ROW)["y"][0].tolist()


def test_items_of_a_stream_may_have_models_and_options_of_their_own(address: str) -> None:
    """In order, with errors in their places: one that came with an item, one of the inputs, one of no model."""
    options = StreamOptions(
        max_in_flight=2, ordered=True, on_error="yield", deadline=None, priority=0, caller=None
    )
    with blocking.connect(address) as client:
        model = client.opened("double")
        items = [
            OwnItem(key="a", model=model, inputs=ROW),
            OwnItem(key="b", error=InvalidRequest("found before")),
            OwnItem(key="c", model=model, inputs={"z": [[1]]}),
            OwnItem(key="d"),
            OwnItem(key="e", model=model, inputs=ROW, deadline=1e12, request_id="own"),
            OwnItem(key="f", model=model, inputs=ROW, deadline=-1.0),
        ]
        with Stream[Item](client, None, items, options) as results:
            found = list(results)
    assert ["a", "b", "c", "d", "e", "f"] == [item.key for item in found]
    assert [True, False, False, False, True, False] == [item.ok for item in found]
    assert [InvalidRequest] * 3 + [DeadlineExceeded] == [type(item.error) for item in found if not item.ok]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_producer_that_exits_its_thread_does_not_leave_the_consumer_waiting(address: str) -> None:
    """`SystemExit` ends the producer's thread only; the consumer gets an error after the results before it."""

    def source() -> Iterator[Any]:
        yield ROW
        raise SystemExit

    with blocking.connect(address) as client:
        with client.stream("double", source()) as results:
            next(results)
            with pytest.raises(RuntimeError, match="ended from outside") as caught:
                next(results)
            assert isinstance(caught.value.__cause__, SystemExit)
    # pytest notes the exit when the thread ends, which may be a moment after its consumer knows: not in the next test.
    for thread in threading.enumerate():
        if thread.name == "shapestream-producer":
            thread.join()


def test_a_producer_that_never_returns_keeps_neither_the_block_nor_the_client(address: str) -> None:
    """Its thread is left behind; the items that it already gave are answered."""
    never = threading.Event()

    def source() -> Iterator[Any]:
        yield ROW
        never.wait()

    with blocking.connect(address) as client:
        with client.stream("double", source()) as results:
            assert next(results).ok
    never.set()


def test_the_producer_runs_in_the_callers_context(address: str) -> None:
    """Context variables, such as a logger's bound values, are there."""
    from contextvars import ContextVar

    who: ContextVar[str] = ContextVar("who")
    who.set("caller")

    def source() -> Iterator[Any]:
        yield who.get(), ROW

    with blocking.connect(address) as client:
        with client.stream("double", source()) as results:
            assert ["caller"] == [result.key for result in results]
