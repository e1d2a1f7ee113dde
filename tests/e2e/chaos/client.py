"""A client of a chaos run: `python -m tests.e2e.chaos.client ADDRESS NUMBER SEED [--misdeed KIND | --withdraw N]`.

It asks through the product's own client: some tasks call `infer`, and one ordered stream runs beside them. What it asks
for, what it was told, and every terminal reply as it came off the wire go to the ledger. SIGTERM: it asks for nothing
new, waits for all answers, and ends.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import trio
from tests.e2e.answers.models import MODELS, Questions
from tests.e2e.chaos import model
from tests.e2e.chaos.witness import Witness
from tests.entries import Entry, Failure, ResultEntry

import shapestream
from shapestream.client import core
from shapestream.client.session import Session

MODEL = "checked"
ONCE = "once"
"""The name of the model that must not run a request twice, and the kind of requests for it."""
CHAIN = "chained"
"""The name of the chain, and the kind of requests for it: each row is checked by itself, between two other stages."""
CHAINED_ROWS = 6
FILE = "file"
"""The kind of requests for `layers`, a model file that OpenVINO runs. It tells the ledger nothing of its runs."""
ONCE_SHARE = 0.1
LAYERS = next(each for each in MODELS if each.name == "layers")
DEEDS = {"poison": model.DIE, "hang": model.HANG}
"""What kinds of requests do that others do not."""
TASKS = 6
CHAINED = 2
"""Tasks that ask for the chain."""
STREAMED = 6
WITHDRAWING = 4
"""Tasks of a client that withdraws; another one withdraws nothing."""
STRAYING = 1.5
"""A request is withdrawn after 0 to so many times what an answer took of late: queued, running, or not at all."""
PATIENCE_S = 60.0


class Load:
    """Makes requests, and tells the ledger about each."""

    def __init__(
        self,
        number: int,
        seed: int,
        witness: Witness,
        *,
        lengths: Sequence[int] = (2, 3, 10, 10, 26, 26, 58, 250, 2000),
        deadlines_s: Sequence[float | None] = (None, None, None, 0.15, 0.5, 2.0, 8.0),
        work_us: tuple[int, int] = (2_000, 20_000),
        pause_s: float = 0.04,
        once_share: float = ONCE_SHARE,
    ) -> None:
        """`lengths` are the requests' sizes, and `deadlines_s` their deadlines, each as often as it stands there.

        Many have no deadline, and the stream's neither: nothing but an answer ends these. A call takes as long as `work_us`
        allows, and a task pauses for up to `pause_s` between two requests.
        """
        self.number = number
        self._random = random.Random(f"{seed} {number}")
        self._numbers = np.random.default_rng([seed, number])
        self._witness = witness
        self._lengths, self._deadlines_s, self._work_us = lengths, deadlines_s, work_us
        self._pause_s, self._once_share = pause_s, once_share
        self._questions = Questions(seed, MODELS)
        self._took_s = 0.02
        self._asked = self._ended = self._withdrawn = 0
        self.stopping = trio.Event()

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return self._asked - self._ended

    async def more_ends(self, count: int) -> None:
        """Until so many more have ended."""
        enough = self._ended + count
        while self._ended < enough:  # noqa: ASYNC110 - nothing announces it
            await trio.sleep(0.005)

    def _token(self) -> int:
        self._asked += 1
        return self.number << 32 | self._asked

    def submit(self, kind: str = "usual", *, deadline_s: float | None = None) -> tuple[int, dict[str, Any]]:
        """A new request's token and inputs; the ledger knows of it when this returns."""
        token = self._token()
        length = self._random.choice(self._lengths)
        rows = (
            self._random.randint(1, CHAINED_ROWS) if kind == CHAIN else self._random.choice((1, 1, 1, 2, 3))
        )
        payload = self._numbers.integers(0, 1 << 40, (rows, length), np.int64)
        now = time.monotonic()
        deadline_at = None if deadline_s is None else now + deadline_s
        deadline_us = 0 if deadline_at is None else int(deadline_at * 1e6)
        x = model.rows(
            token, deadline_us, self._random.randrange(*self._work_us), DEEDS.get(kind, 0), payload
        )
        self._witness.tell(
            "submitted",
            token=token,
            client=self.number,
            kind=kind,
            at=now,
            deadline_at=deadline_at,
            expected=zlib.crc32((x if kind == CHAIN else model.answer_to(x)).tobytes()),
        )
        return token, {"x": x}

    def ended(self, token: int, code: str, y: np.ndarray[Any, Any] | None = None) -> None:
        """What its caller was told."""
        self._ended += 1
        answer = None if y is None else zlib.crc32(np.ascontiguousarray(y).tobytes())
        self._witness.tell("ended", token=token, at=time.monotonic(), code=code, answer=answer)

    async def ask(self, client: shapestream.Client, kind: str = "usual") -> None:
        """One request and its end."""
        deadline_s = None if kind in DEEDS else self._random.choice(self._deadlines_s)
        token, inputs = self.submit(kind, deadline_s=deadline_s)
        name = kind if kind in (ONCE, CHAIN) else MODEL
        try:
            result = await client.infer(name, inputs, deadline=deadline_s)
        except shapestream.RequestError as error:
            self.ended(token, error.code)
            await trio.sleep(self._pause_s)
        else:
            self.ended(token, "ok", result["x" if kind == CHAIN else "y"])

    async def ask_on(self, client: shapestream.Client, kind: str = "usual") -> None:
        """One request after the other, until it is told to stop; of the usual ones, some may run only once."""
        while not self.stopping.is_set():
            once = kind == "usual" and self._random.random() < self._once_share
            await self.ask(client, ONCE if once else kind)
            await trio.sleep(self._random.uniform(0.0, self._pause_s))

    async def ask_file(self, client: shapestream.Client, *, withdraw: bool = False) -> None:
        """One request for the model file and its end, which may be that it is withdrawn."""
        token, question = self._token(), self._questions.draw(self._random, LAYERS)
        self._witness.tell(
            "submitted",
            token=token,
            client=self.number,
            kind=FILE,
            at=time.monotonic(),
            deadline_at=None,
            expected=zlib.crc32(unsigned_zeros(question.answer["y"]).tobytes()),
        )
        began = trio.current_time()
        patience_s = self._random.uniform(0.0, STRAYING * self._took_s) if withdraw else float("inf")
        with trio.move_on_after(patience_s) as scope:
            try:
                result = await client.infer(LAYERS.name, {"x": question.x})
            except shapestream.RequestError as error:
                self.ended(token, error.code)
                await trio.sleep(self._pause_s)
            else:
                self._took_s += 0.1 * (trio.current_time() - began - self._took_s)
                self.ended(token, "ok", unsigned_zeros(result["y"]))
        if scope.cancelled_caught:
            self._withdrawn += 1
            self.ended(token, "withdrawn")

    async def ask_file_on(self, client: shapestream.Client) -> None:
        """One after the other, every second of which may be withdrawn, until it is told to stop."""
        withdraw = False
        while not self.stopping.is_set():
            await self.ask_file(client, withdraw=withdraw)
            withdraw = not withdraw
            await trio.sleep(self._random.uniform(0.0, self._pause_s))

    async def withdraw(self, client: shapestream.Client, count: int) -> None:
        """Withdraws at least so many in several tasks; beside them one asks and waits."""

        async def go_on(*, withdraw: bool) -> None:
            while self._withdrawn < count:
                await self.ask_file(client, withdraw=withdraw)

        async with trio.open_nursery() as nursery:
            for number in range(WITHDRAWING + 1):
                nursery.start_soon(partial(go_on, withdraw=number > 0))

    async def stream(self, client: shapestream.Client) -> None:
        """The same as one ordered stream."""

        async def source() -> AsyncIterator[tuple[int, dict[str, Any]]]:
            while not self.stopping.is_set():
                yield self.submit()
                await trio.sleep(self._random.uniform(0.0, self._pause_s))

        options: dict[str, Any] = {"max_in_flight": STREAMED, "on_error": "yield"}
        async with client.stream(MODEL, source(), **options) as results:
            last = 0
            async for item in results:
                assert isinstance(item.key, int)
                assert item.key > last, "an ordered stream gave a later item before an earlier one"
                last = item.key
                if isinstance(item, shapestream.Failed):
                    self.ended(item.key, item.error.code)
                else:
                    self.ended(item.key, "ok", item["y"])

    async def obey_sigterm(self) -> None:
        """Asks for nothing new from then on."""
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                self.stopping.set()


def unsigned_zeros(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers with one zero: engines differ in the sign of a clipped one."""
    return y + np.float32(0)


def listen_in(number: int, witness: Witness) -> None:
    """From now on every terminal reply that a session of this process receives is told to the ledger, too."""

    class Overheard(Session):
        def receive(self, entries: Iterable[Entry], now: float) -> None:
            entries = list(entries)
            for entry in entries:
                if isinstance(entry, ResultEntry | Failure):
                    code = entry.code if isinstance(entry, Failure) else "ok"
                    witness.tell("reply", client=number, sequence=entry.sequence, code=code)
            super().receive(entries, now)

    core.Session = Overheard  # type: ignore[attr-defined] # where the core gets it from


async def main(address: str, number: int, seed: int, misdeed: str | None, withdraw: int | None) -> None:
    """Asks until SIGTERM; for a misdeed, only once; to withdraw, until so many are."""
    witness = Witness()
    listen_in(number, witness)
    load = Load(number, seed, witness)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.obey_sigterm)
        async with shapestream.connect(address, connect_timeout=PATIENCE_S, silence=2.5) as client:
            if misdeed is not None:
                await load.ask(client, misdeed)
            elif withdraw is not None:
                await load.withdraw(client, withdraw)
            else:
                async with trio.open_nursery() as asking:
                    for _ in range(TASKS):
                        asking.start_soon(load.ask_on, client)
                    for _ in range(CHAINED):
                        asking.start_soon(load.ask_on, client, CHAIN)
                    asking.start_soon(load.ask_file_on, client)
                    asking.start_soon(load.stream, client)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("number", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--misdeed", choices=list(DEEDS))
    parser.add_argument("--withdraw", type=int, metavar="N")
    given = parser.parse_args()
    trio.run(lambda: main(given.address, given.number, given.seed, given.misdeed, given.withdraw))
