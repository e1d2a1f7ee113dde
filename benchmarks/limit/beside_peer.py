"""Random arrivals to our servers and to the peer in the same rounds, through clients that do nothing but their protocols.

The peer takes one request at a time, since batches in order of arrival are slower on this trace. A share of the peak is
of each server's own, measured just before with `IN_FLIGHT` requests outstanding. Every answer is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from examples.embeddings.corpus import Ids

from benchmarks import peer
from benchmarks.http_client import HttpClient
from benchmarks.limit.answers import Answers, References, no_answers
from benchmarks.limit.contest import PASSES
from benchmarks.limit.engine import MODEL_FILE, Array, Minilm
from benchmarks.limit.figures import quantile_ms
from benchmarks.limit.pipeline_run import MODEL, SLOTS, ServerSetting, serving
from benchmarks.limit.poisson import Arrivals, Line, on_line
from benchmarks.limit.traces import Trace
from benchmarks.raw_client import RawClient
from benchmarks.report import Figure, Report
from shapestream.wire.messages import Failure, ResultEntry
from shapestream_engine.layout import Tensors

IN_FLIGHT = 64
SATURATED = f"{IN_FLIGHT} in flight"
RATES = (30.0, 90.0)
"""Requests per second."""
SHARES = (0.6, 0.9)
"""Of a server's own peak."""
AIM = 1.0


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
    """The same to the peer."""

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
    """What one load gave on one server: a figure per round, but a latency per request."""

    per_s: list[float] = field(default_factory=list)
    """Requests that were answered, or sent, per second."""
    server_ms: list[float] = field(default_factory=list)
    """CPU per request of the server and its workers."""
    client_ms: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Server:
    """A running server, ours or the peer's."""

    name: str
    connect: Callable[[], AbstractContextManager[Line]]
    cpu_s: Callable[[], float]
    """CPU time used so far by all its processes."""
    loads: dict[str, Figures] = field(default_factory=dict)

    @contextmanager
    def measured(self, load: str, count: int) -> Iterator[Figures]:
        """Note the CPU that the block uses for so many requests."""
        figures = self.loads.setdefault(load, Figures())
        server_s, client_s = self.cpu_s(), time.process_time()
        yield figures
        figures.server_ms.append((self.cpu_s() - server_s) / count * 1e3)
        figures.client_ms.append((time.process_time() - client_s) / count * 1e3)


def measure(
    minilm: Minilm,
    settings: Mapping[str, ServerSetting],
    trace: Trace,
    practice: Trace,
    folder: Path,
    *,
    rounds: int,
    seconds: float,
) -> Report:
    """Run all servers in interleaved rounds; `seconds` of arrivals per load, server and round."""
    references, practised = References(minilm, trace), References(minilm, practice)
    with ExitStack() as stack:
        servers = [_start(stack, folder, name, setting) for name, setting in settings.items()]
        servers.append(_start_peer(stack, folder, practice))
        for server in servers:
            for _ in range(PASSES):
                practised.check(_saturate(server, practice), f"{server.name}, warming up")
            server.loads.clear()
        for number in range(rounds):
            for server in servers:
                references.check(_saturate(server, trace), f"{server.name}, {SATURATED}")
            for load in range(len(RATES) + len(SHARES)):
                for server in servers:
                    _arrive(server, load, trace, references, seconds, seed=number)
            # The first of a round is not the first of the next.
            servers = servers[1:] + servers[:1]
    return _report(trace, {server.name: server.loads for server in servers}, [*settings, peer.NAME])


def _start(stack: ExitStack, folder: Path, name: str, setting: ServerSetting) -> _Server:
    served = stack.enter_context(serving(setting, folder))

    @contextmanager
    def connect() -> Iterator[Line]:
        with RawClient(served.address, MODEL) as client:
            yield _RawLine(client)

    return _Server(
        name=name,
        connect=connect,
        cpu_s=lambda: served.child.cpu_s() + served.child.children_cpu_s(),
    )


def _start_peer(stack: ExitStack, folder: Path, practice: Trace) -> _Server:
    example = practice.ids[0].tobytes()
    running = stack.enter_context(
        peer.serving(folder, MODEL_FILE, "sentences", workers=SLOTS, rows=1, example=example)
    )

    @contextmanager
    def connect() -> Iterator[Line]:
        with running.connect() as client:
            yield _PeerLine(client)

    return _Server(name=peer.NAME, connect=connect, cpu_s=running.cpu_s)


def _saturate(server: _Server, trace: Trace) -> Answers:
    answers = no_answers(trace)
    with server.connect() as line, server.measured(SATURATED, len(trace)) as figures:
        started = time.perf_counter()
        for number, row in line.stream(trace):
            answers[number] = row
        figures.per_s.append(len(trace) / (time.perf_counter() - started))
    return answers


def _arrive(
    server: _Server, load: int, trace: Trace, references: References, seconds: float, seed: int
) -> None:
    """Poisson arrivals at this load, the same for all servers but for their rates."""
    peak = server.loads[SATURATED].per_s[-1]
    label, rate = list(_rates(peak).items())[load]
    arrivals = Arrivals.draw(trace, rate, seconds, seed)
    with server.connect() as line, server.measured(label, len(arrivals.at_s)) as figures:
        answered = on_line(line, trace, arrivals)
    references.check(answered.answers, f"{server.name} at {label}", places=arrivals.places)
    figures.per_s.append(rate)
    figures.latency_s += answered.latency_s.tolist()


def _rates(peak: float) -> dict[str, float]:
    """Requests per second of each load."""
    fixed = {f"{rate:g}/s": rate for rate in RATES}
    return fixed | {f"{share:.0%} of its peak": share * peak for share in SHARES}


def _report(trace: Trace, found: Mapping[str, Mapping[str, Figures]], order: list[str]) -> Report:
    """A row per load and server."""
    report = Report(title=f"{trace.name}: Poisson arrivals beside {peer.NAME}, raw clients; CPU per request")
    report.columns = ("load, way", "per s", "p50, ms", "p99, ms", "CPU, ms", "client, ms")
    report.columns += tuple(f"{what} / {peer.NAME}'s" for what in ("rate", "p50", "p99", "CPU"))
    for load, theirs in found[peer.NAME].items():
        for name in order:
            mine = found[name][load]
            row: list[str | Figure] = [f"{load}, {name}", f"{statistics.median(mine.per_s):.0f}"]
            latencies = [
                (quantile_ms(mine.latency_s, q), quantile_ms(theirs.latency_s, q))
                for q in (50, 99)
                if mine.latency_s
            ]
            row += [f"{ours:.1f}" for ours, _ in latencies] or ["", ""]
            row += [f"{statistics.median(ms):.2f}" for ms in (mine.server_ms, mine.client_ms)]
            if mine is theirs:
                row += [""] * 4
            else:
                saturated = load == SATURATED
                rate = statistics.median(mine.per_s) / statistics.median(theirs.per_s)
                row.append(Figure(rate, "x", at_least=AIM if saturated else None))
                row += [Figure(ours / other, "x", at_most=AIM) for ours, other in latencies] or ["", ""]
                row.append(
                    Figure(statistics.median(mine.server_ms) / statistics.median(theirs.server_ms), "x")
                )
            report.rows.append(tuple(row))
    return report
