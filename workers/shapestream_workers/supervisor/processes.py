"""Carry out the supervisor's actions on real processes: the workers, or the gateways, of one server.

A worker ends when its parent ends, for any reason: its stdin is a pipe, and it ends when the other end is closed
(`process.py`). It has its own session, so Ctrl-C reaches only the server, which then stops its workers in order. It
shares the server's stderr. It writes a line to stdout when it is ready, when it wants to be replaced, and when it cannot
use its configuration.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import structlog
import trio

from shapestream.serving.worker_port import LastState
from shapestream.telemetry.presence import Presence, WorkerPresence, WorkerPresences
from shapestream.web.ending import LEAVE
from shapestream_engine.machine import private_bytes_of, resident_bytes_of
from shapestream_workers.process import (
    MAX_LINE_BYTES,
    NAME_VARIABLE,
    PROBLEM_LINE,
    READY_LINE,
    REPLACE_LINE,
    name_of_start,
)
from shapestream_workers.supervisor.core import (
    Action,
    Event,
    GiveUp,
    KeepWorker,
    KillWorker,
    LeaveRequested,
    MoveTraffic,
    ReplacementWanted,
    Restarted,
    RestartRequested,
    StartWorker,
    StopNow,
    StopRequested,
    Supervisor,
    TellToLeave,
    TerminateWorker,
    WakeupDue,
    WorkerExited,
    WorkerReady,
)
from shapestream_workers.supervisor.replacements import ProcessState, RestartPolicy

log = structlog.get_logger()

LAST_LINES_S = 0.5
"""Seconds to read the last lines of an ended process. Its children may have inherited the pipe and keep it open."""
WAIT_SHARE = 0.8
"""Part of the time to finish in which a process that others replace goes on, if requests wait for what only it has."""
EXIT_NOT_STARTED = 127
"""Exit status, as in a shell, of a process that could not be started."""

EndTold: TypeAlias = Callable[[str, str, bool], Awaitable[LastState]]
"""Callback for the end of a process, with its role, its name at the server, and whether it died by itself."""


async def _no_answer(role: str, worker: str, died: bool) -> LastState:
    return LastState()


async def _at_once(worker: str) -> None:
    return


class GaveUp(Exception):
    """No worker is left, or one cannot start because of its configuration; the message says why."""

    def __init__(self, message: str, *, configuration: bool) -> None:
        super().__init__(message)
        self.configuration = configuration


@dataclass(slots=True, kw_only=True, eq=False)
class _RunningWorker:
    """One process that exists."""

    name: str
    role: str
    registered: str
    """The name under which it registers at the server."""
    process: trio.Process
    is_ready: bool = False
    """True once the server has welcomed it."""
    was_killed: bool = False
    """True after it was killed because it hung."""
    was_asked_to_end: bool = False
    """True after it was killed because it ignored a request to end: no batch is to blame."""
    said: str = ""
    """The problems that it reported of its configuration."""


class SupervisedProcesses:
    """Processes by name, each with its command line. `run` keeps them running until `stop`."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        policy: RestartPolicy | None = None,
        *,
        kind: Literal["worker", "gateway"] = "worker",
        descriptors: Sequence[int] = (),
        spare: Collection[str] = (),
        ended: EndTold = _no_answer,
        given_up: Callable[[str, str], None] = lambda role, reason: None,
        revived: Callable[[str], None] = lambda role: None,
        all_ready: Callable[[], None] = lambda: None,
        moved: Callable[[], None] = lambda: None,
        finished: Callable[[str], Awaitable[None]] = _at_once,
    ) -> None:
        """Call `ended` for each end of a process. `kind` is what logs call them. They inherit `descriptors`.

        `spare`: roles without which the others go on, even if their configuration never could be used.

        `given_up` is called with each role that is not started again, and the reason; `revived` with a role that was given
        up and is started again on request; `all_ready` whenever every role has a ready process again; `moved` when processes
        are held no more (`holds`). `finished` returns when a process that others have replaced, by its name at the server,
        may be asked to end.
        """
        self._commands = dict(commands)
        self._kind = kind
        self._descriptors = descriptors
        self._spare = frozenset(spare)
        self._ended = ended
        self._finished = finished
        self._policy = policy or RestartPolicy()
        self._told_given_up = given_up
        self._told_revived = revived
        self._supervisor = Supervisor(commands, policy)
        self._running: dict[str, _RunningWorker] = {}
        """The processes by name."""
        self._sound: set[str] = set()
        """Roles of which a process has been ready once, so their configuration can be used."""
        self._told_all_ready = all_ready
        self._told_moved = moved
        self._presences = WorkerPresences(commands)
        self._changed = trio.Event()
        self._over = False
        """True after the end of `run`."""
        self._failure: GaveUp | None = None
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        return repr(self._supervisor)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; a replacement has its own name, such as `w0+1`."""
        return {name: worker.process.pid for name, worker in self._running.items()}

    @property
    def ready(self) -> frozenset[str]:
        """The names of the processes that the server has welcomed."""
        return frozenset(name for name, worker in self._running.items() if worker.is_ready)

    @property
    def presences(self) -> Mapping[str, WorkerPresence]:
        """The presence of each configured worker, by role."""
        return self._presences.by_worker

    def memory_bytes(self) -> dict[str, int]:
        """Return the resident bytes by role: the sum over its processes, 0 for a process that has just ended."""
        found = dict.fromkeys(self._commands, 0)
        for worker in self._running.values():
            if worker.role in found:  # else it ends, since its role was removed
                found[worker.role] += resident_bytes_of(worker.process.pid)
        return found

    def private_bytes(self) -> tuple[dict[str, int], int]:
        """Return the private bytes of the process that serves, by role, and those of all others, which are about to end."""
        serving, others = dict.fromkeys(self._commands, 0), 0
        for name, worker in self._running.items():
            nbytes = private_bytes_of(worker.process.pid)
            held, state = self._supervisor.is_held(name), self._supervisor.state_of(name)
            if worker.is_ready and not held and state is ProcessState.RUNNING and worker.role in serving:
                serving[worker.role] = nbytes
            else:
                others += nbytes
        return serving, others

    def start_seconds(self) -> Mapping[str, float]:
        """Return how long the last process of each role took to be ready, by role."""
        return self._supervisor.start_seconds()

    async def run(self) -> None:
        """Start all workers and keep them running; return when all have ended after `stop`.

        Raises GaveUp. No process is left running, however it ends.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                self._act(self._supervisor.begin(trio.current_time()))
                while not self._supervisor.finished and self._failure is None:
                    await self._wait()
                    # Not by `_handle`, which would wake this loop again, for ever: only actions are news for `restart`.
                    actions = self._decide(WakeupDue())
                    self._act(actions)
                    if actions:
                        self._changed.set()
                self._nursery.cancel_scope.cancel()
        finally:
            self._over = True
            self._changed.set()
        if self._failure is not None:
            raise self._failure

    def _log(self, write: Callable[..., None], event: str, name: str, **facts: Any) -> None:
        """Write a line about one process, such as `worker started`."""
        write(f"{self._kind} {event}", **{self._kind: name}, **facts)

    def owns(self, worker: str) -> bool:
        """Tell whether the worker that registered under this name is one of these processes and has not ended."""
        return self._registered_as(worker) is not None

    @property
    def moves(self) -> bool:
        """True while processes wait for each other, to get batches together."""
        return self._supervisor.moves

    def holds(self, worker: str) -> bool:
        """Tell whether the process that registered under this name gets no batches yet."""
        found = self._registered_as(worker)
        return found is not None and self._supervisor.is_held(found.name)

    def leaves(self, worker: str) -> bool:
        """Tell whether the process that registered under this name was asked to finish."""
        found = self._registered_as(worker)
        return found is not None and self._supervisor.state_of(found.name) is ProcessState.STOPPING

    def greeted(self, worker: str) -> None:
        """Note, in a task of its own, that all slots of the process that registered under this name have greeted."""
        if (found := self._registered_as(worker)) is not None:
            self._nursery.start_soon(self._note_greeted, found)

    async def _note_greeted(self, worker: _RunningWorker) -> None:
        if worker.name in self._running:
            self._note_ready(worker)

    def _registered_as(self, name: str) -> _RunningWorker | None:
        return next((worker for worker in self._running.values() if worker.registered == name), None)

    def kill(self, worker: str, reason: str) -> None:
        """Kill the hanging process that registered under this name. It is restarted as after any other death."""
        hanging = self._registered_as(worker)
        if hanging is not None and not hanging.was_killed:
            hanging.was_killed = True
            self._log(log.error, "killed", hanging.name, pid=hanging.process.pid, why=reason)
            self._presences.reason(hanging.role, reason)
            hanging.process.kill()

    async def restart(
        self,
        commands: Mapping[str, Sequence[str]] | None = None,
        fresh: frozenset[str] | None = None,
        *,
        start_s: float | None = None,
        at_once: bool = False,
    ) -> Restarted | None:
        """Replace processes, one after the other. Each goes on until its successor is ready, or with `at_once` all are.

        `commands`: of all that are wanted from now on; None: as before. `fresh`: which of them are new, or are to be
        replaced; None: all. Each has `start_s` seconds to be ready (`RestartRequested`). Workers that were given up are
        started again. Returns when each was replaced, cannot be, or has a process that does not come up in time; None if
        `run` ends before that.
        """
        supervisor, before, roles = self._supervisor, self._supervisor.starts, self._supervisor.roles
        if commands is not None:
            for role in commands.keys() - self._commands.keys():
                self._presences.add(role)
                self._sound.add(role)  # its failure is no reason to end the others
            for role in self._commands.keys() - commands.keys():
                self._presences.remove(role)
            self._commands = dict(commands)
        wanted = None if commands is None else tuple(commands)
        asked = RestartRequested(fresh=fresh, roles=wanted, start_s=start_s, at_once=at_once)
        self._handle(asked)
        while True:
            now = trio.current_time()
            restarted = supervisor.restarted_since(before, now, asked, roles)
            if restarted is not None or self._over:
                return restarted
            with trio.CancelScope(deadline=supervisor.next_late(now)):
                await self._changed.wait()
                await trio.lowlevel.checkpoint()  # `run` makes the next event

    def leave(self) -> None:
        """Tell every process that its server leaves. `run` returns when each has ended, by itself or by `stop`."""
        self._handle(LeaveRequested())

    def stop(self, grace_s: float) -> None:
        """Let every worker finish, within this time."""
        self._handle(StopRequested(grace_s=grace_s))

    def stop_now(self) -> None:
        """End every worker at once."""
        self._handle(StopNow())

    async def _wait(self) -> None:
        """Wait until an event was handled, or the supervisor's next wake-up is due."""
        wakeup = self._supervisor.next_wakeup()
        with trio.CancelScope(deadline=float("inf") if wakeup is None else wakeup):
            await self._changed.wait()
        if self._changed.is_set():  # otherwise `restart` may still wait for it
            self._changed = trio.Event()

    def _handle(self, event: Event) -> None:
        self._act(self._decide(event))
        self._changed.set()

    def _decide(self, event: Event) -> Sequence[Action]:
        return self._supervisor.handle(event, trio.current_time(), jitter=random.random())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartWorker(worker=name, attempt=attempt, role=role):
                    revived = self.presences[role].presence is Presence.GIVEN_UP
                    self._presences.started(role, trio.current_time())
                    if attempt:
                        self._log(log.info, "restarts", name, attempt=attempt)
                    elif name != role:
                        self._log(log.info, "is replaced", role, by=name)
                    if revived:
                        self._told_revived(role)
                    self._nursery.start_soon(self._live, name, role)
                case MoveTraffic(workers=names):
                    log.info("traffic moves", to=list(names))
                    self._told_moved()
                case TellToLeave(worker=name):
                    if name in self._running:
                        self._running[name].process.send_signal(LEAVE)
                case TerminateWorker(worker=name):
                    self._nursery.start_soon(self._let_go, name)
                case KeepWorker(worker=name, reason=reason):
                    self._log(log.error, "cannot be replaced", name, why=reason)
                case KillWorker(worker=name, why=reason):
                    self._log(log.warning, "killed", name, why=reason)
                    self._presences.reason(self._supervisor.role_of(name), reason)
                    if name in self._running:
                        self._running[name].was_asked_to_end = True
                        self._running[name].process.kill()
                case GiveUp():
                    self._give_up(action)

    async def _let_go(self, name: str) -> None:
        """Ask a process to finish. One that others replace may be the last with what requests wait for, and serves those."""
        worker = self._running.get(name)
        if worker is None:
            return
        if not self._supervisor.stopping:
            with trio.move_on_after(self._policy.drain_s * WAIT_SHARE):
                await self._finished(worker.registered)
        if self._running.get(name) is worker:
            worker.process.terminate()

    def _give_up(self, action: GiveUp) -> None:
        self._log(log.error, "given up", action.worker, why=action.reason)
        role = self._supervisor.role_of(action.worker)
        self._presences.given_up(role, action.reason)
        self._told_given_up(role, action.reason)
        message = f"{self._kind} {action.worker} is given up: {action.reason}"
        if action.configuration and role not in self._sound | self._spare:
            self._failure = GaveUp(message, configuration=True)
        elif self._supervisor.hopeless:
            self._failure = GaveUp(f"{message}; none is left", configuration=action.configuration)

    async def _live(self, name: str, role: str) -> None:
        """Run one process, from its start to its end."""
        worker = await self._started(name, role)
        if worker is None:
            return
        process, registered = worker.process, worker.registered
        if self._supervisor.state_of(name) is ProcessState.STOPPING:
            worker.was_asked_to_end = True
            process.kill()  # it was asked to end before it had started, and has nothing to finish
        self._log(log.info, "started", name, pid=process.pid)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, worker)
                status = await process.wait()
                nursery.cancel_scope.deadline = trio.current_time() + LAST_LINES_S
            self._log(log.info, "ended", name, pid=process.pid, status=status)
            self._presences.ended(role, process.pid, status, trio.current_time())
            died = status != 0 and not worker.was_asked_to_end
            last = await self._ended(role, registered, died)
        finally:
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
            del self._running[name]
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await trio.aclose_forcefully(pipe)
        self._handle(
            WorkerExited(
                worker=name,
                status=status,
                busy=died and last.busy,
                answered_at=last.answered_at,
                said=worker.said or last.refused,
            )
        )

    async def _started(self, name: str, role: str) -> _RunningWorker | None:
        """Start one process; None for one that cannot be started, which counts as its end."""
        registered = name_of_start(name)
        # Shielded: a process that exists must be in `_running` before any task can be cancelled.
        with trio.CancelScope(shield=True):
            try:
                process = await trio.lowlevel.open_process(
                    list(self._commands[role]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=self._descriptors,
                    env={**os.environ, NAME_VARIABLE: registered},
                )
            except OSError as error:
                self._log(log.error, "cannot be started", name, why=str(error))
                self._handle(
                    WorkerExited(worker=name, status=EXIT_NOT_STARTED, said=f"cannot be started: {error}")
                )
                return None
        worker = _RunningWorker(name=name, role=role, registered=registered, process=process)
        self._running[name] = worker  # with no checkpoint before
        return worker

    async def _listen(self, worker: _RunningWorker) -> None:
        """Read the lines that the worker writes to its stdout."""
        assert worker.process.stdout is not None  # asked for
        received = b""
        async for chunk in worker.process.stdout:
            *lines, received = (received + chunk).split(b"\n")
            received = received[:MAX_LINE_BYTES]
            for line in lines:
                if line + b"\n" == READY_LINE:
                    if not self._supervisor.is_held(worker.name):  # else its slots must have greeted
                        self._note_ready(worker)
                elif line + b"\n" == REPLACE_LINE:
                    self._handle(ReplacementWanted(worker=worker.name))
                elif line.startswith(PROBLEM_LINE):
                    worker.said = line.removeprefix(PROBLEM_LINE).decode(errors="replace")

    def _note_ready(self, worker: _RunningWorker) -> None:
        self._handle(WorkerReady(worker=worker.name))
        self._presences.serves(worker.role, worker.process.pid, trio.current_time())
        self._sound.add(worker.role)
        before = self._ready_roles()
        worker.is_ready = True
        if before != self._ready_roles() == set(self._commands):
            self._told_all_ready()
            if self._kind == "worker":
                log.info("workers ready", workers=sorted(self.ready))
            else:
                log.info("gateways ready", gateways=sorted(self.ready))

    def _ready_roles(self) -> set[str]:
        return {worker.role for worker in self._running.values() if worker.is_ready}
