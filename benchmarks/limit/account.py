"""What each part of the way costs against the oracle: `python -m benchmarks.limit --account`.

All figures are milliseconds of wall time per request.

A round streams the trace through the server, asks for the story of its requests once the clock has stopped, and replays the
same batches on the bare engine. The server keeps stories anyway, so recording costs nothing; a story tells the batch, its
sizes, its slot, and whether its shape was new to the slot. The slots' busy seconds are those of the statistics. A row is the
difference of two replays, or of the slots' time:

1. *streams*, *kernels*: the oracle's cuts on its own engine, on one stream per slot, and without OpenVINO's fused
   kernels, which the product switches off. All later replays have the last form: `SLOTS` threads take the next batch.
   Where the oracle's best engine is that of the slots, the first of these rows shows the error of a replay.
2. *cuts*, *padding*: our batches in the order in which they were sent, at shapes that the engine has met. Padding is what
   rows of a batch's mean length save, less what they save the oracle. Such rows have no answers to check.
3. *first calls*: the same on an engine that has met just the shapes that were not new to the server's slots.
4. *company*: the same beside the CPU that event loop and client used: after each batch a thread of this process, under its
   GIL, and another process compute for as long as the server's main and ZeroMQ's threads, and the client, did per batch.
5. *no work at the end*: a slot's time from its last answer to the end of the trace.
6. *waits between calls*: the rest of the slots' time that is in no batch: reports and batches on their way, and an
   empty queue.
7. *remainder*: the server's seconds less all of these; it has the errors of the replays, and our own gathering and copying
   where it is slower than NumPy's in the replays.

A row is the median of the rounds, with quartiles; the remainder is taken of the medians, so the column adds up. The rows
differ by tenths of a millisecond, so they need quiet cores: look at the quartiles. A smoke run has 64 in flight alone.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from examples.embeddings.corpus import Ids

from benchmarks.checkouts import ROOT
from benchmarks.limit import oracle
from benchmarks.limit.answers import References, no_answers
from benchmarks.limit.contest import IN_FLIGHT, PASSES
from benchmarks.limit.cuts import padding_ratio
from benchmarks.limit.engine import Batch, EngineSettings, InProcess, Minilm, Setting
from benchmarks.limit.pipeline_run import SLOTS, Run, Served, ServerSetting, serving
from benchmarks.limit.traces import Trace
from benchmarks.processes import spin
from benchmarks.report import Figure, Report
from shapestream import blocking

FUSED = Setting(engine=EngineSettings(streams=SLOTS, threads=SLOTS), requests=SLOTS)
LIKE_OURS = replace(FUSED, engine=replace(FUSED.engine, fused=False))
"""As the product compiles the model for two slots of one thread."""

PARTS = {
    "streams": "one stream per slot",
    "kernels": "no fused kernels",
    "cuts": "cuts, without their padding",
    "padding": "padding",
    "first calls": "first calls at a shape",
    "company": "company of loop and client",
    "end": "no work at the end",
    "waits": "slots' waits between calls",
}
FIRST, REMAINDER, LAST = "oracle", "remainder", "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanBatch:
    """A batch that ran on a slot."""

    number: int
    slot: str
    batch: Batch
    new_shape: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length."""
        return len(self.batch.places), self.batch.length


def ran_batches(served: Served, run: Run) -> list[RanBatch]:
    """Ask a server for the batches of a run that has just ended, in the order in which they were sent."""
    stories: dict[int, dict[str, Any]] = {}
    members: dict[int, set[int]] = {}
    known: set[str] = set()
    with blocking.connect(served.address) as client:
        for request_id in run.received:
            if request_id in known:
                continue
            story = client.stories(request_id)[-1]
            # A story names some of the batch's members; those that it does not name are asked for.
            own = [request_id, *story["with"]]
            known.update(own)
            stories[story["batch"]] = story
            members.setdefault(story["batch"], set()).update(run.received[one][0] for one in own)
    found = [_ran(stories[number], sorted(members[number])) for number in sorted(stories)]
    places = [place for each in found for place in each.batch.places.tolist()]
    assert list(range(len(run.received))) == sorted(places)
    return found


def _ran(story: Mapping[str, Any], places: Sequence[int]) -> RanBatch:
    rows, length = story["batch_sizes"]
    assert rows == len(places) == story["batch_requests"]
    return RanBatch(
        number=story["batch"],
        slot=story["slot"],
        batch=Batch(places=np.array(places), length=length),
        new_shape=story["new_shape"],
    )


class Company:
    """The CPU that an event loop and a client use for each batch, beside the engine's threads."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.processes"]
        self._client = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)

    def __enter__(self) -> Company:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        self._client.wait()

    def beside(self, loop_s: float, client_s: float, run: Callable[[Callable[[], None]], float]) -> float:
        """Call `run` with a function that it calls after each batch, for so much CPU; return what it returns."""
        ends: SimpleQueue[bool] = SimpleQueue()
        pipe = self._client.stdin
        assert pipe is not None

        def work() -> None:
            while ends.get():
                spin(loop_s)
                pipe.write(b"%.9f\n" % client_s)
                pipe.flush()

        loop = Thread(target=work)
        loop.start()
        try:
            return run(lambda: ends.put(True))
        finally:
            ends.put(False)
            loop.join()


@dataclass(slots=True, kw_only=True)
class Account:
    """The parts of the way at one number of requests in flight, in lists with an element per round."""

    in_flight: int
    ms: dict[str, list[float]] = field(default_factory=dict)
    """Per request: the oracle's, the parts and ours."""
    facts: dict[str, list[float]] = field(default_factory=dict)

    def note(self, oracle_ms: float, parts: Mapping[str, float], ours_ms: float) -> None:
        """Add a round."""
        for name, value in {FIRST: oracle_ms, **parts, LAST: ours_ms}.items():
            self.ms.setdefault(name, []).append(value)
        remainder = ours_ms - oracle_ms - sum(parts.values())
        self.ms.setdefault(REMAINDER, []).append(remainder)

    def report(self, title: str) -> Report:
        """One row per part; the first column adds up to the last row."""
        report = Report(
            title=title, columns=("part", "ms per request", "quartiles of rounds", "of the difference")
        )
        middle = {name: statistics.median(values) for name, values in self.ms.items()}
        gap = middle[LAST] - middle[FIRST]
        middle[REMAINDER] = gap - sum(middle[part] for part in PARTS)
        for name, words in {FIRST: FIRST, **PARTS, REMAINDER: REMAINDER, LAST: LAST}.items():
            share = "" if name in (FIRST, LAST) else f"{middle[name] / gap:.0%}"
            report.rows.append((words, Figure(middle[name], "ms"), _quartiles(self.ms[name]), share))
        for words, values in self.facts.items():
            report.rows.append((f"  {words}", f"{statistics.median(values):.3g}", _quartiles(values), ""))
        return report


def _quartiles(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles([*values, *values], n=4)
    return f"{low:.3g} to {high:.3g}"


class Accounts:
    """The server, the oracle, and the engines that replay."""

    def __init__(
        self, minilm: Minilm, trace: Trace, practice: Trace, served: Served, *, thorough: bool
    ) -> None:
        """`practice` is another slice: the oracle's settings are found, and the server is warmed up, on it alone."""
        self._minilm = minilm
        self._trace = trace
        self._served = served
        self._references = References(minilm, trace)
        self._oracle = oracle.search(minilm, practice, thorough=thorough)
        self._fused, self._ours = InProcess(minilm, FUSED), InProcess(minilm, LIKE_OURS)
        self._best = self._oracle.cut(trace.lengths)
        practised = References(minilm, practice)
        for in_flight in IN_FLIGHT * PASSES if thorough else IN_FLIGHT[:1]:
            practised.check(served.stream(practice, in_flight).answers, "warming up")
        self.accounts = [
            Account(in_flight=in_flight) for in_flight in (IN_FLIGHT if thorough else IN_FLIGHT[:1])
        ]

    @property
    def checked(self) -> int:
        """Answers that were compared so far."""
        return self._references.checked

    @property
    def settings(self) -> str:
        """The oracle's settings."""
        return str(self._oracle)

    def round(self, number: int, company: Company) -> None:
        """Measure all once."""
        for account in self.accounts:
            self._measure(account, number, company)

    def _measure(self, account: Account, number: int, company: Company) -> None:
        run = self._served.stream(self._trace, account.in_flight)
        self._references.check(run.answers, f"{account.in_flight} in flight")
        ran = ran_batches(self._served, run)
        replays = self._replays(ran, run, company)
        order = list(replays)
        turned = number % len(order)
        seconds = {name: replays[name]() for name in order[turned:] + order[:turned]}
        ms = {name: 1000 * value / len(self._trace) for name, value in seconds.items()}
        end_s, waits_s = _idle_s(ran, run)
        ours_padding = ms["ours"] - ms["ours, unpadded"]
        oracle_padding = ms["kernels"] - ms["oracle, unpadded"]
        parts = {
            "streams": ms["streams"] - ms["oracle"],
            "kernels": ms["kernels"] - ms["streams"],
            "cuts": ms["ours, unpadded"] - ms["oracle, unpadded"],
            "padding": ours_padding - oracle_padding,
            "first calls": ms["first calls"] - ms["ours"],
            "company": ms["company"] - ms["first calls"],
            "end": 1000 * end_s / len(self._trace),
            "waits": 1000 * waits_s / len(self._trace),
        }
        account.note(ms["oracle"], parts, 1000 * run.seconds / len(self._trace))
        facts = {
            "batches": len(ran),
            "requests per batch": len(self._trace) / len(ran),
            "calls at new shapes, %": 100 * sum(each.new_shape for each in ran) / len(ran),
            "padding, %": 100 * padding_ratio([each.batch for each in ran], self._trace.lengths),
            "the oracle's padding, %": 100 * padding_ratio(self._best, self._trace.lengths),
            "loop, CPU ms": 1000 * run.loop_cpu_s / len(self._trace),
            "client, CPU ms": 1000 * run.client_cpu_s / len(self._trace),
            "all of the server, CPU ms": 1000 * run.server_cpu_s / len(self._trace),
        }
        for words, value in facts.items():
            account.facts.setdefault(words, []).append(value)

    def _replays(self, ran: Sequence[RanBatch], run: Run, company: Company) -> dict[str, Callable[[], float]]:
        """Prepare all replays, so that each can be timed by itself: functions that return seconds."""
        best, ours = self._best, [each.batch for each in ran]
        known, alone = self._cold(ran), self._cold(ran)
        loop_s, client_s = run.loop_cpu_s / len(ran), run.client_cpu_s / len(ran)

        def beside() -> float:
            return company.beside(
                loop_s, client_s, lambda ended: self._replay(alone, ours, "company", ended=ended)
            )

        warm: dict[str, Callable[[], float]] = {
            "oracle": lambda: self._replay(self._oracle.model, best, "oracle"),
            "streams": lambda: self._replay(self._fused, best, "streams"),
            "kernels": lambda: self._replay(self._ours, best, "kernels"),
            "oracle, unpadded": lambda: self._unpadded(best),
            "ours": lambda: self._replay(self._ours, ours, "ours"),
            "ours, unpadded": lambda: self._unpadded(ours),
        }
        for replay in warm.values():
            replay()
        return {**warm, "first calls": lambda: self._replay(known, ours, "first calls"), "company": beside}

    def _cold(self, ran: Sequence[RanBatch]) -> InProcess:
        """Make an engine that has met the shapes that were not new to the slots, on each of its streams."""
        first: dict[tuple[str, tuple[int, int]], RanBatch] = {}
        for each in ran:
            first.setdefault((each.slot, each.shape), each)
        met = {each.shape: each.batch for each in first.values() if not each.new_shape}
        engine = InProcess(self._minilm, LIKE_OURS)
        warm_up = [batch for batch in met.values() for _ in range(SLOTS)]
        engine.run(warm_up, self._trace.ids, no_answers(self._trace))
        return engine

    def _replay(
        self, engine: InProcess, batches: Sequence[Batch], who: str, ended: Callable[[], None] | None = None
    ) -> float:
        answers = no_answers(self._trace)
        seconds = engine.run(batches, self._trace.ids, answers, ended)
        self._references.check(answers, who)
        return seconds

    def _unpadded(self, batches: Sequence[Batch]) -> float:
        """Replay with rows of each batch's mean length."""
        ids: list[Ids] = list(self._trace.ids)
        even = []
        for batch in batches:
            length = max(1, round(float(self._trace.lengths[batch.places].mean())))
            even.append(replace(batch, length=length))
            for place in batch.places:
                ids[place] = np.resize(self._trace.ids[place], length)
        return self._ours.run(even, ids, no_answers(self._trace))


def _idle_s(ran: Sequence[RanBatch], run: Run) -> tuple[float, float]:
    """The seconds, as a mean of the slots, in which a slot had no more work, and otherwise ran no batch."""
    last_s: dict[str, float] = {}
    received_s = dict(run.received.values())
    for each in ran:
        latest = max(received_s[place] for place in each.batch.places.tolist())
        last_s[each.slot] = max(last_s.get(each.slot, 0.0), latest)
    # A slot that ran nothing at all was without work all the time.
    end_s = sum(run.seconds - at_s for at_s in last_s.values()) + (SLOTS - len(last_s)) * run.seconds
    return end_s / SLOTS, run.seconds * (1.0 - run.slots_busy) - end_s / SLOTS


def measure(
    minilm: Minilm,
    setting: ServerSetting,
    trace: Trace,
    practice: Trace,
    folder: Path,
    *,
    rounds: int,
    thorough: bool,
) -> tuple[list[Report], dict[str, int]]:
    """Measure in interleaved rounds; return a report per number in flight, and how many requests and checked answers."""
    with ExitStack() as stack:
        company = stack.enter_context(Company())
        served = stack.enter_context(serving(setting, folder))
        accounts = Accounts(minilm, trace, practice, served, thorough=thorough)
        for number in range(rounds):
            accounts.round(number, company)
    reports = [
        account.report(
            f"{trace.name}, {len(trace)} requests, {account.in_flight} in flight; oracle: {accounts.settings}"
        )
        for account in accounts.accounts
    ]
    return reports, {"requests": len(trace), "answers_checked": accounts.checked}
