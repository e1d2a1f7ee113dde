"""Where sockets listen, who may, and what happens when the server goes and comes back."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import zmq
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.transport.witness import Witness

from shapestream.errors import AddressInUse, TransportError
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import DealerSocket

LISTEN = """
import sys, trio
from shapestream.transport.router import RouterSocket
async def main():
    async with RouterSocket() as router:
        router.bind(sys.argv[1])
        print("listening", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


def refused(address: str, words: str, kind: type[TransportError] = TransportError) -> None:
    """Asserts that nobody can listen there."""
    router = RouterSocket()
    try:
        with pytest.raises(kind, match=words):
            router.bind(address)
        assert () == router.addresses
    finally:
        router.close()


@real_time
async def test_a_second_server_is_refused_an_ipc_path(tmp_path: Path) -> None:
    """libzmq would let it steal the path silently; the first server keeps its clients instead."""
    address = f"ipc://{tmp_path}/s"

    async with RouterSocket() as first, DealerSocket() as dealer, trio.open_nursery() as nursery:
        first.bind(address)
        await nursery.start(first.run)
        refused(address, "another process listens there", AddressInUse)
        dealer.connect(address)
        dealer.send_nowait([b"hello"])
        with trio.fail_after(120):
            ((_, frames),) = await first.receive()
        assert [b"hello"] == frames
        first.close()


def test_the_path_of_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    """Another process is refused while the first lives; after kill -9 its stale socket file is in nobody's way."""
    address = f"ipc://{tmp_path}/s"
    process = subprocess.Popen([sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert "listening\n" == process.stdout.readline()
        refused(address, "another process listens there", AddressInUse)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert (tmp_path / "s").exists()
    router = RouterSocket()
    router.bind(address)
    assert (address,) == router.addresses
    router.close()
    assert not (tmp_path / "s").exists()
    router.close()


def test_a_path_where_a_stranger_listens_is_refused(tmp_path: Path) -> None:
    """A process that knows nothing of our lock file keeps its socket as well."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"{tmp_path}/s")
        stranger.listen(1)
        refused(f"ipc://{tmp_path}/s", "another process listens there", AddressInUse)


@real_time
@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1", "localhost"])
async def test_hosts(host: str) -> None:
    """IPv6 stands in brackets; localhost is IPv4, on both sides. One socket listens at both kinds."""
    async with RouterSocket() as router, DealerSocket() as dealer, trio.open_nursery() as nursery:
        try:
            router.bind("tcp://[::1]:*")
        except TransportError:
            pytest.skip("this machine has no IPv6")
        router.bind("tcp://localhost:*")
        await nursery.start(router.run)
        await nursery.start(dealer.run)
        six, four = router.addresses
        assert ("tcp://[::1]:", "tcp://127.0.0.1:") == (six[:12], four[:16])
        dealer.connect(six if host == "[::1]" else four.replace("127.0.0.1", host))
        dealer.send_nowait([b"hello"])
        ((_, frames),) = await router.receive()
        assert [b"hello"] == frames
        nursery.cancel_scope.cancel()


def test_a_missing_folder_is_made_private(tmp_path: Path) -> None:
    """Only the user who runs the server can reach its socket."""
    router = RouterSocket()
    router.bind(f"ipc://{tmp_path}/run/s")
    assert 0o700 == stat.S_IMODE((tmp_path / "run").stat().st_mode)
    router.close()


@pytest.mark.parametrize(("folder", "mode"), [(0o700, 0o660), (0o750, 0o660), (0o755, 0o755)])
def test_the_group_of_a_closed_folder_may_connect(tmp_path: Path, folder: int, mode: int) -> None:
    """Whatever the umask is; where others may enter the folder, the umask says what it always said."""
    place = tmp_path / "run"
    place.mkdir()
    place.chmod(folder)
    before = os.umask(0o022)
    router = RouterSocket()
    try:
        router.bind(f"ipc://{place}/s")
        assert mode == stat.S_IMODE((place / "s").stat().st_mode)
    finally:
        os.umask(before)
        router.close()


def test_a_folder_in_the_way_of_the_socket_is_named(tmp_path: Path) -> None:
    """The socket is bound as PATH.new first."""
    (tmp_path / "s.new").mkdir()
    refused(f"ipc://{tmp_path}/s", "s.new is in the way")
    (tmp_path / "s.new").rmdir()
    router = RouterSocket()
    router.bind(f"ipc://{tmp_path}/s")
    router.close()


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    """A file in the way, a file for a folder, a path that is too long: each is said, and nothing is deleted."""
    file = tmp_path / "file"
    file.write_text("precious")
    refused(f"ipc://{file}", "is a file, and no socket; remove it")
    refused(f"ipc://{file}/s", "Not a directory|File exists")
    refused(f"ipc://{tmp_path}/{'x' * 120}", "longer than 103 bytes")
    assert "precious" == file.read_text()


def test_a_tcp_port_in_use_is_refused() -> None:
    """The error names the address."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(f"tcp://127.0.0.1:{port}", f"127.0.0.1:{port}: another process", AddressInUse)


@pytest.mark.parametrize("address", ["tcp://not-a-host-or-port", "nonsense", "udp://127.0.0.1:1", ""])
def test_addresses_that_are_none(address: str) -> None:
    """Both sides say which address they cannot use."""
    refused(address, "cannot listen there")
    dealer = DealerSocket()
    with pytest.raises(TransportError, match="cannot connect"):
        dealer.connect(address)
    dealer.close()


@real_time
async def test_one_server_listens_at_several_addresses(tmp_path: Path) -> None:
    """Clients over ipc and tcp are served by one socket; `addresses` has the real ports."""

    async with RouterSocket() as router, trio.open_nursery() as nursery:
        router.bind(f"ipc://{tmp_path}/s")
        router.bind("tcp://127.0.0.1:*")
        await nursery.start(router.run)
        assert not router.addresses[1].endswith("*")
        for address in router.addresses:
            async with DealerSocket() as dealer:
                dealer.connect(address)
                dealer.send_nowait([address.encode()])
                with trio.fail_after(120):
                    ((_, frames),) = await router.receive()
                assert [address.encode()] == frames
        router.close()


@real_time
async def test_what_is_sent_before_the_server_is_there_waits(tmp_path: Path) -> None:
    """Client and server may start in any order."""
    address = f"ipc://{tmp_path}/s"

    async with DealerSocket() as dealer, RouterSocket() as router, trio.open_nursery() as nursery:
        await nursery.start(dealer.run)
        dealer.connect(address)
        dealer.send_nowait([b"early"])
        router.bind(address)
        await nursery.start(router.run)
        with trio.fail_after(120):
            ((peer, frames),) = await router.receive()
            router.send_nowait(peer, [b"answer"])
            assert [[b"answer"]] == await dealer.receive()
        assert [b"early"] == frames
        nursery.cancel_scope.cancel()


@real_time
async def test_a_connection_outlives_its_server(tmp_path: Path) -> None:
    """libzmq connects to a server's successor by itself, which knows the client under a new peer id."""
    address = f"ipc://{tmp_path}/s"

    async def hear(router: RouterSocket, dealer: DealerSocket) -> bytes:
        """The peer id under which the router hears the dealer; what the old server had taken is lost."""
        while True:
            dealer.send_nowait([b"are you there?"])
            with trio.move_on_after(0.02):
                return (await router.receive())[0][0]

    async with DealerSocket() as dealer, trio.open_nursery() as nursery:
        await nursery.start(dealer.run)
        dealer.connect(address)
        peers = set()
        for _ in range(3):
            async with RouterSocket() as router:
                router.bind(address)
                await nursery.start(router.run)
                with trio.fail_after(120):
                    peer = await hear(router, dealer)
                    router.send_nowait(peer, [b"yes"])
                    assert [b"yes"] == (await dealer.receive())[0]
                peers.add(peer)
        assert 3 == len(peers)
        dealer.close()


def test_a_closed_server_does_not_remove_its_successors_path(tmp_path: Path) -> None:
    """libzmq cleans up some time after the close, when the path may be the next server's: it must not know it."""
    address = f"ipc://{tmp_path}/s"
    with zmq.Context() as context:
        witness = Witness(context)
        first, second = RouterSocket(context=witness), RouterSocket()
        first.bind(address)
        assert (address,) == first.addresses
        assert f"{address}.new".encode() == witness.made[0].get(zmq.LAST_ENDPOINT)
        first.close()
        second.bind(address)
        # The end of the context waits until libzmq has cleaned up after the first one.
    assert (tmp_path / "s").is_socket()
    second.close()
    assert ["s.lock"] == [path.name for path in tmp_path.iterdir()]


@real_time
async def test_a_plain_zeromq_client_is_understood(tmp_path: Path) -> None:
    """A DEALER or REQ of any other library is a peer like ours; REQ's empty delimiter is just a frame."""

    async with RouterSocket() as router, trio.open_nursery() as nursery:
        router.bind(f"ipc://{tmp_path}/s")
        await nursery.start(router.run)
        with zmq.Context() as context, context.socket(zmq.REQ) as client:
            client.connect(f"ipc://{tmp_path}/s")
            client.send_multipart([b"a", b"b"])
            with trio.fail_after(120):
                ((peer, frames),) = await router.receive()
            assert [b"", b"a", b"b"] == frames
            router.send_nowait(peer, frames)
            assert [b"a", b"b"] == client.recv_multipart()
        router.close()
