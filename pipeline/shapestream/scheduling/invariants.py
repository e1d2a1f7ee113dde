"""Invariants: the books of the scheduler agree with each other between any two events.

A check looks at everything, so it is for tests and for the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shapestream.scheduling.batches import Batch, BatchState, Suspicion
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue, Queues
from shapestream.scheduling.queueing import (
    CROWDED,
    DONE,
    EMPTY,
    LONE,
    MOST_GROUPS,
    QUEUED,
    RERUN,
    RUNNING,
    SUSPECT,
    Lane,
    Request,
)
from shapestream.scheduling.recovery import Isolation
from shapestream.scheduling.slots import BUNDLE, Slot, SlotPool, SlotState, SlotTable


def check(
    ledger: Ledger,
    queues: Queues,
    isolation: Isolation,
    slots: SlotTable,
    now: float,
) -> None:
    """Raise AssertionError at the first book that disagrees."""
    requests = ledger.requests.values()
    _check_ledger(ledger, requests, queues, now)
    _check_batches(ledger, slots, slots.batches)
    for name, queue in queues.items():
        own = [request for request in requests if request.model == name]
        assert queue.unfinished == len(own)
        _check_queue(queue, own)
        assert queue in queues.waiting or not queue.waiting, f"{name} waits, but is not looked at"
        serving = [
            slot
            for slot in slots.slots.values()
            if name in slot.models and not slot.closing and not slot.wide
        ]
        free = {slot.id for slot in serving if slot.free}
        pool = slots.pools[name]
        assert pool.queue is queue
        assert free == set(pool.free), f"{name}: free slots {free} are listed as {set(pool.free)}"
        assert pool.count == len(serving)
        _check_agendas(pool, serving)
    _check_slots(slots, now)
    _check_shares(queues.values(), slots)
    _check_isolation(queues.values(), isolation, slots, now)


def _check_ledger(ledger: Ledger, requests: Iterable[Request], queues: Queues, now: float) -> None:
    waiting = [request for request in requests if request.state in (QUEUED, RERUN, SUSPECT)]
    assert all(request.state is not DONE for request in requests), "a request that ended is still here"
    room = ledger.admission.room
    assert room.requests == len(waiting)
    assert room.nbytes == sum(request.nbytes for request in waiting)
    assert ledger.running == sum(request.state is RUNNING for request in requests)
    groups = {queue.shares for queue in queues.values()}
    assert room.groups == len(groups)
    room_parts = {id(queue.shares.room.part): queue.shares.room.part for queue in queues.values()}
    assert room.parts == len(room_parts)
    for part in room_parts.values():
        assert part.models == Counter(q.bare_name for q in queues.values() if q.shares.room.part is part)
        assert {id(group) for group in part.groups} == {
            id(queue.shares.room) for queue in queues.values() if queue.shares.room.part is part
        }
        assert part.waiting == sum(group.requests > 0 for group in part.groups)
    assert room.waiting == sum(part.waiting > 0 for part in room_parts.values())
    for shares in groups:
        own = [request for request in requests if queues[request.model].shares is shares]
        held = [request for request in waiting if queues[request.model].shares is shares]
        assert shares.room.requests == len(held)
        assert shares.room.nbytes == sum(request.nbytes for request in held)
        queued = Counter(request.client for request in own if request.state is QUEUED)
        nbytes: Counter[int] = Counter()
        for request in own:
            nbytes[request.client] += request.nbytes * (request.state is QUEUED)
        owned = {
            client: (unfinished, queued[client], nbytes[client])
            for client, unfinished in Counter(request.client for request in own).items()
        }
        assert owned == shares.unfinished(), "clients own what is not here, or the reverse"
        assert len(owned) == shares.present
    parts = Counter(rework for request in requests for rework in request.reworks)
    assert parts == {rework: rework.members for rework in parts}, "rework is not of its members"
    assert not ledger.unwanted, "an unwanted batch was not looked at"
    with_deadline = {request.id for request in requests if request.deadline is not None}
    assert {request.id for request in ledger.deadlines.living()} == with_deadline
    assert len(ledger.deadlines) <= 2 * len(ledger.requests) + 65, "the dead were not thrown out"
    assert all(request.deadline is None or request.deadline > now for request in requests), "late, but here"


_HELD = {
    SlotState.IDLE: {(False, False)},
    SlotState.BUSY: {(True, False), (True, True)},
    SlotState.UNAVAILABLE: {(True, False), (True, True)},
    SlotState.RESTING: {(False, False)},
    SlotState.CLOSING: {(False, False), (True, False), (True, True)},
}
"""By the state of a slot: whether it runs a batch, and whether others are queued behind it."""


def _check_slots(slots: SlotTable, now: float) -> None:
    every = slots.slots.values()
    assert slots.free_count == sum(slot.free for slot in every)
    assert slots.resting == {slot.id: slot for slot in every if slot.state is SlotState.RESTING}
    for slot in slots.resting.values():
        assert slot.batch is None, "a slot that is put aside runs something"
        assert slot.unavailable_count, "a slot is put aside without a reason"
        assert slot.rests_until > now, "a slot was not taken back"
    assert all(not slot.pools for slot in every if slot.closing or slot.wide), "a slot is offered any work"
    assert all(not slot.behind for slot in every if slot.wide), "a batch is queued on a wide slot"
    wide = {slot.id for slot in every if slot.wide}
    assert wide == {group.wide.id for group in slots.workers.values() if group.wide is not None}
    assert slots.wide_count == len(wide)
    for slot in every:
        held = (slot.batch is not None, bool(slot.behind))
        assert held in _HELD[slot.state], (
            f"a slot that is {slot.state.value} holds {slot.batch}, {slot.behind}"
        )


def _check_batches(ledger: Ledger, slots: SlotTable, batches: Mapping[int, Batch]) -> None:
    held = [
        batch for slot in slots.slots.values() for batch in (slot.batch, *slot.behind) if batch is not None
    ]
    assert {batch.id for batch in held} == set(batches), (
        "a batch without a slot, or a slot with a batch that is over"
    )
    assert all(slot.batch is not None for slot in slots.slots.values() if slot.behind), (
        "a batch waits behind nothing"
    )
    for slot in slots.slots.values():
        numbers = [batch.id for batch in (slot.batch, *slot.behind) if batch is not None]
        assert numbers == sorted(numbers), "a slot gets batches out of order"
        assert len(slot.behind) <= BUNDLE, "too many batches wait on a slot"
    for batch in batches.values():
        assert batch.slot.batch is batch or batch in batch.slot.behind
        assert batch.state is not BatchState.CUT
        assert batch.is_behind == (batch.slot.batch is not batch)
        if batch.is_behind:
            assert batch.state is BatchState.RECALLED or not batch.slot.closing, (
                "a batch waits on a slot that closes"
            )
            assert batch.state is BatchState.RECALLED or batch.wanted, (
                "a batch is queued of which all members have ended"
            )
        assert batch.queue.name in batch.slot.models, "a slot runs a model that it does not have"
        wanted = [request for request in batch.members if request.state is RUNNING]
        assert batch.wanted == len(wanted)
        assert all(ledger.batch_of[request.id] is batch for request in wanted), "a request in two batches"
    running = {request.id for request in ledger.requests.values() if request.state is RUNNING}
    assert running == set(ledger.batch_of), "a request is in a batch and does not run, or the reverse"
    for id_ in running:
        batch = ledger.batch_of[id_]
        assert batch in batches.values(), "a request runs in a batch that is over"
        assert any(ledger.requests[id_] is member for member in batch.members)


def _check_agendas(pool: SlotPool, serving: list[Slot]) -> None:
    busy = [(slot.batch.ends_at, slot.id) for slot in serving if slot.batch is not None]
    assert [(at, slot.id) for at, _, slot in pool.ends] == sorted(busy)
    prefetches = [
        (slot.batch.prefetch_at, slot.id)
        for slot in serving
        if slot.batch is not None and slot.batch.prefetch_at is not None and not slot.behind
    ]
    assert [(at, slot.id) for at, _, slot in pool.prefetches] == sorted(prefetches)
    name = pool.queue.name
    assert pool.fastest == min([slot.paces.get(name, 1.0) for slot in serving], default=1.0)


def _check_shares(queues: Iterable[ModelQueue], slots: SlotTable) -> None:
    for queue in queues:
        assert queue in queue.sharing
        assert all(other.shares is queue.shares and other.sharing is queue.sharing for other in queue.sharing)
    for slot in slots.slots.values():
        assert len({id(pool.queue.shares) for pool in slot.pools}) <= 1, (
            "models share a slot, but no virtual time"
        )


def _check_isolation(
    queues: Iterable[ModelQueue], isolation: Isolation, slots: SlotTable, now: float
) -> None:
    assert all(slot.worker is slots.workers[slot.worker.name] for slot in slots.slots.values())
    for worker in slots.workers.values():
        assert worker.slots, "a worker without slots is remembered"
        assert all(slots.slots[number] is slot for number, slot in worker.slots.items())
        assert worker.reserved == (isolation.isolated.get(worker.name) is worker)
        running = [
            slot.batch
            for slot in worker.slots.values()
            if slot.batch is not None and slot.batch.state is not BatchState.STUCK
        ]
        alone = [batch for batch in running if batch.suspicion is not Suspicion.NONE]
        assert alone == ([] if worker.suspect is None else [worker.suspect])
        if alone:
            assert len(running) == len(alone[0].members) == 1, "a suspect is not alone in its worker"
    assert set(isolation.isolated) <= set(slots.workers), "a worker that is gone is kept for suspects"
    for queue in queues:
        name = queue.name
        assert name in isolation.suspected or not queue.suspect_count, (
            f"{name} has suspects, but is not looked at"
        )
        if queue.suspect_count and not isolation.isolated:
            assert isolation.choose(queue, now) is None, "a suspect waits, and no worker is kept for it"
    for worker in isolation.isolated.values():
        waits = any(pool.queue.suspect_count for slot in worker.slots.values() for pool in slot.pools)
        assert waits or worker.suspect is not None, "reserved for no suspect"


def _check_queue(queue: ModelQueue, own: list[Request]) -> None:
    queued = {request.id: request for request in own if request.state is QUEUED}
    again = [request for request in own if request.state is RERUN]
    assert queue.count == len(queued)
    assert queue.rows == sum(request.rows for request in queued.values())
    assert queue.cost_s == sum(request.cost_ns for request in queued.values()) / 1e9
    assert queue.rerun_count == len(again)
    again_ns = sum(request.cost_ns for request in own if request.state in (RERUN, SUSPECT))
    assert queue.again_s == again_ns / 1e9
    grouped = [request for _, _, group in queue.reruns for request in group if request.state is RERUN]
    assert sorted(map(id, grouped)) == sorted(map(id, again)), (
        "a request to be run again is in no group, or two"
    )
    suspects = [request for request in own if request.state is SUSPECT]
    assert queue.suspect_count == len(suspects)
    held = [request for _, _, request in queue.suspects if request.state is SUSPECT]
    assert sorted(map(id, held)) == sorted(map(id, suspects)), "a suspect is not in flow, or twice"
    if queue.delay_s:
        assert {request.id for request in queue.due.living()} == set(queued)
    waiting = sum(request.state <= SUSPECT for request in own)
    assert queue.waits.present == waiting, "what waits was not counted when it came, or when it went"
    _check_lists(queue, queued)


def _check_lists(queue: ModelQueue, queued: Mapping[int, Request]) -> None:
    flows = queue.turns.flows()
    in_flow = [request for flow in flows for request in flow.requests.living()]
    assert sorted(request.id for request in in_flow) == sorted(queued), "a request is in no flow, or in two"
    assert all(request.model == queue.name for request in in_flow), (
        "a request is in the flow of another model"
    )
    for flow in flows:
        assert len(flow.requests) <= 2 * flow.queued + 64, "the dead were not thrown out"
    assert len(queue.turns) <= 2 * len(queued) + 64, "the dead were not thrown out"
    found: list[int] = []
    for lane in queue.lanes.values():
        found.extend(_check_lane(queue, lane))
    assert sorted(found) == sorted(queued), "a request is in no bucket, or in two"
    assert sum(len(lane.buckets) for lane in queue.lanes.values()) == len(queue.buckets)
    grouped = Counter(
        lane.key[-1]
        for lane in queue.lanes.values()
        for _ in lane.buckets
        if lane.key[-1:] and lane.key != EMPTY
    )
    assert all(queue.groups[group] == grouped[group] for group in queue.groups), "a group is counted wrongly"
    assert len(queue.groups) <= MOST_GROUPS


def _check_lane(queue: ModelQueue, lane: Lane) -> Iterable[int]:
    assert lane.buckets, "an empty lane is remembered"
    assert [bucket.key for bucket in lane.buckets] == sorted(bucket.key for bucket in lane.buckets)
    for bucket in lane.buckets:
        assert queue.buckets[bucket.name] is bucket
        fixed = tuple(size for size, padded in zip(bucket.shape, queue.padded, strict=True) if not padded)
        lone = lane.key[:1] == (LONE,)
        groups = {request.arrival.group for request in bucket.held if request.state is QUEUED}
        keys = [fixed if group is None else (*fixed, group) for group in groups]
        if not lone and lane.key != EMPTY and lane.key[-1:] != CROWDED:
            assert keys == [lane.key], "a lane mixes what may not mix"
        held = bucket.held
        living = [request for request in held if request.state is QUEUED]
        assert len(held) <= 2 * len(living) + 32, "the dead were not thrown out"
        ranks = [(request.rank, request.order) for request in held]
        assert ranks == sorted(ranks), "a bucket is out of order"
        assert bucket.count == len(living) > 0
        assert bucket.rows == sum(request.rows for request in living)
        assert bucket.first() is living[0], "a dead entry stands in front"
        assert lone or all(request.empty == (lane.key == EMPTY) for request in living), "elements beside none"
        assert all(request.arrival.suspect == lone for request in living), "a suspect has company"
        assert not lone or bucket.count == len(lane.buckets) == 1, "a suspect has company"
        full = bool(queue.delay_s) and bucket.rows >= queue.profile.max_batch
        assert full == (bucket.name in queue.full)
        yield from (request.id for request in living)
