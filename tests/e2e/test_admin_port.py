"""The admin port of real servers and workers, asked by a client that shares nothing with it."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.e2e.admin import ADMIN, DIALS_IN, METERED, MODELS, connected, get, port_of, scrape
from tests.e2e.conftest import PATIENCE_S, temporary_workplace, until
from tests.secret_files import write_secret

from shapestream.errors import ModelError, WorkerLost

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e


def put_level(port: int, body: bytes, kind: str = "application/json", **headers: str) -> tuple[int, Any]:
    """Status and JSON of a change of the log."""
    return get(port, "/logging", "PUT", body, **{"Content-Type": kind}, **headers)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other end closes."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def test_ready_means_that_every_model_has_a_slot_and_the_server_does_not_drain(workplace: Any) -> None:
    """Not before the worker is there, not after it left, not from SIGTERM on; alive all the while."""
    served = workplace.serve(DIALS_IN.replace("SERVER", ADMIN.replace("}", ", worker_listen: ipc://w.sock}")))
    port = port_of(served)
    nobody = (503, {"ready": False, "why": ["no slot for model 'gated'"]})
    assert nobody == get(port, "/health/ready")
    assert (200, {"live": True, "why": []}) == get(port, "/health/live")
    worker = workplace.start("worker", str(served.config))
    until("a slot", lambda: get(port, "/health/ready") == (200, {"ready": True, "why": []}))
    worker.send(signal.SIGTERM)
    assert 0 == worker.wait()
    until("no slot", lambda: get(port, "/health/ready") == nobody)
    assert 200 == get(port, "/health/live")[0]
    workplace.start("worker", str(served.config))
    until("a slot", lambda: get(port, "/health/ready")[0] == 200)
    with served.client() as client, ThreadPoolExecutor() as beside:
        answer = beside.submit(client.infer, "gated", {"x": np.ones((1, 2), np.float32)})
        workplace.wait_entered()
        served.send(signal.SIGTERM)
        until("the drain", lambda: "the server leaves" in get(port, "/health/ready")[1]["why"])
        assert 200 == get(port, "/health/live")[0]
        workplace.open_gate()
        assert 2.0 == answer.result()["y"][0, 0]
    assert 0 == served.wait()


def test_no_server_is_ready_before_its_gateways(workplace: Any) -> None:
    """A balancer that believed it would be refused: gRPC's port is not open yet."""
    pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
    both = ADMIN.replace("admin", "http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin")
    served = workplace.try_serve(MODELS.replace("SERVER", both))
    port = port_of(served)
    until("readiness", lambda: get(port, "/health/ready")[0] == 200)
    assert 1 == len(served.events("grpc ready"))


def test_live_fails_while_the_loop_stands_still_and_while_all_slots_hang(workplace: Any) -> None:
    """A stopped process does not answer; one whose only slot is lost says that only a restart helps."""
    config = MODELS.replace("SERVER", ADMIN)
    served = workplace.serve(
        config.replace("trust: true", "batching: {hang_after_s: 0.2}\n        trust: true"), hang_grace_s=0.2
    )
    port = port_of(served)
    served.send(signal.SIGSTOP)
    try:
        with connected(port) as probe:
            probe.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            probe.settimeout(0.5)
            with pytest.raises(TimeoutError):
                probe.recv(1)
    finally:
        served.send(signal.SIGCONT)
    until("life", lambda: get(port, "/health/live")[0] == 200)
    with served.client() as client, ThreadPoolExecutor() as beside:
        answer = beside.submit(client.infer, "gated", {"x": np.ones((1, 2), np.float32)})
        workplace.wait_entered()
        lost = (503, {"live": False, "why": ["the calls of all slots hang"]})
        until("a lost slot", lambda: get(port, "/health/live") == lost)
        with pytest.raises(WorkerLost):
            answer.result()
    workplace.open_gate()


def test_while_models_are_prepared_the_process_lives_and_is_not_ready(workplace: Any) -> None:
    """In process the main thread prepares them. Nothing else can be read until they are there."""
    served = workplace.try_serve(
        MODELS.replace("SERVER", ADMIN)
        .replace("gated:double_when_open", "slow_import:call")
        .replace("{x:", "{a:")
    )
    port = port_of(served)
    until("the import", lambda: list(workplace.folder.glob("began-*")))
    why = "models are being prepared"
    assert (200, {"live": True, "why": []}) == get(port, "/health/live")
    assert (503, {"ready": False, "why": [why]}) == get(port, "/health/ready")
    for path in ("/metrics", "/statistics", "/logging", "/nothing"):
        assert (503, {"error": why}) == get(port, path)
    assert (503, {"error": why}) == put_level(port, b'{"level": "debug"}')
    (workplace.folder / "go").touch()
    until("ready", lambda: get(port, "/health/ready") == (200, {"ready": True, "why": []}))
    assert (200, 404) == (get(port, "/statistics")[0], get(port, "/nothing")[0])


def test_the_level_of_the_log_changes_while_the_server_runs(workplace: Any) -> None:
    """Its workers follow, also one that is started later; SIGHUP reads the YAML again."""
    workplace.open_gate()
    text = MODELS.replace("SERVER", ADMIN).replace("in_process: true", "workers: [{count: 1, slots: 1}]")
    served = workplace.serve(text)
    port = port_of(served)
    until("a slot", lambda: get(port, "/health/ready")[0] == 200)

    def ask() -> None:
        with served.client() as client:
            client.infer("gated", {"x": np.ones((1, 2), np.float32)})

    ask()
    assert [] == served.events("request arrived") + served.events("batch ran here")
    assert (200, {"level": "info", "format": "auto"}) == get(port, "/logging")
    assert (200, {"level": "debug", "format": "auto"}) == put_level(port, b'{"level": "debug"}')
    served.wait_for("logging changes", 2)
    ask()
    assert 1 == len(served.events("request arrived"))
    served.wait_for("batch ran here")
    (pid,) = served.workers().values()
    psutil.Process(pid).kill()
    served.wait_for("logging changes", 3)
    ask()
    served.wait_for("batch ran here", 2)
    workplace.write(text + "    logging: {level: warning, format: pretty}\n")
    served.send(signal.SIGHUP)
    until("another level", lambda: get(port, "/logging")[1] == {"level": "warning", "format": "pretty"})
    assert "logging changes" in served.log.read_text().splitlines()[-1]


def test_a_model_that_was_added_counts_once_it_was_served(workplace: Any) -> None:
    """Until then the server stays ready, as its other models are served; each model has a check of its own."""
    workplace.open_gate()
    text = MODELS.replace("SERVER", ADMIN).replace("in_process: true", "workers: [{count: 1, slots: 1}]")
    served = workplace.serve(text)
    port = port_of(served)
    until("a slot", lambda: get(port, "/health/ready")[0] == 200)

    def ready(name: str) -> tuple[int, dict[str, Any]]:
        return get(port, f"/health/ready?model={name}")

    unknown = (404, {"ready": False, "model": "slow", "why": ["no model 'slow'"]})
    assert [unknown, (200, {"ready": True, "model": "gated", "why": []})] == [ready("slow"), ready("gated")]
    entry = text[text.index("      - name: gated") : text.index("    workers")]
    slow = entry.replace("name: gated", "name: slow").replace("gated:double_when_open", "slow_import:call")
    slow = slow.replace("{x:", "{a:")
    broken = entry.replace("name: gated", "name: slow").replace("gated:double_when_open", "gated:nothing")
    waits = (503, {"ready": False, "model": "slow", "why": ["no slot for model 'slow'"]})
    for added in (broken, slow):
        workplace.write(text.replace("    workers", added + "    workers"))
        served.send(signal.SIGHUP)
        served.wait_for("worker is replaced", 1 + (added is slow))
        assert (200, {"ready": True, "why": []}) == get(port, "/health/ready")
        assert [waits, 200] == [ready("slow"), ready("gated")[0]]
        if added is broken:
            served.wait_for("worker cannot be replaced")
            assert (200, {"ready": True, "why": []}) == get(port, "/health/ready")
            until("the verdict", lambda: "gated" in ready("slow")[1]["why"][0])
    (workplace.folder / "go").touch()
    until("a slot for it", lambda: ready("slow") == (200, {"ready": True, "model": "slow", "why": []}))
    served.wait_for("worker ended", 2)
    (worker,) = served.workers().values()
    psutil.Process(worker).kill()
    both = ["no slot for model 'gated'", "no slot for model 'slow'"]
    until("its end", lambda: get(port, "/health/ready") == (503, {"ready": False, "why": both}))
    until("another", lambda: get(port, "/health/ready")[0] == 200)
    workplace.write(text)
    served.send(signal.SIGHUP)
    served.wait_for("model is unavailable", 2)
    assert 503 == ready("slow")[0]
    assert "reloaded configuration" in ready("slow")[1]["why"][0]
    assert (200, {"ready": True, "why": []}) == get(port, "/health/ready")


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"Authorization": "Bearer no"},
        {"Authorization": "Basic secret-word"},
        {"Authorization": "Bearer \xff"},
        {"Authorization": "Bearer " + "secret-word" * 1000},
    ],
)
def test_a_token_is_asked_for(module_workplace: Any, wrong: dict[str, str]) -> None:
    """Beyond loopback; without it, health checks say yes or no, and nothing else is told."""
    if not module_workplace.commands:
        write_secret(module_workplace.folder / "token", "secret-word\n")
        server = "{listen: [ipc://s.sock], admin: {address: 0.0.0.0:0, token_file: token}}"
        module_workplace.serve(MODELS.replace("SERVER", server))
    port = port_of(module_workplace.commands[0])
    right = {"Authorization": "Bearer secret-word"}
    assert 401 == get(port, "/statistics", **wrong)[0]
    assert 401 == put_level(port, b'{"level": "debug"}', **wrong)[0]
    assert (200, {"live": True}) == get(port, "/health/live", **wrong)
    assert (200, {"ready": True}) == get(port, "/health/ready", **wrong)
    assert 200 == get(port, "/statistics", **right)[0]
    assert (200, {"level": "info", "format": "auto"}) == put_level(port, b'{"level": "info"}', **right)
    assert (200, {"live": True, "why": []}) == get(port, "/health/live", **right)


def test_a_port_in_use_is_one_line_and_status_3(workplace: Any) -> None:
    """Before any other port is open."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config = workplace.write(MODELS.replace("SERVER", ADMIN.replace("127.0.0.1:0", taken)))
        ran = workplace.run("serve", str(config))
    assert 3 == ran.returncode
    (line,) = ran.stderr.splitlines()
    assert f"{config}:1:" in line
    assert f'server.admin: "{taken}": Address already in use' in line


def test_a_worker_has_its_own_port_where_asked(workplace: Any) -> None:
    """Alive before there is a server, ready with its welcome."""
    config = workplace.write(
        DIALS_IN.replace("SERVER", "{listen: [ipc://s.sock], worker_listen: ipc://w.sock}")
    )
    worker = workplace.start("worker", str(config), "--admin", "127.0.0.1:0")
    port = port_of(worker)
    assert (200, {"live": True, "why": []}) == get(port, "/health/live")
    worker.wait_for("worker starts")
    unwelcome = (503, {"ready": False, "why": ["no server has welcomed this worker"]})
    assert unwelcome == get(port, "/health/ready")
    served = workplace.serve(config)
    until("the welcome", lambda: get(port, "/health/ready")[0] == 200)
    served.kill()
    until("the end of the session", lambda: get(port, "/health/ready") == unwelcome)
    assert 3 == workplace.run("worker", str(config), "--admin", "0.0.0.0:0").returncode


@pytest.fixture(scope="module")
def misused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that the misuse below is directed at; no misuse may be a surprise to it."""
    for place in temporary_workplace(tmp_path_factory):
        place.open_gate()
        served = place.serve(MODELS.replace("SERVER", ADMIN))
        yield served
        assert [] == served.events("admin port failed")


@pytest.fixture
def port(misused: Any) -> int:
    """Its port."""
    return port_of(misused)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_reading_is_allowed(port: int, method: str) -> None:
    """Other methods are refused, unknown paths are not found, HEAD is the head of GET."""
    assert 405 == get(port, "/statistics", method)[0]
    assert 404 == get(port, "/nothing", "GET")[0]
    assert 400 == get(port, "/statistics", "BREW")[0]
    assert (200, {}) == get(port, "/health/live", "HEAD")


@pytest.mark.parametrize(
    ("path", "status", "key"),
    [
        ("/requests/x", 404, "unknown"),
        (f"/requests/{'0' * 32}-1", 404, "unknown"),
        (f"/requests/{'0' * 32}-{'9' * 400}", 404, "unknown"),
        (f"/requests/{'x' * 8000}", 404, "unknown"),
        ("/requests/%00%ff", 400, "error"),
        ("/requests/%ed%a0%80", 400, "error"),  # half of a surrogate pair
        ("/requests?slowest=-1", 400, "error"),
        ("/requests?slowest=1e9", 400, "error"),
        ("/requests?slowest=", 400, "error"),
        ("/requests?slowest=%d9%a3", 200, "stories"),  # a digit elsewhere
        ("/requests?slowest=1&slowest=x", 400, "error"),
        ("/requests?request=x", 200, "stories"),
    ],
)
def test_unknown_ids_and_wrong_numbers_are_said(port: int, path: str, status: int, key: str) -> None:
    """None of them is an error of the server."""
    found, answer = get(port, path)
    assert status == found
    assert key in answer


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b'{"level": "debug"}', "text/plain", "application/json"),  # what a page of another site can send
        (b'{"level": "debug"}', "application/x-www-form-urlencoded", "application/json"),
        (b'{"level": "loud"}', "application/json", "debug, info, warning, error"),
        (b'{"level": "debug", "format": "json"}', "application/json", 'expected {"level": LEVEL}'),
        (b'{"level": ["debug"]}', "application/json", "LEVEL"),
        (b'"debug"', "application/json", "LEVEL"),
        (b"[" * 16_000, "application/json", "expected JSON"),
        (b'{"level": ', "application/json", "expected JSON"),
        (b"\xff", "application/json; charset=utf-8", "expected JSON"),
        (b"", "application/json", "expected JSON"),
    ],
)
def test_a_change_of_the_log_that_cannot_be_read_changes_nothing(
    port: int, body: bytes, kind: str, words: str
) -> None:
    """The answer says what is expected."""
    status, answer = put_level(port, body, kind)
    assert 400 == status
    assert words in answer["error"]
    assert 413 == put_level(port, body + b" " * 20_000, kind)[0]
    assert "info" == get(port, "/logging")[1]["level"]


@pytest.mark.parametrize("headers", [{"Host": "elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_no_page_from_elsewhere_changes_the_log(port: int, headers: dict[str, str]) -> None:
    """Nor may it: the question that a browser asks before such a PUT is refused, too."""
    assert 421 == put_level(port, b'{"level": "debug"}', **headers)[0]
    assert 405 == get(port, "/logging", "OPTIONS", Origin="http://localhost:8000")[0]
    assert "info" == get(port, "/logging")[1]["level"]


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET /statistics HTTP/1.1\r\nX: " + b"x" * 1_000_000, id="an endless header"),
        pytest.param(b"GET /statistics HTTP/1.1\r\n" + b"X: y\r\n" * 100_000, id="many headers"),
        pytest.param(b"GET /" + b"x" * 1_000_000, id="an endless path"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000, id="HTTP/2 and then nonsense"),
        pytest.param(
            b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: !!!\r\n\r\n" + b"\0" * 100,
            id="a wrong upgrade",
        ),
        pytest.param(
            b"POST /statistics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            id="a wrong chunk",
        ),
        pytest.param(
            b"POST /statistics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
            + b"x" * 1_000_000,
            id="an endless body",
        ),
        pytest.param(
            b"PUT /logging HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n{",
            id="half a body",
        ),
        pytest.param(bytes(range(256)) * 100, id="all bytes"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, id="TLS"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_garbage_ends_its_connection_and_no_other(port: int, garbage: bytes) -> None:
    """Whatever is sent, the connection is closed by us, and the next caller is served."""
    with connected(port) as bad:
        try:
            bad.sendall(garbage)
            if garbage:
                bad.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was closed already
        answer = read_all(bad)
    assert b'"results"' not in answer
    assert 200 == get(port, "/health/live")[0]


def test_callers_that_vanish_or_do_not_read_disturb_no_other(misused: Any, port: int) -> None:
    """Ends and resets in the middle of a request and of an answer, answers that are never read: nothing is left of them."""
    ask = b"GET /statistics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert 200 == get(port, "/statistics")[0]
    process = psutil.Process(misused.pid)
    files = process.num_fds()
    for sent in (b"GET /stat", ask, ask * 50, ask * 1000):
        for linger in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):  # an orderly end, and a reset
            for _ in range(10):
                with connected(port) as gone:
                    gone.sendall(sent)
                    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    deaf = []
    try:
        for _ in range(10):
            other = socket.socket()
            deaf.append(other)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            other.settimeout(PATIENCE_S)
            other.connect(("127.0.0.1", port))
            other.setblocking(False)
            try:
                for _ in range(1000):
                    other.sendall(ask)
            except (BlockingIOError, ConnectionError):
                pass  # one answer ends a connection
        silent = [connected(port) for _ in range(50)]
        deaf += silent
        assert 200 == get(port, "/health/live")[0]
        assert 200 == get(port, "/statistics")[0]
        until("their end", lambda: process.num_fds() <= files)
    finally:
        for other in deaf:
            other.close()


def test_callers_that_do_not_read_do_not_hold_up_the_end(workplace: Any) -> None:
    """A drained server ends beside connections that are silent, or whose answers nobody reads."""
    served = workplace.serve(MODELS.replace("SERVER", ADMIN))
    deaf = [connected(port_of(served)) for _ in range(20)]
    for other in deaf[::2]:
        other.sendall(b"GET /statistics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert 200 == get(port_of(served), "/health/live")[0]
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    for other in deaf:
        other.close()


def test_systemd_is_told(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY when the ports are open, WATCHDOG while the loop turns, STOPPING when it drains."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        path = Path(workplace.folder) / "notify"
        systemd.bind(str(path))
        systemd.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        served = workplace.serve(MODELS.replace("SERVER", "{listen: [ipc://s.sock]}"))
        assert b"READY=1" == systemd.recv(100)
        assert [b"WATCHDOG=1"] * 3 == [systemd.recv(100) for _ in range(3)]
        served.send(signal.SIGTERM)
        while (told := systemd.recv(100)) == b"WATCHDOG=1":
            pass
        assert b"STOPPING=1" == told
        assert 0 == served.wait()


def test_ends_of_workers_are_counted_by_their_entry(workplace: Any) -> None:
    """Of the configuration, in which both begin with 0; the pid of a process that died is no label."""
    served = workplace.serve(METERED.replace("in_process: true", "workers: [{count: 1}, {count: 2}]"))
    served.wait_for("workers ready")
    os.kill(served.workers()["w2"], signal.SIGKILL)

    def ends() -> dict[str, float]:
        name = "shapestream_worker_ends_total"
        return {
            labels.removeprefix(name): count
            for labels, count in scrape(port_of(served)).items()
            if labels.startswith(name)
        }

    died = {f'{{group="{group}",how="{how}"}}': 0 for group in (0, 1) for how in ("died", "ended")}
    died['{group="1",how="died"}'] = 1
    until("the end", lambda: ends() == died)


def test_metrics_and_statistics_tell_what_happened(workplace: Any) -> None:
    """By model and outcome; a model that nobody asked for begins with 0, and no label is of a client's making.

    Then clients send more than is served, and each scrape is answered; counters never fall, and each request ends once.
    """
    served = workplace.serve(METERED)
    port = port_of(served)
    before = scrape(port)
    assert (0.0, 1.0) == (
        before['shapestream_requests_total{model="other",outcome="ok"}'],
        before["shapestream_ready"],
    )
    with served.client() as client:
        for rows in (1, 2, 3):
            client.infer("other", {"x": np.ones((rows, 2), np.float32)})
        with pytest.raises(ModelError):
            client.infer("other", {"x": np.full((1, 2), 14, np.float32)})
        seen = scrape(port)
        told = client.statistics()
        status, at_port = get(port, "/statistics")
        assert (200, 3, 6, ["gated", "other"]) == (
            status, at_port["results"], at_port["rows"], sorted(at_port["models"])
        )  # fmt: skip
        assert told.keys() == at_port.keys()
    of_other = {
        name.partition("{")[0].removeprefix("shapestream_"): value
        for name, value in seen.items()
        if name.endswith('{model="other"}')
    }
    assert 3 == told["results"] == seen['shapestream_requests_total{model="other",outcome="ok"}']
    assert 1 == seen['shapestream_requests_total{model="other",outcome="model_error"}']
    assert 3 == seen['shapestream_batches_total{model="other",result="ran"}']
    assert 1 <= seen['shapestream_batches_total{model="other",result="failed"}']
    assert (6, 12) == (of_other["rows_total"], of_other["elements_computed_total"])
    assert 3 == of_other["request_seconds_count"] == of_other["batch_requests_count"]
    parts = sum(of_other[f"batch_{part}_seconds_sum"] for part in ("gather", "infer", "split"))
    assert 0 < of_other["batch_infer_seconds_sum"] < parts
    assert parts == pytest.approx(of_other["batch_busy_seconds_sum"], abs=3e-6)
    assert of_other["batch_busy_seconds_sum"] <= of_other["request_seconds_sum"]
    assert 3 == seen['shapestream_batch_requests_bucket{le="+Inf",model="other"}']
    assert 0 == seen['shapestream_requests_total{model="gated",outcome="ok"}']
    assert (1, 0) == (seen["shapestream_clients"], seen["shapestream_requests_pending"])

    total = 3000
    with served.client() as client, ThreadPoolExecutor() as beside:
        rows = [{"x": np.ones((1, 1 + number % 64), np.float32)} for number in range(total)]

        def flood() -> int:
            with client.stream("other", rows, max_in_flight=1000) as results:
                return sum(1 for _ in results)

        flooding, scrapes = beside.submit(flood), []
        while not flooding.done() or not scrapes:
            scrapes.append(scrape(port))
        assert total == flooding.result()
        scrapes.append(scrape(port))
    counted = [seen['shapestream_requests_total{model="other",outcome="ok"}'] for seen in scrapes]
    assert sorted(counted) == counted
    assert 3 + total == counted[-1]
