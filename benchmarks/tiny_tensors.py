"""`python -m benchmarks.tiny_tensors`: what a request costs when the model costs nothing.

[1, 16] float32 goes through an identity, and every answer is checked. Beside it are a bare echo, and an echo with an event
loop and a thread that runs the calls (`floors.py`); with `--peer` also an identity of the peer (`peer.py`), one request at a
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import trio
import typer

import shapestream
from benchmarks import floors, peer
from benchmarks.models import TINY, TINY_WIDTH, Engine, write_configuration
from benchmarks.processes import Child, child_process
from benchmarks.raw_client import RawClient, connect_dealer, echo_round
from benchmarks.report import Figure, Report, print_reports
from benchmarks.rounds import Contender, run_rounds
from shapestream import blocking

OUTSTANDING = 64
# Aims, in microseconds of server CPU per request.
AIM_ALONE_US = 60.0
AIM_STREAM_US = 30.0
AIM_PEER = 1.0
"""The rate of one per message / the peer's."""
SLOT_ECHO = "echo with a slot's thread"


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


@dataclass(frozen=True, slots=True)
class _PeerCpu:
    """The CPU time of the peer's processes together."""

    peer: peer.Peer

    def cpu_s(self) -> float:
        """Return the time of all."""
        return self.peer.cpu_s()

    def children_cpu_s(self) -> float:
        """Return nothing more: `cpu_s` has all."""
        return 0.0


def _peer_contender(stack: ExitStack, folder: Path, requests: int) -> Contender:
    payloads = _payloads(max(requests, OUTSTANDING))
    running = stack.enter_context(peer.serving(folder, None, "rows", workers=1, rows=1, example=payloads[0]))

    def run(count: int) -> None:
        with running.connect() as client:
            for place, answer in client.stream(payloads[:count], OUTSTANDING):
                if answer != payloads[place]:
                    raise AssertionError(f"{peer.NAME}: answer {place} differs")

    return Contender(name=peer.NAME, run=run, server=_PeerCpu(running), requests=requests)


def _slot_echo(stack: ExitStack, folder: Path, requests: int) -> Contender:
    """An event loop and a slot's thread that unpack and pack each message, and nothing else."""
    address = f"ipc://{folder}/slot-echo.sock"
    child = stack.enter_context(
        child_process(["-m", "benchmarks.floors", "inproc", address], log=folder / "slot-echo.log")
    )
    dealer = stack.enter_context(connect_dealer(address))

    def run(count: int) -> None:
        floors.ask_in_stream(dealer, _payloads(count), per_message=1, outstanding=OUTSTANDING)

    return Contender(name=SLOT_ECHO, run=run, server=child, requests=requests)


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
        _slot_echo(stack, folder, requests),
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


def measure(folder: Path, *, requests: int, rounds: int, with_peer: bool = False) -> Report:
    """Runs everything; `requests` per contender and round."""
    with ExitStack() as stack:
        contenders = _contenders(stack, folder, requests)
        if with_peer:
            contenders.append(_peer_contender(stack, folder, requests))
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
        to_peer = []
        if with_peer:
            aim_peer = AIM_PEER if contender.name == "in-process, one per message" else None
            to_peer = [Figure(contender.ratio_of_rates(by_name[peer.NAME]), "x", at_least=aim_peer)]
        report.rows.append(
            (
                contender.name,
                Figure(statistics.median(contender.server_us), "us", at_most=aim_us),
                Figure(statistics.median(contender.workers_us), "us"),
                Figure(contender.ratio_of_rates(yardstick), "x", at_least=aim_ratio),
                Figure(contender.ratio_of_rates(by_name[SLOT_ECHO]), "x"),
                *to_peer,
                Figure(contender.rate, "/s"),
            )
        )
    columns = ["way", "server us", "workers us", "/ echo", "/ slot echo", "per s"]
    if with_peer:
        columns.insert(-1, f"/ {peer.NAME}")
    report.columns = tuple(columns)
    return report


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    with_peer: Annotated[bool, typer.Option("--peer", help=peer.OPTION_HELP)] = False,
) -> None:
    """Measure tiny tensors through a model that costs nothing."""
    if with_peer:
        peer.demand_environment()
    requests, rounds = (400, 1) if smoke else (16_000, rounds)
    print_reports(
        lambda folder: [measure(folder, requests=requests, rounds=rounds, with_peer=with_peer)],
        as_json=as_json,
    )


if __name__ == "__main__":
    typer.run(main)
