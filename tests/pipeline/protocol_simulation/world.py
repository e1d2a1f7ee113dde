"""Plays a plan: a server, its workers and guests, clients, and everything that goes wrong, on a clock that jumps.

What is real: the server with all its parts, workers and their sessions, clients' cores and sessions, the supervisor's
core, the codec. What is simulated: sockets, processes, the slots' work, and time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
import structlog
import trio
from tests.pipeline.protocol_simulation.agenda import Agenda
from tests.pipeline.protocol_simulation.clients import SimulatedClient
from tests.pipeline.protocol_simulation.journal import Journal, Question
from tests.pipeline.protocol_simulation.network import Exchange, Line, Port
from tests.pipeline.protocol_simulation.plan import COMMON, RARE, Ask, Fault, FaultKind, Plan
from tests.pipeline.protocol_simulation.workers import PRESENT_PID, SimulatedWorker, Supervision
from tests.pipeline.serving.echo_model import model_settings
from trio.testing import MockClock

import shapestream.client.core
import shapestream.serving.server
import shapestream_workers.worker
from shapestream.client.session import Due, Session
from shapestream.scheduling.actions import Action
from shapestream.scheduling.events import Event
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.server import Server, serve
from shapestream.settings import ServerSettings
from shapestream_workers.supervisor.core import ReplacementWanted, RestartRequested
from shapestream_workers.supervisor.replacements import RestartPolicy
from shapestream_workers.worker_session import WorkerSession

# From the last that goes wrong to the last answer, at most. Much of it is the clients' patience with a connection that is
# half open, and with a server that is away; then the way through a queue at the slowest plans' pace.
SETTLED_WITHIN_S = 120.0
# Longer than it takes to see that a worker is silent (3 s, and a heartbeat): else what it runs is taken to hang.
HANG_MIN_S, HANG_GRACE_S = 4.5, 0.5
# So much for each request that does harm: it hangs twice, 20 times as long as was predicted; after one small batch that is
# far too much, such as 9 s for a call of 0.3 s.
PER_DEADLY_S = 600.0
# A client's session ends when it is not heard for 10 s; heartbeats come each second. It ends too when so few messages fit
# on the way to it that what comes together does not.
SILENT_S = 5.0
FEW_MESSAGES = 100
# How long a server that was told to drain may take: its grace, and some turns.
DRAINED_WITHIN_S = 40.0
# How long the stop of its workers may take.
STOP_GRACE_S = 5.0
# A server that lost its parent's end takes its workers along, so soon.
ORPHANED_S = 0.05
# Whatever keeps guests running never gives up.
_PATIENT = RestartPolicy(max_crashes=10**6)


class _CheckedScheduler(Scheduler):
    """Looks into itself after every event."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decides."""
        actions = super().handle(event, now)
        self.check_invariants()
        return actions


class _CheckedSession(Session):
    """Looks into itself after every turn."""

    def turn(self, now: float, *, may_send: bool = True) -> Due:
        """What has become due."""
        turn = super().turn(now, may_send=may_send)
        self.check_invariants()
        return turn


def _worker_session(name: str, pid: int, *arguments: Any, **options: Any) -> WorkerSession:
    """All simulated processes live in one real one."""
    return WorkerSession(name, PRESENT_PID.get(), *arguments, **options)


@contextmanager
def _checked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapestream.serving.server, "Scheduler", _CheckedScheduler)
        patch.setattr(shapestream.client.core, "Session", _CheckedSession)
        patch.setattr(shapestream_workers.worker, "WorkerSession", _worker_session)
        yield


class _ServerLife:
    """One server process, with the workers that it started."""

    def __init__(self, clients: Port, workers: Port, supervision: Supervision) -> None:
        self.ports = (clients, workers)
        self.supervision = supervision
        self.scope = trio.CancelScope()
        self.server: Server | None = None
        self.ended = trio.Event()


class World:
    """See the top of this module."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self.plan = plan
        self.journal = journal
        self.random = Random(plan.seed)
        self.agenda = Agenda()
        self._pids = count(1000)
        self.for_clients = self._exchange()
        self.for_workers = self._exchange()
        self.clients: list[SimulatedClient] = []
        self.life: _ServerLife | None = None
        journal.error_of_clock_s = self._error_of_clock_s
        self.nursery: trio.Nursery
        self.guests = Supervision(
            [f"g{number}" for number in range(plan.guests)],
            self._make_worker,
            journal,
            self.random,
            policy=_PATIENT,
        )

    def _exchange(self) -> Exchange:
        plan = self.plan
        return Exchange(
            self.agenda, self.random, delay_s=plan.delay_s, jitter_s=plan.jitter_s, capacity=plan.capacity
        )

    async def play(self) -> None:
        """From the beginning to a server that has drained."""
        plan = self.plan
        async with trio.open_nursery() as self.nursery:
            self.nursery.start_soon(self.agenda.run)
            self.start_server()
            self.nursery.start_soon(self.guests.run)
            for number in range(plan.clients):
                self.clients.append(
                    SimulatedClient(f"c{number}", self.for_clients, self.journal, self.nursery)
                )
            for ask in plan.asks:
                for _ in range(ask.times):
                    self._plan_question(ask)
            for fault in plan.faults:
                self.agenda.at(fault.at_s, partial(self._go_wrong, fault))
            await self._settle()
            self.journal.judge()
            await self._end()
            self.nursery.cancel_scope.cancel()

    def _plan_question(self, ask: Ask) -> None:
        client = self.clients[ask.client % self.plan.clients]
        uid = len(self.journal.questions) + 1
        question = self.journal.questions[uid] = Question(uid, ask, client.name)
        self.agenda.at(ask.at_s, partial(client.ask, question))
        if ask.cancel_after_s is not None:
            self.agenda.at(ask.at_s + ask.cancel_after_s, partial(client.withdraw, question))

    async def _settle(self) -> None:
        await trio.sleep_until(self.plan.troubled_until_s + 0.001)
        with trio.move_on_after(SETTLED_WITHIN_S + PER_DEADLY_S * self.plan.deadly):
            while any(question.open for question in self.journal.questions.values()):  # noqa: ASYNC110 - nobody tells
                await trio.sleep(0.25)
        self.journal.note("settled")

    async def _end(self) -> None:
        """The last server drains: nothing is left in it, and it ends in time, and its workers do."""
        life = self.life
        if life is None or life.server is None:
            return
        for client in self.clients:
            client.end()
        with trio.move_on_after(DRAINED_WITHIN_S) as scope:
            life.server.drain()
            await life.ended.wait()
        if scope.cancelled_caught:
            self.journal.accuse(f"the server did not drain within {DRAINED_WITHIN_S} s")
        left = life.server.statistics()["unfinished"]
        if left:
            self.journal.accuse(f"{left} requests are left in a server that has drained")

    # ------------------------------------------------------------ processes

    def start_server(self) -> None:
        """A new process listens, and starts its workers."""
        self.journal.epoch += 1
        self.journal.note(f"server {self.journal.epoch} starts")
        roles = [f"w{number}" for number in range(self.plan.own_workers)]
        supervision = Supervision(roles, self._make_worker, self.journal, self.random)
        self.life = _ServerLife(self.for_clients.bind(), self.for_workers.bind(), supervision)
        self.nursery.start_soon(self._live, self.life)

    async def _live(self, life: _ServerLife) -> None:
        models = {COMMON.name: model_settings(), RARE.name: model_settings()}
        settings = ServerSettings(
            window_requests=self.plan.window_requests,
            max_queued_requests=self.plan.max_queued_requests,
            hang_min_s=HANG_MIN_S,
            hang_grace_s=HANG_GRACE_S,
        )
        clients, workers = life.ports
        with life.scope:
            async with trio.open_nursery() as nursery:
                life.server = await nursery.start(
                    partial(serve, settings, models=models, clients=clients, workers=workers)
                )
                life.server.own_processes(life.supervision)
                life.supervision.server = life.server
                self.nursery.start_soon(life.supervision.run)
        life.supervision.server = None
        if life.scope.cancelled_caught:
            self.agenda.after(ORPHANED_S, life.supervision.kill_all)
        life.supervision.stop(STOP_GRACE_S)
        life.ended.set()

    def _make_worker(self, name: str, role: str) -> SimulatedWorker:
        return SimulatedWorker(
            name, role, next(self._pids), self.plan, self.agenda, self.journal, self.random, self.for_workers
        )

    # ------------------------------------------------------------ what goes wrong

    def _go_wrong(self, fault: Fault) -> None:
        excuses = self._excuses(fault)
        self.journal.lasting += excuses
        self.journal.trouble(f"{fault.kind.value}: {fault.target}, {fault.lasting_s} s", excuses=excuses)
        if "CLIENT" in fault.kind.name:
            client = self.clients[fault.target % len(self.clients)]
            if excuses:
                self.journal.client_troubled(client.name)
            if fault.kind is FaultKind.KILL_CLIENT:
                client.kill()
            else:
                self._trouble_line(client.line, fault)
        elif "SERVER" in fault.kind.name:
            self._end_server(fault)
        else:
            self._trouble_worker(fault)
        self.agenda.after(fault.lasting_s, partial(self._is_over, fault, excuses))

    def _is_over(self, fault: Fault, excuses: bool) -> None:
        self.journal.lasting -= excuses
        self.journal.trouble(f"over: {fault.kind.value}", excuses=excuses)

    def _excuses(self, fault: Fault) -> bool:
        """Whether requests may run again for it: not where a client's connection breaks, its session goes on."""
        if "CLIENT" not in fault.kind.name:
            return True
        reads_too_little = self.plan.capacity < FEW_MESSAGES
        silent = fault.kind is FaultKind.SWALLOW_CLIENT or (
            fault.kind is FaultKind.HOLD_CLIENT and fault.lasting_s >= SILENT_S
        )
        return silent or reads_too_little

    def _trouble_line(self, line: Line | None, fault: Fault) -> None:
        if line is None:
            return
        match fault.kind:
            case FaultKind.CUT_CLIENT | FaultKind.CUT_WORKER:
                line.cut()
            case FaultKind.HOLD_CLIENT | FaultKind.HOLD_WORKER:
                line.hold(fault.lasting_s)
            case FaultKind.SWALLOW_CLIENT | FaultKind.SWALLOW_WORKER:
                line.swallow()
            case FaultKind.DOUBLE_CLIENT:
                line.double(fault.lasting_s)
            case FaultKind.DOUBLE_WORKER:
                line.double(fault.lasting_s, both=False)
            case _:
                raise AssertionError(fault)

    def _trouble_worker(self, fault: Fault) -> None:
        supervisions = [self.guests] if self.life is None else [self.life.supervision, self.guests]
        everyone = [(one, worker) for one in supervisions for worker in one.workers.values()]
        if not everyone:
            return
        supervision, worker = everyone[fault.target % len(everyone)]
        match fault.kind:
            case FaultKind.KILL_WORKER:
                worker.kill()
            case FaultKind.STOP_WORKER:
                worker.terminate()
            case FaultKind.REPLACE_WORKER:
                self._replace(supervision, worker)
            case FaultKind.RESTART_WORKERS:
                at_once = (
                    supervision is not self.guests and fault.lasting_s > 1.0
                )  # guests are no server's own
                supervision.handle(RestartRequested(at_once=at_once))
            case FaultKind.SLOW_WORKER:
                worker.slow_down(fault.lasting_s)
            case _:
                for line in worker.troubled_lines():
                    self._trouble_line(line, fault)

    def _replace(self, supervision: Supervision, worker: SimulatedWorker) -> None:
        name = next(name for name, one in supervision.workers.items() if one is worker)
        supervision.handle(ReplacementWanted(worker=name))

    def _end_server(self, fault: Fault) -> None:
        life, self.life = self.life, None
        if life is None:
            return  # it is away already
        if fault.kind is FaultKind.KILL_SERVER or life.server is None:
            for port in life.ports:
                port.kill()
            life.scope.cancel()
        else:
            life.server.drain()
        self.nursery.start_soon(self._restart, life, fault.lasting_s)

    async def _restart(self, life: _ServerLife, away_s: float) -> None:
        await life.ended.wait()
        await trio.sleep(away_s)
        self.start_server()

    def _error_of_clock_s(self, process: str) -> float:
        for client in self.clients:
            if client.name == process:
                return client.error_of_clock_s
        supervisions = [self.guests] if self.life is None else [self.life.supervision, self.guests]
        workers = [worker for supervision in supervisions for worker in supervision.workers.values()]
        return max((worker.error_of_clock_s for worker in workers if worker.name == process), default=0.0)


def play(plan: Plan, *, prepare: Callable[[World], None] = lambda world: None) -> Journal:
    """Plays it; the journal says what happened, and which promises were not kept."""
    journal = Journal()

    async def main() -> None:
        world = World(plan, journal)
        prepare(world)
        with trio.fail_after(1e6):
            await world.play()

    def log(_: Any, method: str, event: dict[str, Any]) -> Any:
        what = event.pop("event")
        journal.note(f"    {method} {what} {event}")
        raise structlog.DropEvent

    # What trio leaves open, the order of tasks that are ready together, is a part of the plan as well. (Hypothesis has made
    # it shuffle by this generator alone: the same plan is the same story.)
    trio._core._run._r.seed(plan.seed)
    with _checked():
        structlog.configure(
            processors=[log], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
        )
        try:
            trio.run(main, clock=MockClock(autojump_threshold=0))
        finally:
            structlog.reset_defaults()
    return journal
