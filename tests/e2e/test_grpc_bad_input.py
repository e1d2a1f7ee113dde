"""Bad input over gRPC, as a raw client may send it: refused within limits, and the next caller is answered."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from tests.e2e.conftest import until

grpc = pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
from tests.e2e.grpc_calls import Caller, Written, request  # noqa: E402

from shapestream.gateway import open_inference_pb2 as protocol  # noqa: E402

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock], grpc: {address: "127.0.0.1:0", max_body: 8 MiB}}
    models:
      - name: gated
        function: gated:double
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:0..4194304", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
        batching: {max_batch: 1}
      - name: tokens
        function: words:tokenise
        calibration_s: 0
        inputs: {text: {shape: "texts", element_type: str}}
        outputs:
          input_ids: {rule: list, shape: "tokens", element_type: i64}
          tokens: {shape: "texts", element_type: i64}
        batching: {max_batch: 1}
    in_process: true
"""
HUGE = 2**62


@pytest.fixture(scope="module")
def served(module_workplace: Any) -> Any:
    """A server with one gateway."""
    served = module_workplace.serve(module_workplace.write(SERVED))
    served.wait_for("gateways ready")
    return served


@pytest.fixture
def caller(served: Any) -> Iterator[Caller]:
    """A channel, whose honest request is answered afterwards as well, by the same process."""
    (line,) = served.events("grpc ready")
    with Caller(line["address"]) as caller:
        yield caller
        assert [2.0, 4.0] == caller.infer()
        assert 1 == len(served.events("gateway started"))


def changed(change: Callable[[Any], object], data: Any = ((1, 2),)) -> Any:
    """A good request with a change."""
    message = request(data)
    change(message)
    return message


def shaped(*shape: int) -> Any:
    """A request of this shape, and 8 bytes."""
    message = request()
    del message.inputs[0].shape[:]
    message.inputs[0].shape.extend(shape)
    return message


def typed(field: str, values: Any) -> Any:
    """A request with typed contents."""
    message = request()
    del message.raw_input_contents[:]
    getattr(message.inputs[0].contents, field).extend(values)
    return message


BAD: dict[str, tuple[Any, str, str]] = {
    "an unknown model": (request(model="none"), "NOT_FOUND", "no model is called 'none'"),
    "no model": (request(model=""), "NOT_FOUND", "no model"),
    "a long name": (request(model="m" * 1000), "NOT_FOUND", "at most"),
    "another version": (request(model_version="2"), "NOT_FOUND", "the version '1' only"),
    "no input": (
        changed(lambda m: m.ClearField("inputs") or m.ClearField("raw_input_contents")),
        "INVALID_ARGUMENT",
        "x",
    ),
    "an unknown input": (
        changed(lambda m: setattr(m.inputs[0], "name", "z")),
        "INVALID_ARGUMENT",
        "no input 'z'",
    ),
    "an input twice": (
        changed(lambda m: (m.inputs.append(m.inputs[0]), m.raw_input_contents.append(b"12345678"))),
        "INVALID_ARGUMENT",
        "given twice",
    ),
    "another datatype": (
        changed(lambda m: setattr(m.inputs[0], "datatype", "INT64")),
        "INVALID_ARGUMENT",
        "FP32",
    ),
    "strings": (
        changed(lambda m: setattr(m.inputs[0], "datatype", "BYTES")),
        "INVALID_ARGUMENT",
        "FP32",
    ),
    "a negative size": (shaped(1, -2), "INVALID_ARGUMENT", "a size lies within 0.."),
    "a huge size": (shaped(1, HUGE), "INVALID_ARGUMENT", "n"),
    "an overflowing product": (shaped(8, 2**61 + 1), "INVALID_ARGUMENT", "n"),
    "too many rows": (shaped(9, 1), "INVALID_ARGUMENT", "batch"),
    "another rank": (shaped(2), "INVALID_ARGUMENT", "x"),
    "a thousand axes": (shaped(*(1,) * 1000), "INVALID_ARGUMENT", "at most 32"),
    "too few bytes": (shaped(1, 3), "INVALID_ARGUMENT", "takes 12 bytes, and raw_input_contents has 8"),
    "too many bytes": (shaped(1, 1), "INVALID_ARGUMENT", "takes 4 bytes, and raw_input_contents has 8"),
    "raw and typed": (
        changed(lambda m: m.inputs[0].contents.fp32_contents.extend([1, 2])),
        "INVALID_ARGUMENT",
        "has contents",
    ),
    "raw too many": (
        changed(lambda m: m.raw_input_contents.append(b"")),
        "INVALID_ARGUMENT",
        "1 inputs, and 2",
    ),
    "raw too few": (
        changed(lambda m: m.inputs.append(protocol.ModelInferRequest.InferInputTensor(name="y"))),
        "INVALID_ARGUMENT",
        "no input 'y'",
    ),
    "neither raw nor typed": (
        changed(lambda m: m.ClearField("raw_input_contents")),
        "INVALID_ARGUMENT",
        "0 elements",
    ),
    "typed too few": (typed("fp32_contents", [1]), "INVALID_ARGUMENT", "1 elements"),
    "typed otherwise": (typed("fp64_contents", [1, 2]), "INVALID_ARGUMENT", "not in fp64_contents"),
    "typed strings": (typed("bytes_contents", [b"a", b"b"]), "INVALID_ARGUMENT", "not in bytes_contents"),
    "an unknown output": (changed(lambda m: m.outputs.add(name="z")), "INVALID_ARGUMENT", "no output 'z'"),
    "an output twice": (
        changed(lambda m: (m.outputs.add(name="y"), m.outputs.add(name="y"))),
        "INVALID_ARGUMENT",
        "asked for twice",
    ),
    "classification": (
        changed(lambda m: m.outputs.add(name="y").parameters["classification"].__setattr__("int64_param", 1)),
        "UNIMPLEMENTED",
        "classification",
    ),
    "shared memory": (
        changed(lambda m: m.inputs[0].parameters["shared_memory_region"].__setattr__("string_param", "r")),
        "UNIMPLEMENTED",
        "shared memory",
    ),
    "a sequence": (
        changed(lambda m: m.parameters["sequence_id"].__setattr__("int64_param", 1)),
        "UNIMPLEMENTED",
        "sequence_id",
    ),
    "a timeout that is none": (
        changed(lambda m: m.parameters["timeout"].__setattr__("string_param", "1")),
        "INVALID_ARGUMENT",
        "timeout",
    ),
    "a negative timeout": (
        changed(lambda m: m.parameters["timeout"].__setattr__("int64_param", -1)),
        "INVALID_ARGUMENT",
        "timeout",
    ),
    "a priority beyond": (
        changed(lambda m: m.parameters["priority"].__setattr__("uint64_param", 2**64 - 1)),
        "INVALID_ARGUMENT",
        "priority",
    ),
    "what the model refuses": (request([[14]]), "INTERNAL", "not to my liking"),
    "65 inputs": (changed(lambda m: m.inputs.extend([m.inputs[0]] * 64)), "INVALID_ARGUMENT", "at most 64"),
    "no protobuf": (b"\xff\xff\xff", "INVALID_ARGUMENT", "no ModelInferRequest"),
    "a group": (b"\x0b\x0c", "INVALID_ARGUMENT", "wire type 3"),
    "a field cut off": (b"\x3a\x7f12", "INVALID_ARGUMENT", "cut off"),
    "text that is none": (b"\x0a\x02\xff\xfe", "INVALID_ARGUMENT", "no ModelInferRequest"),
    "a million tensors": (b"\x2a\x00" * 1_000_000, "INVALID_ARGUMENT", "fields"),
    "a million raw tensors": (b"\x3a\x00" * 1_000_000, "INVALID_ARGUMENT", "fields"),
    "a name of 5 MiB": (request(model="m" * (5 << 20)), "RESOURCE_EXHAUSTED", "send tensors raw"),
    "a million strings": (
        protocol.ModelInferRequest(
            model_name="gated",
            inputs=[
                protocol.ModelInferRequest.InferInputTensor(
                    name="x",
                    datatype="FP32",
                    shape=[1, 2],
                    contents=protocol.InferTensorContents(bytes_contents=[b""] * 1_000_000),
                )
            ],
        ),
        "INVALID_ARGUMENT",
        "bytes_contents",
    ),
    "two million raw strings": (
        protocol.ModelInferRequest(
            model_name="tokens",
            inputs=[
                protocol.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[2_000_000])
            ],
            raw_input_contents=[bytes(8_000_000)],
        ),
        "RESOURCE_EXHAUSTED",
        "at most 65536",
    ),
    "a message beyond the limit": (request(np.zeros((1, 3 << 20))), "RESOURCE_EXHAUSTED", "larger than max"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_by_its_status(caller: Caller, what: str) -> None:
    """And in a stream by its words; what is beyond gRPC's own limit ends the stream."""
    message, status, words = BAD[what]
    found, told = caller.refusal(message)
    assert (status, True) == (found, words in told), told
    assert len(told) < 3000
    if "larger than max" not in words:
        bad, good = caller.stream(iter(Written(message, request(), None)))
        assert words in bad.error_message, bad.error_message
        assert "" == good.error_message


def test_a_compressed_message_is_limited_after_it_is_undone(caller: Caller) -> None:
    """A bomb of gzip, 12 MiB of zeros; a request that fits is answered."""
    gzip = grpc.Compression.Gzip
    status, words = caller.refusal(request(np.zeros((1, 3 << 20))), compression=gzip)
    assert "RESOURCE_EXHAUSTED" == status, words
    assert [0.0] * 1000 == caller.infer(request(np.zeros((1, 1000))), compression=gzip)


def test_metadata_are_limited(caller: Caller) -> None:
    """70 KiB are refused by gRPC itself."""
    assert "RESOURCE_EXHAUSTED" == caller.refusal(request(), metadata=[("x-long", "x" * 70_000)])[0]


def test_an_unknown_call_is_unimplemented(caller: Caller) -> None:
    """Shared memory, loading, tracing: parts of the protocol that are not served."""
    for name in ("RepositoryModelLoad", "SystemSharedMemoryStatus", "TraceSetting", "Nothing"):
        assert "UNIMPLEMENTED" == caller.refusal(b"", name)[0]
    assert "INVALID_ARGUMENT" == caller.refusal(b"\xff", "ModelMetadata")[0]
    assert "RESOURCE_EXHAUSTED" == caller.refusal(b"\x12\x00" * 40_000, "ServerLive")[0]
    for name in ("ModelMetadata", "ModelConfig", "ModelStatistics", "ModelReady"):
        assert "NOT_FOUND" == caller.refusal(protocol.ModelReadyRequest(name="none"), name)[0]
        wrong = protocol.ModelReadyRequest(name="gated", version="7")
        assert "NOT_FOUND" == caller.refusal(wrong, name)[0]


def test_a_refusal_says_whether_to_try_again(caller: Caller) -> None:
    """By gRPC's pushback, which clients with a retry policy follow: never, for a request that stays wrong."""
    future = caller.begin(request(model="none"))
    assert grpc.StatusCode.NOT_FOUND == future.exception().code()
    assert ("grpc-retry-pushback-ms", "-1") in [tuple(pair) for pair in future.trailing_metadata()]


def test_bad_input_leaves_no_memory_and_no_descriptors(served: Any, caller: Caller) -> None:
    """The worst messages many times, and an honest caller beside them."""
    gateway = psutil.Process(served.events("gateway started")[-1]["pid"])
    worst = [BAD[name][0] for name in ("a million tensors", "a million strings", "a name of 5 MiB")]

    def misuse(rounds: int) -> None:
        for _ in range(rounds):
            for message in worst:
                caller.refusal(message)
            assert [2.0, 4.0] == caller.infer()

    misuse(60)  # until each thread has met them: malloc keeps something for each
    descriptors = gateway.num_fds()

    def grown() -> int:
        before = gateway.memory_info().rss
        misuse(40)
        return int(gateway.memory_info().rss - before)

    # A leak grows each time. What malloc keeps for one more thread at work grows once.
    assert any(grown() < 48 << 20 for _ in range(4))
    until("its descriptors", lambda: gateway.num_fds() <= descriptors + 2)


def test_connections_that_say_nothing_or_nonsense(served: Any, caller: Caller) -> None:
    """Raw sockets that vanish, and HTTP/1.1 at the port of gRPC, leave no descriptor."""
    (line,) = served.events("grpc ready")
    host, _, port = line["address"].rpartition(":")
    gateway = psutil.Process(served.events("gateway started")[-1]["pid"])
    caller.infer()
    before = gateway.num_fds()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for words in (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        preface,
        preface + b"\0\0\0\4\0\0\0\0\0",
        b"\xff" * 500,
    ):
        for _ in range(20):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(words)
    assert [2.0, 4.0] == caller.infer()
    until("their end", lambda: gateway.num_fds() <= before)


def test_pages(caller: Caller) -> None:
    """What the calls about the server and its models say: the same as over HTTP."""
    server = protocol.ServerMetadataResponse.FromString(caller.call("ServerMetadata"))
    assert "shapestream" == server.name
    assert "statistics" in server.extensions
    row, _ = protocol.RepositoryIndexResponse.FromString(caller.call("RepositoryIndex")).models
    assert ("gated", "1", "READY") == (row.name, row.version, row.state)
    named = protocol.ModelReadyRequest(name="gated")
    assert protocol.ModelReadyResponse.FromString(caller.call("ModelReady", named)).ready
    metadata = protocol.ModelMetadataResponse.FromString(caller.call("ModelMetadata", named))
    assert ("x", "FP32", [-1, -1]) == (
        metadata.inputs[0].name,
        metadata.inputs[0].datatype,
        metadata.inputs[0].shape,
    )
    config = protocol.ModelConfigResponse.FromString(caller.call("ModelConfig", named)).config
    assert (8, [-1], protocol.TYPE_FP32) == (
        config.max_batch_size,
        config.input[0].dims,
        config.input[0].data_type,
    )
    assert config.HasField("dynamic_batching")
    assert not config.model_transaction_policy.decoupled

    def counted() -> tuple[int, int, int]:
        answer = protocol.ModelStatisticsResponse.FromString(caller.call("ModelStatistics", named))
        (told,) = answer.model_stats
        return told.inference_count, told.inference_stats.success.count, told.inference_stats.fail.count

    time.sleep(0.2)  # callers share what the server said up to 0.1 s ago
    before, now_ms = counted(), time.time() * 1000
    caller.infer(request([[1, 2], [3, 4]]))
    list(caller.stream(iter(Written(request(), request([[14]]), request(model="none"), None))))
    wanted = tuple(x + y for x, y in zip(before, (3, 2, 1), strict=True))
    give_up_at = time.monotonic() + 10
    while counted() != wanted and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert wanted == counted()
    told, _ = protocol.ModelStatisticsResponse.FromString(caller.call("ModelStatistics")).model_stats
    assert abs(told.last_inference - now_ms) < 3_600_000


def test_typed_and_raw_contents_mean_the_same(caller: Caller) -> None:
    """No elements, and many; outputs come raw."""
    assert [3.0, -7.0] == caller.infer(typed("fp32_contents", [1.5, -3.5]))
    empty = shaped(1, 0)
    empty.raw_input_contents[:] = [b""]
    assert [] == caller.infer(empty)
    del empty.raw_input_contents[:]
    assert [] == caller.infer(empty)
    many = typed("fp32_contents", [0.5] * 200_000)
    del many.inputs[0].shape[:]
    many.inputs[0].shape.extend([2, 100_000])
    assert [1.0] * 200_000 == caller.infer(many)
