"""The faults of a chaos run. Each is injected while work is under way, and says how much of that it hit.

To hit work, a fault lies in wait: the ledger tells at once when a run begins or ends somewhere, and the signal follows
within a fraction of a millisecond. Whether it did hit is not assumed, but counted afterwards from all facts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from tests.e2e.chaos.stage import Stage
from tests.e2e.conftest import Broken

AMBUSH_S = 5.0
IN_REPLY_S = 1.0
"""How long the server may stand still until a call ends: longer than any, and shorter than the silence of a worker."""
LIES_WANTED = 3
WITHDRAWALS = 100
UNSEEN = 0.3
"""How often a worker dies while the server stands still."""
FEW_DESCRIPTORS = 4
"""Fewer than the server keeps back."""


@dataclass(slots=True, kw_only=True)
class Injection:
    """One fault that was injected."""

    kind: str
    at: float
    until: float
    """When it was over: the process continued, the limit lifted, the next server started."""
    hit: int
    """Requests, or their runs, that were under way there and then."""


class Faults:
    """Injects faults of all kinds into the processes on stage."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._random = random.Random(seed)
        self.kinds: dict[str, Callable[[], tuple[float, int]]] = {
            "worker killed mid-batch": self._kill_worker,
            "worker killed mid-reply": self._kill_worker_in_reply,
            "worker killed mid-chain": self._kill_worker_in_chain,
            "worker stopped mid-batch": lambda: self._stop_worker("run"),
            "worker stopped mid-reply": lambda: self._stop_worker("ran"),
            "worker ten times slower": self._slow_worker,
            "worker lies": self._lie,
            "request kills its worker": lambda: self._misdeed("poison"),
            "request hangs": lambda: self._misdeed("hang"),
            "withdrawals on OpenVINO": self._withdraw,
            "server killed mid-batch": lambda: self._kill_server("run"),
            "server killed mid-reply": lambda: self._kill_server("ran"),
            "server stopped mid-batch": lambda: self._stop_server("run"),
            "server stopped mid-reply": lambda: self._stop_server("ran"),
            "client killed mid-batch": lambda: self._kill_client("run"),
            "client killed mid-reply": lambda: self._kill_client("ran"),
            "client stopped mid-batch": lambda: self._stop_client("run"),
            "client stopped mid-reply": lambda: self._stop_client("ran"),
            "reloaded, then poisoned": self._reload,
            "log cannot grow": self._fix_log_size,
            "log's device full": self._log_to_full_device,
            "no file descriptors": self._take_descriptors,
            "all restarted in turn": self._restart_everything,
        }

    def inject(self, kind: str) -> Injection:
        """Injects one, and takes it back where it lasts. Raises `Broken` when processes do not come back."""
        at, hit = self.kinds[kind]()
        return Injection(kind=kind, at=at, until=time.monotonic(), hit=hit)

    def _ask(self, question: str, **details: Any) -> Any:
        return self._stage.ledger.ask(question, **details)

    def _lie_in_wait(self, fact: str, **whose: int) -> None:
        self._ask("watch", wanted=fact, within_s=AMBUSH_S, **whose)

    def _pause(
        self, pid: int, durations_s: tuple[float, ...], meanwhile: Callable[[], None] = lambda: None
    ) -> float:
        """Stops a process for one of these times; returns since when."""
        os.kill(pid, signal.SIGSTOP)
        since = time.monotonic()
        meanwhile()
        time.sleep(self._random.choice(durations_s))
        with contextlib.suppress(ProcessLookupError):  # given up, and ended, while it stood still
            os.kill(pid, signal.SIGCONT)
        self._stage.ledger.tell("paused", since=since, until=time.monotonic())
        return since

    # ---------------------------------------------------------------- workers

    def _worker(self) -> int:
        """One of the server's own workers that is at work."""
        self._stage.until("a worker runs a batch", self._at_work)
        return self._at_work() or self._random.choice(list(self._stage.workers()))

    def _at_work(self) -> int | None:
        pids = list(self._stage.workers())
        self._random.shuffle(pids)
        since = time.monotonic() - 0.5
        return next((pid for pid in pids if self._ask("runs_of", pid=pid, since=since)), None)

    def _kill_worker(self) -> tuple[float, int]:
        pid = self._worker()
        self._lie_in_wait("run", pid=pid)
        at = self._kill(pid)
        return at, self._ask("cut_short", pid=pid)

    def _kill_worker_in_chain(self) -> tuple[float, int]:
        """It runs the last stage of a chain, whose other stages are done."""
        fact = self._ask("watch", wanted="run", within_s=AMBUSH_S, step="restore")
        pid = self._worker() if fact is None else fact["pid"]
        at = self._kill(pid)
        return at, self._ask("cut_short", pid=pid)

    def _kill_worker_in_reply(self) -> tuple[float, int]:
        """Its reply is on its way to the server, which stands still until the worker is dead.

        A reply takes a fraction of a millisecond. On a busy machine it is with the client before a signal that waited for it
        has even been sent. So a call that takes ten times longer is awaited, and the server reads nothing before its end.
        """
        pid, server = self._worker(), self._stage.server.pid
        mark = self._stage.folder / f"slow-{pid}"
        mark.touch()
        self._lie_in_wait("ran", pid=pid)  # the next call sees the mark
        self._lie_in_wait("run", pid=pid)
        os.kill(server, signal.SIGSTOP)
        since = time.monotonic()
        try:
            self._ask("watch", wanted="ran", within_s=IN_REPLY_S, pid=pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            at = time.monotonic()
        finally:
            os.kill(server, signal.SIGCONT)
        self._stage.ledger.tell("paused", since=since, until=time.monotonic())
        mark.unlink()
        self._gone(pid)
        return at, self._ask("in_reply", at=at, pid=pid)

    def _kill(self, pid: int) -> float:
        """Ends a worker, and returns when; one that ended by itself meanwhile is a miss."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        self._gone(pid)
        return at

    def _stop_worker(self, moment: str) -> tuple[float, int]:
        pid = self._worker()
        self._lie_in_wait(moment, pid=pid)
        at = self._pause(pid, (0.3, 1.0, 2.5))
        return at, self._ask("in_run" if moment == "run" else "in_reply", pid=pid, at=at)

    def _slow_worker(self) -> tuple[float, int]:
        pid = self._worker()
        mark = self._stage.folder / f"slow-{pid}"
        at = time.monotonic()
        mark.touch()
        time.sleep(1.0)
        self._lie_in_wait("run", pid=pid)
        mark.unlink()
        return at, self._ask("runs_of", pid=pid, since=at)

    def _lie(self) -> tuple[float, int]:
        before: int = self._ask("lies")
        at = time.monotonic()
        liar = self._stage.start_liar(self._random.randrange(100))
        self._stage.until("some lies", lambda: self._ask("lies") - before >= LIES_WANTED)
        liar.send_signal(self._random.choice((signal.SIGTERM, signal.SIGKILL)))
        self._stage.expected_to_end.add(liar.pid)
        self._ended(liar)
        return at, self._ask("lies") - before

    def _misdeed(self, kind: str) -> tuple[float, int]:
        at = time.monotonic()
        number = self._stage.start_client("--misdeed", kind)
        self._ended(self._stage.clients.pop(number))
        return at, self._ask("cut_short", client=number)

    def _withdraw(self) -> tuple[float, int]:
        """A client withdraws requests on a model file while they are queued or run, and other requests of it go on."""
        at = time.monotonic()
        number = self._stage.start_client("--withdraw", str(WITHDRAWALS))
        self._ended(self._stage.clients.pop(number))
        return at, self._ask("withdrawn", client=number)

    # ---------------------------------------------------------------- the server

    def _kill_server(self, moment: str) -> tuple[float, int]:
        self._worker()
        self._lie_in_wait(moment)
        at = self._replace_server(signal.SIGKILL)
        return at, self._ask("in_flight" if moment == "run" else "in_reply", at=at)

    def _replace_server(self, number: signal.Signals, *, log: str = "log") -> float:
        """Ends the server by this signal, and starts the next; returns when it was sent."""
        server = self._stage.server
        self._stage.workers()
        self._stage.expected_to_end.add(server.pid)
        server.send_signal(number)
        at = time.monotonic()
        self._ended(server)
        self._stage.start_server(log=log)
        return at

    def _stop_server(self, moment: str) -> tuple[float, int]:
        self._worker()
        self._lie_in_wait(moment)
        at = self._pause(self._stage.server.pid, (0.3, 1.0, 3.0), meanwhile=self._kill_unseen)
        return at, self._ask("in_flight" if moment == "run" else "in_reply", at=at)

    def _reload(self) -> tuple[float, int]:
        """SIGHUP, also several in a row, and then a request that kills its worker: new processes are protected as well.

        It may come while a worker that has just been replaced is replaced again.
        """
        self._lie_in_wait("run")
        at = time.monotonic()
        old = set(self._stage.workers())
        for _ in range(self._random.choice((1, 1, 2, 3))):
            self._stage.server.send_signal(signal.SIGHUP)
            time.sleep(self._random.choice((0.0, 0.3)))
        self._stage.until("all workers are others", lambda: old.isdisjoint(self._stage.workers()))
        hit: int = self._ask("in_flight", at=at)
        number = self._stage.start_client("--misdeed", "poison")
        self._ended(self._stage.clients.pop(number))
        ends = self._ask("summary", client=number)["ends"]
        if ends != {"poisoned": 1}:
            raise Broken(f"a poison after a reload ended as {ends}")
        return at, hit

    def _kill_unseen(self) -> None:
        """Sometimes a worker dies while nobody looks: its end, its last reports and its silence are found at once."""
        workers = list(self._stage.workers())
        if workers and self._random.random() < UNSEEN:
            os.kill(self._random.choice(workers), signal.SIGKILL)

    # ---------------------------------------------------------------- clients

    def _kill_client(self, moment: str) -> tuple[float, int]:
        number = self._random.choice(list(self._stage.clients))
        self._lie_in_wait(moment, client=number)
        client = self._stage.clients.pop(number)
        self._stage.expected_to_end.add(client.pid)
        client.kill()
        at = time.monotonic()
        self._stage.ledger.tell("killed", client=number, at=at)
        self._ended(client)
        hit = self._ask("in_flight" if moment == "run" else "in_reply", at=at, client=number)
        self._stage.start_served_clients()
        return at, hit

    def _stop_client(self, moment: str) -> tuple[float, int]:
        number = self._random.choice(list(self._stage.clients))
        self._lie_in_wait(moment, client=number)
        at = self._pause(self._stage.clients[number].pid, (0.3, 1.0, 5.0) if moment == "run" else (0.3, 1.0))
        return at, self._ask("in_flight" if moment == "run" else "in_reply", at=at, client=number)

    # ---------------------------------------------------------------- what the machine runs out of

    def _limit(self, which: int, value: int) -> list[tuple[int, tuple[int, int]]]:
        """Lowers a limit of the server and its workers from outside; returns what it was, by process."""
        before = []
        for pid in (self._stage.server.pid, *self._stage.workers()):
            soft, hard = resource.prlimit(pid, which)
            resource.prlimit(pid, which, (value, hard))
            before.append((pid, (soft, hard)))
        return before

    def _lift(self, which: int, before: list[tuple[int, tuple[int, int]]]) -> None:
        for pid, limits in before:
            if psutil.pid_exists(pid):
                resource.prlimit(pid, which, limits)

    def _fix_log_size(self) -> tuple[float, int]:
        """No file of theirs may grow: what a new client's greeting would add to the log cannot be written."""
        self._lie_in_wait("run")
        at = time.monotonic()
        before = self._limit(resource.RLIMIT_FSIZE, 0)
        size = self._stage.log.stat().st_size
        try:
            self._stage.start_served_clients()
            self._stage.clients.pop(max(self._stage.clients)).send_signal(signal.SIGTERM)
            fixed = self._stage.log.stat().st_size == size
        finally:
            self._lift(resource.RLIMIT_FSIZE, before)
        return at, self._ask("in_flight", at=at) if fixed else 0

    def _log_to_full_device(self) -> tuple[float, int]:
        """A server whose every line is refused with ENOSPC, from its first to its last."""
        self._replace_server(signal.SIGKILL, log="/dev/full")
        self._worker()
        self._lie_in_wait("run")
        at = self._replace_server(signal.SIGTERM)
        return at, self._ask("in_flight", at=at)

    def _take_descriptors(self) -> tuple[float, int]:
        """First few are left, so that nobody new gets in, then none, so that a worker that dies cannot be followed."""
        server = self._stage.server.pid
        victim = self._worker()
        door = self._stage.folder / "s.sock"
        before = resource.prlimit(server, resource.RLIMIT_NOFILE)
        at = time.monotonic()
        self._leave_descriptors(server, FEW_DESCRIPTORS)
        try:
            self._stage.until("nobody new gets in", lambda: not door.exists())
            self._leave_descriptors(server, 0)
            self._lie_in_wait("run", pid=victim)
            at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            time.sleep(1.0)
            alone = len(self._stage.workers()) < 2
        finally:
            resource.prlimit(server, resource.RLIMIT_NOFILE, before)
        self._stage.until("new clients get in again", door.exists)
        self._stage.until("the worker is followed", lambda: len(self._stage.workers()) == 2)
        return at, self._ask("in_flight", at=at) if alone else 0

    def _leave_descriptors(self, pid: int, free: int) -> None:
        """The limit is one of numbers, and the lowest free one is taken next: it goes where so many lie below it."""
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        limit = next(
            itertools.islice((number for number in itertools.count() if number not in used), free, None)
        )
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))

    # ---------------------------------------------------------------- everything in turn

    def _restart_everything(self) -> tuple[float, int]:
        """Each worker, the server, each client: asked to end, under load, and followed by another."""
        self._lie_in_wait("run")
        at = time.monotonic()
        old = set(self._stage.workers())
        self._stage.server.send_signal(signal.SIGHUP)
        self._stage.until("all workers are others", lambda: not old & set(self._stage.workers()))
        self._replace_server(signal.SIGTERM)
        old_clients = list(self._stage.clients)
        self._stage.start_served_clients(len(old_clients))
        for number in old_clients:
            client = self._stage.clients.pop(number)
            client.send_signal(signal.SIGTERM)
            self._ended(client)
        return at, self._ask("in_flight", at=at)

    def _gone(self, worker: int) -> None:
        self._stage.until(f"the end of worker {worker}", lambda: worker not in self._stage.workers())

    def _ended(self, popen: subprocess.Popen[bytes]) -> None:
        self._stage.until(f"the end of {popen.args!r}", lambda: popen.poll() is not None)
