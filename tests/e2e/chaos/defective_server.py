"""A server with one defect: `python -m tests.e2e.chaos.defective_server DEFECT CONFIG`. For the mutation check.

A check that never failed may be one that cannot fail: each defect is one that a run with it must report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from shapestream.serving.batches import Batch
from shapestream.serving.executors import RemoteExecutor
from shapestream.serving.links import Link, Outgoing
from shapestream.wire.messages import Entry, Result
from shapestream_workers import cli

EVERY = 20
HELD_BACK_S = 1.2
"""Longer than some deadlines and the ledger's slack, shorter than anybody's patience with the server."""


def drop_a_reply() -> None:
    """Every twentieth result is never sent."""
    say, turns = Outgoing.say, count(1)

    def say_most(self: Outgoing, link: Link, entry: Entry) -> None:
        if type(entry) is not Result or next(turns) % EVERY:
            say(self, link, entry)

    Outgoing.say = say_most  # type: ignore[method-assign]


def send_one_twice() -> None:
    """Every twentieth result is sent twice."""
    say, turns = Outgoing.say, count(1)

    def say_again(self: Outgoing, link: Link, entry: Entry) -> None:
        say(self, link, entry)
        if type(entry) is Result and next(turns) % EVERY == 0:
            say(self, link, entry)

    Outgoing.say = say_again  # type: ignore[method-assign]


def swap_two_rows() -> None:
    """Now and then the outputs of two requests of equal shapes change places."""
    say, turns = Outgoing.say, count(1)
    held: list[tuple[Link, Result]] = []

    def say_swapped(self: Outgoing, link: Link, entry: Entry) -> None:
        if type(entry) is Result and held and held[0][1].tensors.layout == entry.tensors.layout:
            other_link, other = held.pop()
            say(self, other_link, replace(other, tensors=entry.tensors))
            entry = replace(entry, tensors=other.tensors)
        elif type(entry) is Result and not held and next(turns) % EVERY == 0:
            held.append((link, entry))
            return
        say(self, link, entry)

    Outgoing.say = say_swapped  # type: ignore[method-assign]


def start_one_late() -> None:
    """Every twentieth batch that has a deadline is held back, and its deadline is kept from the worker."""
    start, turns = RemoteExecutor.start_nowait, count(1)

    def start_late(self: RemoteExecutor, batch: Batch) -> None:
        if batch.start_within_s is not None and next(turns) % EVERY == 0:
            time.sleep(HELD_BACK_S)
            batch = replace(batch, start_within_s=None)
        start(self, batch)

    RemoteExecutor.start_nowait = start_late  # type: ignore[method-assign]


DEFECTS: dict[str, tuple[Callable[[], None], str]] = {
    "drop-a-reply": (drop_a_reply, "without_an_end"),
    "send-one-twice": (send_one_twice, "two_ends"),
    "swap-two-rows": (swap_two_rows, "wrong_answers"),
    "start-one-late": (start_one_late, "started_late"),
}
"""By name: how it comes about, and which zero it must turn into a number."""


if __name__ == "__main__":
    DEFECTS[sys.argv[1]][0]()
    sys.argv = ["shapestream", "serve", sys.argv[2]]
    cli.main()
