"""What a worker is told of a batch's deadlines, when this process is stopped while it says so."""

from __future__ import annotations

from itertools import count
from typing import Any

from tests.pipeline.serving.batches import batch_of
from tests.pipeline.serving.harness import SIGNATURE, echo_tensors

from shapestream.serving.outgoing import Link
from shapestream.serving.remote_executor import Offer, RemoteExecutor
from shapestream.wire.messages import Clock, Entry, Execute


class Said:
    """What was said, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def say(self, _link: Link, entry: Entry) -> None:
        """As `Outgoing` would."""
        self.entries.append(entry)


def test_a_deadline_is_the_same_however_long_this_process_stands_still_between_two_looks_at_its_clock() -> (
    None
):
    """By the clock that the worker is shown, both members may start as long as was decided, and no longer."""
    looks, said = count(), Said()
    offer = Offer(name="w-1", pid=42, slots=1, models={"echo": SIGNATURE})
    outgoing: Any = said
    executor = RemoteExecutor(b"peer", offer, outgoing, 0.0, clock=lambda: 10.0 + 0.4 * next(looks))
    executor.start_nowait(
        batch_of(SIGNATURE, echo_tensors(), echo_tensors(), sizes=(2, 4), start_before=(10.5, None))
    )
    clock, execute = said.entries
    assert isinstance(clock, Clock)
    assert isinstance(execute, Execute)
    remaining_ms = [member.remaining_ms for member in execute.members]
    assert None is remaining_ms[1]
    assert 10_500_000 == clock.sent_us + 1000 * (remaining_ms[0] or 0)
