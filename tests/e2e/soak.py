"""`make soak`: does anything grow while a server is used, and misused, for a long time?

    this process: clients, a proxy that breaks their connections          server          two workers

Every answer is compared. Clients stream, come and go, withdraw, send what fails and what is too late; every few seconds
the connections of one of them are reset. Resident memory and open file descriptors of the server, of each worker and of
this process are sampled meanwhile. The run fails if one of them grows (`slopes.py` says when), a process was replaced, or
an answer was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import trio
from tests.e2e.conftest import Served, Workplace
from tests.e2e.forgetful_server import LEAK
from tests.e2e.interruption import obey
from tests.e2e.network.proxy import Proxy
from tests.e2e.slopes import Trend, trend

import shapestream

CONFIG = """\
    server:
      listen: [ipc://s.sock, "tcp://127.0.0.1:*"]
    models:
      - name: m
        function: soaked:{function}
        inputs: {{x: {{shape: "batch:1..16, n:1..20000", element_type: f32}}}}
        outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
        trust: true
        calibration_s: 0
    workers: [{{count: 2, slots: 1, threads: 1}}]
"""
# What a process may grow by between the end of the warm-up and the end of the run, however long that is: the allocator
# meets its worst moment late (2.3 MB were seen in a run of 45 s, and less in longer ones). A leak passes it, sooner or
# later: in an hour, one of 2.4 KB a second, some five bytes per request. What the server keeps of requests that ended is
# full by then (forgetful_server.py).
MOST_GROWTH_MB = 5.0
MOST_GROWTH_FDS = 2.0
SIZES = (1, 7, 64, 500, 5_000, 20_000)
PAUSE_S = 0.004


class Forgetful(Served):
    """A server whose stories and kept replies are full before the warm-up is over."""

    MODULE = "tests.e2e.forgetful_server"


@dataclass(slots=True)
class Samples:
    """Of one process."""

    process: psutil.Process
    resident_mb: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    def take(self) -> None:
        """One more."""
        self.resident_mb.append(self.process.memory_info().rss / 1e6)
        self.descriptors.append(float(self.process.num_fds()))


class Soak:
    """One run."""

    def __init__(self, served: Served, duration_s: float, seed: int) -> None:
        self._served = served
        self._duration_s = duration_s
        self._chance = random.Random(seed)
        self._started = time.monotonic()
        self.ends: Counter[str] = Counter()
        self.wrong = 0
        self.resets = 0
        self.visitors = 0
        self.times_s: list[float] = []
        workers = served.workers()
        pids = {"server": served.pid, **workers, "clients": None}
        self.processes = {name: Samples(psutil.Process(pid)) for name, pid in pids.items()}

    async def run(self) -> None:
        """Until the time is over."""
        (ready,) = self._served.wait_for("server ready")
        (tcp,) = (address for address in ready["listen"] if address.startswith("tcp://"))
        proxy = Proxy(int(tcp.rpartition(":")[2]))
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.run)
            nursery.start_soon(self._stay, self._served.address)
            nursery.start_soon(self._stay, proxy.address)
            nursery.start_soon(self._visit)
            nursery.start_soon(self._break, proxy)
            await self._sample()
            nursery.cancel_scope.cancel()

    async def _sample(self) -> None:
        interval_s = min(10.0, max(0.25, self._duration_s / 200))
        while (now := time.monotonic() - self._started) < self._duration_s:
            self.times_s.append(now)
            for samples in self.processes.values():
                samples.take()
            await trio.sleep(interval_s)

    async def _stay(self, address: str) -> None:
        """A client that stays for the whole run."""
        async with shapestream.connect(address, silence=2.0) as client, trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(self._ask_on, client)

    async def _ask_on(self, client: shapestream.Client) -> None:
        while True:
            await self._ask(client)
            await trio.sleep(PAUSE_S)

    async def _ask(self, client: shapestream.Client) -> None:
        chance = self._chance
        x = np.full((chance.randint(1, 4), chance.choice(SIZES)), chance.randint(0, 1000), np.float32)
        kind = chance.random()
        if kind < 0.02:
            x[0, 0] = -1  # the model fails
        deadline_s = 0.001 if 0.02 < kind < 0.04 else None
        patience_s = 0.002 if 0.04 < kind < 0.08 else float("inf")
        with trio.move_on_after(patience_s) as withdrawn:
            try:
                result = await client.infer("m", {"x": x}, deadline=deadline_s)
            except shapestream.RequestError as error:
                self.ends[error.code] += 1
            else:
                self.ends["result"] += 1
                self.wrong += not np.array_equal(result["y"], x + 1)
        self.ends["withdrawn"] += withdrawn.cancelled_caught

    async def _visit(self) -> None:
        """Clients that come, ask a little, and leave with something unfinished."""
        while True:
            async with shapestream.connect(self._served.address) as client:
                items = ({"x": np.full((1, 100), number, np.float32)} for number in range(1000))
                async with client.stream("m", items, max_in_flight=16) as results:
                    for _ in range(20):
                        self.wrong += (await anext(results))["y"][0, 0] < 1
                        self.ends["result"] += 1
            self.visitors += 1
            await trio.sleep(0.2)

    async def _break(self, proxy: Proxy) -> None:
        while True:
            await trio.sleep(self._chance.uniform(0.5, 3.0))
            for passage in list(proxy.passages):
                passage.reset()
                self.resets += 1

    def report(self) -> bool:
        """Prints the figures; whether all is well."""
        requests = self.ends.total()
        print(
            f"{requests:,} requests in {self._duration_s:g} s: {dict(self.ends.most_common())}; {self.wrong} wrong"
        )
        print(f"{self.visitors} clients came and left, {self.resets} connections were reset")
        same = self._served.workers().keys() | {"server", "clients"} == self.processes.keys()
        busy = self.ends["result"] > requests / 2 and self.visitors > 0 and self.resets > 0
        well = not self.wrong and same and busy
        if not same:
            print(f"other processes than at the beginning: {self._served.workers()}")
        print(f"{'':>12}  {'resident':>10}  {'growth':>10}  {'slope':>12}  {'files':>6}  {'growth':>7}")
        for name, samples in self.processes.items():
            memory = trend(self.times_s, samples.resident_mb)
            files = trend(self.times_s, samples.descriptors)
            grows = memory.grows(by_more_than=MOST_GROWTH_MB) or files.grows(by_more_than=MOST_GROWTH_FDS)
            print(_row(name, memory, files) + ("  GROWS" if grows else ""))
            well = well and not grows
        print("nothing grows" if well else "FAILED")
        return well


def _row(name: str, memory: Trend, files: Trend) -> str:
    return (
        f"{name:>12}  {memory.level:7.1f} MB  {memory.growth:7.2f} MB  {memory.slope * 3600:7.1f} MB/h"
        f"  {files.level:6.0f}  {files.growth:7.1f}"
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--duration", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", choices=["model", "server"], help="what leaks: the run must fail")
    options = parser.parse_args()
    # A short name: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ss-soak-") as folder:
        place = Workplace(Path(folder))
        try:
            function = "plus_one_and_a_leak" if options.leak == "model" else "plus_one"
            if options.leak == "server":
                os.environ[LEAK] = "1"
            served = Forgetful(place.folder, place.write(CONFIG.format(function=function)), "serve")
            place.commands.append(served)
            served.wait_for("workers ready")
            soak = Soak(served, options.duration, options.seed)
            well = False
            try:
                trio.run(soak.run)
            except* psutil.NoSuchProcess:
                print(f"a process ended by itself; the server's log:\n{served.log.read_text()[-4000:]}")
            else:
                well = soak.report()
            return 0 if well else 1
        finally:
            for command in place.commands:
                command.kill()


if __name__ == "__main__":
    obey()
    sys.exit(main())
