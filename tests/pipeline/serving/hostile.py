"""What the tests of hostile input share: the server's process, messages packed by hand, and what must hold afterwards.

Every case runs beside an honest client of the same server. It ends with a typed error or the end of its own
connection, moves one counter, and writes one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from tests.entries import Hello, ModelOpened, OpenModel, Welcome
from tests.pipeline.serving.raw_messages import SCALED, Frames, assert_served, entry, message
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.real_sockets import dialled

MOST_GROWTH_BYTES = 50 << 20
INVERTED = 1
"""The number of the server's second model."""
COUNTERS = ("failures", "bad_messages", "duplicates", "strangers", "failed_handshakes")
"""Those that count what somebody did wrong."""
LINES = ("message refused", "request refused", "stranger", "handshakes failed", "worker refused")
"""The events that tell of it."""
_clients = count(1)


def some_client() -> bytes:
    """An id that no other client of these tests has."""
    return next(_clients).to_bytes(16, "big")


def flags(data: bytes | None, *, rows: int = 1, n: int = 4, frames: tuple[bytes, ...] = ()) -> Frames:
    """A request for `inverted`."""
    layout = ((0, "boolean", (rows, n)),)
    return message(entry(model=INVERTED, frames=len(frames), layout=layout, inline=(data,)), frames=frames)


# ---------------------------------------------------------------- the server, and who talks to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """The server's process."""

    process: subprocess.Popen[bytes]
    log: Path
    ipc: str
    tcp: str
    workers: str

    @property
    def resident_bytes(self) -> int:
        """What it holds now."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def lines(self) -> list[dict[str, Any]]:
        """The log so far. Raises for a line that is no JSON: somebody has broken out of a value."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def hostile_server() -> Iterator[Hostile]:
    """A server for one file of tests. At the end it must still be the same process."""
    with tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp") as folder:
        script = Path(__file__).with_name("hostile_server.py")
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, str(script), folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
            )
        try:
            assert process.stdout is not None
            where = json.loads(process.stdout.readline() or b"null")
            assert where is not None, log.read_text()
            ipc, tcp = where["clients"]
            yield Hostile(process=process, log=log, ipc=ipc, tcp=tcp, workers=where["workers"][0])
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@asynccontextmanager
async def client(address: str, number: bytes | None = None) -> AsyncIterator[RawPeer]:
    """A client whose session is open, and so are both models."""
    async with dialled(address) as opened:
        opened.say(Hello(client=number or some_client(), software="test"))
        await opened.hear(Welcome)
        for name, expected in (("scaled", SCALED), ("inverted", INVERTED)):
            opened.say(OpenModel(name=name))
            assert expected == (await opened.hear(ModelOpened)).number
        yield opened


async def counters(honest: RawPeer) -> dict[str, int]:
    """What was counted so far of what somebody did wrong, by `counter.label`."""
    values = await honest.statistics()
    found: dict[str, int] = {}
    for name in COUNTERS:
        value = values[name]
        found |= (
            {f"{name}.{key}": n for key, n in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found


class Watch:
    """What one case moved: `await done(counter)` says whether it was that counter, and one line."""

    def __init__(self, server: Hostile, honest: RawPeer, before: dict[str, int]) -> None:
        self.honest = honest
        self._server = server
        self._before = before
        self._lines = len(server.lines())

    async def done(self, counter: str | None, times: int = 1) -> list[dict[str, Any]]:
        """Check that the honest client is served, exactly this counter moved, and as many lines were written (`None`:
        none). Returns the lines."""
        await self.moved(counter, times)
        late = "" if counter is not None and "handshakes" in counter else "handshakes failed"
        written = [
            line
            for line in self._server.lines()[self._lines :]
            if line["event"] in LINES and line["event"] != late
        ]
        assert (0 if counter is None else times) == len(written), written
        return written

    async def moved(self, counter: str | None, times: int = 1) -> None:
        """The same of the counter; whoever failed wrote a line of another kind."""
        await assert_served(self.honest, 1_000)
        # Handshakes that failed come late: one may be that of a case before this one.
        moves = await self._moves()
        moved = {name: by for name, by in moves.items() if name == counter or "handshakes" not in name}
        expected = {} if counter is None else {counter: times}
        assert expected == moved, moved
        assert self._server.process.poll() is None

    async def has_moved(self, counter: str) -> bool:
        """Whether it has by now."""
        return counter in await self._moves()

    async def assert_only(self, *, bad: bool | None, port: str = "clients") -> None:
        """The honest client is served; one message was bad, none was, or perhaps one was (None).

        Handshakes that failed come late, also those of a case before this one.
        """
        await assert_served(self.honest, 1_001)
        moved = await self._moves()
        refused = moved.pop(f"bad_messages.{port}", 0)
        assert refused in ((0, 1) if bad is None else (int(bad),)), refused
        assert set(moved) <= {"failed_handshakes.clients", "failed_handshakes.workers"}, moved
        assert self._server.process.poll() is None

    async def _moves(self) -> dict[str, int]:
        before, after = self._before, await counters(self.honest)
        return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}


@asynccontextmanager
async def watched(server: Hostile, address: str | None = None) -> AsyncIterator[Watch]:
    """An honest client beside whatever the case does, and what that moves from now on."""
    async with client(address or server.ipc) as honest:
        yield Watch(server, honest, await counters(honest))


def assert_memory_kept(server: Hostile, at_first: int) -> None:
    """What all the cases of a file left behind in the server is next to nothing."""
    grown = server.resident_bytes - at_first
    assert grown <= MOST_GROWTH_BYTES, f"{grown / 2**20:.1f} MiB more than at first"
