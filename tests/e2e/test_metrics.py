"""The metrics for alerts and autoscaling, as a scrape of real servers reads them while their state is forced."""

from __future__ import annotations

import os
import platform
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from tests.e2e.admin import ADMIN, DIALS_IN, METERED, MODELS, port_of, scrape
from tests.e2e.conftest import until

from shapestream.errors import Overloaded

pytestmark = pytest.mark.e2e


class Scraped:
    """One answer of `/metrics`, its series by names without the prefix."""

    def __init__(self, port: int) -> None:
        self._series = {name.removeprefix("shapestream_"): value for name, value in scrape(port).items()}

    def __getitem__(self, name: str) -> float:
        return self._series[name]

    def labelled(self, name: str) -> dict[str, float]:
        """The series of a metric by their labels."""
        start = f"{name}{{"
        return {
            key.removeprefix(start).rstrip("}"): value
            for key, value in self._series.items()
            if key.startswith(start)
        }


def test_what_waits_is_seen_while_it_waits(workplace: Any) -> None:
    """Age of the oldest request and seconds in the queue grow behind a call that does not end; then both stand still."""
    served = workplace.serve(MODELS.replace("SERVER", ADMIN.replace("}", ", max_queued_requests: 2}")))
    port = port_of(served)
    before = Scraped(port)
    of_gated = 'model="gated"'
    assert (0.0, 0.0) == (
        before[f"queue_oldest_seconds{{{of_gated}}}"],
        before[f"queue_seconds_total{{{of_gated}}}"],
    )
    assert (1.0, 1.0, 2.0, 2.0 * 2**30) == (
        before["slots_in_all"],
        before[f'build_info{{python="{platform.python_version()}",version="{version("shapestream")}"}}'],
        before["queue_limit_requests"],
        before["queue_limit_bytes"],
    )
    with served.client() as client, ThreadPoolExecutor() as beside, ExitStack() as at_the_end:
        at_the_end.callback(
            workplace.open_gate
        )  # also where an assertion fails, or its threads would wait for ever

        def send() -> Future[Any]:
            return beside.submit(client.infer, "gated", {"x": np.ones((8, 2), np.float32)})

        sent = [send()]
        workplace.wait_entered()
        sent += [send(), send()]
        until("a queue", lambda: Scraped(port)[f"requests_queued{{{of_gated}}}"] == 2)
        refused = send()
        with pytest.raises(Overloaded):
            refused.result()
        first = Scraped(port)
        second = until(
            "time",
            lambda: (
                (now := Scraped(port))["slots_busy_seconds_total"] > first["slots_busy_seconds_total"] + 0.1
                and now
            ),
        )
        assert 1.0 == second['requests_overloaded_total{cause="queue"}']
        ages = [seen[f"queue_oldest_seconds{{{of_gated}}}"] for seen in (first, second)]
        waited = [seen[f"queue_seconds_total{{{of_gated}}}"] for seen in (first, second)]
        assert 0.0 < ages[0] < ages[1] - 0.05
        # Two requests wait, so their seconds grow twice as fast as the age of the older one.
        assert 2 * (ages[1] - ages[0]) == pytest.approx(waited[1] - waited[0], rel=1e-3)
        assert ages[1] < waited[1] < 2 * ages[1] + 1e-6  # they may have come together
        workplace.open_gate()
        for future in sent:
            future.result()
        ended = until("the end", lambda: not (now := Scraped(port))["requests_pending"] and now)
        again = Scraped(port)
    for name in (f"queue_seconds_total{{{of_gated}}}", "slots_busy_seconds_total"):
        assert second[name] <= ended[name] == again[name]
    assert 0.0 == again[f"queue_oldest_seconds{{{of_gated}}}"]
    assert (
        sum(again.labelled("requests_overloaded_total").values())
        == again['requests_total{model="gated",outcome="overloaded"}']
    )


def test_the_queue_is_told_in_seconds_of_each_slot(workplace: Any) -> None:
    """The metric to scale on is the predicted seconds of the queue divided by the slots, once a batch was measured."""
    config = METERED.replace("in_process: true", "in_process: {slots: 2}").replace(
        "gated:double", "gated:double_slowly"
    )
    served = workplace.serve(config.replace("gated:double_slowly_when_open", "gated:double_when_open"))
    port = port_of(served)
    x = {"x": np.ones((8, 2), np.float32)}
    with served.client() as client, ThreadPoolExecutor() as beside:
        for _ in range(3):
            client.infer("other", x)
        held = [beside.submit(client.infer, "gated", x) for _ in range(2)]
        until("two calls", lambda: Scraped(port)['slots_free{model="other"}'] == 0)
        queued = [beside.submit(client.infer, "other", x) for _ in range(4)]
        seen = until(
            "a queue", lambda: (now := Scraped(port))['requests_queued{model="other"}'] == len(queued) and now
        )
        seconds = seen['queued_predicted_seconds{model="other"}']
        assert 0.0 < seconds
        # The models share both slots, so what waits for one is waited for by the other.
        assert {
            f'model="{name}"': pytest.approx(seconds / 2) for name in ("gated", "other")
        } == seen.labelled("queued_predicted_seconds_per_slot")
        workplace.open_gate()
        for future in [*held, *queued]:
            future.result()


def test_worker_processes_are_told_by_their_entry(workplace: Any) -> None:
    """What is configured, what serves, its memory, and restarts; one that dialled in is counted when it leaves."""
    served = workplace.serve(METERED.replace("in_process: true", "workers: [{count: 1}, {count: 2}]"))
    served.wait_for("workers ready")
    port = port_of(served)
    seen = Scraped(port)
    assert {'group="0"': 1.0, 'group="1"': 2.0} == seen.labelled("workers_configured")
    assert {'group="0"': 1.0, 'group="1"': 2.0} == seen.labelled("workers_serving")
    assert {'group="0"': 0.0, 'group="1"': 0.0} == seen.labelled("worker_restarts_total")
    memory = seen.labelled("worker_memory_bytes")
    assert all(2**24 < memory[group] < 2**34 for group in ('group="0"', 'group="1"'))
    os.kill(served.workers()["w2"], signal.SIGKILL)
    until("the end", lambda: Scraped(port).labelled("workers_serving")['group="1"'] == 1)
    until("another", lambda: Scraped(port).labelled("workers_serving")['group="1"'] == 2)
    assert {'group="0"': 0.0, 'group="1"': 1.0} == Scraped(port).labelled("worker_restarts_total")


def test_ends_of_workers_that_dialled_in_are_counted(workplace: Any) -> None:
    """One that was told to end has drained, one that was killed is lost; neither is an entry of `workers`."""
    served = workplace.serve(DIALS_IN.replace("SERVER", ADMIN.replace("}", ", worker_listen: ipc://w.sock}")))
    port = port_of(served)
    assert {'how="drained"': 0.0, 'how="lost"': 0.0} == Scraped(port).labelled("dialled_in_worker_ends_total")
    for number, ends in ((signal.SIGTERM, (1.0, 0.0)), (signal.SIGKILL, (1.0, 1.0))):
        worker = workplace.start("worker", str(served.config))
        until("a slot", lambda: Scraped(port)["slots_in_all"] == 1)
        worker.send(number)
        until("no slot", lambda: Scraped(port)["slots_in_all"] == 0)
        told = Scraped(port).labelled("dialled_in_worker_ends_total")
        assert ends == (told['how="drained"'], told['how="lost"'])
    assert {} == Scraped(port).labelled("worker_ends_total")
