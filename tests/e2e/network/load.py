"""Requests whose answers are known, sent while the network misbehaves, and what became of each.

A request's row holds its number, its deadline by the host's monotonic clock, and as many further numbers as make it
small enough to be inline or large enough to be frames of its own. The model writes down what it runs (`noted.py`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import trio

import shapestream

MODEL = "noted"
# Numbers of a row: inside the header; a copied frame; a frame that is passed on without a copy.
SIZES = (3, 3, 3, 500, 20_000)
_numbers = itertools.count(1)


@dataclass(slots=True)
class Outcomes:
    """How the requests ended."""

    asked: dict[int, float] = field(default_factory=dict)
    """Every request, with its deadline by the monotonic clock; 0.0 without."""
    right: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    refused: dict[int, shapestream.RequestError] = field(default_factory=dict)

    @property
    def lost(self) -> set[int]:
        """Asked, and without any end."""
        return self.asked.keys() - self.right - self.refused.keys()

    @property
    def unfinished(self) -> int:
        """Requests that are under way."""
        return len(self.asked) - len(self.right) - len(self.refused)

    async def more_ends(self, count: int) -> None:
        """Until so many more have ended."""
        ended = len(self.asked) - self.unfinished
        while len(self.asked) - self.unfinished < ended + count:  # noqa: ASYNC110 - nothing announces it
            await trio.sleep(0.005)

    @property
    def defects(self) -> tuple[set[int], list[str], list[int], dict[int, shapestream.RequestError]]:
        """Lost, wrong, ended twice and refused: where requests have no deadline, all of it must be empty."""
        return self.lost, self.wrong, self.twice, self.refused

    @property
    def codes(self) -> Counter[str]:
        """Errors by code."""
        return Counter(error.code for error in self.refused.values())

    def ended(self, number: int) -> None:
        """Notes an end; a second one of the same request is a defect of the client."""
        if number in self.right or number in self.refused:
            self.twice.append(number)


class Load:
    """Several tasks that ask one request after the other until they are told to stop."""

    def __init__(self, client: shapestream.Client, seed: int, *, deadline_s: float | None = None) -> None:
        self.outcomes = Outcomes()
        self._client = client
        self._chance = random.Random(seed)
        self._deadline_s = deadline_s
        self._stopped = False

    def stop(self) -> None:
        """What is under way is still waited for."""
        self._stopped = True

    async def run(self, tasks: int = 12) -> None:
        """Returns when everything has ended."""
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(self._ask_on)

    async def _ask_on(self) -> None:
        while not self._stopped:
            await self.ask(self._chance.choice(SIZES))

    async def ask(self, size: int) -> None:
        """One request of so many numbers, to its end."""
        number = next(_numbers)
        outcomes = self.outcomes
        deadline_s = self._deadline_s
        deadline = 0.0 if deadline_s is None else time.monotonic() + deadline_s
        x = np.random.default_rng(number).integers(0, 1 << 40, (1, size)).astype(np.float64)
        x[0, :2] = number, deadline
        outcomes.asked[number] = deadline
        try:
            result = await self._client.infer(MODEL, {"x": x}, deadline=deadline_s)
        except shapestream.RequestError as error:
            outcomes.ended(number)
            outcomes.refused[number] = error
            return
        outcomes.ended(number)
        if np.array_equal(result["y"], x * 2 + 1):
            outcomes.right.add(number)
        else:
            outcomes.wrong.append(f"request {number} of {size}: {result['y'].shape} {result['y'].flat[:3]}")


class Journal:
    """What the model ran, as it wrote it down."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal"

    def starts(self, outcomes: Outcomes) -> list[tuple[int, float, float, float]]:
        """Of these requests, in the order of the starts: number, time of the start, deadline, and how long the process had
        just waited for a CPU."""
        lines = [line.split() for line in self._path.read_text().splitlines()]
        starts = [
            (int(number), float(at), float(deadline), float(cpu)) for number, at, deadline, cpu in lines
        ]
        return [start for start in starts if start[0] in outcomes.asked]

    def runs(self, outcomes: Outcomes) -> Counter[int]:
        """How often each of these requests was run."""
        return Counter(number for number, _, _, _ in self.starts(outcomes))

    def late_s(self, outcomes: Outcomes) -> dict[float, float]:
        """By the time of a call that started after a member's deadline: how many seconds after it, less what the process
        had just waited for a CPU, perhaps between the slot's look at its clock and the model's."""
        return {
            start: start - deadline - cpu
            for _, start, deadline, cpu in self.starts(outcomes)
            if 0 < deadline < start
        }
