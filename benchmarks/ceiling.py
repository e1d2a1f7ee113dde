"""`python -m benchmarks.ceiling`: how many requests one server decides and carries, whatever the number of slots.

A call takes one request and sleeps for a millisecond, so that slots cost next to nothing, and each request is a batch of
its own: decided, sent, reported and answered by itself. Slots lie in worker processes of 16. Twice as many requests are in
flight as there are slots. The ways: the SDK's `stream`, a client that does nothing but the protocol, and HTTP through two
gateways. The last rows are two servers with half of the slots each, and a client for each; `SDK, spread` is one client of
both.

CPU is told by part, in microseconds a request. The rate bends where the loop, or all cores, are used up: the columns say
which.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import trio
import typer

import shapestream
from benchmarks.binary_infer import head_of, headers_of
from benchmarks.http_client import HttpClient
from benchmarks.processes import Child, child_process, cpu_s, wait_for_slots
from benchmarks.raw_client import RawClient
from benchmarks.report import Figure, Report, print_reports

WIDTH = 4
SLOTS = (16, 64, 256)
PARTS = ("loop", "workers", "gateways", "client")
SLOTS_OF_A_WORKER = 16
YAML = """\
server:
  listen: ["ipc://{name}.sock"]
  http: {{address: "127.0.0.1:0", count: 2}}
  max_queued_requests: 4096
models:
  - name: sleeping
    function: benchmarks.models:sleeping_once
    inputs: {{x: {{shape: "batch:1..64, {width}", element_type: f32}}}}
    outputs: {{y: {{shape: "batch, {width}", element_type: f32, rule: rows}}}}
    batching: {{max_batch: 1}}
    trust: true
    calibration_s: 0
workers: [{{count: {workers}, slots: {slots}, threads: 1}}]
logging: {{format: json}}
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with its parts."""

    address: str
    port: int
    child: Child
    gateways: tuple[int, ...]
    workers: tuple[int, ...]

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU so far, by part."""
        return {
            "loop": self.child.loop_cpu_s(),
            "gateways": sum(map(cpu_s, self.gateways)),
            "workers": sum(map(cpu_s, self.workers)),
        }


def started(stack: ExitStack, folder: Path, name: str, slots: int) -> Server:
    """Start a server with so many slots."""
    path, log = folder / f"{name}.yaml", folder / f"{name}.log"
    of_a_worker = min(slots, SLOTS_OF_A_WORKER)
    path.write_text(YAML.format(name=name, width=WIDTH, workers=slots // of_a_worker, slots=of_a_worker))
    child = stack.enter_context(child_process(["-m", "shapestream_workers", "serve", str(path)], log=log))
    address = f"ipc://{folder}/{name}.sock"
    wait_for_slots(child, address, slots, log)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]

    def told(event: str, key: str) -> list[int]:
        return [line[key] for line in lines if line["event"] == event]

    (port,) = {int(line["address"].rpartition(":")[2]) for line in lines if line["event"] == "gateway ready"}
    return Server(
        address, port, child, tuple(told("gateway started", "pid")), tuple(told("worker started", "pid"))
    )


def _rows(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)


def by_sdk(servers: Sequence[Server], count: int, in_flight: int) -> None:
    """Send so many requests as one stream, spread over the servers; compare every answer."""
    rows = _rows(count)
    addresses = [server.address for server in servers]

    def items() -> Iterator[dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]]]:
        for number in range(count):
            yield {"x": rows[number : number + 1]}

    async def main() -> None:
        number = 0
        async with (
            shapestream.connect(addresses, spread=len(addresses) > 1) as client,
            client.stream("sleeping", items(), max_in_flight=in_flight) as results,
        ):
            async for result in results:
                assert result["y"].tobytes() == rows[number].tobytes()
                number += 1
        assert number == count

    trio.run(main)


def by_protocol(servers: Sequence[Server], count: int, in_flight: int) -> None:
    """Send one request in a message."""
    (server,) = servers
    with RawClient(server.address, "sleeping") as client:
        client.round([row.tobytes() for row in _rows(count)], (1, WIDTH), in_flight)


def by_http(servers: Sequence[Server], count: int, in_flight: int) -> None:
    """Send them over as many connections as requests are in flight."""
    (server,) = servers
    head = head_of(WIDTH)
    rows = [row.tobytes() for row in _rows(count)]
    with HttpClient(server.port, "/v2/models/sleeping/infer", headers_of(head)) as client:
        for number, body in client.stream([head + row for row in rows], in_flight):
            assert body.endswith(rows[number])


SPREAD = "SDK, spread"
WAYS: Mapping[str, Callable[[Sequence[Server], int, int], None]] = {
    "SDK": by_sdk,
    "protocol": by_protocol,
    "HTTP": by_http,
    SPREAD: by_sdk,
}


def measured(servers: Sequence[Server], way: str, count: int, in_flight: int) -> dict[str, float]:
    """Requests per second of all servers, and microseconds of CPU a request by part; each server has its own client, or all
    have one (`SPREAD`)."""
    before, clients_s, began = [server.cpu() for server in servers], _ended_s(), time.perf_counter()
    fork = multiprocessing.get_context("fork")
    by_client = [servers] if way == SPREAD else [[server] for server in servers]
    clients = [
        fork.Process(target=WAYS[way], args=(own, count // len(by_client), in_flight // len(by_client)))
        for own in by_client
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
        assert client.exitcode == 0, f"a client by {way} failed"
    took_s = time.perf_counter() - began
    figures = {"rate": count / took_s, "client": (_ended_s() - clients_s) / count * 1e6}
    for was, server in zip(before, servers, strict=True):
        for part, now_s in server.cpu().items():
            figures[part] = figures.get(part, 0.0) + (now_s - was[part]) / count * 1e6
    return figures


def _ended_s() -> float:
    """Seconds of CPU of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
) -> None:
    """Measure one server, and two, at several numbers of slots; checks every answer."""
    requests, rounds = (400, 1) if smoke else (10_000, rounds)

    def measure(folder: Path) -> Iterator[Report]:
        report = Report(title="Requests of one call of 1 ms each; us of CPU a request")
        report.columns = ("slots", "way", "per s", *PARTS)
        for slots in SLOTS[:1] if smoke else SLOTS:
            for (label, way), figures in _of_slots(folder, slots, requests, rounds).items():
                rate, *parts = (
                    statistics.median(figure[part] for figure in figures) for part in ("rate", *PARTS)
                )
                report.rows.append((label, way, Figure(rate, "/s"), *(Figure(part, "us") for part in parts)))
        yield report

    print_reports(measure, as_json=as_json)


def _of_slots(
    folder: Path, slots: int, requests: int, rounds: int
) -> Mapping[tuple[str, str], list[dict[str, float]]]:
    """Return the figures of each round, by layout and way."""
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        one = started(stack, folder, f"one{slots}", slots)
        pair = [started(stack, folder, f"{each}{slots}", slots // 2) for each in ("first", "second")]
        layouts = {f"{slots}": [one], f"2 x {slots // 2}": pair}
        for _ in range(rounds):
            for (label, servers), way in product(layouts.items(), WAYS):
                if way != SPREAD or len(servers) > 1:
                    found[label, way].append(measured(servers, way, requests, 2 * slots))
    return found


if __name__ == "__main__":
    typer.run(main)
