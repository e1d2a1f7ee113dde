"""Who gets in, who is known by which key, and who is not: CURVE and ZAP over real sockets on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.transport.witness import Witness
from zmq.utils import z85

from shapestream.errors import ConfigurationError, PeerGone
from shapestream.transport.curve import (
    LOCAL,
    LOCAL_DOMAIN,
    PROTECTED_DOMAIN,
    KeyRing,
    KeyRole,
    ProtectedRouter,
    ServerSecurity,
    answer_zap,
)
from shapestream.transport.curve_keys import (
    CallerKeys,
    KeyPair,
    new_key_pair,
    public_key,
    read_key_folder,
    read_key_pair,
    write_key_pair,
)
from shapestream.transport.zeromq import DealerSocket, SocketOptions

SERVER, ALICE, BOB, ADMIN, WORKER, STRANGER = (new_key_pair() for _ in range(6))
RING = KeyRing(
    clients={ALICE.public: "alice", BOB.public: "bob"},
    admins={ADMIN.public: "admin"},
    workers={WORKER.public: "worker"},
)
SECURITY = ServerSecurity(key=SERVER, ring=RING)
CLIENTS = (KeyRole.CLIENT, KeyRole.ADMIN)
# For what must not happen: long enough for a handshake on loopback, many times over.
LONG_S = 0.5


def dealer(
    pair: KeyPair | None, server: KeyPair = SERVER, context: zmq.Context[Any] | None = None
) -> DealerSocket:
    """A connection with this key, or with none."""
    keys = None if pair is None else CallerKeys(key=pair, server_key=server.public)
    return DealerSocket(keys=keys, context=context)


@asynccontextmanager
async def protected(
    *addresses: str, roles: Sequence[KeyRole] = CLIENTS, options: SocketOptions | None = None
) -> AsyncIterator[ProtectedRouter]:
    """A protected port that listens at a tcp port, or at these addresses."""
    router = ProtectedRouter(SECURITY, roles, port="test", options=options)
    async with trio.open_nursery() as nursery:
        try:
            for address in addresses or ("tcp://127.0.0.1:*",):
                router.bind(address)
            await nursery.start(router.run)
            with trio.fail_after(60):
                yield router
        finally:
            router.close()


async def heard(router: ProtectedRouter, patience_s: float = LONG_S) -> tuple[bytes, list[bytes]] | None:
    """One message and its sender; None when none comes."""
    with trio.move_on_after(patience_s):
        ((peer, frames),) = await router.receive()
        return peer, [bytes(frame) for frame in frames]
    return None


# ---------------------------------------------------------------- who gets in


@real_time
async def test_a_listed_key_gets_in_and_is_who_it_is() -> None:
    """The key comes with the message, is known by the peer's id, and the way back works."""

    async with protected() as router:
        async with dealer(ALICE) as alice, dealer(ADMIN) as admin:
            async with trio.open_nursery() as nursery:
                for each, key in ((alice, ALICE), (admin, ADMIN)):
                    await nursery.start(each.run)
                    each.connect(router.addresses[0])
                    each.send_nowait([b"hello", b"x" * 100_000])
                    ((peer, frames),) = await router.receive()
                    assert key.public == router.key_of(peer)
                    assert (key is ADMIN) == router.is_admin(peer)
                    assert [5, 100_000] == [len(frame) for frame in frames]
                    router.send_nowait(peer, [b"welcome"])
                    assert [[b"welcome"]] == await each.receive()
                nursery.cancel_scope.cancel()


def call_and_hang_up(address: str) -> None:
    """Callers ask to be let in, and are gone again; meanwhile this thread, and so the port's loop, stands still."""
    with zmq.Context() as context, contextlib.ExitStack() as callers:
        for _ in range(5):
            caller = callers.enter_context(context.socket(zmq.DEALER))
            caller.linger = 0
            caller.curve_publickey = STRANGER.public.encode()
            caller.curve_secretkey = STRANGER.secret.encode()
            caller.curve_serverkey = SERVER.public.encode()
            caller.connect(address)
        time.sleep(0.05)
    time.sleep(0.02)


@real_time
async def test_who_leaves_before_the_answer_harms_nobody() -> None:
    """Callers hang up while the loop owes them a verdict: the port goes on, and lets others in."""

    async with protected() as router:
        for _ in range(4):
            call_and_hang_up(router.addresses[0])
            await trio.testing.wait_all_tasks_blocked(0.01)
        async with dealer(ALICE) as alice, trio.open_nursery() as nursery:
            await nursery.start(alice.run)
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            assert (b"hello",) == tuple((await router.receive())[0][1])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("pair", "server", "reason"),
    [
        pytest.param(STRANGER, SERVER, "key not listed", id="a key that nobody listed"),
        pytest.param(WORKER, SERVER, "key not listed", id="a worker's key at the clients' port"),
        pytest.param(ALICE, BOB, "handshake failed", id="a client that expects another server"),
        pytest.param(None, SERVER, "handshake failed", id="no key at all"),
    ],
)
@real_time
async def test_others_get_nothing(pair: KeyPair | None, server: KeyPair, reason: str) -> None:
    """No message of theirs is heard, the refusal is counted, and a client beside them is served."""

    async with protected() as router:
        async with dealer(pair, server) as stranger, dealer(ALICE) as alice:
            stranger.connect(router.addresses[0])
            stranger.send_nowait([b"let me in"])
            assert await heard(router) is None
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            found = await heard(router, 30)
            assert found is not None
            assert [b"hello"] == found[1]
            while not router.refused:
                assert await heard(router, 0.01) is None
                router.failed_handshakes()  # as the server asks with each heartbeat
            assert {reason} == set(router.refused)


@real_time
async def test_a_clients_key_does_not_open_the_workers_port() -> None:
    """Roles are per port: a worker's key opens the workers' and no client's does, not even an admin's."""

    async with protected(roles=(KeyRole.WORKER,)) as router:
        for pair in (ALICE, ADMIN):
            async with dealer(pair) as caller:
                caller.connect(router.addresses[0])
                caller.send_nowait([b"I serve models"])
                assert await heard(router) is None
        async with dealer(WORKER) as worker:
            worker.connect(router.addresses[0])
            worker.send_nowait([b"I do"])
            assert await heard(router, 30) is not None


@real_time
async def test_ipc_beside_tcp_asks_for_no_key(tmp_path: Path) -> None:
    """The same port, two addresses: whoever may use the folder is at home, and has no key."""

    async with protected(f"ipc://{tmp_path}/s", "tcp://127.0.0.1:*") as router:
        async with dealer(None) as local, dealer(ALICE) as alice:
            local.connect(router.addresses[0])
            local.send_nowait([b"from here"])
            found = await heard(router, 30)
            assert found is not None
            assert router.key_of(found[0]) is None
            assert router.is_admin(found[0])
            alice.connect(router.addresses[1])
            alice.send_nowait([b"from afar"])
            found = await heard(router, 30)
            assert found is not None
            assert ALICE.public == router.key_of(found[0])


@real_time
async def test_without_a_handler_nobody_gets_in() -> None:
    """Until `run` answers, a listed key waits; libzmq alone would have let in any."""

    router = ProtectedRouter(SECURITY, CLIENTS, port="test")
    router.bind("tcp://127.0.0.1:*")
    try:
        async with dealer(ALICE) as alice:
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            assert await heard(router) is None
            assert [] == router.receive_nowait()
            async with trio.open_nursery() as nursery:
                await nursery.start(router.run)
                assert await heard(router, 30) is not None
                router.close()
    finally:
        router.close()


@pytest.mark.parametrize(
    "bytes_sent",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x01\x00\x03\x00abc", b"\xff" * 200, b"\x16\x03\x01\x02\x00" + b"\0" * 512],
    ids=["HTTP", "ZMTP 1.0, which knows no keys", "noise", "TLS"],
)  # fmt: skip
@real_time
async def test_what_does_not_speak_curve_ends_its_own_connection(bytes_sent: bytes) -> None:
    """Other protocols get no further than the handshake; a client beside them is served."""

    async with protected() as router:
        port = int(router.addresses[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(bytes_sent)
            assert await heard(router) is None
            async with dealer(ALICE) as alice:
                alice.connect(router.addresses[0])
                alice.send_nowait([b"hello"])
                assert await heard(router, 30) is not None


GREETING = (
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
)  # of ZMTP 3.0: CURVE, as a client


def until_the_end(raw: socket.socket) -> int:
    """Reads until the other side has ended the connection; how many bytes came."""
    total = 0
    with contextlib.suppress(ConnectionResetError):
        while data := raw.recv(4096):
            total += len(data)
    return total


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20), id="a message of many parts"),
        pytest.param(b"\x06" + struct.pack(">Q", 1 << 40), id="a command of a terabyte"),
        pytest.param(b"\x04\x06\x05READY", id="READY, without the keys that go before it"),
        pytest.param(b"\x04\x05\x04PING", id="a heartbeat"),
        pytest.param(b"", id="nothing more"),
    ],
)
@real_time
async def test_whoever_has_proved_nothing_is_disconnected(frames: bytes) -> None:
    """At once for what no handshake has, at its time-out for silence: nothing is kept, and others are served."""

    async with protected(options=SocketOptions(handshake_ms=300)) as router:
        port = int(router.addresses[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
            raw.sendall(GREETING)
            with contextlib.suppress(ConnectionError):
                raw.sendall(frames)
            assert await trio.to_thread.run_sync(until_the_end, raw) <= 64
        async with dealer(ALICE) as alice:
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            assert await heard(router, 30) is not None


# ---------------------------------------------------------------- routing ids prove nothing


@real_time
async def test_a_chosen_routing_id_is_refused() -> None:
    """Whoever could choose it could also choose somebody else's, and get the answers that are meant for him."""

    async with protected() as router:
        context = Witness()
        async with dealer(ALICE, context=context) as alice:
            context.made[0].set(zmq.ROUTING_ID, b"camera-1")
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            assert await heard(router) is None
            assert {"chosen routing id": 1} == router.refused


@real_time
async def test_another_key_on_a_known_routing_id_gets_nothing() -> None:
    """Bob comes under the id that Alice's broken connection had: he is not heard, and nothing is sent to him."""

    async with protected() as router:
        context = Witness()
        async with dealer(ALICE) as alice, dealer(BOB, context=context) as bob:
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            found = await heard(router, 30)
            assert found is not None
            peer = found[0]
            alice.close()
            context.made[0].set(zmq.ROUTING_ID, peer)
            # libzmq gives him the id only when it knows of the end of Alice's connection.
            with pytest.raises(PeerGone):  # noqa: PT012 - until it knows
                while True:
                    router.send_nowait(peer, [b"are you there?"])
                    assert await heard(router, 0.01) is None
            bob.connect(router.addresses[0])
            bob.send_nowait([b"I am Alice"])
            with trio.move_on_after(30):
                while not router.refused:
                    assert await heard(router, 0.05) is None
            assert {"another's routing id": 1} == router.refused
            with pytest.raises(PeerGone, match="another key took its routing id"):
                router.send_nowait(peer, [b"for Alice"])


@real_time
async def test_a_key_that_is_taken_back_is_cut_off_at_once() -> None:
    """Alice is heard no more and sent nothing more, and cannot come again; Bob, who is new on the list, can."""
    only_alice, only_bob = (KeyRing(clients={pair.public: ""}) for pair in (ALICE, BOB))

    async with protected() as router:
        router.let_in(only_alice)
        async with dealer(ALICE) as alice, dealer(ALICE) as again, dealer(BOB) as bob:
            alice.connect(router.addresses[0])
            alice.send_nowait([b"hello"])
            found = await heard(router, 30)
            assert found is not None
            router.let_in(only_bob)
            with pytest.raises(PeerGone, match="its key was withdrawn"):
                router.send_nowait(found[0], [b"for Alice"])
            alice.send_nowait([b"are you there?"])
            again.connect(router.addresses[0])
            again.send_nowait([b"let me in again"])
            assert await heard(router) is None
            bob.connect(router.addresses[0])
            bob.send_nowait([b"hello"])
            found = await heard(router, 30)
            assert found is not None
            assert BOB.public == router.key_of(found[0])
            # Alice's connection was ended, and libzmq tries again.
            assert ["key not listed"] == list(router.refused)
            assert 2 <= router.refused["key not listed"]


def test_routing_ids_begin_at_random() -> None:
    """Two fresh processes do not count from the same number: who knew the next one could end the process."""
    code = (
        "import trio, zmq\n"
        "from shapestream.transport.zeromq import DealerSocket\n"
        "from shapestream.transport.router import RouterSocket\n"
        "async def main():\n"
        "    with RouterSocket() as router, DealerSocket() as dealer:\n"
        "        router.bind('inproc://x')\n"
        "        dealer.connect('inproc://x')\n"
        "        dealer.send_nowait([b'x'])\n"
        "        print(router.receive_nowait()[0][0].hex())\n"
        "trio.run(main)\n"
    )
    code = code.replace("with Router", "async with Router")
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert 11 == len(first) == len(second)
    assert first != second


# ---------------------------------------------------------------- ZAP, as libzmq asks it


def asked(*credentials: bytes, domain: bytes = PROTECTED_DOMAIN, mechanism: bytes = b"CURVE") -> list[bytes]:
    """A request of libzmq's."""
    return [b"", b"1.0", b"7", domain, b"10.0.0.1", b"", mechanism, *credentials]


def test_zap_names_the_key() -> None:
    """The reply repeats the request's id; its user id is the key, which then comes with each message."""
    verdict = answer_zap(asked(z85.decode(ALICE.public)), RING.clients)
    assert verdict is not None
    assert verdict.refused is None
    assert [b"", b"1.0", b"7", b"200", b"OK", ALICE.public.encode(), b""] == verdict.reply


def test_zap_lets_anybody_in_at_home() -> None:
    """A connection without a key is let in where no key is wanted."""
    verdict = answer_zap(asked(domain=LOCAL_DOMAIN, mechanism=b"NULL"), {})
    assert verdict is not None
    assert [b"200", LOCAL.encode()] == [verdict.reply[3], verdict.reply[5]]


@pytest.mark.parametrize(
    "request_frames",
    [
        pytest.param(asked(z85.decode(STRANGER.public)), id="unlisted"),
        pytest.param(asked(), id="no credentials"),
        pytest.param(asked(b"short"), id="short"),
        pytest.param(asked(z85.decode(ALICE.public), b"more"), id="two credentials"),
        pytest.param(asked(mechanism=b"NULL"), id="NULL at a protected address"),
        pytest.param(asked(z85.decode(ALICE.public), domain=LOCAL_DOMAIN), id="CURVE in the wrong domain"),
        pytest.param(asked(b"alice", b"password", mechanism=b"PLAIN"), id="PLAIN"),
        pytest.param(asked(domain=b"", mechanism=b"NULL"), id="no domain"),
        pytest.param([b"", b"2.0", *asked(z85.decode(ALICE.public))[2:]], id="another version"),
    ],
)
def test_zap_refuses_the_rest(request_frames: list[bytes]) -> None:
    """Always with 400, without a user, and in the same words, whatever was wrong."""
    verdict = answer_zap(request_frames, RING.clients)
    assert verdict is not None
    assert verdict.refused is not None
    assert [b"", b"1.0", b"7", b"400", b"no access", b"", b""] == verdict.reply


@pytest.mark.parametrize("frames", [[], [b""], [b"x", *asked()[1:]], asked()[:5]])
def test_zap_does_not_answer_what_is_no_request(frames: list[bytes]) -> None:
    """There is nobody to answer."""
    assert answer_zap(frames, {}) is None


# ---------------------------------------------------------------- key files


def test_keys_are_kept_and_read(tmp_path: Path) -> None:
    """What is written is read back; the secret is for its owner alone, from the beginning."""
    pair = new_key_pair()
    before = os.umask(0)
    try:
        secret, public = write_key_pair(tmp_path / "keys", "camera", pair)
    finally:
        os.umask(before)
    assert pair == read_key_pair(secret)
    assert pair.public == public_key(str(public)) == public_key(pair.public)
    assert [0o700, 0o600, 0o644] == [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys", secret, public)
    ]
    assert {pair.public: "camera"} == read_key_folder(tmp_path / "keys")
    assert pair.secret not in public.read_text()
    assert pair.secret not in repr(pair)


def test_pyzmq_reads_our_files(tmp_path: Path) -> None:
    """They are certificates as CZMQ and pyzmq have them."""
    from zmq.auth import load_certificate

    pair = new_key_pair()
    secret, public = write_key_pair(tmp_path, "a", pair)
    assert (pair.public.encode(), pair.secret.encode()) == load_certificate(secret)
    assert (pair.public.encode(), None) == load_certificate(public)


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    """A second one of the same name is refused, and the first stays."""
    pair = new_key_pair()
    secret, public = write_key_pair(tmp_path, "a", pair)
    with pytest.raises(ConfigurationError, match="is there already"):
        write_key_pair(tmp_path, "a", new_key_pair())
    secret.unlink()
    with pytest.raises(ConfigurationError, match="is there already"):
        write_key_pair(tmp_path, "a", new_key_pair())
    assert pair.public == public_key(str(public))


@pytest.mark.parametrize("mode", [0o604, 0o660, 0o601, 0o777])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    """The error says what to do, and does not show the key."""
    pair = new_key_pair()
    secret, _ = write_key_pair(tmp_path, "a", pair)
    secret.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600") as caught:
        read_key_pair(secret)
    assert pair.secret not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key file"),
        ("x" * 5000, "longer than"),
        (f'public-key = "{ALICE.public}"\n', "no secret key"),
        (f'public-key = "{ALICE.public}"\nsecret-key = "{BOB.secret}"\n', "do not belong together"),
        (f'public-key = "{ALICE.public}"\npublic-key = "{BOB.public}"\n', "no key file"),
        (f'public-key = "{ALICE.public[:-1]}"\n', "no key file"),
        (f'secret-key = "{ALICE.secret}"\n', "no key file"),
    ],
    # The keys are new in each process, and a test's name is not.
    ids=["empty", "long", "public", "of two pairs", "public twice", "cut off", "secret"],
)
def test_files_that_hold_no_pair(tmp_path: Path, text: str, words: str) -> None:
    """Each is refused by name, and no secret is shown."""
    path = tmp_path / "a.secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_key_pair(path)
    assert not any(pair.secret in str(caught.value) for pair in (ALICE, BOB))


def test_paths_that_are_no_key_files(tmp_path: Path) -> None:
    """Nothing there, a folder, a named pipe, a secret where a public key is wanted: an error each, no hang."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    secret, _ = write_key_pair(tmp_path, "a", new_key_pair())
    for path, words in (
        (tmp_path / "none", "shapestream keys new"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "pipe", "is not a regular file"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            read_key_pair(path)
    with pytest.raises(ConfigurationError, match=r"name the \.pub file"):
        public_key(str(secret))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_key_folder(tmp_path / "none")
