"""`python -m benchmarks.moderate`: texts that arrive at random, from few to more than one at a time can do.

The peak of one at a time (plain OpenVINO, the best of its settings) is measured in each round. Then sentences arrive by
Poisson at shares of it: the same arrivals for our servers, for plain OpenVINO in this process and, with `--peer`, for
mosec. With `--wide`, our servers are one with a wide slot and one without. Our clients and the peer's do nothing but their
protocols. Every answer is checked. Latencies count from when a request was meant to be sent. A ratio has the 95 % interval
of its median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from examples.embeddings.corpus import Ids

from benchmarks import peer
from benchmarks.http_client import HttpClient
from benchmarks.limit import single
from benchmarks.limit.answers import References, no_answers
from benchmarks.limit.contest import PASSES
from benchmarks.limit.engine import MODEL_FILE, Array, read_minilm
from benchmarks.limit.figures import quantile_ms
from benchmarks.limit.oracle import Plan
from benchmarks.limit.pipeline_run import MODEL, SLOTS, TWO_WORKERS, ServerSetting, serving
from benchmarks.limit.poisson import Answered, Arrivals, Line, on_line, one_at_a_time
from benchmarks.limit.traces import Trace, lognormal
from benchmarks.raw_client import RawClient
from benchmarks.report import Figure, Report, print_reports
from benchmarks.versus import interval
from shapestream.wire.messages import Failure, ResultEntry
from shapestream_engine.layout import Tensors

IN_FLIGHT = 64
SATURATED = f"{IN_FLIGHT} in flight"
SHARES = (0.3, 0.6, 0.8, 0.9, 1.0)
"""Rates, as shares of the peak of one at a time."""
PLAIN = "plain OpenVINO"
AIMS = {0.3: 1.0, 0.6: 1.0, 0.8: 1.1, 0.9: 1.1}
"""The p50 that ours may have, as a multiple of each other way's, by share."""
AIM_PEER = 1.15
"""The rate with `IN_FLIGHT` outstanding, as a multiple of the peer's."""
SERVERS = (
    ServerSetting(label="in process"),
    ServerSetting(label="two workers", placement=TWO_WORKERS),
)
NARROW = SERVERS[0]
WIDE = ServerSetting(label="wide", placement="in_process: {slots: 2, threads: 2, wide: true}")
TOKENS_PER_S = 9_000
"""About what two cores do: a trace is the same on every machine."""
SMOKE_CALIBRATION_S = 0.3


class _RawLine:
    """A session on one of our servers."""

    def __init__(self, client: RawClient) -> None:
        self._client = client

    def fileno(self) -> int:
        """The descriptor of its socket."""
        return self._client.fileno()

    def ask(self, ids: Ids) -> None:
        """Send the sentence; the server makes its mask."""
        self._client.ask(_tensors(ids))

    def take(self) -> Iterator[tuple[int, Array]]:
        """The embeddings that have arrived."""
        for entry in self._client.take():
            if isinstance(entry, Failure):
                raise AssertionError(f"the server refused: {entry}")
            if isinstance(entry, ResultEntry):
                yield entry.sequence, np.frombuffer(entry.tensors.buffers[0], np.float32)

    def stream(self, trace: Trace) -> Iterator[tuple[int, Array]]:
        """The embeddings of a trace, with `IN_FLIGHT` outstanding."""
        for number, tensors in self._client.stream([_tensors(ids) for ids in trace.ids], IN_FLIGHT):
            yield number, np.frombuffer(tensors.buffers[0], np.float32)


def _tensors(ids: Ids) -> Tensors:
    return Tensors(layout=((0, "i64", (1, len(ids))),), buffers=(ids.tobytes(),))


class _PeerLine:
    """A session on the peer, as `_RawLine` is one on ours."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def fileno(self) -> int:
        """The descriptor of all its connections."""
        return self._client.fileno()

    def ask(self, ids: Ids) -> None:
        """Send the sentence; the server makes its mask."""
        self._client.ask(ids.tobytes())

    def take(self) -> Iterator[tuple[int, Array]]:
        """The embeddings that have arrived."""
        for number, body in self._client.take():
            yield number, np.frombuffer(body, np.float32)

    def stream(self, trace: Trace) -> Iterator[tuple[int, Array]]:
        """The embeddings of a trace, with `IN_FLIGHT` outstanding."""
        for number, body in self._client.stream([ids.tobytes() for ids in trace.ids], IN_FLIGHT):
            yield number, np.frombuffer(body, np.float32)


@dataclass(slots=True, kw_only=True)
class Figures:
    """What one load gave on one way: a figure per round."""

    per_s: list[float] = field(default_factory=list)
    """Requests that were answered, or sent, per second."""
    ways_ms: list[float] = field(default_factory=list)
    """CPU per request of the server, its loop apart, and its workers; of plain OpenVINO, all of it."""
    loop_ms: list[float] = field(default_factory=list)
    """CPU per request of the server's event loop and ZeroMQ's threads."""
    client_ms: list[float] = field(default_factory=list)
    latency_s: list[list[float]] = field(default_factory=list)

    def quantiles_ms(self, quantile: float) -> list[float]:
        """The quantile of each round."""
        return [quantile_ms(latencies, quantile) for latencies in self.latency_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cpu:
    """Readers of the CPU time used so far, in seconds."""

    all_s: Callable[[], float]
    loop_s: Callable[[], float] = lambda: 0.0


@dataclass(slots=True, kw_only=True)
class _Way:
    """A running server, ours or the peer's, or the model in this process."""

    name: str
    cpu: _Cpu
    connect: Callable[[], AbstractContextManager[Line]] | None = None
    plan: Plan | None = None
    """How the model in this process runs; None: it is a server."""
    loads: dict[float, Figures] = field(default_factory=dict)
    """By share of the peak; 0.0: saturated."""

    @contextmanager
    def measured(self, load: float, count: int) -> Iterator[Figures]:
        """Note the CPU that the block uses for so many requests."""
        figures = self.loads.setdefault(load, Figures())
        way_s, loop_s, client_s = self.cpu.all_s(), self.cpu.loop_s(), time.process_time()
        yield figures
        loop_s = self.cpu.loop_s() - loop_s
        client_s = time.process_time() - client_s
        figures.loop_ms.append(loop_s / count * 1e3)
        figures.ways_ms.append((self.cpu.all_s() - way_s - loop_s) / count * 1e3)
        figures.client_ms.append(0.0 if self.plan is not None else client_s / count * 1e3)

    def saturate(self, trace: Trace, references: References) -> float:
        """Requests per second with `IN_FLIGHT` outstanding, or as fast as the model can one at a time."""
        answers = no_answers(trace)
        with ExitStack() as stack:
            if self.connect is None:
                assert self.plan is not None
                with self.measured(0.0, len(trace)) as figures:
                    seconds = self.plan.model.run(self.plan.cut(trace.lengths), trace.ids, answers)
            else:
                line = stack.enter_context(self.connect())
                with self.measured(0.0, len(trace)) as figures:
                    started = time.perf_counter()
                    for number, row in line.stream(trace):
                        answers[number] = row
                    seconds = time.perf_counter() - started
        references.check(answers, f"{self.name}, {SATURATED}")
        figures.per_s.append(len(trace) / seconds)
        return figures.per_s[-1]

    def arrive(self, share: float, trace: Trace, arrivals: Arrivals, references: References) -> None:
        """Let requests arrive."""
        with ExitStack() as stack:
            if self.connect is None:
                assert self.plan is not None
                with self.measured(share, len(arrivals.at_s)) as figures:
                    answered: Answered = one_at_a_time(self.plan.model, trace, arrivals)
            else:
                line = stack.enter_context(self.connect())
                with self.measured(share, len(arrivals.at_s)) as figures:
                    answered = on_line(line, trace, arrivals)
        references.check(answered.answers, f"{self.name} at {share:.0%}", places=arrivals.places)
        figures.per_s.append(len(arrivals.at_s) / float(arrivals.at_s[-1]))
        figures.latency_s.append(answered.latency_s.tolist())


def measure(
    folder: Path,
    *,
    rounds: int,
    seconds: float,
    smoke: bool,
    with_peer: bool,
    servers: Sequence[ServerSetting] = SERVERS,
    beside: Sequence[ServerSetting] = (),
) -> list[Report]:
    """Run all ways in interleaved rounds; `seconds` of arrivals per load, way and round.

    `servers` are compared with the other ways, and with our servers `beside` them.
    """
    whole = lognormal(round((0.3 if smoke else 4.5) * TOKENS_PER_S))
    middle = len(whole) * 2 // 3
    trace, practice = whole.cut(0, middle), whole.cut(middle, len(whole))
    minilm = read_minilm()
    references, practised = References(minilm, trace), References(minilm, practice)
    with ExitStack() as stack:
        plan = single.search(minilm, practice, thorough=not smoke)
        plain = _Way(name=PLAIN, plan=plan, cpu=_Cpu(all_s=time.process_time))
        settings = (*servers, *beside)
        ways = [plain, *[_start(stack, folder, setting, smoke=smoke) for setting in settings]]
        if with_peer:
            ways.append(_start_peer(stack, folder, practice))
        for way in ways:
            for _ in range(1 if smoke else PASSES):
                way.saturate(practice, practised)
            way.loads.clear()
        for number in range(rounds):
            peak = plain.saturate(trace, references)
            for way in ways:
                if way is not plain:
                    way.saturate(trace, references)
            for share in SHARES:
                arrivals = Arrivals.draw(trace, share * peak, seconds, number)
                for way in ways:
                    way.arrive(share, trace, arrivals, references)
            # The first of a round is not the first of the next.
            ways = ways[1:] + ways[:1]
    names = [PLAIN, *([peer.NAME] if with_peer else []), *[setting.label for setting in beside]]
    found = {way.name: way for way in ways}
    others = [found.pop(name) for name in names]
    ours = [found[setting.label] for setting in servers]
    return [_of_peak(ours, others), *[_of_load(share, ours, others) for share in SHARES]]


def _start(stack: ExitStack, folder: Path, setting: ServerSetting, *, smoke: bool) -> _Way:
    if smoke:
        setting = replace(setting, calibration_s=SMOKE_CALIBRATION_S)
    served = stack.enter_context(serving(setting, folder))
    child = served.child

    @contextmanager
    def connect() -> Iterator[Line]:
        with RawClient(served.address, MODEL) as client:
            yield _RawLine(client)

    cpu = _Cpu(all_s=lambda: child.cpu_s() + child.children_cpu_s(), loop_s=child.loop_cpu_s)
    return _Way(name=setting.label, connect=connect, cpu=cpu)


def _start_peer(stack: ExitStack, folder: Path, practice: Trace) -> _Way:
    """One request at a time, since batches in order of arrival are slower on this trace."""
    example = practice.ids[0].tobytes()
    running = stack.enter_context(
        peer.serving(folder, MODEL_FILE, "sentences", workers=SLOTS, rows=1, example=example)
    )

    @contextmanager
    def connect() -> Iterator[Line]:
        with running.connect() as client:
            yield _PeerLine(client)

    return _Way(name=peer.NAME, connect=connect, cpu=_Cpu(all_s=running.cpu_s))


def _of_peak(ours: Sequence[_Way], others: Sequence[_Way]) -> Report:
    report = Report(title=f"{SATURATED}; {PLAIN}: one at a time; CPU per request")
    report.columns = (
        "way",
        "per s",
        *[f"/ {other.name}" for other in others],
        "loop, ms",
        "else, ms",
        "client, ms",
    )
    for way in (*ours, *others):
        mine = way.loads[0.0]
        ratios: list[Figure | str] = ["" for _ in others]
        if way in ours:
            aims = [AIM_PEER if other.name == peer.NAME else None for other in others]
            ratios = [
                Figure(_median_ratio(mine.per_s, other.loads[0.0].per_s), "x", at_least=aim)
                for other, aim in zip(others, aims, strict=True)
            ]
        report.rows.append((way.name, f"{statistics.median(mine.per_s):.0f}", *ratios, *_cpu(mine)))
    return report


def _of_load(share: float, ours: Sequence[_Way], others: Sequence[_Way]) -> Report:
    per_s = statistics.median(others[0].loads[share].per_s)
    aim = f"; aim of p50: {AIMS[share]:g}" if share in AIMS else ""
    report = Report(title=f"{share:.0%} of one at a time, {per_s:.0f} per second; CPU per request{aim}")
    report.columns = ("way", "p50, ms", "p95, ms", "p99, ms", "loop, ms", "else, ms", "client, ms")
    quantiles = (50, 95, 99)
    for way in (*ours, *others):
        mine = way.loads[share]
        medians = [f"{statistics.median(mine.quantiles_ms(quantile)):.1f}" for quantile in quantiles]
        report.rows.append((way.name, *medians, *_cpu(mine)))
    for way in ours:
        for other in others:
            ratios = [
                _ratio(way.loads[share].quantiles_ms(each), other.loads[share].quantiles_ms(each))
                for each in quantiles
            ]
            report.rows.append((f"{way.name} / {other.name}", *ratios, "", "", ""))
    return report


def _cpu(figures: Figures) -> list[str]:
    parts = (figures.loop_ms, figures.ways_ms, figures.client_ms)
    return [f"{statistics.median(part):.2f}" for part in parts]


def _median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median([one / other for one, other in zip(mine, theirs, strict=True)])


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the rounds' ratios, and its interval."""
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.2f}, {low:.2f}..{high:.2f}"


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of arrivals, per load, way and round.")] = 6.0,
    with_peer: Annotated[bool, typer.Option("--peer", help=peer.OPTION_HELP)] = False,
    wide: Annotated[bool, typer.Option(help="Compare a server with a wide slot with one without.")] = False,
) -> None:
    """Measure latencies from few requests to many, beside others on the same arrivals."""
    if with_peer:
        peer.demand_environment()
    if smoke:
        rounds, seconds = 1, 0.3
    print_reports(
        lambda folder: measure(
            folder,
            rounds=rounds,
            seconds=seconds,
            smoke=smoke,
            with_peer=with_peer,
            servers=(WIDE,) if wide else SERVERS,
            beside=(NARROW,) if wide else (),
        ),
        as_json=as_json,
    )


if __name__ == "__main__":
    typer.run(main)
