"""A client of an answer run that is written from docs/protocol.md alone: pyzmq and msgpack, no code of the product.

It sees what the product's client would hide: every terminal reply, so also a second one, and the reply to a withdrawn
request, which must still come and, if it is a result, must be right.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zmq
from tests.e2e.answers.arguments import (
    CONNECT_S,
    FIRST_GUESS_S,
    HURRIED,
    RAISED,
    STRAYING,
    WITHDRAWN,
    arguments,
)
from tests.e2e.answers.models import Question, Questions, models_of
from tests.e2e.answers.tally import Count, Tally

HEARTBEAT, CLOCK, HELLO, OPEN_MODEL, REQUEST, CANCEL, GOODBYE = 0, 2, 10, 11, 12, 13, 1
WELCOME, UNKNOWN, MODEL_OPENED, MODEL_REFUSED, RESULT, FAILURE, CREDIT = 20, 21, 22, 23, 24, 25, 26
INLINE_BYTES = 1024
IN_FLIGHT = (2, 64)
POLL_MS = 2
TYPES = {"f32": np.dtype("<f4"), "i64": np.dtype("<i8")}

Entry = list[Any]


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request that has no terminal reply."""

    question: Question
    at: float
    hurried: bool
    withdraw_at: float | None
    withdrawn: bool = False


class RawClient:
    """One session."""

    def __init__(
        self, engine: str, address: str, tally: Tally, seed: int, requests: int, patience_s: float
    ) -> None:
        self._tally = tally
        self._chance = random.Random(seed)
        self._questions = Questions(seed, models_of(engine))
        self._left = requests
        self._patience_s = patience_s
        self._withdrawn = self._chance.choice(WITHDRAWN)
        self._took_s = FIRST_GUESS_S
        self._sequence = 0
        self._numbers: dict[str, int] = {}
        self._outputs: dict[str, list[str]] = {}
        self._window = self._most = self._chance.choice(IN_FLIGHT)
        self._heartbeat_s = 1.0
        self._asked: dict[int, Asked] = {}
        self._ended: dict[int, Question] = {}
        self._out: list[tuple[Entry, list[bytes]]] = []
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 5000)
        self._socket.connect(address)
        self._heard = time.monotonic()

    # ---------------------------------------------------------------- the session

    def run(self) -> None:
        """Until the requests are spent and every reply is there, or nothing more is to be hoped for."""
        self._say([HELLO, 0, os.urandom(16), "answers"], self._clock())
        self._until_welcome()
        self._open_models()
        last_s = time.monotonic()
        while self._left > 0 or self._asked:
            self._ask_more()
            self._withdraw_what_is_due()
            now = time.monotonic()
            if now - last_s > self._heartbeat_s / 2:
                self._say([HEARTBEAT, 0])
                last_s = now
            self._flush()
            for entry, frames in self._received():
                self._take(entry, frames)
            self._give_up()
        self._say([GOODBYE, 0])
        self._flush()
        self._socket.close()

    def _until_welcome(self) -> None:
        self._flush()
        for entry, _ in self._awaited(WELCOME):
            self._window = min(self._most, entry[3])
            self._heartbeat_s = entry[5] / 1000

    def _open_models(self) -> None:
        names = {model.name for model in self._questions.models}
        self._say(*([OPEN_MODEL, 0, name] for name in names))
        self._flush()
        while self._numbers.keys() != names:
            for entry, _ in self._awaited(MODEL_OPENED):
                self._numbers[entry[2]] = entry[3]
                self._outputs[entry[2]] = [output["name"] for output in entry[4]["outputs"]]

    def _awaited(self, kind: int) -> Iterator[tuple[Entry, list[memoryview]]]:
        """The entries of this kind in one message that has some."""
        give_up_at = time.monotonic() + CONNECT_S
        while time.monotonic() < give_up_at:
            found = [(entry, frames) for entry, frames in self._received() if entry[0] == kind]
            if found:
                yield from found
                return
        raise SystemExit(f"no entry of kind {kind} within {CONNECT_S:g} s")

    def _clock(self) -> Entry:
        return [CLOCK, 0, time.monotonic_ns() // 1000]

    def _say(self, *entries: Entry) -> None:
        self._out += [(entry, []) for entry in entries]

    def _flush(self) -> None:
        """All that is ready, in messages of 200 entries, of which a request has one raw frame at most."""
        while self._out:
            some, self._out = self._out[:200], self._out[200:]
            header = msgpack.packb([1, [entry for entry, _ in some]])
            self._socket.send_multipart([header, *(frame for _, frames in some for frame in frames)])

    def _received(self) -> Iterator[tuple[Entry, list[memoryview]]]:
        """Every entry that has arrived, with its raw frames; waits a little for the first."""
        wait_ms = POLL_MS
        while self._socket.poll(wait_ms):
            wait_ms = 0
            header, *rest = self._socket.recv_multipart(copy=False)
            version, entries = msgpack.unpackb(header.bytes)
            assert version == 1
            for entry in entries:
                yield entry, [frame.buffer for frame in rest[: entry[1]]]
                rest = rest[entry[1] :]
            assert not rest, "raw frames that belong to no entry"

    # ---------------------------------------------------------------- requests

    def _ask_more(self) -> None:
        told_time = False
        while self._left > 0 and len(self._asked) < self._window:
            self._left -= 1
            self._sequence += 1
            self._tally.add(Count.ASKED)
            question = self._questions.draw(self._chance)
            soon_s = self._chance.uniform(0.0, STRAYING * self._took_s)
            hurried = self._chance.random() < HURRIED
            withdrawn = self._chance.random() < self._withdrawn
            now = time.monotonic()
            self._asked[self._sequence] = Asked(
                question=question, at=now, hurried=hurried, withdraw_at=now + soon_s if withdrawn else None
            )
            if hurried and not told_time:
                self._say(self._clock())
                told_time = True
            layout = msgpack.packb([[0, "f32", list(question.x.shape)]])
            data = question.x.astype("<f4").tobytes()
            inline = len(data) <= INLINE_BYTES
            entry = [
                REQUEST,
                0 if inline else 1,
                self._sequence,
                self._numbers[question.model.name],
                int(self._chance.uniform(0.0, STRAYING * self._took_s) * 1000) if hurried else None,
                0,
                layout,
                [data if inline else None],
            ]
            self._out.append((entry, [] if inline else [data]))

    def _withdraw_what_is_due(self) -> None:
        now = time.monotonic()
        for sequence, asked in self._asked.items():
            if asked.withdraw_at is not None and asked.withdraw_at <= now and not asked.withdrawn:
                asked.withdrawn = True
                self._took_s *= RAISED
                self._say([CANCEL, 0, sequence])

    def _give_up(self) -> None:
        """What has no end after so long, counts as lost."""
        now = time.monotonic()
        for sequence, asked in list(self._asked.items()):
            if now - asked.at > self._patience_s:
                del self._asked[sequence]
                words = f"no terminal reply within {self._patience_s:g} s (withdrawn: {asked.withdrawn})"
                self._tally.note(Count.LOST, asked.question, words)

    def _take(self, entry: Entry, frames: list[memoryview]) -> None:
        if entry[0] in (RESULT, FAILURE):
            self._end(entry, frames)
        elif entry[0] == CREDIT:
            self._window = min(self._most, entry[2])
            self._say(entry, self._clock())
        elif entry[0] in (UNKNOWN, GOODBYE, MODEL_REFUSED):
            raise SystemExit(f"the server said {entry}")

    def _end(self, entry: Entry, frames: list[memoryview]) -> None:
        sequence = entry[2]
        asked = self._asked.pop(sequence, None)
        if asked is None:
            if sequence in self._ended:
                self._tally.note(Count.DUPLICATED, self._ended[sequence], "a second terminal reply")
            return  # given up before: it is late, and was counted
        self._ended[sequence] = asked.question
        if entry[0] == FAILURE:
            self._tally.failed(
                asked.question, entry[3], entry[4], hurried=asked.hurried, withdrawn=asked.withdrawn
            )
            return
        self._took_s += 0.1 * (time.monotonic() - asked.at - self._took_s)
        names = self._outputs[asked.question.model.name]
        self._tally.answered(asked.question, dict(self._tensors(names, entry, frames)))

    def _tensors(
        self, names: list[str], entry: Entry, frames: list[memoryview]
    ) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        raw = iter(frames)
        for (port, element_type, shape), inline in zip(msgpack.unpackb(entry[4]), entry[5], strict=True):
            data = next(raw) if inline is None else inline
            yield names[port], np.frombuffer(data, TYPES[element_type]).reshape(shape)


if __name__ == "__main__":
    given = arguments().parse_args()
    tally = Tally(given.tally)
    RawClient(given.engine, given.address, tally, given.seed, given.requests, given.patience_s).run()
