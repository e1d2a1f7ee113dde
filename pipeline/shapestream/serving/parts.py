"""What a server is made of, and who knows whom. Nothing here runs or waits: `server.py` does."""

from __future__ import annotations

import os
from functools import partial
from itertools import islice
from typing import Any

import trio

from shapestream.scheduling.recovery import HangLimits
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.availability import Availability
from shapestream.serving.cost_keeper import CostKeeper
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.egress import Egress
from shapestream.serving.inbox import Inbox
from shapestream.serving.ingress import Ingress
from shapestream.serving.journal import Journal
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.links import Outgoing
from shapestream.serving.models import ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.ports import Port, Ports
from shapestream.serving.quarantine import Quarantine
from shapestream.serving.reception import Reception
from shapestream.serving.worker_ends import WorkerEnds
from shapestream.serving.worker_port import WorkerPort
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.telemetry.trace import TraceRecorder
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import Role, decode
from shapestream.wire.limits import WORKER_LIMITS

__all__ = ["Parts"]

# Slots that the counters name, the first that joined: a message holds 1 MiB, and its maps 4096 keys.
MOST_SLOTS = 1024


class Parts:
    """The parts of one server, put together. Made inside trio."""

    def __init__(self, options: ServerOptions, clients: PeerSocket, workers: PeerSocket | None) -> None:
        self._options = options
        self._started = trio.current_time()
        self._epoch = os.urandom(16)
        self.counters = ServerStatistics()
        self.models = ServedModels(options.models, options.digests)
        self.ports = Ports(trio.current_time)
        self.cost_keeper = None if options.cost_cache is None else CostKeeper(options.cost_cache)
        self.scheduler = Scheduler(
            max_queued_requests=options.max_queued_requests,
            max_queued_bytes=options.max_queued_bytes,
            max_queued_s=options.max_queued_s,
            hangs=HangLimits(min_s=options.hang_min_s, grace_s=options.hang_grace_s),
            learned={} if self.cost_keeper is None else self.cost_keeper.read(),
        )
        trace = None if options.record_trace is None else TraceRecorder(options.record_trace)
        self.journal = Journal(self.counters, trio.current_time, trace)
        self._kept = KeptReplies(
            max_bytes=options.kept_bytes,
            max_age_s=options.kept_s,
            max_replies=options.window_requests,
            now=self._started,
        )
        to_clients = Outgoing(clients, "clients", self.counters)
        egress = Egress(to_clients, self.counters, self._kept)
        self.dispatcher = Dispatcher(
            self.scheduler,
            egress,
            self.journal,
            clock=trio.current_time,
            flush=self.ports.flush,
            prefetch=options.prefetch,
            quarantine=Quarantine(options.quarantine_requests, options.quarantine_s),
        )
        inbox = Inbox(
            clients,
            partial(decode, role=Role.SERVER_OF_CLIENTS),
            window_entries=options.window_requests,
            window_bytes=options.window_bytes,
        )
        self.reception = Reception(
            clients,
            inbox,
            to_clients,
            self.dispatcher,
            self.models,
            options,
            self.counters,
            self._kept,
            epoch=self._epoch,
        )
        self.availability = Availability(self.models, self.dispatcher, self.reception, self.is_served)
        ingress = Ingress(
            clients,
            inbox,
            self.reception,
            to_clients,
            egress,
            self.dispatcher,
            self.models,
            options,
            self.counters,
            clock=trio.current_time,
            describe=self.describe,
        )
        self.ports.add(
            Port(
                socket=clients,
                outgoing=to_clients,
                serve=ingress.run,
                lost=self.reception.lost,
                beat=self.reception.beat,
                links=lambda: self.reception.sessions,
            )
        )
        self.worker_ends = None if workers is None else self._add_worker_port(workers)

    def _add_worker_port(self, socket: PeerSocket) -> WorkerEnds:
        outgoing = Outgoing(socket, "workers", self.counters, WORKER_LIMITS)
        worker_port = WorkerPort(
            socket,
            outgoing,
            self.dispatcher,
            self.models,
            self._options,
            self.counters,
            epoch=self._epoch,
            clock=trio.current_time,
            model_added=self.reception.model_added,
            workers_changed=self.availability.workers_changed,
        )
        self.ports.add(
            Port(
                socket=socket,
                outgoing=outgoing,
                serve=worker_port.run,
                lost=worker_port.lost,
                beat=worker_port.beat,
                links=lambda: list(worker_port.workers.values()),
            )
        )
        return worker_port.ends

    def is_served(self, model: str) -> bool:
        """Whether any executor that is here has this model."""
        return any(model in slot.executor.models for slot in self.dispatcher.slots.values())

    def describe(self) -> dict[str, Any]:
        """The counters, as plain data: what `Statistics` carries."""
        scheduler = self.scheduler.statistics()
        return {
            "uptime_s": round(trio.current_time() - self._started, 3),
            "pid": os.getpid(),
            "draining": scheduler.draining,
            "clients": len(self.reception.sessions),
            "models": self.models.names,
            "unavailable": dict(self.models.unavailable),
            "digests": dict(self.models.digests),
            "unfinished": self.dispatcher.unfinished,
            "suspects": scheduler.suspects,
            "quarantined": len(self.dispatcher.quarantine),
            "kept_replies": len(self._kept),
            "kept_bytes": self._kept.nbytes,
            "scheduler": repr(scheduler),
            "slots": {
                slot.label: {"batches": slot.batches, "busy_s": round(slot.busy_s, 6)}
                for slot in islice(self.dispatcher.slots.values(), MOST_SLOTS)
            },
            "slots_in_all": len(self.dispatcher.slots),
            "peers_refused": self.ports.refused(),
            **self.counters.to_dict(),
        }
