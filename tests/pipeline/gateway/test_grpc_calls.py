"""The calls of a gateway for gRPC whose time is over, on a clock that is given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.entries import result_of

pytest.importorskip("grpc", reason="the extra [grpc] is not installed")

from shapestream.client.opened_models import Result
from shapestream.errors import InvalidRequest
from shapestream.gateway import grpc_service
from shapestream.gateway import open_inference_pb2 as protocol
from shapestream.gateway.grpc_calls import MESSAGE_S, OPEN_CALLS, PEAK_BYTES, TRANSFER_S, RunningCalls
from shapestream.testing import identity_signature, tensors_of
from shapestream.web.quotas import BeyondQuota

MIB = 1 << 20


class Context:
    """The part of gRPC's context that is used: whether it was cancelled, and what to call at its end."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Ends the call, and what waits for its messages."""
        self.cancelled.set()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Keeps what is to be called; False at a call that is over."""
        self._callbacks.append(callback)
        return not self.cancelled.is_set()

    def end(self) -> None:
        """The answer has left."""
        for callback in self._callbacks:
            callback()

    def messages(self) -> Iterator[bytes]:
        """None, until it is cancelled."""
        assert self.cancelled.wait(100)
        yield from ()


class Calls(RunningCalls):
    """Ten calls and 8 MiB, and their clock."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(10, MIB, clock=lambda: self.now)


def held(calls: Calls, caller: str) -> int:
    """How many MiB a caller may still hold."""
    for number in range(100):
        try:
            calls.held_bytes.take(caller, MIB)
        except BeyondQuota:
            calls.held_bytes.change(caller, number * MIB, 0)
            return number
    raise AssertionError("nothing is refused")


@pytest.mark.parametrize("seconds", [MESSAGE_S, TRANSFER_S])
def test_a_call_whose_message_does_not_come_is_cancelled(seconds: float) -> None:
    """Not before its time, nor while its handler runs."""
    calls, late, running = Calls(), Context(), Context()
    with calls.of("one", late, seconds), calls.of("one", running, seconds) as call:
        assert b"message" == call.read(iter([b"message"]))
        for now, is_over in ((seconds - 0.1, False), (seconds, True), (1e9, True)):
            calls.now = now
            calls.end_overdue()
            assert (is_over, False) == (late.cancelled.is_set(), running.cancelled.is_set())


def test_a_call_without_a_message_is_invalid() -> None:
    """Its caller has ended it at once."""
    calls = Calls()
    with calls.of("one", Context(), 1) as call, pytest.raises(InvalidRequest):
        call.read(iter([]))


def test_an_answer_that_is_not_read_counts_until_it_has_left_and_is_cut_off() -> None:
    """Beside its message, which counts no longer; what is larger than the quota is refused."""
    calls, context = Calls(), Context()
    with calls.of("one", context, 1) as call:
        message = call.read(iter([bytes(MIB)]))
        with calls.holding(call, len(message)):
            assert 3 == held(calls, "one")
        assert bytes(3 * MIB) == calls.sends(call, bytes(3 * MIB))
    assert (1, 2) == (held(calls, "one"), held(calls, "two"))
    with calls.of("one", Context(), 1) as other, pytest.raises(BeyondQuota):
        calls.sends(other, bytes(2 * MIB))
    calls.now = TRANSFER_S
    calls.end_overdue()
    assert context.cancelled.is_set()
    context.end()
    assert 4 == held(calls, "one")
    with calls.of("one", context, 1) as call:
        assert b"late" == calls.sends(call, b"late")
    assert 0 == calls.held_bytes.held


def test_of_calls_without_a_caller_the_oldest_that_waits_gives_way() -> None:
    """To each new one. Those that ask the server are shared among addresses."""
    calls, contexts = Calls(), [Context() for _ in range(OPEN_CALLS + 3)]
    threads = []
    for number, context in enumerate(contexts, 1):

        def read(context: Any = context) -> None:
            with pytest.raises(InvalidRequest):
                calls.read_open(context.messages(), context)

        threads.append(threading.Thread(target=read))
        threads[-1].start()
        while calls.open_calls < min(number, OPEN_CALLS) or (
            number > OPEN_CALLS and not contexts[number - OPEN_CALLS - 1].cancelled.is_set()
        ):
            threads[-1].join(0.001)
    assert [True] * 3 + [False] * OPEN_CALLS == [context.cancelled.is_set() for context in contexts]
    assert b"message" == calls.read_open(iter([b"message"]), Context())
    for context in contexts:
        context.cancel()
    for thread in threads:
        thread.join()
    assert 0 == calls.open_calls
    with ExitStack() as stack:
        for _ in range(OPEN_CALLS // 2):
            stack.enter_context(calls.asks_the_server("10.0.0.1"))
        with pytest.raises(BeyondQuota), calls.asks_the_server("10.0.0.1"):
            raise AssertionError("it is let in")
        with calls.asks_the_server("10.0.0.2"):
            pass


def test_memory_goes_back_after_a_peak() -> None:
    """Once when nothing is held any more; not while something is, and not after few bytes."""
    given_back: list[int] = []
    calls = RunningCalls(10, PEAK_BYTES, give_back=lambda: given_back.append(calls.held_bytes.held))
    for held in (PEAK_BYTES, MIB, 0, 0, PEAK_BYTES - 1, 0):
        calls.held_bytes.take("a", PEAK_BYTES + MIB)
        calls.held_bytes.change("a", PEAK_BYTES + MIB, held)
        calls.give_back_after_a_peak()
        calls.held_bytes.change("a", held, 0)
    assert [0] == given_back


def test_an_answer_that_leaves_keeps_no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC has copies of it: neither the result nor the request's message stays until its peer has read them."""
    inferences: list[weakref.ref[Any]] = []

    class Inferred:
        def __init__(self, *_: Any, **__: Any) -> None:
            inferences.append(weakref.ref(self))

        def result(self) -> Result:
            return Result(None, result_of(1, tensors_of([np.ones((1, 2), np.float32)])), {0: "y"})

        def withdraw(self) -> None:
            raise AssertionError("it has ended")

    class Asked(Context):
        def invocation_metadata(self) -> tuple[Any, ...]:
            return ()

        def peer(self) -> str:
            return "ipv4:127.0.0.1:5"

        def time_remaining(self) -> None:
            return None

    client = SimpleNamespace(
        window_requests=8, opened=lambda *_, **__: SimpleNamespace(signature=identity_signature("m", "a, b"))
    )
    monkeypatch.setattr(grpc_service, "Inference", Inferred)
    calls, context = Calls(), Asked()
    service = grpc_service.InferenceService(client, calls)
    tensor = protocol.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])
    message = protocol.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[bytes(8)])
    infer = service.handlers()[grpc_service.SERVICE]["ModelInfer"].stream_unary
    answer = infer(iter([message.SerializeToString()]), context)
    assert len(answer) == calls.held_bytes.held
    assert [None] == [each() for each in inferences]
    context.end()
    assert 0 == calls.held_bytes.held
