"""`make soak-reloads`: a hundred SIGHUPs under light load, with a poison after each tenth. Does anything fail, or grow?

Honest clients stream all the while, and every answer is compared. After each reload the server's memory, descriptors and
processes are counted. A poison, which crashes its process or hangs in it, has to end two workers and nothing else, and its
like none. The run fails if an honest request does, or a reload, or the protection, or if something grows.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.e2e.conftest import PATIENCE_S, Served, Workplace, until
from tests.e2e.importable.poisonous import CRASH, HANG
from tests.e2e.interruption import obey
from tests.e2e.poison import ENDS, GRACE_S, poisonous
from tests.e2e.slopes import trend

from shapestream import blocking
from shapestream.client.opened_models import Failed

SERVER = ", worker_silence_s: 60"
# What the server may grow by over a run after its warm-up: the allocator meets its worst moment late.
MOST_GROWTH_MB = 5.0
# A batch takes 50 ms. On a machine that stands still for a moment it must not be taken for one that hangs.
HANG_AFTER_S = 10
STREAMED = 4
# Light load: each answered request leaves a story of about 1 KB, which is no growth, until 16,384 are kept.
PAUSE_S = 0.2


class Honest:
    """Requests that must not notice anything, each answer checked, until told to stop."""

    def __init__(self, client: blocking.Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.wrong = 0
        self.error: Exception | None = None

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _requests(self) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        while not self._stop.is_set():
            number += 1
            yield number, {"x": np.full((1, 1 + number % 16), number % 100, np.float32)}
            self._stop.wait(PAUSE_S)

    def _run(self) -> None:
        try:
            with self._client.stream("poisonous", self._requests(), max_in_flight=STREAMED) as results:
                for result in results:
                    self.answered += 1
                    expected = np.full((1, 1 + result.key % 16), 2 * (result.key % 100), np.float32)
                    self.wrong += not np.array_equal(expected, result["y"])
        except Exception as error:  # noqa: BLE001 - told by the report
            self.error = error


@dataclass(slots=True, kw_only=True)
class Report:
    """What was seen."""

    answered: int = 0
    results: list[str] = field(default_factory=list)
    """Of the reloads."""
    problems: list[str] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)


def soak(
    place: Workplace,
    reloads: int,
    *,
    every: int,
    kinds: Sequence[int] = (CRASH, HANG),
    say: Callable[[str], None] = print,
) -> Report:
    """Reload so often, with a poison after each `every`th, of these kinds in turns. Without hangs none is looked for."""
    report = Report()
    hang_after_s = str(HANG_AFTER_S) if HANG in kinds else "off"
    served = place.serve(
        poisonous(slots=1, hang_after_s=hang_after_s, server=SERVER), hang_grace_s=GRACE_S, kept_bytes=1 << 20
    )
    served.wait_for("workers ready")
    server, poisons, deaths = psutil.Process(served.pid), 0, 0
    with served.client() as client, served.client() as other, Honest(client) as honest:
        for number in range(1, reloads + 1):
            served.send(signal.SIGHUP)
            report.results.append(served.wait_for("reload ended", number)[-1]["result"])
            report.processes.append(len(server.children()))
            report.resident_mb.append(server.memory_info().rss / 1e6)
            report.descriptors.append(float(server.num_fds()))
            if number % every == 0:
                poison = kinds[poisons % len(kinds)]
                poisons += 1
                report.problems += _poisoned(
                    served, other, poison, size=poisons, statuses=[ENDS[poison]] * 2, before=deaths
                )
                deaths = len(_deaths(served))
                say(
                    f"{number} reloads, {honest.answered} answers, {deaths} workers died of {poisons} poisons"
                )
            if honest.error is not None:
                break
        answered = honest.answered
        until(
            "answers of the last workers", lambda: honest.error or honest.answered > answered + 2 * STREAMED
        )
    report.answered = honest.answered
    if honest.error is not None or honest.wrong:
        report.problems.append(f"honest requests: {honest.wrong} wrong, {honest.error!r}")
    report.problems += [f"a reload was {result}" for result in report.results if result != "ok"]
    if set(report.processes) != {2}:
        report.problems.append(f"numbers of worker processes: {report.processes}")
    return report


def _deaths(served: Served) -> list[int]:
    return [event["status"] for event in served.events("worker ended") if event["status"] != 0]


def _poisoned(
    served: Served, client: blocking.Client, poison: int, *, size: int, statuses: list[int], before: int
) -> list[str]:
    """Send a poison of this size, and its like; return what went otherwise than promised."""
    problems = []
    for deaths in (len(statuses), 0):
        request = {"x": np.full((1, size), poison, np.float32)}
        with client.stream("poisonous", [request], on_error="yield") as results:
            (result,) = results
        code = result.error.code if isinstance(result, Failed) else "answered"
        before += deaths
        until(f"{before} deaths", lambda before=before: len(_deaths(served)) >= before)
        if code != "poisoned" or _deaths(served)[-2:] != statuses or len(_deaths(served)) != before:
            problems.append(f"poison {poison}: {code}, deaths {_deaths(served)}")
    return problems


def growth(report: Report) -> list[str]:
    """What grew over a long run."""
    times = list(map(float, range(len(report.results))))
    memory, files = trend(times, report.resident_mb), trend(times, report.descriptors)
    problems = []
    if memory.grows(by_more_than=MOST_GROWTH_MB):
        problems.append(f"resident memory grows by {memory.growth:.1f} MB")
    if report.descriptors[-1] > report.descriptors[0]:
        problems.append(
            f"descriptors: {report.descriptors[0]:.0f} at first, {report.descriptors[-1]:.0f} at last"
        )
    print(f"server: {memory.level:.1f} MB, growth {memory.growth:.2f} MB; {files.level:.0f} descriptors")
    return problems


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.reloads", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--reloads", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="reloads between two poisons")
    options = parser.parse_args()
    # A short name: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ss-soak-") as folder:
        place = Workplace(Path(folder))
        try:
            report = soak(place, options.reloads, every=options.every)
            report.problems += growth(report)
        finally:
            for command in place.commands:
                command.kill()
    print(f"{len(report.results)} reloads, {report.answered} answers")
    print("\n".join(report.problems) or "nothing failed, nothing grows")
    return 1 if report.problems else 0


if __name__ == "__main__":
    obey()
    sys.exit(main())
