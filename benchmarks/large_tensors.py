"""Throughput of 1 MiB tensors over ipc, against bare pyzmq: one hop, and two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.models import LARGE, LARGE_WIDTH, write_configuration
from benchmarks.processes import child_process
from benchmarks.raw_client import RawClient, connect_dealer, echo_round
from benchmarks.report import Figure, Report
from benchmarks.rounds import Contender, run_rounds
from shapestream import blocking

OUTSTANDING = 8
AIM_RATIO = 0.8


def _payloads(count: int) -> list[bytes]:
    """`count` payloads, of which a few are distinct, so that a mixed-up answer is noticed and memory stays small."""
    distinct = [
        np.random.default_rng(seed).random(LARGE_WIDTH, np.float32).tobytes()
        for seed in range(2 * OUTSTANDING + 1)
    ]
    return [distinct[number % len(distinct)] for number in range(count)]


def measure(folder: Path, *, requests: int, rounds: int) -> Report:
    """Runs everything; `requests` per contender and round."""
    payloads = _payloads(max(64, requests))
    with ExitStack() as stack:

        def bare(label: str, *arguments: str) -> Contender:
            child = stack.enter_context(
                child_process(["-m", "benchmarks.bare_echo", *arguments], log=folder / f"{label}.log")
            )
            dealer = stack.enter_context(connect_dealer(arguments[1]))
            run = _echo(dealer, payloads)
            return Contender(name=label, run=run, server=child, requests=requests)

        def served(label: str, workers: int | None) -> Contender:
            # Two slots: while one runs, the other's tensors are on their way.
            path, address = write_configuration(folder, label=label, workers=workers, slots=2)
            child = stack.enter_context(
                child_process(["-m", "shapestream_workers", "serve", str(path)], log=folder / f"{label}.log")
            )
            with blocking.connect(address, connect_timeout=60) as client:
                client.signature(LARGE)

            def run(count: int) -> None:
                with RawClient(address, LARGE) as client:
                    client.round(payloads[:count], (1, LARGE_WIDTH), OUTSTANDING)

            return Contender(name=label, run=run, server=child, requests=requests)

        echo_address = f"ipc://{folder}/large-echo.sock"
        one_hop = bare("bare-echo", "echo", echo_address)
        two_hops = bare("bare-two-hop-relay", "relay", f"ipc://{folder}/large-relay.sock", echo_address)
        in_process, one_worker = served("large-in-process", None), served("large-one-worker", 1)
        contenders = [one_hop, in_process, two_hops, one_worker]
        run_rounds(contenders, rounds)
    report = Report(title=f"1 MiB tensors over ipc, {OUTSTANDING} outstanding")
    report.columns = ("way", "/ bare pyzmq", "per s")
    for contender, yardstick in zip(contenders, [one_hop, one_hop, two_hops, two_hops], strict=True):
        aim = None if contender is yardstick else AIM_RATIO
        ratio = Figure(contender.ratio_of_rates(yardstick), "x", at_least=aim)
        report.rows.append((contender.name, ratio, Figure(contender.rate, "/s")))
    return report


def _echo(dealer: object, payloads: list[bytes]) -> Callable[[int], None]:
    return lambda count: echo_round(dealer, payloads[:count], OUTSTANDING)  # type: ignore[arg-type]  # a socket
