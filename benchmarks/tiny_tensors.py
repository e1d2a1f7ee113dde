"""What a request costs when the model costs nothing: [1, 16] float32 through an identity, every answer checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio

import shapestream
from benchmarks.models import TINY, TINY_WIDTH, Engine, write_configuration
from benchmarks.processes import Child, child_process
from benchmarks.raw_client import RawClient, connect_dealer, echo_round
from benchmarks.report import Figure, Report
from benchmarks.rounds import Contender, run_rounds
from shapestream import blocking

OUTSTANDING = 64
# Aims, in microseconds of server CPU per request.
AIM_ALONE_US = 60.0
AIM_STREAM_US = 30.0


def _payloads(count: int) -> list[bytes]:
    """As many different rows."""
    table = np.arange(count * TINY_WIDTH, dtype=np.float32).reshape(count, TINY_WIDTH)
    return [row.tobytes() for row in table]


def stream_round(address: str, count: int, outstanding: int = OUTSTANDING) -> None:
    """Sends `count` rows through the SDK's `stream`; compares every answer."""

    def rows() -> Iterator[dict[str, np.ndarray]]:
        for number in range(count):
            yield {"x": table[number : number + 1]}

    async def main() -> None:
        received = 0
        async with shapestream.connect(address) as client:
            async with client.stream(TINY, rows(), max_in_flight=outstanding) as results:
                async for result in results:
                    # Comparing bytes is a fifth of the cost of comparing arrays.
                    if result["y"].tobytes() != expected[received]:
                        raise AssertionError(f"answer {received} differs")
                    received += 1
        if received != count:
            raise AssertionError(f"{received} answers to {count} requests")

    table = np.arange(count * TINY_WIDTH, dtype=np.float32).reshape(count, TINY_WIDTH)
    expected = _payloads(count)
    trio.run(main)


def _await_server(address: str) -> None:
    with blocking.connect(address, connect_timeout=60) as client:
        client.infer(TINY, {"x": np.zeros((1, TINY_WIDTH), np.float32)}, deadline=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    label: str
    engine: Engine
    workers: int | None


_SERVERS = (
    _Server(label="in-process", engine="function", workers=None),
    _Server(label="openvino", engine="openvino", workers=None),
    _Server(label="two-workers", engine="function", workers=2),
)


def _contenders(stack: ExitStack, folder: Path, requests: int) -> list[Contender]:
    echo_address = f"ipc://{folder}/echo.sock"
    echo_arguments = ["-m", "benchmarks.bare_echo", "echo", echo_address]
    echo = stack.enter_context(child_process(echo_arguments, log=folder / "echo.log"))
    dealer = stack.enter_context(connect_dealer(echo_address))

    def bare(outstanding: int) -> Callable[[int], None]:
        return lambda count: echo_round(dealer, _payloads(count), outstanding)

    contenders = [
        Contender(name="bare echo", run=bare(OUTSTANDING), server=echo, requests=requests),
        Contender(name="bare echo, 1 outstanding", run=bare(1), server=echo, requests=requests // 4),
    ]
    for server in _SERVERS:
        contenders += _server_contenders(stack, folder, server, requests)
    return contenders


def _server_contenders(stack: ExitStack, folder: Path, server: _Server, requests: int) -> list[Contender]:
    path, address = write_configuration(
        folder, label=server.label, engine=server.engine, workers=server.workers
    )
    log = folder / f"{server.label}.log"
    child: Child = stack.enter_context(
        child_process(["-m", "shapestream_workers", "serve", str(path)], log=log)
    )
    _await_server(address)

    def alone(outstanding: int) -> Callable[[int], None]:
        def run(count: int) -> None:
            with RawClient(address, TINY) as client:
                client.round(_payloads(count), (1, TINY_WIDTH), outstanding)

        return run

    def contender(kind: str, run: Callable[[int], None], count: int) -> Contender:
        return Contender(name=f"{server.label}, {kind}", run=run, server=child, requests=count)

    return [
        contender("one per message", alone(OUTSTANDING), requests),
        contender("stream", lambda count: stream_round(address, count), requests),
        contender("stream, 256", lambda count: stream_round(address, count, 256), requests),
        contender("1 outstanding", alone(1), requests // 4),
    ]


def measure(folder: Path, *, requests: int, rounds: int) -> Report:
    """Runs everything; `requests` per contender and round."""
    with ExitStack() as stack:
        contenders = _contenders(stack, folder, requests)
        run_rounds(contenders, rounds)
    by_name = {contender.name: contender for contender in contenders}
    echo = by_name["bare echo"]
    report = Report(title="Tiny tensors: [1, 16] float32, 64 outstanding unless said; us of CPU per request")
    aims = {
        "in-process, one per message": (AIM_ALONE_US, None),
        "in-process, stream": (AIM_STREAM_US, 1.0),
    }
    for contender in contenders:
        yardstick = by_name["bare echo, 1 outstanding"] if "1 outstanding" in contender.name else echo
        aim_us, aim_ratio = aims.get(contender.name, (None, None))
        report.rows.append(
            (
                contender.name,
                Figure(statistics.median(contender.server_us), "us", at_most=aim_us),
                Figure(statistics.median(contender.workers_us), "us"),
                Figure(contender.ratio_of_rates(yardstick), "x", at_least=aim_ratio),
                Figure(contender.rate, "/s"),
            )
        )
    report.columns = ("way", "server us", "workers us", "/ echo", "per s")
    return report
