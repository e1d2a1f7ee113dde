"""Simulated worker processes: a real `Worker` and session over slots of virtual time, and the supervisor that keeps them.

The supervisor's core is the real one; what it asks for is done here to tasks instead of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from random import Random

import trio
from tests.pipeline.protocol_simulation.agenda import Agenda
from tests.pipeline.protocol_simulation.journal import Journal
from tests.pipeline.protocol_simulation.network import Exchange, Line, error_of_clock_s
from tests.pipeline.protocol_simulation.plan import COMMON, RARE, Plan
from tests.pipeline.protocol_simulation.slots import SimulatedSlots

from shapestream.serving.server import Server
from shapestream.serving.worker_port import LastState
from shapestream_engine.signature import ModelSignature
from shapestream_workers.supervisor.core import (
    Action,
    Event,
    GiveUp,
    KeepWorker,
    KillWorker,
    MoveTraffic,
    StartWorker,
    StopRequested,
    Supervisor,
    TerminateWorker,
    WakeupDue,
    WorkerExited,
    WorkerReady,
)
from shapestream_workers.supervisor.replacements import ProcessState, RestartPolicy
from shapestream_workers.worker import Worker, WorkerEnd

# From a process's start to its greeting.
STARTUP_S = 0.3
# From a process's end to the news of it.
NEWS_S = 0.001
SLOWER = 10.0
EXIT_HANGS, SIGKILL, SIGSEGV = 1, -9, -11

PRESENT_PID: ContextVar[int] = ContextVar("PRESENT_PID")
"""The process that the running task belongs to."""


def models_of(role: str) -> Sequence[ModelSignature]:
    """What the workers of this role serve."""
    return (COMMON, RARE) if role == "w0" else (COMMON,)


class SimulatedWorker:
    """One process."""

    def __init__(
        self,
        name: str,
        role: str,
        pid: int,
        plan: Plan,
        agenda: Agenda,
        journal: Journal,
        random: Random,
        exchange: Exchange,
    ) -> None:
        self.pid = pid
        self.name = f"{name}-{self.pid}"  # no pid comes again here
        self._plan = plan
        self._agenda = agenda
        self._journal = journal
        self._random = random
        self._exchange = exchange
        self._scope = trio.CancelScope()
        self._lines: list[Line] = []
        self._slow_until = 0.0
        self.status: int | None = None
        """How it ended, once it is known that it did."""
        self.is_ready: Callable[[], None] = lambda: None
        self.slots = SimulatedSlots(
            self.name,
            agenda,
            journal,
            random,
            models={model.name: model for model in models_of(role)},
            slots=plan.slots,
            duration_s=self._duration_s,
            crash=self._crash,
            connect=lambda: self._dial(),
        )
        self._worker = Worker(self.name, self.slots, self._connect, ready=lambda: self.is_ready())

    async def run(self) -> int:
        """The process's life; returns its exit status."""
        PRESENT_PID.set(self.pid)
        with self._scope:
            await trio.sleep(STARTUP_S)
            async with trio.open_nursery() as self.slots.nursery:
                await self._worker.run()
                self.status = EXIT_HANGS if self._worker.end is WorkerEnd.SLOT_HANGS else 0
                self.slots.nursery.cancel_scope.cancel()
        self.slots.dead = True
        for line in self.lines:
            line.close()
        assert self.status is not None, "its scope is cancelled by `kill` alone"
        return self.status

    def kill(self, status: int = SIGKILL) -> None:
        """The process is gone in the middle of a word."""
        if self.status is None:
            self.status = status
            self.slots.dead = True
            self._journal.process_gone(self.name)
            for line in self.lines:
                line.kill()
            self._scope.cancel()

    def terminate(self) -> None:
        """It is asked to finish."""
        self._worker.drain()

    def slow_down(self, seconds: float) -> None:
        """For so long its calls take longer."""
        self._slow_until = trio.current_time() + seconds

    @property
    def line(self) -> Line | None:
        """The present connection of its control."""
        return self._lines[-1] if self._lines else None

    @property
    def lines(self) -> list[Line]:
        """All its present connections."""
        return [*self._lines[-1:], *self.slots.lines]

    def troubled_lines(self) -> list[Line]:
        """Those that one fault befalls: all of its host, or one of them."""
        lines = self.lines
        return lines if len(lines) < 2 or self._random.random() < 0.5 else [self._random.choice(lines)]

    @property
    def error_of_clock_s(self) -> float:
        """How far off it may be about when the server said something."""
        return 0.0 if self.line is None else error_of_clock_s(self.line.down)

    def _crash(self) -> None:
        self._journal.note(f"{self.name} crashes")
        self._journal.died_of(self.name)
        self.kill(SIGSEGV)

    def _duration_s(self, rows: int) -> float:
        seconds = self._plan.call_s + self._plan.row_s * rows
        slow = trio.current_time() < self._slow_until
        return seconds * (SLOWER if slow else 1.0) * (1.0 + 0.2 * self._random.random())

    def _dial(self) -> Line:
        line = self._exchange.connect(self.name)
        if self.status is not None:
            line.kill()
        return line

    def _connect(self) -> Line:
        line = self._dial()
        self._lines.append(line)
        return line


class Supervision:
    """Keeps workers of some roles running, as `SupervisedProcesses` does; itself the server's `ProcessOwner`."""

    def __init__(
        self,
        roles: Sequence[str],
        make: Callable[[str, str], SimulatedWorker],
        journal: Journal,
        random: Random,
        *,
        policy: RestartPolicy | None = None,
    ) -> None:
        """`make` starts a process of this name and role."""
        self._roles = list(roles)
        self._supervisor = Supervisor(roles, policy)
        self._make = make
        self._journal = journal
        self._random = random
        self.workers: dict[str, SimulatedWorker] = {}
        self._told_to_end: set[str] = set()
        self._changed = trio.Event()
        self._nursery: trio.Nursery
        self.server: Server | None = None
        """Told how processes end, and which roles were given up."""
        self._given_up: set[str] = set()

    async def run(self) -> None:
        """Until all have ended after `stop`, or were given up, or it is cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._act(self._supervisor.begin(trio.current_time()))
            while not self._supervisor.finished:
                wakeup = self._supervisor.next_wakeup()
                with trio.CancelScope(deadline=float("inf") if wakeup is None else wakeup):
                    await self._changed.wait()
                self._changed = trio.Event()
                self._act(self._decide(WakeupDue()))

    def stop(self, grace_s: float) -> None:
        """Lets every worker finish."""
        self.handle(StopRequested(grace_s=grace_s))

    def kill_all(self) -> None:
        """All at once, for they lose their parent."""
        for worker in self.workers.values():
            worker.kill()

    def handle(self, event: Event) -> None:
        """Something happened to a process."""
        self._act(self._decide(event))
        self._changed.set()

    # ------------------------------------------------------------ `ProcessOwner`

    def owns(self, worker: str) -> bool:
        """Whether this is a living process of ours."""
        return self._owned(worker) is not None

    @property
    def moves(self) -> bool:
        """Whether some wait for each other."""
        return self._supervisor.moves

    def holds(self, worker: str) -> bool:
        """Whether it waits for others."""
        name = self._name_of(worker)
        return name is not None and self._supervisor.is_held(name)

    def leaves(self, worker: str) -> bool:
        """Whether it was asked to finish."""
        name = self._name_of(worker)
        return name is not None and self._supervisor.state_of(name) is ProcessState.STOPPING

    def greeted(self, worker: str) -> None:
        """All its slots have."""
        if (name := self._name_of(worker)) is not None:
            self._nursery.start_soon(self._note_greeted, name)

    async def _note_greeted(self, name: str) -> None:
        if name in self.workers:
            self.handle(WorkerReady(worker=name))

    def _name_of(self, worker: str) -> str | None:
        return next((name for name, one in self.workers.items() if one.name == worker), None)

    def kill(self, worker: str, reason: str) -> None:
        """It hangs."""
        owned = self._owned(worker)
        if owned is not None:
            self._journal.note(f"{worker} is killed: {reason}")
            self._journal.died_of(worker)
            owned.kill()

    def _owned(self, worker: str) -> SimulatedWorker | None:
        return next((one for one in self.workers.values() if one.name == worker), None)

    # ------------------------------------------------------------ inside

    def _decide(self, event: Event) -> Sequence[Action]:
        return self._supervisor.handle(event, trio.current_time(), jitter=self._random.random())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartWorker(worker=name, role=role):
                    self._nursery.start_soon(self._live, name, role)
                case MoveTraffic(workers=names):
                    self._journal.note(f"traffic moves to {', '.join(names)}")
                    if self.server is not None:
                        self.server.move_traffic()
                case TerminateWorker(worker=name):
                    if name in self.workers:
                        self.workers[name].terminate()
                case KillWorker(worker=name):
                    self._told_to_end.add(name)
                    if name in self.workers:
                        self.workers[name].kill()
                case GiveUp(worker=name, reason=reason):
                    self._give_up(self._supervisor.role_of(name), reason)
                case KeepWorker():
                    pass

    def _give_up(self, role: str, reason: str) -> None:
        self._journal.note(f"{role} is given up: {reason}")
        left = self._models() - self._models(without=role)
        self._given_up.add(role)
        for model in sorted(left):
            if self.server is not None:
                self.server.model_given_up(model, reason)

    def _models(self, without: str = "") -> set[str]:
        roles = [role for role in self._roles if role not in self._given_up and role != without]
        return {model.name for role in roles for model in models_of(role)}

    def _welcomed(self, name: str) -> None:
        if not self._supervisor.is_held(name):
            self.handle(WorkerReady(worker=name))

    async def _live(self, name: str, role: str) -> None:
        worker = self.workers[name] = self._make(name, role)
        worker.is_ready = lambda: self._welcomed(name)
        if self._supervisor.state_of(name) is ProcessState.STOPPING:
            worker.kill()
        self._journal.note(f"{worker.name} starts")
        status = await worker.run()
        await trio.sleep(NEWS_S)
        self._journal.note(f"{worker.name} has ended: {status}")
        died = status != 0 and name not in self._told_to_end
        last = LastState()
        if self.server is not None:
            last = await self.server.worker_ended(worker.name, died=died)
        del self.workers[name]
        self._told_to_end.discard(name)
        self.handle(
            WorkerExited(worker=name, status=status, busy=died and last.busy, answered_at=last.answered_at)
        )
