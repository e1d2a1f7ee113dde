"""What becomes of a batch that did not run: who is run again, with whom, and who is to blame.

A batch that the *data* broke is run again in two halves, each exactly as given, until the culprit is alone;
its batch-mates get their answers. A batch that was lost with its *slot* says nothing about its members: each is run again
alone in its call, and only so often, the last time where nothing else runs: a culprit who makes workers silent must not take
the same neighbours along every time. A batch whose *process* died, or that hung, has suspects for members: each is run
again where nothing else runs, and one that brings that worker down, too, is `poisoned`.
"""

from __future__ import annotations

from shapestream.scheduling.actions import Action
from shapestream.scheduling.events import BatchFailed
from shapestream.scheduling.isolation import Isolation
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import RUNNING, Batch, Request
from shapestream_engine.batch import ErrorCode


class Recovery:
    """Runs again what may be run again. `waiting` is told of the models to look at."""

    __slots__ = ("isolation", "ledger", "max_attempts", "waiting")

    def __init__(
        self, ledger: Ledger, waiting: dict[str, ModelQueue], max_attempts: int, isolation: Isolation
    ) -> None:
        if max_attempts < 1:
            raise ValueError("a request must be attempted at least once")
        self.ledger = ledger
        self.waiting = waiting
        self.max_attempts = max_attempts
        self.isolation = isolation

    def failed(self, batch: Batch, event: BatchFailed, now: float, actions: list[Action]) -> None:
        """A batch is over and its slot reported an error."""
        if event.code == ErrorCode.RECALLED:
            self.returned(batch, "it was taken back", now)
            return
        if batch.hang:
            self.died(batch, f"it hung, and was stopped: {event.code}: {event.message}", now, actions)
            return
        if event.code in (ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED):  # the slot or its device is to blame
            self.lost(batch, f"{event.code}: {event.message}", now, actions)
            return
        self.ledger.story.note(now, batch.ids, "batch {} failed: {}: {}", batch.id, event.code, event.message)
        if len(batch.ids) > 1:
            _ran_in_vain(batch)
        living = _living(batch)
        if len(batch.ids) == 1:
            for request in living:
                actions.append(self.ledger.fail(request, event.code, event.message, now))
                self._blame(request, killed=False)
            return
        # Members that have ended meanwhile may be the culprits, so even one that is left gets its try.
        middle = (len(living) + 1) // 2
        for half in (living[:middle], living[middle:]):
            if half:
                self._run_again(half)

    def lost(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch is over because its slot, or the device, is gone."""
        self.ledger.story.note(now, batch.ids, "batch {} lost: {}", batch.id, reason)
        for request in self._may_run_again(batch, reason, now, actions):
            if batch.alone or request.losses == self.max_attempts - 1:
                self._suspect(request, accused=batch.accused)
            else:
                self._run_again([request])

    def died(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch is over because its process died while it ran, or because it hung: one of its members may be to blame."""
        self.ledger.story.note(now, batch.ids, "batch {} died: {}", batch.id, reason)
        if batch.accused:
            message = (
                f"what ran it died, or hung, and so did the next worker, where nothing else ran: {reason}"
            )
            for request in _living(batch):
                actions.append(self.ledger.fail(request, "poisoned", message, now))
                self._blame(request, killed=True)
            return
        _ran_in_vain(batch)
        for request in self._may_run_again(batch, reason, now, actions):
            self._suspect(request, accused=True)

    def may_have_begun(self, batch: Batch, reason: str, now: float) -> None:
        """A batch waited behind another in a process that died. It may have begun before that was heard of, and then be to
        blame; if it was not, its members lose no more than their company."""
        self.ledger.story.note(now, batch.ids, "batch {} may have begun: {}", batch.id, reason)
        for request in _living(batch):
            self._suspect(request, accused=True)

    def given_up(self, batch: Batch, now: float, actions: list[Action]) -> None:
        """A batch hangs, and its slot cannot be ended: its members are answered. The slot keeps what is left of it."""
        code, message = "worker_lost", "the call hangs, and nothing could end it"
        if batch.accused:
            code = "poisoned"
        for request in batch.members:
            if request.state is RUNNING:
                actions.append(self.ledger.fail(request, code, message, now))

    def _blame(self, request: Request, *, killed: bool) -> None:
        """What ran because of a request that was to blame is charged to its client, and its like runs apart for a while.

        `killed`: it ended processes. Others of its client still share calls: one death then accuses all of them at once.
        """
        request.queue.shares.charge(request.client, request.failed_s, len(self.ledger.clients))
        request.queue.apart.failed(request, singly=not killed)

    def _may_run_again(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> list[Request]:
        """Counts the loss of a batch. The members that get another try; the others fail."""
        again = []
        idempotent = batch.queue.profile.idempotent
        for request in _living(batch):
            request.losses += 1
            if not idempotent:
                message = f"it may have run, and may not be run twice: {reason}"
                actions.append(self.ledger.fail(request, "worker_lost", message, now))
            elif request.losses < self.max_attempts:
                again.append(request)
            else:
                message = f"lost {request.losses} times with the slot that ran it; the last time: {reason}"
                actions.append(self.ledger.fail(request, "worker_lost", message, now))
        return again

    def returned(self, batch: Batch, reason: str, now: float) -> None:
        """A batch that waited behind another has not started, so nothing was lost: it goes again as it is."""
        self.ledger.story.note(now, batch.ids, "batch {} did not start: {}", batch.id, reason)
        if living := _living(batch):
            self._run_again(living)

    def _suspect(self, request: Request, *, accused: bool) -> None:
        self.ledger.put_back([request])
        self.isolation.suspect(request, accused=accused)
        self.waiting[request.queue.profile.name] = request.queue

    def _run_again(self, group: list[Request]) -> None:
        self.ledger.put_back(group)
        queue = group[0].queue
        queue.put_rerun(group)
        self.waiting[queue.profile.name] = queue


def _ran_in_vain(batch: Batch) -> None:
    """Notes with each member what a batch took that failed, perhaps because of it."""
    share_s = sum([request.share_s for request in batch.members])
    for request in batch.members:
        request.failed_s += share_s


def _living(batch: Batch) -> list[Request]:
    living = [request for request in batch.members if request.state is RUNNING]
    batch.release_members()
    return living
