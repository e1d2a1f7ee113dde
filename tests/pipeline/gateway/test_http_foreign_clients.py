"""Clients that others have written, and TLS."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import h11
import pytest
import requests
import trio
from tests.pipeline.gateway.http_site import GET, Hold, Peer, Site, report, serve, served
from trio.testing import wait_all_tasks_blocked

from shapestream.errors import ConfigurationError
from shapestream.transport.http_listener import listen_at, place_of
from shapestream.web.connection import LINGER_S
from shapestream.web.messages import HttpLimits
from shapestream.web.server import HttpServer, for_all, listeners_of

BODY = bytes(range(256)) * 20_000
"""5 MB."""


def by_http_client(port: int) -> None:
    """Python's own: several requests on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for body in (b"abc", BODY, iter([b"abc", b"", b"def"]), None):
        expected = b"abcdef" if not isinstance(body, bytes | None) else body or b""
        connection.request("POST", "/a", body)
        assert expected == connection.getresponse().read()
    connection.request("HEAD", "/a")
    assert b"" == connection.getresponse().read()
    connection.close()


def by_urllib(port: int) -> None:
    """Python's other: a connection for each request."""
    for body in (b"abc", BODY):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/a", body, timeout=60) as answer:
            assert body == answer.read()


def by_requests(port: int) -> None:
    """It asks for compression by itself."""
    with requests.Session() as session:
        for body in (b"abc", BODY, iter([b"abc", b"def"])):
            expected = body if isinstance(body, bytes) else b"abcdef"
            answer = session.post(f"http://127.0.0.1:{port}/a", data=body, timeout=60)
            assert expected == answer.content
            assert ("gzip" if len(expected) > 1024 else None) == answer.headers.get("content-encoding")


def by_h11(port: int) -> None:
    """It is strict about what a server may send."""
    with socket.create_connection(("127.0.0.1", port), 60) as own:
        connection = h11.Connection(h11.CLIENT)
        for method in ("GET", "HEAD", "POST"):
            headers = [("Host", "x"), ("Content-Length", "3")]
            for event in (
                h11.Request(method=method, target="/", headers=headers),
                h11.Data(data=b"abc"),
                h11.EndOfMessage(),
            ):
                own.sendall(connection.send(event))
            events: list[object] = []
            while not events or not isinstance(events[-1], h11.EndOfMessage):
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(own.recv(1000))
                else:
                    events.append(event)
            assert isinstance(events[0], h11.Response)
            assert (b"" if method == "HEAD" else b"abc") == b"".join(
                bytes(event.data) for event in events if isinstance(event, h11.Data)
            )
            connection.start_next_cycle()


@served()
@pytest.mark.parametrize("converse", [by_http_client, by_urllib, by_requests, by_h11])
async def test_a_foreign_client(site: Site, converse: Callable[[int], None]) -> None:
    """It gets back what it sent."""
    await trio.to_thread.run_sync(converse, site.port)


def too_large_by_requests(port: int) -> None:
    """The answer comes while the client still sends."""
    for _ in range(5):
        answer = requests.post(f"http://127.0.0.1:{port}/", data=bytes(3_000_000), timeout=60)
        assert 413 == answer.status_code
        assert "1000 are taken" in answer.json()["error"]


@served(max_body_bytes=1000)
async def test_a_client_that_sends_too_much_gets_its_answer(site: Site) -> None:
    """The connection is not reset under its hands."""
    await trio.to_thread.run_sync(too_large_by_requests, site.port)


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost and its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = f"{openssl} req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost"
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    command_line = [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", *files]
    subprocess.run(command_line, check=True, capture_output=True)
    both = folder / "both"
    both.write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return both


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """The server's side."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def test_tls(tls: ssl.SSLContext, certificate: Path) -> None:
    """Short and long requests on one connection, and a client that sends too much."""

    def converse(port: int) -> None:
        with requests.Session() as session:
            session.trust_env = False  # it may name certificates of its own
            session.verify = str(certificate)
            for body in (b"abc", BODY, b"abc"):
                answer = session.post(f"https://127.0.0.1:{port}/a", data=body, timeout=60)
                assert body == answer.content
            refused = session.post(f"https://127.0.0.1:{port}/a", data=BODY * 2, timeout=60)
            assert 413 == refused.status_code

    async def play(site: Site) -> None:
        await trio.to_thread.run_sync(converse, site.port)

    serve(play, tls=tls, max_body_bytes=6_000_000)


def test_a_tls_peer_hangs_up(tls: ssl.SSLContext, certificate: Path) -> None:
    """Its handler is cancelled as any other."""
    hold = Hold()

    async def play(site: Site) -> None:
        peer = await site.connect()
        context = ssl.create_default_context(cafile=certificate)
        stream = trio.SSLStream(peer.stream, context, server_hostname="127.0.0.1", https_compatible=True)
        await stream.send_all(GET)
        await wait_all_tasks_blocked()
        assert 1 == site.server.handled_requests
        peer.stream.socket.close()
        await wait_all_tasks_blocked()
        assert (1, 0) == (hold.cancelled, site.server.open_connections)

    serve(play, hold, tls=tls)


def test_plain_http_on_a_tls_port(tls: ssl.SSLContext) -> None:
    """The connection ends, and the server goes on."""

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.send(GET)
        await peer.end()
        await peer.stream.aclose()
        await wait_all_tasks_blocked()
        assert 0 == site.server.open_connections

    serve(play, tls=tls)


def test_a_silent_tls_peer_is_idle(tls: ssl.SSLContext) -> None:
    """The handshake is part of the time that a connection may be without a request."""

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.sent_and_read(b"\x16\x03\x01")
        for seconds in (76, LINGER_S):
            await site.pass_time(seconds)
        assert 0 == site.server.open_connections

    serve(play, tls=tls, virtual_time=True)


# ---------------------------------------------------------------- listeners


def port_of(listener: object) -> int:
    """Where it listens."""
    assert isinstance(listener, trio.SocketListener)
    return int(listener.socket.getsockname()[1])


async def close_all(listeners: object) -> None:
    """Gives the ports back."""
    for listener in listeners:  # type: ignore[attr-defined]
        await listener.aclose()


def test_an_address_in_use_is_refused() -> None:
    """By its words, before anything is served."""
    with listen_at("127.0.0.1:0") as first, pytest.raises(ConfigurationError, match="in use"):
        listen_at(place_of(first))


@pytest.mark.parametrize(
    "address",
    ["", "8000", ":8000", "127.0.0.1:x", "127.0.0.1:99999", "192.0.2.1:80", "no.such.invalid:80"],
)
def test_an_address_that_cannot_be_used(address: str) -> None:
    """The error names it."""

    with pytest.raises(ConfigurationError) as error:
        listen_at(address)
    assert f'"{address}"' in str(error.value)


def test_ipv6() -> None:
    """The handler sees the peer's address without the port."""

    async def main() -> None:
        try:
            listeners = listeners_of(listen_at("[::1]:0"))
        except ConfigurationError:
            pytest.skip("there is no IPv6 here")
        server = HttpServer(for_all(report), HttpLimits())
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, listeners)
            async with await trio.open_tcp_stream("::1", port_of(listeners[0])) as stream:
                assert "::1" == json.loads((await Peer(stream).ask(GET)).body)["peer"]
            server.stop(grace_s=30.0)

    trio.run(main)
