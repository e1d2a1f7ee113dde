"""What one gRPC caller, or a stranger, may take of a gateway: calls, and bytes of answers. Others are answered beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

grpc = pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
from tests.e2e.conftest import until  # noqa: E402
from tests.e2e.grpc_calls import SERVICE, TIMEOUT_S, Caller, Written, output_of, request  # noqa: E402
from tests.e2e.grpc_frames import Frames  # noqa: E402
from tests.secret_files import write_secret  # noqa: E402

from shapestream.gateway import open_inference_pb2 as protocol  # noqa: E402

pytestmark = pytest.mark.e2e

HEALTH = "/grpc.health.v1.Health/Check"
SERVED = """\
    server:
      listen: [ipc://s.sock]
      grpc: {address: "127.0.0.1:0", token_file: TOKENS, max_body: 8 MiB}
      window_requests: WINDOW
    models:
      - name: gated
        function: gated:double_when_open
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
        batching: {max_batch: 1, hang_after_s: off}
      - name: idle
        function: gated:double
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
      - name: large
        function: gated:mebibytes
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, m", element_type: f32}}
        batching: {max_batch: 1}
    workers: [{count: 1, slots: 1, threads: 1, models: [gated]}, {count: 1, slots: 1, threads: 1, models: [idle, large]}]
"""


def serve(workplace: Any, window_requests: int = 1024) -> Any:
    """A server with a gateway that knows the callers `shop` and `bank`, by `one` and `two`."""
    tokens = workplace.folder / "tokens"
    write_secret(tokens, "shop one\nbank two\n")
    text = SERVED.replace("TOKENS", f'"{tokens}"').replace("WINDOW", str(window_requests))
    served = workplace.serve(workplace.write(text))
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


def place_of(served: Any) -> str:
    """Of its gRPC."""
    (line,) = served.events("grpc ready")
    return str(line["address"])


def place_with(workplace: Any, max_calls: int) -> str:
    """Of a gateway that was started by hand, with this limit of calls."""
    address = serve(workplace).address
    options = ["--max-calls", str(max_calls), "--token-file", str(workplace.folder / "tokens")]
    gateway = workplace.start("gateway", address, "--grpc", "127.0.0.1:0", *options)
    (ready,) = gateway.wait_for("gateway ready")
    return str(ready["address"].removeprefix("grpc://"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is closed after a test."""
    with ExitStack() as stack:
        yield stack


def lives(caller: Caller, service: bytes = b"\x0a\x08liveness") -> bool:
    """Whether a probe is told that the gateway serves."""
    answer = caller.channel.unary_unary(HEALTH)(service, timeout=TIMEOUT_S, wait_for_ready=True)
    return bool(answer == b"\x08\x01")


def test_calls_of_strangers_that_send_headers_only_take_nothing_from_callers(
    workplace: Any, stack: ExitStack
) -> None:
    """As many as two connections may have, of calls that ask for no token: they end. Probes and callers are answered."""
    place = place_of(serve(workplace))
    strangers = [stack.enter_context(Frames(place)) for _ in range(2)]
    for stranger in strangers:
        for number in range(64):
            stranger.begin(SERVICE + "ServerLive" if number % 2 else HEALTH)
    caller = stack.enter_context(Caller(place, token="one"))
    for _ in range(20):
        assert lives(caller)
        assert lives(caller, b"")
        assert protocol.ServerLiveResponse.FromString(caller.call("ServerLive")).live
        assert [2.0, 4.0] == caller.infer(request(model="idle"))
    for stranger in strangers:
        assert set(range(1, 128, 2)) == stranger.ends(64)


def test_calls_of_a_caller_that_send_headers_only_leave_calls_to_others(
    workplace: Any, stack: ExitStack
) -> None:
    """Inferences without a message over three connections: of eight calls they get four."""
    place = place_with(workplace, 8)
    for _ in range(3):
        frames = stack.enter_context(Frames(place))
        for _ in range(4):
            frames.begin(SERVICE + "ModelInfer", token="one")
    caller = stack.enter_context(Caller(place, token="two"))
    for _ in range(20):
        assert [2.0, 4.0] == caller.infer(request(model="idle"))
        assert lives(caller)


def test_a_slow_model_of_one_caller_leaves_calls_to_others(workplace: Any, stack: ExitStack) -> None:
    """Over three connections half of its calls run, and the others are refused; another caller's are all answered."""
    place = place_with(workplace, 16)
    channels = [stack.enter_context(Caller(place, token="one")) for _ in range(3)]
    asked = [channel.begin(request()) for channel in channels for _ in range(8)]
    workplace.wait_entered()
    other = stack.enter_context(Caller(place, token="two"))
    for _ in range(50):
        assert [2.0, 4.0] == other.infer(request(model="idle"))
    workplace.open_gate()
    codes = [getattr(call.exception(TIMEOUT_S), "code", lambda: None)() for call in asked]
    assert {None: 8, grpc.StatusCode.RESOURCE_EXHAUSTED: 16} == {
        code: codes.count(code) for code in set(codes)
    }
    answers = [call.result() for call, code in zip(asked, codes, strict=True) if code is None]
    assert [[2.0, 4.0]] * 8 == [output_of(protocol.ModelInferResponse.FromString(found)) for found in answers]
    refused = next(call for call, code in zip(asked, codes, strict=True) if code is not None)
    assert ("grpc-retry-pushback-ms", "1000") in [tuple(pair) for pair in refused.trailing_metadata()]


def test_streams_of_one_caller_leave_requests_at_the_server_to_others(
    workplace: Any, stack: ExitStack
) -> None:
    """Of a window of 16 requests they have eight, and wait with the rest; another caller's requests go at once."""
    place = place_of(serve(workplace, window_requests=16))
    one = stack.enter_context(Caller(place, token="one"))
    streams = [
        one.stream(iter(Written(*[request([[number]], id=str(number)) for number in range(20)], None)))
        for _ in range(3)
    ]
    workplace.wait_entered()
    other = stack.enter_context(Caller(place, token="two"))
    for _ in range(20):
        assert [2.0, 4.0] == other.infer(request(model="idle"))
    workplace.open_gate()
    for stream in streams:
        assert [[2.0 * number] for number in range(20)] == [
            output_of(found.infer_response) for found in stream
        ]


LARGE = request([[4]], model="large")
"""A request whose answer has 4 MiB. All answers may have 64 MiB, those of one caller 32."""


def test_answers_that_are_not_read_are_bounded(workplace: Any, stack: ExitStack) -> None:
    """Of 180 calls over three connections seven are held, and the others refused; another caller's is answered."""
    served = serve(workplace)
    place = place_of(served)
    one, two = (stack.enter_context(Caller(place, token=token)) for token in ("one", "two"))
    assert [0.0] == sorted(set(two.infer(LARGE)))
    gateway = psutil.Process(served.events("gateway started")[-1]["pid"])
    before = gateway.memory_info().rss
    with ExitStack() as unread:
        for held in (7, 0, 0):
            frames = unread.enter_context(Frames(place))
            for _ in range(60):
                frames.begin(SERVICE + "ModelInfer", LARGE, token="one")
            assert 60 - held == len(frames.ends(60 - held))
        # All of them have 720 MiB. What one turn's answers took is not given back to the system.
        assert gateway.memory_info().rss - before < 400 << 20
        status, words = one.refusal(LARGE)
        assert ("RESOURCE_EXHAUSTED", True) == (status, "bytes" in words), words
        assert [2.0, 4.0] == one.infer(request(model="idle"))
        assert [0.0] == sorted(set(two.infer(LARGE)))
    until("room for its answers", lambda: "OK" == one.refusal(LARGE)[0])


def test_requests_of_a_stream_that_is_not_read_wait_unread(workplace: Any, stack: ExitStack) -> None:
    """Some ten of 100 run, as many as may have answers. Another caller is answered; all are, once they are read."""
    place = place_of(serve(workplace))
    one, two = (stack.enter_context(Caller(place, token=token)) for token in ("one", "two"))

    def run() -> int:
        asked = protocol.ModelStatisticsRequest(name="large")
        (told,) = protocol.ModelStatisticsResponse.FromString(two.call("ModelStatistics", asked)).model_stats
        return int(told.inference_count)

    written = Written(LARGE)
    stream = one.stream(iter(written))
    assert 4 << 18 == len(output_of(next(stream).infer_response))
    for _ in range(99):
        written.put(LARGE)
    written.put(None)
    until("its first requests", lambda: run() >= 7)
    for _ in range(20):
        assert 4 << 18 == len(two.infer(LARGE))
    assert run() < 60
    words = [answer.error_message for answer in stream]
    assert [""] * 99 == words
