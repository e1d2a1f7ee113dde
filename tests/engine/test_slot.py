"""The slot's thread, with models that are scripted: reports, failures, deadlines, cancellation."""

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

from shapestream_engine import (
    Batch,
    BatchReport,
    CompiledModel,
    InferenceError,
    InferRequest,
    InputSpec,
    ModelSpec,
    OutputSpec,
    RequestPool,
    Slot,
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


class Bench:
    """A slot and the reports that it made."""

    def __init__(self, model: CompiledModel, requests: int = 1) -> None:
        self.reports: SimpleQueue[BatchReport] = SimpleQueue()
        self.pool = RequestPool(model, requests)
        self.slot = Slot("test", {"m": self.pool}, self.reports.put)

    def run(self, *arrays: np.ndarray[Any, Any], **more: Any) -> BatchReport:
        """One batch of a request per array, and its report."""
        self.slot.start(self.work(*arrays, **more))
        return self.report()

    def report(self) -> BatchReport:
        """The next report, which is the only one so far."""
        report = self.reports.get(timeout=TIMEOUT_S)
        assert self.reports.empty(), "reported twice"
        return report

    def work(self, *arrays: np.ndarray[Any, Any], batch: int = 1, **more: Any) -> Batch:
        """A batch of a request per array."""
        members = tuple(
            Tensors(layout=((0, "f32", array.shape),), buffers=(array.tobytes(),)) for array in arrays
        )
        rows = sum(array.shape[0] for array in arrays)
        sizes = (rows, *(max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)))
        shapes = tuple(self.pool.signature.resolve(member.layout) for member in members)
        known: dict[str, Any] = {"batch": batch, "model": "m", "sizes": sizes}
        return Batch(**{**known, "members": members, "shapes": shapes, **more})


@contextmanager
def bench(model: CompiledModel, requests: int = 1) -> Iterator[Bench]:
    """A bench whose thread ends with the test."""
    made = Bench(model, requests)
    try:
        yield made
    finally:
        made.slot.close()


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
        assert report.busy_s > report.run_s


def test_results_do_not_change_with_the_next_batch() -> None:
    """Nothing that was reported lies in a tensor of the slot."""
    with bench(function_model(lambda x: x)) as made:
        first = made.run(full(1, 4, 4))
        made.run(full(9, 4, 4))
        assert [full(1, 4, 4).tolist()] == results(first)


def test_shapes_may_be_resolved_beforehand() -> None:
    """The server has resolved each layout already; a worker leaves it to the slot."""
    with bench(function_model(double)) as made:
        array = full(3, 1, 2)
        shapes = (made.pool.signature.resolve(((0, "f32", array.shape),)),)
        assert [[[6, 6]]] == results(made.run(array, shapes=shapes))


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


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InferenceError("no such row"), "model_error", "no such row"),
        (RuntimeError("engine"), "model_error", "engine"),
        (MemoryError("8 GB"), "unavailable", "out of memory: 8 GB"),
        (KeyError("x"), "internal", "KeyError: 'x'"),
    ],
)
def test_whatever_goes_wrong_is_reported_once_and_the_slot_goes_on(
    error: Exception, code: str, message: str
) -> None:
    """An exception becomes a code and words; the inference request is given back and used again."""
    request = ScriptedRequest([error, None])
    with bench(ScriptedModel(request)) as made:
        report = made.run(full(1, 1, 2))
        assert (code, message) == (report.code, report.message)
        assert report.outputs is None
        assert "0 leased, 1 free" == repr(made.pool)
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2)))


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


def test_a_third_batch_is_refused() -> None:
    """One runs and one waits; what the caller starts beyond that is a mistake, and harms neither."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.slot.start(made.work(full(1, 1, 2)))
        made.slot.start(made.work(full(2, 1, 2), batch=2))
        with pytest.raises(RuntimeError, match="slot 'test' runs a batch, and another one waits for it"):
            made.slot.start(made.work(full(3, 1, 2), batch=3))
        request.go.set()
        assert [[[1, 1]]] == results(made.reports.get(timeout=TIMEOUT_S))
        assert [[[2, 2]]] == results(made.report())


def test_a_running_batch_is_cancelled() -> None:
    """The engine is asked to stop, and what it raises is reported as a cancellation."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.slot.start(made.work(full(1, 1, 2), batch=5))
        assert request.started.wait(TIMEOUT_S)
        made.slot.cancel(4)
        assert 0 == request.cancels, "another batch was cancelled"
        made.slot.cancel(5)
        report = made.report()
        assert ("cancelled", "the call was cancelled") == (report.code, report.message)
        assert [[[2, 2]]] == results(made.run(full(2, 1, 2), batch=6))


@pytest.mark.parametrize("taken_back", ["cancelled", "recalled"])
def test_a_batch_that_waits_can_be_taken_back(taken_back: str) -> None:
    """It is reported at once, never runs, and the one before it notices nothing; its place is free again."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        take_back = made.slot.cancel if taken_back == "cancelled" else made.slot.recall
        made.slot.start(made.work(full(1, 1, 2), batch=1))
        assert request.started.wait(TIMEOUT_S)
        made.slot.start(made.work(full(2, 1, 2), batch=2))
        take_back(2)
        report = made.report()
        assert (2, taken_back, None) == (report.batch, report.code, report.outputs)
        made.slot.start(made.work(full(3, 1, 2), batch=3))
        request.go.set()
        assert [[[1, 1]]] == results(made.reports.get(timeout=TIMEOUT_S))
        assert [[[3, 3]]] == results(made.report())
        assert (2, 0) == (request.calls, request.cancels)


def test_a_batch_that_has_begun_is_not_taken_back() -> None:
    """Neither while it runs nor afterwards; unknown ones are ignored."""
    request = ScriptedRequest([None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.slot.start(made.work(full(1, 1, 2), batch=1))
        assert request.started.wait(TIMEOUT_S)
        assert not made.slot.recall(1)
        assert not made.slot.recall(7)
        request.go.set()
        assert [[[1, 1]]] == results(made.report())
        assert not made.slot.recall(1)


def test_a_batch_that_waited_is_not_started_after_its_deadline() -> None:
    """Its time runs while the one before it does; members that have time left are run."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        made.slot.start(made.work(full(1, 1, 2), batch=1))
        assert request.started.wait(TIMEOUT_S)
        soon = monotonic() + 0.01
        made.slot.start(
            made.work(full(2, 1, 2), full(3, 1, 2), batch=2, start_before=(soon, monotonic() + 3600))
        )
        while monotonic() <= soon:
            pass
        request.go.set()
        assert [[[1, 1]]] == results(made.reports.get(timeout=TIMEOUT_S))
        assert [None, [[3, 3]]] == results(made.report())


def test_the_thread_goes_from_one_batch_to_the_next_by_itself() -> None:
    """A caller that does nothing at all between them gets both, in order, and both leased the only request."""
    order: list[int] = []

    def model(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        order.append(int(x[0, 0]))
        return x

    with bench(function_model(model)) as made:
        for batch in range(200):
            works = [made.work(full(2 * batch + number, 1, 2), batch=2 * batch + number) for number in (0, 1)]
            for work in works:
                made.slot.start(work)
            first, second = (made.reports.get(timeout=TIMEOUT_S) for _ in works)
            assert (2 * batch, 2 * batch + 1) == (first.batch, second.batch)
            assert [[[2 * batch + 1] * 2]] == results(second)
        assert list(range(400)) == order
        assert made.reports.empty()


@contextmanager
def threads_take_turns_often() -> Iterator[None]:
    """Python's threads usually keep their turn for longer than a whole batch of these takes."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def meet_the_thread(made: Bench, number: int) -> list[BatchReport]:
    """Lets the slot's thread get so far, another time farther: up to its report, which is then returned."""
    if number % 3 == 0:
        return [made.reports.get(timeout=TIMEOUT_S)]
    for _ in range(number % 307):
        pass
    return []


def test_recalls_race_with_starts_and_each_batch_is_reported_once() -> None:
    """Thousands of times: whoever wins, the recall's answer and the only report agree with what ran."""
    ran: set[int] = set()

    def model(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        ran.add(int(x[0, 0]))
        return x

    taken: set[int] = set()
    with bench(function_model(model)) as made, threads_take_turns_often():
        for batch in range(0, 6000, 2):
            made.slot.start(made.work(full(batch, 1, 1), batch=batch))
            made.slot.start(made.work(full(batch + 1, 1, 1), batch=batch + 1))
            first = meet_the_thread(made, batch // 2)
            if made.slot.recall(batch + 1):
                taken.add(batch + 1)
            codes = {report.batch: report.code for report in first}
            while len(codes) < 2:
                report = made.reports.get(timeout=TIMEOUT_S)
                codes[report.batch] = report.code
            assert {batch: None, batch + 1: "recalled" if batch + 1 in taken else None} == codes
        assert made.reports.empty()
    assert set(range(6000)) - taken == ran
    assert 0 < len(taken) < 3000, "one side always won: nothing was raced"


def test_cancels_race_with_starts_and_hit_no_other_batch() -> None:
    """The batch before, which nobody cancels, always runs; the cancelled one is reported once, either way."""
    with bench(function_model(double)) as made, threads_take_turns_often():
        codes = set()
        for batch in range(0, 4000, 2):
            made.slot.start(made.work(full(1, 1, 1), batch=batch))
            made.slot.start(made.work(full(1, 1, 1), batch=batch + 1))
            found = {report.batch: report.code for report in meet_the_thread(made, batch // 2)}
            made.slot.cancel(batch + 1)
            while len(found) < 2:
                report = made.reports.get(timeout=TIMEOUT_S)
                found[report.batch] = report.code
            assert found[batch] is None
            codes.add(found[batch + 1])
        assert made.reports.empty()
    assert {None, "cancelled"} == codes, "one side always won: nothing was raced"


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


def test_what_is_left_of_a_rounded_call_is_not_rounded() -> None:
    """A late member makes another call of it, which is as large as the others need, and reported so."""
    with bench(function_model(double, "batch, n:1..9")) as made:
        report = made.run(full(1, 1, 2), full(2, 2, 3), sizes=(8, 9), start_before=(None, 0.0))
        assert [[[2, 2]], None] == results(report)
        assert ((1, (1, 2)),) == report.calls


def test_a_call_may_be_filled_up_without_any_row_of_its_members() -> None:
    """Requests without rows, in a call that has some: zeros, which nobody gets."""
    with bench(function_model(double, "batch, n:0..9")) as made:
        assert [[]] == results(made.run(full(1, 0, 2), sizes=(2, 2)))


def test_a_cancellation_that_comes_too_late_changes_nothing() -> None:
    """Neither the batch that is done nor the next one."""
    request = ScriptedRequest([None, None])
    with bench(ScriptedModel(request)) as made:
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2), batch=1))
        made.slot.cancel(1)
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2), batch=2))
        assert 0 == request.cancels


def test_closing_waits_for_the_batches_that_were_started() -> None:
    """Both are reported; afterwards the slot takes nothing."""
    request = ScriptedRequest([None, None], waits=True)
    made = Bench(ScriptedModel(request))
    made.slot.start(made.work(full(1, 1, 2)))
    made.slot.start(made.work(full(2, 1, 2), batch=2))
    assert request.started.wait(TIMEOUT_S)
    closing = threading.Thread(target=made.slot.close)
    closing.start()
    request.go.set()
    closing.join(TIMEOUT_S)
    assert [[[1, 1]]] == results(made.reports.get(timeout=TIMEOUT_S))
    assert [[[2, 2]]] == results(made.report())
    with pytest.raises(RuntimeError, match="slot 'test' has ended"):
        made.slot.start(made.work(full(1, 1, 2)))


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
    """Returns its input, or raises what the script says; with `waits` each call waits for `go`, or `cancel`."""

    def __init__(self, script: Sequence[BaseException | None], *, waits: bool = False) -> None:
        super().__init__(function_model(double).signature)
        self.tensor = LingeringTensor("f32", (0, 0))
        self.script = list(script)
        self.waits = waits
        self.calls = 0
        self.cancels = 0
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

    def cancel(self) -> None:
        """The present call fails."""
        self.cancels += 1
        self.script[0] = InferenceError("the call was cancelled")
        self.go.set()

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
    ("error", "message"),
    [
        (Panic("index out of bounds"), "Panic: index out of bounds"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit("left"), "GeneratorExit: left"),
        (Mute(), "Mute: (its message cannot be read)"),
    ],
)
def test_what_is_no_exception_is_the_models_error_and_the_slot_goes_on(
    error: BaseException, message: str
) -> None:
    """Whatever a call raises becomes a report; the batch behind it runs on the same thread."""
    request = ScriptedRequest([error, None])
    with bench(ScriptedModel(request)) as made:
        report = made.run(full(1, 1, 2))
        assert ("model_error", message, False) == (report.code, report.message, report.slot_ended)
        assert "0 leased, 1 free" == repr(made.pool)
        assert [[[1, 1]]] == results(made.run(full(1, 1, 2)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_reports_what_it_was_given() -> None:
    """The report of what was queued says that the slot has ended; nothing can be started from then on."""
    request = ScriptedRequest([None, None], waits=True)
    with bench(ScriptedModel(request)) as made:
        reports: SimpleQueue[BatchReport] = SimpleQueue()

        def leave_after_the_first(report: BatchReport) -> None:
            reports.put(report)
            if report.batch == 1:
                raise SystemExit

        slot = Slot("leaving", {"m": made.pool}, leave_after_the_first)
        slot.start(made.work(full(1, 1, 2), batch=1))
        assert request.started.wait(TIMEOUT_S)
        slot.start(made.work(full(1, 1, 2), batch=2))
        request.go.set()
        first, second = reports.get(timeout=TIMEOUT_S), reports.get(timeout=TIMEOUT_S)
        assert (1, None, False) == (first.batch, first.code, first.slot_ended)
        assert (2, "unavailable", True) == (second.batch, second.code, second.slot_ended)
        assert slot.has_ended
        with pytest.raises(RuntimeError, match="has ended"):
            slot.start(made.work(full(1, 1, 2), batch=3))
        slot.close()
