"""The admin port's settings, what it does without its libraries, and the word to systemd."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shapestream.errors import ConfigurationError
from shapestream.settings import AdminSettings, LoadedSettings, load_settings
from shapestream_workers.access import open_admin_port, worker_admin
from shapestream_workers.upkeep import notify, watchdog_s

MODEL = "models: [{name: m, path: m.xml}]\n"


def load(folder: Path, server: str) -> LoadedSettings:
    """Settings with this `server`; model files need not exist."""
    path = folder / "x.yaml"
    path.write_text(f"server: {server}\n{MODEL}")
    return load_settings(path, files_must_exist=False)


@pytest.mark.parametrize(
    "server",
    [
        "{admin: 127.0.0.1:9090}",
        "{admin: 'localhost:0'}",
        "{admin: '[::1]:9090'}",
        "{admin: {address: '[::1]:9090'}}",
        "{admin: 0.0.0.0:9090, security: network}",
        "{admin: {address: 0.0.0.0:9090, token_file: token}}",
        "{admin: null}",
    ],
)
def test_where_it_may_listen(tmp_path: Path, server: str) -> None:
    """On this machine, and beyond with a token, or where the network is safe."""
    assert load(tmp_path, server).settings.models


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (
            "{admin: 0.0.0.0:9090}",
            'x.yaml:1:10: server.admin: "0.0.0.0:9090" is open to other machines (add token_file',
        ),
        ("{admin: 'here:9090'}", '"here:9090" is open to other machines'),
        ("{admin: {address: '[::]:9090'}}", '"[::]:9090" is open to other machines'),
        ("{admin: 9090}", 'server.admin.address: expected HOST:PORT, got 9090 (write "127.0.0.1:9090")'),
        ("{admin: true}", "expected HOST:PORT, got true"),
        ("{admin: ':9090'}", 'expected HOST:PORT, got ":9090"'),
        ("{admin: '*:9090'}", 'expected HOST:PORT, got "*:9090"'),
        ("{admin: 'tcp://127.0.0.1:9090'}", "expected HOST:PORT"),
        ("{admin: '127.0.0.1:65536'}", "expected HOST:PORT"),
        ("{admin: '127.0.0.1'}", "expected HOST:PORT"),
        ("{admin: {}}", 'server.admin: missing "address"'),
    ],
)
def test_where_it_may_not(tmp_path: Path, server: str, words: str) -> None:
    """Each in a line that says where and what to do."""
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, server)
    assert words in "\n".join(caught.value.problems)


def test_a_worker_beyond_loopback_needs_what_its_server_needs(tmp_path: Path) -> None:
    """The token of the server's port serves for it, too."""
    plain = load(tmp_path, "{admin: 127.0.0.1:9090}")
    assert AdminSettings(address="127.0.0.1:1") == worker_admin(plain, "127.0.0.1:1")
    for address, words in (("0.0.0.0:1", "open to other machines"), ("nowhere", "expected HOST:PORT")):
        with pytest.raises(ConfigurationError, match=words):
            worker_admin(plain, address)
    assert worker_admin(load(tmp_path, "{security: network}"), "0.0.0.0:1").token_file is None
    token = load(tmp_path, "{admin: {address: 127.0.0.1:9090, token_file: token}}")
    assert str(tmp_path / "token") == worker_admin(token, "0.0.0.0:1").token_file


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff"])
def test_a_token_is_one_word(tmp_path: Path, content: bytes) -> None:
    """Anything else in its file ends the start."""
    pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(0o600)
    loaded = load(tmp_path, "{admin: {address: 127.0.0.1:0, token_file: token}}")
    with pytest.raises(ConfigurationError, match=r"server\.admin: .*token"):
        open_admin_port(loaded, loaded.settings.server.admin)


def test_without_its_libraries_there_is_no_port_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the extra."""
    for module in ("admin", "admin_pages"):
        monkeypatch.delitem(sys.modules, f"shapestream.serving.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    loaded = load(tmp_path, "{admin: 127.0.0.1:0}")
    with capture_logs() as lines:
        assert open_admin_port(loaded, loaded.settings.server.admin) is None
    (line,) = lines
    assert ("warning", "no admin port", "pip install 'shapestream[admin]'") == (
        line["log_level"],
        line["event"],
        line["advice"],
    )


def test_systemd_is_told_at_an_abstract_socket_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name begins with @; without a name, and with one that nobody listens at, nothing happens."""
    name = f"shapestream-test-{id(monkeypatch)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert b"READY=1" == systemd.recv(100)
    with capture_logs() as lines:
        notify("READY=1")
        monkeypatch.delenv("NOTIFY_SOCKET")
        notify("READY=1")
    assert ["systemd was not told"] == [line["event"] for line in lines]


def test_the_watchdog_is_for_the_process_that_systemd_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit the environment, and are not meant."""
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    for given, expected in (("30000000", 30.0), ("0", None), ("", None), ("soon", None)):
        monkeypatch.setenv("WATCHDOG_USEC", given)
        assert expected == watchdog_s()
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() is None
