"""What is fuzzed: everything that reads bytes from elsewhere. Each target takes any bytes, and raises only for a defect.

What a reader says no to, by its own error, is no defect. What it accepts must keep what it promises: here, that it
can be written again and means the same, and that every tensor has the bytes that its layout says.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from shapestream.errors import ConfigurationError, ProtocolError, RequestError
from shapestream.gateway.grpc_messages import read_inputs, read_message, read_outputs, split_raw
from shapestream.gateway.grpc_service import status_of
from shapestream.gateway.open_inference_pb2 import ModelInferRequest
from shapestream.gateway.openai_api import (
    EmbeddingsRequest,
    embeddings_response,
    openai_error,
    read_request,
)
from shapestream.gateway.rerank_api import RankingRequest, ranking_response, read_ranking
from shapestream.gateway.tei_api import (
    PredictRequest,
    RerankRequest,
    predict_response,
    read_embed,
    read_predict,
    read_rerank,
    read_tokenize,
    rerank_response,
    tei_error,
)
from shapestream.gateway.text_bodies import MOST_TEXTS, Texts
from shapestream.serving.served_models import ServedModels
from shapestream.settings import load_settings
from shapestream.slices import at_once
from shapestream.web.answers import error_answer
from shapestream.web.messages import HttpError, HttpLimits
from shapestream.web.parser import ChunkedBodyParser, HeadParser
from shapestream.wire.codec import decode, pack_messages
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS, Limits
from shapestream.wire.messages import BatchDone, Entry, Execute, RequestEntry, ResultEntry, Role, WorkerHello
from shapestream.wire.tensor_entries import LayoutBook
from shapestream_engine import string_arrays
from shapestream_engine.cost_table import CostTable
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import EngineError, ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Target = Callable[[bytes], None]
MAX_FRAMES = 4
MAX_BODY_BYTES = 4096


def frames_of(data: bytes) -> list[bytes]:
    """The frames that these bytes stand for: how many raw ones, the length and bytes of each, then the header."""
    if not data:
        return []
    raw = []
    rest = data[1:]
    for _ in range(min(data[0], MAX_FRAMES)):
        length = rest[0] if rest else 0
        raw.append(rest[1 : 1 + length])
        rest = rest[1 + length :]
    return [rest, *raw]


def _tensors_of(entry: Entry) -> list[Tensors]:
    match entry:
        case RequestEntry() | ResultEntry():
            return [entry.tensors]
        case Execute():
            return list(entry.members)
        case BatchDone():
            return [tensors for tensors in entry.report.outputs or () if tensors is not None]
        case _:
            return []


def _plain(value: Any) -> Any:
    """An entry as text that can be compared: not a number equals itself, and bytes are bytes whatever held them."""
    if isinstance(value, Tensors):
        return (value.layout, [bytes(memoryview(buffer)) for buffer in value.buffers])
    if hasattr(value, "__dataclass_fields__"):
        return [type(value).__name__, *[_plain(getattr(value, name)) for name in value.__dataclass_fields__]]
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _message(role: Role, limits: Limits) -> Target:
    def target(data: bytes) -> None:
        try:
            envelope = decode(frames_of(data), role=role, limits=limits)
        except ProtocolError:
            return
        for entry in envelope.entries:
            for tensors in _tensors_of(entry):
                expected = LayoutBook().write(tensors.layout).nbytes
                assert expected == tuple(memoryview(buffer).nbytes for buffer in tensors.buffers)
            # One by one: a message's control entries change places.
            (frames,) = pack_messages([entry], limits=limits)
            again = decode(frames, role=role, limits=limits)
            assert not again.bad
            assert repr([_plain(entry)]) == repr([_plain(one) for one in again.entries])

    return target


def signature(data: bytes) -> None:
    """What a worker says of its models and their costs, from its bytes to the models of the server."""
    try:
        envelope = decode(frames_of(data), role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS)
    except ProtocolError:
        return
    for hello in envelope.entries:
        if not isinstance(hello, WorkerHello):
            continue
        models = ServedModels({})
        try:
            signatures = {name: ModelSignature.from_dict(plain) for name, plain in hello.models.items()}
            tables = [CostTable.from_dict(plain) for plain in hello.costs.values()]
            at_once(models.add_all(signatures))
        except (EngineError, ConfigurationError):
            continue
        for table in tables:
            assert repr(table) == repr(CostTable.from_dict(table.to_dict()))
        for model in models:
            assert repr(model.signature) == repr(ModelSignature.from_dict(model.description))
            ports = enumerate(model.signature.inputs)
            try:
                model.resolve(tuple((n, port.element_type, (1,) * port.shape.rank) for n, port in ports))
            except ShapeError:
                continue


def http_requests(data: bytes) -> None:
    """What a caller sends over HTTP. Wherever the network cuts it, the requests are the same."""
    cut = data[0] if data else 0
    assert _http_requests([data[1:]]) == _http_requests([data[1:][:cut], data[1:][cut:]])


def _http_requests(pieces: list[bytes]) -> list[Any]:
    """The requests of these pieces up to one that is refused, or has not ended."""
    found: list[Any] = []
    left = [piece for piece in pieces if piece]

    def fed(parser: HeadParser | ChunkedBodyParser) -> bool:
        while left:
            rest = parser.feed(left.pop(0))
            if rest is not None:
                if rest:
                    left.insert(0, rest)
                return True
        return False

    try:
        while fed(head := HeadParser(HttpLimits())):
            chunks = ChunkedBodyParser(MAX_BODY_BYTES)
            if head.chunked and not fed(chunks):
                return found
            plain = b"".join(left)[: head.content_length]
            found.append(
                (head.method, head.path, head.query, head.headers, head.keep_alive, chunks.body, plain)
            )
            left = [rest] if (rest := b"".join(left)[head.content_length :]) else []
            assert not (head.chunked and head.content_length)
    except HttpError as refused:
        # The status may differ: a head that is too long and wrong is refused for what comes first.
        found.append(f"refused, {refused.status // 100}xx")
    return found


GRPC_MODEL = ModelSignature(
    name="m",
    inputs=tuple(
        InputPort(name, element_type, NamedShape.parse("batch, n:0.."))
        for name, element_type in (("x", "f32"), ("h", "f16"), ("b", "boolean"), ("i", "i8"), ("u", "u64"))
    ),
    outputs=(OutputPort("y", "f32", NamedShape.parse("batch, n"), Rows()),),
)
GRPC_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""The statuses of a request that cannot be served, in docs/grpc.md."""


def grpc_request(data: bytes) -> None:
    """A request over gRPC, as the gateway reads it. Its raw tensors are cut out of the bytes where protobuf finds them."""
    try:
        rest, raw = split_raw(data)
        whole = ModelInferRequest.FromString(data)
    except (RequestError, DecodeError):
        pass
    else:
        assert list(whole.raw_input_contents) == [bytes(tensor) for tensor in raw]
        whole.ClearField("raw_input_contents")
        assert repr(whole) == repr(ModelInferRequest.FromString(rest))
    refused: RequestError | None = None
    try:
        message = read_message(data, 1)
        inputs = read_inputs(message, GRPC_MODEL)
        outputs = read_outputs(message, GRPC_MODEL)
    except RequestError as error:
        refused = error
    if refused is not None:
        assert status_of(refused) in GRPC_STATUSES, refused
        refused.message.encode()
        return
    assert ["y"] == outputs
    assert [entry.name for entry in message.request.inputs] == list(inputs)
    for number, entry in enumerate(message.request.inputs):
        array = inputs[entry.name]
        port = next(port for port in GRPC_MODEL.inputs if port.name == entry.name)
        assert (tuple(entry.shape), dtype_of(port.element_type)) == (array.shape, array.dtype)
        assert not message.raw or array.tobytes() == bytes(message.raw[number])


TEXT_STATUSES = {400, 413, 422}
"""The statuses of a body that cannot be read, in docs/http.md."""


def text_bodies(data: bytes) -> None:
    """A body of texts, as OpenAI's API has it and as TEI's has it. What is taken can be answered."""
    for read, form in ((read_request, openai_error), (read_embed, tei_error), (read_tokenize, tei_error)):
        asked = refused = None
        try:
            asked = at_once(read(data))
        except (RequestError, HttpError) as error:
            refused = error_answer(form(error))
        if asked is None:
            assert refused is not None
            assert refused.status in TEXT_STATUSES
            assert "error" in json.loads(b"".join(refused.body))
            continue
        inputs = asked if isinstance(asked, Texts) else asked.inputs
        assert 1 <= len(inputs) <= MOST_TEXTS
        if isinstance(inputs, Texts):
            string_arrays.pack("str", np.array(inputs.texts, object))
        else:
            assert all(tokens.ndim == 1 and tokens.size and tokens.min() >= 0 for tokens in inputs.lists)
        if isinstance(asked, EmbeddingsRequest):
            response = at_once(embeddings_response(asked, np.ones((len(inputs), 2), np.float32), 0, "i"))
            assert len(inputs) == len(json.loads(b"".join(response.body))["data"])
    _score_bodies(data)


def _score_bodies(data: bytes) -> None:
    """A body of texts that are to be scored, by TEI's and Cohere's APIs. What is taken can be answered."""
    for read, form in ((read_rerank, tei_error), (read_predict, tei_error), (read_ranking, openai_error)):
        try:
            asked: RerankRequest | PredictRequest | RankingRequest = at_once(read(data))
        except (RequestError, HttpError) as error:
            refused = error_answer(form(error))
            assert refused.status in TEXT_STATUSES
            assert "error" in json.loads(b"".join(refused.body))
            continue
        texts, queries = asked.pairs.texts, asked.pairs.queries
        assert 1 <= len(texts) <= MOST_TEXTS
        assert len(queries) in (0, 1, len(texts))
        for strings in (texts, queries):
            string_arrays.pack("str", np.array(strings, object))
        logits = np.ones((len(texts), 1), np.float32)
        match asked:
            case RerankRequest():
                found = json.loads(b"".join(at_once(rerank_response(asked, logits, "i")).body))
            case PredictRequest():
                found = json.loads(b"".join(at_once(predict_response(asked, logits, (), "i")).body))
                found = found if asked.is_list else [found]
            case RankingRequest():
                answer = json.loads(b"".join(at_once(ranking_response(asked, logits, 0, "i")).body))
                found = answer["results"]
        assert min(len(texts), getattr(asked, "top_n", None) or len(texts)) == len(found)


def settings(data: bytes) -> None:
    """A YAML, from its bytes to settings, or to lines that can be printed."""
    folder = _scratch()
    path = folder / "x.yaml"
    path.write_bytes(data)
    for files_must_exist in (True, False):
        try:
            loaded = load_settings(path, files_must_exist=files_must_exist)
        except ConfigurationError as error:
            _check_lines(str(path), error.problems)
        else:
            for value in loaded.effective_values():
                f"{value.key} {value.value} {value.origin}".encode()


def _check_lines(path: str, problems: Sequence[str]) -> None:
    assert problems
    for problem in problems:
        assert problem.startswith(path), problem
        problem.encode()


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _scratch() -> Path:
    """A folder of this process, removed at its end; in memory where that is possible."""
    if not _FOLDERS:
        memory = "/dev/shm"
        _FOLDERS.append(tempfile.TemporaryDirectory(dir=memory if os.path.isdir(memory) else None))
    return Path(_FOLDERS[0].name)


TARGETS: dict[str, Target] = {
    "client_message": _message(Role.SERVER_OF_CLIENTS, CLIENT_LIMITS),
    "server_message": _message(Role.CLIENT, CLIENT_LIMITS),
    "worker_message": _message(Role.SERVER_OF_WORKERS, WORKER_LIMITS),
    "order_message": _message(Role.WORKER, WORKER_LIMITS),
    "signature": signature,
    "settings": settings,
    "http_requests": http_requests,
    "grpc_request": grpc_request,
    "text_bodies": text_bodies,
}
"""By the name of their corpus: what the server hears from clients, clients and the server from each other, ..."""
