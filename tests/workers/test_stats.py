"""The tables of `shapestream stats` and `top`, drawn from statistics of any size."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from shapestream.errors import Forbidden
from shapestream.slices import at_once
from shapestream.telemetry.counters import LastMinute, ServerStatistics
from shapestream_workers.stats import counters_of, drawing


def told(*models: str, us: int = 1000, times: int = 1) -> dict[str, Any]:
    """What a server tells after each model has answered `times` requests in `us`, and refused and failed as many."""
    counters = ServerStatistics()
    minute = LastMinute(counters, 0.0)
    for model in models:
        row = counters.models[model]
        row.arrived += 2 * times
        row.failures["model_error"] += times
        counters.failures.update({"model_error": times, "overloaded": times})
        for histogram in (
            row.queue_us,
            row.gather_us,
            row.run_us,
            row.split_us,
            row.total_us,
            row.batch_requests,
        ):
            histogram.record(us, times)
        row.elements_computed, row.elements_padding, row.preparations = 8 * times, times, times
        row.failed_us = max(1, us)
    queue = {"queued": times, "slots": 16, "free_slots": 4}
    return {
        "last_minute": at_once(minute.to_dict(60.0, models)),
        "scheduler": {**queue, "models": dict.fromkeys(models, queue)},
        "slots": {
            f"w{slot // 2}-4711/{slot % 2}": {"batches": 60 * slot, "busy_s": 30.0} for slot in range(4)
        },
        "uptime_s": 60.0,
        "clients": times,
        "unfinished": times,
        "draining": False,
        "unavailable": {},
    }


def drawn(statistics: dict[str, Any], before: dict[str, Any] | None = None, width: int = 80) -> str:
    """The tables as text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(drawing("ipc://s", statistics, before))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("us", "times"), [(0, 1), (999, 59), (999_999, 10**4), (2**39, 10**8)])
def test_tables_keep_to_80_columns(us: int, times: int) -> None:
    """Every number is whole; a long name gets shorter."""
    lines = drawn(told("m" * 60, "short", us=us, times=times)).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith("mmm")]
    assert ["…" in line for line in rows] == [True, True, False, False], (
        "requests, batches; failures have room"
    )
    assert not any("…" in line for line in lines if line not in rows)


def test_what_the_tables_say() -> None:
    """By model; failures with their codes, and what was refused before any model."""
    lines = [line.split() for line in drawn(told("m", us=1500, times=120)).splitlines()]
    assert ["m", "4", "2", "120", "120", "1.5ms", "1.5ms", "1.5ms", "1.5ms"] in lines
    assert ["m", "2", "1,500", "1,472", "0", "12.5%", "120", "1.5ms", "1.5ms", "1.5ms", "12/16"] in lines
    assert ["m", "model_error", "120"] in lines
    assert ["(refused", "at", "the", "port)", "overloaded", "120"] in lines
    assert ["w1-4711", "2", "5", "50%"] in lines
    assert ["failed", "batches", "held", "slots", "of", "m", "for", "1.5ms"] in lines


def test_workers_between_two_looks() -> None:
    """A slot that came in between counts from nothing; what is impossible is cut."""
    before, now = told("m"), told("m")
    before["uptime_s"], before["slots"] = 50.0, {"w0-4711/0": {"batches": 0, "busy_s": 28.0}}
    lines = [line.split() for line in drawn(now, before).splitlines()]
    assert ["Workers,", "last", "10", "s"] in lines
    assert ["w0-4711", "2", "6", "100%"] in lines


def test_a_key_without_the_role_admin_is_told_so() -> None:
    """The server tells such a key its models, and nothing of what clients do."""

    class Client:
        def statistics(self, *, deadline: float | None) -> dict[str, Any]:
            return {"models": ["m"], "forbidden": "the counters need a key with the role admin"}

    with pytest.raises(Forbidden, match="forbidden: the counters need a key with the role admin"):
        counters_of(Client(), "tcp://x")  # type: ignore[arg-type]


def test_no_name_moves_the_cursor() -> None:
    """Names are of workers' and models' making."""
    assert "\x1b" not in drawn(told("\x1b[2Jm\r\n")) + drawn({**told(), "unavailable": {"m": "\x1b[0m"}})
    assert "?[2Jm??" in drawn(told("\x1b[2Jm\r\n"))


@pytest.mark.parametrize("exponent", range(-3, 13))
def test_rates_and_times_keep_to_six_characters(exponent: int) -> None:
    """As far as one expects them."""
    for digit in (1, 9.4, 9.96, 9.996, 9.9996):
        statistics = told("m")
        minute = statistics["last_minute"]
        minute["seconds"] = 1.0
        row = minute["models"]["m"]
        row["arrived"], row["total_us"]["p50"] = digit * 10.0**exponent, round(digit * 10**exponent)
        cells = next(line.split() for line in drawn(statistics, width=200).splitlines() if line[:2] == "m ")
        _, rate, _, _, _, _, median, _, _ = cells
        assert len(rate) <= 6
        assert len(median) <= (6 if exponent < 10 else 9)
