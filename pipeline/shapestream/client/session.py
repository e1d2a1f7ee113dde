"""One client's half of protocol version 1, as a plain object: entries and tickets in and out. Pure.

How it works. The session stands between the core, which moves bytes, and the faces, which wait. It has no socket, no clock
and no await: the time is an argument. The core gives it tickets (`submit`, `cancel`) and entries (`receive`), and tells it
of connections (`connected`, `broke`, `refused`, `unreadable`). `turn()` returns the actions that are due, `next_wakeup()`
the time of the next turn. `InFlight` has the tickets; `Link` has the state of the connection.

    connected ──> Hello ──> Welcome ──> OpenModel, questions ──> requests within the server's window ──> results

Every question besides requests is asked once per connection, however many tickets wait for the answer. When a server is
gone, has forgotten the session, or another takes its place, the session opens its models again and sends unfinished
requests again, under the same numbers.

What it promises:
- Each submitted ticket is handed back exactly once, unless its owner withdrew it.
- The requests of a model leave in order of submission, within the server's window. A large one is asked for first, if the
  server grants (`GrantBounds`), and smaller ones pass it.
- A leaving server (`draining`) ends no request: the request waits for the next server. Where there are other addresses,
  the next is asked as soon as the leaving one has answered what it took.
- No request runs twice where its model is not idempotent: one that an earlier server may have run ends as `worker_lost`.
- A request that ends the server that runs it does not end all of them. What a server had that vanished, without a word that
  it leaves, is sent again as a suspect. The next server runs suspects one by one, and says so before (`RunsAlone`). If it
  vanishes then, that request alone may be to blame; after `MOST_LOSSES` of these losses it ends as `poisoned`. If a
  single server is left that has not vanished with it, that one is spared: the others are looked for, and then it ends so.
- A model that no ticket asked for is not listened to, or a server could fill this client's memory.
- A server may say anew what a model is, since a reload has changed it, and the next server may have another one. What was
  never sent is encoded anew for that, by the names of its inputs. What the same server was sent keeps its number; only what
  that refuses as `invalid`, since it does not fit the new model, is encoded anew, too.

What it does not do: it reads no tensors, knows nothing of streams, and does not open connections. It asks for a new one
(`Due.reconnect`).

The state of the connection (`Link`):

    DOWN ──connected──> GREETING ──Welcome──> OPEN
     ^                    │  ^                 │ │
     │<──no Welcome───────┘  └────Unknown──────┘ │
     │<──silence, unreadable answer──────────────┤
     └<──a rest──── LEFT <────────Goodbye────────┘

Entering DOWN asks the core for a new connection: messages that are still queued in the old one would only arrive late. A
connection that is merely interrupted heals inside ZeroMQ. A server that was restarted answers the next heartbeat with
`Unknown`, so the session is usually back within one heartbeat.

A greeting without an answer is given up after `greeting_s`; the time doubles with each attempt, up to `silence_s`. A server
that said goodbye is looked for after `rest_s`; where other servers are left to try, at once. A server that is silent is
given up, and hears from an idle client once per heartbeat (wire/peers.py).

The link also estimates the seconds of the way to the server (`one_way_s`), which the client takes off deadlines. The server
counts a request's time from its arrival. The estimate is half of the shortest round trip, less the time that the server had
the request; a greeting gives the first guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shapestream.client.tickets import (
    NEVER_SENT,
    AnyTicket,
    InFlight,
    ModelHandle,
    OpenTicket,
    Owner,
    Question,
    RequestTicket,
    StatisticsTicket,
    StoriesTicket,
    WelcomeTicket,
)
from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Poisoned,
    RequestError,
    Unavailable,
    WorkerLost,
    error_from_code,
)
from shapestream.wire.messages import (
    GRANTS_VERSION,
    AcknowledgeAudit,
    Ask,
    AsksFirst,
    Cancel,
    Clock,
    Credit,
    Entry,
    Explain,
    Explanation,
    Failure,
    Goodbye,
    GrantBounds,
    Granted,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    RequestEntry,
    ResultEntry,
    RunsAlone,
    StatisticsEntry,
    StatisticsRequest,
    Unknown,
    Welcome,
)
from shapestream.wire.peers import Liveness
from shapestream.wire.tags import MOST_LOSSES


@dataclass(slots=True, kw_only=True)
class Due:
    """The actions that are due: hand these tickets back, send these entries, then perhaps start a new connection."""

    finished: list[AnyTicket]
    entries: list[Entry]
    reconnect: bool


class Session:
    """The protocol's state on the client's side: tickets, connection, and the models opened so far."""

    def __init__(
        self,
        *,
        client: bytes,
        software: str,
        server: str,
        settings: LinkSettings,
        now: float,
        new_model: Callable[[str, dict[str, Any], int], ModelHandle] = ModelHandle,
    ) -> None:
        self._client = client
        self._software = software
        self._server = server
        self._new_model = new_model
        self._unavailable_after_s = settings.unavailable_after_s
        self._others = settings.others
        self._gives_up = settings.gives_up
        self._link = Link(settings, now)
        self.in_flight = InFlight(client)
        self._epoch: bytes | None = None
        self._here_since = -math.inf
        """When the server of the last welcome was first seen; a connection that breaks changes nothing about it."""
        self._alone: int | None = None
        """The number of the request that runs alone at the server, as that has said."""
        self._leaves = False
        """Whether the server of the last welcome has said that it leaves."""
        self._place = self._welcomed_at = 0
        """The places of the present address among all, and of the address of the last welcome."""
        self._look_at = math.inf
        """When servers that vanished are looked for, for a request that the present one is spared."""
        self._trouble = ""
        """The last connection's trouble, as the end of a sentence; empty after a welcome."""
        self.models: dict[str, ModelHandle] = {}
        """Opened models by name, for any thread. A model lives for as long as the server keeps its signature."""
        self._replaced: list[ModelHandle] = []
        """Models that a reload has changed, and whose numbers requests have."""
        self._models_asked: set[str] = set()
        self._statistics_asked = False
        self._control: list[Entry] = []
        self._credit: Credit | None = None
        """The server's last word on credit, to be repeated ahead of the requests that it admits."""
        self._heard_news = False
        """True once anything but a result was received since the last turn."""

    # ------------------------------------------------------------ callers

    def submit(self, ticket: Question) -> None:
        """Take a question. One whose answer is known is finished at once."""
        if type(ticket) is RequestTicket:
            if ticket.model.stale:
                self.in_flight.finish(ticket, Unavailable(GONE))
                return
            self.in_flight.add(ticket)
            if ticket.model.successor is not None:
                self.in_flight.move([ticket])
            return
        is_open = self._link.is_open
        model = self.models.get(ticket.name) if isinstance(ticket, OpenTicket) else None
        if model is not None and model.number is not None:
            self.in_flight.finish(ticket, model)
        elif is_open and isinstance(ticket, WelcomeTicket):
            self.in_flight.finish(ticket, True)
        else:
            self.in_flight.add(ticket)
            if is_open:
                self._ask(ticket)

    def cancel(self, ticket: Question) -> None:
        """Withdraw a question: it is not handed back. A server that has it is told."""
        if ticket.id in self.in_flight.tickets and self.in_flight.abandon(ticket) and self._link.is_open:
            self._control.append(Cancel(sequence=ticket.id))

    def cancel_owner(self, owner: Owner) -> None:
        """Withdraw all unfinished questions of this owner."""
        for ticket in [ticket for ticket in self.in_flight.tickets.values() if ticket.owner is owner]:
            self.cancel(ticket)

    # ------------------------------------------------------------ the connection

    def connected(self, now: float, place: int = 0) -> None:
        """Greet the server in the next turn: there is a new connection. `place` is that of its address among all."""
        self._place = place
        self._link.connected(now)

    def receive(self, entries: Iterable[Entry], now: float) -> None:
        """Take the entries of one or several messages."""
        self._link.heard_at = now
        for entry in entries:
            if type(entry) is ResultEntry:
                ticket = self.in_flight.answered(entry.sequence)
                if ticket is not None:
                    self._link.answered(now - ticket.sent_at, entry.timings.total_us)
                    self.in_flight.finish(ticket, entry)
            else:
                self._heard_news = True
                self._receive_other(entry, now)

    def unreadable(self, reason: str, now: float) -> None:
        """Give this connection up: a whole message could not be read."""
        self._heard_news = True
        self._trouble = f"; last problem: {reason}"
        self._link.left(now)

    def broke(self, now: float) -> None:
        """Ask the next server, where there is one: the connection has ended. Otherwise its transport makes it again."""
        if (self._others or self._gives_up) and self._link.is_open:
            self._link.left(now)

    def refused(self, reason: str | None) -> None:
        """Remember for errors why the last connection was not let in. None: it was, or no server is there."""
        if reason is not None:
            self._trouble = f"; {reason}"

    @property
    def takes_requests(self) -> bool:
        """True where a server is there that takes new requests."""
        return self._link.is_open and self.in_flight.held_at is None

    @property
    def epoch(self) -> bytes | None:
        """The bytes of the last server's life: equal for two addresses of one server; None before the first welcome."""
        return self._epoch

    def fail(self, sequence: int, error: RequestError) -> None:
        """End a request that cannot be encoded, or whose answer cannot be read."""
        ticket = self.in_flight.answered(sequence)
        if ticket is not None:
            self.in_flight.finish(ticket, error)

    # ------------------------------------------------------------ time

    @property
    def turn_is_due(self) -> bool:
        """True where `turn` has more to do than to hand back tickets; `next_wakeup` tells of what is due by time."""
        return self._heard_news or self.in_flight.has_sendable

    def turn(self, now: float, *, may_send: bool = True) -> Due:
        """Take the actions that are due. With `may_send=False` unsent requests stay here, where they can be withdrawn."""
        self._heard_news = False
        if self.in_flight.deadlines[0][0] <= now:
            self._end_expired(now)
        leaves = False
        if now >= self.in_flight.put_off_until:
            self.in_flight.note_put_off(now)  # those whose time has come are sent below, or in a later turn
        if now >= self._look_at and self._link.is_open:
            self._look_for_others()
        if self._link.lost_at is not None or self.in_flight.held_at is not None or self.in_flight.paused:
            self._end_waits(now)
            leaves = self._may_leave()
            if leaves:
                self._link.left(now)
        reconnect = self._link.must_reconnect(now)
        if self._gives_up and not self.takes_requests:
            self._give_up_requests()
        entries: list[Entry] = []
        if may_send:
            entries = [Goodbye()] if leaves else self._due_entries(now)
        if entries or not may_send:
            self._link.sent_at = now  # messages that the transport still holds are a sign of life as well
        return Due(finished=self.in_flight.take_finished(), entries=entries, reconnect=reconnect)

    def _give_up_requests(self) -> None:
        """Hand requests back for other servers: all of a server that is gone, of a leaving one those that it has not."""
        in_flight = self.in_flight
        if self._link.is_open:
            waiting = list(in_flight.waiting.values())
            in_flight.give_up(waiting, None, vanished=False)
        else:
            wanted = [ticket for ticket in in_flight.of_kind(RequestTicket) if not ticket.abandoned]
            in_flight.give_up(wanted, self._alone, vanished=not self._leaves)

    def _may_leave(self) -> bool:
        """Tell whether another server is to be asked: this one takes, or gets, nothing new, and has answered all it took."""
        in_flight = self.in_flight
        held = (in_flight.held_at is not None or in_flight.paused) and not in_flight.outstanding_requests
        return held and bool(self._others) and self._link.is_open

    def next_wakeup(self) -> float:
        """Return the time at which `turn` must be called again, if nothing happens before; infinity for never."""
        link, in_flight = self._link, self.in_flight
        due = min(link.next_wakeup(), in_flight.deadlines[0][0])
        if link.lost_at is not None and in_flight.has_ticket_besides(WelcomeTicket):
            due = min(due, link.lost_at + self._unavailable_after_s)
        if link.is_open:
            due = min(due, self._look_at, in_flight.put_off_until)
        if in_flight.held_at is not None and in_flight.waiting:
            due = min(due, in_flight.held_at + self._unavailable_after_s)
        return due

    def close(self) -> Due:
        """Leave: every ticket ends with `Cancelled`, and the server hears `Goodbye`."""
        self.in_flight.fail_all(lambda: Cancelled("the client was closed"))
        entries: list[Entry] = [*self._control, Goodbye()] if self._link.is_open else []
        self._control = []
        return Due(finished=self.in_flight.take_finished(), entries=entries, reconnect=False)

    def _end_waits(self, now: float) -> None:
        """End the waits for a server: none for `unavailable_after_s`, or for as long one that takes nothing new.

        The wait for the first welcome has its own deadline, which may be later.
        """
        lost_at, held_at = self._link.lost_at, self.in_flight.held_at
        if lost_at is not None and now >= lost_at + self._unavailable_after_s:
            text = f"no server has answered at {self._server} for {now - lost_at:.0f} s{self._trouble}"
            self.in_flight.fail_all(lambda: Unavailable(text), besides=WelcomeTicket)
        if held_at is not None and now >= held_at + self._unavailable_after_s:
            text = f"the server at {self._server} has taken nothing new for {now - held_at:.0f} s, and no other has come"
            self.in_flight.fail_waiting(lambda: Draining(text))

    def _end_expired(self, now: float) -> None:
        """End the tickets whose deadline has come."""
        for ticket in self.in_flight.expired(now):
            error = self._too_late(ticket)
            self.in_flight.abandon(ticket)
            self.in_flight.finish(ticket, error)

    def _too_late(self, ticket: Question) -> RequestError:
        """Return the error of a ticket whose deadline has come. It names the event that the ticket waited for."""
        if isinstance(ticket, WelcomeTicket):
            return Unavailable(f"no server answered at {self._server}{self._trouble}")
        if not self._link.is_open:
            return DeadlineExceeded(f"no server answers at {self._server}{self._trouble}")
        if ticket.id not in self.in_flight.waiting and ticket.id not in self.in_flight.asked:
            return DeadlineExceeded("the server's answer did not come in time")
        return DeadlineExceeded(NEVER_SENT if self.in_flight.held_at is None else _DRAINED)

    # ------------------------------------------------------------ received entries

    def _receive_other(self, entry: Entry, now: float) -> None:
        match entry:
            case Failure():
                self._failed(entry, now)
            case Welcome():
                self._welcome(entry, now)
            case Unknown():
                self._link.forgotten(now)
            case ModelOpened() if entry.name in self._models_asked or entry.name in self.models:
                self._model_opened(entry)
            case ModelRefused() if entry.name in self._models_asked:
                self._model_refused(entry)
            case Credit():
                self.in_flight.window_requests = entry.window_requests
                self.in_flight.window_bytes = entry.window_bytes
                self.in_flight.largest_bytes = max(self.in_flight.largest_bytes, entry.window_bytes)
                self._credit = entry
            case Granted():
                self.in_flight.granted(entry.sequence)
            case GrantBounds():
                self.in_flight.unasked_bytes = entry.unasked_bytes
                self.in_flight.most_granted_bytes = entry.most_bytes
            case StatisticsEntry():
                self._statistics_asked = False
                for ticket in self.in_flight.of_kind(StatisticsTicket):
                    self.in_flight.end(ticket, entry.values)
            case Explanation():
                asked = self.in_flight.tickets.get(-entry.question)
                if type(asked) is StoriesTicket:
                    self.in_flight.end(asked, entry.values)
            case RunsAlone():
                self._alone = entry.sequence
                if entry.sequence is not None and self._link.is_open:
                    self._control.append(entry)
            case Goodbye():
                self._leaves = True
                self._link.left(now)
            case _:
                pass  # heartbeats count as traffic; the rest is not for a client, and the codec refused it

    def _failed(self, entry: Failure, now: float) -> None:
        """End a request without a result, unless another server, or another run, may give one."""
        if entry.code == Draining.code and self.in_flight.hold(entry.sequence, now):
            return
        ticket = self.in_flight.answered(entry.sequence)
        if ticket is None:
            return
        self._link.refused(now - ticket.sent_at)
        may_run_again = ticket.model.idempotent
        lost = entry.code == AlreadyAnswered.code  # on its way, and the server keeps the reply no longer
        if lost and may_run_again and ticket.renewals < _MAX_RENEWALS:
            ticket.renewals += 1
            self.in_flight.add(ticket)
        elif entry.code == InvalidRequest.code and may_run_again and ticket.model.successor is not None:
            self.in_flight.add(ticket)
            self.in_flight.move([ticket])
        else:
            after = None if entry.retry_after_ms is None else entry.retry_after_ms / 1000
            self.in_flight.finish(ticket, error_from_code(entry.code, entry.message, retry_after_s=after))

    def _welcome(self, entry: Welcome, now: float) -> None:
        anew = not self._link.is_open or entry.epoch != self._epoch
        self.in_flight.window_requests = entry.window_requests
        self.in_flight.window_bytes = self.in_flight.largest_bytes = entry.window_bytes
        self.in_flight.unasked_bytes = math.inf  # until the server says what to ask for
        self._link.welcomed(entry.heartbeat_ms / 1000)
        self._trouble = ""
        if entry.epoch != self._epoch:
            self._give_up_what_may_have_run()
            if not self._leaves and self.in_flight.held_at is None:
                self._suspect_what_it_had(now)
            self._alone, self._welcomed_at = None, self._place
            self._void_numbers()
            if not self._others:  # of several servers, this one may have had higher numbers before
                self.in_flight.highest_sent = 0
            self._epoch, self._here_since = entry.epoch, now
        self._leaves = False
        if anew:
            self._link.guess_one_way(now)
            self._credit = None
            self._control = [Cancel(sequence=sequence) for sequence in self.in_flight.recall()]
            self._put_off(now)
            self._ask_again()

    def _give_up_what_may_have_run(self) -> None:
        """End the requests that an earlier server may have run, where their model must not run twice."""
        for ticket in self.in_flight.may_have_run():
            if not ticket.model.idempotent:
                self.in_flight.abandon(ticket)
                self.in_flight.finish(ticket, WorkerLost(MAY_HAVE_RUN))

    def _suspect_what_it_had(self, now: float) -> None:
        """Suspect what an earlier server had that vanished; end what has been lost alone too often."""
        for ticket in self.in_flight.suspect(self._welcomed_at, self._alone):
            self._poisoned(ticket, ENDED_SERVERS, now)

    def _poisoned(self, ticket: RequestTicket, why: str, now: float) -> None:
        """End a request that ended servers, and send none that equals it for a while."""
        self.in_flight.quarantine.keep(ticket.model.name, ticket.tensors, now)
        self.in_flight.abandon(ticket)
        self.in_flight.finish(ticket, Poisoned(why))

    def _put_off(self, now: float) -> None:
        """Let requests wait that may end this server.

        Those that the last server is spared end, if others were looked for in vain.
        """
        self._look_at = math.inf
        for ticket in self.in_flight.put_off(self._place, self._others, self._here_since, now):
            if ticket.looked:
                self._poisoned(ticket, LAST_SERVER, now)
            else:
                self._look_at = now + self._unavailable_after_s / 2

    def _look_for_others(self) -> None:
        """Send nothing more, so that this server is left as soon as it has answered, if a request waits for another one."""
        self._look_at = math.inf
        for ticket in self.in_flight.spared():
            ticket.looked = self.in_flight.paused = True

    # ------------------------------------------------------------ models, counters and the welcome

    def _ask(self, ticket: Question) -> None:
        """Ask the server, unless it was asked on this connection. The greeting itself asks for a welcome."""
        if isinstance(ticket, OpenTicket):
            self._ask_for_model(ticket.name)
        elif isinstance(ticket, StatisticsTicket):
            if ticket.acknowledge is not None:
                self._control.append(AcknowledgeAudit(model=ticket.acknowledge))
            if not self._statistics_asked:
                self._statistics_asked = True
                self._control.append(StatisticsRequest())
        elif isinstance(ticket, StoriesTicket):
            self._control.append(Explain(question=-ticket.id, request=ticket.request, slowest=ticket.slowest))

    def _ask_for_model(self, name: str) -> None:
        if name not in self._models_asked:
            self._models_asked.add(name)
            self._control.append(OpenModel(name=name))

    def _ask_again(self) -> None:
        """Repeat the questions of an earlier connection, whose answers will not come.

        Every model opened so far is asked for: a reload may have changed it, and requests that wait for credit need its
        number. Until the answer none is sent, since the bounds of grants come first.
        """
        self._models_asked.clear()
        self._statistics_asked = False
        for model in (*self.models.values(), *self._replaced):
            model.number = None
        for welcomed in self.in_flight.of_kind(WelcomeTicket):
            self.in_flight.end(welcomed, True)
        for name in self.models:
            self._ask_for_model(name)
        for opening in self.in_flight.of_kind(OpenTicket):
            self._ask(opening)
        for counting in self.in_flight.of_kind(StatisticsTicket):
            self._ask(counting)
        for asking in self.in_flight.of_kind(StoriesTicket):
            self._ask(asking)

    def _void_numbers(self) -> None:
        """Know no number at another server. What has a signature that is not the last one is encoded anew."""
        for model in self.models.values():
            model.number = model.number_here = None
        replaced, self._replaced = self._replaced, []
        for model in replaced:
            self.in_flight.move(self._requests_of(model))

    def _requests_of(self, model: ModelHandle) -> list[RequestTicket]:
        """Return the requests of a model that a caller waits for."""
        wanted = [ticket for ticket in self.in_flight.of_kind(RequestTicket) if not ticket.abandoned]
        return [ticket for ticket in wanted if ticket.model is model]

    def _replace(self, model: ModelHandle) -> None:
        """Encode anew what this server never had of a model that has changed, and keep its number for the rest."""
        requests = self._requests_of(model)
        if model.number_here is not None:
            model.number = model.number_here
            requests = [
                each for each in requests if each.id in self.in_flight.waiting and not each.may_have_run
            ]
        self.in_flight.move(requests)
        used = [ticket.model for ticket in self.in_flight.of_kind(RequestTicket)]
        self._replaced = [known for known in (*self._replaced, model) if any(one is known for one in used)]

    def _model_opened(self, entry: ModelOpened) -> None:
        """Give the model to all tickets that wait for it, and what was never sent of the one before."""
        self._models_asked.discard(entry.name)
        model = self.models.get(entry.name)
        # Another number for the same signature: it has changed there and back. What was sent keeps its number.
        same_number = model is not None and model.number_here in (None, entry.number)
        if model is not None and same_number and model.described == entry.signature:
            model.number = model.number_here = entry.number
        else:
            replaced = model
            model = self.models[entry.name] = self._new_model(entry.name, entry.signature, entry.number)
            model.number_here = entry.number
            if replaced is not None:
                replaced.successor = model
                self._replace(replaced)
        for earlier in self._replaced:
            if earlier.name == entry.name:
                earlier.number = earlier.number_here
        for ticket in self.in_flight.of_kind(OpenTicket):
            if ticket.name == entry.name:
                self.in_flight.end(ticket, model)

    def _model_refused(self, entry: ModelRefused) -> None:
        """Tell all tickets that wait for the model why there is none, and the requests of a model that was open."""
        self._models_asked.discard(entry.name)
        model = self.models.pop(entry.name, None)
        gone = [each for each in self._replaced if each.name == entry.name]
        if model is not None:
            model.stale = True
            gone.append(model)
        for each in gone:
            self.in_flight.fail_requests_of(each, lambda: error_from_code(entry.code, entry.message))
        for ticket in self.in_flight.of_kind(OpenTicket):
            if ticket.name == entry.name:
                self.in_flight.end(ticket, error_from_code(entry.code, entry.message))

    # ------------------------------------------------------------ sent entries

    def _due_entries(self, now: float) -> list[Entry]:
        if self._link.state is not LinkState.OPEN:
            greets = self._link.take_hello(now)
            hello = Hello(client=self._client, software=self._software)
            return [hello, AsksFirst(version=GRANTS_VERSION), _clock(now)] if greets else []
        entries, self._control = self._control, []
        needs_clock = self._credit is not None
        if self._credit is not None:
            entries.append(self._credit)
            self._credit = None
        requests: list[Cancel | Ask | RequestEntry] = []
        if self.in_flight.has_sendable:
            requests = self.in_flight.take_sendable(now, self._link.one_way_s)
            for request in requests:
                needs_clock |= not isinstance(request, Cancel) and request.remaining_ms is not None
        if needs_clock:
            entries.append(_clock(now))
        entries += requests
        if not entries and self._link.heartbeat_due(now):
            entries.append(Heartbeat())
        return entries

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; for tests, after every step."""
        self.in_flight.check_invariants()
        assert not any(model.stale for model in self.models.values())
        assert all(name == model.name for name, model in self.models.items())
        if self._link.is_open:
            assert all(ticket.name in self._models_asked for ticket in self.in_flight.of_kind(OpenTicket))
            assert self._statistics_asked or not self.in_flight.of_kind(StatisticsTicket)
            assert not self.in_flight.of_kind(WelcomeTicket)


def _clock(now: float) -> Clock:
    return Clock(sent_us=max(0, round(now * 1e6)))


# Each renewal takes a connection that broke right before a reply: a server that causes more always says so.
_MAX_RENEWALS = 3
GONE = "the server had no model of this name for a while; submit again"
_DRAINED = "the server is leaving and takes nothing new, and no other has taken its place"
ENDED_SERVERS = f"{MOST_LOSSES} servers vanished while they ran this request, and nothing else"
LAST_SERVER = "each other server vanished while it had this request, one while it ran nothing else, and none has come back"
MAY_HAVE_RUN = (
    "the server was replaced while it had this request; whether it ran is not known, and this model's requests are never "
    "run twice"
)


# At most so much of a greeting's time counts as the way: the rest was the server's start, or the connection being made.
MAX_GREETING_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The timeouts of a client, in seconds."""

    greeting_s: float = 1.0
    """Time that a `Hello` may go unanswered before a new connection is tried; doubles up to `silence_s`."""
    silence_s: float = 10.0
    """A server that has said nothing for so long counts as gone."""
    rest_s: float = 0.5
    """Wait before looking for a server that said goodbye."""
    unavailable_after_s: float = 60.0
    """With no server for so long, waiting requests fail with `unavailable`."""
    others: int = 0
    """Servers besides the present one. While none has answered since, the next is looked for without a rest."""
    gives_up: bool = False
    """True: requests that this server cannot have now are given up (`Moved`), for the sessions of other servers."""

    def __post_init__(self) -> None:
        """Raise ValueError for a time that is not above 0."""
        for name in ("greeting_s", "silence_s", "rest_s", "unavailable_after_s"):
            seconds = getattr(self, name)
            if not seconds > 0:
                raise ValueError(f"{name.removesuffix('_s')} is a number of seconds above 0, not {seconds!r}")


class LinkState(Enum):
    """The state of a connection. The head of this file draws the changes."""

    DOWN = "down"
    GREETING = "greeting"
    OPEN = "open"
    LEFT = "left"


class Link(Liveness):
    """The state of one connection after another, and the time at which the next step is due."""

    def __init__(self, settings: LinkSettings, now: float) -> None:
        super().__init__(settings.silence_s, now)
        self._settings = settings
        self.state = LinkState.DOWN
        self.lost_at: float | None = now
        """The time since which there has been no server; None while there is one."""
        self._hello_due = False
        self._attempts = 0
        self._left = 0
        """Servers left since the last answer to a request."""
        self._act_at = math.inf
        self.one_way_s = 0.0
        """The way to the server, at its fastest on this connection."""
        self._greeted_at = 0.0
        self._one_way_measured = False

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self.state is LinkState.OPEN

    def connected(self, now: float) -> None:
        """Begin a greeting: on a new connection, or again on this one."""
        self.state = LinkState.GREETING
        self._hello_due = True
        self.heard_at = now
        patience = self._settings.greeting_s * 2.0 ** min(self._attempts, 16)
        self._attempts += 1
        self._act_at = now + min(patience, self._settings.silence_s)

    def welcomed(self, heartbeat_s: float) -> None:
        """Open the session: `Welcome` has arrived. `heartbeat_s` is how often the server wants to hear of this client."""
        self.state = LinkState.OPEN
        self.beat_every(heartbeat_s)
        self._act_at = math.inf
        self._attempts = 0
        self._hello_due = False
        self.lost_at = None

    def forgotten(self, now: float) -> None:
        """Greet again on this connection: `Unknown` has arrived. Further ones change nothing."""
        if self.state is LinkState.OPEN:
            self._lose(now)
            self.connected(now)

    def left(self, now: float) -> None:
        """Rest, then look for a server: `Goodbye` has arrived, or a message that cannot be read."""
        if self.state is LinkState.LEFT:
            return
        self._lose(now)
        self.state = LinkState.LEFT
        self._act_at = now if self._left < self._settings.others else now + self._settings.rest_s
        self._left += 1

    def take_hello(self, now: float) -> bool:
        """Tell whether `Hello` must be sent now; True once per greeting."""
        due, self._hello_due = self._hello_due, False
        if due:
            self._greeted_at = now
        return due

    def must_reconnect(self, now: float) -> bool:
        """Tell whether this connection is to be given up now. True once; the link is then DOWN."""
        silent = (
            self.state is LinkState.OPEN and now >= self.heard_at + self.silence_s and self.is_silent(now)
        )
        if not silent and now < self._act_at:
            return False
        if silent:
            self._lose(now)
        self.state = LinkState.DOWN
        self._hello_due = False
        self._act_at = math.inf
        return True

    def guess_one_way(self, now: float) -> None:
        """Take half of the greeting's time as the first guess of `one_way_s`, until a reply tells better."""
        self.one_way_s = min(max(0.0, (now - self._greeted_at) / 2), MAX_GREETING_S)
        self._one_way_measured = False

    def answered(self, elapsed_s: float, served_us: int) -> None:
        """Learn `one_way_s` from a result that came `elapsed_s` after its request was sent.

        The server had the request for `served_us`. A reply from an earlier connection's time gives a negative rest, and is
        not used.
        """
        self._left = 0
        one_way_s = (elapsed_s - served_us * 1e-6) / 2
        if one_way_s >= 0.0 and not (self._one_way_measured and one_way_s >= self.one_way_s):
            self.one_way_s = one_way_s
            self._one_way_measured = True

    def refused(self, elapsed_s: float) -> None:
        """Bound `one_way_s` by an error that came `elapsed_s` after its request was sent: the way is at most half of that.

        An error does not say how long the server had the request. But a guess that is too high has more requests refused,
        whose replies would never correct it.
        """
        self.one_way_s = min(self.one_way_s, max(0.0, elapsed_s / 2))

    def next_wakeup(self) -> float:
        """Return the time at which something may become due."""
        return super().next_wakeup() if self.state is LinkState.OPEN else self._act_at

    def _lose(self, now: float) -> None:
        self.beat_every(math.inf)
        if self.lost_at is None:
            self.lost_at = now
