"""The benchmarks' peer: its client of plain sockets, what is said without its environment, and smoke runs within."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import typer
from benchmarks import endless, peer
from benchmarks.http_client import HOST, HttpClient
from tests.e2e.conftest import ROOT

Answer = Callable[[bytes], Sequence[bytes]]
"""From the body of a request to the pieces of its answer."""


def _requests(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of the requests of one connection."""
    with connection, connection.makefile("rb") as stream:
        while stream.readline():
            length = 0
            while (line := stream.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            yield stream.read(length)


@contextmanager
def _server(answer: Answer) -> Iterator[int]:
    """An HTTP server with a thread for each connection; its port."""
    with socket.create_server((HOST, 0)) as listener:
        threads: list[threading.Thread] = []

        def serve(connection: socket.socket) -> None:
            for body in _requests(connection):
                pieces = answer(body)
                for piece in pieces:
                    connection.sendall(piece)
                if not pieces:
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def _reversed_in_pieces(body: bytes) -> list[bytes]:
    """The body backwards, its head and itself in pieces."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body[::-1])
    return [answer[:9], answer[9:30], answer[30:]]


def test_each_answer_comes_with_the_place_of_its_request() -> None:
    """Though answers come in pieces, in any order, and connections are used again; bodies pass a socket's buffer."""
    bodies = [b"%d:" % number + bytes(number * 40_000) for number in range(40)]
    with _server(_reversed_in_pieces) as port, HttpClient(port, "/") as client:
        for _ in range(2):
            assert {n: body[::-1] for n, body in enumerate(bodies)} == dict(client.stream(bodies, 8))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda _: [b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"], "500 Oh"),
        (lambda _: [b"HTTP/1.1 200 OK\r\n\r\n"], "200 OK"),
        (lambda _: [], "closed a connection"),
    ],
    ids=["status", "no length", "closed"],
)
def test_a_peer_that_fails_ends_the_benchmark(answer: Answer, says: str) -> None:
    """An answer of another status, one without a length, and none."""
    with _server(answer) as port, HttpClient(port, "/") as client:
        with pytest.raises(AssertionError, match=says):
            list(client.stream([b"body"], 1))


def test_without_its_environment_the_benchmark_says_how_to_make_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """And starts nothing."""
    monkeypatch.setattr(peer, "READY", tmp_path / "missing")
    with pytest.raises(typer.BadParameter, match="make peer"):
        endless.main(smoke=True, with_peer=True)


def _endless(found: Any) -> None:
    """Both forms have a row, and each of our ways is compared with one of them."""
    rows = {row["way"]: row for row in found[0]["rows"]}
    assert rows.keys() >= {"mosec, each alone, no padding", "mosec, by 16, padded"}
    compared = [way for way, row in rows.items() if row["/ mosec"]]
    assert [
        "in process, no padding",
        "in process, padded",
        "two workers, no padding",
        "two workers, padded",
    ] == compared


def _limit(found: Any) -> None:
    """Five loads on three servers; ours are compared."""
    assert 15 == len(found["rows"])
    assert 10 == len([row for row in found["rows"] if row["rate / mosec's"]])


@pytest.mark.e2e
@pytest.mark.skipif(not peer.READY.exists(), reason="needs `make peer`")
@pytest.mark.parametrize(
    ("module", "promises"), [("endless", _endless), ("limit", _limit)], ids=["endless", "limit"]
)
def test_the_peer_takes_part(module: str, promises: Callable[[Any], None]) -> None:
    """As a smoke run, in a process of its own; a wrong answer would have ended it."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--smoke", "--json", "--peer"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert 0 == ran.returncode, ran.stderr
    promises(json.loads(ran.stdout))
