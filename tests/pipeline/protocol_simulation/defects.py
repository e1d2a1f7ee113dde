"""Defects to be patched into the product: each breaks one promise, and the simulation must see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.entries import CancelBatchEntry, Entry, Execute, ResultEntry
from tests.pipeline.protocol_simulation.plan import Ask, Fault, FaultKind, Kind, Plan

from shapestream.client.tickets import InFlight
from shapestream.scheduling.actions import Action
from shapestream.scheduling.recovery import Recovery
from shapestream.serving import slot_threads
from shapestream.serving.ends import Egress
from shapestream.serving.port_traffic import Outgoing, PeerLink
from shapestream_workers.worker_session import WorkerSession

PLAN = Plan(
    delay_s=0.001,
    call_s=0.3,
    asks=(
        Ask(at_s=1.0, rows=2, length=3, times=4),
        Ask(at_s=1.1, times=3),
        Ask(at_s=2.0, kind=Kind.POISON),
        Ask(at_s=2.0, length=2, times=2),
        Ask(at_s=6.0, times=3),
        Ask(at_s=9.0, timeout_s=0.2, times=2),
    ),
    faults=(
        Fault(at_s=6.2, kind=FaultKind.CUT_CLIENT, lasting_s=0.5),
        Fault(at_s=9.0, kind=FaultKind.HOLD_WORKER, lasting_s=0.5),
    ),
)
"""Batches, poison in company, a connection that breaks while a batch runs, a batch on its way beyond its deadline."""

Defect = Callable[[pytest.MonkeyPatch], None]


def drops_a_reply(patch: pytest.MonkeyPatch) -> None:
    """The server never sends the result of each client's fifth request."""
    say = Outgoing.say

    def forgetful(self: Outgoing, link: PeerLink, entry: Entry) -> None:
        if not (isinstance(entry, ResultEntry) and entry.sequence == 5):
            say(self, link, entry)

    patch.setattr(Outgoing, "say", forgetful)


def swaps_answers(patch: pytest.MonkeyPatch) -> None:
    """The members of a batch get their answers in the wrong order."""
    deliver = Egress.deliver

    def mixed(self: Egress, records: Any, outputs: Iterable[Any], *rest: Any) -> None:
        deliver(self, records, list(outputs)[::-1], *rest)

    patch.setattr(Egress, "deliver", mixed)


def hands_back_twice(patch: pytest.MonkeyPatch) -> None:
    """The client's `InFlight` finishes each ticket two times."""
    finish = InFlight.finish

    def twice(self: InFlight, *arguments: Any) -> None:
        finish(self, *arguments)
        finish(self, *arguments)

    patch.setattr(InFlight, "finish", twice)


def starts_late(patch: pytest.MonkeyPatch) -> None:
    """The worker takes deadlines to be a second later, and does not hear that nobody waits any more."""
    clock_ahead_s, handle = slot_threads.clock_ahead_s, WorkerSession.handle_entry

    def patient(execute: Execute, **times: Any) -> float:
        return clock_ahead_s(execute, **times) + 1.0

    def deaf(self: WorkerSession, entry: Entry, now: float) -> None:
        if not isinstance(entry, CancelBatchEntry):
            handle(self, entry, now)

    patch.setattr(slot_threads, "clock_ahead_s", patient)
    patch.setattr(WorkerSession, "handle_entry", deaf)


def runs_twice(patch: pytest.MonkeyPatch) -> None:
    """The server sends each batch two times."""
    say = Outgoing.say

    def eager(self: Outgoing, link: PeerLink, entry: Entry) -> None:
        say(self, link, entry)
        if isinstance(entry, Execute):
            say(self, link, entry)

    patch.setattr(Outgoing, "say", eager)


def blames_the_innocent(patch: pytest.MonkeyPatch) -> None:
    """All that ran in a process that died is taken to be poison at once."""

    def hasty(self: Recovery, batch: Any, reason: str, now: float, actions: list[Action]) -> None:
        for request in list(batch.members):
            actions.append(self.ledger.fail(request, "poisoned", reason, now))
        batch.release_members()

    patch.setattr(Recovery, "died", hasty)


DEFECTS: dict[str, Defect] = {
    "never ended": drops_a_reply,
    "got another's answer": swaps_answers,
    "ended more than once": hands_back_twice,
    "after its deadline": starts_late,
    "ran again at server": runs_twice,
    "is innocent, and was called poisoned": blames_the_innocent,
}
"""By the words of the accusation that each must lead to."""
