"""What a server tells of itself: readiness, metrics, counters, stories, and the data of the admin port's page.

Each answer is made when it is asked for. Long answers are read in slices, one per turn of the event loop (slices.py). So
some numbers of one answer are a few turns older than others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import trio

from shapestream.scheduling.queueing import RequestState
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.audits import AuditBook
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.served_models import ServedModels
from shapestream.serving.sessions import RequestRecord, Sessions
from shapestream.serving.shadows import Shadows
from shapestream.serving.stories import MOST_TOLD, Stories
from shapestream.serving.story_words import nothing_of, story_of
from shapestream.serving.worker_port import WorkerPort
from shapestream.serving.workers import ConnectedWorker, WorkerState
from shapestream.settings import ServerSettings
from shapestream.slices import Slices
from shapestream.telemetry.counters import LastMinute, ServerStatistics
from shapestream.telemetry.metrics import ServerSnapshot, told_now
from shapestream.telemetry.presence import ConfiguredWorker, Presence
from shapestream.telemetry.runs import ClientId
from shapestream.transport.curve import ProtectedRouter
from shapestream.transport.interface import PeerSocket
from shapestream.versions import canaries, versioned
from shapestream_engine.machine import resident_bytes_of

MOST_SLOTS = 1024
"""Slots that the counters name, the first that joined: a message holds 1 MiB, and its maps 4096 keys."""
MOST_SLOTS_SHOWN = 128
"""Slots on the page, which has a row for each."""
REQUESTS_PER_SLICE = 2048
"""Requests whose stages are counted in one turn of the event loop: half a millisecond."""
MOST_BATCHES = 512
"""Batches that the page keeps for its viewers: with 50 batches per second, those of ten seconds."""
LEAVES = "the server leaves"
"""The reason why a server is not ready from the request to end it on."""
NO_GATEWAYS = "gateways are being started"
"""The reason before all of them were there once: gRPC's port refuses connections until then."""
SLOWEST_SHOWN = 12
"""Stories on the page; each takes about 50 us to make."""


@dataclass(slots=True, kw_only=True, eq=False)
class Readings:
    """The parts of a server that are read, and the answers that are made of them."""

    settings: ServerSettings
    addresses: Sequence[str]
    """Where clients connect."""
    models: ServedModels
    counters: ServerStatistics
    last_minute: LastMinute
    scheduler: Scheduler
    dispatcher: Dispatcher
    sessions: Sessions
    kept: KeptReplies
    stories: Stories
    audits: AuditBook
    shadows: Shadows
    sockets: Sequence[PeerSocket]
    """The sockets that other processes reach."""
    started: float
    leaves: trio.Event
    reachable: trio.Event | None = None
    """Set when the gateways are there; None: there are none."""
    worker_port: WorkerPort | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    """The configured workers by name, each with the number of its entry of `workers`."""
    reload_troubles: Sequence[str] = ()
    """What the last reload could not do."""

    # ---------------------------------------------------------------- readiness

    def standstill(self) -> str | None:
        """Return the reason why only a restart helps, if so: the calls of all slots hang, and none could be ended."""
        scheduler = self.scheduler.statistics()
        return "the calls of all slots hang" if 0 < scheduler.slots == scheduler.slots_lost else None

    def not_ready(self, model: str | None = None) -> list[str]:
        """Return the reasons why this server should get no requests now. There is none if each model has a slot.

        A slot joins after its model was proved and its costs were measured. A model that was added while the server ran
        counts from its first slot on. `model`: only the reasons that concern this model.
        """
        offered = self._offered()
        if model is not None:
            return self._model_not_ready(model, offered)
        reasons = self._own_reasons()
        rests = canaries(self.models.versions)  # the rest has their share meanwhile
        counted = (name for name in self.models.promised if name not in self.models.new and name not in rests)
        reasons += [_no_slot_for(name) for name in counted if name not in offered]
        return reasons or ([] if offered else ["no slot"])

    def _own_reasons(self) -> list[str]:
        """Return the reasons that concern all models."""
        if self.leaves.is_set():
            return [LEAVES]
        return [] if self.reachable is None or self.reachable.is_set() else [NO_GATEWAYS]

    def readiness(self) -> dict[str, Any]:
        """Return why this server, and which models, should get no requests now, as plain data."""
        offered = self._offered()
        by_model = {name: self._model_not_ready(name, offered) for name in self.models.names}
        return {
            "not_ready": self.not_ready(),
            "models_not_ready": {name: why for name, why in by_model.items() if why},
        }

    def totals(self) -> dict[str, dict[str, int]]:
        """Return the sums of each model's requests since the start; `last_ms` is Unix time, 0 without a batch."""
        ahead_s, counters = time.time() - trio.current_time(), self.counters.models
        found = {}
        for name in self.models.counted:
            model = counters[name]
            last_ms = round((ahead_s + model.last_ended) * 1000) if model.last_ended else 0
            found[name] = {**model.totals(), "last_ms": last_ms}
        return found

    def _offered(self) -> set[str]:
        offered = {name for worker in self._workers() if _serves(worker) for name in worker.models}
        offered |= self._announced(offered)
        chains = self.models.chains.values()
        offered |= {chain.name for chain in chains if {stage.model for stage in chain.stages} <= offered}
        return offered | self._announced(offered)

    def _announced(self, offered: Set[str]) -> set[str]:
        """Return the names with versions of which the one with the rest is offered."""
        versions = self.models.versions.values()
        return {one.name for one in versions if versioned(one.name, one.rest) in offered}

    def _model_not_ready(self, model: str, offered: Set[str]) -> list[str]:
        reasons = self._own_reasons()
        reasons += [self.models.unavailable[model]] if model in self.models.unavailable else []
        return reasons or ([] if model in offered else [_no_slot_for(model)])

    # ---------------------------------------------------------------- numbers

    def snapshot(self) -> ServerSnapshot:
        """Return the state from which metrics are computed."""
        settings, sessions, now = self.settings, list(self.sessions), trio.current_time()
        for model in self.models:
            self.counters.models[model.name]  # its series begin with 0
        workers = self._workers()
        serving = sum(map(_serves, workers))
        credits_used = [
            max(
                len(session.running) / settings.window_requests,
                session.held_bytes / self.sessions.room.unasked,
            )
            for session in sessions
        ]
        return ServerSnapshot(
            ready=not self.not_ready(),
            counters=self.counters,
            scheduler=self.scheduler.statistics(now),
            settings=settings,
            slots_busy_s=self.dispatcher.busy_s(now),
            configured_workers=cache(self._configured_workers),
            clients=len(sessions),
            pending=self.dispatcher.unfinished,
            pending_bytes=sum(session.held_bytes for session in sessions) + self.sessions.grants.held_bytes,
            credit_used=max(credits_used, default=0.0),
            workers={"serving": serving, "leaving": len(workers) - serving},
            quarantined=len(self.dispatcher.quarantine),
            kept_replies=len(self.kept),
            kept_bytes=self.kept.nbytes,
            peers_refused=self._peers_refused(),
            audit=self.audits.to_dict(),
            shadows=self.shadows.to_dict(),
            chains=sorted(self.models.chains),
            room=self.dispatcher.desk.room.statistics(),
        )

    def statistics(self) -> Slices[dict[str, Any]]:
        """Read the counters in slices, as plain data (`StatisticsEntry`)."""
        dispatcher, now = self.dispatcher, trio.current_time()
        last_minute = yield from self.last_minute.to_dict(now, self.models.counted)
        counters = yield from self.counters.to_dict()
        seen = self.snapshot()
        in_scheduler = seen.scheduler.to_dict(last_minute["models"])
        yield
        return {
            "uptime_s": round(now - self.started, 3),
            "pid": os.getpid(),
            "draining": seen.scheduler.draining,
            **self.readiness(),
            **told_now(seen),
            "models": self.models.names,
            "chains": sorted(self.models.chains),
            "unavailable": dict(self.models.unavailable),
            "digests": dict(self.models.digests),
            "versions": self.models.shares(),
            "version_bytes": self._version_bytes(),
            "totals": self.totals(),
            "chain_room": seen.room.to_dict(seen.chains),
            "scheduler": in_scheduler,
            "last_minute": last_minute,
            "slots": {
                slot.label: {"batches": slot.batches, "busy_s": round(slot.busy_s, 6)}
                for slot in islice(dispatcher.slots.values(), MOST_SLOTS)
            },
            "slots_in_all": sum(not slot.wide for slot in dispatcher.slots.values()),
            "peers_refused": seen.peers_refused,
            "audit": seen.audit,
            "shadows": seen.shadows,
            **counters,
        }

    def _workers(self) -> set[ConnectedWorker]:
        """Return the workers with slots here."""
        return {slot.worker for slot in self.dispatcher.slots.values()}

    def _version_bytes(self) -> dict[str, int]:
        """Return the bytes of RAM of the largest own process that has a version, by the version's model."""
        found: dict[str, int] = {}
        for worker in self._workers():
            versions = [model.name for model in worker.serves.values() if model.version is not None]
            if versions and self.worker_port is not None and self.worker_port.processes.own(worker.name):
                nbytes = resident_bytes_of(worker.pid)
                found.update({name: max(nbytes, found.get(name, 0)) for name in versions})
        return found

    def _configured_workers(self) -> list[ConfiguredWorker]:
        owner = None if self.worker_port is None else self.worker_port.processes.owner
        if owner is None:
            return []
        memory = owner.memory_bytes()
        return [
            ConfiguredWorker(name, self.groups[name], state, memory[name])
            for name, state in owner.presences.items()
            if name in self.groups
        ]

    def _peers_refused(self) -> dict[str, dict[str, int]]:
        protected = [socket for socket in self.sockets if isinstance(socket, ProtectedRouter)]
        return {socket.port: dict(socket.refused) for socket in protected}

    # ---------------------------------------------------------------- stories and the page

    def explain(self, request: str, slowest: int, asker: ClientId | None = None) -> Slices[dict[str, Any]]:
        """Read the `stories` of the requests with this id, as plain data. If there are none, `unknown` says why.

        Without an id: the stories of the slowest requests. Only requests of the `asker` are read; None: an admin, all.
        """
        if not request:
            return {"stories": (yield from self._slowest_stories(slowest, asker))}
        now = trio.current_time()
        stories = []
        for past in (yield from self.stories.of(request, self.dispatcher.requests, now, asker)):
            stories.append(story_of(past, now, asker))
            yield
        unknown = {} if stories else {"unknown": nothing_of(request, self.stories.reach_s(now))}
        return {"stories": stories, **unknown}

    def _slowest_stories(self, count: int, asker: ClientId | None = None) -> Slices[list[dict[str, Any]]]:
        """Read the slowest requests of the last ten minutes that the asker may see, the slowest first."""
        now = trio.current_time()
        stories = []
        for past in islice(self.stories.slowest(now, asker), min(count, MOST_TOLD)):
            stories.append(story_of(past, now, asker))
            yield
        return stories

    def live(self, batches: int) -> Slices[dict[str, Any]]:
        """Read the page's data: counters, queue by size, slots, errors, and the batches after the first `batches` ones.

        Times are those of this process's monotonic clock, in seconds, beside `now`.
        """
        statistics = yield from self.statistics()
        slowest = yield from self._slowest_stories(SLOWEST_SHOWN)
        workers = self._configured_workers()
        chains = yield from self._stages()
        return {
            "now": trio.current_time(),
            "addresses": list(self.addresses),
            "notices": self._notices(workers),
            "statistics": statistics,
            "queues": {
                name: [
                    queue.waiting,
                    queue.dimensions,
                    [[*bins, count] for bins, count in queue.cells.items()],
                ]
                for name, queue in self.scheduler.sizes_waiting().items()
            },
            "chains": chains,
            "dialled_in": 0 if self.worker_port is None else self.worker_port.dialled_in,
            "workers": [
                {"worker": name, "entry": group, **asdict(state), "memory_bytes": memory_bytes}
                for name, group, state, memory_bytes in workers
            ],
            "slots": [
                {
                    "slot": slot.label,
                    "worker": slot.worker.name,
                    "pid": slot.worker.pid,
                    "state": self.scheduler.standing(slot.number),
                    "batches": slot.batches,
                    "busy_s": slot.busy_s,
                    "running": [[batch.model, batch.began] for batch in slot.running.values()],
                }
                for slot in islice(self.dispatcher.slots.values(), MOST_SLOTS_SHOWN)
            ],
            "errors": self.stories.errors,
            "slowest": slowest,
            "batches_in_all": self.stories.ran,
            "batches": self.stories.since(batches, MOST_BATCHES),
        }

    def _stages(self) -> Slices[dict[str, list[list[Any]]]]:
        """Read the stages of each chain: name, model, requests in the queue, requests in batches."""
        counts: dict[tuple[str, str], list[int]] = {
            (chain.name, stage.name): [0, 0]
            for chain in self.models.chains.values()
            for stage in chain.stages
        }
        for place, request in enumerate(list(self.scheduler.requests.values()) if counts else ()):
            if place % REQUESTS_PER_SLICE == 0:
                yield
            record = request.arrival
            part = record.stage if isinstance(record, RequestRecord) else None
            # A reload may have removed the stage of a request that runs on.
            if part is not None and (found := counts.get((part.run.chain.name, part.stage.stage.name))):
                found[request.state is RequestState.RUNNING] += request.state is not RequestState.DONE
        return {
            chain.name: [[stage.name, stage.model, *counts[chain.name, stage.name]] for stage in chain.stages]
            for chain in self.models.chains.values()
        }

    def _notices(self, workers: Sequence[ConfiguredWorker]) -> list[str]:
        """Return sentences about things that an operator should look at."""
        notices = [*self.not_ready(), *map(_no_slot_for, sorted(self.models.new))]
        notices += [*self.models.misfits(), *self.reload_troubles]
        if (standstill := self.standstill()) is not None:
            notices.append(standstill)
        for name, group, state, _ in workers:
            if state.presence in (Presence.MISSING, Presence.GIVEN_UP):
                notices.append(f"worker {name} of entry {group} is {state.presence}")
        for audit in self.audits.states.values():
            if audit.stopped and audit.model.successor is None:
                text = "shares no calls: audits found answers that differ (see shapestream audit)"
                notices.append(f"{audit.model.name} {text}")
        return notices


def _serves(worker: ConnectedWorker) -> bool:
    return worker.state is WorkerState.SERVING


def _no_slot_for(model: str) -> str:
    return f"no slot for model {model!r}"
