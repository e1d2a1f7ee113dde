"""A client stays where it was connected: calls from a forked child and from another event loop are refused at once."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio

import shapestream
from shapestream import aio, blocking
from shapestream.testing import ScriptedServer

ROW = {"x": np.ones((1, 3), np.float32)}
CHILD_PATIENCE_S = 100
"""A child that hangs is killed by then, and the test fails instead of hanging with it."""


def in_forked_child(act: Callable[[], Any]) -> str:
    """What `act` returns in a forked child, or what it raises there, as text."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_PATIENCE_S)
        try:
            said = str(act())
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


def client_threads() -> set[threading.Thread]:
    """The background threads of all clients of this process."""
    return {thread for thread in threading.enumerate() if thread.name == "shapestream-client"}


CALLS: dict[str, Callable[[blocking.Client], Any]] = {
    "infer": lambda client: client.infer("double", ROW),
    "infer with a deadline": lambda client: client.infer("double", ROW, deadline=0.5),
    "a known signature": lambda client: client.signature("double"),
    "a new signature": lambda client: client.signature("identity"),
    "statistics": lambda client: client.statistics(),
    "a stream": lambda client: client.stream("double", [ROW]).__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_forked_child_is_told_to_connect_for_itself(
    address: str, call: Callable[[blocking.Client], Any]
) -> None:
    """The thread behind the client exists in the parent only, so that no call of the child would ever end."""
    with blocking.connect(address) as client:
        client.infer("double", ROW)
        said = in_forked_child(lambda: call(client))
        assert said.startswith("RuntimeError: ")
        assert "fork" in said
        assert "connect" in said
        client.infer("double", ROW)


def test_a_forked_child_that_connects_for_itself_is_served(address: str) -> None:
    """Its parent's client is still open, and works on."""
    with blocking.connect(address) as client:
        client.infer("double", ROW)

        def connect_anew() -> Any:
            with blocking.connect(address) as own:
                return own.infer("double", ROW)["y"].sum()

        assert "6.0" == in_forked_child(connect_anew)
        client.infer("double", ROW)


def test_a_forked_child_may_leave_its_parents_block(server: ScriptedServer, address: str) -> None:
    """Closing there is no error, and the parent's session goes on."""
    with blocking.connect(address) as client:
        client.infer("double", ROW)
        assert "None" == in_forked_child(client.close)
        client.infer("double", ROW)
        assert (1, 0) == (server.hellos, server.goodbyes)


def test_a_stream_does_not_go_on_in_a_forked_child(address: str) -> None:
    """Its producer and its results are the parent's; what had arrived before is all that there is."""
    with blocking.connect(address) as client:
        with client.stream("double", [ROW] * 9, max_in_flight=2) as results:
            next(results)
            assert in_forked_child(lambda: list(results)).startswith("RuntimeError: ")
            assert "None" == in_forked_child(lambda: results.__exit__(None, None, None))
            assert 8 == len(list(results))


FORK_WARNING = "ignore:This process (pid=:DeprecationWarning"
"""CPython 3.12 and newer warn of any fork in a process with threads, and the client has one."""
FORKING_PROGRAM = """
import os, signal, sys
from shapestream import blocking
signal.alarm(100)
x = {"x": [[1.0]]}
with blocking.connect(sys.argv[1]) as client:
    client.infer("double", x)
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        try:
            client.infer("double", x)
        except RuntimeError:
            with blocking.connect(sys.argv[1]) as own:
                sys.exit(int(own.infer("double", x)["y"].sum()))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.infer("double", x)["y"].sum())
"""


def test_a_program_that_forks_within_the_block_ends_in_both_processes(address: str) -> None:
    """The child leaves its parent's block, and ends as programs do; the parent's client goes on."""
    command = [sys.executable, "-W", FORK_WARNING, "-c", FORKING_PROGRAM, address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "2 2.0\n", "") == (done.returncode, done.stdout, done.stderr)


# ------------------------------------------------------------ event loops


def test_a_second_event_loop_is_refused(address: str) -> None:
    """Its calls would be answered in the first one, and wait for ever."""
    first = asyncio.new_event_loop()
    connecting = aio.connect(address)
    client = first.run_until_complete(connecting.__aenter__())
    first.run_until_complete(client.infer("double", ROW))

    async def stream() -> None:
        async with client.stream("double", [ROW]):
            pytest.fail("entered")

    for call in (
        lambda: client.infer("double", ROW),
        lambda: client.signature("double"),
        lambda: client.signature("identity"),
        lambda: client.statistics(),
        stream,
    ):
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(call())  # type: ignore[operator]
    first.run_until_complete(client.infer("double", ROW))
    first.run_until_complete(connecting.__aexit__(None, None, None))
    first.close()


def test_a_stream_of_another_event_loop_is_refused(server: ScriptedServer, address: str) -> None:
    """Entered in one loop, consumed in another, where its next item has not come."""
    server.hold()
    first = asyncio.new_event_loop()
    connecting = aio.connect(address)
    client = first.run_until_complete(connecting.__aenter__())
    results = client.stream("double", [ROW])
    first.run_until_complete(results.__aenter__())

    async def consume() -> Any:
        return await anext(results)

    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(consume())
    server.release()
    assert first.run_until_complete(consume()).ok
    first.run_until_complete(connecting.__aexit__(None, None, None))
    first.close()


async def test_a_second_trio_run_is_refused(trio_face: Any) -> None:
    """The same under trio, where another thread runs another loop."""

    async def elsewhere(client: shapestream.Client) -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await client.infer("double", ROW)

    async with trio_face.connect() as client:
        await client.infer("double", ROW)
        await trio.to_thread.run_sync(trio.run, elsewhere, client)
        await client.infer("double", ROW)


async def test_a_forked_child_of_an_asyncio_program_is_told(aio_face: Any) -> None:
    """Also where it runs an event loop of its own."""
    async with aio_face.connect() as client:
        await client.infer("double", ROW)
        said = in_forked_child(lambda: _drive(client.infer("double", ROW)))
        assert said.startswith("RuntimeError: ")
        assert "fork" in said
        await client.infer("double", ROW)


def _drive(call: Any) -> Any:
    """Run a coroutine in a thread with a loop of its own, where no loop is known to run."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call).result()


def test_a_loop_that_closes_without_leaving_connect_ends_the_thread(
    server: ScriptedServer, address: str
) -> None:
    """Nobody can ask any more; the server hears goodbye."""
    before = client_threads()
    loop = asyncio.new_event_loop()
    connecting = aio.connect(address)
    client = loop.run_until_complete(connecting.__aenter__())
    loop.run_until_complete(client.infer("double", ROW))
    (thread,) = client_threads() - before
    loop.close()
    thread.join(CHILD_PATIENCE_S)
    assert not thread.is_alive()
    server.wait_until(lambda server: server.goodbyes == 1)
    # The generator behind `connect` would wait for its loop for ever.
    del connecting
    gc.collect()


# ------------------------------------------------------------ threads


def test_a_stream_that_another_thread_leaves_ends(server: ScriptedServer, address: str) -> None:
    """Every thread that waits for its next result comes to the end of the loop."""
    with blocking.connect(address) as client:
        server.hold()
        results = client.stream("double", [ROW] * 2).__enter__()
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

        def consume() -> list[Any]:
            waiting.put("begun")
            return list(results)

        with ThreadPoolExecutor(2) as pool:
            consumers = [pool.submit(consume) for _ in range(2)]
            for _ in consumers:
                waiting.get()
            server.wait_until(lambda server: len(server.held) == 2)
            results.__exit__(None, None, None)
            assert [[], []] == [consumer.result(CHILD_PATIENCE_S) for consumer in consumers]


def test_a_blocking_client_that_is_dropped_ends_its_thread(server: ScriptedServer, address: str) -> None:
    """It warns, as files do; the server hears goodbye."""
    before = client_threads()
    clients = [blocking.connect(address)]
    clients[0].infer("double", ROW)
    (thread,) = client_threads() - before
    with pytest.warns(ResourceWarning, match="close"):
        clients.clear()
    thread.join(CHILD_PATIENCE_S)
    assert not thread.is_alive()
    server.wait_until(lambda server: server.goodbyes == 1)


def test_a_program_that_forgets_to_close_ends(address: str) -> None:
    """A script without `with` is over when its last line is."""
    script = f"""
from shapestream import blocking
client = blocking.connect({address!r})
print(client.infer("double", {{"x": [[1.0]]}})["y"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=CHILD_PATIENCE_S, check=False
    )
    assert (0, "[[2.]]\n", "") == (done.returncode, done.stdout, done.stderr)
