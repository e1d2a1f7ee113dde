"""Stories of requests: arrival, queue, company, padding, attempts and times, to answer why one was slow. Pure.

The recorder keeps one tuple per batch that ran, and one per request that failed: numbers and ids, never tensors. A story
is put together when it is asked for, from these tuples and the scheduler's troubles (scheduling/scheduler_statistics.py).
The slowest requests are kept apart, since the rings move on.

A story divides the request's time into phases (`Phase`). Each begins where the one before it ends, the first one at the
arrival, and the last one ends with the request: their milliseconds sum to the whole. What ran meanwhile on the slots of its
model (`Behind`) is divided by model, and into work of its own client and of others.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from heapq import heappush, heapreplace
from itertools import chain, islice, takewhile
from math import inf, nan
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import CutReason
from shapestream.scheduling.scheduler_statistics import Told
from shapestream.serving.ends import (
    BatchEnded,
    End,
    Member,
    RequestEnded,
    RequestRefused,
    Run,
    clients_of,
    row_of,
    run_of,
)
from shapestream.serving.kept_replies import ClientId
from shapestream.serving.sessions import RequestRecord
from shapestream.slices import Slices
from shapestream.wire.tags import REQUEST_ID
from shapestream_engine.batch import ErrorCode

MOST_ANSWERED = 16_384
"""Answered requests that are remembered, at most; 0.8 KB each where each runs alone, 0.2 KB in batches of 64."""
MOST_FAILED = 4_096
"""Failed requests that are remembered, at most; 0.5 KB each, and 0.6 KB more where each was in a batch of its own."""
MOST_FAILED_RUNS = 256
"""Batches that failed, were lost, or ran for nobody, at most."""
SLOWEST = 32
"""Batches that are kept of each minute for their slowest member, at most."""
MINUTES = 10
"""Minutes that these are kept for."""
COMPANY = 16
"""Other members of a batch that a story names, at most; and models and slots that it waited behind."""
MOST_STORIES = 16
"""Requests of one id that are told of, at most: the newest."""
MOST_SLOWEST = 32
"""Stories of the slowest that one answer tells, at most: a message holds so many, also with long errors."""
ROWS_PER_SLICE = 2048
"""Answered requests that are compared with an id in one turn of the event loop: half a millisecond."""
MOST_BEHIND = 512
"""Batches that ended during a wait and are looked at, at most: the last ones. Each takes the event loop a microsecond."""
ERRORS_PER_CODE = 10
"""Errors that are kept of each code for the page, so that a flood of one code leaves the others in sight."""
MOST_MESSAGE = 200
"""Characters of such an error's message."""
_ID = re.compile(r"([0-9a-f]{32})-(\d{1,19})")


class RecentError(NamedTuple):
    """One request that ended without a result, as the page shows it."""

    time: float
    model: str | None
    """None for a request that was refused before its model was looked up."""
    code: str
    message: str
    request_id: str


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
    """On the way to the slot and back, the event loops' turns included."""
    FAILED = "failed"
    """In an attempt that failed or was lost, up to the server's hearing of it."""
    RUNNING = "running"
    """In an attempt that still ran when the request ended, or that runs now."""


class Phase(NamedTuple):
    """A part of a request's time, in seconds of the server's clock."""

    kind: PhaseKind
    begins: float
    ends: float
    run: Run | None
    """The attempt that it belongs to; None in the queue."""


class Behind(NamedTuple):
    """The work that ran on the slots of a request's model while it waited."""

    slots: tuple[str, ...]
    models: Mapping[str, tuple[int, float, float]]
    """Batches, and seconds of the slots, for the request's own client and for others. A batch is divided by its members."""
    complete: bool
    """False where some of the batches are not remembered, or were too many."""


class Past(NamedTuple):
    """Everything that is known of one request."""

    member: Member
    model: str
    ended: float
    """`inf` while it has not."""
    code: str | None
    message: str
    ahead: int | None
    """Requests of its model that were queued when it arrived; None where that is not known."""
    runs: tuple[Run, ...] = ()
    """The last is the one that answered it, if any did."""
    troubles: Sequence[tuple[float, str]] = ()
    behind: Behind | None = None
    """None where nobody has looked yet."""


class Stories:
    """The recorder: what ran and what failed lately, and the slowest of the last minutes."""

    def __init__(
        self,
        troubles: Callable[[int], Told],
        batches: Callable[[], Mapping[int, Batch]],
        slots_of: Callable[[str], Collection[str]],
    ) -> None:
        """`troubles` returns the troubles that the scheduler remembers of a request.

        `batches` returns the batches that run, by number; `slots_of` the labels of the slots that serve a model.
        """
        self._troubles = troubles
        self._batches = batches
        self._slots_of = slots_of
        self._runs: deque[Run] = deque()
        """The batches that ran, in the order of their ends."""
        self._held = 0
        """Members of all these; a batch that answered nobody counts as one."""
        self.ran = 0
        """Batches that ever ran."""
        self._forgotten = -inf
        """When the last one ended that is remembered no more."""
        self._errors: dict[str, deque[RecentError]] = {}
        """By code."""
        self._failed_runs: deque[Run] = deque(maxlen=MOST_FAILED_RUNS)
        self._failed: deque[tuple[Any, ...]] = deque(maxlen=MOST_FAILED)
        """The first fields of `Past`, each."""
        self._slow: deque[list[_Slow]] = deque(maxlen=MINUTES + 1)
        """By minute, a heap of the slowest."""
        self._minute_ends = -inf
        self._slow_from = -inf
        """Only a request that took longer can be one of the slowest."""

    # ------------------------------------------------------------ ends

    def ended(self, end: End) -> None:
        """Remember an end."""
        if isinstance(end, BatchEnded):
            if end.code is None:
                self._ran(end)
            elif end.code != ErrorCode.RECALLED:
                self._lost(end.run)
        elif isinstance(end, RequestRefused):
            request_id = Member(end.at, 0, end.session.client, end.sequence, (), None).id
            self._keep_error(None, request_id, end)
        elif end.action is not None:
            self._failed_request(end)
            self._keep_error(end.record.model, Member(*row_of(end.record)).id, end)

    def _keep_error(self, model: str | None, request_id: str, end: RequestEnded | RequestRefused) -> None:
        """Keep an error that a client was told, for the page; the oldest one of its code goes."""
        error = RecentError(end.at, model, end.code, end.message[:MOST_MESSAGE], request_id)
        self._errors.setdefault(end.code, deque(maxlen=ERRORS_PER_CODE)).append(error)

    def _ran(self, end: BatchEnded) -> None:
        """Remember a batch that ran, and the members that it answered."""
        run, now = end.run, end.at
        if end.in_vain:
            why, clients = "its results were not needed", clients_of(end.batch)
            self._lost(run._replace(code=str(ErrorCode.CANCELLED), why=why, clients=clients, members=()))
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
            if now - oldest[0] > self._slow_from or now >= self._minute_ends:
                self._keep_slow(self._answered_by(run, Member(*oldest)), now)

    def _lost(self, run: Run) -> None:
        """Remember a batch that began, and failed, was lost or ran for nobody."""
        if run.began < inf:
            self._failed_runs.append(run)

    def _failed_request(self, end: RequestEnded) -> None:
        """Remember a request that ends without a result."""
        record, action, now = end.record, end.action, end.at
        runs: tuple[Run, ...] = ()
        if (last := end.run) is not None:
            # Its batch may have failed, or been lost, in the event before this end.
            newest = takewhile(lambda run: run.ended >= now, reversed(self._failed_runs))
            runs = (next((run for run in newest if run.batch == last.batch), last),)
        ahead = None if action is None else action.ahead
        row = (row_of(record), record.model, now, end.code, end.message, ahead, runs)
        self._failed.append(row)
        if now - record.arrived > self._slow_from or now >= self._minute_ends:
            self._keep_slow(self._failed_as(row), now)

    def _keep_slow(self, past: Past, now: float) -> None:
        if now >= self._minute_ends:
            self._slow.append([])
            self._minute_ends = now + 60.0
        runs = [run._replace(members=run.members[: COMPANY + 1]) for run in past.runs]
        entry = (now - past.member.arrived, past.member.number, past._replace(runs=tuple(runs)))
        heap = self._slow[-1]
        if len(heap) < SLOWEST:
            heappush(heap, entry)
        else:
            heapreplace(heap, entry)
        self._slow_from = heap[0][0] if len(heap) == SLOWEST else -inf

    # ------------------------------------------------------------ what is asked for

    def slowest(self, now: float, asker: ClientId | None = None) -> Iterator[Past]:
        """Yield the slowest requests of the last minutes that the asker may see, one of a batch, the slowest first.

        Each takes a slice of the event loop's time, of up to two milliseconds.
        """
        kept = [
            (entry, heap) for heap in self._slow for entry in heap if entry[2].ended > now - 60.0 * MINUTES
        ]
        shares: _Shares = {}
        for entry, heap in sorted(kept, key=lambda one: -one[0][0]):
            if may_see(asker, entry[2].member.client):
                yield self._looked_at(entry, heap, now, shares)

    def look(self, now: float) -> None:
        """Work out which batches the slowest request waited behind, unless that is known, before they are forgotten.

        It takes the event loop about a millisecond at most, and is to be done now and then. At the end of a request it would
        slow down each batch of a queue that grows.
        """
        news = [(entry, heap) for heap in self._slow for entry in heap if entry[2].behind is None]
        if news:
            self._looked_at(*max(news, key=lambda one: one[0][0]), now, {})

    def _looked_at(self, entry: _Slow, heap: list[_Slow], now: float, shares: _Shares) -> Past:
        past = entry[2]
        if past.behind is None:
            past = self._told(past, now, shares)
            # A slower one may have taken its place since the question was asked.
            place = next((place for place, kept in enumerate(heap) if kept is entry), None)
            if place is not None and (not past.runs or past.runs[-1].ended != inf):
                heap[place] = (*entry[:2], past)  # its key stays
        return past

    def of(
        self, text: str, records: Iterable[RequestRecord], now: float, asker: ClientId | None = None
    ) -> Slices[list[Past]]:
        """Return the newest requests with this id that the asker may see, the latest last; `records` are those without an
        end."""
        match = _ID.fullmatch(text)
        client, sequence = (bytes.fromhex(match[1]), int(match[2])) if match else (b"", -1)
        shares: _Shares = {}

        def asked(row: tuple[Any, ...]) -> bool:
            mine = (row[3] == sequence and row[2][0] == client) or row[5] == text
            return mine and may_see(asker, row[2])

        # Copies of what the next turns change; the newest first.
        runs = list(reversed(self._runs))
        failed = (row for row in reversed(self._failed) if asked(row[0]))
        open_ = [
            record
            for record in records
            if record.sequence == sequence
            or (record.tags is not None and record.tags.get(REQUEST_ID) == text)
        ]
        found: dict[int, Callable[[], Past]] = {}
        for heap in self._slow:
            for entry in heap:
                if asked(entry[2].member):
                    found[entry[1]] = partial(self._looked_at, entry, heap, now, shares)
        for row in islice(failed, MOST_STORIES):
            found.setdefault(row[0][1], partial(self._failed_as, row))
        mine = (record for record in reversed(open_) if asked(row_of(record)))
        for record in islice(mine, MOST_STORIES):
            found[record.id] = partial(_itself, self._open(record, Member(*row_of(record))))
        yield
        left, seen = MOST_STORIES, 0
        for run in runs:
            if seen >= ROWS_PER_SLICE:
                seen = 0
                yield
            # In one expression: an id that is not there takes a quarter of a microsecond per row.
            rows = [row for row in run.members if (row[3] == sequence or row[5] == text) and asked(row)]
            for row in rows[::-1][:left]:
                found.setdefault(row[1], partial(self._answered_by, run, Member(*row)))
            seen += 1 + len(run.members)
            left -= len(rows)
            if left <= 0:
                break
        pasts = []
        for number in sorted(found)[-MOST_STORIES:]:
            yield
            past = found[number]()
            pasts.append(past if past.behind is not None else self._told(past, now, shares))
        return pasts

    @property
    def errors(self) -> list[RecentError]:
        """The last errors of each code, newest first, for the page."""
        errors = [error for of_code in self._errors.values() for error in of_code]
        return sorted(errors, key=attrgetter("time"), reverse=True)

    def since(self, number: int, most: int) -> list[list[Any]]:
        """Return the batches that ran after the first `number` ones, oldest first, `most` of them, for the page.

        Of each: begin, end, slot, model, requests, rows, elements of the requests, elements computed, calls at new shapes,
        sizes. Times are the server's own clock, in seconds.
        """
        count = min(len(self._runs), most, max(0, self.ran - number))
        return [_for_page(run) for run in islice(self._runs, len(self._runs) - count, None)]

    def failed_runs(self, record: RequestRecord) -> list[Run]:
        """Return the runs of this request, which ends in this turn, that did not answer it, as far as remembered."""
        since = takewhile(lambda run: run.ended >= record.arrived, reversed(self._failed_runs))
        runs = [run for run in since if record.id in run.requests][::-1]
        if self._failed and self._failed[-1][0][1] == record.id:
            runs += [run for run in self._failed[-1][-1] if run.began < run.ended == inf]
        return runs

    def reach_s(self, now: float) -> float:
        """Return the seconds since the end of the first batch that is remembered."""
        return now - self._runs[0].ended if self._runs else 0.0

    def _failed_as(self, row: tuple[Any, ...]) -> Past:
        return self._whole(Past(Member(*row[0]), *row[1:]))

    def _answered_by(self, run: Run, member: Member) -> Past:
        return self._whole(Past(member, run.model, run.ended, None, "", None, (run,)))

    def _open(self, record: RequestRecord, member: Member) -> Past:
        own = [run_of(batch) for batch in self._batches().values() if member.number in batch.ids]
        return self._whole(Past(member, record.model, inf, None, "", None, tuple(own)))

    def _whole(self, past: Past) -> Past:
        """Return the same, with what is remembered elsewhere: runs that failed, the queue, troubles."""
        number, runs = past.member.number, past.runs
        troubles: Sequence[tuple[float, str]] = ()
        if past.code is not None or not runs or runs[-1].facts.reason in _AGAIN:
            known = {run.batch for run in runs}
            earlier = [run for run in self._failed_runs if number in run.clients and run.batch not in known]
            runs = (*earlier, *runs)
            troubles = self._troubles(number)
        ahead = past.ahead
        if ahead is None and runs and runs[0].facts.ahead:
            ahead = runs[0].facts.ahead[runs[0].requests.index(number)]
        return past._replace(ahead=ahead, runs=runs, troubles=troubles)

    def _told(self, past: Past, now: float, shares: _Shares) -> Past:
        """Return the same, with what became of a call that the request did not wait for, and with what it waited behind."""
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
        waits = [(at, until) for kind, at, until, _ in phases_of(past, now) if kind in _WAITS and until > at]
        slots = {*self._slots_of(past.model), *[run.slot for run in past.runs]}
        own = {run.batch for run in past.runs if run.began < inf}
        runs, complete = self._runs, True
        taken: dict[str, tuple[int, float, float]] = {}
        counted: set[int] = set()
        for since, until in waits:
            high = bisect_right(runs, until, key=_ENDED)
            low = max(bisect_right(runs, since, key=_ENDED), high - MOST_BEHIND)
            complete = complete and since >= (runs[low - 1].ended if low else self._forgotten)
            if len(self._failed_runs) == MOST_FAILED_RUNS:
                complete = complete and since >= self._failed_runs[0].ended
            others = [run for run in self._failed_runs if run.ended > since]
            others += [
                run_of(batch)
                for batch in self._batches().values()
                if batch.arrivals and batch.slot.peer.label in slots
            ]
            seen = chain(islice(runs, low, high), _first_on_each(slots, islice(runs, high, None)), others)
            free = dict.fromkeys(slots, since)
            for run in sorted(seen, key=_ENDED):
                slot = run.slot
                if slot not in free or run.batch in own:
                    continue
                # An end is known when it is heard of; the next batch on the slot has begun a little before.
                began = run.began if run.began > free[slot] else free[slot]
                ended = run.ended if run.ended < until else until
                if began >= ended:
                    continue
                free[slot] = ended
                asked = past.member.client, run.batch
                share = shares.get(asked)
                if share is None:
                    share = shares[asked] = _share(past.member.client, run)
                batches, own_s, others_s = taken.get(run.model, (0, 0.0, 0.0))
                taken[run.model] = (
                    batches + (run.batch not in counted),
                    own_s + (ended - began) * share,
                    others_s + (ended - began) * (1.0 - share),
                )
                counted.add(run.batch)
        return Behind(tuple(sorted(slots)), taken, complete)


_AGAIN = (CutReason.RERUN, CutReason.SUSPECT)
_ENDED = attrgetter("ended")
_WAITS = (PhaseKind.QUEUED, PhaseKind.BEHIND)
_Slow: TypeAlias = tuple[float, int, Past]
"""Seconds, the request's number, and its story."""
_Shares: TypeAlias = dict[tuple[ClientId, int], float]
"""A client's part of a batch, by its number: the stories of one answer have the same batches behind them."""


def phases_of(past: Past, now: float) -> list[Phase]:
    """Return the parts of a request's time, in their order: they leave nothing out and do not overlap."""
    arrived, ended = past.member.arrived, now if past.ended == inf else past.ended
    phases: list[Phase] = []

    def until(time: float, kind: PhaseKind, run: Run | None = None) -> None:
        begins = phases[-1].ends if phases else arrived
        ends = min(max(begins, time), ended)
        if _us(ends - arrived) > _us(begins - arrived) or kind in _ATTEMPTS:
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
            busy_s = min(run.busy_s, max(0.0, run.ended - run.began))
            calls_s = min(run.run_us * 1e-6, busy_s)
            until(run.began + calls_s, PhaseKind.CALLS, run)
            until(run.began + busy_s, PhaseKind.COPIES, run)
            until(run.ended, PhaseKind.WAY, run)
    until(ended, PhaseKind.QUEUED)
    return phases


_ATTEMPTS = (PhaseKind.CALLS, PhaseKind.FAILED, PhaseKind.RUNNING)
"""Kinds that an attempt has one of, of whatever length."""
_IN_VAIN = (None, ErrorCode.CANCELLED)
"""Codes of a run that went on, or was interrupted, after its request had ended."""


def _itself(past: Past) -> Past:
    return past


def _first_on_each(slots: Collection[str], runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the first of these runs on each of the slots: of those that ended after a wait, only it may have begun
    before."""
    awaited = set(slots)
    for run in runs:
        if not awaited:
            return
        if run.slot in awaited:
            awaited.discard(run.slot)
            yield run


def _share(client: ClientId, run: Run) -> float:
    """Return the part of a run's members that belong to this client, or to its key where clients prove keys."""
    clients = [row[2] for row in run.members] or run.clients.values()
    own = [one for one in clients if one == client or (one[1] is not None and one[1] == client[1])]
    return len(own) / len(clients)


def _for_page(run: Run) -> list[Any]:
    """Return the columns of a batch on the page."""
    began = run.sent if run.began == inf else run.began
    columns = began, run.ended, run.slot, run.model, run.ran, run.rows, run.useful
    return [*columns, run.computed, run.preparations, run.sizes]


# ---------------------------------------------------------------- words


def may_see(asker: ClientId | None, client: ClientId) -> bool:
    """Tell whether a client's stories may be told to another one; None: the admin port, or a key with the role admin.

    The key proves identity, not the client's id, which stands in each request's id. Without security nobody has a key.
    """
    return asker is None or asker[1] == client[1]


def nothing_of(text: str, reach_s: float) -> str:
    """Return the answer about a request of which nothing is remembered, or nothing that the asker may see."""
    return (
        f"nothing is known of request {text!r}, or another key sent it; stories are kept of the last {MOST_ANSWERED:,} "
        f"answered requests (at present {reach_s:.0f} s), of the last {MOST_FAILED:,} failed ones, and of the slowest in "
        f"each of the last {MINUTES} minutes"
    )


def story_of(past: Past, now: float, asker: ClientId | None) -> dict[str, Any]:
    """Return a request's story as plain data: numbers, `events` in ms since its arrival, and `why` it took so long."""
    member, runs = past.member, past.runs
    arrived, last = member.arrived, runs[-1] if runs else None
    phases = phases_of(past, now)
    open_end = past.ended == inf
    runs_now = open_end and bool(phases) and phases[-1].kind is PhaseKind.RUNNING
    story: dict[str, Any] = {
        "request_id": member.id,
        "model": past.model,
        "sizes": list(member.sizes),
        "state": past.code or ("running" if runs_now else "queued" if open_end else "answered"),
        "arrived_s_ago": round(now - arrived, 3),
        "queued_before": past.ahead,
        "total_ms": _ms((now if open_end else past.ended) - arrived),
        "phases": _plain_phases(phases, arrived),
        "waited_behind": None if past.behind is None else _plain_behind(past.behind),
        "slot": None if last is None else last.slot,
        "attempts": len([run for run in runs if run.began < inf]),
        "code": past.code,
    }
    if last is not None:
        facts = last.facts
        mates = [Member(*row) for row in last.members[: COMPANY + 1] if row[1] != member.number]
        story |= {
            "batch": last.batch,
            "batch_sizes": list(last.sizes),
            "batch_requests": len(last.requests),
            "with": [mate.id for mate in mates if may_see(asker, mate.client)],
            "cut": cut_reason(last),
            "padding_ratio": last.padding_ratio,
            "new_shape": facts.new_shape or last.preparations > 0,
            "predicted_ms": None if facts.predicted_s is None else _ms(facts.predicted_s),
        }
    story["events"] = [[_ms(time - arrived), text] for time, text in sorted(_events(past), key=itemgetter(0))]
    story["why"] = " ".join(_sentences(story, past, phases))
    return story


def _plain_phases(phases: Sequence[Phase], arrived: float) -> list[dict[str, Any]]:
    """Return the phases as plain data, rounded at their borders, so that they add up to the whole."""
    borders = [_us(phase.ends - arrived) for phase in phases]
    return [
        {
            "phase": phase.kind.value,
            "ms": (ends - begins) / 1000,
            "batch": None if phase.run is None else phase.run.batch,
            "slot": None if phase.run is None else phase.run.slot,
        }
        for phase, begins, ends in zip(phases, [0, *borders], borders, strict=False)
    ]


def _plain_behind(behind: Behind) -> dict[str, Any]:
    longest = sorted(behind.models.items(), key=lambda one: -(one[1][1] + one[1][2]))
    return {
        "slots": list(behind.slots[:COMPANY]),
        "batches": sum([batches for batches, _, _ in behind.models.values()]),
        "own_ms": _ms(sum([own_s for _, own_s, _ in behind.models.values()])),
        "others_ms": _ms(sum([others_s for _, _, others_s in behind.models.values()])),
        "models": {
            model: {"batches": batches, "own_ms": _ms(own_s), "others_ms": _ms(others_s)}
            for model, (batches, own_s, others_s) in longest[:COMPANY]
        },
        "complete": behind.complete,
    }


def cut_reason(run: Run) -> str:
    """Return the reason why a batch holds no more requests."""
    facts = run.facts
    if facts.reason in (CutReason.COST, CutReason.DIVIDED):
        if not facts.left:
            return "nothing else was queued"
        if run.sizes and run.sizes[0] >= facts.max_batch:
            return "the batch is full"
    return facts.reason.value


def _events(past: Past) -> Iterator[tuple[float, str]]:
    before = (
        "" if past.ahead is None else f"; queued before it for {past.model}: {_count(past.ahead, 'request')}"
    )
    yield past.member.arrived, f"arrived{before}"
    yield from past.troubles
    for run in past.runs:
        behind = "" if run.behind is None else f", queued behind batch {run.behind}"
        company = (
            f"batch {run.batch}: {_count(len(run.requests), 'request')} at {list(run.sizes)} for {run.slot}"
        )
        yield run.sent, f"{company}{behind}; {cut_reason(run)}"
        if run.sent < run.began < inf:
            yield run.began, f"batch {run.batch} began"
        if past.ended < run.ended < inf:
            yield run.ended, f"batch {run.batch} ended without it"
        elif run.ended < inf and run.code is not None:
            yield run.ended, f"batch {run.batch} failed: {run.code}"
        elif run.ended < inf and past.code is None:
            yield run.ended, f"answered; its calls took {_ms(run.run_us * 1e-6)} ms"
    if past.code is not None:
        yield past.ended, f"failed: {past.code}: {past.message}"


def _sentences(story: dict[str, Any], past: Past, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield sentences that say where the time went, the longest part first, and what else is worth knowing."""
    parts = [(ms, text) for ms, text in _parts(story, past, phases) if ms or not story["total_ms"]]
    parts.sort(key=itemgetter(0), reverse=True)
    yield f"Of {story['total_ms']:g} ms it " + "; it ".join([text for _, text in parts]) + "."
    if past.behind is not None and any(kind in _WAITS for kind, *_ in phases):
        yield _meanwhile(story["waited_behind"], len(past.behind.slots), past.model)
    if past.code is not None and phases and phases[-1].kind is PhaseKind.RUNNING:
        ended = past.runs[-1].ended
        if ended == inf:
            yield "Its call runs on without it."
        elif ended > past.ended:
            yield f"Its call ran on without it for {_ms(ended - past.ended):g} ms."
    if story.get("padding_ratio"):
        yield f"{story['padding_ratio']:.0%} of what its batch computed was padding."
    if story.get("new_shape"):
        yield f"The shape {story['batch_sizes']} was new."
    if past.code is not None:
        yield f"It ended without a result: {past.code}."
    elif story["state"] in ("queued", "running"):
        yield f"It is still {story['state']}."


def _parts(story: dict[str, Any], past: Past, phases: Sequence[Phase]) -> Iterator[tuple[float, str]]:
    """Yield the phases in words, with their milliseconds; like ones are one part."""
    plain = list(zip(phases, story["phases"], strict=True))

    def ms_of(*kinds: PhaseKind, among: Sequence[tuple[Phase, dict[str, Any]]] = plain) -> float:
        ms: float = sum([part["ms"] for phase, part in among if phase.kind in kinds])
        return round(ms, 3)

    begun = next((at for at, (phase, _) in enumerate(plain) if phase.kind in _ATTEMPTS), len(plain))
    at_slot = [phase.run.behind for phase in phases if phase.run and phase.kind is PhaseKind.BEHIND]
    behind = (
        f", {ms_of(PhaseKind.BEHIND):g} ms of it at the slot behind batch {at_slot[-1]}" if at_slot else ""
    )
    queue = "" if not past.ahead else f", behind {_count(past.ahead, 'queued request')}"
    first_ms = ms_of(*_WAITS, among=plain[:begun])
    company_ms = min(first_ms, _ms(past.runs[0].facts.company_s)) if past.runs else 0.0
    company = (
        f", {company_ms:g} ms of it while the slot was free and waited for company" if company_ms else ""
    )
    yield first_ms, f"waited {first_ms:g} ms for a slot{queue}{behind}{company}"
    again_ms = ms_of(*_WAITS, among=plain[begun:])
    yield again_ms, f"waited {again_ms:g} ms to run again"
    failed = [phase.run for phase in phases if phase.run and phase.kind is PhaseKind.FAILED]
    if failed:
        codes = ", ".join([f"batch {run.batch} on {run.slot}: {run.code}" for run in failed])
        attempts = "a failed attempt" if len(failed) == 1 else f"{len(failed)} failed attempts"
        yield ms_of(PhaseKind.FAILED), f"spent {ms_of(PhaseKind.FAILED):g} ms in {attempts} ({codes})"
    if phases and phases[-1].kind is PhaseKind.RUNNING:
        ran = "has run" if past.code is None else "ran"
        yield (
            ms_of(PhaseKind.RUNNING),
            f"{ran} {ms_of(PhaseKind.RUNNING):g} ms in batch {story['batch']} on {story['slot']}",
        )
    if any(phase.kind is PhaseKind.CALLS for phase in phases):
        held_ms = ms_of(PhaseKind.CALLS, PhaseKind.COPIES)
        predicted = "" if story["predicted_ms"] is None else f", predicted {story['predicted_ms']:g} ms"
        company = f"in a batch of {story['batch_requests']} on {story['slot']}"
        yield held_ms, f"ran {held_ms:g} ms {company} (calls {ms_of(PhaseKind.CALLS):g} ms{predicted})"
        yield ms_of(PhaseKind.WAY), f"spent {ms_of(PhaseKind.WAY):g} ms on the way to the slot and back"


def _meanwhile(behind: dict[str, Any], slots: int, model: str) -> str:
    """Return a sentence about what ran on the slots of a request's model while it waited."""
    if not slots:
        return f"No slot served {model}."
    where = behind["slots"][0] if slots == 1 else f"its {slots} slots"
    if not behind["batches"]:
        return f"Meanwhile no batch that is remembered ran on {where}."
    whose = [(behind["others_ms"], "other clients"), (behind["own_ms"], "its own client")]
    shares = ", ".join([f"{ms:g} ms for {client}" for ms, client in whose if ms])
    models = [
        f"{part['own_ms'] + part['others_ms']:g} ms for {name}" for name, part in behind["models"].items()
    ]
    which = f"all for {next(iter(behind['models']))}" if len(models) == 1 else ", ".join(models)
    least = "" if behind["complete"] else "at least "
    return f"Meanwhile {where} ran {least}{_count(behind['batches'], 'batch', 'batches')}: {shares}; {which}."


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _ms(seconds: float) -> float:
    return _us(seconds) / 1000


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
