"""What comes over a bare connection: other protocols, garbage, halves of a handshake, messages without end.

These are plain sockets, so libzmq reads first: some of it never becomes a message, and is counted as a handshake that
failed; what it takes for an old ZeroMQ becomes a message that cannot be read.
"""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass

import pytest
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile import Hostile, assert_memory_kept, client, counters, watched
from tests.pipeline.serving.raw_messages import assert_served

pytestmark = pytest.mark.usefixtures("resident_at_first")


def greeting(mechanism: bytes = b"NULL", *, version: bytes = b"\x03\x00", as_server: int = 0) -> bytes:
    """The 64 bytes with which each side begins."""
    return (
        b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)
    )


def command(name: bytes, body: bytes = b"") -> bytes:
    """A command frame."""
    content = bytes([len(name)]) + name + body
    return b"\x06" + len(content).to_bytes(8, "big") + content


def metadata(**values: bytes) -> bytes:
    """Properties, as READY carries them."""
    return b"".join(
        bytes([len(key)]) + key.encode().replace(b"_", b"-") + len(value).to_bytes(4, "big") + value
        for key, value in values.items()
    )


def ready(kind: bytes = b"DEALER", **values: bytes) -> bytes:
    """The end of a handshake without keys."""
    return command(b"READY", metadata(**{"Socket_Type": kind, **values}))


def frame(data: bytes, *, more: bool = False) -> bytes:
    """A frame of a message."""
    return bytes([2 | more]) + len(data).to_bytes(8, "big") + data


JOINED = greeting() + ready()
NOISE = random.Random(5).randbytes(4_096)


@dataclass(frozen=True, slots=True)
class Bare:
    """What is sent, which counter it moves (None: nobody was told), and whether the server ends the connection."""

    data: bytes
    counter: str | None
    ends: bool = True
    joined: bool = False
    """It comes after a whole handshake, in which the server had its say."""


FAILED = "failed_handshakes.clients"
UNREADABLE = "bad_messages.clients"


def hangs(data: bytes, *, joined: bool = False) -> Bare:
    """Nothing comes of it, and it may go on: its own end is all that can be heard of it."""
    return Bare(data, None, ends=False, joined=joined)


def unreadable(data: bytes) -> Bare:
    """A message, for libzmq; it is answered by Goodbye, and nothing is heard on this connection from then on."""
    return Bare(data, UNREADABLE, ends=False, joined=True)


CASES = {
    "nothing at all": hangs(b""),
    "one byte": hangs(b"\xff"),
    "half of a greeting": hangs(greeting()[:32]),
    "a greeting, and no more": hangs(greeting()),
    "a handshake, and no more": hangs(b"", joined=True),
    "the first frame of a message, and no more": hangs(frame(b"x", more=True), joined=True),
    "half of a frame": hangs(frame(bytes(1_000))[:500], joined=True),
    "5,000 frames of a message that never ends": hangs(frame(b"x", more=True) * 5_000, joined=True),
    "a frame of 512 MiB that never comes": hangs(b"\x02" + (2**29).to_bytes(8, "big"), joined=True),
    "a mechanism that nobody knows": Bare(greeting(b"TRUST-ME"), FAILED),
    "a mechanism with keys": Bare(greeting(b"CURVE"), FAILED),
    "a mechanism with a password": Bare(greeting(b"PLAIN"), FAILED),
    "a message before the handshake": Bare(greeting() + frame(b"\x92\x01\x90"), FAILED),
    "noise after the greeting": Bare(greeting() + NOISE, FAILED),
    "a socket of another kind": Bare(greeting() + ready(b"PUB"), None),
    "a socket of no kind": Bare(greeting() + ready(b"\xff\xff"), None),
    "metadata that is cut off": Bare(
        greeting() + command(b"READY", metadata(Socket_Type=b"DEALER")[:-3]), None
    ),
    "metadata longer than it is": Bare(
        greeting() + command(b"READY", b"\x0bSocket-Type" + b"\x7f\xff\xff\xff" + b"DEALER"), None
    ),
    "a frame of 2^63 bytes": Bare(b"\x02" + (2**63).to_bytes(8, "big"), None, joined=True),
    "a frame of 2 GiB": Bare(b"\x02" + (2**31).to_bytes(8, "big"), None, joined=True),
    "a frame of 2^64-1 bytes, and more": Bare(b"\x03" + b"\xff" * 8, None, joined=True),
    "an empty message": unreadable(frame(b"")),
    "a message of noise": unreadable(frame(NOISE)),
    "1,026 empty frames": unreadable(frame(b"", more=True) * 1_025 + frame(b"")),
    "100,000 frames in one message": unreadable(frame(b"", more=True) * 100_000 + frame(b"")),
    "HTTP in a frame": unreadable(frame(b"GET / HTTP/1.1\r\n\r\n")),
    "1,000 bad messages": unreadable(frame(b"\xc1") * 1_000),
}
OTHERS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10,
    "TLS": bytes.fromhex("16030100c6010000c20303") + NOISE[:200],
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n" + NOISE[:200],
    "Redis": b"*1\r\n$8\r\nFLUSHALL\r\n" * 50,
    "SMTP": b"EHLO localhost\r\nMAIL FROM:<a@b>\r\n",
    "noise": NOISE,
    "more noise": random.Random(6).randbytes(100_000),
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "an old ZeroMQ": b"\x01\x00" + b"\x05\x00\x92\x01\x90\xc0" * 100,
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x00\x04junk" * 100,
}
"""What libzmq makes of these is its own affair (it also speaks to versions without a greeting)."""


def endpoint(server: Hostile) -> tuple[str, int]:
    """Host and port."""
    host, _, port = server.tcp.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def is_ended(stream: trio.SocketStream) -> None:
    """Returns when the server has closed the connection, by an end or a reset; what it said before is of no interest."""
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def join(stream: trio.SocketStream) -> None:
    """The whole handshake. What is sent before the server has said its part counts as a part of it."""
    await stream.send_all(JOINED)
    heard = b""
    while b"Identity" not in heard:
        heard += await stream.receive_some()


@pytest.mark.parametrize("name", CASES)
@real_time
async def test_a_bare_connection_harms_nobody(name: str, server: Hostile) -> None:
    """It is ended, or it hangs there alone: whoever was connected, and whoever comes, is served."""
    case = CASES[name]
    async with watched(server, server.tcp) as watch:
        async with await trio.open_tcp_stream(*endpoint(server)) as bare:
            if case.joined:
                await join(bare)
            await bare.send_all(case.data)
            if case.ends:
                await is_ended(bare)
            async with client(server.tcp) as newcomer:
                await assert_served(newcomer, 1)
            # libzmq's news are read with the server's heartbeat.
            while case.counter is not None and not await watch.has_moved(case.counter):
                await trio.lowlevel.checkpoint()
        await watch.assert_only(bad=case.counter == UNREADABLE)


async def bare_connection(server: Hostile, port: str) -> trio.SocketStream:
    """To the clients' port over tcp, or to the workers' over ipc."""
    if port == "clients":
        return await trio.open_tcp_stream(*endpoint(server))
    return await trio.open_unix_socket(server.workers.removeprefix("ipc://"))


@pytest.mark.parametrize("port", ["clients", "workers"])
@pytest.mark.parametrize("name", OTHERS)
@real_time
async def test_another_protocol_harms_nobody(name: str, port: str, server: Hostile) -> None:
    """Whatever becomes of it: a message that is bad, a handshake that failed, or nothing."""
    async with watched(server, server.tcp) as watch:
        async with await bare_connection(server, port) as bare:
            with contextlib.suppress(trio.BrokenResourceError):
                await bare.send_all(OTHERS[name])
            async with client(server.tcp) as newcomer:
                await assert_served(newcomer, 1)
        await watch.assert_only(bad=None, port=port)


@real_time
async def test_a_hundred_connections_that_hang_there_keep_nobody_out(server: Hostile) -> None:
    """Some without a word, some in the middle of a greeting, some reset; the server then forgets them."""
    async with watched(server, server.tcp) as watch:
        hanging = []
        for n in range(100):
            stream = await trio.open_tcp_stream(*endpoint(server))
            await stream.send_all((b"", greeting()[:20], JOINED, JOINED + frame(b"x", more=True))[n % 4])
            hanging.append(stream)
        async with client(server.tcp) as newcomer:
            await assert_served(newcomer, 1)
        for stream in hanging:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))
            await stream.aclose()
        await assert_served(watch.honest, 1)
        await watch.assert_only(bad=False)


@real_time
async def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    async with client(server.tcp) as honest:
        await counters(honest)
    assert_memory_kept(server, resident_at_first)
