"""Chains at a server whose slots the test plays: what is run, what is not run any more, and that nothing is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
from tests.entries import (
    Cancel,
    Failure,
    Goodbye,
    ResultEntry,
)
from tests.pipeline.serving.chain_server import (
    CHAIN,
    CUT,
    SKIPS,
    chain_served,
    cut,
    open_chain,
    outputs_of,
    play_rows,
    played,
    run_next,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import model_settings
from tests.pipeline.serving.harness import Running
from tests.pipeline.serving.raw_peer import ending
from trio.testing import wait_all_tasks_blocked

from shapestream.slices import at_once
from shapestream.telemetry.metrics import read_metrics
from shapestream_engine.ports import list_ports
from shapestream_engine.shapes import NamedShape


def stories_of(running: Running, sequence: int) -> list[dict[str, Any]]:
    """What the server tells of a request of the first client."""
    found = at_once(running.server.readings.explain(f"{(b'c' * 16).hex()}-{sequence}", 0))
    stories: list[dict[str, Any]] = found["stories"]
    return stories


@virtual_time
async def test_a_row_that_its_model_does_not_take_fails_the_request_and_none_of_its_rows_runs() -> None:
    """Also those that were made before it: nothing of it is left for a slot to do."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2, 0, 4)
        assert "cut" == await run_next(slots)
        failure = await client.peer.hear(Failure)
        assert (1, "invalid") == ending(failure)
        assert failure.message.startswith("stage 'read', row 2: model 'read'")
        await wait_all_tasks_blocked()
        assert [] == slots.started
        client.ask(2, 5)
        assert ["cut", "read"] == [await run_next(slots), await run_next(slots)]
        assert [[5.0]] == outputs_of(await client.peer.hear(ResultEntry))


@virtual_time
async def test_a_row_that_its_model_does_not_take_is_skipped_where_rows_are() -> None:
    """The others run, and it is marked."""
    async with chain_served(SKIPS) as (_, client, slots):
        client.ask(1, 3, 0, 4)
        async with played(slots):
            assert [[3.0, 0.0, 4.0], [True, False, True]] == outputs_of(await client.peer.hear(ResultEntry))


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"at_most": 2}, "stage 'read' has 3 rows to run; its at_most is 2"),
        ({"at_most_bytes": 23}, "stage 'read' has 24 bytes to run; its at_most_bytes is 23"),
    ],
)
@virtual_time
async def test_more_than_a_stage_may_hold_is_too_large(stage: dict[str, int], words: str) -> None:
    """Rows, or bytes; none of them runs."""
    limited = replace(CHAIN, stages=[CHAIN.stages[0], replace(CHAIN.stages[1], **stage)])
    async with chain_served(limited) as (_, client, slots):
        client.ask(1, 3, 2, 1)
        await run_next(slots)
        failure = await client.peer.hear(Failure)
        assert ((1, "too_large"), words) == (ending(failure), failure.message)
        await wait_all_tasks_blocked()
        assert [] == slots.started


@virtual_time
async def test_more_rows_than_a_stage_may_have_are_refused_before_anything_runs() -> None:
    """Where the shape of an input says how many there will be; what has fewer is served."""
    counted = replace(CUT, outputs=list_ports("parts", "f32", NamedShape.parse("k"), "n"))
    async with chain_served(signature=counted) as (_, client, slots):
        client.ask(1, *[1] * 9)
        failure = await client.peer.hear(Failure)
        words = "stage 'read' has 9 rows to run; its at_most is 8"
        assert ((1, "too_large"), words) == (ending(failure), failure.message)
        assert [] == slots.started
        client.ask(2, 3)
        async with played(slots):
            assert [[3.0]] == outputs_of(await client.peer.hear(ResultEntry))


@virtual_time
async def test_chains_that_do_not_fit_together_wait_and_all_are_answered() -> None:
    """Room for two of them at a time, 60 requests of three clients; at the end nothing is left."""
    async with chain_served(max_queued_requests=32) as (running, first, slots):
        clients = [first, await open_chain(running, b"d" * 16), await open_chain(running, b"e" * 16)]
        for sequence in range(1, 21):
            for client in clients:
                client.ask(sequence, *[1 + sequence % 9] * (sequence % 8 + 1))
        async with played(slots):
            for client in clients:
                results = await client.peer.hear_each(ResultEntry, 20)
                expected = {number: [1.0 + number % 9] * (number % 8 + 1) for number in range(1, 21)}
                assert expected == {result.sequence: outputs_of(result)[0] for result in results}
            numbers = await first.peer.statistics()
        assert (60, 60, {}, 0) == (
            numbers["requests"],
            numbers["results"],
            numbers["failures"],
            numbers["faults"],
        )


@virtual_time
async def test_counters_and_metrics_tell_what_waits_for_room_and_what_is_reserved() -> None:
    """Of three requests two wait; the first one's reservation shrinks to its rows, then all is given back."""

    async def told() -> tuple[int, ...]:
        room = (await client.peer.statistics())["chain_room"]
        assert {"waiting": room["waiting"], "running": room["running"]} == room["chains"]["chain"]
        found = dict(at_once(read_metrics(running.server.readings.snapshot())))
        by_name = {metric.name.removeprefix("shapestream_chain_"): dict(found[metric]) for metric in found}
        assert {("chain",): room["waiting"]} == by_name["requests_waiting"]
        assert {("chain",): room["running"]} == by_name["requests_running"]
        columns = ("reserved_requests", "reserved_bytes", "limit_requests", "limit_bytes")
        assert [{(): room[name]} for name in columns] == [
            by_name[name.replace("limit", "reserved_limit")] for name in columns
        ]
        assert (8, 512 << 20) == (room["limit_requests"], room["limit_bytes"])
        return tuple(room[name] for name in ("waiting", "running", "reserved_requests", "reserved_bytes"))

    async with chain_served(max_queued_requests=16, max_queued_bytes=1 << 30) as (running, client, slots):
        assert (0, 0, 0, 0) == await told()
        for sequence in (1, 2, 3):
            client.ask(sequence, 3, 2)
        batch = await slots.next_batch()
        assert (2, 1, 8, 8 * 9 * 4) == await told()
        slots.finish(batch, cut(batch))
        await slots.next_batch()
        assert (2, 1, 2, 4 * (3 + 2)) == await told()
        client.peer.say(Cancel(sequence=2))
        await client.peer.hear(Failure)
        assert (1, 1) == (await told())[:2]
        client.peer.say(Cancel(sequence=1), Cancel(sequence=3))
        await client.peer.hear_each(Failure, 2)
        assert (0, 0, 0, 0) == await told()


@virtual_time
async def test_the_row_that_failed_has_a_story_and_is_no_failure_of_a_client() -> None:
    """Its attempts, slot and company, below its chain and instead of another row of its stage."""
    async with chain_served() as (running, client, slots):
        client.ask(1, 3, 2, 5, 4)
        await run_next(slots)
        await play_rows(slots, bad=5.0)
        failure = await client.peer.hear(Failure)
        assert ("model_error", "stage 'read', row 2: cannot be read") == (failure.code, failure.message)
        whole, first, row = stories_of(running, 1)
        assert ("chain", "model_error") == (whole["model"], whole["state"])
        assert [("cut", 0, None), ("read", 1, whole["stages"][1]["last"])] == [
            (stage["stage"], stage["failed"], stage["last_failed"]) for stage in whole["stages"]
        ]
        assert ("cut", "cut", None, "answered") == tuple(
            first[key] for key in ("stage", "model", "row", "state")
        )
        assert ("read", "read", 2, [5], "model_error") == tuple(
            row[key] for key in ("stage", "model", "row", "sizes", "state")
        )
        assert ("local/0", 1) == (row["slot"], row["batch_requests"])
        assert 1 == row["attempts"]
        assert "failed: model_error: cannot be read" == row["events"][-1][1]
        assert row["total_ms"] == pytest.approx(sum(phase["ms"] for phase in row["phases"]))
        assert row["total_ms"] <= whole["total_ms"]
        numbers = await client.peer.statistics()
        assert ({"model_error": 1}, 0, 1) == (
            numbers["failures"],
            numbers["results"],
            numbers["requests"],
        )
        assert [1, 0, 0] == [numbers["totals"][model]["failures"] for model in ("chain", "cut", "read")]
        assert {} == numbers["last_minute"]["refused"]


@virtual_time
async def test_where_rows_are_skipped_the_last_one_that_failed_has_a_story() -> None:
    """Beside the row that ended last; the chain is answered, and nothing has failed for its client."""
    async with chain_served(SKIPS) as (running, client, slots):
        client.ask(1, 3, 5, 2, 5, 4)
        await run_next(slots)
        await play_rows(slots, bad=5.0)
        assert [True, False, True, False, True] == outputs_of(await client.peer.hear(ResultEntry))[1]
        whole, _, *rows = stories_of(running, 1)
        assert ("answered", 2) == (whole["state"], whole["stages"][1]["failed"])
        failed = [row for row in rows if row["state"] == "model_error"]
        assert [("read", [5])] == [(row["stage"], row["sizes"]) for row in failed]
        assert failed[0]["row"] in (1, 3)
        ids = {whole["stages"][1]["last"], whole["stages"][1]["last_failed"]}
        assert len(ids) == len(rows)
        numbers = await client.peer.statistics()
        assert ({}, 1) == (numbers["failures"], numbers["results"])


@virtual_time
async def test_a_chain_that_runs_is_told_by_its_stages() -> None:
    """Of a stage that runs, the row that was made last stands below it; more rows than stories change nothing."""
    async with chain_served(max_queued_requests=128) as (running, client, slots):
        client.ask(1, *[2, 3] * 4)
        batch = await slots.next_batch()
        await trio.sleep(0.25)
        whole, first = stories_of(running, 1)
        assert ("chain", "running", 250.0) == (whole["model"], whole["state"], whole["total_ms"])
        assert [("cut", 0.0, None, 1, 1), ("read", None, None, 0, 0)] == [
            tuple(stage[key] for key in ("stage", "began_ms", "ended_ms", "requests", "unended"))
            for stage in whole["stages"]
        ]
        assert ("cut", "running", 250.0) == (first["stage"], first["state"], first["total_ms"])
        expected = "Of 250 ms it has spent 250 ms in stage cut (1 request, 1 without an answer yet). Not begun: read."
        assert f"{expected} It still runs." == whole["why"]
        slots.finish(batch, cut(batch))
        await run_next(slots)
        await slots.next_batch()
        await trio.sleep(0.75)
        whole, first, row = stories_of(running, 1)
        assert [("cut", 250.0, 1, 0), ("read", None, 8, 7)] == [
            tuple(stage[key] for key in ("stage", "ended_ms", "requests", "unended"))
            for stage in whole["stages"]
        ]
        assert ("cut", "answered") == (first["stage"], first["state"])
        assert ("read", 7, [3], "queued", 750.0) == tuple(
            row[key] for key in ("stage", "row", "sizes", "state", "total_ms")
        )
        assert whole["why"].startswith(
            "Of 1000 ms it has spent 750 ms in stage read (8 requests, 7 without an answer yet); it spent 250 ms in stage "
        )


@virtual_time
async def test_a_chain_that_waits_for_room_has_a_story() -> None:
    """It says so."""
    async with chain_served(max_queued_requests=16) as (running, client, slots):
        client.ask(1, 3, 2)
        client.ask(2, 3, 2)
        await slots.next_batch()
        await trio.sleep(0.5)
        (story,) = stories_of(running, 2)
        assert "waiting" == story["state"]
        expected = "Of 500 ms it waited 500 ms for room for its stages. Not begun: cut, read. It still waits."
        assert expected == story["why"]


@virtual_time
async def test_a_chain_whose_client_leaves_after_a_row_failed_has_no_story() -> None:
    """Nor has its failed row, which the story of the chain had before; a row that was answered has its own."""
    async with chain_served(SKIPS) as (running, client, slots):
        client.ask(1, 5, 4)
        await run_next(slots)
        slots.fail(await slots.next_batch())
        await wait_all_tasks_blocked()
        told = stories_of(running, 1)
        assert (1, {"cut", "read"}) == (
            told[0]["stages"][1]["failed"],
            {story["stage"] for story in told[1:]},
        )
        client.peer.say(Goodbye())
        await wait_all_tasks_blocked()
        assert ["cut"] == [story["model"] for story in stories_of(running, 1)]


@virtual_time
async def test_the_page_has_what_waits_in_each_stage_and_where_time_went() -> None:
    """At present by stage, in the queue and in batches; in the last minute time, requests and failures by stage."""
    async with chain_served(SKIPS, max_queued_requests=24) as (running, client, slots):

        def live() -> dict[str, Any]:
            found: dict[str, Any] = at_once(running.server.readings.live(0))
            return found

        assert {"chain": [["cut", "cut", 0, 0], ["read", "read", 0, 0]]} == live()["chains"]
        client.ask(1, 5, 2, 3)
        client.ask(2, 2, 2)
        batch = await slots.next_batch()
        await trio.sleep(0.25)
        assert {"chain": [["cut", "cut", 0, 1], ["read", "read", 0, 0]]} == live()["chains"]
        slots.finish(batch, cut(batch))
        await wait_all_tasks_blocked()
        assert {"chain": [["cut", "cut", 1, 0], ["read", "read", 2, 1]]} == live()["chains"]
        await trio.sleep(0.5)
        async with played(slots, bad=5.0):
            await client.peer.hear_each(ResultEntry, 2)
        assert {"chain": [["cut", "cut", 0, 0], ["read", "read", 0, 0]]} == live()["chains"]
        minute = live()["statistics"]["last_minute"]["models"]
        assert {
            "cut": {"runs": 2, "us": 250_000 + 500_000, "requests": 2, "failed": 0},
            "read": {"runs": 2, "us": 500_000, "requests": 5, "failed": 1},
        } == minute["chain"]["stages"]
        assert 250_000 == minute["chain"]["room_us"]
        assert "stages" not in minute["cut"]


@virtual_time
async def test_rows_of_a_chain_that_has_begun_go_before_the_first_stage_of_a_younger_one() -> None:
    """The slot that ends the older one's first stage gets its rows next, though the younger one was queued before them."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2)
        first = await slots.next_batch()
        await trio.sleep(1.0)
        client.ask(2, 4)
        await wait_all_tasks_blocked()
        slots.finish(first, cut(first))
        assert ["read", "read", "cut", "read"] == [await run_next(slots) for _ in range(4)]
        results = await client.peer.hear_each(ResultEntry, 2)
        assert [(1, [[3.0, 2.0]]), (2, [[4.0]])] == [
            (result.sequence, outputs_of(result)) for result in results
        ]


@virtual_time
async def test_what_is_queued_beside_a_chain_begins_when_nothing_of_it_follows() -> None:
    """The end of its last stage, of a row that others follow, and of a request without rows."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2)
        assert ["cut", "read"] == [await run_next(slots) for _ in range(2)]
        await trio.sleep(1.0)
        client.ask(2, 4)
        async with played(slots):
            results = await client.peer.hear_each(ResultEntry, 2)
        assert [1, 2] == [result.sequence for result in results]


@virtual_time
async def test_no_stage_begins_after_the_deadline() -> None:
    """The first stage ends too late; its answer is of no use."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2, remaining_ms=1000)
        batch = await slots.next_batch()
        await trio.sleep(2.0)
        slots.finish(batch, cut(batch))
        assert (1, "deadline_exceeded") == ending(await client.peer.hear(Failure))
        await wait_all_tasks_blocked()
        assert [] == slots.started


@virtual_time
async def test_an_idle_server_tries_a_request_whatever_earlier_ones_took() -> None:
    """Each stage of ten requests took 0.6 s and more; one with a deadline of 0.5 s takes no time now."""
    async with chain_served() as (_, client, slots):
        for sequence in range(10):
            client.ask(sequence, 3)
            for _ in range(2):
                await wait_all_tasks_blocked()
                await trio.sleep(0.6)
                await run_next(slots)
        await client.peer.hear_each(ResultEntry, 10)
        client.ask(10, 3, remaining_ms=500)
        assert ["cut", "read"] == [await run_next(slots), await run_next(slots)]
        assert [[3.0]] == outputs_of(await client.peer.hear(ResultEntry))


@virtual_time
async def test_a_request_sent_again_under_its_number_has_the_same_reply_and_runs_once() -> None:
    """As any request's: the reply is kept."""
    async with chain_served() as (_, client, slots):
        async with played(slots):
            client.ask(1, 3, 2)
            first = await client.peer.hear(ResultEntry)
        assert [[3.0, 2.0]] == outputs_of(first)
        client.ask(1, 3, 2)
        assert first == await client.peer.hear(ResultEntry)
        await wait_all_tasks_blocked()
        assert [] == slots.started


@pytest.mark.parametrize(
    ("once", "code"), [(None, "draining"), ("cut", "worker_lost"), ("read", "worker_lost")]
)
@virtual_time
async def test_chains_that_are_not_finished_within_the_grace_are_handed_back(
    once: str | None, code: str
) -> None:
    """Those in mid-chain and those that wait for room alike. Only what may run twice is a refusal once it has begun."""
    models = {} if once is None else {once: model_settings(idempotent=False)}
    async with chain_served(max_queued_requests=16, grace_s=1.0, models=models) as (running, client, slots):
        for sequence in range(1, 5):
            client.ask(sequence, 3, 2)
        await run_next(slots)
        await slots.next_batch()
        running.server.drain()
        failures = await client.peer.hear_each(Failure, 4)
        assert [(1, code), (2, "draining"), (3, "draining"), (4, "draining")] == sorted(map(ending, failures))
