"""A client of an answer run that uses the product's client: `python -m tests.e2e.answers.client KIND ADDRESS TALLY ...`.

Some of its requests are left alone. The others get a deadline, or are withdrawn, after a time that is drawn around what
an answer took of late: so they end queued, running, or not at all. Every answer is compared.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio
from tests.e2e.answers.arguments import (
    CONNECT_S,
    FIRST_GUESS_S,
    HURRIED,
    RAISED,
    STRAYING,
    WITHDRAWN,
    arguments,
)
from tests.e2e.answers.models import Model, Question, Questions, models_of
from tests.e2e.answers.tally import Count, Tally

import shapestream

TASKS = (1, 3, 24)
"""Requests at a time of a client that asks. With few, a request runs for a large part of its time, and is hit there."""
IN_FLIGHT = (4, 64)
LONGEST_STREAM = 200


class Load:
    """Requests, one budget, one tally."""

    def __init__(self, tally: Tally, engine: str, seed: int, requests: int, patience_s: float) -> None:
        self._tally = tally
        self._chance = random.Random(seed)
        self._questions = Questions(seed, models_of(engine))
        self._left = requests
        self._patience_s = patience_s
        self._withdrawn = self._chance.choice(WITHDRAWN)
        self._took_s = FIRST_GUESS_S

    def _draw(self, model: Model | None = None) -> Question:
        self._left -= 1
        self._tally.add(Count.ASKED)
        return self._questions.draw(self._chance, model)

    def _soon_s(self) -> float:
        return self._chance.uniform(0.0, STRAYING * self._took_s)

    async def ask_on(self, client: shapestream.Client) -> None:
        """One request after the other in many tasks."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._chance.choice(TASKS)):
                nursery.start_soon(self._ask_in_turn, client)

    async def _ask_in_turn(self, client: shapestream.Client) -> None:
        while self._left > 0:
            await self._ask(client)

    async def ask_alone(self, client: shapestream.Client) -> None:
        """One request after the other for a model whose calls are not shared: what is withdrawn, runs."""
        while self._left > 0:
            await self._ask(
                client, self._chance.choice([model for model in self._questions.models if not model.shares])
            )

    async def _ask(self, client: shapestream.Client, model: Model | None = None) -> None:
        question, kind = self._draw(model), self._chance.random()
        withdraw_s = self._soon_s() if kind < self._withdrawn else float("inf")
        deadline_s = self._soon_s() if self._chance.random() < HURRIED else None
        began = trio.current_time()
        with trio.move_on_after(min(withdraw_s, self._patience_s)) as scope:
            try:
                result = await client.infer(question.model.name, {"x": question.x}, deadline=deadline_s)
            except shapestream.RequestError as error:
                self._failed(question, error, hurried=deadline_s is not None)
            else:
                self._took_s += 0.1 * (trio.current_time() - began - self._took_s)
                self._tally.answered(question, dict(result))
        if scope.cancelled_caught:
            if withdraw_s < self._patience_s:
                self._took_s *= RAISED
                self._tally.add(Count.WITHDRAWN)
            else:
                self._tally.note(Count.LOST, question, f"no end within {self._patience_s:g} s")

    def _failed(self, question: Question, error: shapestream.RequestError, *, hurried: bool) -> None:
        self._tally.failed(question, error.code, str(error), hurried=hurried, withdrawn=False)

    async def stream_on(self, client: shapestream.Client) -> None:
        """One stream after the other; most are left before their end."""
        while self._left > 0:
            await self._stream(client, self._chance.choice(self._questions.models))

    async def _stream(self, client: shapestream.Client, model: Model) -> None:
        length = min(self._left, self._chance.randrange(1, LONGEST_STREAM))
        leave_after = self._chance.choice((length, self._chance.randrange(length + 1)))
        hurried = self._chance.random() < HURRIED
        asked: dict[int, Question] = {}
        ended: set[int] = set()

        async def source() -> AsyncIterator[tuple[int, dict[str, Any]]]:
            for key in range(length):
                asked[key] = question = self._draw(model)
                yield key, {"x": question.x}

        options: dict[str, Any] = {
            "max_in_flight": self._chance.choice(IN_FLIGHT),
            "on_error": "yield",
            "ordered": self._chance.random() < 0.5,
            "deadline": 2 * self._soon_s() if hurried else None,
        }
        with trio.move_on_after(self._patience_s) as scope:
            async with client.stream(model.name, source(), **options) as results:
                async for item in results:
                    scope.deadline = trio.current_time() + self._patience_s
                    self._take(item, asked, ended, options)
                    if len(ended) >= leave_after:
                        break
        left = len(asked) - len(ended)
        if scope.cancelled_caught or (leave_after == length and left):
            self._tally.note(Count.LOST, next(iter(asked.values())), "an item of a stream did not end", left)
        else:
            self._tally.add(Count.WITHDRAWN, left)

    def _take(self, item: Any, asked: dict[int, Question], ended: set[int], options: dict[str, Any]) -> None:
        question = asked[item.key]
        if item.key in ended:
            self._tally.note(Count.DUPLICATED, question, "an item of a stream ended twice")
            return
        if options["ordered"] and item.key != len(ended):
            self._tally.note(Count.WRONG, question, f"item {item.key} came as the {len(ended)}th")
        ended.add(item.key)
        if isinstance(item, shapestream.Failed):
            self._failed(question, item.error, hurried=options["deadline"] is not None)
        else:
            self._tally.answered(question, dict(item))


KINDS: dict[str, Callable[[Load, shapestream.Client], Any]] = {
    "asking": Load.ask_on,
    "streaming": Load.stream_on,
    "alone": Load.ask_alone,
}


async def main(kind: str, address: str, load: Load) -> None:
    """Until the requests are spent."""
    async with shapestream.connect(address, connect_timeout=CONNECT_S) as client:
        await KINDS[kind](load, client)


if __name__ == "__main__":
    given = arguments().parse_args()
    load = Load(Tally(given.tally), given.engine, given.seed, given.requests, given.patience_s)
    trio.run(main, given.kind, given.address, load)
