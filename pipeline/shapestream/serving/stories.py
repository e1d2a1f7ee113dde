"""Stories of requests explain why one was slow: arrival, queue, batch, padding, attempts and times. Pure.

The recorder keeps one record per batch that ran, and one per request that failed: numbers and ids, never tensors. A story
is made when somebody asks for it, from these records and the scheduler's troubles (scheduling/scheduler_statistics.py).
The slowest requests are kept apart, because old records are dropped.

A story divides the request's time into phases (`Phase`). Each begins where the one before it ends, the first one at the
arrival, and the last one ends with the request. So their milliseconds sum to the whole. The batches that ran meanwhile on
the slots of its model (`Behind`) are divided by model, and into work of its own client and of others.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from heapq import heappush, heapreplace
from itertools import chain, islice, takewhile
from math import inf, nan
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import CutReason
from shapestream.scheduling.ledger import Told
from shapestream.serving.chain_desk import ChainRequest, Part, part_of
from shapestream.serving.ends import (
    BatchEnded,
    ChainEnded,
    End,
    RequestEnded,
    RequestRefused,
    StageFailed,
    member_of,
    owners_of,
    run_of,
)
from shapestream.serving.sessions import RequestRecord
from shapestream.slices import Slices
from shapestream.telemetry.runs import ClientId, Owner, Run, RunMember
from shapestream.wire.tags import REQUEST_ID, TRACEPARENT
from shapestream_engine.batch import ErrorCode

MOST_ANSWERED = 16_384
"""Most answered requests that are remembered. Each takes 0.8 KB if it runs alone, 0.2 KB in batches of 64."""
MOST_ENDED = 8_192
"""Most requests that are remembered of those that failed, of chains and of their stages. A failed one takes 0.5 KB, and
0.6 KB more if it was alone in a batch; one of a chain 1.3 KB with three stages, and about 1 KB more for each stage of which
a request failed."""
MOST_FAILED_RUNS = 256
"""Most batches that are remembered of those that failed, were lost, or whose results were not needed. They stand apart from
those that ran, since they are looked through whenever a request fails."""
SLOWEST = 32
"""Batches of a minute that are kept, ranked by their slowest request."""
MINUTES = 10
"""Minutes that these are kept for."""
COMPANY = 16
"""Most other members of a batch that a story names, and most models and slots that it waited behind."""
MOST_STORIES = 16
"""Most requests of one id in an answer: the newest. Those of chains' stages come with their chain's."""
MOST_TOLD = 32
"""Most stories in an answer: they fit in a message, even with long errors."""
ROWS_PER_SLICE = 2048
"""Answered requests that are compared with an id in one turn of the event loop: half a millisecond."""
MOST_BEHIND = 512
"""Most batches that are counted of those that ended during a wait: the last ones. Each takes a microsecond."""
ERRORS_PER_CODE = 10
"""Errors that are kept of each code for the page, so that a flood of one code leaves the others in sight."""
MOST_MESSAGE = 200
"""Characters of such an error's message."""
_ID = re.compile(r"([0-9a-f]{32})-(\d{1,19})")


class PhaseKind(Enum):
    """The kinds of phases, in their order within an attempt. Of the last four one attempt has the first three, or one."""

    QUEUED = "queued"
    """In the server's queue."""
    BEHIND = "behind"
    """Sent to its slot, and queued there behind another batch."""
    CALLS = "calls"
    """In its batch's calls."""
    COPIES = "copies"
    """Its slot gathers inputs, and splits and copies results."""
    WAY = "way"
    """On the way to the slot and back: also the event loops' turns, and the wait for other reports of a bundle."""
    FAILED = "failed"
    """In an attempt that failed or was lost, until the server heard of it."""
    RUNNING = "running"
    """In an attempt that was still running when the request ended, or that runs now."""


WAITS = (PhaseKind.QUEUED, PhaseKind.BEHIND)
"""Kinds of phases in which a request waits."""
ATTEMPTS = (PhaseKind.CALLS, PhaseKind.FAILED, PhaseKind.RUNNING)
"""Kinds of phases of which each attempt has exactly one, of whatever length."""


class Phase(NamedTuple):
    """A part of a request's time, in seconds of the server's clock."""

    kind: PhaseKind
    begins: float
    ends: float
    run: Run | None
    """The attempt that it belongs to; None in the queue."""


class Behind(NamedTuple):
    """The batches that ran on the slots of a request's model while it waited."""

    slots: tuple[str, ...]
    models: Mapping[str, tuple[int, float, float]]
    """Batches, and seconds of the slots, for the request's own client and for others. A batch is divided by its members."""
    complete: bool
    """False if some of the batches were forgotten, or were too many."""


class StageFacts(NamedTuple):
    """One stage of a chain's request."""

    stage: str
    model: str
    began: float
    """`inf` if it did not begin; so is `ended`."""
    ended: float
    requests: int
    left: int
    """Requests that have not ended."""
    failed: int
    last: Part | None
    """The request that ended last, on the critical path. While it runs: the one of those left that was made last."""
    failure: Past | None
    """The last request of it that failed; None if none did, or if those that failed did not even begin to wait."""


class Past(NamedTuple):
    """The known facts of one request."""

    member: RunMember
    model: str
    """Empty for a request that was refused before its model was looked up."""
    ended: float
    """`inf` while it has not."""
    code: str | None
    message: str
    ahead: int | None
    """Requests of its model that were queued when it arrived; None where that is not known."""
    runs: tuple[Run, ...] = ()
    """The last run answered it, if any did."""
    troubles: Sequence[tuple[float, str]] = ()
    behind: Behind | None = None
    """None until it is computed."""
    stages: tuple[StageFacts, ...] = ()
    """The stages, if it is a chain's request; it has no runs of its own."""
    part: Part | None = None
    """Its place in a chain, if it is a stage's request that is told below its chain's."""


class _Question:
    """Which requests are asked about: those with an id, or of a trace, that the asker may see."""

    __slots__ = ("_asker", "_client", "_sequence", "_text")

    def __init__(self, text: str, asker: ClientId | None) -> None:
        """`text`: the server's id (client and number), a user's own, or that of a trace."""
        match = _ID.fullmatch(text)
        self._client, self._sequence = (bytes.fromhex(match[1]), int(match[2])) if match else (b"", -1)
        self._text = text
        self._asker = asker

    def asks_of(self, one: RunMember) -> bool:
        """Tell whether it asks about a member."""
        mine = (one.sequence == self._sequence and one.client[0] == self._client) or one.is_called(self._text)
        return mine and may_see(self._asker, one.client)

    def asks_of_record(self, record: RequestRecord) -> bool:
        """Tell whether it asks about a record. To make a `RunMember` of each would make a long turn."""
        tags = record.tags or {}
        may = (
            record.sequence == self._sequence
            or tags.get(REQUEST_ID) == self._text
            or self._text in tags.get(TRACEPARENT, "")
        )
        return may and self.asks_of(member_of(record))

    def members_of(self, run: Run) -> list[RunMember]:
        """Return the members of a run that it asks about."""
        # The comparisons in front keep `asks_of` from being called for each member.
        sequence, text = self._sequence, self._text
        return [
            one
            for one in run.members
            if (one.sequence == sequence or one.own_id == text or one.traceparent is not None)
            and self.asks_of(one)
        ]


class Stories:
    """The recorder of the latest batches and failed requests, and of the slowest requests of the last minutes."""

    __slots__ = (
        "_batches",
        "_chains",
        "_ended",
        "_errors",
        "_failed_runs",
        "_forgotten",
        "_held",
        "_minute_ends",
        "_runs",
        "_slots_of",
        "_slow",
        "_slow_from",
        "_troubles",
        "ran",
    )

    def __init__(
        self,
        troubles: Callable[[int], Told],
        batches: Callable[[], Mapping[int, Batch]],
        slots_of: Callable[[str], Collection[str]],
        chains: Mapping[int, ChainRequest],
    ) -> None:
        """`troubles`: returns the scheduler's troubles with a request. `batches`: returns the open batches by number.

        `slots_of`: returns the labels of the slots that serve a model. `chains`: requests of chains that have not ended.
        """
        self._troubles = troubles
        self._batches = batches
        self._slots_of = slots_of
        self._chains = chains
        self._runs: deque[Run] = deque()
        """The batches that ran, in the order of their ends."""
        self._held = 0
        """Members of all these; a batch that answered no request counts as one."""
        self.ran = 0
        """Batches that ever ran."""
        self._forgotten = -inf
        """End of the last batch that was dropped from `_runs`."""
        self._failed_runs: deque[Run] = deque(maxlen=MOST_FAILED_RUNS)
        self._ended: deque[Past] = deque(maxlen=MOST_ENDED)
        """Requests that ended without a result, also of chains' stages, and all that were of chains."""
        self._errors: dict[str, deque[Past]] = {}
        """By code, the last ones that clients were told of, also of requests that were never admitted."""
        self._slow: deque[list[tuple[float, int, Past]]] = deque(maxlen=MINUTES + 1)
        """By minute, a heap of the slowest: seconds, number, what is known. `behind` is added when it is first looked at:
        soon after, batches are forgotten."""
        self._minute_ends = -inf
        self._slow_from = -inf
        """Seconds: only a request that took longer can be one of the slowest."""

    # ------------------------------------------------------------ ends

    def ended(self, end: End) -> None:
        """Remember an end."""
        if isinstance(end, BatchEnded):
            if end.code is None:
                self._ran(end)
            elif end.code != ErrorCode.RECALLED:
                self._lost(end.run)
        elif isinstance(end, RequestRefused):
            member = RunMember(end.at, 0, end.session.client, end.sequence, (), None, None, None)
            self._keep_error(Past(member, "", end.at, end.code, end.message[:MOST_MESSAGE], None))
        elif isinstance(end, ChainEnded):
            self._chain_ended(end)
        elif end.action is not None:
            past = self.failed(end)
            self._ended.append(past)
            if isinstance(end, RequestEnded):
                self._keep_error(past)
                if end.record.served.chain is None:
                    self._keep_if_slow(past)

    def _keep_error(self, past: Past) -> None:
        """Keep a request whose client was told an error, for the page; the oldest one of its code goes."""
        self._errors.setdefault(past.code or "", deque(maxlen=ERRORS_PER_CODE)).append(past)

    def _ran(self, end: BatchEnded) -> None:
        """Remember a batch that ran, and the members that it answered."""
        run = end.run
        if end.batch.cancelled or end.batch.recalled:
            owners = owners_of(end.batch)
            self._lost(run._replace(code=str(ErrorCode.CANCELLED), owners=owners, members=()))
        runs, members = self._runs, run.members
        runs.append(run)
        self.ran += 1
        self._held += len(members) or 1
        while self._held > MOST_ANSWERED:
            gone = runs.popleft()
            self._held -= len(gone.members) or 1
            self._forgotten = gone.ended
        if members:
            oldest = min(members)
            if run.ended - oldest.arrived > self._slow_from or run.ended >= self._minute_ends:
                self._keep_if_slow(_answered_by(run, oldest))

    def _lost(self, run: Run) -> None:
        """Remember a batch that began and failed, was lost, or whose results were not needed."""
        if run.began < inf:
            self._failed_runs.append(run)

    def failed(self, end: RequestEnded | StageFailed) -> Past:
        """Return the known facts of a request that ends without a result in this turn, with its runs."""
        record, action = end.record, end.action
        message = end.message if isinstance(end, RequestEnded) else end.action.message
        return Past(
            member_of(record),
            record.served.name,
            end.at,
            end.code,
            message,
            None if action is None else action.ahead,
            tuple(self.attempts(record.id, record.arrived, end.run)),
            part=None if record.stage is None else part_of(record.stage, record.id),
        )

    def attempts(self, number: int, arrived: float, last: Run | None) -> list[Run]:
        """Return the runs of a request, as far as remembered: those that did not answer it, then `last`."""
        since = takewhile(lambda run: run.ended >= arrived, reversed(self._failed_runs))
        runs = [run for run in since if number in run.requests][::-1]
        if last is not None and all(run.batch != last.batch for run in runs):
            runs.append(last)
        return runs

    def _chain_ended(self, end: ChainEnded) -> None:
        """Remember a request of a chain with its stages. One without a result is remembered since its `RequestEnded`."""
        record = end.request.record
        stages = self._stages_of(end.request)
        if end.request.run.failure is None:
            past = Past(member_of(record), record.served.name, end.at, None, "", None, stages=stages)
        elif self._ended and self._ended[-1].member.number == record.id:
            past = self._ended.pop()._replace(stages=stages)
        else:
            return  # its client is gone
        self._ended.append(past)
        self._keep_if_slow(past)

    def _unended_chain(self, record: RequestRecord) -> Past:
        """Return what is known of a request of a chain that waits or runs."""
        request = self._chains.get(record.id)
        stages = () if request is None else self._stages_of(request)
        return Past(member_of(record), record.served.name, inf, None, "", None, stages=stages)

    def _stages_of(self, request: ChainRequest) -> tuple[StageFacts, ...]:
        """Return the facts of a chain's stages."""
        failures = self._failed_parts(request)
        last = request.critical | {
            part.stage.stage.name: part_of(part, number) for part, number in request.ids.items()
        }
        return tuple(
            StageFacts(
                each.stage.name,
                each.stage.model,
                each.began,
                each.ended,
                each.requests,
                each.left,
                each.failed,
                last.get(each.stage.name),
                failures.get(each.stage.name),
            )
            for each in request.run.stages
        )

    def _failed_parts(self, request: ChainRequest) -> dict[str, Past]:
        """Return the last failed request of each stage, as far as it is remembered."""
        record, found = request.record, {}
        missing = {each.stage.name for each in request.run.stages if each.failed}
        for past in reversed(self._ended):
            if not missing or past.ended < record.arrived:
                break
            member, part = past.member, past.part
            if part is None or part.stage not in missing:
                continue
            if (member.client, member.sequence) == (record.session.client, record.sequence):
                missing.discard(part.stage)
                found[part.stage] = self._whole(past)
        return found

    def _keep_if_slow(self, past: Past) -> None:
        """Keep a request that ends now if it is one of the slowest of its minute."""
        now, seconds = past.ended, past.ended - past.member.arrived
        if now >= self._minute_ends:
            self._slow.append([])
            self._minute_ends, self._slow_from = now + 60.0, -inf
        if seconds <= self._slow_from:
            return
        past = self._whole(past)
        if any(map(_is_crowded, past.runs)):
            past = past._replace(
                runs=tuple([run._replace(members=run.members[: COMPANY + 1]) for run in past.runs])
            )
        heap, slow = self._slow[-1], (seconds, past.member.number, past)
        if len(heap) < SLOWEST:
            heappush(heap, slow)
        else:
            heapreplace(heap, slow)
        if len(heap) == SLOWEST:
            self._slow_from = heap[0][0]

    # ------------------------------------------------------------ questions

    def slowest(self, now: float, asker: ClientId | None = None) -> Iterator[Past]:
        """Yield the slowest requests of the last minutes that the asker may see, one of each batch, the slowest first.

        Each takes a slice of the event loop's time, of up to two milliseconds.
        """
        kept = [slow for slow in chain(*self._slow) if slow[2].ended > now - 60.0 * MINUTES]
        shares: _Shares = {}
        for slow in sorted(kept, reverse=True):
            if may_see(asker, slow[2].member.client):
                yield self._looked_at(slow, now, shares)

    def look(self, now: float) -> None:
        """Compute what the slowest request waited behind, while its batches are still remembered.

        It takes the event loop about a millisecond. Call it once per heartbeat: at each end of a request it would slow down
        all batches of a growing queue.
        """
        news = [slow for slow in chain(*self._slow) if slow[2].behind is None]
        if news:
            self._looked_at(max(news), now, {})

    def _looked_at(self, slow: tuple[float, int, Past], now: float, shares: _Shares) -> Past:
        seconds, number, past = slow
        if past.behind is None:
            past = self._told(past, now, shares)
            if not past.runs or past.runs[-1].ended != inf:
                for heap in self._slow:
                    if slow in heap:
                        heap[heap.index(slow)] = (seconds, number, past)
        return past

    def of(
        self, text: str, records: Iterable[RequestRecord], now: float, asker: ClientId | None = None
    ) -> Slices[list[Past]]:
        """Find the newest requests with this id, or of this trace, that the asker may see, the latest last.

        After a chain's request come those of its stages that it waited for or that failed, in the order of its stages.
        `records` have no end yet.
        """
        question = _Question(text, asker)
        # Copies, since later turns change the originals; the newest first.
        runs = list(reversed(self._runs))
        unended = list(reversed(list(records)))
        found = self._ended_of(question) | self._chains_of(question, unended)
        chains = {(past.member.client, past.member.sequence) for past in found.values() if past.stages}
        trees = {number: _parts_of(past) for number, past in found.items()}
        parts = {number for tree in trees.values() for number in tree}

        def told(one: RunMember) -> bool:
            """Tell whether it is no stage's request of these chains, or one that is told."""
            return one.number in parts or (one.client, one.sequence) not in chains

        found = {number: past for number, past in found.items() if past.stages or told(past.member)}
        most = MOST_STORIES + len(parts)
        found |= self._running_of(question, unended, parts, most)
        yield
        seen = 0
        for run in runs:
            if seen >= ROWS_PER_SLICE:
                seen = 0
                yield
            own = [one for one in question.members_of(run) if told(one)]
            for member in own[::-1][:most]:
                found.setdefault(member.number, _answered_by(run, member))
            seen += 1 + len(run.members)
            most -= len(own)
            if most <= 0:
                break
        shares: _Shares = {}
        pasts: list[Past] = []
        for past in _in_order(found, trees, parts):
            yield
            pasts.append(past if past.behind is not None else self._told(self._whole(past), now, shares))
        return pasts

    def _ended_of(self, question: _Question) -> dict[int, Past]:
        """Return the slow requests of a question, and the newest that ended without an answer, by number."""
        ended = (
            past for past in reversed(self._ended) if past.part is None and question.asks_of(past.member)
        )
        found = {number: past for _, number, past in chain(*self._slow) if question.asks_of(past.member)}
        return found | {past.member.number: past for past in islice(ended, MOST_STORIES)}

    def _chains_of(self, question: _Question, unended: Sequence[RequestRecord]) -> dict[int, Past]:
        """Return the newest chains' requests of a question that have no end yet, by number."""
        running = (
            record
            for record in unended
            if record.served.chain is not None and question.asks_of_record(record)
        )
        return {record.id: self._unended_chain(record) for record in islice(running, MOST_STORIES)}

    def _running_of(
        self, question: _Question, unended: Sequence[RequestRecord], parts: Collection[int], most: int
    ) -> dict[int, Past]:
        """Return the newest requests of a question that have no end yet, by number; of stages' requests those in `parts`."""
        running = (
            record
            for record in unended
            if (record.parent is None or record.id in parts)
            and record.served.chain is None
            and question.asks_of_record(record)
        )
        return {
            record.id: Past(
                member_of(record),
                record.served.name,
                inf,
                None,
                "",
                None,
                tuple([run_of(batch) for batch in self._batches().values() if record.id in batch.ids]),
            )
            for record in islice(running, most)
        }

    @property
    def errors(self) -> list[list[Any]]:
        """Return the last errors of each code, newest first, for the page: time, model, code, message, request."""
        told = sorted(chain(*self._errors.values()), key=_ENDED, reverse=True)
        return [
            [past.ended, past.model or None, past.code, past.message[:MOST_MESSAGE], past.member.id]
            for past in told
        ]

    def since(self, number: int, most: int) -> list[list[Any]]:
        """Return the batches that ran after the first `number` ones, oldest first, at most `most`, for the page.

        Of each: begin, end, slot, model, requests, rows, elements of the requests, elements computed, calls at new shapes,
        sizes. Times are the server's own clock, in seconds.
        """
        count = min(len(self._runs), most, max(0, self.ran - number))
        return [_for_page(run) for run in islice(self._runs, len(self._runs) - count, None)]

    def reach_s(self, now: float) -> float:
        """Return the seconds since the end of the first batch that is remembered."""
        return now - self._runs[0].ended if self._runs else 0.0

    def _whole(self, past: Past) -> Past:
        """Return `past` with its failed runs, its place in the queue, and its troubles."""
        number, runs = past.member.number, past.runs
        troubles = past.troubles
        if past.code is not None or not runs or runs[-1].facts.reason in _AGAIN:
            if past.code is None:
                runs = tuple(self.attempts(number, past.member.arrived, runs[-1] if runs else None))
            troubles = troubles or self._troubles(number)
        ahead = past.ahead
        if ahead is None and runs and runs[0].facts.ahead:
            ahead = runs[0].facts.ahead[runs[0].requests.index(number)]
        if ahead == past.ahead and runs is past.runs and troubles is past.troubles:
            return past
        return past._replace(ahead=ahead, runs=runs, troubles=troubles)

    def _told(self, past: Past, now: float, shares: _Shares) -> Past:
        """Return `past` with the end of a call that went on without the request, and with what it waited behind."""
        if past.code is not None and past.runs and past.runs[-1].ended == inf:
            *earlier, last = past.runs
            past = past._replace(runs=(*earlier, last._replace(ended=self._end_of(last, past.ended))))
        return past._replace(behind=self._behind(past, now, shares))

    def _end_of(self, run: Run, after: float) -> float:
        """Return when a run ended that had not `after`; `inf` if it still runs, `nan` if that is forgotten."""
        batch = run.batch
        if batch in self._batches():
            return inf
        later = islice(self._runs, bisect_left(self._runs, after, key=_ENDED), None)
        ends = (ended.ended for ended in chain(reversed(self._failed_runs), later) if ended.batch == batch)
        return next(ends, nan)

    def _behind(self, past: Past, now: float, shares: _Shares) -> Behind:
        """Return what ran on the slots of the request's model while it waited."""
        slots = {*self._slots_of(past.model), *[run.slot for run in past.runs]}
        owner = past.member.owner
        own = {run.batch for run in past.runs if run.began < inf}
        complete = True
        models: dict[str, tuple[int, float, float]] = {}
        counted: set[int] = set()
        for kind, since, until, _ in phases_of(past, now):
            if kind not in WAITS or until <= since:
                continue
            runs, all_known = self._runs_during(since, until, slots)
            complete = complete and all_known
            free = dict.fromkeys(slots, since)
            for run in sorted(runs, key=_ENDED):
                if run.slot not in free or run.batch in own:
                    continue
                # An end is known when it is heard of; the next batch on the slot has begun a little before.
                began, ended = max(run.began, free[run.slot]), min(run.ended, until)
                if began >= ended:
                    continue
                free[run.slot] = ended
                if (owner, run.batch) not in shares:
                    shares[owner, run.batch] = _share(owner, run)
                own_s = (ended - began) * shares[owner, run.batch]
                batches, all_own_s, others_s = models.get(run.model, (0, 0.0, 0.0))
                models[run.model] = (
                    batches + (run.batch not in counted),
                    all_own_s + own_s,
                    others_s + (ended - began) - own_s,
                )
                counted.add(run.batch)
        return Behind(tuple(sorted(slots)), models, complete)

    def _runs_during(self, since: float, until: float, slots: Collection[str]) -> tuple[Iterable[Run], bool]:
        """Return the runs that may overlap a wait on these slots, and whether none of them was left out."""
        runs, failed = self._runs, self._failed_runs
        high = bisect_right(runs, until, key=_ENDED)
        low = max(bisect_right(runs, since, key=_ENDED), high - MOST_BEHIND)
        all_known = since >= (runs[low - 1].ended if low else self._forgotten)
        if len(failed) == MOST_FAILED_RUNS:
            all_known = all_known and since >= failed[0].ended
        open_now = [
            run_of(batch)
            for batch in self._batches().values()
            if batch.arrivals and batch.slot.peer.label in slots
        ]
        ended = chain(islice(runs, low, high), _first_on_each(slots, islice(runs, high, None)))
        return [*ended, *[run for run in failed if run.ended > since], *open_now], all_known


_AGAIN = (CutReason.RERUN, CutReason.SUSPECT)
_ENDED = attrgetter("ended")
_Shares: TypeAlias = dict[tuple[Owner, int], float]
"""A client's part of a batch, by client and batch: the stories of one answer share them."""


def _parts_of(past: Past) -> dict[int, Past | Part]:
    """Return the requests of a chain's stages that are told with it, by number: what is known of those that failed."""
    parts: dict[int, Past | Part] = {}
    for each in past.stages:
        if each.last is not None:
            parts[each.last.number] = each.last
        if each.failure is not None:
            parts[each.failure.member.number] = each.failure
    return parts


def _in_order(
    found: Mapping[int, Past], trees: Mapping[int, Mapping[int, Past | Part]], parts: Collection[int]
) -> list[Past]:
    """Return the newest requests, the latest last, each followed by its parts; at most `MOST_TOLD`."""
    groups, room = [], MOST_TOLD
    for number in sorted(number for number in found if number not in parts)[: -MOST_STORIES - 1 : -1]:
        group = [found[number]]
        for place, part in trees.get(number, {}).items():
            if isinstance(part, Past):
                group.append(part)
            elif place in found:
                group.append(found[place]._replace(part=part))
        groups.append(group[:room])
        room -= len(groups[-1])
    return [*chain(*reversed(groups))]


def _answered_by(run: Run, member: RunMember) -> Past:
    """Return what a run tells of a member that it answered."""
    ahead = run.facts.ahead
    own = ahead[run.requests.index(member.number)] if ahead else None
    return Past(member, run.model, run.ended, None, "", own, (run,))


def _is_crowded(run: Run) -> bool:
    """Tell whether a run answered more requests than are remembered with a slow one."""
    return len(run.members) > COMPANY + 1


def phases_of(past: Past, now: float) -> list[Phase]:
    """Return the parts of a request's time, in their order: they leave nothing out and do not overlap."""
    arrived, ended = past.member.arrived, now if past.ended == inf else past.ended
    phases: list[Phase] = []

    def until(time: float, kind: PhaseKind, run: Run | None = None) -> None:
        begins = phases[-1].ends if phases else arrived
        ends = min(max(begins, time), ended)
        if microseconds(ends - arrived) > microseconds(begins - arrived) or kind in ATTEMPTS:
            phases.append(Phase(kind, begins, ends, run))

    for run in past.runs:
        until(run.sent, PhaseKind.QUEUED)
        until(run.began, PhaseKind.BEHIND, run)
        if run.began == inf:
            continue
        if run.ended > ended or (past.code is not None and run is past.runs[-1] and run.code in _IN_VAIN):
            until(ended, PhaseKind.RUNNING, run)
        elif run.code is not None:
            until(run.ended, PhaseKind.FAILED, run)
        else:
            busy_s = min(run.busy_us * 1e-6, max(0.0, run.ended - run.began))
            calls_s = min(run.run_us * 1e-6, busy_s)
            until(run.began + calls_s, PhaseKind.CALLS, run)
            until(run.began + busy_s, PhaseKind.COPIES, run)
            until(run.ended, PhaseKind.WAY, run)
    until(ended, PhaseKind.QUEUED)
    return phases


_IN_VAIN = (None, ErrorCode.CANCELLED)
"""Codes of a run that went on, or was interrupted, after its request had ended."""


def may_see(asker: ClientId | None, client: ClientId) -> bool:
    """Tell whether a client's stories may be told to another. None: the admin port, or a key with the role admin.

    The key proves identity, not the client's id, which stands in each request's id. Without security nobody has a key.
    """
    return asker is None or asker[1] == client[1]


def _first_on_each(slots: Collection[str], runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the first of these runs on each slot: of those that ended after a wait, only it may have begun before."""
    awaited = set(slots)
    for run in runs:
        if not awaited:
            return
        if run.slot in awaited:
            awaited.discard(run.slot)
            yield run


def _share(owner: Owner, run: Run) -> float:
    """Return the part of a run's members that count for this owner: all of a key are one owner, named callers apart."""
    owners = [member.owner for member in run.members] or run.owners.values()
    own = _account(owner)
    return sum([_account(other) == own for other in owners]) / len(owners)


def _account(owner: Owner) -> object:
    """Return whose share the scheduler counts: a named caller's, a key's, or a session's."""
    if isinstance(owner, str):
        return (owner,)
    return owner if owner[1] is None else owner[1]


def _for_page(run: Run) -> list[Any]:
    """Return the columns of a batch on the page."""
    began = run.sent if run.began == inf else run.began
    columns = began, run.ended, run.slot, run.model, run.ran, run.rows, run.useful
    return [*columns, run.computed, run.preparations, run.sizes]


def microseconds(seconds: float) -> int:
    """Return a time in whole microseconds."""
    return round(seconds * 1e6)
