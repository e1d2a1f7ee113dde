"""Gateways that speak gRPC: what ends, what is replaced, who is let in, and what reaches the server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.conftest import alive, until

grpc = pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
from tests.e2e.grpc_calls import TIMEOUT_S, Caller, Written, output_of, request  # noqa: E402
from tests.secret_files import write_secret  # noqa: E402

from shapestream.gateway import open_inference_pb2 as protocol  # noqa: E402

LOOKED_AT_S = 5.0
"""A deadline that passes while a request is queued: long enough for a slow machine to see the request there."""

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock], grpc: GRPC}
    models:
      - name: gated
        function: gated:MODEL
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
        batching: {max_batch: 1}
    workers: [{count: 1, slots: 1, threads: 1}]
"""


def serve(workplace: Any, grpc_: str = '"127.0.0.1:0"', model: str = "double") -> Any:
    """A server whose gateways are ready."""
    served = workplace.serve(workplace.write(SERVED.replace("GRPC", grpc_).replace("MODEL", model)))
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


def gateway_with(workplace: Any, most_calls: int, model: str = "double") -> tuple[Any, str]:
    """A server, and where a gateway that was started by hand has this limit of calls."""
    served = serve(workplace, model=model)
    gateway = workplace.start(
        "gateway", served.address, "--grpc", "127.0.0.1:0", "--max-calls", str(most_calls)
    )
    (ready,) = gateway.wait_for("gateway ready")
    return served, str(ready["address"].removeprefix("grpc://"))


def place_of(served: Any) -> str:
    """Of its gRPC."""
    (line,) = served.events("grpc ready")
    return str(line["address"])


def pids(served: Any) -> list[int]:
    """Of the gateways that run."""
    return [event["pid"] for event in served.events("gateway started") if alive(event["pid"])]


def queued(client: Any) -> int:
    """Requests that wait at the server."""
    return int(client.statistics()["scheduler"]["queued"])


def first_bytes(address: str, sent: bytes) -> bytes:
    """What a port answers at first to these bytes, over a connection that is tried once."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as raw:
        raw.sendall(sent)
        return raw.recv(9)


def test_ready_means_that_every_port_answers(workplace: Any) -> None:
    """Right after the line of the log: gRPC's library opens its port only when its process is up."""
    everywhere = 'listen: ["tcp://127.0.0.1:*"], http: "127.0.0.1:0", admin: "127.0.0.1:0"'
    served = workplace.serve(
        SERVED.replace("listen: [ipc://s.sock]", everywhere)
        .replace("GRPC", '"127.0.0.1:0"')
        .replace("MODEL", "double")
    )
    (ready,) = served.events("server ready")
    address = next(address for address in ready["listen"] if address.startswith("tcp:"))
    places = {"server": address}
    for kind in ("grpc ready", "http ready", "admin port ready"):
        (line,) = served.events(kind)
        places[kind] = line["address"].rpartition("/")[2]
    get = b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n"
    greetings = {
        "server": b"\xff" + bytes(8) + b"\x7f",
        "grpc ready": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5),
        "http ready": get % b"v2/health/live",
        "admin port ready": get % b"health/live",
    }
    answers = {kind: first_bytes(place, greetings[kind]) for kind, place in places.items()}
    # ZMTP's signature, a frame of settings of HTTP/2, and the status line of HTTP.
    assert (b"\xff", b"\x04") == (answers["server"][:1], answers["grpc ready"][3:4])
    assert [b"HTTP/1.1 "] * 2 == [answers["http ready"], answers["admin port ready"]]


def test_a_killed_gateway_costs_its_connections_and_is_started_again(workplace: Any) -> None:
    """The other one goes on; new connections that find one are answered."""
    served = serve(workplace, '{address: "127.0.0.1:0", count: 2}')
    before = pids(served)
    assert 2 == len(before)
    os.kill(before[0], signal.SIGKILL)
    for _ in range(10):
        with Caller(place_of(served)) as caller:
            assert [2.0, 4.0] == caller.infer()
    served.wait_for("gateways ready", 2)
    assert 2 == len(set(pids(served)) - {before[0]})


def test_a_reload_replaces_gateways_and_reads_tokens_again(workplace: Any) -> None:
    """A channel that stays open goes over to the new gateway. gRPC cancels the calls that meet the end of the old one."""
    tokens = workplace.folder / "tokens"
    write_secret(tokens, "shop first\n")
    served = serve(workplace, f'{{address: "127.0.0.1:0", token_file: "{tokens}"}}')
    place = place_of(served)
    with (
        Caller(place) as stranger,
        Caller(place, token="second") as wrong,
        Caller(place, token="first") as known,
    ):
        for name in ("ServerMetadata", "ModelInfer", "ModelConfig"):
            status, words = stranger.refusal(request(), name)
            assert ("UNAUTHENTICATED", True) == (status, "Authorization: Bearer TOKEN" in words)
        assert "UNAUTHENTICATED" == wrong.refusal(request())[0]
        with pytest.raises(grpc.RpcError) as caught:
            next(stranger.stream(iter(Written(request(), None))))
        assert grpc.StatusCode.UNAUTHENTICATED == caught.value.code()
        assert protocol.ServerLiveResponse.FromString(stranger.call("ServerLive")).live
        assert protocol.ServerReadyResponse.FromString(stranger.call("ServerReady")).ready
        assert [2.0, 4.0] == known.infer()
        write_secret(tokens, "shop first\nshop second\n")
        served.send(signal.SIGHUP)
        met: list[str] = []
        while not served.events("reload ended"):
            status, words = known.refusal(request())
            met += [words] if status == "CANCELLED" else []
            assert status in ("OK", "CANCELLED"), words
        assert len(met) <= 1
        assert "ok" == served.events("reload ended")[0]["result"]
        assert [2.0, 4.0] == wrong.infer()


def test_sigterm_answers_what_was_asked_and_ends_streams(workplace: Any) -> None:
    """A call and a request of a stream run; both are answered. Then the stream ends, and the server with status 0."""
    served = serve(workplace, model="double_when_open")
    with Caller(place_of(served)) as caller, served.client() as client:
        answer = caller.begin(request())
        workplace.wait_entered()
        stream = caller.stream(iter(Written(request([[3]]))))
        until("the stream's request", lambda: queued(client) == 1)
        served.send(signal.SIGTERM)
        served.wait_for("server drains")
        workplace.open_gate()
        assert [2.0, 4.0] == output_of(protocol.ModelInferResponse.FromString(answer.result(TIMEOUT_S)))
        assert [6.0] == output_of(next(stream).infer_response)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
    assert 0 == served.wait()
    assert served.family_is_gone()


def test_what_its_caller_gives_up_is_withdrawn(workplace: Any) -> None:
    """By cancelling, by gRPC's deadline, by the request's own, by a closed channel; alone, and in a stream."""
    served = serve(workplace, model="noted_when_open")
    place = place_of(served)
    with Caller(place) as caller, served.client() as client:
        first = caller.begin(request())
        workplace.wait_entered()

        def waits_then_goes(number: int = 1) -> None:
            until("the request", lambda: queued(client) == number)

        def gone() -> None:
            until("its withdrawal", lambda: queued(client) == 0)

        for n in (7, 8):
            other = caller.begin(request([[n]]))
            waits_then_goes()
            other.cancel()
            gone()
        late = caller.begin(request([[9]]), timeout=LOOKED_AT_S)
        waits_then_goes()
        assert grpc.StatusCode.DEADLINE_EXCEEDED == late.exception(TIMEOUT_S).code()
        gone()
        short = request([[10]])
        short.parameters["timeout"].int64_param = 300_000
        assert "DEADLINE_EXCEEDED" == caller.refusal(short)[0]
        gone()
        stream = caller.stream(iter(Written(request([[11]]), request([[12]]))))
        waits_then_goes(2)
        stream.cancel()
        gone()
        stream = caller.stream(iter(Written(request([[13]]))), timeout=LOOKED_AT_S)
        waits_then_goes()
        gone()
        with Caller(place) as closing:
            left = closing.begin(request([[15]]))  # dropped, it would be cancelled
            waits_then_goes()
            assert not left.done()
        gone()
        written = Written(short, None)
        (failed,) = caller.stream(iter(written))
        assert any(words in failed.error_message for words in ("deadline", "passed", "in time")), failed
        workplace.open_gate()
        assert [2.0, 4.0] == output_of(protocol.ModelInferResponse.FromString(first.result(TIMEOUT_S)))
        assert [2.0, 4.0] == caller.infer()
    assert ["1", "1"] == (workplace.folder / "begun").read_text().split()


def test_a_vanished_process_takes_its_requests_along(workplace: Any) -> None:
    """Callers that are killed while their requests wait."""
    served = serve(workplace, model="noted_when_open")
    script = (
        "import sys; from tests.e2e.grpc_calls import Caller, Written, request\n"
        "caller = Caller(sys.argv[1]); asked = [caller.begin(request([[7]])) for _ in range(4)]\n"
        "stream = caller.stream(iter(Written(request([[8]]), request([[9]]))))\n"
        "print('asked', flush=True); sys.stdin.read()\n"
    )
    with Caller(place_of(served)) as caller, served.client() as client:
        first = caller.begin(request())
        workplace.wait_entered()
        command = [sys.executable, "-c", script, place_of(served)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
            until("its requests", lambda: queued(client) == 6)
            peer.kill()
        until("their withdrawal", lambda: queued(client) == 0)
        workplace.open_gate()
        first.result(TIMEOUT_S)
    assert ["1"] == (workplace.folder / "begun").read_text().split()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls_by_files(workplace: Any) -> None:
    """With a certificate that the caller trusts; without TLS nothing is answered."""
    certificate, key = workplace.folder / "cert.pem", workplace.folder / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", *options, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    served = serve(
        workplace, f'{{address: "127.0.0.1:0", tls: {{certificate: "{certificate}", key: "{key}"}}}}'
    )
    with Caller(place_of(served), roots=certificate.read_bytes()) as caller:
        assert [2.0, 4.0] == caller.infer()
    with Caller(place_of(served)) as plain:
        assert "UNAVAILABLE" == plain.refusal(request(), wait_for_ready=False)[0]


def test_an_address_in_use_is_an_error_at_the_start(workplace: Any) -> None:
    """With its place in the file, whether another program listens there, or another server's gateways."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f'"127.0.0.1:{taken.getsockname()[1]}"'
        refused = workplace.try_serve(SERVED.replace("GRPC", place).replace("MODEL", "double"))
        assert 3 == refused.wait()
    assert "server.grpc" in refused.log.read_text()
    assert "Address already in use" in refused.log.read_text()
    served = serve(workplace)
    text = SERVED.replace("GRPC", f'"{place_of(served)}"').replace("MODEL", "double")
    refused = workplace.try_serve(text.replace("s.sock", "t.sock"))
    assert 3 == refused.wait()
    assert "Address already in use" in refused.log.read_text()


def test_a_gateway_that_a_user_starts(workplace: Any) -> None:
    """It answers, also beyond loopback only with tokens; SIGTERM ends it with status 0."""
    served = serve(workplace)
    gateway = workplace.start("gateway", served.address, "--grpc", "127.0.0.1:0")
    (ready,) = gateway.wait_for("gateway ready")
    with Caller(ready["address"].removeprefix("grpc://")) as caller:
        assert [2.0, 4.0] == caller.infer()
        gateway.send(signal.SIGTERM)
        assert 0 == gateway.wait()
    arguments = ("gateway", "tcp://127.0.0.1:9", "--timeout", "0.2", "--grpc")
    ran = workplace.run(*arguments, "0.0.0.0:0")
    assert (3, True) == (ran.returncode, "open to other machines (add --token-file" in ran.stderr)
    ran = workplace.run(*arguments, "0.0.0.0:0", "--open")
    assert (1, True) == (ran.returncode, "unavailable" in ran.stderr)
    ran = workplace.run(*arguments, "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert (2, True) == (ran.returncode, "start two" in ran.stderr)
    ran = workplace.run("gateway", "tcp://127.0.0.1:9", "--grpc", place_of(served))
    assert (3, True) == (ran.returncode, "Address already in use" in ran.stderr)


def test_probes_ask_by_the_standard_health_check(workplace: Any) -> None:
    """Without a token; the messages here are bytes. A gateway whose server has gone is alive, and not ready."""
    tokens = workplace.folder / "tokens"
    write_secret(tokens, "shop first\n")
    served = serve(workplace)
    gateway = workplace.start("gateway", served.address, "--grpc", "127.0.0.1:0", "--token-file", str(tokens))
    (ready,) = gateway.wait_for("gateway ready")
    with Caller(ready["address"].removeprefix("grpc://")) as caller:

        def status(service: str) -> str:
            message = bytes([10, len(service)]) + service.encode() if service else b""
            answer = caller.channel.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=TIMEOUT_S)
            return {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}[answer]

        services = ("", "inference.GRPCInferenceService", "liveness")
        assert ["SERVING", "SERVING", "SERVING"] == [status(service) for service in services]
        with pytest.raises(grpc.RpcError) as caught:
            status("gated")
        assert grpc.StatusCode.NOT_FOUND == caught.value.code()
        with pytest.raises(grpc.RpcError) as caught:
            next(caller.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=TIMEOUT_S))
        assert grpc.StatusCode.UNIMPLEMENTED == caught.value.code()
        served.send(signal.SIGTERM)
        assert 0 == served.wait()
        assert ["NOT_SERVING", "NOT_SERVING", "SERVING"] == [status(service) for service in services]


def test_calls_beyond_a_callers_quota_are_refused_and_a_connection_keeps_its_own_back(workplace: Any) -> None:
    """Of six calls on one channel three wait at their client, which is told to hold them; on another one a call fails."""
    served, place = gateway_with(workplace, 6, model="double_when_open")
    with Caller(place) as one, Caller(place) as two, served.client() as client:
        asked = [one.begin(request()) for _ in range(6)]
        workplace.wait_entered()
        until("three calls", lambda: queued(client) == 2)
        status, words = two.refusal(request())
        assert ("RESOURCE_EXHAUSTED", True) == (status, "4 calls" in words), words
        workplace.open_gate()
        for call in asked:
            call.result(TIMEOUT_S)


def test_a_channel_at_its_limit_has_no_call_refused(workplace: Any) -> None:
    """Two calls of it run at a time, and 1,000 wait at their client in between."""
    _, place = gateway_with(workplace, 4)
    with Caller(place) as caller:
        asked = [caller.begin(request()) for _ in range(1000)]
        assert [] == [error for call in asked if (error := call.exception(TIMEOUT_S)) is not None]


def test_a_stream_is_in_order_and_goes_on_after_an_error(workplace: Any) -> None:
    """Several models, ids, outputs and errors of every kind; the sender may wait for each answer."""
    served = serve(workplace)
    bad = request([[1]], id="bad")
    bad.inputs[0].datatype = "INT32"
    final = request([[5]], id="last")
    final.parameters["triton_enable_empty_final_response"].bool_param = True
    with Caller(place_of(served)) as caller:
        written = Written(request([[1]], id="a"))
        stream = caller.stream(iter(written))
        answer = next(stream)
        assert ("", "a", [2.0]) == (
            answer.error_message,
            answer.infer_response.id,
            output_of(answer.infer_response),
        )
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        for message in (
            bad,
            request([[14]], id="fails"),
            request(model="none", id="none"),
            b"\xff",
            final,
            None,
        ):
            written.put(message)
        answers = list(stream)
    assert ["bad", "fails", "none", "", "last"] == [answer.infer_response.id for answer in answers]
    words = [answer.error_message for answer in answers]
    for part, found in zip(
        ("FP32", "not to my liking", "no model", "no ModelInferRequest", ""), words, strict=True
    ):
        assert part in found
    assert [False, False, False, False, True] == [not word for word in words]
    assert [10.0] == output_of(answers[-1].infer_response)


def test_a_stream_reads_no_further_than_it_may(workplace: Any) -> None:
    """While the model stands still, at most 64 requests are read; all are answered afterwards, in order."""
    served = serve(workplace, model="double_when_open")
    read = 0

    def messages() -> Iterator[Any]:
        nonlocal read
        for number in range(200):
            read += 1
            yield request([[number]], id=str(number))

    with Caller(place_of(served)) as caller, served.client() as client:
        stream = caller.stream(messages())
        workplace.wait_entered()
        until("a full window", lambda: queued(client) == 63)
        workplace.open_gate()
        assert [str(number) for number in range(200)] == [answer.infer_response.id for answer in stream]
    assert 200 == read


def test_callers_are_told_apart_and_ids_and_traces_go_on(workplace: Any) -> None:
    """By address without tokens; `id` or x-request-id names the story of a request."""
    served = serve(workplace)
    with Caller(place_of(served)) as caller, served.client() as client:
        caller.infer(request(id="own-id"))
        caller.infer(metadata=[("x-request-id", "by-header")])
        list(caller.stream(iter(Written(request(id="streamed"), None))))
        for name in ("own-id", "by-header", "streamed"):
            (story,) = client.stories(name)
            assert "127.0.0.1" in str(story), story


def test_many_callers_at_once(workplace: Any) -> None:
    """Threads with channels of their own, calls and streams: each gets its own answers."""
    served = serve(workplace)
    wrong: list[Any] = []

    def ask(number: int) -> None:
        with Caller(place_of(served)) as caller:
            for n in range(20):
                wrong.extend(
                    x
                    for x in [caller.infer(request([[number, n + 20]]))]
                    if x != [number * 2.0, n * 2.0 + 40]
                )
            found = [
                output_of(answer.infer_response)
                for answer in caller.stream(
                    iter(Written(*[request([[number, n + 20]]) for n in range(20)], None))
                )
            ]
            wrong.extend(x for n, x in enumerate(found) if x != [number * 2.0, n * 2.0 + 40])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, (1, 2, 3, 4, 5, 6, 7, 8)))
    assert [] == wrong
    assert threading.active_count() < 64
