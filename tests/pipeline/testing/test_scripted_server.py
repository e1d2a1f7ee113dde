"""`shapestream.testing` for its users: what a script raises arrives as it was raised, and a defect of it is seen."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
import trio.testing
import zmq
from tests.entries import Goodbye

import shapestream
from shapestream import blocking
from shapestream.errors import InternalError, Overloaded, ProtocolError
from shapestream.testing import (
    Arrays,
    MemoryEndpoint,
    ScriptedModel,
    ScriptedServer,
    identity_signature,
    memory_server,
)
from shapestream.testing import serve_in_thread as serve
from shapestream.wire.codec import encode

ROW = {"x": np.ones((1, 16), np.float32)}


def scripted(answer: Callable[[Arrays], Arrays], **options: Any) -> ScriptedServer:
    """One model, `scripted`, beside `identity`."""
    return ScriptedServer(
        ScriptedModel(identity_signature("scripted"), answer, **options), ScriptedModel(identity_signature())
    )


@pytest.mark.parametrize(("given", "arrives"), [(None, None), (0.25, 0.25), (3, 3.0), (1e-9, 0.001)])
def test_when_to_try_again_reaches_the_caller(
    tmp_path: Path, given: float | None, arrives: float | None
) -> None:
    """In seconds, rounded to milliseconds, and never to none."""

    def busy(inputs: Arrays) -> Arrays:
        raise Overloaded("not now", retry_after_s=given)

    with serve(scripted(busy), f"ipc://{tmp_path}/s") as address, blocking.connect(address) as client:
        with pytest.raises(Overloaded, match="not now") as raised:
            client.infer("scripted", ROW)
        assert arrives == raised.value.retry_after_s


def test_the_script_returns_when_the_server_has_done_it(tmp_path: Path) -> None:
    """However busy its loop is: what is sent to it afterwards cannot be heard by a server that went silent before."""
    entered, leave = threading.Event(), threading.Event()

    def slow(inputs: Arrays) -> Arrays:
        entered.set()
        assert leave.wait(10)
        return {"y": inputs["x"]}

    server = scripted(slow)
    with serve(server, f"ipc://{tmp_path}/s") as address, blocking.connect(address, silence=100) as client:
        caller = threading.Thread(target=client.infer, args=("scripted", ROW))
        silencer = threading.Thread(target=server.go_silent)
        caller.start()
        assert entered.wait(10)
        silencer.start()
        silencer.join(0.05)
        assert silencer.is_alive()
        leave.set()
        silencer.join()
        server.go_silent(False)
        server.say(Goodbye())
        server.wait_until(lambda server: server.hellos == 2)
        caller.join()


def test_a_goodbye_counts_though_its_peer_was_forgotten() -> None:
    """So it is where a heartbeat to a client that has left fails before the client's goodbye is read."""

    async def main() -> None:
        socket, server = memory_server(), ScriptedServer()
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, socket)
            connection = socket.connect()
            await nursery.start(connection.run)
            await connection.send(encode([Goodbye()]))
            await trio.testing.wait_all_tasks_blocked()
            assert 1 == server.goodbyes
            nursery.cancel_scope.cancel()

    trio.run(main)


def broken(inputs: Arrays) -> Arrays:
    """A bug."""
    raise KeyError("typo")


def forgetful(inputs: Arrays) -> Arrays:
    """Leaves its output out."""
    return {}


def untyped(inputs: Arrays) -> Arrays:
    """Gives what cannot travel."""
    return {"y": np.array([object()])}


def shapeless(inputs: Arrays) -> Any:
    """Gives nothing."""


@pytest.mark.parametrize("answer", [broken, forgetful, untyped, shapeless])
def test_a_bug_in_a_script_is_answered_and_the_server_goes_on(
    tmp_path: Path, answer: Callable[[Arrays], Arrays]
) -> None:
    """The caller gets `InternalError` with the script's own words; the server keeps the exception."""
    server = scripted(answer)
    with serve(server, f"ipc://{tmp_path}/s") as address, blocking.connect(address) as client:
        with pytest.raises(InternalError, match="the scripted model 'scripted' raised"):
            client.infer("scripted", ROW)
        assert client.infer("identity", ROW).ok
        assert 1 == len(server.errors)
        server.errors.clear()


def test_a_bug_in_a_duration_is_answered_too(tmp_path: Path) -> None:
    """It is the test's code as well."""

    def duration(inputs: Arrays) -> float:
        raise ZeroDivisionError("by zero")

    server = scripted(lambda inputs: {"y": inputs["x"]}, duration_s=duration)
    with serve(server, f"ipc://{tmp_path}/s") as address, blocking.connect(address) as client:
        with pytest.raises(InternalError, match="ZeroDivisionError: by zero"):
            client.infer("scripted", ROW)
        server.errors.clear()


def test_a_bug_after_a_duration_does_not_end_a_trio_server() -> None:
    """The tasks beside it go on; the exception is in `errors`."""

    async def main() -> None:
        server = scripted(broken, duration_s=0.01)
        endpoint = MemoryEndpoint()
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, endpoint.bind())
            async with shapestream.connect(endpoint.connect) as client:
                with pytest.raises(InternalError, match="KeyError"):
                    await client.infer("scripted", ROW)
                assert (await client.infer("identity", ROW)).ok
            nursery.cancel_scope.cancel()
        assert ["typo"] == [error.args[0] for error in server.errors]

    trio.run(main)


def test_a_bug_that_the_test_swallows_fails_it_all_the_same(tmp_path: Path) -> None:
    """`serve_in_thread` raises it when the block is over."""
    with pytest.raises(KeyError, match="typo"):  # noqa: PT012 - the whole block is what raises
        with serve(scripted(broken), f"ipc://{tmp_path}/s") as address, blocking.connect(address) as client:
            with client.stream("scripted", [ROW], on_error="yield") as results:
                assert [False] == [result.ok for result in results]


def test_what_the_block_raises_comes_first(tmp_path: Path) -> None:
    """A failed assertion is not hidden behind the script's bug."""
    with pytest.raises(InternalError):
        with serve(scripted(broken), f"ipc://{tmp_path}/s") as address, blocking.connect(address) as client:
            client.infer("scripted", ROW)


def test_releasing_more_than_is_held_releases_what_is_there(tmp_path: Path) -> None:
    """It ended the server's thread once."""
    server = scripted(lambda inputs: {"y": inputs["x"]})
    with serve(server, f"ipc://{tmp_path}/s") as address, blocking.connect(address) as client:
        server.hold()
        with client.stream("scripted", [ROW] * 2) as results:
            server.wait_until(lambda server: len(server.held) == 2)
            server.release(5)
            assert [True, True] == [result.ok for result in results]


@pytest.mark.parametrize(
    "message",
    [b"\xc1", msgpack.packb([9, []]), msgpack.packb([1, [[12, 0, 1, 99, None, 0, b"", []]]])],
    ids=["no msgpack", "another version", "a bad request"],
)
def test_a_client_that_talks_nonsense_ends_no_server(tmp_path: Path, message: bytes) -> None:
    """A raw socket says it; the next client is served, and the test's author finds it in `errors`."""
    server = scripted(lambda inputs: {"y": inputs["x"]})
    with serve(server, f"ipc://{tmp_path}/s") as address:
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.connect(address)
            raw.send(message)
            server.wait_until(lambda server: server.errors)
            raw.close(linger=0)
        with blocking.connect(address) as client:
            assert client.infer("scripted", ROW).ok
        assert [ProtocolError] == [type(error) for error in server.errors]
        server.errors.clear()


def test_a_request_for_no_model_is_answered(tmp_path: Path) -> None:
    """A number that no model has, from a client of one's own."""
    server = scripted(lambda inputs: {"y": inputs["x"]})
    layout = msgpack.packb([[0, "f32", [1, 16]]])
    hello = [10, 0, b"c" * 16, "raw"]
    request = [12, 0, 1, 99, None, 0, layout, [struct.pack("16f", *range(16))]]
    with serve(server, f"ipc://{tmp_path}/s") as address:
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.connect(address)
            raw.send(msgpack.packb([1, [hello, request]]))
            codes: list[Any] = []
            while not codes:
                codes += [entry[3] for entry in msgpack.unpackb(raw.recv())[1] if entry[0] == 25]
            raw.close(linger=0)
        assert ["internal"] == codes
        server.errors.clear()
