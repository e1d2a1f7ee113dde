"""Gateways of a real server: what ends, what is replaced, who is let in. Plain `http.client` asks."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.conftest import alive, until
from tests.e2e.http_calls import BODY, TIMEOUT_S, ask, infer, port_of
from tests.secret_files import write_secret

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock], http: HTTP}
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


def serve(workplace: Any, http: str, model: str = "double") -> Any:
    """A server whose gateways are ready."""
    served = workplace.serve(workplace.write(SERVED.replace("HTTP", http).replace("MODEL", model)))
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


def pids(served: Any) -> list[int]:
    """Of the gateways that run."""
    return [event["pid"] for event in served.events("gateway started") if alive(event["pid"])]


def test_a_killed_gateway_costs_its_connections_and_is_started_again(workplace: Any) -> None:
    """The other one goes on; new connections find one at any time."""
    served = serve(workplace, '{address: "127.0.0.1:0", count: 2}')
    port = port_of(served)
    before = pids(served)
    assert 2 == len(before)
    os.kill(before[0], signal.SIGKILL)
    for _ in range(20):
        assert [2.0, 4.0] == infer(port)
    served.wait_for("gateways ready", 2)
    assert 2 == len(set(pids(served)) - {before[0]})


def test_a_reload_replaces_gateways_and_reads_tokens_again(workplace: Any) -> None:
    """Callers that ask meanwhile, each time on a new connection, notice nothing."""
    tokens = workplace.folder / "tokens"
    write_secret(tokens, "shop first\n")
    served = serve(workplace, f'{{address: "127.0.0.1:0", token_file: "{tokens}"}}')
    port = port_of(served)
    assert 401 == ask(port, "GET", "/v2")[0]
    assert 401 == ask(port, "GET", "/v2", token="second")[0]
    assert (200, {"live": True}) == ask(port, "GET", "/v2/health/live")
    assert [2.0, 4.0] == infer(port, "first")
    write_secret(tokens, "shop first\nshop second\n")
    served.send(signal.SIGHUP)
    while not served.events("reload ended"):
        assert [2.0, 4.0] == infer(port, "first")
    assert "ok" == served.events("reload ended")[0]["result"]
    assert [2.0, 4.0] == infer(port, "second")


def test_a_reload_takes_no_tokens_that_others_may_read(workplace: Any) -> None:
    """The gateway that has the old ones goes on, until the file's rights are right again."""
    tokens = workplace.folder / "tokens"
    write_secret(tokens, "shop first\n")
    served = serve(workplace, f'{{address: "127.0.0.1:0", token_file: "{tokens}"}}')
    port = port_of(served)
    write_secret(tokens, "shop first\nshop second\n")
    tokens.chmod(0o444)
    served.send(signal.SIGHUP)
    (ended,) = served.wait_for("reload ended")
    assert "incomplete" == ended["result"]
    assert "mode 0444 lets others at a token (chmod 600" in served.log.read_text()
    assert (200, 401) == tuple(ask(port, "GET", "/v2", token=token)[0] for token in ("first", "second"))
    tokens.chmod(0o400)
    served.send(signal.SIGHUP)
    assert "ok" == served.wait_for("reload ended", 2)[1]["result"]
    assert (200, 200) == tuple(ask(port, "GET", "/v2", token=token)[0] for token in ("first", "second"))


def test_secrets_that_others_may_read_end_the_start(workplace: Any) -> None:
    """`serve` and `check` name each file, its mode and its place in the YAML."""
    folder = workplace.folder
    write_secret(folder / "tokens", "shop first\n").chmod(0o644)
    write_secret(folder / "key.pem", "a key\n").chmod(0o640)
    if os.geteuid() == 0:  # root's group may read what is root's
        os.chown(folder / "key.pem", -1, os.getegid() + 1)
    write_secret(folder / "cert.pem", "a certificate\n")
    for port, file, mode in (
        ("http: {address: '127.0.0.1:0', token_file: tokens}", "a token", "0644"),
        ("grpc: {address: '127.0.0.1:0', token_file: tokens}", "a token", "0644"),
        ("admin: {address: '127.0.0.1:0', token_file: tokens}", "a token", "0644"),
        (
            "http: {address: '127.0.0.1:0', tls: {certificate: cert.pem, key: key.pem}}",
            "a secret key",
            "0640",
        ),
        (
            "grpc: {address: '127.0.0.1:0', tls: {certificate: cert.pem, key: key.pem}}",
            "a secret key",
            "0640",
        ),
    ):
        served = SERVED.replace("http: HTTP", port).replace("MODEL", "double")
        config = workplace.write(served)
        for command in ("serve", "check"):
            ran = workplace.invoke(command, str(config))
            assert (3, True) == (ran.exit_code, f"mode {mode} lets others at {file}" in ran.stderr), (
                ran.stderr
            )
            assert "server.yaml:1:" in ran.stderr


def test_a_page_of_another_site_is_refused(workplace: Any) -> None:
    """A browser says whose page asks; a name that is rebound to loopback stands in Host."""
    served = serve(workplace, '"127.0.0.1:0"')
    port = port_of(served)
    for name, value in (("Sec-Fetch-Site", "cross-site"), ("Host", f"rebound.example:{port}")):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", "/v2/models/gated/infer", body=json.dumps(BODY), headers={name: value})
            answer = connection.getresponse()
            assert (421, True) == (answer.status, "no page from elsewhere" in answer.read().decode())
    assert [2.0, 4.0] == infer(port)


def test_sigterm_answers_what_was_asked(workplace: Any) -> None:
    """A request that runs is answered; then everything ends with status 0."""
    served = serve(workplace, '"127.0.0.1:0"', model="double_when_open")
    port = port_of(served)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(infer, port)
        workplace.wait_entered()
        served.send(signal.SIGTERM)
        served.wait_for("server drains")
        status, late = ask(port, "POST", "/v2/models/gated/infer", BODY)
        workplace.open_gate()
        assert [2.0, 4.0] == answer.result(TIMEOUT_S)
    assert 503 == status
    assert "nothing new" in late["error"]
    assert 0 == served.wait()
    assert served.family_is_gone()
    assert [] == pids(served)


def test_a_closed_connection_withdraws_its_request(workplace: Any) -> None:
    """It waits behind one that runs, and does not run afterwards."""
    served = serve(workplace, '"127.0.0.1:0"', model="noted_when_open")
    port = port_of(served)
    with ThreadPoolExecutor() as pool, served.client() as client:
        first = pool.submit(infer, port)
        workplace.wait_entered()
        gone = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        gone.request("POST", "/v2/models/gated/infer", body=json.dumps(BODY).replace("[1, 2]}", "[7, 2]}"))
        until("the second request", lambda: client.statistics()["scheduler"]["queued"] == 1)
        gone.close()
        until("its withdrawal", lambda: client.statistics()["scheduler"]["queued"] == 0)
        workplace.open_gate()
        assert [2.0, 4.0] == first.result(TIMEOUT_S)
        assert [2.0, 4.0] == infer(port)
    assert ["1", "1"] == (workplace.folder / "begun").read_text().split()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_https_by_files(workplace: Any) -> None:
    """With a certificate that the caller trusts."""
    certificate, key = workplace.folder / "cert.pem", workplace.folder / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", *options, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    http = f'{{address: "127.0.0.1:0", tls: {{certificate: "{certificate}", key: "{key}"}}}}'
    served = serve(workplace, http)
    context = ssl.create_default_context(cafile=str(certificate))
    assert [2.0, 4.0] == infer(port_of(served), context=context)


def test_an_address_in_use_is_an_error_at_the_start(workplace: Any) -> None:
    """With its place in the file; nothing is left running."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f'"127.0.0.1:{taken.getsockname()[1]}"'
        served = workplace.try_serve(SERVED.replace("HTTP", http).replace("MODEL", "double"))
        assert 3 == served.wait()
    assert "server.http" in served.log.read_text()
    assert "Address already in use" in served.log.read_text()


def test_a_gateway_that_a_user_starts_serves_another_host(workplace: Any, tmp_path: Path) -> None:
    """It waits for its server, serves, and ends with SIGTERM; a file that is wrong is status 3."""
    served = serve(workplace, '"127.0.0.1:0"')
    command = [
        sys.executable,
        "-P",
        "-m",
        "shapestream_workers",
        "gateway",
        served.address,
        "--http",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        line = next(json.loads(line) for line in gateway.stderr if "gateway ready" in line)
        assert [2.0, 4.0] == infer(int(line["address"].rpartition(":")[2]))
        gateway.terminate()
        gateway.stderr.read()
        assert 0 == gateway.wait(TIMEOUT_S)
    write_secret(tmp_path / "tokens", "only-a-name\n")
    refused = subprocess.run(
        [*command, "--token-file", str(tmp_path / "tokens")], capture_output=True, text=True, check=False
    )
    assert 3 == refused.returncode
    assert "line 1: 1 words (write NAME TOKEN)" in refused.stderr


def test_why_finds_a_request_by_the_id_and_the_trace_of_its_caller(workplace: Any) -> None:
    """Without an id of its own, by that which the answer tells."""
    served = serve(workplace, '"127.0.0.1:0"')
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = {"x-request-id": "from-a-proxy", "traceparent": f"00-{trace}-{1:016x}-01"}
    ids = []
    for headers in (given, {}):
        with closing(
            http.client.HTTPConnection("127.0.0.1", port_of(served), timeout=TIMEOUT_S)
        ) as connection:
            connection.request("POST", "/v2/models/gated/infer", body=json.dumps(BODY), headers=headers)
            answer = connection.getresponse()
            assert 200 == answer.status, answer.read()
            ids.append(str(answer.headers["x-request-id"]))
    assert "from-a-proxy" == ids[0]
    for asked, own_id in ((ids[0], ids[0]), (trace, ids[0]), (ids[1], ids[1])):
        found = workplace.run("why", asked, "--connect", served.address)
        assert found.stdout.startswith(f"{own_id}: gated"), found


def test_300_callers_that_vanish_leave_no_descriptor_and_no_queued_request(workplace: Any) -> None:
    """Each has sent four requests at once; one request runs meanwhile, and the first of each caller is queued."""
    served = serve(workplace, '"127.0.0.1:0"', model="double_when_open")
    (gateway,) = (psutil.Process(pid) for pid in pids(served))
    text = json.dumps(BODY)
    head = f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    request = (head + text).encode()
    with served.client() as client:
        before = gateway.num_fds()
        callers = [socket.create_connection(("127.0.0.1", port_of(served)), TIMEOUT_S) for _ in range(300)]
        for caller in callers:
            caller.sendall(4 * request)
        until("a request of each caller", lambda: client.statistics()["unfinished"] == 300)
        for caller in callers:
            caller.close()
        until("one that runs", lambda: client.statistics()["unfinished"] <= 1)
        workplace.open_gate()
        until("none", lambda: client.statistics()["unfinished"] == 0)
        until("the descriptors of before", lambda: gateway.num_fds() <= before)
    assert [2.0, 4.0] == infer(port_of(served))


def test_memory_goes_back_after_large_bodies(workplace: Any) -> None:
    """A gateway that has answered bodies of 16 MiB is no larger than before; the C library would keep 50 MiB."""
    large = SERVED.replace("1..64", "1..5000000").replace("MODEL", "double")
    served = workplace.serve(workplace.write(large.replace("HTTP", '"127.0.0.1:0"')))
    served.wait_for("gateways ready")
    port = port_of(served)
    assert [2.0, 4.0] == infer(port)
    (gateway,) = map(psutil.Process, pids(served))
    before = gateway.memory_info().rss
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, 4 << 20],
        "parameters": {"binary_data_size": 16 << 20},
    }
    output = {"name": "y", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [entry], "outputs": [output]}).encode()

    def send(_: int) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
            headers = {"Inference-Header-Content-Length": str(len(head))}
            connection.request("POST", "/v2/models/gated/infer", head + bytes(16 << 20), headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    with ThreadPoolExecutor(4) as pool:
        assert [200] * 12 == [*pool.map(send, range(12))]
    until("the memory", lambda: gateway.memory_info().rss < before + (20 << 20))
