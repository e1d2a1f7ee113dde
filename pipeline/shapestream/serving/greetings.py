"""Greetings of workers: each is checked, read in slices, and then begins a session or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import trio

from shapestream.errors import ConfigurationError
from shapestream.serving.availability import Availability
from shapestream.serving.connected_workers import ConnectedWorkers
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.outgoing import Outgoing
from shapestream.serving.own_processes import OwnProcesses
from shapestream.serving.served_models import ServedModels
from shapestream.serving.workers import (
    MAX_NAME,
    ConnectedWorker,
    GreetingRefused,
    Offer,
    check_form,
    check_number,
    read_offer,
)
from shapestream.slices import SlicedWork, Slices
from shapestream.wire.messages import WORKER_PROTOCOL, WorkerHello, WorkerRefused

log = structlog.get_logger()

# Slots that may join at once, and per second after that. A worker with 256 takes about 20 ms to come and go, so that endless
# greetings take a fiftieth of the event loop's time.
MOST_JOINS = 8192
JOINS_PER_S = 256
# Workers that dialled in and hung, remembered so that they are not welcomed with a slot that is still held.
MAX_HUNG = 256

_OTHER_FILES = "it has read other bytes of the model's files than those that are served"
_ADVICE = (
    "to serve the files as they are now, send the server SIGHUP or restart it; else put the old ones back"
)


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
        welcome: Callable[[bytes, Offer, float], None],
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
            if served := self._models.other_files(offer.models, offer.digests):
                del self._reading[peer]
                self._refuse_other_files(peer, hello, served, offer)
                return
            added = yield from self._models.add_all(offer.models, offer.digests, hello.once)
        except (GreetingRefused, ConfigurationError) as error:
            if self._reading.get(peer) is hello:
                self._refuse(peer, None, hello, error, trio.current_time())
            return
        for model in added:
            self._availability.models_added([model], trio.current_time())
            yield
        for name, table in offer.costs.items():
            self._dispatcher.costs_told(name, table, trio.current_time())
            yield
        if self._reading.get(peer) is hello:
            del self._reading[peer]
            self._welcome(peer, offer, trio.current_time())

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
        self._join_room -= hello.slots

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

    def _refuse_other_files(
        self, peer: bytes, hello: WorkerHello, served: Mapping[str, str], offer: Offer
    ) -> None:
        """Tell a worker to end that has read other files: a model is served from the same bytes everywhere."""
        for model, digest in served.items():
            offered = offer.digests.get(model)
            log.error(
                "worker refused",
                worker=hello.worker,
                pid=hello.pid,
                model=model,
                serves=digest,
                offers=offered,
                why=_OTHER_FILES,
                advice=_ADVICE,
            )
            why = f"{_OTHER_FILES}: sha256 {offered or 'unknown'} of {model!r}, and {digest} is served ({_ADVICE})"
            self._outgoing.say_once(peer, WorkerRefused(model=model, message=why))
        self._statistics.peers_lost["worker: other files"] += 1
        self._workers.turn_away(peer)
