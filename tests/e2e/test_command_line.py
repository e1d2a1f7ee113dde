"""The commands as a shell sees them: what they print, and their exit status."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from tests.e2e.conftest import until
from tests.e2e.model_file import doubling_model, model_yaml
from tests.e2e.sorter import SORT

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def sort_server(module_workplace: Any) -> Any:
    """A server for the tests that do not harm it."""
    return module_workplace.serve(SORT + "    in_process: true\n")


def test_infer_prints_the_answer_to_json_and_npy_inputs(sort_server: Any, workplace: Any) -> None:
    """The same request, once from a literal and once from a file, to a server named by address and by YAML."""
    by_literal = workplace.run("infer", str(sort_server.config), "sort", "a=[[3, 1, 2]]")
    assert (0, "") == (by_literal.returncode, by_literal.stderr)
    assert ["sorted: f32 [1, 3]", "  [[1. 2. 3.]]"] == by_literal.stdout.splitlines()[:2]
    np.save(workplace.folder / "a.npy", np.array([[2, np.inf, 1]], np.float32))
    by_file = workplace.run("infer", sort_server.address, "sort", "a=a.npy", "--json", "--save", "out")
    outputs = json.loads(by_file.stdout)["outputs"]
    assert {"sorted": {"element_type": "f32", "shape": [1, 3], "data": [[1.0, 2.0, "inf"]]}} == outputs
    np.testing.assert_array_equal([[1, 2, np.inf]], np.load(workplace.folder / "out" / "sorted.npy"))


def test_models_lists_what_a_server_serves(sort_server: Any, workplace: Any) -> None:
    """Ports and dimensions for people, signatures for scripts."""
    for_people = workplace.invoke("models", sort_server.address)
    assert "  input  a: f32 [batch:1..8, n:..64]" in for_people.stdout.splitlines()
    (signature,) = json.loads(workplace.invoke("models", sort_server.address, "--json").stdout)
    assert "sort" == signature["name"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["sort", "a=[[3]]", "b=[[3]]"], 1, "invalid: "),
        (["sort", "a=[[3]"], 1, "invalid: input 'a': '[[3]' is neither a .npy file nor JSON"),
        (["sort", "a=gone.npy"], 1, "invalid: input 'a': gone.npy: "),
        (["sort", "a"], 1, "invalid: 'a' is not NAME=VALUE"),
        (["srt", "a=[[3]]"], 1, "sort"),
        (["sort", "--deadlin", "3"], 2, "No such option"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes_of_infer_are_told_apart_by_status(
    sort_server: Any, workplace: Any, arguments: list[str], status: int, words: str
) -> None:
    """1 for a request that fails, 2 for wrong usage; nothing on stdout."""
    ran = workplace.invoke("infer", sort_server.address, *arguments)
    assert (status, "") == (ran.exit_code, ran.stdout)
    assert words in ran.stderr


def test_infer_without_a_server_says_so_in_time(workplace: Any) -> None:
    """No server, one line, status 1."""
    ran = workplace.invoke("infer", f"ipc://{workplace.folder}/none.sock", "m", "x=1", "--timeout", "0.3")
    assert 1 == ran.exit_code
    assert ran.stderr.startswith("unavailable: ")


def test_infer_says_what_it_waits_for(workplace: Any) -> None:
    """No worker serves the model yet: a line says so while it waits; the answer comes once one is there."""
    served = workplace.serve(
        "    server: {listen: [ipc://s.sock], worker_listen: ipc://w.sock}\n" + SORT + "    workers: []\n"
    )
    asks = workplace.start("infer", str(served.config), "sort", "a=[[3, 1, 2]]")
    until(
        "a line says what the request waits for",
        lambda: "no worker serves 'sort' yet" in asks.log.read_text(),
    )
    worker = workplace.start("worker", str(served.config), "--any-function")
    assert 0 == asks.wait()
    assert 1 == asks.log.read_text().count("no worker serves")
    worker.send(signal.SIGTERM)
    assert 0 == worker.wait()


def test_check_runs_each_model_and_shows_where_values_come_from(workplace: Any) -> None:
    """What was tried is listed; `--show` names lines, defaults and the engine's own properties."""
    doubling_model(workplace.folder / "m.xml")
    shape = '    inputs: {x: {shape: "batch:1..8, 4"}}\n'
    config = workplace.write(model_yaml("m.xml", shape))
    ran = workplace.run("check", str(config), "--show")
    assert (0, "") == (ran.returncode, ran.stderr)
    lines = ran.stdout.splitlines()
    assert f"models[0].inputs.x.shape = 'batch:1..8, 4'  ({config}:5)" in lines
    assert "models[0].batching.max_delay_ms = 0.0  (default)" in lines
    assert any("INFERENCE_PRECISION" in line and "f32" in line and "(engine)" in line for line in lines)
    assert "  ran batch 1: y [1, 4]" in lines
    assert "  ran batch 1 x 2 requests: y [1, 4]" in lines
    assert "ok: 1 model compiled and run" == lines[-1]
    report = json.loads(workplace.invoke("check", str(config), "--json").stdout)
    assert (True, [], "m") == (report["ok"], report["problems"], report["models"][0]["signature"]["name"])


def test_check_reports_every_model_that_cannot_be_used(workplace: Any) -> None:
    """A corrupt file, a shape that contradicts the file and a rule that cannot hold: three lines, status 3."""
    doubling_model(workplace.folder / "m.xml")
    (workplace.folder / "bad.xml").write_text("<net>no more")
    config = workplace.write(
        "models:\n"
        "  - {name: corrupt, path: bad.xml}\n"
        "  - {name: type, path: m.xml, inputs: {x: {element_type: f16}}}\n"
        "  - {name: rule, path: m.xml, outputs: {y: {rule: index_column, column: 7}}}\n"
        "  - {name: port, path: m.xml, inputs: {z: {shape: '4'}}}\n"
    )
    ran = workplace.invoke("check", str(config))
    assert 3 == ran.exit_code
    places = [line.removeprefix(str(config)).split(": ")[:2] for line in ran.stderr.splitlines()]
    assert [
        [":3:21", "models[0].path"],
        [":4:40", "models[1].inputs.x"],
        [":5:41", "models[2].outputs.y"],
        [":6:40", "models[3].inputs.z"],
    ] == places
    assert "bad.xml" in ran.stderr
    as_json = workplace.invoke("check", str(config), "--json")
    assert 3 == as_json.exit_code
    assert 4 == len(json.loads(as_json.stdout)["problems"])


def test_check_reports_a_model_that_fails_on_made_up_inputs(workplace: Any) -> None:
    """The engine's words, and the advice to name realistic inputs."""
    config = workplace.write(
        SORT.replace("numpy:sort", "gated:fourteen").replace("{a: {", "{x: {").replace("sorted:", "y:")
    )
    ran = workplace.invoke("check", str(config))
    assert 3 == ran.exit_code
    assert "failed on made-up inputs, batch 1, n 1" in ran.stderr
    assert "fourteen is not to my liking" in ran.stderr
    assert "probe" in ran.stderr


def test_an_unusable_yaml_is_status_3_everywhere(workplace: Any) -> None:
    """All problems, on stderr, before anything is started; in JSON for scripts."""
    config = workplace.write("models:\n  - {name: m, path: gone.xml, tust: true}\nworkers: [{count: '2'}]\n")
    expected = [
        f"{config}:3:15: models[0].path: no such file: {workplace.folder}/gone.xml "
        "(a relative path starts at the folder of this YAML)",
        f'{config}:3:31: models[0].tust: unknown key (did you mean "trust"?)',
        f'{config}:4:12: workers[0].count: expected an integer, got "2" (remove the quotes)',
    ]
    for command in ("serve", "worker", "check"):
        ran = workplace.invoke(command, str(config))
        assert (3, expected, "") == (ran.exit_code, ran.stderr.splitlines(), ran.stdout)
    assert expected == json.loads(workplace.invoke("check", str(config), "--json").stdout)["errors"]
    in_a_process_of_its_own = workplace.run("serve", "gone.yaml")
    assert (3, "") == (in_a_process_of_its_own.returncode, in_a_process_of_its_own.stdout)
    assert "gone.yaml" in in_a_process_of_its_own.stderr


@pytest.mark.parametrize(
    ("suffix", "how"), [(".xml", "workers: [{count: 2}]"), (".onnx", "in_process: true")]
)
def test_a_corrupt_model_ends_serve_with_status_3(workplace: Any, suffix: str, how: str) -> None:
    """The file is named, in a line that points into the YAML, and no process is left."""
    (workplace.folder / f"bad{suffix}").write_bytes(b"\x00this is no model\xff" * 100)
    served = workplace.try_serve(model_yaml(f"bad{suffix}", how + "\n"))
    assert 3 == served.wait()
    log = served.log.read_text()
    assert f"{served.config}:4:5: models[0].path: " in log
    assert f"bad{suffix}" in log
    assert "Traceback" not in log
    assert served.family_is_gone()


def test_what_ends_a_worker_is_a_line_of_the_log(workplace: Any) -> None:
    """A log in JSON has no other lines, where a worker cannot compile its model."""
    (workplace.folder / "bad.onnx").write_bytes(b"\x00this is no model\xff" * 100)
    served = workplace.try_serve(model_yaml("bad.onnx", "workers: [{count: 1}]\nlogging: {format: json}\n"))
    assert 3 == served.wait()
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    (worker,) = [line for line in lines if line["event"] == "process ends"]
    assert ("w0", "error", 3) == (worker["process"], worker["level"], worker["status"])
    assert worker["why"].startswith(f"{served.config}:4:5: models[0].path: ")


def test_a_copied_yaml_tells_a_worker_what_it_needs(workplace: Any) -> None:
    """The server's keys stay where they are; the worker needs its own, and the server's address."""
    security = "security: {key: k/s.secret, clients: k/clients, workers: k/workers}"
    listens = f"    server: {{listen: ['tcp://127.0.0.1:*'], worker_listen: 'tcp://0.0.0.0:1', {security}}}\n"
    config = workplace.write(listens + SORT)
    ran = workplace.run("worker", str(config), "--any-function")
    assert 3 == ran.returncode
    assert "server.security: the server asks workers for keys (add --key FILE --server-key KEY;" in ran.stderr
    assert "no such" not in ran.stderr
    open_to_all = workplace.write(listens.replace(f", {security}", "").replace("0.0.0.0", "127.0.0.1") + SORT)
    lonely = workplace.start("worker", str(open_to_all), "--any-function")
    (line,) = lonely.wait_for("disconnected")[:1]
    assert line["advice"].endswith("if the server runs elsewhere, say --connect tcp://HOST:PORT")
    lonely.send(signal.SIGTERM)
    assert 0 == lonely.wait()


def test_a_model_whose_weights_are_missing_ends_serve_with_status_3(workplace: Any) -> None:
    """An .xml without its .bin loads only where there are no weights; here there are."""
    doubling_model(workplace.folder / "m.xml")
    x = ops.parameter([-1, 64], np.float32)
    weights = ops.constant(np.random.default_rng(0).random((64, 64), np.float32))
    ov.save_model(
        ov.Model([ops.result(ops.matmul(x, weights, False, False))], [x]), workplace.folder / "w.xml"
    )
    (workplace.folder / "w.bin").unlink()
    served = workplace.try_serve(model_yaml("w.xml"))
    assert 3 == served.wait()
    assert "models[0].path: " in served.log.read_text()


def test_a_second_server_at_the_same_address_is_refused(workplace: Any) -> None:
    """The first one keeps its clients; the second one says why and ends with status 1."""
    first = workplace.serve(SORT + "    in_process: true\n")
    second = workplace.try_serve(first.config)
    assert 1 == second.wait()
    assert "another process listens there" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()
    with first.client() as client:
        assert [[1.0, 2.0]] == client.infer("sort", {"a": np.array([[2, 1]], np.float32)})["sorted"].tolist()


def test_models_in_process_are_served_and_drained_like_others(workplace: Any) -> None:
    """No worker process is started, SIGINT drains as SIGTERM does, and what a model prints stays out of the way."""
    text = SORT.replace("numpy:sort", "gated:double").replace("{a: {", "{x: {").replace("sorted:", "y:")
    served = workplace.serve(text + "    in_process: {slots: 2, threads: 1}\n")
    with served.client() as client:
        result = client.infer("sort", {"x": np.array([[2, 1]], np.float32)})
        assert ([[4.0, 2.0]], "local") == (result["y"].tolist(), result.timings.worker.split("/")[0])
    assert {} == served.workers()
    served.send(signal.SIGINT)
    assert 0 == served.wait()
    assert "in_process.threads: fewer than the 2 slots" in served.log.read_text()


def test_clients_workers_and_health_checks_speak_ipv6(workplace: Any) -> None:
    """All three dial an address in brackets."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = "server: {listen: ['tcp://[::1]:*'], worker_listen: 'tcp://[::1]:*'}"
    served = workplace.serve(f"    {server}\n{SORT}    workers: [{{slots: 1}}]\n")
    address = served.events("server ready")[0]["listen"][0]
    assert address.startswith("tcp://[::1]:")
    ran = workplace.run("infer", address, "sort", "a=[[3, 1, 2]]")
    assert (0, "  [[1. 2. 3.]]") == (ran.returncode, ran.stdout.splitlines()[1])
    assert 0 == workplace.run("health", address).returncode


def test_version_and_schema_are_for_scripts_too(workplace: Any) -> None:
    """Both are JSON when asked; a mistyped command is wrong usage."""
    versions = json.loads(workplace.run("version", "--json").stdout)
    assert ("1", ov.__version__.split("-")[0]) == (versions["protocol"], versions["openvino"].split("-")[0])
    assert f"shapestream {versions['shapestream']}\n" == workplace.invoke("--version").stdout
    schema = json.loads(workplace.invoke("schema").stdout)
    assert "https://json-schema.org/draft/2020-12/schema" == schema["$schema"]
    assert 2 == workplace.invoke("serv").exit_code


def test_logs_are_json_lines_that_follow_a_request_by_its_id(workplace: Any) -> None:
    """At debug the request, its batch and its slot appear in the server's and the worker's lines; its data never does."""
    text = "    logging: {level: debug}\n" + SORT + "    workers: [{count: 1}]\n"
    served = workplace.serve(text)
    with served.client() as client:
        client.infer("sort", {"a": np.array([[7654321, 1]], np.float32)}, deadline=120)
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    lines = served.log.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (arrived,) = [event for event in events if event["event"] == "request arrived"]
    (started,) = [event for event in events if event["event"] == "batch started"]
    (received,) = [event for event in events if event["event"] == "batch received"]
    assert arrived["request"] in started["requests"]
    assert (started["batch"], "w0") == (received["batch"], received["process"])
    assert "7654321" not in served.log.read_text()
