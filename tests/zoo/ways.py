"""The ways to a served model: the SDK, HTTP with binary tensors, gRPC with raw contents; and the engine alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import openvino as ov
from tests.e2e.grpc_calls import Caller, protocol
from tests.e2e.http_calls import TIMEOUT_S, port_of
from tests.zoo.models import Array, Inputs, Kept

from shapestream import blocking

IN_FLIGHT = 32
"""Requests that are sent before the first answer, of each way."""
_TYPES = {"FP32": "float32", "FP64": "float64", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}
_NAMES = {np.dtype(type_): name for name, type_ in _TYPES.items()}

Answers = Sequence[Mapping[str, Array]]


def by_sdk(served: Any, model: str, requests: Sequence[Inputs]) -> Answers:
    """Ask over ZeroMQ."""
    with (
        blocking.connect(served.address, connect_timeout=TIMEOUT_S) as client,
        client.stream(model, requests, max_in_flight=IN_FLIGHT) as results,
    ):
        return [dict(result) for result in results]


def by_http(served: Any, model: str, requests: Sequence[Inputs]) -> Answers:
    """Ask by `/v2` with binary data both ways, over `IN_FLIGHT` connections."""
    port = port_of(served)
    free = SimpleQueue[HTTPConnection]()

    def ask(request: Inputs) -> Mapping[str, Array]:
        entries, contents = _entries(request)
        for entry, content in zip(entries, contents, strict=True):
            entry["parameters"] = {"binary_data_size": len(content)}
        body = {"inputs": entries, "parameters": {"binary_data_output": True}}
        text = json.dumps(body).encode()
        connection = free.get()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        connection.request("POST", f"/v2/models/{model}/infer", b"".join((text, *contents)), headers)
        answer = connection.getresponse()
        content = answer.read()
        free.put(connection)
        assert 200 == answer.status, content
        at = int(answer.headers["Inference-Header-Content-Length"])
        found = {}
        for output in json.loads(content[:at])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            found[output["name"]] = _array(output["datatype"], output["shape"], content[at : at + size])
            at += size
        return found

    with ExitStack() as connections, ThreadPoolExecutor(IN_FLIGHT) as pool:
        for _ in range(IN_FLIGHT):
            connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
            free.put(connections.enter_context(closing(connection)))
        return list(pool.map(ask, requests))


def by_grpc(served: Any, model: str, requests: Sequence[Inputs]) -> Answers:
    """Ask with raw contents both ways, by one channel."""
    (ready,) = served.events("grpc ready")

    def ask(request: Inputs) -> Mapping[str, Array]:
        entries, contents = _entries(request)
        message = protocol.ModelInferRequest(
            model_name=model,
            inputs=[protocol.ModelInferRequest.InferInputTensor(**entry) for entry in entries],
            raw_input_contents=contents,
        )
        answer = protocol.ModelInferResponse.FromString(caller.call("ModelInfer", message))
        return {
            output.name: _array(output.datatype, output.shape, raw)
            for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }

    with Caller(ready["address"].removeprefix("grpc://")) as caller, ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(ask, requests))


WAYS: Mapping[str, Callable[[Any, str, Sequence[Inputs]], Answers]] = {
    "SDK": by_sdk,
    "HTTP": by_http,
    "gRPC": by_grpc,
}


def engine_alone(
    engine: str, kept: Kept, properties: Mapping[str, Any]
) -> Callable[[Inputs], Mapping[str, Array]]:
    """Return a function that runs one request by this engine itself, on as many threads as a call of the server has.

    `properties`: those of the served model. Neither pins nor spins: beside other programs both cost the lone engine most.
    """
    if engine == "openvino":
        names = ("INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "ENABLE_CPU_PINNING")
        settings = {name: properties[name] for name in names}
        request = ov.Core().compile_model(kept.path, "CPU", settings).create_infer_request()
        # By the file: OpenVINO gives an output the names of nodes as well, and tells any of them.
        outputs = [output.name for output in onnx.load(kept.path).graph.output]

        def infer(inputs: Inputs) -> Mapping[str, Array]:
            found = request.infer(dict(inputs))
            return dict(zip(outputs, found.to_tuple(), strict=True))

        return infer
    options = ort.SessionOptions()
    options.intra_op_num_threads = properties["intra_op_num_threads"]
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(kept.path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Inputs) -> Mapping[str, Array]:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    return run


def _entries(request: Inputs) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the inputs in the words of the protocol, and the bytes of each."""
    entries, contents = [], []
    for name, array in request.items():
        is_text = array.dtype == object
        datatype = "BYTES" if is_text else _NAMES[array.dtype]
        entries.append({"name": name, "datatype": datatype, "shape": list(array.shape)})
        contents.append(b"".join(map(_framed, array.ravel())) if is_text else array.tobytes())
    return entries, contents


def _framed(text: str) -> bytes:
    content = text.encode()
    return len(content).to_bytes(4, "little") + content


def _array(datatype: str, shape: Sequence[int], content: bytes) -> Array:
    return np.frombuffer(content, _TYPES[datatype]).reshape(tuple(shape))
