"""`shapestream stats` and `top` at real servers, and the last minute as HTTP and the SDK tell it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.e2e.admin import METERED, get, port_of
from tests.e2e.conftest import COMMAND, PATIENCE_S, PYTHONPATH, temporary_workplace

from shapestream.errors import ModelError
from shapestream.testing.scripted_server import ScriptedServer, serve_in_thread

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with two models; `other` has answered three requests and failed one."""
    for place in temporary_workplace(tmp_path_factory):
        served = place.serve(METERED)
        served.place = place
        with served.client() as client:
            for rows in (1, 2, 3):
                client.infer("other", {"x": np.ones((rows, 2), np.float32)})
            with pytest.raises(ModelError):
                client.infer("other", {"x": np.full((1, 2), 14, np.float32)})
        yield served


def test_http_the_sdk_and_both_commands_tell_the_same(metered: Any) -> None:
    """Numbers by model; the one that nobody used is told with zeros."""
    with metered.client() as client:
        told = [client.statistics()]
    told.append(get(port_of(metered), "/statistics")[1])
    for command in (["stats"], ["top", "--once"], ["top"]):
        ran = metered.place.run(command[0], metered.address, *command[1:], "--json")
        assert (0, "") == (ran.returncode, ran.stderr)
        told.append(json.loads(ran.stdout))
    for one in told:
        assert 4 == one["last_minute"]["models"]["other"]["arrived"]
        other, gated = (one["last_minute"]["models"][name] for name in ("other", "gated"))
        assert (3, {"model_error": 1}, 6, 12, 0) == tuple(
            other[name] for name in ("results", "failures", "rows", "elements_computed", "elements_padding")
        )
        assert 3 == other["total_us"]["count"] == sum(count for _, count in other["total_us"]["buckets"])
        assert 0 < other["run_us"]["p50"] <= other["total_us"]["p99"]
        assert 0 == gated["arrived"] == gated["total_us"]["count"]
        assert {"other", "gated"} == set(one["scheduler"]["models"])
        assert told[0].keys() == one.keys()


@pytest.mark.parametrize("command", ["stats", "top"])
def test_tables_for_people_fit_80_columns(metered: Any, command: str) -> None:
    """Without a terminal `top` draws once."""
    ran = metered.place.run(command, str(metered.config))
    assert (0, "") == (ran.returncode, ran.stderr)
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert metered.address in lines[0]
    rows = [line.split() for line in lines if line.startswith("other")]
    assert 3 == len(rows), "requests, batches, failures"
    assert ["other", "model_error", "1"] == rows[2]
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("command", ["stats", "top"])
def test_servers_that_are_absent_or_old_are_one_line(workplace: Any, command: str) -> None:
    """Status 1, for a script too; a bad address is told from an absent server."""
    gone = f"ipc://{workplace.folder}/gone.sock"
    ran = workplace.invoke(command, gone, "--timeout", "0.2")
    assert (1, 1) == (ran.exit_code, len(ran.stderr.splitlines()))
    assert 1 == workplace.invoke(command, "nonsense://x").exit_code
    assert 3 == workplace.invoke(command, "no.yaml").exit_code
    with serve_in_thread(ScriptedServer(), f"ipc://{workplace.folder}/old.sock") as old:
        ran = workplace.invoke(command, old)
        assert (
            1,
            f"unavailable: the server at {old} tells no last minute: it is older than this command\n",
        ) == (
            ran.exit_code,
            ran.stderr,
        )
        assert ran.stderr.strip() in json.loads(workplace.invoke(command, old, "--json").stdout)["errors"]


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - or no Ctrl-C comes
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "TERM": "xterm"},
        )
        self.seen = ""

    def see(self, pattern: str) -> str:
        """Read on until this appears; what was read before is forgotten."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < give_up_at, f"no {pattern!r} in {self.seen[-4000:]!r}"
            if select.select([self._ours], [], [], 1.0)[0]:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found[0]

    def press(self, key: bytes) -> None:
        """A key, or what a terminal makes of it."""
        os.write(self._ours, key)

    def end(self) -> int:
        """The exit status; the terminal is as it was."""
        status = self.process.wait(PATIENCE_S)
        assert self.before == termios.tcgetattr(self._theirs)
        return status

    def close(self) -> None:
        """The end of the test, however it went."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.mark.parametrize(
    "key", [b"q", pytest.param(b"\x03", marks=pytest.mark.thorough)], ids=["q", "Ctrl-C"]
)
def test_top_is_live_says_when_the_server_is_lost_and_ends_by_a_key(workplace: Any, key: bytes) -> None:
    """Numbers follow the server, a stopped one is tried again, a new one at the address is shown."""
    config = METERED.replace("admin: 127.0.0.1:0", "heartbeat_s: 0.2")
    served = workplace.serve(config)
    terminal = Terminal("top", served.address)
    try:
        terminal.see(r"requests 0, results 0")
        with served.client() as client:
            client.infer("other", {"x": np.ones((1, 2), np.float32)})
        terminal.see(r"requests 1, results 1")
        terminal.see(r"Workers, last \d+ s")
        served.send(signal.SIGSTOP)
        terminal.see(r"no answer for \d+ s, trying on")
        served.send(signal.SIGCONT)
        terminal.see(r"\x1b\[2mq ends")
        served.kill()
        terminal.see(r"no answer for \d+ s, trying on")
        workplace.serve(served.config)
        terminal.see(r"requests 0, results 0")
        terminal.press(key)
        assert 0 == terminal.end()
    finally:
        terminal.close()
