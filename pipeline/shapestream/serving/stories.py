"""Stories of requests: arrival, queue, company, padding, attempts and times, to answer why one was slow. Pure.

The journal adds one tuple per batch that ran, and one per request that failed: numbers and ids, never tensors. A story is
put together when it is asked for, from these tuples and from the scheduler's troubles (scheduling/statistics.py). The
slowest requests are kept apart, since the rings move on.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappush, heapreplace
from itertools import chain, takewhile
from math import inf, prod
from operator import itemgetter
from typing import Any, NamedTuple

from shapestream.scheduling.events import CutReason, FailRequest, StartBatch
from shapestream.scheduling.statistics import Told
from shapestream.serving.kept_replies import ClientId
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.workers import RunningBatch
from shapestream.wire.tags import REQUEST_ID

MOST_ANSWERED = 16_384
"""Answered requests that are remembered, at most; 0.8 KB each where each runs alone, 0.2 KB in batches of 64."""
MOST_FAILED = 4_096
"""Failed requests that are remembered, at most; 0.5 KB each."""
MOST_FAILED_RUNS = 256
"""Batches that failed or were lost, at most."""
SLOWEST = 32
"""Batches that are kept of each minute for their slowest member, at most."""
MINUTES = 10
"""Minutes that these are kept for."""
COMPANY = 16
"""Other members of a batch that a story names, at most."""
WORTH_TELLING = 0.1
"""Share of a request's time from which on a story tells of the way between server and slot."""
_ID = re.compile(r"([0-9a-f]{32})-(\d{1,19})")


class Member(NamedTuple):
    """One request of a batch."""

    arrived: float
    number: int
    """The scheduler's id."""
    client: ClientId
    sequence: int
    sizes: tuple[int, ...]
    own_id: str | None
    """The id that its user gave it."""

    @property
    def id(self) -> str:
        """The id that its user knows it by."""
        return self.own_id or f"{self.client[0].hex()}-{self.sequence}"


class Run(NamedTuple):
    """One run of a batch."""

    start: StartBatch
    slot: str
    sent: float
    began: float
    ended: float
    """`inf` while it runs."""
    run_us: int
    busy_s: float
    preparations: int
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    code: str | None
    """The code of a run that failed."""
    why: str
    members: Sequence[tuple[Any, ...]]
    """The requests that it answered, as `Member` has them."""

    @property
    def computed(self) -> int:
        """Elements that its calls computed."""
        return sum([count * prod(sizes) for count, sizes in self.calls or ((1, self.start.sizes),)])

    @property
    def padding_ratio(self) -> float:
        """Elements of these that were padding / all of these."""
        computed = self.computed
        return round(min(1.0, self.start.facts.padding / computed), 4) if computed else 0.0


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
    passed: int = 0
    """Batches of any model that ended while it was queued, as far as remembered."""
    troubles: Sequence[tuple[float, str]] = ()


class Stories:
    """The recorder: what ran and what failed lately, and the slowest of the last minutes."""

    def __init__(self, troubles: Callable[[int], Told]) -> None:
        """`troubles` gives those that the scheduler remembers of a request."""
        self._troubles = troubles
        self._runs: deque[tuple[Any, ...]] = deque()
        """Rows of `Run`, plain since one is made for each batch, in the order of their ends."""
        self._answered = 0
        """Members of all these."""
        self._failed_runs: deque[Run] = deque(maxlen=MOST_FAILED_RUNS)
        self._failed: deque[tuple[Any, ...]] = deque(maxlen=MOST_FAILED)
        """The first fields of `Past`, each."""
        self._slow: deque[list[tuple[float, int, Past]]] = deque(maxlen=MINUTES + 1)
        """By minute, a heap of the slowest."""
        self._minute_ends = -inf
        self._slow_from = -inf
        """Only a request that took longer can be one of the slowest."""

    # ------------------------------------------------------------ the journal

    def delivered(self, running: RunningBatch, records: Sequence[RequestRecord], now: float) -> None:
        """Remember a batch, of which these members were answered now."""
        members = [  # `_row_of`, without its call, which would take half as long again
            (
                record.arrived,
                record.id,
                record.session.client,
                record.sequence,
                record.shape.sizes,
                None if record.tags is None else record.tags.get(REQUEST_ID),
            )
            for record in records
        ]
        report = running.report
        assert report is not None
        run = (
            running.action,
            running.slot.label,
            running.sent_at,
            running.started,
            now,
            running.run_us,
            report.busy_s,
            report.preparations,
            report.calls,
            None,
            "",
            members,
        )
        runs = self._runs
        runs.append(run)
        self._answered += len(members)
        while self._answered > MOST_ANSWERED:
            self._answered -= len(runs.popleft()[-1])
        oldest = min(members)
        if now - oldest[0] > self._slow_from or now >= self._minute_ends:
            self._keep_slow(self._answered_by(Run(*run), Member(*oldest)), now)

    def lost(self, running: RunningBatch, code: str, why: str, now: float) -> None:
        """Remember a batch that began and did not run to its end."""
        if running.slot.behind is not running:
            self._failed_runs.append(_run_of(running, now)._replace(code=str(code), why=why))

    def failed(self, record: RequestRecord, action: FailRequest, code: str, now: float) -> None:
        """Remember a request that ends without a result."""
        row = (_row_of(record), record.model, now, code, action.message, action.ahead)
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

    def slowest(self, now: float) -> list[Past]:
        """The slowest requests of the last minutes, one of a batch, the slowest first."""
        kept = [past for heap in self._slow for _, _, past in heap if past.ended > now - 60.0 * MINUTES]
        return sorted(kept, key=lambda past: past.member.arrived - past.ended)

    def of(self, text: str, records: Iterable[RequestRecord], batches: Iterable[RunningBatch]) -> list[Past]:
        """The requests with this id, the latest last; `records` and `batches` are those that have not ended."""
        match = _ID.fullmatch(text)
        client, sequence = (bytes.fromhex(match[1]), int(match[2])) if match else (b"", -1)

        def asked(row: tuple[Any, ...]) -> bool:
            return bool((row[3] == sequence and row[2][0] == client) or row[5] == text)

        found = {
            past.member.number: past
            for past in chain(
                (past for heap in self._slow for _, _, past in heap if asked(past.member)),
                (self._failed_as(row) for row in self._failed if asked(row[0])),
                (
                    self._answered_by(Run(*run), Member(*row))
                    for run in self._runs
                    for row in run[-1]
                    if asked(row)
                ),
            )
        }
        running = list(batches)
        for record in records:
            member = member_of(record)
            if asked(member):
                own = [_run_of(run) for run in running if member.number in run.action.requests]
                past = Past(member, record.model, inf, None, "", None, tuple(own))
                found[member.number] = self._whole(past)
        return [found[number] for number in sorted(found)]

    @property
    def latest(self) -> Run:
        """The run of the batch that was remembered last."""
        return Run(*self._runs[-1])

    def failed_runs(self, record: RequestRecord) -> list[Run]:
        """The runs of this request that failed or were lost, as far as remembered."""
        since = takewhile(lambda run: run.ended >= record.arrived, reversed(self._failed_runs))
        return [run for run in since if record.id in run.start.requests][::-1]

    def reach_s(self, now: float) -> float:
        """Seconds since the end of the first batch that is remembered."""
        return now - self._runs[0][4] if self._runs else 0.0

    def _failed_as(self, row: tuple[Any, ...]) -> Past:
        return self._whole(Past(Member(*row[0]), *row[1:]))

    def _answered_by(self, run: Run, member: Member) -> Past:
        return self._whole(Past(member, run.start.model, run.ended, None, "", None, (run,)))

    def _whole(self, past: Past) -> Past:
        """The same, with what is remembered elsewhere: runs that failed, the queue, troubles."""
        number, runs = past.member.number, past.runs
        troubles: Sequence[tuple[float, str]] = ()
        if past.code is not None or not runs or runs[-1].start.facts.reason in _AGAIN:
            runs = (*[run for run in self._failed_runs if number in run.start.requests], *runs)
            troubles = self._troubles(number)
        ahead = past.ahead
        if ahead is None and runs and runs[0].start.facts.ahead:
            ahead = runs[0].start.facts.ahead[runs[0].start.requests.index(number)]
        until = runs[0].began if runs else past.ended
        passed = bisect_right(self._runs, until, key=_ENDED) - bisect_left(
            self._runs, past.member.arrived, key=_ENDED
        )
        passed -= bool(runs) and runs[0].ended <= until and runs[0].code is None  # itself
        return past._replace(ahead=ahead, runs=runs, passed=max(0, passed), troubles=troubles)


_AGAIN = (CutReason.RERUN, CutReason.SUSPECT)
_ENDED = itemgetter(Run._fields.index("ended"))


def member_of(record: RequestRecord) -> Member:
    """The request as a story names it."""
    return Member(*_row_of(record))


def _row_of(record: RequestRecord) -> tuple[Any, ...]:
    """A row of `Member`."""
    tags = record.tags
    own_id = None if tags is None else tags.get(REQUEST_ID)
    return record.arrived, record.id, record.session.client, record.sequence, record.shape.sizes, own_id


def _run_of(running: RunningBatch, ended: float = inf) -> Run:
    action = running.action
    return Run(
        action, running.slot.label, running.sent_at, running.started, ended, 0, 0.0, 0, (), None, "", ()
    )


# ---------------------------------------------------------------- words


def may_see(asker: ClientId | None, client: ClientId) -> bool:
    """Whether a client's stories may be told to another one; None: the admin port, or a key with the role admin.

    The key proves identity, not the client's id, which stands in each request's id. Without security nobody has a key.
    """
    return asker is None or asker[1] == client[1]


def nothing_of(text: str, reach_s: float) -> str:
    """The answer about a request of which nothing is remembered, or nothing that the asker may see."""
    return (
        f"nothing is known of request {text!r}, or another key sent it; stories are kept of the last {MOST_ANSWERED:,} "
        f"answered requests (at present {reach_s:.0f} s), of the last {MOST_FAILED:,} failed ones, and of the slowest in "
        f"each of the last {MINUTES} minutes"
    )


def story_of(past: Past, now: float, asker: ClientId | None) -> dict[str, Any]:
    """A request's story as plain data: numbers, `events` in ms since its arrival, and `why` it took so long."""
    member, runs = past.member, past.runs
    arrived, last = member.arrived, runs[-1] if runs else None
    open_end = past.ended == inf
    ended = now if open_end else past.ended
    began = ended if last is None else last.began
    story: dict[str, Any] = {
        "request_id": member.id,
        "model": past.model,
        "sizes": list(member.sizes),
        "state": past.code or ("answered" if not open_end else "queued" if last is None else "running"),
        "arrived_s_ago": round(now - arrived, 3),
        "queued_before": past.ahead,
        "batches_before": past.passed,
        "queue_ms": _ms(began - arrived),
        "run_ms": None if last is None or last.ended == inf else _ms(last.run_us * 1e-6),
        "total_ms": _ms(ended - arrived),
        "slot": None,
        "attempts": len(runs),
        "code": past.code,
    }
    if last is not None:
        facts = last.start.facts
        mates = [Member(*row) for row in last.members[: COMPANY + 1] if row[1] != member.number]
        story |= {
            "slot": last.slot,
            "batch": last.start.batch,
            "batch_sizes": list(last.start.sizes),
            "batch_requests": len(last.start.requests),
            "with": [mate.id for mate in mates if may_see(asker, mate.client)],
            "cut": cut_reason(last.start),
            "padding_ratio": last.padding_ratio,
            "new_shape": facts.new_shape or last.preparations > 0,
            "predicted_ms": None if facts.predicted_s is None else _ms(facts.predicted_s),
            "busy_ms": _ms(last.busy_s),
        }
    story["events"] = [[_ms(time - arrived), text] for time, text in sorted(_events(past), key=itemgetter(0))]
    story["why"] = " ".join(_reasons(story, past))
    return story


def cut_reason(start: StartBatch) -> str:
    """The reason why a batch holds no more requests."""
    facts = start.facts
    if facts.reason in (CutReason.COST, CutReason.DIVIDED) and not facts.left:
        return "nothing else was queued"
    if (
        facts.reason in (CutReason.COST, CutReason.DIVIDED)
        and start.sizes
        and start.sizes[0] >= facts.max_batch
    ):
        return "the batch is full"
    return facts.reason.value


def _events(past: Past) -> Iterator[tuple[float, str]]:
    before = (
        "" if past.ahead is None else f"; queued before it for {past.model}: {_count(past.ahead, 'request')}"
    )
    yield past.member.arrived, f"arrived{before}"
    yield from past.troubles
    for run in past.runs:
        start = run.start
        behind = "" if start.behind is None else f", queued behind batch {start.behind}"
        company = f"batch {start.batch}: {_count(len(start.requests), 'request')} at {list(start.sizes)} for {run.slot}"
        yield run.sent, f"{company}{behind}; {cut_reason(start)}"
        if run.began > run.sent:
            yield run.began, f"batch {start.batch} began"
        if run.code is not None:
            yield run.ended, f"batch {start.batch} failed: {run.code}"
        elif run.ended < inf:
            yield run.ended, f"answered; its calls took {_ms(run.run_us * 1e-6)} ms"
    if past.code is not None:
        yield past.ended, f"failed: {past.code}: {past.message}"


def _reasons(story: dict[str, Any], past: Past) -> Iterator[str]:
    """Sentences that say where the time went, the largest part first."""
    total_ms, runs = story["total_ms"], past.runs
    parts: list[tuple[float, str]] = []
    first_ms = _ms(runs[0].began - past.member.arrived) if runs else total_ms
    before = (
        f"behind {_count(past.ahead or 0, 'queued request')} and {_count(past.passed, 'batch', 'batches')}"
    )
    parts.append((first_ms, f"waited {first_ms:g} ms {before}"))
    if len(runs) > 1:
        again_ms = _ms(runs[-1].began - runs[0].began)
        codes = ", ".join([f"batch {run.start.batch} with {run.code}" for run in runs[:-1]])
        parts.append(
            (again_ms, f"lost {again_ms:g} ms to {_count(len(runs) - 1, 'failed attempt')} ({codes})")
        )
    if story["run_ms"] is not None:
        predicted = "" if story["predicted_ms"] is None else f", predicted {story['predicted_ms']:g} ms"
        held = f"ran in a batch of {story['batch_requests']} that held its slot for {story['busy_ms']:g} ms"
        parts.append((story["busy_ms"], held + predicted))
        rest_ms = round(total_ms - sum([ms for ms, _ in parts]), 3)
        if rest_ms > WORTH_TELLING * total_ms:
            parts.append((rest_ms, f"spent {rest_ms:g} ms on the way to the slot and back"))
    parts.sort(key=itemgetter(0), reverse=True)
    yield f"Of {total_ms:g} ms it " + "; it ".join([text for _, text in parts]) + "."
    if story.get("padding_ratio"):
        yield f"{story['padding_ratio']:.0%} of what its batch computed was padding."
    if story.get("new_shape"):
        yield f"The shape {story['batch_sizes']} was new."
    if past.code is not None:
        yield f"It failed as {past.code}."
    elif story["state"] in ("queued", "running"):
        yield f"It is still {story['state']}."


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
