"""Slots, the workers that they belong to, and the table of the batches there: every change of their states.

The states of a slot and of a worker are enums with a table each: by the name of a change, which state follows which. A
change that a table does not list raises KeyError. Only functions of this file write these states; those of a batch are
changed by batches.py.

A slot rests after it could not run its batch (`unavailable`), twice as long each time in a row: a broken slot fails
quickly, and must not use up the attempts of all requests while sound slots are busy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from math import inf
from typing import Any, Final, TypeAlias

from shapestream.scheduling.batches import Batch, BatchState, Suspicion
from shapestream.scheduling.events import ContractError
from shapestream.scheduling.model_queue import AnsweredBatch, ModelQueue
from shapestream.scheduling.queueing import SAMPLE

LOOK = 8
"""Free slots that are compared by their pace, at most."""

FASTER = 0.9
"""A slot is preferred for its pace if it takes less than this part of the time of one that has been free longer."""


class SlotState(Enum):
    """Whether a slot runs a batch, and whether it may get another. Its worker may forbid that, too."""

    IDLE = "idle"
    """Has no batch, and may get one."""
    BUSY = "busy"
    """Runs a batch; others may be queued behind it."""
    UNAVAILABLE = "unavailable"
    """Was unavailable while it held other batches, and rests when these are over and none of them ran."""
    RESTING = "resting"
    """Gets nothing until it has rested."""
    CLOSING = "closing"
    """Gets nothing any more, and leaves when what it has is over."""
    GONE = "gone"

    __hash__ = object.__hash__  # an enum's own is a call in Python, and the tables are asked on the hot path


_IDLE: Final = SlotState.IDLE  # a look-up on an enum costs three times a global

SLOT_TABLE: Final[dict[str, dict[SlotState, SlotState]]] = {
    "start": {SlotState.IDLE: SlotState.BUSY},
    "end": {
        SlotState.BUSY: SlotState.IDLE,
        SlotState.UNAVAILABLE: SlotState.IDLE,
        SlotState.CLOSING: SlotState.CLOSING,
    },
    "owe rest": {
        SlotState.BUSY: SlotState.UNAVAILABLE,
        SlotState.UNAVAILABLE: SlotState.UNAVAILABLE,
        SlotState.CLOSING: SlotState.CLOSING,
    },
    "owe none": {
        SlotState.BUSY: SlotState.BUSY,
        SlotState.UNAVAILABLE: SlotState.BUSY,
        SlotState.CLOSING: SlotState.CLOSING,
    },
    "rest": {SlotState.IDLE: SlotState.RESTING},
    "wake": {SlotState.RESTING: SlotState.IDLE},
    "close": {
        SlotState.IDLE: SlotState.CLOSING,
        SlotState.BUSY: SlotState.CLOSING,
        SlotState.UNAVAILABLE: SlotState.CLOSING,
        SlotState.RESTING: SlotState.CLOSING,
    },
    "leave": {SlotState.CLOSING: SlotState.GONE},
}


class SlotGroupState(Enum):
    """The batches that the slots of a worker may be given."""

    OPEN = "open"
    """Anything."""
    RESERVED = "reserved"
    """One suspect at a time."""
    CONDEMNED = "condemned"
    """Nothing: its process is to be ended, because a batch hangs there."""
    RESERVED_AND_CONDEMNED = "reserved and condemned"

    __hash__ = object.__hash__  # an enum's own is a call in Python, and the tables are asked on the hot path


_OPEN: Final = SlotGroupState.OPEN
_RUNNING: Final = BatchState.RUNNING
_NONE: Final = Suspicion.NONE

WORKER_TABLE: Final[dict[str, dict[SlotGroupState, SlotGroupState]]] = {
    "reserve": {SlotGroupState.OPEN: SlotGroupState.RESERVED},
    "release": {
        SlotGroupState.RESERVED: SlotGroupState.OPEN,
        SlotGroupState.RESERVED_AND_CONDEMNED: SlotGroupState.CONDEMNED,
    },
    "condemn": {
        SlotGroupState.OPEN: SlotGroupState.CONDEMNED,
        SlotGroupState.RESERVED: SlotGroupState.RESERVED_AND_CONDEMNED,
        SlotGroupState.CONDEMNED: SlotGroupState.CONDEMNED,
        SlotGroupState.RESERVED_AND_CONDEMNED: SlotGroupState.RESERVED_AND_CONDEMNED,
    },
    "spare": {
        SlotGroupState.CONDEMNED: SlotGroupState.OPEN,
        SlotGroupState.RESERVED_AND_CONDEMNED: SlotGroupState.RESERVED,
    },
}


class SlotGroup:
    """A worker, as the scheduler knows it: a process and its slots. A batch that ends the process ends all others there."""

    __slots__ = ("in_server", "name", "slots", "state", "suspect", "wide")

    def __init__(self, name: str, *, in_server: bool = False) -> None:
        self.name = name
        self.in_server = in_server
        """Whether its process is the server's, which nobody outlives to say what ran."""
        self.slots: dict[int, Slot] = {}
        self.wide: Slot | None = None
        """The one of them that is wide (wide_slots.py), if any."""
        self.state = SlotGroupState.OPEN
        self.suspect: Batch | None = None
        """The suspect that a reserved worker runs, if any."""

    @property
    def open(self) -> bool:
        """Whether its slots may be given any batch."""
        return self.state is SlotGroupState.OPEN

    @property
    def empty(self) -> bool:
        """Whether a suspect would be alone here.

        A call that is stuck does no more harm. One that is queued behind it may yet begin, until it has come back.
        """
        return all(
            slot.batch is None or (slot.batch.state is BatchState.STUCK and not slot.behind)
            for slot in self.slots.values()
        )

    @property
    def reserved(self) -> bool:
        """Whether it runs one suspect at a time, and nothing else."""
        return self.state in (SlotGroupState.RESERVED, SlotGroupState.RESERVED_AND_CONDEMNED)

    @property
    def condemned(self) -> bool:
        """Whether its process is to be ended, because a batch hangs there."""
        return self.state in (SlotGroupState.CONDEMNED, SlotGroupState.RESERVED_AND_CONDEMNED)

    def __repr__(self) -> str:
        return f"<worker {self.name}: {len(self.slots)} slots, {self.state.value}>"


class Slot:
    """A place where one batch at a time runs.

    It is listed in the pools of its models, see `SlotPool`.
    """

    __slots__ = (
        "answered",
        "batch",
        "behind",
        "id",
        "idle_since",
        "models",
        "paces",
        "peer",
        "pools",
        "prefetch_s",
        "rests_until",
        "state",
        "unavailable_count",
        "wide",
        "worker",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events use
        models: frozenset[str],
        prefetch_s: float | None = None,
        worker: SlotGroup | None = None,
        peer: Any = None,
        *,
        wide: bool = False,
    ) -> None:
        self.id = id
        self.wide = wide
        """Whether it is the wide slot of its worker, which no pool lists: it is never free, and gets lone requests."""
        self.peer = peer
        """The caller's own object for this slot, see `SlotJoined`."""
        self.models = models
        self.worker = SlotGroup(f"slot {id}") if worker is None else worker
        self.worker.slots[id] = self
        if wide:
            if self.worker.wide is not None:
                raise ContractError(f"worker {self.worker.name!r} has a wide slot already")
            self.worker.wide = self
        self.prefetch_s = prefetch_s
        """How long a batch takes from the decision to the slot; None: no batch is queued behind another."""
        self.pools: list[SlotPool] = []
        """Of those of its models that have been added so far; none while it closes."""
        self.state = SlotState.IDLE
        self.batch: Batch | None = None
        """The batch that it runs."""
        self.behind: deque[Batch] = deque()
        """The batches that are queued here behind `batch`, in their order: at most `BUNDLE`."""
        self.paces: dict[str, float] = {}
        """By model: seconds here / seconds on the most common worker class, as far as known."""
        self.idle_since = 0.0
        """When its last batch was over."""
        self.answered: AnsweredBatch | None = None
        """That batch, if it was answered, until the next one begins."""
        self.rests_until = 0.0
        """The end of its rest, while it rests."""
        self.unavailable_count = 0
        """Batches in a row that it answered with `unavailable`."""

    def __repr__(self) -> str:
        return f"<slot {self.id}: {self.batch or self.state.value}>"

    @property
    def standing(self) -> str:
        """The state as an operator needs it: that of a hanging batch first, then the worker's, then its own."""
        state: BatchState | SlotGroupState | SlotState = self.state
        if self.batch is not None and self.batch.hung:
            state = self.batch.state
        elif not self.worker.open:
            state = self.worker.state
        return str(state.value)

    @property
    def idle(self) -> bool:
        """Whether it could run a batch now."""
        return self.state is SlotState.IDLE

    @property
    def free(self) -> bool:
        """Whether it may be given any batch: it is idle, and its worker is neither reserved nor condemned."""
        return self.state is SlotState.IDLE and self.worker.state is SlotGroupState.OPEN and not self.wide

    @property
    def closing(self) -> bool:
        """Whether it leaves when what it has is over."""
        return self.state is SlotState.CLOSING

    @property
    def recallable(self) -> list[Batch]:
        """The batches that are queued behind the running one and were not recalled yet."""
        return [batch for batch in self.behind if batch.state is BatchState.BEHIND]

    @property
    def behind_s(self) -> float:
        """Predicted seconds of the batches that are queued behind the running one."""
        return sum([batch.predicted_s or 0.0 for batch in self.behind])

    def free_at(self, now: float) -> float:
        """Return when its last batch is predicted to end, if a running batch that is late ends now; now, where none runs."""
        if self.batch is None:
            return now
        ends_at = max(now, self.batch.ends_at)
        return ends_at + self.behind_s if self.behind else ends_at

    def connect(self, pool: SlotPool) -> None:
        """List the slot in the pool of one of its models, which was added."""
        self.pools.append(pool)
        if self.free:
            pool.free[self.id] = self
            pool.queue.await_no_longer()
        elif self.batch is not None:
            insort(pool.ends, (self.batch.ends_at, self.id, self))
            if not self.behind and self.batch.prefetch_at is not None:
                insort(pool.prefetches, (self.batch.prefetch_at, self.id, self))

    def unlist_end(self, running: Batch) -> None:
        """Take the slot off these lists: the batch has ended, or the slot gets no more."""
        for pool in self.pools:
            _unlist(pool.ends, running.ends_at, self)
        self.unlist_prefetch(running)

    def list_prefetch(self, running: Batch) -> None:
        """List when the next batch may be queued behind this one, if none is."""
        if running.prefetch_at is not None and not self.behind:
            for pool in self.pools:
                insort(pool.prefetches, (running.prefetch_at, self.id, self))

    def unlist_prefetch(self, running: Batch) -> None:
        """Queue no batch behind this one, for now."""
        if running.prefetch_at is not None:
            for pool in self.pools:
                _unlist(pool.prefetches, running.prefetch_at, self)


Agenda: TypeAlias = list[tuple[float, int, Slot]]
"""Slots in the order of a time: (time, slot id, slot). A slot stands in it once, with a time that the caller remembers.

A change moves what comes behind, which takes a microsecond where there are 10,000 slots."""


def _unlist(agenda: Agenda, time: float, slot: Slot) -> None:
    """Remove a slot if it stands there at this time."""
    entry = time, slot.id, slot
    place = bisect_left(agenda, entry)
    if place < len(agenda) and agenda[place] == entry:
        del agenda[place]


def sampled(agenda: Agenda, count: int) -> Iterator[tuple[float, Slot, int]]:
    """Yield about `count` entries, evenly spaced, each with the number of slots that it stands for."""
    size = len(agenda)
    step = -(-size // count)
    if step <= 1:
        for time, _, slot in agenda:
            yield time, slot, 1
    else:
        for at in range(0, size, step):
            time, _, slot = agenda[at]
            yield time, slot, min(step, size - at)


class SlotPool:
    """The slots that serve one model: the free ones, and the busy ones by when they are predicted to end."""

    __slots__ = ("_fastest", "_paces", "count", "ends", "free", "prefetches", "queue", "serving")

    def __init__(self, queue: ModelQueue) -> None:
        self.queue = queue
        """What waits for the model."""
        self.count = 0
        """Slots that serve it, those that close apart."""
        self.serving = 1
        """The same, for divisions; one may come where there is none."""
        self.free: dict[int, Slot] = {}
        """The free ones, longest free first."""
        self.ends: Agenda = []
        """The busy ones, by when they are predicted to become free."""
        self.prefetches: Agenda = []
        """Those of them behind whose batch none is queued and one may be, by when it should be sent."""
        self._paces: Counter[float] = Counter()
        """Slots by their pace: seconds there / seconds on the most common kind."""
        self._fastest: float | None = None
        """The smallest pace; None where it must be looked for."""

    def __repr__(self) -> str:
        return f"<{self.queue.name}: {len(self.free)} of {self.count} slots free>"

    @property
    def fastest(self) -> float:
        """The smallest pace of its slots; 1.0 where it has none."""
        if self._fastest is None:
            self._fastest = min(self._paces, default=1.0)
        return self._fastest

    def recount(self, more: int) -> None:
        """Count slots that come, or as a negative number go."""
        self.count += more
        self.serving = self.count or 1

    def add_pace(self, pace: float) -> None:
        """Count a slot with this pace."""
        self._paces[pace] += 1
        if self._fastest is not None and pace < self._fastest:
            self._fastest = pace

    def remove_pace(self, pace: float) -> None:
        """Count it no longer. Slots leave by the thousand, so the smallest of the others is looked for when it is needed."""
        self._paces[pace] -= 1
        if not self._paces[pace]:
            del self._paces[pace]
            if pace == self._fastest:
                self._fastest = None

    def free_in_s(self, work_s: float, now: float) -> tuple[float, int]:
        """Return the time at which all slots would finish, and how many slots take part.

        `work_s` is divided so that the slots finish together (water-filling). A busy slot first finishes its batch, and
        those queued behind it; a batch that is late counts as over. Resting and reserved slots are excluded. Without work,
        the result is the time until the first slot is free.
        """
        slots = len(self.free)
        filled_s = work_s
        level_s = work_s / slots if slots else inf
        below: list[tuple[float, int]] = []
        later: list[tuple[float, int]] = []
        for ends_at, slot, alike in sampled(self.ends, SAMPLE):
            height_s = ends_at - now if ends_at > now else 0.0
            if height_s >= level_s:
                break
            if slot.behind:
                later.append((height_s + slot.behind_s, alike))
                continue
            below.append((height_s, alike))
            filled_s += alike * height_s
            slots += alike
            level_s = filled_s / slots
        if later and min(later)[0] < level_s:
            # Those with several batches are not in the order of their heights: once more, in that order.
            slots = len(self.free)
            filled_s = work_s
            level_s = work_s / slots if slots else inf
            for height_s, alike in sorted(below + later):
                if height_s >= level_s:
                    break
                filled_s += alike * height_s
                slots += alike
                level_s = filled_s / slots
        # Where all slots rest, the time is not known.
        return (level_s, slots) if slots else (work_s / max(1, self.count), 0)


BUNDLE = 16
"""Calls of a bundle at most; and their predicted seconds, at most, in multiples of a hand-over (`BATCH_S`)."""
PREFETCH_MARGIN = 0.12
"""The share of its predicted time that a batch may end early and still find the next one at its slot.

Measured: of a thousand batches of MiniLM four in ten ended before their successor, sent when the
prediction said, was there; with this margin one in ten. What is sent earlier is planned with less to choose from.
"""
MIN_REST_S = 0.1
"""The first pause, at least: a slot that recovers at once costs little."""
MAX_REST_S = 30.0
"""No pause is longer, so that a slot whose device came back is found again."""
CALLS_REST = 2.0
"""The first pause in calls of the model: by then another slot has become free and taken what this one refused."""


def rest_s(unavailable_count: int, call_s: float | None) -> float:
    """Return the seconds of rest of a slot that answered this many batches in a row with `unavailable`."""
    first_s = max(MIN_REST_S, CALLS_REST * (call_s or 0.0))
    return float(min(MAX_REST_S, first_s * 2.0 ** min(unavailable_count - 1, 32)))


def faster_first(pool: SlotPool) -> Slot:
    """Return the free slot that should work: the one that has been free longest, unless one of the next few is clearly
    faster.

    A slow slot is never left idle for the sake of a fast one that will be free soon.
    """
    free = pool.free
    best = next(iter(free.values()))
    if len(free) > 1:
        name = pool.queue.name
        best_pace = best.paces.get(name, 1.0)
        for slot in islice(free.values(), 1, LOOK):
            pace = slot.paces.get(name, 1.0)
            if pace < FASTER * best_pace:
                best, best_pace = slot, pace
    return best


class SlotTable:
    """The slots: they come, run batches, rest, are reserved for suspects, and go."""

    __slots__ = (
        "batches",
        "begun",
        "free_count",
        "newest",
        "pools",
        "resting",
        "slots",
        "wide_count",
        "workers",
    )

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}
        """All that run, or are queued behind another one."""
        self.slots: dict[int, Slot] = {}
        self.pools: dict[str, SlotPool] = {}
        """By model."""
        self.newest = 0
        """The number of the batch that was started, or queued behind another, last."""
        self.wide_count = 0
        """Wide slots that are here."""
        self.workers: dict[str, SlotGroup] = {}
        self.free_count = 0
        self.resting: dict[int, Slot] = {}
        self.begun: list[Slot] = []
        """The slots that have begun with a batch in this event; the scheduler empties it."""

    # ------------------------------------------------------------ the one place where slots and workers change state

    def _move(self, slot: Slot, change: str) -> None:
        before = slot.state
        slot.state = after = SLOT_TABLE[change][before]
        if before is not after and slot.worker.state is _OPEN and not slot.wide:
            if after is _IDLE:
                self._show(slot)
            elif before is _IDLE:
                self._hide(slot)

    def _move_worker(self, worker: SlotGroup, change: str) -> None:
        slots = worker.slots.values()
        before = [slot for slot in slots if slot.free]
        worker.state = WORKER_TABLE[change][worker.state]
        after = [slot for slot in slots if slot.free]
        if before and not after:
            for slot in before:
                self._hide(slot)
        elif after and not before:
            for slot in after:
                self._show(slot)

    def _show(self, slot: Slot) -> None:
        """List a slot that has become free, behind those that have been free for longer. Waits for requests end there."""
        self.free_count += 1
        for pool in slot.pools:
            pool.free[slot.id] = slot
            if pool.queue.awaited is not None:
                pool.queue.await_no_longer()

    def _hide(self, slot: Slot) -> None:
        self.free_count -= 1
        for pool in slot.pools:
            del pool.free[slot.id]

    # ------------------------------------------------------------ coming and going

    def join(
        self,
        id: int,  # noqa: A002 - the name that events use
        models: frozenset[str],
        prefetch_s: float | None = None,
        process: str = "",
        peer: Any = None,
        *,
        in_server: bool = False,
        wide: bool = False,
    ) -> None:
        """Add a slot of the named process. Models that are not known yet are connected when they are added."""
        if id in self.slots:
            raise ContractError(f"slot {id} has joined already")
        process = process or f"slot {id}"
        worker = self.workers.setdefault(process, SlotGroup(process, in_server=in_server))
        slot = self.slots[id] = Slot(id, models, prefetch_s, worker, peer, wide=wide)
        if wide:
            self.wide_count += 1
            return
        self.free_count += slot.free
        for name in sorted(models.intersection(self.pools)):
            self._connect(slot, self.pools[name])

    def add_model(self, queue: ModelQueue, like: str | None = None) -> None:
        """Give a model a pool, with the slots that named it before, and with those of `like`."""
        pool = self.pools[queue.name] = SlotPool(queue)
        for slot in self.slots.values():
            if like in slot.models:
                slot.models |= {queue.name}
            if queue.name in slot.models and not slot.closing and not slot.wide:
                self._connect(slot, pool)

    def remove_model(self, key: str) -> None:
        """Forget a model's pool. No slot runs a batch of it."""
        pool = self.pools.pop(key)
        for slot in self.slots.values():
            slot.models -= {key}
            slot.paces.pop(key, None)
            if pool in slot.pools:
                slot.pools.remove(pool)

    def _connect(self, slot: Slot, pool: SlotPool) -> None:
        if slot.pools:
            slot.pools[0].queue.share_slots(pool.queue)
        pool.add_pace(1.0)  # nothing is known of it yet
        pool.recount(1)
        pool.queue.unavailable = None
        slot.connect(pool)

    def leave(self, id: int) -> tuple[Batch | None, list[Batch]]:  # noqa: A002
        """Remove a slot; return its running batch and the batches queued behind it. Unknown slots are ignored."""
        slot = self.slots.get(id)
        if slot is None:
            return None, []
        self.close(id)
        del self.slots[id]
        worker = slot.worker
        del worker.slots[id]
        if slot.wide:
            worker.wide = None
            self.wide_count -= 1
        if not worker.slots:
            del self.workers[worker.name]
        if worker.suspect is slot.batch:
            worker.suspect = None
        if worker.condemned and any(not other.closing for other in worker.slots.values()):
            self.spare(worker)  # a process that has gone as a whole has closed all its slots before
        behind = [*slot.behind]
        slot.behind.clear()
        for queued in behind:
            del self.batches[queued.id]
        batch, slot.batch = slot.batch, None  # a cycle of slot and batch must not be left to the collector
        if batch is not None:
            del self.batches[batch.id]
        self._move(slot, "leave")
        return batch, behind

    def close(self, id: int) -> list[Batch]:  # noqa: A002
        """Let a slot get no more batches; unknown and closing slots are ignored.

        The batches that should be recalled, since they are queued there.
        """
        slot = self.slots.get(id)
        if slot is None or slot.closing:
            return []
        self.resting.pop(id, None)
        self._move(slot, "close")
        if slot.batch is not None:
            slot.unlist_end(slot.batch)
        for pool in slot.pools:
            pool.recount(-1)
            pool.remove_pace(slot.paces.get(pool.queue.name, 1.0))
        slot.pools.clear()
        return slot.recallable

    # ------------------------------------------------------------ batches

    def start(self, slot: Slot, batch: Batch, now: float) -> None:
        """Start a batch on an idle slot."""
        self.batches[batch.id] = batch
        self.newest = batch.id
        self._move(slot, "start")
        self._begin(slot, batch, now)
        if batch.suspicion is not _NONE:
            slot.worker.suspect = batch

    def start_audit(self, slot: Slot, batch: Batch, predicted_s: float | None, now: float) -> None:
        """Start a batch without members. Until it is over, nothing is queued behind it, and its slot is due to be free."""
        self.start(slot, batch, now)
        batch.predicted_s = predicted_s

    def queue_behind(self, slot: Slot, batch: Batch) -> None:
        """Queue a batch behind those that this slot has."""
        running = slot.batch
        assert running is not None
        self.batches[batch.id] = batch
        self.newest = batch.id
        batch.queue_behind()
        if not slot.behind:
            slot.unlist_prefetch(running)
        slot.behind.append(batch)

    def owe_rest(self, slot: Slot) -> None:
        """Let a slot rest when the batches that it has are over and none of them ran."""
        self._move(slot, "owe rest")

    def owe_none(self, slot: Slot) -> None:
        """Let a slot that has batches go on when they are over: one of them ran."""
        self._move(slot, "owe none")

    def end(self, batch: Batch, now: float) -> Batch | None:
        """Take a batch that is over off its slot, which is idle then, or runs the first batch that was queued behind.

        That batch is returned if it runs now.
        """
        slot: Slot = batch.slot
        worker = slot.worker
        del self.batches[batch.id]
        if worker.suspect is batch:
            worker.suspect = None
        if slot.batch is not batch:
            # It comes back, or it ran, and those before it come back: these reports take another way.
            batch.started = now
            slot.behind.remove(batch)
            assert slot.batch is not None
            slot.list_prefetch(slot.batch)
            return None
        slot.unlist_end(batch)
        behind = slot.behind.popleft() if slot.behind else None
        if behind is not None:
            self._begin(slot, behind, now)
        else:
            slot.batch = None
            slot.idle_since = now
            self._move(slot, "end")
        if worker.state is not _OPEN and worker.condemned:
            self.spare(worker)  # a process that is ended all the same closes its slots first
        return behind

    def _begin(self, slot: Slot, batch: Batch, now: float) -> None:
        slot.batch = batch
        self.begun.append(slot)
        slot.answered = None
        batch.begin()
        batch.started = now
        predicted_s = batch.predicted_s
        batch.ends_at = ends_at = now + (predicted_s or 0.0)
        due = None
        # Nothing is queued behind a batch that may come back: its end cannot be predicted.
        if (
            predicted_s is not None
            and slot.prefetch_s is not None
            and batch.state is _RUNNING
            and slot.worker.state is _OPEN
        ):
            due = ends_at - slot.prefetch_s - PREFETCH_MARGIN * predicted_s
            batch.prefetch_at = due = due if due > now else now
        for pool in slot.pools:
            insort(pool.ends, (ends_at, slot.id, slot))
            if due is not None and not slot.behind:
                insort(pool.prefetches, (due, slot.id, slot))

    # ------------------------------------------------------------ paces

    def set_pace(self, slot: Slot, name: str, pace: float) -> None:
        """Note that a slot takes `pace` times as long as the most common worker class for this model."""
        before = slot.paces.get(name, 1.0)
        if pace != before:
            self.pools[name].remove_pace(before)
            self.pools[name].add_pace(pace)
            slot.paces[name] = pace

    # ------------------------------------------------------------ rests

    def rest(self, slot: Slot, until: float) -> None:
        """Let an idle slot rest."""
        self._move(slot, "rest")
        slot.rests_until = until
        self.resting[slot.id] = slot

    def wake(self, now: float) -> None:
        """Free the slots that have rested long enough, in the order in which their time came."""
        due = [slot for slot in self.resting.values() if slot.rests_until <= now]
        for slot in sorted(due, key=lambda slot: slot.rests_until):
            del self.resting[slot.id]
            self._move(slot, "wake")

    def next_wake(self) -> float | None:
        """Return when the first slot has rested long enough."""
        return min([slot.rests_until for slot in self.resting.values()], default=None)

    # ------------------------------------------------------------ workers

    def reserve(self, worker: SlotGroup) -> list[Batch]:
        """Reserve a worker for suspects. The batches that are queued there behind others, and should be recalled."""
        self._move_worker(worker, "reserve")
        return [batch for slot in worker.slots.values() for batch in self.stop_prefetch(slot)]

    def release(self, worker: SlotGroup) -> None:
        """Open a worker again that no suspect needs any more."""
        self._move_worker(worker, "release")

    def condemn(self, worker: SlotGroup) -> None:
        """Give nothing more to a worker whose process is about to be ended."""
        for slot in worker.slots.values():
            self.stop_prefetch(slot)
        self._move_worker(worker, "condemn")

    def spare(self, worker: SlotGroup) -> None:
        """Let a worker serve on with the slots that it has left, if nothing is left to end its process for."""
        if worker.condemned and not any(
            slot.batch is not None and slot.batch.state is BatchState.CONDEMNED
            for slot in worker.slots.values()
        ):
            self._move_worker(worker, "spare")

    def lose(self, slot: Slot) -> None:
        """Lose a slot whose batch will not end; the rest of its worker serves on."""
        if slot.worker.suspect is slot.batch:
            slot.worker.suspect = None
        self.spare(slot.worker)
        self.close(slot.id)

    def stop_prefetch(self, slot: Slot) -> list[Batch]:
        """Queue no more batches on a slot; return those queued behind its running one, which the caller recalls."""
        running = slot.batch
        if running is None:
            return []
        if not slot.behind:
            slot.unlist_prefetch(running)
        running.prefetch_at = None
        return slot.recallable
