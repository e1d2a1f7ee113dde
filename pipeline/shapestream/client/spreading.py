"""The core of a client with `spread=True`: one session for each server, and a router that says which gets what.

How it works. An *arm* is an ordinary core with a connection to one server, in a thread of its own. The router runs in one
more thread. It takes the tickets of the faces, and gives each request to an arm as a ticket of its own, a *hop*. A hop
that comes back ends the ticket, or takes it to another arm:

    face ──ticket──> router ──hop──> arm ──> server
                       ^  │            │
                       │  └─ waiting   │   result, error: the ticket ends
                       └───────────────┘   Moved, unavailable, overloaded: another arm gets it

A request waits in the router until an arm has room: a server that takes requests, serves its model with the signature that
it was encoded for, and has credit left. Where no server has that signature, it is encoded anew for one that is there. Of
several arms, the one with the least own outstanding seconds per slot gets it (spread.py). What an arm was given leaves in
order. Deadlines and withdrawals of waiting requests are the router's; those of hops are the arms'.

A server that vanishes gives up its hops (`Moved`). What it may have run goes on as a suspect, and its losses are counted,
as one session counts them: it ends as `poisoned` after `MOST_LOSSES`, and where all servers but one have vanished with it,
that one is spared. Where the model must not run twice, the request ends as `worker_lost`. A server that comes back is told
to cancel what moved.

A name among the addresses is looked up now and then (look_ups.py); each of its addresses is an arm. One that is gone from
the answer is left when its server is gone, too. Two addresses of one server, by its epoch, are one arm's work.

Questions besides requests go to all arms. The first answer opens a model; counters and stories are collected.
"""

from __future__ import annotations

import logging
import math
import os
import random
import weakref
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from shapestream.client.connector import Address, Addresses, connector_for
from shapestream.client.core import (
    CLOSED,
    WITHDRAWN,
    Attend,
    Core,
    CoreThread,
    SubmissionQueue,
    Withdraw,
    WithdrawAll,
    closing,
)
from shapestream.client.look_ups import LookUps
from shapestream.client.opened_models import Model
from shapestream.client.session import ENDED_SERVERS, LAST_SERVER, MAY_HAVE_RUN, LinkSettings
from shapestream.client.spread import Prices, least_loaded
from shapestream.client.tickets import (
    NEVER_SENT,
    QUARANTINED,
    SETTLED_S,
    AnyTicket,
    EndTicket,
    ModelHandle,
    Moved,
    OpenTicket,
    Owner,
    Question,
    RequestTicket,
    StatisticsTicket,
    StoriesTicket,
    WelcomeTicket,
    hand_back,
)
from shapestream.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    Poisoned,
    RequestError,
    Unavailable,
    WorkerLost,
)
from shapestream.quarantine import KEEP_S, MOST_REQUESTS, Quarantine
from shapestream.transport.interface import Wake
from shapestream.versions import answering
from shapestream.wire.messages import ResultEntry
from shapestream.wire.tags import MOST_LOSSES

_log = logging.getLogger("shapestream")

REFUSED_S = 10.0
"""Seconds until a server is asked again for a model that it refused."""
SIZE_S = 60.0
"""Seconds between questions for a server's number of slots: workers come and go."""
_JOIN_S = 5.0
"""Seconds that an arm's thread may take to end: for a machine that hangs."""


@dataclass(eq=False, slots=True)
class Route:
    """A request on its way: its ticket, and what became of it so far."""

    number: int
    """Order of submission."""
    ticket: RequestTicket
    waits_since: float
    hop: Hop | None = None
    """The present one; None while it waits in the router."""
    hops: int = 0
    """Hops so far."""
    losses: int | None = None
    lost_at: set[int] = field(default_factory=set)
    """The places of the arms whose servers vanished with it."""
    tried: set[int] = field(default_factory=set)
    """The places of the arms whose servers had no worker or no room for it."""
    error: RequestError | None = None
    """The error of the last of these."""


class Hop:
    """The owner of a ticket that an arm has. It comes back in the arm's thread, and the router takes it in its own."""

    __slots__ = ("_back", "arm", "charge", "closed", "route", "ticket")

    def __init__(
        self, route: Route, arm: Arm, ticket: RequestTicket, charge: float, back: Callable[[Hop], None]
    ) -> None:
        self.closed = False
        self.route = route
        self.arm = arm
        self.ticket = ticket
        self.charge = charge
        self._back = back

    def finish(self, tickets: list[AnyTicket]) -> None:
        """Come back to the router; in an arm's thread."""
        self._back(self)


class Poll:
    """A question that several arms were asked, each with a ticket of its own."""

    __slots__ = ("_back", "answers", "closed", "inner", "ticket")

    def __init__(self, ticket: Question, back: Callable[[Poll], None]) -> None:
        self.closed = False
        self.ticket = ticket
        self.inner: dict[int, Question] = {}
        """The tickets, by the places of their arms."""
        self.answers: dict[int, Any] = {}
        self._back = back

    def finish(self, tickets: list[AnyTicket]) -> None:
        """Come back to the router; in an arm's thread."""
        self._back(self)


class Arm:
    """The way to one server: a core in a thread, and what the router knows of it."""

    def __init__(self, place: int, address: str, core: Core) -> None:
        self.place = place
        self.address = address
        self.core = core
        self.thread = CoreThread(core)
        self.hops = 0
        self.hop_bytes = 0
        self.seconds = 0.0
        """Outstanding: the charges of its hops."""
        self.slots = 1
        """Slots of its server, as that said; 1 where it does not tell this client."""
        self.sized_at = -math.inf
        """When it was last asked for them."""
        self.is_open = False
        """Whether its server takes requests, as the router saw it last."""
        self.here_since = math.inf
        """When its server was first seen; a connection that breaks changes nothing about it."""
        self.epoch: bytes | None = None
        self.polls: dict[str, tuple[Poll, float]] = {}
        """The models that it was asked for, with the answers and the times."""
        self.is_named = True
        """Whether the addresses, or the last look-up, have it."""

    def has_room(self, nbytes: int) -> bool:
        """Tell whether its server has credit left for a request of so many bytes."""
        if self.hops >= self.core.window_requests:
            return False
        return not self.hop_bytes or self.hop_bytes + nbytes <= self.core.window_bytes

    def took(self, hop: Hop) -> None:
        """Count a hop."""
        self.hops += 1
        self.hop_bytes += hop.ticket.nbytes
        self.seconds += hop.charge

    def gave(self, hop: Hop) -> None:
        """Take a hop off that came back."""
        self.hops -= 1
        self.hop_bytes -= hop.ticket.nbytes
        self.seconds = self.seconds - hop.charge if self.hops else 0.0


class SpreadModels:
    """The opened models by name, of whichever arm has one; read by faces in any thread."""

    def __init__(self, arms: dict[str, Arm]) -> None:
        self._arms = arms

    def get(self, name: str) -> Model | None:
        """Return a model as a server has it that is there; where none is, as one had it that may come back."""
        gone = None
        for arm in [*self._arms.values()]:
            model = arm.core.models.get(name)
            if model is not None and not model.stale:
                if arm.is_open:
                    return model
                gone = gone or model
        return gone


class SpreadCore:
    """The router, with the face of a `Core`."""

    def __init__(
        self,
        address: Addresses,
        *,
        software: str,
        settings: LinkSettings,
        clock: Callable[[], float],
        key: str | Path | None = None,
        server_key: str | Path | None = None,
        deliver: Callable[[list[AnyTicket]], None] = hand_back,
        is_abandoned: Callable[[], bool] | None = None,
    ) -> None:
        """Make it for these addresses; raises as `connector_for` does."""
        connector = connector_for(address, key=key, server_key=server_key)  # checks them all
        self.name = connector.name
        self._connect = partial(connector_for, key=key, server_key=server_key)
        self._software = software
        self._settings = replace(settings, gives_up=True)
        self.clock = clock
        self.client = os.urandom(16).hex()
        """The beginning of ids of requests that no server was sent."""
        self._hand_over = deliver
        self._is_abandoned = is_abandoned
        self._chance = random.Random()
        self.submissions = SubmissionQueue(self._deliver, lambda: None)
        self._look_ups = LookUps(address, self.submissions.wake)
        self._arms: dict[str, Arm] = {}
        """By address."""
        self.models = SpreadModels(self._arms)
        self._prices = Prices()
        self._digests: dict[str, tuple[str, str]] = {}
        """By model, the digest of its files in the first answer, and the server's address."""
        self._differing: set[str] = set()
        """The models of which it was told that servers have different files."""
        self._quarantine = Quarantine(MOST_REQUESTS, KEEP_S)
        self._returned: deque[Hop | Poll] = deque()
        self._is_told = False
        """Whether a turn is due that has not begun, and takes what came back."""
        self._routes: OrderedDict[RequestTicket, Route] = OrderedDict()
        self._waiting: list[Route] = []
        """The routes without a hop, in order of submission."""
        self._questions: dict[Question, Poll] = {}
        self._streams: dict[int, Owner] = {}
        self._finished: list[AnyTicket] = []
        self._numbers = 0
        self._places = 0
        self._none_since: float | None = clock()
        """The time since which no arm takes requests; None where one does."""
        self._stopping = False

    # ------------------------------------------------------------ any thread

    @property
    def window_requests(self) -> int:
        """Requests that all servers together take without an answer."""
        return sum(arm.core.window_requests for arm in [*self._arms.values()])

    def ask(self, question: Question) -> None:
        """Post a question."""
        self.submissions.post(question)

    @trio.lowlevel.enable_ki_protection
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the router in a thread, and hand its tickets back in this trio run, until it is stopped or cancelled."""
        token, ended = trio.lowlevel.current_trio_token(), trio.Event()

        def in_run(act: Callable[..., object], *arguments: Any) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(act, *arguments)

        self._hand_over = partial(in_run, hand_back)
        thread = CoreThread(self, ended=partial(in_run, ended.set))
        thread.start()
        task_status.started()
        try:
            await ended.wait()
        finally:
            self.stop()
            with trio.CancelScope(shield=True):
                await ended.wait()
        thread.check()

    def stop(self) -> None:
        """Make the router end, with a goodbye to each server. Any number of times."""
        self._stopping = True
        self.submissions.wake()

    def _deliver(self, tickets: list[AnyTicket]) -> None:
        self._hand_over(tickets)

    def _back(self, came: Hop | Poll) -> None:
        self._returned.append(came)
        if not self._is_told:  # two threads may see False: then it is woken twice
            self._is_told = True
            self.submissions.wake()

    # ------------------------------------------------------------ the router's thread

    def run_in_thread(self) -> None:
        """Route until it is stopped. Raises what ended an arm."""
        wake = Wake()
        weakref.finalize(self, wake.close).atexit = False  # as that of a core
        self.submissions.open(wake.set)
        try:
            for address in self._look_ups.fixed:
                self._add_arm(address if isinstance(address, str) else f"memory {len(self._arms)}", address)
            self._look_ups.start()
            while not (self._stopping or (self._is_abandoned is not None and self._is_abandoned())):
                wake.wait(min(self._next_due() - self.clock(), self._settings.silence_s))
                self._turn()
        finally:
            self._finish()

    def _add_arm(self, name: str, address: Address) -> None:
        core = Core(
            self._connect(address),
            software=self._software,
            settings=self._settings,
            clock=self.clock,
            turned=self._arm_turned,
        )
        arm = self._arms[name] = Arm(self._places, name, core)
        self._places += 1
        for poll in self._questions.values():
            if isinstance(poll.ticket, WelcomeTicket | OpenTicket):
                self._ask_arm(arm, poll)
        arm.thread.start()

    def _arm_turned(self) -> None:
        """Wake the router where an arm's turn may have changed what it waits for."""
        if self._waiting or self._none_since is not None:
            self.submissions.wake()

    def _turn(self) -> None:
        now = self.clock()
        self._take_found()
        self._is_told = False
        while self._returned:
            came = self._returned.popleft()
            if isinstance(came, Hop):
                self._take_hop(came, now)
            else:
                self._take_answers(came)
        self._see_arms(now)
        self._take_submissions(now)
        self._end_waits(now)
        if self._waiting:
            self._send_waiting(now)
        if self._finished:
            finished, self._finished = self._finished, []
            self._deliver(finished)

    def _next_due(self) -> float:
        """Return the time at which a wait ends, if nothing happens before."""
        tickets: list[Question] = [*(route.ticket for route in self._waiting), *self._questions]
        due = [ticket.deadline for ticket in tickets if ticket.deadline is not None]
        if self._waiting:
            due.append(self.clock() + 1.0)  # servers settle, and are missed, by seconds
        return min(due, default=math.inf)

    # ------------------------------------------------------------ arms

    def _take_found(self) -> None:
        """Add the addresses that names have now, and note which arms' addresses are gone."""
        found = self._look_ups.take()
        if found is None:
            return
        named = [address for addresses in found.values() for address in addresses]
        for address in named:
            if address not in self._arms:
                self._add_arm(address, address)
        kept = {*self._look_ups.fixed, *named}
        for address, arm in self._arms.items():
            arm.is_named = address in kept

    def _see_arms(self, now: float) -> None:
        """Note which arms have a server that takes requests, and give up those that no name has any more."""
        for arm in [*self._arms.values()]:
            if not arm.thread.is_alive():
                arm.thread.check()  # a defect: it ends the client
            if arm.epoch != arm.core.epoch:
                arm.epoch, arm.here_since, arm.sized_at = arm.core.epoch, now, -math.inf
            was_open, arm.is_open = arm.is_open, arm.core.takes_requests
            if was_open and not arm.is_open:
                self._look_ups.hasten()
            if not (arm.is_open or arm.is_named or arm.hops):
                arm.core.stop()
                del self._arms[arm.address]
            elif arm.is_open and now >= arm.sized_at + SIZE_S:
                arm.sized_at = now
                self._ask_arm(arm, Poll(StatisticsTicket(cast("Owner", None)), self._back))
        if self._open_arms():
            self._none_since = None
            return
        self._look_ups.hasten()
        if self._none_since is None:
            self._none_since = now

    def _open_arms(self) -> list[Arm]:
        """Return the arms whose servers take requests; of two to one server, the first."""
        found: dict[bytes | None, Arm] = {}
        for arm in self._arms.values():
            if arm.is_open:
                found.setdefault(arm.epoch, arm)
        return list(found.values())

    # ------------------------------------------------------------ requests

    def _take_submissions(self, now: float) -> None:
        self.submissions.awake = False
        posted = self.submissions.items
        while posted:
            match item := posted.popleft():
                case RequestTicket() if item.outcome is None:
                    if not item.owner.closed:
                        self._submit(item, now)
                case RequestTicket() | EndTicket():
                    self._finished.append(item)
                case Withdraw():
                    self._withdraw(item.ticket)
                    if not item.ticket.owner.closed and item.ticket.outcome is None:
                        self._end(item.ticket, Cancelled(WITHDRAWN))
                case Attend():
                    self._streams[id(item.owner)] = item.owner
                case WithdrawAll():
                    self._streams.pop(id(item.owner), None)
                    for ticket in [ticket for ticket in self._routes if ticket.owner is item.owner]:
                        self._withdraw(ticket)
                case _:
                    self._ask_arms(item)

    def _submit(self, ticket: RequestTicket, now: float) -> None:
        if self._quarantine.kept and self._quarantine.holds(ticket.model.name, ticket.tensors, now):
            self._end(ticket, Poisoned(QUARANTINED))
            return
        self._numbers += 1
        route = self._routes[ticket] = Route(self._numbers, ticket, now)
        self._waiting.append(route)

    def _withdraw(self, ticket: Question) -> None:
        """Let a ticket go that no caller waits for."""
        route = self._routes.pop(ticket, None) if isinstance(ticket, RequestTicket) else None
        if route is not None:
            if route.hop is None:
                self._waiting.remove(route)
            else:
                route.hop.closed = True
                route.hop.arm.gave(route.hop)
                route.hop.arm.core.submissions.post(Withdraw(route.hop.ticket))
        poll = self._questions.pop(ticket, None)
        if poll is not None:
            poll.closed = True
            for place, inner in poll.inner.items():
                for arm in self._arms.values():
                    if arm.place == place and not isinstance(inner, OpenTicket):
                        arm.core.submissions.post(Withdraw(inner))

    def _send_waiting(self, now: float) -> None:
        """Give the waiting requests that an arm has room for to the least loaded one, in order."""
        arms = self._open_arms()
        waiting, self._waiting = self._waiting, []
        for number, route in enumerate(waiting):
            if not any(arm.has_room(0) for arm in arms):
                self._waiting += waiting[number:]
                return
            loads = self._loads(route, arms, now)
            hopeless = None if loads else self._hopeless(route, arms)
            if isinstance(hopeless, ModelHandle):
                try:
                    route.ticket.move(hopeless)
                except RequestError as error:
                    hopeless = error
                else:
                    loads, hopeless = self._loads(route, arms, now), None
            if loads:
                charge = self._prices.of(route.ticket.model.name, route.ticket.nbytes)
                self._send(route, least_loaded(loads, charge, self._chance), charge)
            elif hopeless is not None:
                self._end_route(route, hopeless)
            else:
                self._waiting.append(route)

    def _loads(self, route: Route, arms: list[Arm], now: float) -> dict[Arm, tuple[float, int]]:
        return {arm: (arm.seconds, arm.slots) for arm in arms if self._may_have(arm, route, now)}

    def _may_have(self, arm: Arm, route: Route, now: float) -> bool:
        """Tell whether an arm may have a request now. One that was not asked for the model is asked."""
        ticket = route.ticket
        if arm.place in route.tried or not arm.has_room(ticket.nbytes):
            return False
        if route.losses and not self._is_worth_the_risk(arm, route, now):
            return False
        model = arm.core.models.get(ticket.model.name)
        if model is None:
            self._open_at(arm, ticket.model.name, now)
        if model is None or model.number is None:
            return False
        return not model.stale and model.described == ticket.model.described

    def _open_at(self, arm: Arm, name: str, now: float) -> None:
        """Ask an arm for a model, unless it was asked, or has refused it of late."""
        poll, at = arm.polls.get(name, (None, -math.inf))
        if poll is not None and (not poll.answers or now < at + REFUSED_S):
            return
        poll = Poll(OpenTicket(cast("Owner", None), name=name), self._back)
        arm.polls[name] = (poll, now)
        self._ask_arm(arm, poll)

    def _is_worth_the_risk(self, arm: Arm, route: Route, now: float) -> bool:
        """Tell whether a server may get a request of which a loss was counted: it has settled, and is not the last one."""
        others = {other.place for other in self._arms.values()} - {arm.place}
        is_last = bool(others) and arm.place not in route.lost_at and others <= route.lost_at
        return not is_last and now >= arm.here_since + SETTLED_S

    def _hopeless(self, route: Route, arms: list[Arm]) -> ModelHandle | RequestError | None:
        """Return what becomes of a request that no server which is here will ever take as it is encoded.

        That is another server's model to encode it for, or its error. None: a server may take it.
        """
        name = route.ticket.model.name
        said: RequestError | None = route.error
        other: ModelHandle | None = None
        for arm in arms:
            if arm.place in route.tried:
                continue
            model = arm.core.models.get(name)
            if model is not None and model.number is not None:
                if model.described == route.ticket.model.described:
                    return None
                other = other or model
                continue
            poll, _ = arm.polls.get(name, (None, 0.0))
            refused = None if poll is None else poll.answers.get(arm.place)
            if not isinstance(refused, RequestError):
                return None  # it is being opened
            said = refused
        return other or said

    def _send(self, route: Route, arm: Arm, charge: float) -> None:
        ticket = route.ticket
        inner = RequestTicket(
            cast("Owner", None),
            deadline=ticket.deadline,
            model=arm.core.models[ticket.model.name],
            tensors=ticket.tensors,
            nbytes=ticket.nbytes,
            priority=ticket.priority,
            tags=ticket.tags,
        )
        inner.losses = route.losses
        route.hop = Hop(route, arm, inner, charge, self._back)
        inner.owner = route.hop
        route.hops += 1
        arm.took(route.hop)
        arm.core.submissions.post(inner)

    def _take_hop(self, hop: Hop, now: float) -> None:
        """End the ticket of a hop that came back, or let it wait for another arm."""
        route, arm, outcome = hop.route, hop.arm, hop.ticket.outcome
        if hop.closed:
            return
        arm.gave(hop)
        route.hop = None
        ticket = route.ticket
        ticket.client, ticket.id = arm.core.client, hop.ticket.id
        match outcome:
            case ResultEntry():
                ticket.model = hop.ticket.model
                timings = outcome.timings
                seconds = timings.run_us / 1e6 / max(1, timings.batch_requests)
                self._prices.learn(ticket.model.name, ticket.nbytes, seconds)
                self._compare(answering(ticket.model.name, timings.version), timings.digest, arm)
                self._end_route(route, outcome)
            case Moved():
                self._move(route, arm, outcome, now)
            case Unavailable() | Overloaded():
                route.tried.add(arm.place)
                route.error = outcome
                self._wait(route, now)
            case _:
                self._end_route(route, outcome)

    def _compare(self, model: str, digest: str | None, arm: Arm) -> None:
        """Tell once that servers have different files of a model, as they do while a new one is rolled out."""
        if digest is None or model in self._differing:
            return
        first, address = self._digests.setdefault(model, (digest, arm.address))
        if digest != first:
            self._differing.add(model)
            _log.warning(
                "model %r has other files at %s (%.12s) than at %s (%.12s): see timings.digest of each result",
                *(model, arm.address, digest, address, first),
            )

    def _move(self, route: Route, arm: Arm, moved: Moved, now: float) -> None:
        """Let a request go on from a server that is gone, or takes nothing new."""
        if moved.ran and not route.ticket.model.idempotent:
            self._end_route(route, WorkerLost(MAY_HAVE_RUN))
            return
        if moved.losses is not None:
            route.losses = moved.losses
            route.lost_at.add(arm.place)
        if moved.losses is not None and moved.losses >= MOST_LOSSES:
            self._poisoned(route, ENDED_SERVERS, now)
        else:
            self._wait(route, now)

    def _wait(self, route: Route, now: float) -> None:
        route.waits_since = now
        insort(self._waiting, route, key=lambda each: each.number)

    def _poisoned(self, route: Route, why: str, now: float) -> None:
        self._quarantine.keep(route.ticket.model.name, route.ticket.tensors, now)
        self._end_route(route, Poisoned(why))

    def _end_waits(self, now: float) -> None:
        """End the waiting requests whose time is over."""
        patience_s = self._settings.unavailable_after_s
        none_since = self._none_since
        for route in [*self._waiting]:
            deadline = route.ticket.deadline
            if deadline is not None and deadline <= now:
                words = NEVER_SENT if none_since is None else f"no server answers at {self._where}"
                if none_since is None and route.hops:
                    words = "the servers that had it did not answer in time"
                self._end_waiting(route, DeadlineExceeded(words))
            elif none_since is not None and now >= max(none_since, route.waits_since) + patience_s:
                words = f"no server has answered at {self._where} for {now - none_since:.0f} s"
                self._end_waiting(route, Unavailable(words))
            elif (
                route.losses
                and now >= route.waits_since + max(patience_s / 2, 2 * SETTLED_S)
                and none_since is None
                and not any(self._is_worth_the_risk(arm, route, now) for arm in self._open_arms())
            ):
                self._waiting.remove(route)
                self._poisoned(route, LAST_SERVER, now)

        for poll in [*self._questions.values()]:
            if poll.ticket.deadline is not None and poll.ticket.deadline <= now and not poll.inner:
                self._withdraw(poll.ticket)
                self._end(poll.ticket, Unavailable(f"no server answered at {self._where}"))

    @property
    def _where(self) -> str:
        """The addresses, for errors; and which names have none."""
        without = ", ".join(self._look_ups.without)
        return f"{self.name} (no address was found for {without})" if without else self.name

    def _end_waiting(self, route: Route, error: RequestError) -> None:
        self._waiting.remove(route)
        self._end_route(route, error)

    def _end_route(self, route: Route, outcome: Any) -> None:
        del self._routes[route.ticket]
        self._end(route.ticket, outcome)

    def _end(self, ticket: Question, outcome: Any) -> None:
        ticket.outcome = outcome
        self._finished.append(ticket)

    # ------------------------------------------------------------ questions to several arms

    def _ask_arms(self, ticket: Question) -> None:
        """Ask the arms: for a model or a welcome all, else those whose servers are there."""
        poll = self._questions[ticket] = Poll(ticket, self._back)
        arms = list(self._arms.values())
        if isinstance(ticket, StatisticsTicket | StoriesTicket):
            arms = self._open_arms() or arms
        for arm in arms:
            self._ask_arm(arm, poll)

    def _ask_arm(self, arm: Arm, poll: Poll) -> None:
        inner = _copy_of(poll.ticket, poll)
        inner.key = arm.place
        poll.inner[arm.place] = inner
        arm.core.submissions.post(inner)

    def _take_answers(self, poll: Poll) -> None:
        """End a question that was answered by the arms that it waits for."""
        for place, inner in poll.inner.items():
            if inner.outcome is not None:
                poll.answers[place] = inner.outcome
                if isinstance(inner.outcome, dict) and isinstance(inner, StatisticsTicket):
                    self._note_slots(place, inner.outcome)
        if self._questions.get(poll.ticket) is not poll:
            return  # it has ended, or the router asked it for itself
        outcome = self._answer(poll)
        if outcome is not None:
            del self._questions[poll.ticket]
            self._end(poll.ticket, outcome)

    def _answer(self, poll: Poll) -> Any:
        """Return the answer to a question; None where more arms are to be heard."""
        good = {
            place: answer for place, answer in poll.answers.items() if not isinstance(answer, RequestError)
        }
        there = {arm.place for arm in self._open_arms()} & poll.inner.keys()
        heard = poll.answers.keys()
        match poll.ticket:
            case WelcomeTicket() | OpenTicket() if good:
                return next(iter(good.values()))
            case StatisticsTicket() if good and there <= heard:
                return {"servers": {self._address_at(place): values for place, values in good.items()}}
            case StoriesTicket() if good and there <= heard:
                return self._stories(good)
        all_refused = bool(heard) and poll.inner.keys() <= heard
        if isinstance(poll.ticket, WelcomeTicket):
            words = "; ".join(error.message for error in poll.answers.values())
            return Unavailable(words) if all_refused else None
        return next(iter(poll.answers.values())) if all_refused or (there and there <= heard) else None

    def _stories(self, answers: dict[int, Any]) -> dict[str, Any]:
        stories = [
            {**story, "server": self._address_at(place)}
            for place, answer in answers.items()
            for story in answer.get("stories", ())
        ]
        return {"stories": stories} if stories else next(iter(answers.values()))

    def _note_slots(self, place: int, counters: dict[str, Any]) -> None:
        slots = counters.get("slots_in_all")
        for arm in self._arms.values():
            if arm.place == place and type(slots) is int:
                arm.slots = max(1, slots)

    def _address_at(self, place: int) -> str:
        return next((arm.address for arm in self._arms.values() if arm.place == place), "")

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        self._look_ups.stop()
        for arm in self._arms.values():
            arm.core.stop()
        self._take_submissions(self.clock())
        for ticket in [*self._routes, *self._questions]:
            self._end(ticket, Cancelled(CLOSED))
        self._finished += [closing(owner) for owner in self._streams.values()]
        self._deliver(self._finished)
        self.submissions.close()
        for arm in self._arms.values():
            arm.thread.join(_JOIN_S)
        for arm in self._arms.values():
            arm.thread.check()


def _copy_of(ticket: Question, owner: Owner) -> Question:
    """Return the question as one arm is asked it."""
    match ticket:
        case WelcomeTicket():
            return WelcomeTicket(owner, deadline=ticket.deadline)
        case OpenTicket():
            return OpenTicket(owner, deadline=ticket.deadline, name=ticket.name)
        case StatisticsTicket():
            return StatisticsTicket(owner, deadline=ticket.deadline, acknowledge=ticket.acknowledge)
        case StoriesTicket():
            return StoriesTicket(
                owner, deadline=ticket.deadline, request=ticket.request, slowest=ticket.slowest
            )
    raise TypeError(f"{type(ticket).__name__} is no question")
