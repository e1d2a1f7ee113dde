"""Interleaved rounds: each contender once per round, in turn, so that noise of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Server(Protocol):
    """Processes whose CPU time can be read, in seconds."""

    def cpu_s(self) -> float:
        """Return the time of the server."""

    def children_cpu_s(self) -> float:
        """Return the time of its workers."""


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to answer requests: `run(n)` sends n requests and checks every answer."""

    name: str
    run: Callable[[int], None]
    server: Server
    requests: int
    rates: list[float] = field(default_factory=list)
    """Requests per second, a figure per round."""
    server_us: list[float] = field(default_factory=list)
    """CPU of the server process per request, in microseconds, less an idle round."""
    workers_us: list[float] = field(default_factory=list)
    """The same of its worker processes."""

    def measure(self) -> None:
        """One round: an idle stretch first, since heartbeats cost something too."""
        idle_s, cpu_s, workers_s = self._timed(lambda: time.sleep(0.5))
        idle_rate, idle_workers_rate = cpu_s / idle_s, workers_s / idle_s
        elapsed_s, cpu_s, workers_s = self._timed(lambda: self.run(self.requests))
        self.rates.append(self.requests / elapsed_s)
        self.server_us.append((cpu_s - idle_rate * elapsed_s) / self.requests * 1e6)
        self.workers_us.append((workers_s - idle_workers_rate * elapsed_s) / self.requests * 1e6)

    def _timed(self, work: Callable[[], None]) -> tuple[float, float, float]:
        workers_before, server_before, started = (
            self.server.children_cpu_s(),
            self.server.cpu_s(),
            time.perf_counter(),
        )
        work()
        elapsed_s = time.perf_counter() - started
        return elapsed_s, self.server.cpu_s() - server_before, self.server.children_cpu_s() - workers_before

    @property
    def rate(self) -> float:
        """The median rate, in requests per second."""
        return statistics.median(self.rates)

    def ratio_of_rates(self, other: Contender) -> float:
        """The median of the rounds' ratios of rates, this one's to the other's."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))


def run_rounds(contenders: Sequence[Contender], rounds: int) -> None:
    """Warms every contender up, then measures them in turn."""
    for contender in contenders:
        contender.run(max(64, contender.requests // 10))
    for _ in range(rounds):
        for contender in contenders:
            contender.measure()
