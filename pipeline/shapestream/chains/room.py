"""Room for what chains may fan out to: requests of chains wait until it is there, each client in turn.

A request reserves the most that its stages may hold, requests and bytes, before it begins: what the chain allows, or less
where its inputs or the signatures tell (`Stage.most`). Once a stage's number is known, the rest of its reservation is given
back; once the stage is done, all of it. So each stage finds room, and only requests that have not begun wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

from shapestream.chains.plan import Held
from shapestream.chains.run import ChainRun, RunState, StageRun

FEW = 32
"""Deadlines of requests that wait no longer, which are kept in any case."""


class RoomStatistics(NamedTuple):
    """The present state of the room for chains."""

    waiting: Mapping[str, int]
    """Requests that wait for room, by chain; a chain may be missing."""
    running: Mapping[str, int]
    """Requests that have begun, likewise."""
    reserved: Held
    limit: Held

    def to_dict(self, chains: Iterable[str]) -> dict[str, Any]:
        """Return the numbers as plain data, in all and by each of these `chains`."""
        return {
            "waiting": sum(self.waiting.values()),
            "running": sum(self.running.values()),
            "reserved_requests": self.reserved.requests,
            "reserved_bytes": self.reserved.nbytes,
            "limit_requests": self.limit.requests,
            "limit_bytes": self.limit.nbytes,
            "chains": {
                name: {"waiting": self.waiting.get(name, 0), "running": self.running.get(name, 0)}
                for name in chains
            },
        }


class ChainRoom:
    """The reservations of all chains' requests, and those that wait for theirs."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._limit = Held(max_requests, max_bytes)
        self._requests = 0
        self._bytes = 0
        self._reserved: dict[ChainRun, dict[str, Held]] = {}
        """By stage."""
        self._waiting: OrderedDict[int, OrderedDict[ChainRun, None]] = OrderedDict()
        """By client; the first has the next turn."""
        self._clients: dict[ChainRun, int] = {}
        """The client of each request that waits."""
        self._waiting_of: Counter[str] = Counter()
        self._running_of: Counter[str] = Counter()
        """Requests that wait, and those that have begun, by chain."""
        self._deadlines: list[tuple[float, int, ChainRun]] = []
        """Those of requests that waited: a heap. Others are dropped when they come to the front, or once they are many."""
        self._order = count()

    def __len__(self) -> int:
        """Count the requests that wait."""
        return len(self._clients)

    @property
    def reserved(self) -> Held:
        """What all requests that have begun may hold."""
        return Held(self._requests, self._bytes)

    def statistics(self) -> RoomStatistics:
        """Return the present state. The numbers by chain change with it."""
        return RoomStatistics(self._waiting_of, self._running_of, self.reserved, self._limit)

    def wait(self, run: ChainRun, client: int) -> None:
        """Let a request wait for its turn. `next` may return it at once."""
        self._waiting.setdefault(client, OrderedDict())[run] = None
        self._clients[run] = client
        self._waiting_of[run.chain.name] += 1
        if run.deadline is not None:
            if len(self._deadlines) > 2 * len(self._clients) + FEW:
                self._deadlines = [entry for entry in self._deadlines if entry[2] in self._clients]
                heapify(self._deadlines)
            heappush(self._deadlines, (run.deadline, next(self._order), run))

    def next_deadline(self) -> float:
        """Return the first deadline of a request that waits; infinity for none."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].state is not RunState.WAITING:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else inf

    def late(self, now: float) -> ChainRun | None:
        """Return a request that waits, and whose deadline has passed; None if there is none."""
        return self._deadlines[0][2] if self.next_deadline() <= now else None

    def next(self) -> ChainRun | None:
        """Return a request that may begin now, with its reservation; None if none may.

        The first in turn waits for its room, and no other passes it, so that small ones do not starve it.
        """
        while self._waiting:
            client, runs = next(iter(self._waiting.items()))
            run = next(iter(runs))
            if run.is_over:
                self._leave(run)
                continue
            if not self._fits(run):
                return None
            self._leave(run)
            if runs:
                self._waiting.move_to_end(client)
            self._reserve(run)
            return run
        return None

    def _leave(self, run: ChainRun) -> None:
        """Let a request wait no longer."""
        client = self._clients.pop(run)
        self._waiting_of[run.chain.name] -= 1
        runs = self._waiting[client]
        del runs[run]
        if not runs:
            del self._waiting[client]

    def _fits(self, run: ChainRun) -> bool:
        """Tell whether there is room. One request alone may always begin."""
        if not self._reserved:
            return True
        most = run.most.values()
        return (
            self._requests + sum(each.requests for each in most) <= self._limit.requests
            and self._bytes + sum(each.nbytes for each in most) <= self._limit.nbytes
        )

    def _reserve(self, run: ChainRun) -> None:
        held = self._reserved[run] = dict(run.most)
        self._running_of[run.chain.name] += 1
        for each in held.values():
            self._requests += each.requests
            self._bytes += each.nbytes

    def update(self, run: ChainRun) -> None:
        """Take in what a request has learned: the numbers of stages that have begun, the stages that are done, its end."""
        if run.is_over and run in self._clients:
            self._leave(run)
        held = self._reserved.get(run)
        if held is None:
            return
        for stage in run.stages:
            if stage.stage.name in held:
                self._set(held, stage.stage.name, _held_by(stage, over=run.is_over))
        if run.is_over:
            del self._reserved[run]
            self._running_of[run.chain.name] -= 1

    def _set(self, held: dict[str, Held], stage: str, now: Held | None) -> None:
        if now is not None and now != (before := held[stage]):
            self._requests += now.requests - before.requests
            self._bytes += now.nbytes - before.nbytes
            held[stage] = now


def _held_by(stage: StageRun, *, over: bool) -> Held | None:
    """Return what a stage holds; None while its number is not known."""
    if over or stage.ended != inf:
        return Held(0, 0)
    return None if stage.began == inf else Held(stage.requests, stage.nbytes)
