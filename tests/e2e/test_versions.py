"""Versions of a model behind one name: real workers and engines, two versions that answer differently, every answer checked.

Version 3 answers `2a - b`. Version 4 answers `3a - b` and has its two inputs, of one type and shape, in the other order.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.e2e.conftest import until
from tests.e2e.http_calls import ask, port_of
from tests.e2e.importable.poisonous import CRASH, HANG
from tests.onnx_files import write_onnx
from tests.text_folders import documents, write_folder

from shapestream import local
from shapestream.errors import InvalidRequest, Poisoned, Unavailable

pytest.importorskip("onnxruntime", reason="the extra [onnxruntime] is not installed")
pytestmark = pytest.mark.e2e

REST = "engine: onnxruntime, trust: true, calibration_s: 0"
TWO = f"""\
    server: {{listen: [ipc://s.sock], http: "127.0.0.1:0"}}
    models:
      - {{name: m, version: 3, path: three.onnx, {REST}}}
      - {{name: m, version: 4, path: four.onnx, traffic: 25%, {REST}}}
      - {{name: plain, path: three.onnx, {REST}}}
    workers: [{{count: 1, slots: 1, threads: 1}}]
"""
FACTORS = {"3": 2.0, "4": 3.0}


def write(folder: Path, name: str, factor: float, inputs: str) -> None:
    """A model that answers `factor * a - b`; `b` may have another name."""
    other = inputs.replace("a", "")
    nodes = [helper.make_node("Mul", ["a", "k"], ["t"]), helper.make_node("Sub", ["t", other], ["y"])]
    ports = {port: ["batch", 2] for port in inputs}
    write_onnx(folder / name, nodes, ports, {"y": ["batch", 2]}, {"k": np.float32(factor)})


def serve(workplace: Any, text: str = TWO) -> Any:
    """A server of these models whose workers and gateway are ready."""
    write(workplace.folder, "three.onnx", 2.0, "ab")
    write(workplace.folder, "four.onnx", 3.0, "ba")
    served = workplace.serve(text)
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


def inputs_of(number: int) -> dict[str, Any]:
    """Inputs that tell the requests and the two ports apart."""
    return {"a": np.full((1, 2), number, np.float32), "b": np.array([[0.5, 7.0]], np.float32)}


def expected(number: int, version: str) -> list[float]:
    """What a version answers."""
    return [FACTORS[version] * number - 0.5, FACTORS[version] * number - 7.0]


def body_of(number: int) -> dict[str, Any]:
    """The same request over HTTP."""
    return {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 2], "data": array.reshape(-1).tolist()}
            for name, array in inputs_of(number).items()
        ]
    }


def test_a_quarter_of_the_requests_goes_to_the_canary_and_each_answer_names_its_version(
    workplace: Any,
) -> None:
    """By the SDK and over HTTP, drawn and named; the ports are found by name, whatever their order."""
    served = serve(workplace)
    assert 2 == len(served.workers())  # the canary has one of its own
    seen: Counter[str] = Counter()
    with served.client() as client:
        with client.stream("m", (inputs_of(number) for number in range(1000))) as results:
            for number, result in enumerate(results):
                seen[result.version] += 1
                assert expected(number, result.version) == result["y"][0].tolist()
        # Within four standard deviations: the client's bytes are drawn anew in each run.
        assert abs(seen["4"] - 250) < 55
        assert {"3", "4"} == set(seen)
        for version in ("3", "4"):
            for result in (
                client.infer("m", inputs_of(5), version=version),
                client.infer(f"m@{version}", inputs_of(5)),
            ):
                assert (version, expected(5, version)) == (result.version, result["y"][0].tolist())
        assert ("1", "1") == tuple(
            client.infer("plain", inputs_of(5), version=one).version for one in (None, "1")
        )
        assert ["a", "b"] == [port.name for port in client.signature("m").inputs]
        models = {(one.name, one.version): one for one in client.models()}
        assert [("m", "3"), ("m", "4"), ("plain", "1")] == list(models)
        assert [0.75, 0.25, 1.0] == [one.share for one in models.values()]
        assert [True] * 3 == [one.is_ready and one.digest is not None for one in models.values()]
        four = models["m", "4"].signature
        assert four is not None
        assert ["b", "a"] == [port.name for port in four.inputs]
        assert ["b", "a"] == [port.name for port in client.signature("m", version="4").inputs]
        for model, version, words in (
            ("m", "5", "'m' has no version '5'; it has: 3, 4"),
            ("plain", "2", "'plain' has the version '1' only, and no '2'"),
            ("none", "2", "no model is called 'none@2'"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                client.infer(model, inputs_of(1), version=version)
    port = port_of(served)
    seen.clear()
    for number in range(40):
        status, answer = ask(port, "POST", "/v2/models/m/infer", body_of(number))
        assert (200, "m") == (status, answer["model_name"])
        version = answer["model_version"]
        seen[version] += 1
        assert expected(number, version) == answer["outputs"][0]["data"]
    assert {"3", "4"} == set(seen)
    for version in ("3", "4"):
        status, answer = ask(port, "POST", f"/v2/models/m/versions/{version}/infer", body_of(9))
        assert (200, "m", version) == (status, answer["model_name"], answer["model_version"])
        assert expected(9, version) == answer["outputs"][0]["data"]
        assert 200 == ask(port, "GET", f"/v2/models/m/versions/{version}/ready")[0]
    assert 404 == ask(port, "POST", "/v2/models/m/versions/5/infer", body_of(9))[0]
    assert 404 == ask(port, "GET", "/v2/models/m/versions/1/ready")[0]
    assert ["3", "4"] == ask(port, "GET", "/v2/models/m")[1]["versions"]
    assert ["1"] == ask(port, "GET", "/v2/models/plain")[1]["versions"]
    assert 200 == ask(port, "POST", "/v2/models/plain/versions/1/infer", body_of(9))[0]
    rows = ask(port, "POST", "/v2/repository/index", {})[1]
    assert [("m", "3"), ("m", "4"), ("plain", "1")] == [(row["name"], row["version"]) for row in rows]
    stats = ask(port, "GET", "/v2/models/m/stats")[1]["model_stats"]
    assert [("m", "3"), ("m", "4")] == [(row["name"], row["version"]) for row in stats]
    assert all(row["inference_count"] > 0 for row in stats)


def test_grpc_names_versions_as_http_does(workplace: Any) -> None:
    """Inferences and pages; an empty version is drawn."""
    pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
    from tests.e2e.grpc_calls import Caller, output_of

    from shapestream.gateway import open_inference_pb2 as protocol

    served = serve(workplace, TWO.replace("http:", "grpc:"))
    place = served.events("grpc ready")[0]["address"].removeprefix("grpc://")

    def request(number: int, model: str, version: str = "") -> Any:
        tensors = protocol.ModelInferRequest.InferInputTensor
        return protocol.ModelInferRequest(
            model_name=model,
            model_version=version,
            inputs=[tensors(name=name, datatype="FP32", shape=[1, 2]) for name in "ba"],
            raw_input_contents=[inputs_of(number)[name].tobytes() for name in "ba"],
        )

    seen: Counter[str] = Counter()
    with Caller(place) as caller:

        def page(kind: str, **fields: Any) -> Any:
            asked = getattr(protocol, f"{kind}Request")(**fields)
            return getattr(protocol, f"{kind}Response").FromString(caller.call(kind, asked))

        for number in range(60):
            asked = request(number, "m", ("", "3", "4")[number % 3])
            answer = protocol.ModelInferResponse.FromString(caller.call("ModelInfer", asked))
            assert "m" == answer.model_name
            assert asked.model_version in ("", answer.model_version)
            assert expected(number, answer.model_version) == output_of(answer)
            seen[answer.model_version] += 1
        assert {"3", "4"} == set(seen)
        code, words = caller.refusal(request(1, "m", "5"))
        assert ("NOT_FOUND", "'m' has no version '5'; it has: 3, 4") == (code, words)
        assert ["3", "4"] == list(page("ModelMetadata", name="m", version="4").versions)
        assert page("ModelReady", name="m", version="4").ready
        rows = page("ModelStatistics", name="m").model_stats
        assert [("m", "3"), ("m", "4")] == [(row.name, row.version) for row in rows]


CHAIN = """\
    chains:
      - name: twice
        inputs: {a: first.a, b: first.b}
        stages:
          - {name: first, model: "m@3", inputs: {a: a, b: b}}
          - {name: second, model: m, inputs: {a: first.y, b: b}}
        outputs: {y: second.y}
"""


def test_a_stage_without_a_version_gets_the_drawn_one(workplace: Any) -> None:
    """Its ports are found by name; another stage names its version."""
    served = serve(workplace, TWO + CHAIN)
    found: set[float] = set()
    with served.client() as client:
        for _ in range(40):
            (answer,) = client.infer("twice", inputs_of(5))["y"].tolist()
            found.add(answer[0])
    assert {FACTORS[version] * expected(5, "3")[0] - 0.5 for version in ("3", "4")} == found


def test_check_and_models_tell_of_versions(workplace: Any) -> None:
    """A version that does not take what the other one does is named with its port; so is the place of the share."""
    write(workplace.folder, "three.onnx", 2.0, "ab")
    write(workplace.folder, "four.onnx", 3.0, "ba")
    workplace.write(TWO.replace(', http: "127.0.0.1:0"', ""))
    ran = workplace.invoke("check", "server.yaml", "--beside", "none")
    assert 0 == ran.exit_code, ran.stdout + ran.stderr
    assert "model m@4" in ran.stdout
    write(workplace.folder, "four.onnx", 3.0, "ca")
    ran = workplace.invoke("check", "server.yaml", "--beside", "none")
    assert 3 == ran.exit_code
    assert (
        "models[1].traffic: requests of version 3 do not all fit: it has no input 'b'"
        in ran.stdout + ran.stderr
    )


def test_a_canary_that_cannot_be_read_leaves_everything_to_the_rest(workplace: Any) -> None:
    """The server is ready without it, and tells those who name it what is wrong."""
    write(workplace.folder, "three.onnx", 2.0, "ab")
    (workplace.folder / "four.onnx").write_text("no model")
    served = workplace.serve(TWO)
    served.wait_for("worker given up")
    served.wait_for("gateways ready")
    port = port_of(served)
    with served.client() as client:
        assert {"3"} == {client.infer("m", inputs_of(number)).version for number in range(40)}
        with pytest.raises(Unavailable, match="model 'm@4' is unavailable: its workers were given up"):
            client.infer("m", inputs_of(1), version="4")
        assert [True, False] == [one.is_ready for one in client.models() if one.name == "m"]
    assert 200 == ask(port, "GET", "/v2/health/ready")[0]
    assert 200 == ask(port, "GET", "/v2/models/m/ready")[0]
    assert 503 == ask(port, "GET", "/v2/models/m/versions/4/ready")[0]


OPTIONS = (
    "trust: true, calibration_s: 0, inputs: {x: {shape: 'batch:1..8, n:1..64', element_type: f32}}, "
    "outputs: {y: {shape: 'batch, n', element_type: f32, rule: rows}}"
)
HANGS = """\
    server: {listen: [ipc://s.sock]}
    models:
      - {name: m, version: 1, function: "poisonous:double", OPTIONS}
      - {name: m, version: 2, function: "gated:double_when_open", traffic: 0%, OPTIONS, batching: {hang_after_s: 0.5}}
    workers: [{count: 1, slots: 1, threads: 1}]
""".replace("OPTIONS", OPTIONS)


def test_a_canary_that_hangs_costs_its_own_process_and_no_other_request(workplace: Any) -> None:
    """Who named it is told why; the others are answered meanwhile by the worker that they had."""
    served = workplace.serve(HANGS, hang_min_s=0.5, hang_grace_s=0.5)
    served.wait_for("workers ready")
    first = served.workers()
    with served.client() as client, ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(client.infer, "m", {"x": np.ones((1, 2), np.float32)}, version="2")
        number = 0
        while not hanging.done():
            number = number % 50 + 1
            result = client.infer("m", {"x": np.full((1, 2), number, np.float32)})
            assert ("1", [[2.0 * number] * 2]) == (result.version, result["y"].tolist())
        with pytest.raises(Poisoned, match="it hung"):
            hanging.result()
    assert first["w0"] == served.workers()["w0"]
    assert {"w1"} == {event["worker"] for event in served.events("worker killed")}


def test_a_reload_changes_shares_at_once_and_removes_versions(workplace: Any) -> None:
    """Clients go on with the numbers that they have; who names a version that left is told so, and not to try again."""
    served = serve(workplace)
    with served.client() as client:
        four = client.signature("m", version="4")
        assert ["b", "a"] == [port.name for port in four.inputs]
        for share, version in (("100%", "4"), ("0%", "3")):
            workplace.write(TWO.replace("25%", share))
            served.send(signal.SIGHUP)
            ended = served.wait_for("reload ended", 1 if share == "100%" else 2)
            assert "ok" == ended[-1]["result"]
            for number in range(30):
                result = client.infer("m", inputs_of(number))
                assert (version, expected(number, version)) == (result.version, result["y"][0].tolist())
        ran = workplace.invoke("models", served.address)
        assert "versions of m: 3 100%, 4 0%" in ran.stdout, ran.stdout
        promoted = TWO.replace("version: 3, ", "version: 3, traffic: 0%, ").replace("traffic: 25%, ", "")
        workplace.write(promoted)
        served.send(signal.SIGHUP)
        number = 0
        while len(served.events("reload ended")) < 3:  # each worker is replaced by one with the other version
            number += 1
            result = client.infer("m", inputs_of(number))
            assert expected(number, result.version) == result["y"][0].tolist()
        assert "ok" == served.events("reload ended")[-1]["result"]
        for version in (None, "3"):
            result = client.infer("m", inputs_of(7), version=version)
            assert (version or "4", expected(7, version or "4")) == (result.version, result["y"][0].tolist())
        workplace.write(promoted.replace("version: 3, traffic: 0%, ", "version: 5, traffic: 0%, "))
        served.send(signal.SIGHUP)
        served.wait_for("reload ended", 4)
        assert "5" == client.infer("m", inputs_of(7), version="5").version
        with pytest.raises(InvalidRequest, match="'m' has no version '3'; it has: 4, 5"):
            client.infer("m", inputs_of(7), version="3")


TEXTS = """\
    server: {listen: [ipc://s.sock], http: {address: "127.0.0.1:0", texts: true}}
    models:
      - {name: texts, version: 1, path: one, trust: true, calibration_s: 0}
      - {name: texts, version: 2, path: two, traffic: 30%, trust: true, calibration_s: 0}
    workers: [{count: 1, slots: 1, threads: 1}]
"""


def test_two_folders_are_versions_of_one_service_of_texts(workplace: Any) -> None:
    """By OpenAI's `model` and by the SDK, of texts and tokens; a request has tokenizer and encoder of one version."""
    pytest.importorskip("tokenizers", reason="the extra [text] is not installed")
    write_folder(workplace.folder / "one")
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    changed = documents()["1_Pooling/config.json"] | pooling
    write_folder(workplace.folder / "two", {"1_Pooling/config.json": changed})
    served = workplace.serve(TEXTS)
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    assert 2 == len(served.workers())  # the canary's tokenizer and encoder share one
    port = port_of(served)

    def vector(model: str, given: Any) -> tuple[float, ...]:
        status, answer = ask(port, "POST", "/v1/embeddings", {"model": model, "input": given})
        assert 200 == status, answer
        return tuple(answer["data"][0]["embedding"])

    for given in ("the cat sat", [2, 5, 6, 7, 3]):
        own = {version: vector(f"texts@{version}", given) for version in ("1", "2")}
        assert own["1"] != own["2"]
        assert set(own.values()) == {vector("texts", given) for _ in range(40)}
    assert 404 == ask(port, "POST", "/v1/embeddings", {"model": "texts@3", "input": "the cat sat"})[0]
    with served.client() as client:
        seen: Counter[str] = Counter()
        for _ in range(40):
            result = client.infer("texts", {"text": ["the cat sat"]})
            seen[result.version] += 1
            found = result["embedding"][0].tolist()
            own_result = client.infer("texts", {"text": ["the cat sat"]}, version=result.version)
            assert own_result["embedding"][0].tolist() == found
        assert {"1", "2"} == set(seen)
        assert {("texts", "1"), ("texts", "2")} <= {(one.name, one.version) for one in client.models()}


SHADOW = """\
    server: {listen: [ipc://s.sock]}
    models:
      - {name: m, version: 1, function: "gated:double", OPTIONS}
      - {name: m, version: 2, function: "poisonous:double", traffic: 0%, shadow: 100%, HANGS, OPTIONS}
    workers: [{count: 1, slots: 1, threads: 1}]
""".replace("OPTIONS", OPTIONS).replace("HANGS", "batching: {hang_after_s: 0.5}")


def test_a_shadow_is_compared_and_its_crash_or_hang_costs_its_own_process(workplace: Any) -> None:
    """Nobody hears of it: what it found is told by the command."""
    served = workplace.serve(SHADOW, hang_min_s=0.5, hang_grace_s=0.5)
    served.wait_for("workers ready")
    first = served.workers()
    assert {"w0", "w1"} == set(first)

    def found() -> Any:
        ran = workplace.invoke("versions", "server.yaml", "--json")
        assert 0 == ran.exit_code, ran.stderr
        (_, row) = json.loads(ran.stdout)
        assert ("m", "2", 0.0) == (row["name"], row["version"], row["traffic"])
        return row["shadow"]

    with served.client() as client:

        def ask(number: float) -> None:
            result = client.infer("m", {"x": np.full((1, 2), number, np.float32)})
            assert ("1", [[2.0 * number] * 2]) == (result.version, result["y"].tolist())

        def several() -> bool:
            ask(3.0)
            return bool(found()["compared"] >= 5)

        until("comparisons", several)
        shadow = found()
        assert shadow["equal"] == shadow["compared"]
        rows = json.loads(workplace.invoke("versions", "server.yaml", "--json").stdout)
        assert all(row["memory_bytes"] > 1 << 20 for row in rows)

        for times, number in enumerate((CRASH, HANG), 1):

            def failed(times: int = times, number: int = number) -> bool:
                ask(float(number))
                return bool(found()["failed"] >= times)

            until("a failure", failed)
            until("another process", lambda: served.workers().get("w1") not in (None, first["w1"]))
        told = client.statistics()
        assert (0, 0) == (told["suspects"], told["quarantined"])
        ask(4.0)
    ran = workplace.invoke("versions", served.address)
    assert "m@2: shadow of m@1, share 1:" in ran.stdout, ran.stdout
    assert re.search(r"\bmemory\b.*\n.* MiB", ran.stdout), ran.stdout
    assert first["w0"] == served.workers()["w0"]


def test_programs_and_files_have_the_version_with_the_rest_or_the_one_that_they_name(workplace: Any) -> None:
    """`shapestream.local` draws as a server does; a run over files has one version."""
    write(workplace.folder, "three.onnx", 2.0, "ab")
    write(workplace.folder, "four.onnx", 3.0, "ba")
    config = workplace.write(TWO.replace(', http: "127.0.0.1:0"', "") + CHAIN)
    with local.connect(str(config)) as client:
        seen = {client.infer("m", inputs_of(number)).version for number in range(60)}
        assert {"3", "4"} == seen
        (answer,) = client.infer("twice", inputs_of(5))["y"].tolist()
        assert answer[0] in {FACTORS[version] * expected(5, "3")[0] - 0.5 for version in ("3", "4")}
    rows = [{name: array[0].tolist() for name, array in inputs_of(number).items()} for number in range(20)]
    whole = [
        {name: [values] for name, values in row.items()} for row in rows
    ]  # of a chain without a batch axis
    for file, kind in (("rows", rows), ("whole", whole)):
        text = "".join(json.dumps(row) + "\n" for row in kind)
        (workplace.folder / f"{file}.jsonl").write_text(text)

    def answers(model: str, file: str = "rows") -> list[Any]:
        target = workplace.folder / f"{model}.npz"
        ran = workplace.invoke(
            "run", str(config), model, str(workplace.folder / f"{file}.jsonl"), str(target)
        )
        assert 0 == ran.exit_code, ran.stdout + ran.stderr
        with np.load(target) as found:
            return [found[f"{row}/y"].reshape(2).tolist() for row in range(20)]

    for model, version in (("m", "3"), ("m@4", "4")):
        assert [expected(number, version) for number in range(20)] == answers(model)
    assert 20 == len(answers("twice", "whole"))
