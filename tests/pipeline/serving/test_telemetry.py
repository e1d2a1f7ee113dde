"""Log lines and counters: what they say, and what they must never say."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from tests.entries import Execute, Failure, ResultEntry, batch_failed
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import Running, memory_serving, scripted_client
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from tests.pipeline.telemetry.runs import ran

from shapestream.slices import at_once
from shapestream.telemetry.counters import Histogram, ServerStatistics
from shapestream.telemetry.logging import (
    LEVELS,
    PRESENT,
    LineBudget,
    LogFormat,
    RateLimit,
    change,
    configure,
)
from shapestream.telemetry.metrics import read_metrics


class Terminal(io.StringIO):
    """A stream that says that a person reads it."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Leaves structlog as other tests expect it."""
    yield
    structlog.reset_defaults()


def test_json_off_a_terminal_and_text_on_one() -> None:
    """`auto` looks at the stream."""
    file, terminal = io.StringIO(), Terminal()
    configure(stream=file)
    structlog.get_logger().info("server ready", listen=("a", "b"))
    line = json.loads(file.getvalue())
    assert ("server ready", ["a", "b"], "info") == (line["event"], line["listen"], line["level"])
    assert "timestamp" in line
    configure(stream=terminal)
    structlog.get_logger().info("server ready")
    assert "server ready" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


def test_formats_can_be_forced() -> None:
    """A terminal may want JSON, a file text."""
    terminal, file = Terminal(), io.StringIO()
    configure(format="json", stream=terminal)
    structlog.get_logger().info("x")
    assert "x" == json.loads(terminal.getvalue())["event"]
    configure(format="pretty", stream=file)
    structlog.get_logger().info("x")
    assert "\x1b" not in file.getvalue()


def test_levels_hide_what_is_below() -> None:
    """The hot path reads a boolean instead of asking."""
    file = io.StringIO()
    configure("warning", stream=file)
    structlog.get_logger().info("hidden")
    structlog.get_logger().warning("shown")
    assert ["shown"] == [json.loads(line)["event"] for line in file.getvalue().splitlines()]
    assert not PRESENT.debug
    configure("debug", stream=file)
    assert PRESENT.debug


def test_level_and_format_change_while_the_process_runs() -> None:
    """The line about it is written where the old or the new level lets it be; what is as it was needs none."""
    file = io.StringIO()
    configure("info", stream=file)
    for level in (*LEVELS, *LEVELS[::-1], "debug"):
        change(level)
        assert (level, level == "debug") == (PRESENT.level, PRESENT.debug)
        for method in LEVELS:
            getattr(structlog.get_logger(), method)(f"{method} at {level}")
    change(format="pretty")
    structlog.get_logger().info("for people")
    *lines, told, people = file.getvalue().splitlines()
    assert "logging changes" in told
    assert "for people" in people
    assert not people.startswith("{")
    written = [json.loads(line) for line in lines]
    changes = [(line["before"][0], line["now"][0]) for line in written if line["event"] == "logging changes"]
    assert [
        ("info", "debug"),
        ("debug", "info"),
        ("info", "warning"),
        ("warning", "info"),
        ("info", "debug"),
    ] == changes
    events = {line["event"] for line in written} - {"logging changes"}
    wanted = {f"{method} at {level}" for place, level in enumerate(LEVELS) for method in LEVELS[place:]}
    assert wanted == events


def test_a_flood_of_one_event_hides_no_other_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event has its own budget, whatever writes it; at `debug` every line is written."""
    now = 0.0
    monkeypatch.setattr("shapestream.telemetry.logging.time", SimpleNamespace(monotonic=lambda: now))
    file = io.StringIO()
    configure(stream=file)
    log = structlog.get_logger()
    for number in range(1000):
        log.warning("flood", number=number)
    log.info("other")
    now += 10.0
    log.warning("flood")
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert ["flood"] * 200 + ["other", "flood"] == [line["event"] for line in lines]
    assert [800] == [line["lines_left_out"] for line in lines if "lines_left_out" in line]
    for _ in range(500):
        change("warning")
        change("info")
    assert 200 >= file.getvalue().count("logging changes")
    change("debug")
    file.truncate(0)
    for _ in range(1000):
        log.warning("flood")
    assert 1000 == file.getvalue().count('"flood"')


def test_tensor_data_never_reaches_a_line() -> None:
    """Whatever holds bytes is replaced by what it is, at any depth."""
    file = io.StringIO()
    configure(stream=file)
    secret = b"secret-secret"
    array = np.frombuffer(secret, np.uint8)
    structlog.get_logger().info(
        "x", a=secret, b=array, c=[memoryview(secret)], d={"e": bytearray(secret)}, f=echo_tensors()
    )
    line = json.loads(file.getvalue())
    assert "secret" not in file.getvalue()
    assert "<13 bytes>" == line["a"]
    assert "115" not in str(line["b"])
    assert "\\x00" not in file.getvalue()


def test_a_line_from_outside_stays_one_line_and_short() -> None:
    """Text of a peer can neither forge a line nor fill the disk."""
    file = io.StringIO()
    configure(stream=file)
    structlog.get_logger().info("client joined", software='x"}\n{"event": "forged"}' + "y" * 100_000)
    assert 1 == file.getvalue().count("\n")
    assert len(file.getvalue()) < 3000


def test_a_stream_that_cannot_be_written_ends_nothing() -> None:
    """A full disk costs log lines, not the server."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    configure(stream=Full())
    structlog.get_logger().error("lost")


@pytest.mark.parametrize("format", ["json", "pretty"])
def test_a_traceback_is_logged_without_variables(format: LogFormat) -> None:  # noqa: A002
    """`exc_info` keeps its traceback, as data in JSON; what the frames hold may be tensors."""
    file = Terminal()
    configure(stream=file, format=format)
    data = "1234" * 2
    try:
        raise ValueError("why")
    except ValueError:
        structlog.get_logger().error("broken", exc_info=True)
    text = file.getvalue()
    assert "test_a_traceback_is_logged" in text
    assert data not in text
    if format == "json":
        assert "ValueError" == json.loads(text)["exception"][0]["exc_type"]


def test_the_rate_limit_counts_what_it_holds_back() -> None:
    """One line per key and interval; the next one says how many were left out."""
    limit = RateLimit(interval_s=1.0)
    assert [0, None, None, 2, 0] == [
        limit.admit("a", 0.0),
        limit.admit("a", 0.5),
        limit.admit("a", 0.9),
        limit.admit("a", 1.5),
        limit.admit("b", 1.5),
    ]


def test_the_rate_limit_is_bounded() -> None:
    """Keys from outside cannot make it grow; the oldest is forgotten."""
    limit = RateLimit()
    for number in range(5000):
        limit.admit(str(number), 0.0)
    assert limit.admit("4999", 0.5) is None
    assert 0 == limit.admit("0", 0.5)


@pytest.mark.parametrize("us", [0, 1, 7, 8, 15, 16, 100, 999, 12_345, 10**6, 10**9])
def test_a_histogram_gives_a_time_back_to_six_percent(us: int) -> None:
    """The buckets widen with the time."""
    histogram = Histogram()
    histogram.record(us)
    assert abs(histogram.to_dict()["p50"] - us) <= us / 16


def test_a_histograms_quantiles() -> None:
    """Ninety fast ones and ten slow ones."""
    histogram = Histogram()
    histogram.record(100, times=90)
    histogram.record(10_000, times=10)
    told = histogram.to_dict()
    assert 90 <= told["p50"] <= told["p90"] <= 110
    assert 9_000 <= told["p95"] <= told["p99"] <= 11_000
    assert 1090.0 == told["mean"]


def test_a_histogram_takes_any_time() -> None:
    """None below zero, none for ever: a clock's mistake is no crash."""
    histogram = Histogram()
    histogram.record(-5)
    histogram.record(2**80)
    told = histogram.to_dict()
    assert 0 == told["p50"]
    assert told["p99"] >= 2**39


def test_shapes_are_counted_up_to_a_bound() -> None:
    """Random shapes cannot make the statistics grow for ever."""
    statistics = ServerStatistics()
    for number in range(10_050):
        statistics.count_batch(ran("m", (number,), useful=number))
    assert 10_000 == statistics.distinct_shapes
    assert 10_050 == statistics.batches


def test_calls_and_padding_are_counted_by_the_requests_real_sizes() -> None:
    """A batch of 5 rows of 10 that took 4 + 2 of 16 computed 96 elements for 50."""
    statistics = ServerStatistics()
    calls = ((1, (4, 16)), (1, (2, 16)))
    statistics.count_batch(ran("m", (5, 10), ran=2, rows=5, useful=50, preparations=1, calls=calls))
    plain = at_once(statistics.to_dict())
    assert (1, 2, 1, 1, 2) == tuple(
        plain[name] for name in ("batches", "calls", "preparations", "prepared_hits", "distinct_shapes")
    )
    assert round(46 / 96, 4) == plain["padding_ratio"]


def test_batches_are_counted_alike_whenever_the_counters_are_read() -> None:
    """After each batch, or once after seven hundred; members that arrived together, and ones that did not."""
    often, once = ServerStatistics(), ServerStatistics()
    for number in range(700):
        arrived = [-0.25, -0.25, -0.001 * number][: 1 + number % 3]
        count = len(arrived)
        times = {"run_us": 10 * number, "busy_us": 20 * number, "ended": number * 1e-4}
        sizes = (count, 1 + number % 5)
        run = ran(f"m{number % 2}", sizes, arrived=arrived, ran=count, rows=count, useful=number % 5, **times)
        for statistics in (often, once):
            statistics.count_batch(run)
        assert number + 1 == often.batches
    assert at_once(often.to_dict()) == at_once(once.to_dict())
    assert 1399 == once.results
    for name, counters in often.models.items():
        assert counters.to_dict() == once.models[name].to_dict()


def test_a_request_can_be_followed_by_its_id_at_debug_and_costs_no_line_at_info() -> None:
    """From arrival to delivery; the batch's line names its requests."""

    @virtual_time
    async def serve_one() -> None:
        async with scripted_client() as (client, slots):
            client.say(request(41))
            slots.finish(await slots.next_batch())
            await client.hear(ResultEntry)

    quiet, file = io.StringIO(), io.StringIO()
    configure("info", stream=quiet)
    serve_one()
    configure("debug", stream=file)
    serve_one()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    (arrived,) = [line for line in lines if line["event"] == "request arrived"]
    assert 41 == arrived["sequence"]
    (started,) = [line for line in lines if line["event"] == "batch started"]
    assert [arrived["request"]] == started["requests"]
    (done,) = [line for line in lines if line["event"] == "batch ran"]
    assert started["batch"] == done["batch"]
    (delivered,) = [line for line in lines if line["event"] == "results delivered"]
    assert [arrived["request"]] == delivered["requests"]
    assert "request arrived" not in quiet.getvalue()
    assert "batch" not in quiet.getvalue()


def test_lines_about_a_request_name_its_trace() -> None:
    """From its arrival or refusal on, as 32 digits; what is no trace makes no key."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace}-b7ad6b7169203331-01"

    @virtual_time
    async def serve_them() -> None:
        async with scripted_client() as (client, slots):
            client.say(request(1, tags={"traceparent": parent, "request_id": "mine"}))
            slots.fail(await slots.next_batch())
            await client.hear(Failure)
            client.say(request(2, model=99, tags={"traceparent": parent}))
            client.say(request(3, model=98, tags={"traceparent": parent[:-1]}))
            await client.hear_each(Failure, 2)

    file = io.StringIO()
    configure("debug", stream=file)
    serve_them()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    told = {(line["event"], line.get("sequence")): line.get("trace") for line in lines}
    assert trace == told["request arrived", 1] == told["request failed", None] == told["request refused", 2]
    assert ("request refused", 3) in told
    assert told["request refused", 3] is None


@virtual_time
async def test_deciding_is_timed() -> None:
    """All of it, over the requests that the scheduler was given: it reads no clock itself."""
    statistics = ServerStatistics()
    assert 0.0 == at_once(statistics.to_dict())["scheduling_us_per_request"]
    statistics.scheduling_s, statistics.scheduled_requests = 0.003, 200
    assert (0.003, 15.0) == (
        at_once(statistics.to_dict())["scheduling_s"],
        at_once(statistics.to_dict())["scheduling_us_per_request"],
    )
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        before = running.server.statistics()["scheduling_s"]
        client = await running.greeted()
        client.say(request(1), request(2))
        slots.finish(await slots.next_batch())
        await client.hear(ResultEntry)
        after = running.server.statistics()
        assert after["scheduling_s"] > before
        assert after["scheduling_us_per_request"] == pytest.approx(after["scheduling_s"] / 2 * 1e6, abs=1)
        assert 0.002 == after["slots"]["local/0"]["busy_s"]


@virtual_time
async def test_the_page_lists_every_counter() -> None:
    """docs/logging.md names each key of `statistics()`."""
    page = (Path(__file__).parents[3] / "docs" / "logging.md").read_text(encoding="utf-8")
    counters = page.partition("\n## Counters\n")[2].partition("\n## ")[0]
    async with memory_serving() as running:
        assert set() == running.server.statistics().keys() - set(re.findall(r"`(\w+)`", counters))


@virtual_time
async def test_the_counters_of_very_many_slots_fit_a_message() -> None:
    """Those of the first are told, and how many there are."""
    async with memory_serving() as running:
        for number in range(20):
            await running.joined(f"{number}-{'x' * 190}", slots=256)
        client = await running.greeted()
        told = await client.statistics()
        assert (1024, 5120) == (len(told["slots"]), told["slots_in_all"])


@virtual_time
async def test_rows_that_fill_a_call_up_are_padding_not_rows() -> None:
    """A call of eight rows for three of requests: three rows were served, five eighths were padding."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        client = await running.greeted()
        client.say(request(1, echo_tensors(rows=3)))
        batch = await slots.next_batch()
        report = slots.ran(batch)
        slots.report(dataclasses.replace(report, calls=((1, (8, 4)),)))
        await client.hear(ResultEntry)
        statistics = running.server.statistics()
        assert (3, 0.625) == (statistics["rows"], statistics["padding_ratio"])


def test_a_budget_of_lines_lets_a_burst_through_and_then_so_many_per_second() -> None:
    """What it held back is told with the next line."""
    budget = LineBudget(burst=2, per_s=1.0)
    assert [0, 0, None, None, 2, None] == [budget.admit(at) for at in (10.0, 10.0, 10.0, 10.5, 11.0, 11.5)]


@virtual_time
async def test_metrics_tell_refused_requests_from_failed_ones() -> None:
    """A request that no model takes has a code and no model; the series of a model begin with 0."""

    def samples(running: Running, name: str) -> dict[tuple[str, ...], object]:
        found = {
            metric.name: dict(read)
            for metric, read in at_once(read_metrics(running.server.readings.snapshot()))
        }
        return found[f"shapestream_{name}"]

    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        assert {("echo", "ok"): 0} == samples(running, "requests_total")
        assert {} == samples(running, "requests_refused_total")
        assert {("serving",): 1, ("leaving",): 0} == samples(running, "workers")
        client.say(dataclasses.replace(request(1), model=99))
        await client.hear(Failure)
        client.say(request(2))
        execute = await worker.hear(Execute)
        assert {(): 1} == samples(running, "requests_pending")
        worker.say(batch_failed(execute))
        await client.hear(Failure)
        assert {("invalid",): 1} == samples(running, "requests_refused_total")
        assert {("echo", "ok"): 0, ("echo", "model_error"): 1} == samples(running, "requests_total")
        assert {("echo",): 1} == samples(running, "request_attempts_total")
        assert {("echo", "ran"): 0, ("echo", "failed"): 1} == samples(running, "batches_total")
