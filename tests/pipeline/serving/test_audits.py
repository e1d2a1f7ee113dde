"""Audits on real slots: models that mix rows where no proof looked are found, and honest ones are left in peace.

Of n requests that are worth a look, a share s is sampled, and of these a part p differs; two that differ stop the model.
So it is found after 2 / (s * p) requests in the mean, as far as slots idle long enough to run the samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from tests.entries import AcknowledgeAudit, RequestEntry, ResultEntry, request_of
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving import auditor, audits
from shapestream.serving.slot_threads import SlotThreads, WideForms
from shapestream.settings import ModelSettings
from shapestream_engine.calibration import CostCache
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.postprocess import Postprocess, Steps
from shapestream_engine.probing.tolerances import TOLERANCES, OutputTolerance
from shapestream_engine.strategy import Strategy, parse_strategy

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]
WIDTH = 8
TOGETHER = 12
"""Requests of one message; the first may go alone, the others share a call."""
TOLERANCE = OutputTolerance(TOLERANCES["f32"], overall=1.0).to_dict()


def honest(x: Array) -> Array:
    """Rows by themselves."""
    return np.asarray(2 * x, np.float32)


def mixes_from_nine(x: Array) -> Array:
    """Rows hear each other in calls of more than eight."""
    return np.asarray(2 * x + (x.mean(axis=0) if len(x) > 8 else 0), np.float32)


def mixes_rare_values(x: Array) -> Array:
    """Rows hear each other where one begins with a number below -2.5: one in 160 does, by chance."""
    return np.asarray(2 * x + (x.mean(axis=0) if (x[:, 0] < -2.5).any() else 0), np.float32)


class MixesLater:
    """Rows hear each other, but not in the first so many calls."""

    def __init__(self, first: int) -> None:
        self.left = first

    def __call__(self, x: Array) -> Array:
        """A call."""
        self.left -= 1
        return np.asarray(2 * x + (x.mean(axis=0) if self.left < 0 and len(x) > 1 else 0), np.float32)


class Flips:
    """The first row of every tenth call in company is off, as a threshold may be by rounding."""

    def __init__(self) -> None:
        self.shared = 0

    def __call__(self, x: Array) -> Array:
        """A call."""
        self.shared += len(x) > 1
        y = np.asarray(2 * x, np.float32)
        y[0] += len(x) > 1 and self.shared % 10 == 0
        return y


class Varies:
    """Another answer to each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Array) -> Array:
        """A call."""
        self.calls += 1
        return np.asarray(2 * x + self.calls, np.float32)


WEIGHTS = np.random.default_rng(1).normal(size=(WIDTH, 300)).astype(np.float32)


def rounds(x: Array) -> Array:
    """Rows by themselves, as far as BLAS goes: a product of one row adds up in another order than one of several."""
    return np.asarray(np.tanh(x @ WEIGHTS) @ WEIGHTS.T, np.float32)


CANCELLING = WEIGHTS - WEIGHTS.mean(axis=0)


def in_halves(x: Array, weights: Array = WEIGHTS) -> Array:
    """Rows by themselves; those that have company are added up in another order."""
    hidden = x @ weights if len(x) == 1 else x[:, :3] @ weights[:3] + x[:, 3:] @ weights[3:]
    return np.asarray(hidden @ WEIGHTS.T, np.float32)


LEARNED = OutputTolerance.of(
    TOLERANCES["f32"],
    [in_halves(x[None]) for x in np.random.default_rng(3).normal(size=(64, WIDTH)).astype(np.float32)],
).to_dict()
"""What a proof learns of it from numbers around 1."""
ERRORS: dict[str, Function] = {
    "a neighbour's answer": lambda x: np.roll(in_halves(x), 1, axis=0),
    "the largest of all": lambda x: np.broadcast_to(in_halves(x).max(axis=0), x.shape),
    "a tenth is padding": lambda x: in_halves(x) * np.float32(0.9 if len(x) > 1 else 1),
    "one per cent off": lambda x: in_halves(x) * np.float32(1.01 if len(x) > 1 else 1),
}


class Audited:
    """A server with one model, and a client that asks it."""

    def __init__(self, running: Running, client: RawPeer) -> None:
        self.server = running.server
        self.client = client
        self.asked = 0
        self.draw: Callable[..., Array] = np.random.default_rng(5).normal

    async def ask(self, requests: int = TOGETHER, rows: int = 1) -> list[tuple[Array, Array]]:
        """So many requests in one message: what was asked and answered, in their order."""
        return [
            (x, np.frombuffer(result.tensors.buffers[0], np.float32).reshape(x.shape))
            for x, result in await self.answers(requests, rows)
        ]

    async def answers(self, requests: int = TOGETHER, rows: int = 1) -> list[tuple[Array, ResultEntry]]:
        """The same, with answers as they come."""
        first, self.asked = self.asked, self.asked + requests
        asked = [self.draw(size=(rows, WIDTH)).astype(np.float32) for _ in range(requests)]
        self.client.say(
            *[
                request_of(first + number, Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),)))
                for number, x in enumerate(asked)
            ]
        )
        results = sorted(
            await self.client.hear_each(ResultEntry, requests), key=lambda result: result.sequence
        )
        return [*zip(asked, results, strict=True)]

    async def state(self) -> dict[str, Any]:
        """How the model stands, as a client is told."""
        found: dict[str, Any] = (await self.client.statistics())["audit"]["m"]
        return found

    async def rested(self) -> dict[str, Any]:
        """The same when nothing is left to audit."""
        while (state := await self.state())["waiting"]:
            pass
        return state

    async def until_stopped(self, most: int) -> int:
        """Ask until the model is stopped; after how many requests that was."""
        while not (state := await self.rested())["stopped"]:
            assert self.asked < most, state
            await self.ask()
        return self.asked


@asynccontextmanager
async def audited(
    function: Function,
    *,
    slots: int = 1,
    tolerance: dict[str, Any] | None = TOLERANCE,
    steps: str = "",
    wide: Function | None = None,
    **options: Any,
) -> AsyncIterator[Audited]:
    """A server of this function; `audit` and others are settings of the model, the rest is for `serve`.

    `wide`: what its wide slot computes; None: it has none.
    """
    postprocess = Postprocess({"y": Steps.parse(steps)}) if steps else None
    settings = {key: options.pop(key) for key in ("audit", "idempotent", "device") if key in options}
    spec = ModelSpec(
        name="m",
        model=function,
        inputs={"x": InputSpec(shape=f"batch:1..64, {WIDTH}", element_type="f32")},
        outputs={"y": OutputSpec(shape=f"batch, {WIDTH}", element_type="f32")},
        postprocess=postprocess,
    )
    compiled = compile_model(spec, slots=slots)
    if tolerance is not None:
        compiled.tolerances = (
            {"y": tolerance} if postprocess is None else postprocess.tolerances({"y": tolerance})
        )
    local = SlotThreads(models={"m": compiled}, slots=slots)
    if wide is not None:
        forms = WideForms(models={"m": compile_model(replace(spec, model=wide))}, costs=_costs(0.0001))
        local = SlotThreads(models={"m": compiled}, slots=slots, costs=_costs(0.001), wide=forms)
    known = {"m": ModelSettings(name="m", **settings)}
    async with memory_serving(local, models=known, **options) as running:
        yield Audited(running, await running.greeted(model="m"))


def _costs(seconds: float) -> dict[str, CostTable]:
    points = [CostPoint(sizes=(rows,), seconds=seconds) for rows in (1, 64)]
    return {"m": CostTable(key=f"{seconds}", dimensions=("batch",), points=tuple(points))}


@real_time
async def test_a_wide_slot_that_answers_otherwise_is_found_and_gets_nothing_more() -> None:
    """Its answers to lone requests are sampled, and run again on another slot."""
    async with audited(honest, wide=lambda x: np.asarray(2.1 * x, np.float32), audit=1.0, slots=2) as served:
        while not (state := await served.rested())["stopped"]:
            assert served.asked < 200, state
            await served.ask(1)
        for _ in range(40):
            [(x, y)] = await served.ask(1)
            assert (honest(x) == y).all()


@real_time
async def test_a_wide_slot_that_answers_alike_is_left_in_peace() -> None:
    """Of lone requests, the answers of the wide slot alone are worth a look."""
    async with audited(honest, wide=honest, audit=1.0, slots=2) as served:
        for _ in range(40):
            [(x, y)] = await served.ask(1)
            assert (honest(x) == y).all()
        state = await served.rested()
        wide = (await served.client.statistics())["batches_wide"]
        assert state["seen"] == wide >= 8
        assert (0, False, False) == (state["mismatches"], state["varies"], state["stopped"])


@real_time
async def test_a_model_that_mixes_rows_from_nine_on_is_found() -> None:
    """With every second answer sampled, and nearly all of them wrong, two messages of twelve should do; ten must."""
    with capture_logs() as lines:
        async with audited(mixes_from_nine, audit=0.5) as served:
            await served.until_stopped(most=10 * TOGETHER)
            answers = await served.ask()
            assert all((honest(x) == y).all() for x, y in answers), "answered in company once more"
    (line,) = [line for line in lines if line["event"] == "batching stopped"]
    assert ("m", "y", [1], "error") == (line["model"], line["output"], line["sizes"], line["log_level"])
    assert line["largest"] > line["allowed"] > 0


@real_time
async def test_a_model_that_mixes_rows_at_rare_values_only_is_found() -> None:
    """A batch of eleven holds such a value in 7 of 100 cases: after about 30 audited answers of a share of 1."""
    async with audited(mixes_rare_values, audit=1.0) as served:
        await served.until_stopped(most=3000)


@real_time
async def test_a_model_that_mixes_rows_after_two_thousand_calls_is_found() -> None:
    """An audit is a call of its own; with a tenth of the answers, it is found about 20 requests later."""
    function = MixesLater(2000)
    async with audited(function, audit=0.1) as served:
        while function.left > 50:
            await served.ask(2)
        assert not (await served.rested())["mismatches"]
        await served.until_stopped(most=served.asked + 100 * TOGETHER)


@real_time
async def test_an_honest_model_is_left_in_peace() -> None:
    """No answer of many differs, and none is late for it."""
    async with audited(honest, audit=1.0, slots=2) as served:
        for _ in range(40):
            assert all((honest(x) == y).all() for x, y in await served.ask())
            await served.rested()
        state = await served.rested()
        assert state["sampled"] == state["seen"] > 400
        assert (0, False, False) == (state["mismatches"], state["varies"], state["stopped"])


def ties(x: Array) -> Array:
    """The first two of eight are equal up to rounding, which is another in company; the largest in every second row."""
    y = np.asarray(2 * x, np.float32)
    y[:, 0] += 4
    y[:, 1] = np.nextafter(y[:, 0], np.float32(np.inf if len(x) > 1 else -np.inf))
    return y


@pytest.mark.parametrize("steps", ["argmax", "topk 3"])
@real_time
async def test_classes_that_rounding_chooses_are_no_mismatches(steps: str) -> None:
    """Of a right model with ties, most answers have another class in company than alone; none is against it."""
    async with audited(ties, audit=1.0, steps=steps) as served:
        found = [
            (ties(x).argmax(), np.frombuffer(result.tensors.buffers[0], np.int64)[0])
            for _ in range(10)
            for x, result in await served.answers()
        ]
        state = await served.rested()
    assert sum(bool(alone != together) for alone, together in found) > 50, "nothing was shown"
    assert (0, False, False) == (state["mismatches"], state["varies"], state["stopped"])
    assert state["audited"] > 50


@pytest.mark.parametrize("steps", ["argmax", "topk 3", "softmax, topk 2"])
@real_time
async def test_classes_of_a_neighbour_are_found(steps: str) -> None:
    """Classes with a clear margin are judged, and their values are."""
    async with audited(lambda x: np.roll(honest(x), 1, axis=0), audit=1.0, steps=steps) as served:
        while not (state := await served.rested())["stopped"]:
            assert served.asked < 20 * TOGETHER, state
            await served.answers()


@real_time
async def test_what_differs_by_rounding_alone_is_no_mismatch() -> None:
    """Answers in company differ in their last bits from those alone, and count as equal."""
    async with audited(rounds, audit=1.0) as served:
        unlike = 0
        for _ in range(20):
            unlike += sum(bool((rounds(x) != y).any()) for x, y in await served.ask())
            await served.rested()
        state = await served.rested()
        assert unlike > 50, "nothing was shown"
        assert (0, False) == (state["mismatches"], state["varies"])
        assert state["audited"] > 100


@real_time
async def test_a_right_model_is_not_stopped_for_the_rounding_of_large_numbers() -> None:
    """Of 1e6, with a tolerance for numbers around 1. What rounding explains is not counted as audited."""
    async with audited(in_halves, tolerance=LEARNED, audit=1.0) as served:
        served.draw = partial(np.random.default_rng(5).normal, scale=1e6)
        while (state := await served.rested())["unjudged"] < 2:
            await served.ask()
    assert (0, False, False) == (state["mismatches"], state["varies"], state["judges_little"])
    assert state["sampled"] == state["audited"] + state["unjudged"]


@real_time
async def test_a_right_model_is_not_stopped_for_the_rounding_of_whole_numbers() -> None:
    """They are not changed; copies show how far another order of sums moves them."""
    async with audited(in_halves, tolerance=LEARNED, audit=1.0) as served:
        random = np.random.default_rng(5)
        served.draw = lambda size: random.integers(0, 1 << 22, size)
        while (state := await served.rested())["unjudged"] < 2:
            await served.ask()
    assert (0, False) == (state["mismatches"], state["varies"])


@real_time
@pytest.mark.parametrize("error", ERRORS)
async def test_errors_are_found_among_large_numbers(error: str) -> None:
    """Every answer in company is wrong, so that two messages of twelve should do; ten must."""
    async with audited(ERRORS[error], tolerance=LEARNED, audit=0.5) as served:
        served.draw = partial(np.random.default_rng(5).normal, scale=1e6)
        await served.until_stopped(most=10 * TOGETHER)


@real_time
async def test_a_run_that_fails_keeps_no_error_from_being_found() -> None:
    """The model refuses copies, and most changes of its inputs, so that they show nothing."""

    def refuses(x: Array) -> Array:
        if len(x) > 1 and (x == x[0]).all():
            raise ValueError("copies")
        if (x % 0.5 != 0).any():
            raise ValueError("no half")
        return np.asarray(2 * x + (x.mean(axis=0) if len(x) > 1 else 0), np.float32)

    async with audited(refuses, audit=1.0) as served:
        random = np.random.default_rng(5)
        served.draw = lambda size: random.integers(0, 100, size) + 0.5
        await served.until_stopped(most=10 * TOGETHER)


@real_time
async def test_a_model_most_of_whose_answers_are_rounding_is_told() -> None:
    """Its inputs have a large number in common, which cancels. It goes on sharing calls, and one line says so."""
    cancelling = partial(in_halves, weights=CANCELLING)
    with capture_logs() as lines:
        async with audited(cancelling, tolerance=LEARNED, audit=1.0) as served:
            served.draw = partial(np.random.default_rng(5).normal, loc=1e6)
            while not (state := await served.rested())["judges_little"]:
                await served.ask()
            await served.ask()
            await served.rested()
    assert (0, False) == (state["mismatches"], state["stopped"])
    assert 1 == len([line for line in lines if line["event"] == "audits judge little"])


@real_time
@pytest.mark.parametrize(("within", "stopped"), [(20, False), (1000, True)])
async def test_mismatches_far_apart_stop_nothing(
    within: int, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one answer of a hundred; only the last so many audited answers count."""
    monkeypatch.setattr(auditor, "WITHIN", within)
    async with audited(Flips(), audit=1.0) as served:
        while (state := await served.rested())["mismatches"] < 2:
            await served.ask()
        assert stopped == state["stopped"]


@real_time
async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in bytes; the oldest go."""
    monkeypatch.setattr(audits, "MOST_SAMPLES", 4)
    async with audited(honest, audit=1.0) as served:
        await served.ask(60)
        assert (await served.state())["waiting"] <= 5
        assert (await served.rested())["audited"] <= 5
        monkeypatch.setattr(audits, "MOST_BYTES", 2 * 4 * WIDTH - 1)
        before = (await served.state())["sampled"]
        await served.ask()
        assert before == (await served.state())["sampled"], "a request is larger than all room"


@real_time
async def test_a_stop_outlives_the_server_until_it_is_acknowledged(tmp_path: Path) -> None:
    """Other settings are another model; an acknowledgement is for good."""
    kept: dict[str, Any] = {"audit": 1.0, "cost_cache": CostCache(tmp_path / "new" / "costs")}
    async with audited(mixes_from_nine, **kept) as served:
        await served.until_stopped(most=1000)
        (finding, _) = (await served.state())["findings"]
        assert (["y"], [1], 64) == (
            [finding["output"]],
            list(finding["sizes"]),
            2 * len(finding["request_digest"]),
        )
    async with audited(mixes_from_nine, **kept | {"audit": 0.5}) as served:
        state = await served.state()
        assert (True, 2) == (state["stopped"], len(state["findings"]))
        assert all((honest(x) == y).all() for x, y in await served.ask())
    async with audited(mixes_from_nine, **kept | {"device": "other"}) as served:
        assert not (await served.state())["stopped"]
    async with audited(mixes_from_nine, **kept) as served:
        served.client.say(AcknowledgeAudit(model="none"), AcknowledgeAudit(model="m"))
        state = await served.state()
        assert (False, []) == (state["stopped"], list(state["findings"]))
        assert any((honest(x) != y).any() for x, y in await served.ask())
        await served.until_stopped(most=1000)
        served.client.say(AcknowledgeAudit(model="m"))
        await served.state()
    async with audited(mixes_from_nine, **kept) as served:
        assert not (await served.state())["stopped"]


@real_time
async def test_other_files_begin_anew() -> None:
    """What an earlier file did is no matter then."""
    async with audited(mixes_from_nine, audit=1.0) as served:
        await served.until_stopped(most=1000)
        served.server.serve_files({})
        assert (await served.state())["stopped"]
        served.server.serve_files({"m": "a" * 64})
        assert not (await served.state())["stopped"]
        assert any((honest(x) != y).any() for x, y in await served.ask()), "still alone"
        assert 0 == (await served.state())["sampled"], "its worker has the old file"


@virtual_time
async def test_work_that_comes_stops_an_audit() -> None:
    """It is dropped; the request that came is answered as soon as the slot is free, and nothing counts as failed."""
    slots = ScriptedSlots()
    slots.tolerances = {"echo": {"y": TOLERANCE}}
    known = {"echo": ModelSettings(name="echo", audit=1.0)}
    async with memory_serving(slots, models=known) as running:
        client = await running.greeted()
        client.say(request(0), request(1))
        slots.finish(await slots.next_batch())
        await client.sequences(2)
        audit = await slots.next_batch()
        assert (1, None) == (len(audit.members), audit.start_before)
        client.say(request(2))
        while not slots.cancelled:
            await trio.lowlevel.checkpoint()
        assert [audit.batch] == slots.cancelled
        slots.fail(audit, "cancelled")
        slots.finish(await slots.next_batch())
        assert [2] == await client.sequences(1)
        statistics = await client.statistics()
    state = statistics["audit"]["echo"]
    assert (0, 2, 0, 2) == (
        statistics["batches_failed"],
        statistics["batches"],
        state["audited"],
        state["sampled"],
    )


@real_time
async def test_a_model_that_varies_is_audited_no_more() -> None:
    """Alone, the same request has two answers: one line says so, and requests go on sharing calls."""
    with capture_logs() as lines:
        async with audited(Varies(), audit=1.0) as served:
            while not (await served.rested())["varies"]:
                await served.ask()
            assert not (await served.state())["stopped"]
    assert 1 == len([line for line in lines if line["event"] == "audit ends"])


@real_time
@pytest.mark.parametrize(
    "options",
    [{"audit": 0.0}, {"audit": 1.0, "tolerance": None}, {"audit": 0.0, "idempotent": False}],
    ids=["no share", "no proof to compare by", "may not run twice"],
)
async def test_nothing_is_sampled_where(options: dict[str, Any]) -> None:
    """Then no request runs again."""
    async with audited(mixes_from_nine, **options) as served:
        for _ in range(5):
            await served.ask()
        assert 0 == (await served.state())["sampled"]


@real_time
async def test_a_request_that_had_its_call_to_itself_proves_nothing() -> None:
    """It is not even counted."""
    async with audited(honest, audit=1.0) as served:
        for _ in range(20):
            await served.ask(1)
        assert 0 == (await served.state())["seen"]


@real_time
async def test_a_defect_of_an_audit_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged, and the next answer is audited."""
    fails = [RuntimeError("a defect")]
    compare = auditor.worst_difference

    def failing(*arguments: Any) -> Any:
        if fails:
            raise fails.pop()
        return compare(*arguments)

    monkeypatch.setattr(auditor, "worst_difference", failing)
    with capture_logs() as lines:
        async with audited(honest, audit=1.0) as served:
            await served.ask()
            state = await served.rested()
    assert 0 < state["audited"] < state["sampled"]
    assert ["audit failed"] == [line["event"] for line in lines if line["log_level"] == "error"]


def _lengths(sequence: int, *lengths: int) -> list[RequestEntry]:
    """Requests of ones."""
    ones = [np.ones((1, length), np.float32) for length in lengths]
    return [
        request(sequence + number, Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),)), model=0)
        for number, x in enumerate(ones)
    ]


@asynccontextmanager
async def of_lengths(function: Function, strategy: Strategy) -> AsyncIterator[Audited]:
    """A server of a function of rows of any length, padded with zeros; one number for each row."""
    compiled = compile_model(
        ModelSpec(
            name="m",
            model=function,
            strategy=strategy,
            inputs={"x": InputSpec(shape="batch:1..64, n:1..64", element_type="f32", pad={"n": 0})},
            outputs={"y": OutputSpec(shape="batch", element_type="f32")},
        )
    )
    compiled.tolerances = {"y": TOLERANCE}
    local = SlotThreads(models={"m": compiled})
    async with memory_serving(local, models={"m": ModelSettings(name="m", audit=1.0)}) as running:
        yield Audited(running, await running.greeted(model="m"))


@real_time
async def test_a_model_that_padding_breaks_runs_at_its_requests_own_sizes() -> None:
    """The mean of ones is one, unless zeros are among them."""
    met: set[tuple[int, ...]] = set()

    def mean_of_all(x: Array) -> Array:
        met.add(x.shape)
        return x.mean(axis=1)

    async with of_lengths(mean_of_all, Strategy()) as served:
        while not (await served.rested())["stopped"]:
            assert served.asked < 1000
            served.client.say(*_lengths(served.asked, *range(20, 32)))
            await served.client.hear_each(ResultEntry, TOGETHER)
            served.asked += TOGETHER
        met.clear()
        served.client.say(*_lengths(served.asked, 3, 40, 3, 7))
        answers = await served.client.hear_each(ResultEntry, 4)
    assert [1.0] * 4 == [float(np.frombuffer(one.tensors.buffers[0], np.float32)[0]) for one in answers]
    assert {(1, 3), (1, 40), (1, 7)} == met


@real_time
async def test_where_a_strategy_pads_only_company_is_judged() -> None:
    """Alone, a request is padded in the same way: the padding cannot be told, a neighbour can."""
    padding = parse_strategy({"strategy": "padded", "batch": 4, "n": 64})
    async with of_lengths(lambda x: x.mean(axis=1), padding) as served:
        served.client.say(*_lengths(0, 20))
        await served.client.hear(ResultEntry)
        assert 0 == (await served.state())["seen"]
        served.client.say(*_lengths(1, 20, 30, 40))
        await served.client.hear_each(ResultEntry, 3)
        state = await served.rested()
        assert (0, 3) == (state["mismatches"], state["audited"])
    async with of_lengths(lambda x: x.sum(axis=1) + x.mean(), padding) as served:
        for turn in range(5):
            served.client.say(*_lengths(4 * turn, 20, 30, 40, 50))
            await served.client.hear_each(ResultEntry, 4)
            if (state := await served.rested())["stopped"]:
                break
        assert state["stopped"]
