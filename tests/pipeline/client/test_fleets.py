"""A session, and servers that run its requests in their own processes, which some requests end: who ends, what is answered.

Both halves that decide are real, the session and each server's scheduler. Sockets, slots and time are played here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.entries import (
    Entry,
    Heartbeat,
    Hello,
    ModelOpened,
    OpenModel,
    RequestEntry,
    RunsAlone,
    Unknown,
    Welcome,
    failure_of,
)
from tests.pipeline.client.bench import SETTINGS, SIGNATURE, Caller, numbered, result

from shapestream.client.session import Session
from shapestream.client.tickets import SETTLED_S, AnyTicket, OpenTicket, RequestTicket
from shapestream.errors import Poisoned, RequestError
from shapestream.scheduling import Scheduler
from shapestream.scheduling.actions import Action, DeliverResults, FailRequest, StartBatch, TellLoneRun
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import (
    Arrival,
    BatchFinished,
    LoneRunKnown,
    ModelAdded,
    ModelProfile,
    RequestsArrived,
    SlotJoined,
    SlotsJoined,
)

STEP_S = 0.05
"""Between two looks at everything; what is said arrives in the next step."""
CALL_S = 0.1
MOST_S = 400.0
"""Simulated seconds within which all has ended."""
MOST_DEATHS = 50
AWAY_S = 1.0
"""Until a server that has ended is there again."""
SLOTS = 2
PROFILE = ModelProfile(
    name="m", dimensions=("batch", "n"), has_batch=True, paddable=(False, False), max_batch=4
)

epochs = count(1)


@dataclass(slots=True, kw_only=True)
class Process:
    """A server's process: its scheduler, what its slots run, and what it has said that has not arrived."""

    poisons: set[int]
    epoch: bytes = field(default_factory=lambda: next(epochs).to_bytes(16))
    known: bool = False
    """Whether it knows the client."""
    dead: bool = False
    said: list[Entry] = field(default_factory=list)
    running: list[tuple[float, Batch]] = field(default_factory=list)
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(1000, 10**6))

    def begin(self, now: float) -> Process:
        """Let its slots join."""
        self.scheduler.handle(ModelAdded(model=PROFILE), now)
        joined = [
            SlotJoined(slot=slot, models=frozenset({"m"}), worker="local", in_server=True)
            for slot in range(SLOTS)
        ]
        self.scheduler.handle(SlotsJoined(slots=tuple(joined)), now)
        return self

    def hear(self, entries: list[Entry], now: float) -> None:
        """Serve what the client says."""
        arrived = []
        for entry in entries:
            if isinstance(entry, Hello):
                self.known = True
                window = {"window_requests": 64, "window_bytes": 1 << 20}
                self.said.append(Welcome(epoch=self.epoch, heartbeat_ms=1000, **window))
            elif not self.known:
                self.said.append(Unknown())
            elif isinstance(entry, OpenModel):
                self.said.append(ModelOpened(name=entry.name, number=0, signature=SIGNATURE))
            elif isinstance(entry, Heartbeat):
                self.said.append(entry)
            elif isinstance(entry, RunsAlone) and entry.sequence is not None:
                self._act(self.scheduler.handle(LoneRunKnown(id=entry.sequence), now), now)
            elif isinstance(entry, RequestEntry) and entry.sequence not in self.scheduler.requests:
                suspect = "suspect" in (entry.tags or {})
                arrived.append(
                    Arrival(id=entry.sequence, client=0, model="m", sizes=(1, 4), nbytes=16, suspect=suspect)
                )
        if arrived:
            self._act(self.scheduler.handle(RequestsArrived(requests=tuple(arrived)), now), now)

    def work(self, now: float) -> None:
        """End what has run for long enough."""
        for ends_at, batch in list(self.running):
            if now >= ends_at and not self.dead:
                self.running.remove((ends_at, batch))
                self._act(self.scheduler.handle(BatchFinished(batch=batch.id, busy_s=CALL_S), now), now)

    def _act(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case StartBatch():
                    for batch in action.batches:
                        self.running.append((now + CALL_S, batch))
                        self.dead |= any(arrival.id in self.poisons for arrival in batch.arrivals)
                case TellLoneRun():
                    self.said.append(RunsAlone(sequence=action.request.id))
                case DeliverResults():
                    self.said += [result(arrival.id) for arrival in action.requests]
                case FailRequest():
                    self.said.append(failure_of(action.request.id, action.code))
                case _:
                    raise AssertionError(action)
        self.scheduler.check_invariants()


class Fleet:
    """A client, and the servers at its addresses."""

    def __init__(self, addresses: int, *, comes_back: bool) -> None:
        self.now = 0.0
        self.deaths = 0
        self.comes_back = comes_back
        self.poisons: set[int] = set()
        self.back_at: dict[int, float] = {}
        self.processes: dict[int, Process] = {}
        self.addresses = addresses
        for place in range(addresses):
            self.start(place)
        self.session = Session(
            client=bytes(16),
            software="test",
            server="test://",
            settings=replace(SETTINGS, others=addresses - 1),
            now=self.now,
        )
        self.place = 0
        self.noticed = True
        self.numbers = count()
        self.finished: list[AnyTicket] = []
        self.session.connected(self.now, self.place)
        opening = OpenTicket(Caller(), name="m")
        self.session.submit(opening)
        while opening.outcome is None:
            self.step()
        self.model = self.session.models["m"]

    def start(self, place: int) -> None:
        """Start a server at this address."""
        self.processes[place] = Process(poisons=self.poisons).begin(self.now)

    def ask(self, harmless: int, poisons: int = 0) -> list[RequestTicket]:
        """Submit requests, those that do harm in the middle of the others."""
        tickets = [
            RequestTicket(Caller(), model=self.model, tensors=numbered(next(self.numbers)), nbytes=16)
            for _ in range(harmless + poisons)
        ]
        for number, ticket in enumerate(tickets):
            self.session.submit(ticket)
            if harmless // 2 <= number < harmless // 2 + poisons:
                self.poisons.add(ticket.id)
        return tickets

    def kill(self, place: int) -> None:
        """End a server from outside."""
        if (process := self.processes.get(place)) is not None:
            process.dead = True

    def step(self) -> None:
        """Let everything happen that is due."""
        self.now += STEP_S
        for place, at in list(self.back_at.items()):
            if at <= self.now:
                del self.back_at[place]
                self.start(place)
        for place, process in list(self.processes.items()):
            process.work(self.now)
            if process.dead:
                self.deaths += 1
                del self.processes[place]
                if self.comes_back:
                    self.back_at[place] = self.now + AWAY_S
                if place == self.place:
                    self.noticed = False
        process_here = self.processes.get(self.place)
        if process_here is not None:
            said, process_here.said = process_here.said, []
            self.session.receive(said, self.now) if said else None
        if not self.noticed:
            self.noticed = True
            self.session.broke(self.now)
        self.turn()

    def turn(self) -> None:
        """Take a turn of the client."""
        due = self.session.turn(self.now)
        self.session.check_invariants()
        self.finished += due.finished
        if due.reconnect:
            self.place = (self.place + 1) % self.addresses
            self.session.connected(self.now, self.place)
            due = self.session.turn(self.now)
            self.finished += due.finished
        process = self.processes.get(self.place)
        if due.entries and process is not None:
            process.hear(due.entries, self.now)

    def run(self, tickets: list[RequestTicket]) -> None:
        """Let time pass until all of these have ended."""
        while any(ticket.outcome is None for ticket in tickets):
            self.step()
            assert self.now < MOST_S, "a request does not end"
            assert self.deaths < MOST_DEATHS, "servers end for ever"


def ends_of(tickets: list[RequestTicket]) -> list[str]:
    """Return the code of each request's error, or "answered"."""
    return [
        ticket.outcome.code if isinstance(ticket.outcome, RequestError) else "answered" for ticket in tickets
    ]


thorough = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@thorough
@given(harmless=st.integers(0, 20), poisons=st.integers(1, 3), later=st.integers(0, 5))
def test_poisons_end_a_server_that_comes_back_once_together_and_each_twice_alone(
    harmless: int, poisons: int, later: int
) -> None:
    """Each is poisoned, and all others are answered, also those that are asked meanwhile."""
    fleet = Fleet(1, comes_back=True)
    tickets = fleet.ask(harmless, poisons)
    for _ in range(later):
        fleet.step()
    tickets += fleet.ask(later)
    fleet.run(tickets)
    assert poisons == ends_of(tickets).count("poisoned")
    assert len(tickets) - poisons == ends_of(tickets).count("answered")
    assert fleet.poisons == {ticket.id for ticket in tickets if isinstance(ticket.outcome, Poisoned)}
    assert fleet.deaths <= 1 + 2 * poisons


@pytest.mark.parametrize(("addresses", "most"), [(3, 2), (4, 3), (6, 3)])
@thorough
@given(data=st.data())
def test_a_poison_leaves_servers_that_never_come_back(addresses: int, most: int, data: st.DataObject) -> None:
    """Of three two end; those that are left answer all others."""
    fleet = Fleet(addresses, comes_back=False)
    tickets = fleet.ask(data.draw(st.integers(0, 20)), 1)
    fleet.run(tickets)
    assert ["poisoned"] == [end for end in ends_of(tickets) if end != "answered"]
    assert fleet.deaths <= most
    later = fleet.ask(3)
    fleet.run(later)
    assert ["answered"] * 3 == ends_of(later)


@thorough
@given(
    harmless=st.integers(1, 20),
    waits=st.lists(st.floats(STEP_S, SETTLED_S - 2 * AWAY_S - 1.0), min_size=1, max_size=20),
    addresses=st.integers(1, 3),
)
def test_kills_soon_after_each_other_blame_nobody(harmless: int, waits: list[float], addresses: int) -> None:
    """Whenever they come, and whatever runs alone then."""
    fleet = Fleet(addresses, comes_back=True)
    tickets = fleet.ask(harmless)
    for wait_s in waits:
        until = fleet.now + wait_s
        while fleet.now < until:
            fleet.step()
        tickets += fleet.ask(harmless)
        fleet.kill(fleet.place)
        fleet.step()
        while fleet.place not in fleet.processes or not fleet.processes[fleet.place].known:
            fleet.step()
    fleet.run(tickets)
    assert {"answered"} == set(ends_of(tickets))
    assert len(waits) == fleet.deaths
