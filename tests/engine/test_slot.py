"""Running batches, with models that are scripted: reports, failures, deadlines, cancellation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from typing import Any

import numpy as np
import pytest
from tests.engine.slot_bench import SlotBench

from shapestream_engine import (
    BatchInputs,
    BatchReport,
    CompiledModel,
    InferenceError,
    InferRequest,
    InputSpec,
    ModelSpec,
    OutputSpec,
    Tensors,
    compile_model,
)
from shapestream_engine.tensor import Tensor

TIMEOUT_S = 30
"""For a report that never comes: the test fails instead of hanging."""


def function_model(
    function: Callable[..., Any], shape: str = "batch, n", output: str | None = None
) -> CompiledModel:
    """A callable over one f32 input."""
    return compile_model(
        ModelSpec(
            name="m",
            model=function,
            inputs={"x": InputSpec(shape=shape, element_type="f32", pad={"n": 0} if "n:" in shape else {})},
            outputs={"y": OutputSpec(shape=output or shape, element_type="f32")},
        )
    )


class Bench(SlotBench):
    """A slot, and a thread of its own for batches that run beside the test."""

    def __init__(self, model: CompiledModel) -> None:
        super().__init__(model)
        self._given: SimpleQueue[BatchInputs | None] = SimpleQueue()
        self._came_of: SimpleQueue[tuple[int, BatchReport | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def start(self, *arrays: np.ndarray[Any, Any], **more: Any) -> None:
        """Run a batch on the other thread, behind those that were started before."""
        self._given.put(self.batch(*arrays, **more))

    def ended(self) -> tuple[int, BatchReport | None]:
        """The number of the next batch that the other thread is done with, and its report; None: it was withdrawn."""
        return self._came_of.get(timeout=TIMEOUT_S)

    def report(self) -> BatchReport:
        """The next report of the other thread."""
        _, report = self.ended()
        assert report is not None, "it was withdrawn"
        return report

    def close(self) -> None:
        """End the other thread, behind what was started."""
        self._given.put(None)
        self._thread.join(TIMEOUT_S)
        assert self._came_of.empty()

    def _live(self) -> None:
        while (batch := self._given.get()) is not None:
            self._came_of.put((batch.batch, self.slots[0].run(batch)))


@contextmanager
def bench(model: CompiledModel) -> Iterator[Bench]:
    """A bench whose thread ends with the test."""
    made = Bench(model)
    try:
        yield made
    finally:
        made.close()


def results(report: BatchReport) -> list[list[Any] | None]:
    """The values of each member's only output."""
    assert (None, "") == (report.code, report.message)
    assert report.outputs is not None
    values: list[list[Any] | None] = []
    for tensors in report.outputs:
        if tensors is None:
            values.append(None)
            continue
        ((port, element_type, shape),) = tensors.layout
        assert (0, "f32") == (port, element_type)
        values.append(np.frombuffer(tensors.buffers[0], np.float32).reshape(shape).tolist())
    return values


def full(value: float, *shape: int) -> np.ndarray[Any, Any]:
    """An array of one value."""
    return np.full(shape, value, np.float32)


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A model."""
    return x * 2


def test_a_batch_is_gathered_run_and_split() -> None:
    """Each member gets its own rows, in order, and the times add up."""
    with bench(function_model(double)) as made:
        report = made.run(full(1, 1, 2), full(2, 2, 2), batch=7)
        assert [[[2, 2]], [[4, 4], [4, 4]]] == results(report)
        assert 7 == report.batch
        assert report.run_s > 0
        assert report.gather_s > 0
        assert report.busy_s > report.gather_s + report.run_s


def test_results_do_not_change_with_the_next_batch() -> None:
    """Nothing that was reported lies in a tensor of the slot."""
    with bench(function_model(lambda x: x)) as made:
        first = made.run(full(1, 4, 4))
        made.run(full(9, 4, 4))
        assert [full(1, 4, 4).tolist()] == results(first)


def test_layouts_are_resolved_where_the_batch_does_not_say_their_sizes() -> None:
    """The server has resolved each layout already; a worker leaves it to the slot."""
    with bench(function_model(double)) as made:
        assert [[[6, 6]]] == results(made.run(full(3, 1, 2), shapes=()))


def test_a_new_shape_is_new_once() -> None:
    """The first call of each shape is reported as such."""
    with bench(function_model(double)) as made:
        shapes = [(1, 2), (1, 2), (2, 2), (1, 2)]
        assert [1, 0, 1, 0] == [made.run(full(0, *shape)).preparations for shape in shapes]


def test_reallocations_are_those_of_the_batch() -> None:
    """Growth is reported with the batch that made it necessary."""
    with bench(function_model(double)) as made:
        sizes = (10, 10_000, 10, 9_000)
        counts = [made.run(full(0, 1, size)).reallocations for size in sizes]
        assert [1, 1, 0, 0] == counts


def test_an_output_that_breaks_its_rule_is_the_models_error() -> None:
    """A model that returns another number of rows than it was given is not guessed at."""
    with bench(function_model(lambda x: x[:-1])) as made:
        report = made.run(full(1, 2, 2), full(2, 1, 2))
        assert "model_error" == report.code
        assert "output 'y' has 2 along 'batch'" in report.message


def test_bytes_that_do_not_fit_their_shape_are_reported() -> None:
    """Batch is checked even where the server should have."""
    with bench(function_model(double)) as made:
        members = (Tensors(layout=((0, "f32", (1, 2)),), buffers=(b"1234",)),)
        report = made.run(full(0, 1, 2), members=members)
        assert "model_error" == report.code
        assert "4 bytes" in report.message


def test_an_unknown_model_is_unavailable() -> None:
    """A slot serves the models of its pools."""
    with bench(function_model(double)) as made:
        report = made.run(full(0, 1, 2), model="other")
        assert ("unavailable", "model 'other' is not served here") == (report.code, report.message)


def test_without_a_free_request_the_batch_is_unavailable() -> None:
    """Nothing waits for a request of the pool."""
    with bench(function_model(double)) as made:
        lent = made.pool.try_lease()
        assert lent is not None
        report = made.run(full(0, 1, 2))
        assert ("unavailable", "model 'm' has no free request: 1 leased, 0 free") == (
            report.code,
            report.message,
        )
        made.pool.give_back(lent)
        assert made.run(full(0, 1, 2)).code is None


def test_members_that_are_too_late_are_left_out() -> None:
    """The others run without them, in a call of their own size."""
    calls = []

    def model(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        calls.append(x.shape)
        return x

    with bench(function_model(model, "batch, n:1..9")) as made:
        past, future = monotonic() - 1, monotonic() + 3600
        arrays = (full(1, 1, 5), full(2, 2, 2), full(3, 1, 3))
        report = made.run(*arrays, start_before=(past, future, None))
        assert [None, [[2, 2]] * 2, [[3, 3, 3]]] == results(report)
        assert [(3, 3)] == calls


def test_when_all_are_too_late_nothing_runs() -> None:
    """No inference starts after its requests' deadlines, and no error is made of it."""
    request = ScriptedRequest([])
    with bench(ScriptedModel(request)) as made:
        report = made.run(full(1, 1, 2), full(1, 1, 2), start_before=(0.0, 0.0))
        assert [None, None] == results(report)
        assert 0 == request.calls
        assert 0 == report.preparations


def test_a_deadline_that_passes_while_gathering_counts() -> None:
    """What was gathered in vain is gathered again without the late member."""
    request = ScriptedRequest([None])
    with bench(ScriptedModel(request)) as made:
        request.tensor.linger_until = monotonic() + 0.02
        arrays = (full(1, 1, 2), full(2, 1, 2))
        report = made.run(*arrays, start_before=(request.tensor.linger_until, None))
        assert [None, [[2, 2]]] == results(report)


def test_a_call_that_has_begun_runs_to_its_end() -> None:
    """A batch that is cancelled meanwhile keeps its slot until then, and reports its results; nobody has to want them."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.start(full(1, 1, 2), batch=5)
        assert request.started.wait(TIMEOUT_S)
        made.slots[0].cancel(5)
        assert 5 == made.slots[0].begun
        request.go.set()
        assert [[[1, 1]]] == results(made.report())
        assert [[[2, 2]]] == results(made.run(full(2, 1, 2), batch=6))


@pytest.mark.parametrize("how", ["cancel", "withdraw"])
def test_a_batch_that_waits_can_be_withdrawn(how: str) -> None:
    """It never runs, and the one before it notices nothing; what is cancelled is reported in its turn."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.start(full(1, 1, 2), batch=1)
        assert request.started.wait(TIMEOUT_S)
        made.start(full(2, 1, 2), batch=2)
        assert getattr(made.slots[0], how)(2) is (True if how == "withdraw" else None)
        made.start(full(3, 1, 2), batch=3)
        request.go.set()
        assert [[[1, 1]]] == results(made.report())
        number, skipped = made.ended()
        reported = "cancelled" if how == "cancel" else None
        assert (2, reported) == (number, None if skipped is None else skipped.code)
        assert [[[3, 3]]] == results(made.report())
        assert 2 == request.calls


def test_a_batch_that_has_begun_is_not_withdrawn() -> None:
    """Neither while it runs nor afterwards."""
    request = ScriptedRequest([None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.start(full(1, 1, 2), batch=1)
        assert request.started.wait(TIMEOUT_S)
        assert not made.slots[0].withdraw(1)
        request.go.set()
        assert [[[1, 1]]] == results(made.report())
        assert not made.slots[0].withdraw(1)


@contextmanager
def threads_take_turns_often() -> Iterator[None]:
    """Python's threads usually keep their turn for longer than a whole batch of these takes."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def meet_the_thread(made: Bench, number: int) -> list[tuple[int, BatchReport | None]]:
    """Lets the other thread get so far, another time farther: up to the end of its batch, which is then returned."""
    if number % 3 == 0:
        return [made.ended()]
    for _ in range(number % 307):
        pass
    return []


def test_withdrawals_race_with_starts_and_agree_with_what_ran() -> None:
    """Thousands of times: whichever wins, the answer of `withdraw` and that of `run` agree with what ran."""
    ran: set[int] = set()

    def model(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        ran.add(int(x[0, 0]))
        return x

    withdrawn: set[int] = set()
    with bench(function_model(model)) as made, threads_take_turns_often():
        for batch in range(0, 6000, 2):
            made.start(full(batch, 1, 1), batch=batch)
            made.start(full(batch + 1, 1, 1), batch=batch + 1)
            found = meet_the_thread(made, batch // 2)
            if made.slots[0].withdraw(batch + 1):
                withdrawn.add(batch + 1)
            found += [made.ended() for _ in range(2 - len(found))]
            assert [(batch, True), (batch + 1, batch + 1 not in withdrawn)] == [
                (number, report is not None and report.code is None) for number, report in found
            ]
    assert set(range(6000)) - withdrawn == ran
    assert 0 < len(withdrawn) < 3000, "one side always won: nothing was raced"


def test_cancels_race_with_starts_and_hit_no_other_batch() -> None:
    """The batch before, which nobody cancels, always runs; the cancelled one ends, either way."""
    with bench(function_model(double)) as made, threads_take_turns_often():
        ran = set()
        for batch in range(0, 4000, 2):
            made.start(full(1, 1, 1), batch=batch)
            made.start(full(1, 1, 1), batch=batch + 1)
            found = meet_the_thread(made, batch // 2)
            made.slots[0].cancel(batch + 1)
            found += [made.ended() for _ in range(2 - len(found))]
            (first, before), (second, after) = found
            assert (batch, batch + 1) == (first, second)
            assert before is not None
            assert before.code is None
            assert after is None or after.code in (None, "cancelled")
            ran.add(after is not None and after.code is None)
    assert {False, True} == ran, "one side always won: nothing was raced"


def test_the_slots_time_contains_all_that_it_did() -> None:
    """Gathering, the call and copying out; a failure took its time as well."""
    request = ScriptedRequest([None, InferenceError("no")])
    with bench(ScriptedModel(request)) as made:
        report = made.run(full(1, 1, 2))
        assert report.busy_s > report.run_s > 0
        assert made.run(full(1, 1, 2)).busy_s > 0


@pytest.mark.parametrize("rows", [3, 8])
def test_a_call_may_be_larger_than_its_members_need(rows: int) -> None:
    """Rows are filled up with the requests' own, dimensions padded, and nobody sees any of it."""
    calls = []

    def model(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        calls.append(x.copy())
        return x

    with bench(function_model(model, "batch, n:1..9")) as made:
        report = made.run(full(1, 1, 2), full(2, 2, 3), sizes=(rows, 4))
        assert [[[1, 1]], [[2, 2, 2]] * 2] == results(report)
        assert (rows, 4) == calls[0].shape
        assert [[1, 1, 0, 0], [2, 2, 2, 0], [2, 2, 2, 0]] == calls[0][:3].tolist()
        assert {(1, 1, 0, 0)} >= set(map(tuple, calls[0][3:].tolist()))
        assert () == report.calls


def test_a_cancellation_that_comes_too_late_changes_nothing() -> None:
    """Neither the batch that is done nor the next one."""
    request = ScriptedRequest([None, None])
    with bench(ScriptedModel(request)) as made:
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2), batch=1))
        made.slots[0].cancel(1)
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2), batch=2))


class LingeringTensor(Tensor):
    """A tensor whose filling takes until a given time."""

    linger_until = 0.0

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """The view, once the time has come."""
        while monotonic() <= self.linger_until:
            pass
        return super().data


class ScriptedRequest(InferRequest):
    """Returns its input, or raises what the script says; with `waits` each call waits for `go`."""

    def __init__(self, script: Sequence[BaseException | None], *, waits: bool = False) -> None:
        super().__init__(function_model(double).signature)
        self.tensor = LingeringTensor("f32", (0, 0))
        self.script = list(script)
        self.waits = waits
        self.calls = 0
        self.started = threading.Event()
        self.go = threading.Event()

    @property
    def input_tensors(self) -> Sequence[Tensor]:
        """The only one."""
        return (self.tensor,)

    def infer(self) -> None:
        """Wait and do as the script says."""
        self.calls += 1
        self.started.set()
        if self.waits:
            assert self.go.wait(TIMEOUT_S)
        error = self.script.pop(0)
        if error is not None:
            raise error

    def start_async(self) -> None:
        """Not used by a slot."""
        raise AssertionError

    def wait(self) -> None:
        """Not used by a slot."""
        raise AssertionError

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """The input."""
        return [self.tensor.data]


class ScriptedModel(CompiledModel):
    """A model with one request, which is scripted."""

    def __init__(self, request: ScriptedRequest) -> None:
        super().__init__(request.signature, {})
        self.request = request

    def create_infer_request(self) -> InferRequest:
        """The scripted one."""
        return self.request

    def close(self) -> None:
        """Nothing to do."""


class Panic(BaseException):
    """No `Exception`."""


class Mute(Panic):
    """An error whose message cannot be had."""

    def __str__(self) -> str:
        raise Panic("no words")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InferenceError("no such row"), "model_error", "no such row"),
        (RuntimeError("engine"), "model_error", "engine"),
        (MemoryError("8 GB"), "unavailable", "out of memory: 8 GB"),
        (KeyError("x"), "internal", "KeyError: 'x'"),
        (Panic("index out of bounds"), "model_error", "Panic: index out of bounds"),
        (KeyboardInterrupt(), "model_error", "KeyboardInterrupt: "),
        (SystemExit(3), "model_error", "SystemExit: 3"),
        (GeneratorExit("left"), "model_error", "GeneratorExit: left"),
        (Mute(), "model_error", "Mute: (its message cannot be read)"),
    ],
)
def test_whatever_goes_wrong_is_reported_once_and_the_slot_goes_on(
    error: BaseException, code: str, message: str
) -> None:
    """What a call raises becomes a code and words; the inference request is given back and used again."""
    request = ScriptedRequest([error, None])
    with bench(ScriptedModel(request)) as made:
        report = made.run(full(1, 1, 2))
        assert (code, message, None) == (report.code, report.message, report.outputs)
        assert "0 leased, 1 free" == repr(made.pool)
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2)))
