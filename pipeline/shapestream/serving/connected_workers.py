"""The workers that are connected to one port: how they are let in, their sessions, and what follows when they come and go.

A worker's greeting is checked, read in slices, and then begins a session or is refused (`Greetings`). A worker leaves the
register (`ConnectedWorkers`) once, whatever ends it: a goodbye, silence, a broken connection, the end of its process, or a
message that cannot be accepted. Its reports are handed to the dispatcher before that, and its other batches run elsewhere.

The owner of the processes that were started for this server (`OwnProcesses`) tells how each ends. Of a worker that dialled
in, the server knows only its messages.

A model without a worker *yet*, or whose worker is being started again, stays available: its requests wait. A model is
unavailable when its workers were given up, since its requests would wait for ever. A worker that dials in with it makes it
available again (`Availability`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol

import trio

from shapestream.errors import ConfigurationError
from shapestream.serving.client_port import ClientPort
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.port_traffic import Outgoing
from shapestream.serving.served_models import OtherModel, ServedModel, ServedModels, ServedPart
from shapestream.serving.workers import (
    MAX_NAME,
    ConnectedWorker,
    GreetingRefused,
    Offer,
    SlotRecord,
    WorkerState,
    check_form,
    check_number,
    narrowed,
    read_offer,
)
from shapestream.slices import SlicedWork, Slices
from shapestream.telemetry.logging import get_logger
from shapestream.telemetry.presence import WorkerPresence
from shapestream.wire.messages import (
    WORKER_PROTOCOL,
    BatchDone,
    BatchFailedEntry,
    Goodbye,
    SlotHello,
    Unknown,
    WorkerHello,
    WorkerRefused,
)
from shapestream_engine.batch import BatchReport

log = get_logger()

_SERVING = WorkerState.SERVING  # a look-up on an enum costs three times a global

# What one connection may have unserved: a slot reports a bundle at most, whatever the bytes of its outputs.
MOST_UNREAD = 4096
MOST_UNREAD_BYTES = 2 << 30


class ConnectedWorkers:
    """The workers of one port, by the routing ids of their connections."""

    __slots__ = (
        "_availability",
        "_cut_off",
        "_dispatcher",
        "_outgoing",
        "_processes",
        "_reports",
        "_statistics",
        "_tokens",
        "controls",
        "sessions",
        "slots",
    )

    def __init__(
        self,
        outgoing: Outgoing,
        cut_off: Callable[[bytes], None],
        dispatcher: Dispatcher,
        availability: Availability,
        processes: OwnProcesses | None = None,
    ) -> None:
        """`cut_off`: ignores a connection from now on, and what it has sent. `processes`: those whose slots may be held."""
        self._outgoing = outgoing
        self._cut_off = cut_off
        self._dispatcher = dispatcher
        self._availability = availability
        self._processes = processes
        self._statistics = outgoing.statistics
        self.sessions = count(1)
        """Numbers of sessions; none is used twice."""
        self.controls: dict[bytes, ConnectedWorker] = {}
        """Workers by the routing id of their control."""
        self.slots: dict[bytes, SlotRecord] = {}
        """The slots that have greeted, by routing id."""
        self._tokens: dict[bytes, ConnectedWorker] = {}
        """Workers by the token that their slots greet with."""
        self._reports: list[BatchReport] = []
        """The reports of this turn."""

    def of(self, peer: bytes) -> ConnectedWorker | None:
        """Return the worker whose control, or one of whose slots, this connection is."""
        slot = self.slots.get(peer)
        return self.controls.get(peer) if slot is None else slot.worker

    def named(self, name: str) -> ConnectedWorker | None:
        """Return the worker of this name."""
        return next((worker for worker in self.controls.values() if worker.name == name), None)

    # ---------------------------------------------------------------- begin

    def add(self, worker: ConnectedWorker) -> None:
        """Begin a worker's session."""
        if worker.peer is not None:
            self.controls[worker.peer] = worker
        self._tokens[worker.token] = worker

    def greet_slot(self, peer: bytes, hello: SlotHello, now: float) -> None:
        """Let a slot in, by its worker's token and key. With the last of its slots the worker joins, unless it is held."""
        worker, socket = self._tokens.get(hello.token), self._outgoing.socket
        if worker is None:  # its session is over, or is another server's
            self._outgoing.tell_stranger(peer, now)
            return
        control = worker.peer
        if control is not None and socket.key_of(control) != socket.key_of(peer):
            why = "a slot with the token of a worker that has another key"
        elif hello.slot >= len(worker.slots) or worker.slots[hello.slot].has_greeted:
            why = f"slot {hello.slot} of {worker.name!r} is none, or has greeted already"
        else:
            slot = worker.slots[hello.slot]
            slot.peer = peer
            self.slots[peer] = slot
            if worker.has_greeted and worker.state is WorkerState.GREETING:
                self.join([worker], now)
                if self._processes is not None:
                    self._processes.slots_greeted(worker.name)
            return
        self._outgoing.refuse(peer, why, now)
        self.turn_away(peer)

    def join(self, workers: Iterable[ConnectedWorker], now: float) -> None:
        """Give batches to those of these workers whose slots have all greeted, and that are not held."""
        for worker in workers:
            held = self._processes is not None and self._processes.holds(worker)
            if worker.has_greeted and worker.state is WorkerState.GREETING and not held:
                worker.change("serve", now)
                self._availability.promote(worker, now)
                self._dispatcher.worker_joined(worker, now)
        self._availability.workers_changed(now)

    # ---------------------------------------------------------------- reports

    def reported(self, slot: SlotRecord, entry: BatchDone | BatchFailedEntry, now: float) -> None:
        """Take a report, for the end of this turn. Raises ReportRefused for one that cannot be believed."""
        worker = slot.worker
        if entry.session != worker.session:
            self._statistics.late_reports += 1
            return
        self._reports.append(slot.report(entry, now))
        if worker.state is not _SERVING:
            self.dismiss_if_idle(worker, now)

    def hand_on_reports(self, now: float) -> None:
        """Hand the reports of this turn to the dispatcher, together."""
        if self._reports:
            reports, self._reports = self._reports, []
            self._dispatcher.batches_reported(reports, now)

    def slot_ended(self, slot: SlotRecord, batch: int | None, now: float) -> None:
        """Take a slot out of the books whose thread has ended. Its connection is gone, and what was unread there is late."""
        self.hand_on_reports(now)
        if slot.peer is not None:
            self.slots.pop(slot.peer, None)
            slot.peer = None
        self._dispatcher.slot_ended(slot, batch, now)

    # ---------------------------------------------------------------- end

    def close(self, worker: ConnectedWorker, change: str, now: float) -> None:
        """Give a worker no more batches, since it drains, says goodbye, or cannot be reached."""
        worker.change(change, now)
        self._dispatcher.worker_closing(worker, now)

    def dismiss_if_idle(self, worker: ConnectedWorker, now: float) -> None:
        """Let a worker go that drains, or has said goodbye, and has answered everything."""
        if worker.running:
            return
        if worker.state is WorkerState.LEAVING:
            self.leave(worker, "goodbye", now)
        elif worker.state is WorkerState.DRAINING and worker.peer is not None:
            log.info("worker drained", worker=worker.name, pid=worker.pid)
            self._outgoing.say_once(worker.peer, Unknown() if worker.greets_anew else Goodbye())
            self._forget(worker, now)

    def let_go(self, worker: ConnectedWorker, now: float) -> None:
        """End the session of a worker that drains and has answered everything. What it has not answered runs elsewhere."""
        if worker.state is not WorkerState.GONE:
            log.info("worker drained", worker=worker.name, pid=worker.pid)
            self._forget(worker, now)

    def leave(self, worker: ConnectedWorker, why: str, now: float, *, died: bool = False) -> None:
        """End a worker's session, if it has not ended; its batches run again elsewhere. `died`: perhaps of one of them."""
        if worker.state is WorkerState.GONE:
            return
        self._statistics.peers_lost[f"worker: {why}"] += 1
        log.warning(
            "worker left",
            worker=worker.name,
            pid=worker.pid,
            why=why,
            batches=worker.running,
        )
        self._forget(worker, now, died=died)

    def _forget(self, worker: ConnectedWorker, now: float, *, died: bool = False) -> None:
        # Before its last reports are taken: for what it has answered it is given nothing more.
        self._dispatcher.worker_closing(worker, now)
        self.hand_on_reports(now)
        if worker.dialled_in:
            drained = worker.state in (WorkerState.DRAINING, WorkerState.LEAVING)
            self._statistics.dialled_in_ends["drained" if drained else "lost"] += 1
        del self._tokens[worker.token]
        if worker.peer is not None:
            del self.controls[worker.peer]
        for slot in worker.slots:
            if slot.peer is not None:
                self.slots.pop(slot.peer, None)
        self._dispatcher.worker_left(worker, now, died=died)
        worker.left(now)
        self._availability.workers_changed(now)

    def turn_away(self, peer: bytes) -> None:
        """Tell a connection to end, and ignore it from now on."""
        self._outgoing.say_once(peer, Goodbye())
        self._cut_off(peer)


SILENCES_TO_KILL = 10
"""Multiple of `worker_silence_s` after which a silent process of this server is killed, and so replaced.

It is lost already, and its batches ran elsewhere. One that was only stopped for a while may come back before that.
"""


class ProcessOwner(Protocol):
    """The starter of worker processes for this server. Its calls return at once."""

    def owns(self, worker: str) -> bool:
        """Tell whether the process that greets by this name is one of its own, and its end was not told yet."""

    @property
    def moves(self) -> bool:
        """Tell whether processes wait for each other, to get batches together."""

    def holds(self, worker: str) -> bool:
        """Tell whether that process is one of them."""

    def leaves(self, worker: str) -> bool:
        """Tell whether that process was asked to finish."""

    def greeted(self, worker: str) -> None:
        """Note that all slots of that process have greeted."""

    def kill(self, worker: str, reason: str) -> None:
        """Kill that process. Its end is reported like any other."""

    @property
    def presences(self) -> Mapping[str, WorkerPresence]:
        """Return the presence of each worker that it keeps running, by name."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Return the bytes of RAM of their processes, by the same names."""


class OwnProcesses:
    """The worker processes of this server, as the workers' port knows them; none without an owner."""

    def __init__(self, silence_s: float) -> None:
        self.owner: ProcessOwner | None = None
        """The starter of the processes; None if this server has none."""
        self._silence_s = silence_s
        self._silent_since: dict[str, float] = {}
        """Times at which processes were lost for their silence, by name."""
        self._refused: dict[str, str] = {}
        """Reasons why greetings were refused, by name, of processes that have not ended yet."""

    def own(self, name: str) -> bool:
        """Tell whether the worker of this name is one of these processes."""
        return self.owner is not None and self.owner.owns(name)

    def holds(self, worker: ConnectedWorker) -> bool:
        """Tell whether a worker gets no batches yet: of one that dialled in, since it would change a model by itself."""
        if self.owner is None:
            return False
        if worker.dialled_in:
            return self.owner.moves and any(model.number < 0 for model in worker.serves.values())
        return self.owner.holds(worker.name)

    def leaves(self, name: str) -> bool:
        """Tell whether the process of this name was asked to finish."""
        return self.owner is not None and self.owner.leaves(name)

    def slots_greeted(self, name: str) -> None:
        """Tell the owner that all slots of a process have greeted."""
        if self.owner is not None:
            self.owner.greeted(name)

    def greeted(self, name: str) -> None:
        """Forget the silence of a process, since it has greeted again."""
        self._silent_since.pop(name, None)

    def refused(self, name: str, why: str) -> None:
        """Keep the reason why a greeting was refused, until the process ends."""
        if self.own(name):
            self._refused[name] = why

    def ended(self, name: str) -> str:
        """Forget a process that has ended. Returns why its greeting was refused; empty if it was not."""
        self._silent_since.pop(name, None)
        return self._refused.pop(name, "")

    def silent(self, name: str, now: float) -> None:
        """Count the silence of a process from now on."""
        if self.own(name):
            self._silent_since[name] = now

    def kill_silent(self, now: float) -> None:
        """Kill the processes that stayed silent."""
        for name, since in list(self._silent_since.items()):
            if self.owner is None or not self.owner.owns(name):
                del self._silent_since[name]
            elif now - since > SILENCES_TO_KILL * self._silence_s:
                del self._silent_since[name]
                self.owner.kill(name, f"it was silent for {now - since:.0f} s")


class Availability:
    """Tells the dispatcher and the clients' port when a model comes, becomes unavailable, and is available again."""

    def __init__(
        self,
        models: ServedModels,
        dispatcher: Dispatcher,
        clients: ClientPort,
        *,
        workers_may_come: bool,
        forget_after_s: float,
    ) -> None:
        """`forget_after_s`: seconds for which a removed model is remembered, so that clients are told why it is gone."""
        self._models = models
        self._dispatcher = dispatcher
        self._clients = clients
        self._workers_may_come = workers_may_come
        self._given_up: dict[str, str] = {}
        """Reasons by name of model; at most one for each model of the configuration."""
        self._forget_after_s = forget_after_s
        self._left_at: dict[str, float] = {}
        """When it was first seen that a name was removed from the configuration."""

    def models_added(self, models: Iterable[ServedModel], now: float) -> None:
        """Admit requests for these models, which no worker has brought before."""
        for model in models:
            self._dispatcher.model_added(model, now)
            self._clients.model_added(model)
        for name, why in self._models.unavailable.items():  # a chain may not fit them
            self._clients.model_unavailable(name, why)

    def promote(self, worker: ConnectedWorker, now: float) -> None:
        """Give all further requests of a name to the generation that this worker brings, if that is a newer one."""
        for name, offered in [*worker.serves.items()]:
            model, live = offered.latest(), self._models.by_name.get(name)
            if (new := self._models.promote(model)) and live is not None:
                same = "its signature is the same" if model.like else "its signature is another one"
                log.info("model changes", model=name, worker=worker.name, what=same)
            elif model.number < 0:  # another worker came first
                if live is None or live.description != model.description:
                    del worker.serves[name]
                    continue
                model = live
            worker.serves[name] = model
            self.models_added(new, now)
        for name in worker.serves:
            self._models.joined(name, worker.digests.get(name))

    def is_served(self, name: str) -> bool:
        """Tell whether any worker that is here has this model, in the generation that gets requests."""
        live = self._models.by_name.get(name)
        return any(self._serves(slot.worker, name, live) for slot in self._dispatcher.slots.values())

    @staticmethod
    def _serves(worker: ConnectedWorker, name: str, model: ServedModel | None) -> bool:
        served = worker.serves.get(name)
        return served is not None and (model is None or served.latest() is model.latest())

    def is_needed(self, worker: ConnectedWorker, leaves: Callable[[str], bool] = lambda name: False) -> bool:
        """Tell whether requests wait for a model, in an old generation, that no other worker has.

        `leaves`: tells by name which others are about to end.
        """
        old = [model for served in worker.serves.values() if (model := served.latest()).successor is not None]
        waited_for = [model for model in old if not self._dispatcher.is_idle(model)]
        if not waited_for:
            return False
        others = {other for other in self._others(worker) if not leaves(other.name)}
        return any(
            not any(self._serves(other, model.name, model) for other in others) for model in waited_for
        )

    def _others(self, worker: ConnectedWorker) -> set[ConnectedWorker]:
        """Return the workers that get batches besides this one."""
        slots = self._dispatcher.slots.values()
        return {slot.worker for slot in slots if slot.worker is not worker and slot.worker.is_serving}

    def is_outdated(self, worker: ConnectedWorker) -> bool:
        """Tell whether a worker has another model, by files, engine or signature, than others serve since a reload.

        Not while an old generation of it has requests: it would be welcome again.
        """
        old = [model for served in worker.serves.values() if (model := served.latest()).successor is not None]
        stale = {other.name for other in self._models.others(worker.serves, worker.digests, worker.engines)}
        stale.update([model.name for model in old])
        if not stale or not all(map(self._dispatcher.is_idle, old)):
            return False
        others = self._others(worker)
        return any(
            self._serves(other, name, self._models.by_name.get(name))
            and not any(self._models.others([name], other.digests, other.engines))
            for name in stale
            for other in others
        )

    def sweep(self, now: float) -> None:
        """Forget generations and models that are gone, when their last request has ended. Call it now and then."""
        for model in self._models.retire(self._dispatcher.is_idle):
            self._dispatcher.model_removed(model, now)
        for name in self._models.withdrawn:
            model_left = self._models.by_name.get(name)
            left_at = self._left_at.setdefault(name, now)
            if now - left_at < self._forget_after_s or self.is_served(name):
                continue
            if model_left is not None and not self._dispatcher.is_idle(model_left):
                continue
            del self._left_at[name]
            self._given_up.pop(name, None)
            if (gone := self._models.forget(name)) is not None:
                self._dispatcher.model_removed(gone, now)
        for name in self._left_at.keys() - {*self._models.withdrawn}:
            del self._left_at[name]

    def give_up(self, name: str, why: str, now: float) -> None:
        """Expect no process for this model any more."""
        self._given_up[name] = why
        self.workers_changed(now)

    def own_slots_ended(self, now: float) -> None:
        """Give up the models that only slots of this process had, if no worker can connect: they cannot come back."""
        if self._workers_may_come:
            return
        for name in self._models.names:
            if name not in self._models.chains and not self.is_served(name):
                why = "the threads of all slots in the server's process have ended; reload or restart the server"
                self.give_up(name, why, now)

    def hope_again(self, name: str) -> None:
        """Let requests wait for a model whose processes are started again."""
        if self._given_up.pop(name, None) is not None:
            self._models.unavailable.pop(name, None)

    def workers_changed(self, now: float) -> None:
        """Update the models that are new or were given up: a worker may serve them now. So of files that were kept."""
        for name in [name for name in self._models.kept if not self.is_served(name)]:
            self._models.lose_files(name)
        self._models.new -= {name for name in self._models.new if self.is_served(name)}
        for name, why in self._given_up.items():
            known = name in self._models.unavailable
            if self.is_served(name):
                if known:
                    log.info("model is available again", model=name)
                    del self._models.unavailable[name]
            elif not known:
                log.error("model is unavailable", model=name, why=why)
                message = f"model {name!r} is unavailable: {why}"
                self._models.unavailable[name] = message
                self._clients.model_unavailable(name, message)
                live_model = self._models.by_name.get(name)
                for key in [name] if live_model is None else self._models.keys_of(live_model):
                    self._dispatcher.model_given_up(key, message, now)
        for model in [*self._models.retiring.values()]:
            # With the signature of the live generation, its requests wait for whichever worker comes next.
            model.has_left = model.latest().successor is not None and not any(
                self._serves(slot.worker, model.name, model) for slot in self._dispatcher.slots.values()
            )
            if model.has_left:
                why = f"model {model.name!r} has changed, and no worker of the old one is left"
                self._dispatcher.model_given_up(model.key, why, now)


# Slots that may join at once, and per second after that. A worker with 256 takes about 20 ms to come and go, so that endless
# greetings take a fiftieth of the event loop's time.
MOST_JOINS = 8192
JOINS_PER_S = 256
# Workers that dialled in and hung, remembered so that they are not welcomed with a slot that is still held.
MAX_HUNG = 256

_OTHERS = {
    ServedPart.FILES: (
        "it has read other bytes of the model's files than those that are served",
        "to serve the files as they are now, send the server SIGHUP or restart it; else put the old ones back",
    ),
    ServedPart.ENGINE: (
        "it has another engine, or another version of it, than the one that is served",
        "install the same version everywhere; to serve what is installed now, send the server SIGHUP or restart it",
    ),
    ServedPart.SIGNATURE: (
        "its model has another signature than the one that is served",
        "start it with the server's file, or reload the server with its file",
    ),
}
"""Why a worker is refused whose model is another one than the served model of its name, and what to do."""


class Greetings:
    """The greetings that are being read, and the reasons for which one is refused."""

    def __init__(
        self,
        workers: ConnectedWorkers,
        outgoing: Outgoing,
        dispatcher: Dispatcher,
        models: ServedModels,
        availability: Availability,
        processes: OwnProcesses,
        welcome: Callable[[bytes, Offer, Mapping[str, ServedModel], float], None],
    ) -> None:
        """`welcome` begins the session of a worker whose offer is accepted."""
        self._workers = workers
        self._outgoing = outgoing
        self._dispatcher = dispatcher
        self._models = models
        self._availability = availability
        self._processes = processes
        self._welcome = welcome
        self._statistics = outgoing.statistics
        self._work = SlicedWork()
        self._reading: dict[bytes, WorkerHello] = {}
        """Greetings that are read, by the routing id of the control; `_take_join_room` bounds them."""
        self._hung: dict[str, None] = {}
        """Workers that dialled in and hung, the latest, by name."""
        self._join_room = float(MOST_JOINS)
        """Slots that may join now; negative after a large worker."""
        self._joined_at = trio.current_time()

    async def run(self) -> None:
        """Read greetings until cancelled."""
        await self._work.run(self._dispatcher.end_turn)

    def reads(self, peer: bytes) -> bool:
        """Tell whether the greeting of this connection is being read."""
        return peer in self._reading

    def drop(self, peer: bytes) -> None:
        """Drop the greeting of this connection."""
        self._reading.pop(peer, None)

    def drop_all_of(self, name: str) -> None:
        """Drop the greetings of a worker whose process has ended."""
        for peer, hello in list(self._reading.items()):
            if hello.worker == name:
                del self._reading[peer]

    def refuse_from_now_on(self, name: str) -> None:
        """Refuse later greetings of a worker that hangs."""
        self._hung[name] = None
        if len(self._hung) > MAX_HUNG:
            del self._hung[next(iter(self._hung))]

    def register(self, peer: bytes, worker: ConnectedWorker | None, hello: WorkerHello, now: float) -> None:
        """Read a greeting. A worker that greets again, on this connection or another, has forgotten its batches."""
        try:
            self._check_version(peer, hello)
            check_form(hello)
            self._take_join_room(hello, now)
        except GreetingRefused as error:
            self._refuse(peer, worker, hello, error, now)
            return
        if worker is not None:
            self._workers.leave(worker, "greets again", now)
        self._reading[peer] = hello
        self._work.add(self._read(peer, hello))

    def _read(self, peer: bytes, hello: WorkerHello) -> Slices[None]:
        """Read what a worker offers, and welcome it. Without effect where it has gone or greeted again meanwhile."""
        try:
            offer = yield from read_offer(hello)
            if self._reading.get(peer) is not hello:
                return
            self._check_identity(peer, hello)
            others = list(self._models.others(offer.models, offer.digests, offer.engines))
            is_own = self._processes.own(hello.worker)
            for name, signature in () if is_own else offer.models.items():
                if (other := self._models.other_signature(name, signature)) is not None:
                    others.append(other)
                yield
            if self._reading.get(peer) is not hello:
                return
            self._tell_others(peer, hello, others)
            rest = narrowed(offer, {other.name for other in others})
            if others and (is_own or not rest.models or bool(rest.wide) != bool(offer.wide)):
                del self._reading[peer]
                self._workers.turn_away(peer)
                return
            offer = rest
            offered = yield from self._models.add_all(offer.models, offer.digests, offer.engines, hello.once)
        except (GreetingRefused, ConfigurationError) as error:
            if self._reading.get(peer) is hello:
                self._refuse(peer, None, hello, error, trio.current_time())
            return
        for model in offered.added:
            self._availability.models_added([model], trio.current_time())
            yield
        for name, table in offer.costs.items():
            self._dispatcher.costs_told(offered.models[name].key, table, trio.current_time())
            yield
        if self._reading.get(peer) is hello:
            del self._reading[peer]
            self._welcome(peer, offer, offered.models, trio.current_time())

    def _take_join_room(self, hello: WorkerHello, now: float) -> None:
        """Raise GreetingRefused where slots join faster than the event loop has time for, or with too many models.

        The server's own processes are exempt.
        """
        refilled = self._join_room + JOINS_PER_S * (now - self._joined_at)
        self._join_room, self._joined_at = min(float(MOST_JOINS), refilled), now
        if not self._processes.own(hello.worker):
            check_number(hello)
            if self._join_room <= 0.0:
                raise GreetingRefused("too many slots join at a time; it may greet again in a few seconds")
        self._join_room -= hello.slots + bool(hello.wide)

    def _check_identity(self, peer: bytes, hello: WorkerHello) -> None:
        """Raise GreetingRefused for a worker that hangs, and for one that has another's name."""
        key_of = self._outgoing.socket.key_of
        name, key = hello.worker, key_of(peer)
        self._processes.greeted(name)
        if name in self._hung:  # it holds a slot, whatever it says
            raise GreetingRefused("it hangs; end its process and start it again")
        namesakes = [control for control, other in self._workers.controls.items() if other.name == name]
        if any(key_of(control) != key for control in namesakes):
            raise GreetingRefused("it has the name of a worker with another key")
        if key is not None and self._processes.own(name):
            # Ours come over a private socket. This one's end would be taken for that of ours, and ours be killed for it.
            raise GreetingRefused("it has the name of a process of this server")

    def _check_version(self, peer: bytes, hello: WorkerHello) -> None:
        """Tell a worker of another release to end, and raise GreetingRefused."""
        if hello.protocol != WORKER_PROTOCOL:
            why = (
                f"it speaks version {hello.protocol} of the workers' protocol, and this server version {WORKER_PROTOCOL}: "
                "install the same release of shapestream on both sides"
            )
            self._outgoing.say_once(peer, WorkerRefused(model="", message=why))
            raise GreetingRefused(why)

    def _refuse(
        self, peer: bytes, worker: ConnectedWorker | None, hello: WorkerHello, error: Exception, now: float
    ) -> None:
        # Without its quotes, but with its escapes: a name may try to be a line of its own.
        name = repr(hello.worker[:MAX_NAME])[1:-1]
        self._statistics.bad_messages["workers"] += 1
        log.error("worker refused", worker=name, pid=hello.pid, why=str(error))
        self._processes.refused(hello.worker, f"it is refused: {error}")
        if worker is not None:
            self._workers.leave(worker, "sent what cannot be accepted", now)
        self.drop(peer)
        self._workers.turn_away(peer)

    def _tell_others(self, peer: bytes, hello: WorkerHello, others: Sequence[OtherModel]) -> None:
        """Tell a worker which models are refused, and why: all workers of a model must answer alike."""
        for other in others:
            why, advice = _OTHERS[other.what]
            log.error(
                "worker refused",
                worker=hello.worker,
                pid=hello.pid,
                model=other.name,
                serves=other.serves,
                offers=other.offers,
                why=why,
                advice=advice,
            )
            words = f"{why}: {other.offers or 'unknown'} of {other.name!r}, and {other.serves} is served ({advice})"
            self._outgoing.say_once(peer, WorkerRefused(model=other.name, message=words))
        for what in dict.fromkeys(other.what for other in others):
            self._statistics.peers_lost[f"worker: other {what.value}"] += 1
