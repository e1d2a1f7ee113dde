"""Slots on virtual time: they take as long as the truth says, and report as a worker would."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappush
from math import prod

import numpy as np

from shapestream.scheduling.events import BatchFailed, BatchFinished, ModelProfile, StartBatch
from shapestream.simulation.records import Requests, SlotTime
from shapestream.simulation.true_cost import TrueCost
from shapestream_engine.batch import ErrorCode

__all__ = ["ARRIVED", "ENDED", "REPORTED", "SimulatedSlots", "SimulationError", "SlotPlan", "Truth"]

ARRIVED, ENDED, REPORTED = range(3)
"""Kinds of entries in the heap of events: a batch reached its slot, a batch ended there, its report came back."""

_NOISES = 4096


class SimulationError(Exception):
    """The policy broke its contract: a bug in it, or in the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """One simulated slot."""

    worker: str = ""
    """Slots of one worker share what was prepared."""
    speed: float = 1.0
    """Its seconds / the truth's seconds: 2.0 is half as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the simulated world is like."""

    costs: Mapping[str, TrueCost]
    """By model."""
    noise: float = 0.0
    """Sigma of a lognormal factor of mean 1 on every call."""
    way_s: float = 0.0
    """From the decision to the slot, and as long from the slot's end to the scheduler."""
    seed: int = 0


class _Job:
    """One batch that was sent to a slot."""

    __slots__ = ("action", "began", "busy_s", "code", "ended", "expired", "preparations")

    def __init__(self, action: StartBatch) -> None:
        self.action = action
        self.began = -1.0
        self.busy_s = 0.0
        self.ended = False
        self.expired: frozenset[int] = frozenset()
        self.preparations = 0
        self.code: ErrorCode | None = None


class SimulatedSlots:
    """All slots of a simulation. Puts what will happen into the heap as (time, number, kind, job)."""

    def __init__(
        self,
        plans: list[SlotPlan],
        profiles: Mapping[str, ModelProfile],
        truth: Truth,
        requests: Requests,
        heap: list[tuple[float, int, int, _Job]],
    ) -> None:
        self._plans = plans
        self._profiles = profiles
        self._truth = truth
        self._requests = requests
        self._heap = heap
        self._number = 0
        self._jobs: dict[int, _Job] = {}
        self._running: list[_Job | None] = [None] * len(plans)
        self._behind: list[deque[_Job]] = [deque() for _ in plans]
        self._prepared: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        self._rng = np.random.default_rng(truth.seed)
        self._noises: list[float] = []
        self.time = SlotTime()

    def start(self, action: StartBatch, now: float) -> None:
        """Sends a batch to its slot."""
        job = self._jobs[action.batch] = _Job(action)
        self.time.prefetched += action.behind is not None
        if self._truth.way_s:
            self._push(now + self._truth.way_s, ARRIVED, job)
        else:
            self.arrive(job, now)

    def arrive(self, job: _Job, now: float) -> None:
        """A batch has reached its slot: it begins, or waits behind the one that runs."""
        if job.ended:
            return
        slot = job.action.slot
        if self._running[slot] is None:
            self._begin(job, now)
        else:
            if job.action.behind is None:
                raise SimulationError(
                    f"slot {slot} is busy, and batch {job.action.batch} is not behind another"
                )
            self._behind[slot].append(job)

    def take_back(self, batch: int, now: float, code: ErrorCode) -> None:
        """Recalls or cancels a batch that was sent; the way there is not waited for, its report travels as always.

        A recall comes too late for what runs; a cancellation ends that.
        """
        job = self._jobs.get(batch)
        if job is None or job.ended or (job.began >= 0 and code is ErrorCode.RECALLED):
            return
        job.code = code
        self.time.recalled += code is ErrorCode.RECALLED
        slot = job.action.slot
        if self._running[slot] is job:
            job.busy_s = now - job.began
            self._push(now, ENDED, job)
            return
        if job in self._behind[slot]:
            self._behind[slot].remove(job)
        job.ended = True
        self._push(now + self._truth.way_s, REPORTED, job)

    def end(self, job: _Job, now: float) -> bool:
        """A batch's time is over; the next one on the slot begins. Whether its report is there already."""
        if job.ended:
            return False
        job.ended = True
        slot = job.action.slot
        self._account(job)
        self._running[slot] = None
        if self._behind[slot]:
            self._begin(self._behind[slot].popleft(), now)
        if not self._truth.way_s:
            return True
        self._push(now + self._truth.way_s, REPORTED, job)
        return False

    def report(self, job: _Job) -> BatchFinished | BatchFailed:
        """What the scheduler hears of a batch."""
        batch = job.action.batch
        del self._jobs[batch]
        if job.code is not None:
            return BatchFailed(batch=batch, code=job.code, message=job.code)
        return BatchFinished(
            batch=batch, busy_s=job.busy_s, expired=job.expired, preparations=job.preparations
        )

    # ------------------------------------------------------------ inside a slot

    def _begin(self, job: _Job, now: float) -> None:
        action = job.action
        slot = action.slot
        job.began = now
        self._running[slot] = job
        deadline = self._requests.deadline
        late = [request for request in action.requests if deadline[request] < now]
        if late:
            job.expired = frozenset(late)
        if len(late) < len(action.requests):
            job.busy_s = self._call_s(job) * self._plans[slot].speed
        self._push(now + job.busy_s, ENDED, job)

    def _call_s(self, job: _Job) -> float:
        """Seconds of the batch's calls: rows are covered as the profile says, new shapes are prepared first."""
        action = job.action
        cost = self._truth.costs[action.model]
        plan = self._plans[action.slot]
        known = self._prepared.setdefault((plan.worker or str(action.slot), action.model), set())
        seconds = 0.0
        for sizes in self._calls(action):
            seconds += cost.seconds(sizes)
            self.time.calls += 1
            self.time.computed += prod(sizes)
            if (prepare_s := cost.preparation_s(sizes)) and sizes not in known:
                known.add(sizes)
                job.preparations += 1
                seconds += prepare_s
        return seconds * self._noise() if self._truth.noise else seconds

    def _calls(self, action: StartBatch) -> list[tuple[int, ...]]:
        profile = self._profiles[action.model]
        if profile.row_calls is None or action.sizes[0] >= len(profile.row_calls):
            return [action.sizes]
        return [(rows, *action.sizes[1:]) for rows in profile.row_calls[action.sizes[0]]]

    def _noise(self) -> float:
        if not self._noises:
            sigma = self._truth.noise
            drawn = np.exp(sigma * self._rng.standard_normal(_NOISES) - sigma * sigma / 2)
            self._noises = drawn.tolist()
        return self._noises.pop()

    def _account(self, job: _Job) -> None:
        time = self.time
        time.busy_s += job.busy_s
        time.batches += 1
        time.preparations += job.preparations
        elements = self._requests.elements
        members = job.action.requests
        if job.expired:
            members = tuple(request for request in members if request not in job.expired)
        time.members += len(members)
        time.useful += sum([elements[request] for request in members])

    def _push(self, at: float, kind: int, job: _Job) -> None:
        self._number += 1
        heappush(self._heap, (at, self._number, kind, job))
