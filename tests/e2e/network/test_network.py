"""Bad networks between clients, the server and its workers: every request ends once, with its own right answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import pytest
import trio
from tests.e2e.chaos.client import Load
from tests.e2e.chaos.stage import running_ledger
from tests.e2e.chaos.witness import Witness
from tests.e2e.network.faults import FAULTS, SILENCE_S, Fault, misbehave
from tests.e2e.network.proxy import DOWN, UP, Proxy

import shapestream

pytestmark = pytest.mark.e2e

CONFIG = """\
    server:
      listen: [ipc://s.sock, "tcp://127.0.0.1:*"]
      worker_listen: "tcp://127.0.0.1:*"
      heartbeat_s: 0.2
      client_silence_s: 2
      worker_silence_s: 1.0
    models:
      - name: checked
        function: tests.e2e.chaos.model:checked
        inputs: {x: {shape: "batch:1..8, n:8..100000", element_type: i64}}
        outputs: {y: {shape: "batch, n", element_type: i64, rule: rows}}
        trust: true   # a proof, and measuring, would be noted as well
        calibration_s: 0
"""
PATIENCE_S = 180.0
# Numbers of a row: inside the header; a copied frame; a frame that is passed on without a copy.
LENGTHS = (3, 3, 3, 500, 20_000)
TASKS = 12
# A request whose attempts are lost is tried three times; then its client would hear `worker_lost`.
MOST_RUNS = 3
# Between a slot's look at its clock and the model's lie microseconds, beside what it waits for a CPU, which the model notes.
# A host that takes the CPU just then makes single calls late, by 63 ms on two cores with a load of 14. Without the
# protocol's care 15 and more calls of a test are later than this, by up to 260 ms.
LATE_S = 0.1
MOST_LATE = 4
ROUNDS = 5
_numbers = count(1)
"""Of clients."""


@pytest.fixture(scope="module")
def ledger(module_workplace: Any) -> Iterator[Witness]:
    """The ledger of all tests of this file; what is started later finds it."""
    with running_ledger(str(module_workplace.folder / "ledger")) as witness:
        yield witness


@pytest.fixture(scope="module")
def served(ledger: Witness, module_workplace: Any) -> Any:
    """One server for all tests that leave its worker alone: it survives all that."""
    served = module_workplace.serve(CONFIG + "    workers: [{count: 1, slots: 2, threads: 1}]\n")
    served.wait_for("workers ready")
    return served


def port(served: Any, side: str) -> int:
    """The TCP port at which the server listens for clients (`listen`) or for workers (`workers`)."""
    (ready,) = served.events("server ready")
    (address,) = (address for address in ready[side] if address.startswith("tcp://"))
    return int(address.rpartition(":")[2])


@asynccontextmanager
async def connected(
    *proxies: Proxy, to: str | None = None, **options: Any
) -> AsyncIterator[shapestream.Client]:
    """A client of the server, through the first of these proxies unless it is told where `to`."""
    async with trio.open_nursery() as nursery:
        for proxy in proxies:
            await nursery.start(proxy.run)
        with trio.fail_after(PATIENCE_S):
            async with shapestream.connect(to or proxies[0].address, **options) as client:
                yield client
        nursery.cancel_scope.cancel()


def new_load(ledger: Witness, **options: Any) -> Load:
    """Requests without a deadline, unless it is given, of a client of their own; several wait in each slot all the time."""
    options = {"lengths": LENGTHS, "deadlines_s": (None,), "work_us": (4_000, 4_001), **options}
    options |= {"pause_s": 0.0, "once_share": 0.0}
    return Load(next(_numbers), 1, ledger, **options)


@asynccontextmanager
async def under_load(load: Load, client: shapestream.Client) -> AsyncIterator[None]:
    """Requests all the while; at the end no new ones, and all of them have ended."""
    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(load.ask_on, client)
        yield
        load.stopping.set()


def all_right_at_once(ledger: Witness, load: Load) -> None:
    """Every request got its own answer, once, and ran once."""
    told = ledger.ask("summary", client=load.number)
    requests = told["requests"]
    assert ({}, {"ok": requests}, {"1": requests}) == (
        told["violations"],
        told["ends"],
        told["runs_per_request"],
    )


@pytest.mark.parametrize(("fault", "times"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_connection_that_fails_again_and_again_loses_no_request(
    served: Any, ledger: Witness, fault: Fault, times: int
) -> None:
    """Each request gets its own right answer, once, whatever becomes of the connections under it."""
    load = new_load(ledger)

    async def main() -> None:
        proxy = Proxy(port(served, "listen"))
        async with connected(proxy, silence=SILENCE_S) as client, under_load(load, client):
            await misbehave([proxy], fault, times, load)

    trio.run(main)
    all_right_at_once(ledger, load)


@pytest.fixture(scope="module")
def without_workers(ledger: Witness, tmp_path_factory: pytest.TempPathFactory, module_workplace: Any) -> Any:
    """A server that waits for workers."""
    text = CONFIG.replace("s.sock", "w.sock") + "    workers: []\n"
    return module_workplace.serve(module_workplace.write(text, "workers.yaml"))


@pytest.mark.parametrize(("fault", "times"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_worker_whose_connection_fails_again_and_again_loses_no_request(
    without_workers: Any, workplace: Any, ledger: Witness, fault: Fault, times: int
) -> None:
    """Two workers behind a proxy each, which misbehave in turn: every request gets its own right answer, once.

    Where faults come this fast, one request may be lost three times: that is answered honestly, and rare.
    """
    served, load = without_workers, new_load(ledger)
    joined = len(served.events("worker joined"))

    async def main() -> None:
        proxies = [Proxy(port(served, "workers")) for _ in range(2)]
        address = f"ipc://{served.folder}/w.sock"
        async with connected(*proxies, to=address) as client:
            for proxy in proxies:
                workplace.start("worker", str(served.config), "--connect", proxy.address)
            await trio.to_thread.run_sync(served.wait_for, "worker joined", joined + 2)
            async with under_load(load, client):
                await misbehave(proxies, fault, times // 2, load)

    trio.run(main)
    told = ledger.ask("summary", client=load.number)
    lost = told["ends"].pop("worker_lost", 0)
    assert ({}, ["ok"]) == (told["violations"], list(told["ends"]))
    assert lost <= told["requests"] / 50
    assert max(map(int, told["runs_per_request"])) <= MOST_RUNS


def test_a_slow_and_uneven_network_costs_time_only(served: Any, ledger: Witness) -> None:
    """Delays that vary: one connection, no request is sent twice, each is run once."""
    proxy, load = Proxy(port(served, "listen")), new_load(ledger)
    for conditions in proxy.conditions.values():
        conditions.delay_s, conditions.jitter_s = 0.03, 0.05

    async def main() -> None:
        async with connected(proxy) as client, under_load(load, client):
            await load.more_ends(120)

    trio.run(main)
    all_right_at_once(ledger, load)
    assert 1 == proxy.accepted


def test_messages_that_come_one_byte_at_a_time_are_the_same_messages(served: Any, ledger: Witness) -> None:
    """Greeting, requests and answers in packets of one byte."""
    # Some within the header, and some in a frame of its own; each byte costs two tasks a turn.
    proxy, load = Proxy(port(served, "listen")), new_load(ledger, lengths=(3, 150))
    for conditions in proxy.conditions.values():
        conditions.piece_bytes = 1

    async def main() -> None:
        async with connected(proxy) as client:
            async with trio.open_nursery() as asking:
                for _ in range(4):
                    asking.start_soon(load.ask, client)
            (passage,) = proxy.passages
            assert min(passage.packets[UP], passage.packets[DOWN]) > 1_500

    trio.run(main)
    all_right_at_once(ledger, load)


@pytest.mark.parametrize(
    "what", ["delay", "stall", "stopped server", pytest.param("stopped worker", marks=pytest.mark.thorough)]
)
def test_nothing_is_started_after_its_deadline_however_long_it_was_on_its_way(
    served: Any, ledger: Witness, what: str
) -> None:
    """What a network, or a process that stands still, takes of a deadline's time is not given again."""
    (worker,) = served.workers().values()
    proxy, load = Proxy(port(served, "listen")), new_load(ledger, deadlines_s=(0.15,))
    for conditions in proxy.conditions.values():
        conditions.delay_s = 0.04 if what == "delay" else 0.0

    async def main() -> None:
        async with connected(proxy, silence=3 * SILENCE_S) as client:
            async with under_load(load, client):
                rounds = 0
                while rounds < ROUNDS or not shows_something(
                    what, ledger.ask("summary", client=load.number)["ends"]
                ):
                    rounds += 1
                    await trio.sleep(0.3)
                    with interrupted(what, proxy, served.pid, worker, ledger):
                        await trio.sleep(0.4)
            await trio.sleep(0.5)  # what nobody waits for any more would run now

    trio.run(main)
    told = ledger.ask("summary", client=load.number)
    # A machine with many times its work lets any process wait for a second: how many start late says what was forgotten.
    assert {"started_late"} >= told["violations"].keys()
    assert {"ok", "deadline_exceeded", "overloaded"} >= told["ends"].keys()
    late = [seconds for seconds in ledger.ask("late_starts_s", client=load.number) if seconds > LATE_S]
    assert late[MOST_LATE:] == []


def shows_something(what: str, ends: dict[str, int]) -> bool:
    """Whether enough was answered, and enough came too late."""
    return ends.get("ok", 0) > 20 and (what == "delay" or ends.get("deadline_exceeded", 0) >= 20)


@contextmanager
def interrupted(what: str, proxy: Proxy, server: int, worker: int, ledger: Witness) -> Iterator[None]:
    """Somebody stands still for the time of the block."""
    stopped = {"stopped server": server, "stopped worker": worker}.get(what)
    since = time.monotonic()
    if stopped is not None:
        os.kill(stopped, signal.SIGSTOP)
    elif what == "stall":
        proxy.stall(UP)
    try:
        yield
    finally:
        proxy.resume()
        if stopped is not None:
            os.kill(stopped, signal.SIGCONT)
            ledger.tell("paused", since=since, until=time.monotonic())
