"""Ports that speak HTTP or gRPC: the connections that the system has at one."""

from __future__ import annotations

import socket

import pytest

from shapestream.errors import ConfigurationError
from shapestream.transport.http_listener import connections_at, listen_at, place_of


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_connections_at_a_port_are_counted(host: str) -> None:
    """Accepted or not, also those whose peer waits for a last answer; not those that this side has ended."""
    try:
        listener = listen_at(f"{host}:0")
    except ConfigurationError:
        pytest.skip("no IPv6 here")
    place = place_of(listener)
    with listener:
        assert 0 == connections_at(place)
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as peer, socket.create_connection(address):
            accepted, _ = listener.accept()
            assert 2 == connections_at(place)
            peer.shutdown(socket.SHUT_WR)
            with accepted:
                assert b"" == accepted.recv(1)
                assert 2 == connections_at(place)
            assert 1 == connections_at(place)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is neither some nor none."""

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr("shapestream.transport.http_listener.Path.read_text", refuse)
    assert connections_at("127.0.0.1:80") is None
