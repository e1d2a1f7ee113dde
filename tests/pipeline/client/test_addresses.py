"""Addresses that no client can connect to: the error comes at once, and names what was probably meant."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from shapestream import blocking
from shapestream.errors import TransportError, Unavailable


def refusal(address: Any, kind: type[Exception] = TransportError) -> str:
    """What is said of the address."""
    with pytest.raises(kind) as raised:
        blocking.connect(address, connect_timeout=0.05)
    return str(raised.value)


async def test_each_face_says_what_was_probably_meant(face: Any) -> None:
    """Before anything is sent or waited for."""
    face.address = "localhost:5601"
    with pytest.raises(TransportError, match=r"did you mean tcp://localhost:5601\?"):
        async with face.connect():
            pytest.fail("connected to nowhere")


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("localhost:5601", "did you mean tcp://localhost:5601?"),
        ("127.0.0.1:5601", "did you mean tcp://127.0.0.1:5601?"),
        ("[::1]:5601", "did you mean tcp://[::1]:5601?"),
        ("//localhost:5601", "did you mean tcp://localhost:5601?"),
        ("tcp:localhost:5601", "did you mean tcp://localhost:5601?"),
        ("tcp:/localhost:5601", "did you mean tcp://localhost:5601?"),
        ("http://localhost:5601", "did you mean tcp://localhost:5601?"),
        ("http://localhost:5601/", "did you mean tcp://localhost:5601?"),
        ("localhost", "write tcp://HOST:PORT or ipc://PATH"),
        ("", "write tcp://HOST:PORT or ipc://PATH"),
        ("5601", "write tcp://HOST:PORT or ipc://PATH"),
        (":5601", "write tcp://HOST:PORT or ipc://PATH"),
        ("/run/shapestream.sock", "did you mean ipc:///run/shapestream.sock?"),
        ("./run/s", "did you mean ipc://./run/s?"),
        ("run/server.sock", "did you mean ipc://run/server.sock?"),
        ("ipc:/run/s", "did you mean ipc:///run/s?"),
        ("tcp://localhost", "write tcp://HOST:PORT"),
        ("tcp://:5601", "write tcp://HOST:PORT"),
        ("tcp://localhost:", "write tcp://HOST:PORT"),
        ("tcp://localhost:http", "write tcp://HOST:PORT"),
        ("tcp://localhost:0", "write tcp://HOST:PORT"),
        ("tcp://localhost:65536", "write tcp://HOST:PORT"),
        ("tcp://localhost:5601/", "write tcp://HOST:PORT"),
        ("tcp://*:5601", "did you mean tcp://127.0.0.1:5601?"),
        ("ipc://", "write ipc://PATH"),
    ],
)
def test_a_mistyped_address_names_what_was_meant(address: str, meant: str) -> None:
    """The whole of the right address, where it can be told."""
    said = refusal(address)
    assert said.startswith(repr(address))
    assert said.endswith(meant)


def test_a_folder_is_no_socket(tmp_path: Path) -> None:
    """libzmq would try again for ever, and say nothing."""
    assert refusal(f"ipc://{tmp_path}").endswith("is a folder; name the socket in it")


def test_a_file_is_no_socket(tmp_path: Path) -> None:
    """The YAML of the server, for instance."""
    (tmp_path / "server.yaml").touch()
    assert "no socket" in refusal(f"ipc://{tmp_path}/server.yaml")


def test_a_path_where_no_server_listens_yet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may come after its client, so this is said when the time is over; a relative path is shown whole."""
    said = refusal(f"ipc://{tmp_path}/run/s", Unavailable)
    assert f"there is no socket {tmp_path}/run/s" in said
    monkeypatch.chdir(tmp_path)
    assert f"there is no socket {tmp_path}/s" in refusal("ipc://s", Unavailable)


def test_a_socket_that_nothing_listens_at_is_not_called_missing(tmp_path: Path) -> None:
    """A server that was killed leaves it behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(f"{tmp_path}/s")
    assert "there is no socket" not in refusal(f"ipc://{tmp_path}/s", Unavailable)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path) -> None:
    """Its permissions belong to another user, perhaps."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert f"{closed}/s: Permission denied" in refusal(f"ipc://{closed}/s", Unavailable)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 110])
def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path, name: str) -> None:
    """Longer than a file's name, or than a socket's path."""
    assert "too long" in refusal(f"ipc://{tmp_path}/{name}")


def test_an_abstract_socket_is_no_file(tmp_path: Path) -> None:
    """So nothing is said of files."""
    assert "there is no socket" not in refusal(f"ipc://@{tmp_path}/s", Unavailable)


@pytest.mark.parametrize("address", [Path("/run/s"), 5601, None])
def test_what_is_no_text_is_no_address(address: Any) -> None:
    """Nor anything that makes a connection."""
    assert repr(address) in refusal(address, TypeError)
