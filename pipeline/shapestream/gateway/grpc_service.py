"""The calls of the Open Inference Protocol over gRPC: which one has which answer.

Each call runs in a thread of gRPC's pool, which waits there for the server. Messages arrive here as bytes: gRPC answers a
message that protobuf cannot read by INTERNAL, and it is its sender's mistake.

    ModelInfer, ModelStreamInfer ── bytes ──▶ grpc_messages ─▶ client of the server ─▶ grpc_messages ── bytes ──▶
    other calls                  ── protobuf ─▶ model_pages: the same pages as over HTTP ─▶ protobuf ─▶

Beside them stands the check of `grpc.health.v1`, which probes of Kubernetes and balancers call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
import structlog
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from shapestream.client.blocking_client import Client, Inference, Stream
from shapestream.client.opened_models import Failed, Model, Result
from shapestream.client.streaming import OwnItem, StreamOptions
from shapestream.client.tickets import checked_deadline
from shapestream.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.gateway import open_inference_pb2 as protocol
from shapestream.gateway.errors import (
    OWN_ID,
    RETRY_AFTER_S,
    UnknownModel,
    UnknownService,
    Unsupported,
)
from shapestream.gateway.grpc_messages import (
    InferMessage,
    infer_response,
    read_inputs,
    read_message,
    read_outputs,
    stream_error,
    stream_response,
)
from shapestream.gateway.infer_tensors import DEFAULT_PRIORITY_LEVEL, own_id
from shapestream.gateway.model_pages import (
    PAGE_S,
    READY_S,
    check_version,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
    why_not_ready,
    why_server_is_not_ready,
)
from shapestream.web.tokens import Tokens, UnknownCaller

log = structlog.get_logger()

SERVICE = "inference.GRPCInferenceService"
MOST_PAGE_BYTES = 64 * 1024
"""Bytes of a request for a page. It has a name and a version at most."""
_DEFECT = "the gateway has a defect; its log says more"
HEALTH_SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""The name under which a health check asks whether the gateway lives. Any other one asks whether the server is ready."""
OPEN_TO_ALL = (
    f"/{SERVICE}/ServerLive",
    f"/{SERVICE}/ServerReady",
    f"/{HEALTH_SERVICE}/Check",
    f"/{HEALTH_SERVICE}/Watch",
)
"""Calls that ask for no token: balancers and supervisors have none. Any refusal of Watch but UNIMPLEMENTED is ill health."""


class InferenceService:
    """Answers the calls of one gateway, through one client of the server, in any number of threads."""

    def __init__(
        self,
        client: Client,
        *,
        tokens: Tokens | None = None,
        default_priority_level: int = DEFAULT_PRIORITY_LEVEL,
    ) -> None:
        """Without `tokens`, callers are told apart by their addresses."""
        self.client = client
        self._tokens = tokens
        self._default_priority_level = default_priority_level
        self.streams = OpenStreams(self)

    def handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """Return the handler of each call, by the names of its service and of the call."""
        calls = {
            "ServerLive": _page_handler(self._live, protocol.ServerLiveRequest),
            "ServerReady": _page_handler(self._ready, protocol.ServerReadyRequest),
            "ServerMetadata": _page_handler(self._server, protocol.ServerMetadataRequest),
            "RepositoryIndex": _page_handler(self._index, protocol.RepositoryIndexRequest),
            "ModelReady": _page_handler(self._model_ready, protocol.ModelReadyRequest),
            "ModelMetadata": _page_handler(self._metadata, protocol.ModelMetadataRequest),
            "ModelConfig": _page_handler(self._config, protocol.ModelConfigRequest),
            "ModelStatistics": _page_handler(self._statistics, protocol.ModelStatisticsRequest),
            "ModelInfer": grpc.unary_unary_rpc_method_handler(_answering(self._infer)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        return {
            SERVICE: calls,
            # No Watch: each would hold a thread, and clients that get UNIMPLEMENTED for it go on without.
            HEALTH_SERVICE: {"Check": _page_handler(self._health, protocol.HealthCheckRequest)},
        }

    # ---------------------------------------------------------------- pages about the server

    def _live(self, request: Any) -> Any:
        return protocol.ServerLiveResponse(live=True)

    def _ready(self, request: Any) -> Any:
        return protocol.ServerReadyResponse(ready=self._is_ready())

    def _health(self, request: Any) -> Any:
        if request.service not in ("", SERVICE, LIVENESS):
            raise UnknownService(f"the health of {request.service[:200]!r} is not known here")
        serves = request.service == LIVENESS or self._is_ready()
        status = protocol.HealthCheckResponse.ServingStatus
        return protocol.HealthCheckResponse(status=status.SERVING if serves else status.NOT_SERVING)

    def _is_ready(self) -> bool:
        try:
            return why_server_is_not_ready(self._counters(READY_S)) is None
        except Unavailable:
            return False

    def _server(self, request: Any) -> Any:
        return ParseDict(server_metadata(), protocol.ServerMetadataResponse())

    def _index(self, request: Any) -> Any:
        rows = repository_index(self._counters(PAGE_S), ready_only=request.ready)
        return ParseDict({"models": rows}, protocol.RepositoryIndexResponse())

    def _counters(self, seconds: float) -> dict[str, Any]:
        try:
            return self.client.statistics(deadline=seconds)
        except DeadlineExceeded:
            raise Unavailable(f"the server has not answered for {seconds:g} s") from None

    # ---------------------------------------------------------------- pages about a model

    def _model_ready(self, request: Any) -> Any:
        check_version(request.version)
        try:
            self.opened(request.name, READY_S)
            why = why_not_ready(request.name, self._counters(READY_S))
        except (DeadlineExceeded, Unavailable):
            why = "no answer"
        return protocol.ModelReadyResponse(ready=why is None)

    def _metadata(self, request: Any) -> Any:
        return ParseDict(model_metadata(self._loaded(request)), protocol.ModelMetadataResponse())

    def _config(self, request: Any) -> Any:
        return ParseDict({"config": model_config(self._loaded(request))}, protocol.ModelConfigResponse())

    def _statistics(self, request: Any) -> Any:
        if request.name:
            self._loaded(request)
        told = model_statistics(request.name or None, self._counters(PAGE_S))
        return ParseDict(told, protocol.ModelStatisticsResponse())

    def _loaded(self, request: Any) -> Any:
        """Return the signature of the model of a page. One that no worker has brought in time is not ready."""
        check_version(request.version)
        try:
            return self.opened(request.name, PAGE_S).signature
        except DeadlineExceeded:
            raise Unavailable(f"model {request.name!r} is not loaded yet") from None

    def opened(self, model: str, deadline_s: float | None) -> Model:
        """Return a model that the server has opened; raises `UnknownModel`, and what the server says."""
        try:
            return self.client.opened(model, deadline=deadline_s)
        except InvalidRequest as error:
            raise UnknownModel(error.message) from error
        except ValueError as error:  # a name that the server cannot be asked for
            raise UnknownModel(str(error)) from error

    # ---------------------------------------------------------------- inference

    def read(self, message: bytes) -> InferMessage:
        """Read a request; raises `InvalidRequest`, `TooLarge`."""
        found = read_message(message, self._default_priority_level)
        check_version(found.request.model_version)
        return found

    def caller_of(self, context: grpc.ServicerContext, metadata: Mapping[str, str]) -> str:
        """Return the name of a caller: of its token, or its address."""
        if self._tokens is not None:
            return self._tokens.name_of(metadata.get("authorization", ""))
        return peer_of(context.peer())

    def _infer(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        began = time.monotonic()
        metadata = metadata_of(context)
        asked = self.read(message)
        request = asked.request
        deadline_s = deadline_of(context, asked.options.deadline_s)
        model = self.opened(request.model_name, deadline_s)
        inputs = read_inputs(asked, model.signature)
        names = read_outputs(asked, model.signature)
        inference = Inference(
            self.client,
            request.model_name,
            inputs,
            deadline=None if deadline_s is None else began + deadline_s - time.monotonic(),
            priority=asked.options.priority,
            request_id=own_id(metadata.get(OWN_ID), request.id),
            trace=metadata,
            caller=self.caller_of(context, metadata),
        )
        if not context.add_callback(inference.withdraw):
            inference.withdraw()
        return infer_response(request.model_name, request.id, names, inference.result())

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from self.streams.answers(messages, context)
        except RequestError as error:
            refuse(context, error)
        except Exception:  # as in `_answering`
            log.exception("gRPC call failed", peer=context.peer())
            refuse(context, InternalError(_DEFECT))


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc] # grpcio has no types
    """Refuses calls without a known token before their messages are read."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the call's handler, or one that refuses it."""
        if handler_call_details.method not in OPEN_TO_ALL:
            metadata = dict(handler_call_details.invocation_metadata)
            try:
                self._tokens.name_of(metadata.get("authorization", ""))
            except UnknownCaller as error:
                return _refusing(str(error))
        return continuation(handler_call_details)


def _refusing(why: str) -> grpc.RpcMethodHandler:
    def refuse_call(messages: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    # As of a stream: gRPC would read the message of any other call first.
    return grpc.stream_unary_rpc_method_handler(refuse_call)


def _page_handler(page: Callable[[Any], Any], request: Any) -> grpc.RpcMethodHandler:
    """Return the handler of a call that has a page."""

    def answer(message: bytes, context: grpc.ServicerContext) -> Any:
        if len(message) > MOST_PAGE_BYTES:
            raise TooLarge(f"{len(message)} bytes; at most {MOST_PAGE_BYTES} are taken by this call")
        try:
            asked = request.FromString(message)
        except DecodeError as error:
            raise InvalidRequest(f"the message is no {request.DESCRIPTOR.name}: {error}") from None
        return page(asked)

    return grpc.unary_unary_rpc_method_handler(
        _answering(answer), response_serializer=lambda answer: answer.SerializeToString()
    )


def _answering(
    handler: Callable[[bytes, grpc.ServicerContext], Any],
) -> Callable[[bytes, grpc.ServicerContext], Any]:
    """Return a handler that answers errors by their statuses."""

    def answer(message: bytes, context: grpc.ServicerContext) -> Any:
        try:
            return handler(message, context)
        except RequestError as error:
            refuse(context, error)
        except Exception:  # a defect of the gateway costs one call
            log.exception("gRPC call failed", peer=context.peer())
            refuse(context, InternalError(_DEFECT))

    return answer


MAX_IN_FLIGHT = 64
"""Requests of one stream that are under way, as by default in the SDK."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Facts of a request that its answer needs."""

    began: float
    id: str = ""
    model_name: str = ""
    outputs: Any = ()


class OpenStreams:
    """The streams of one gateway."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._open: set[_OpenStream] = set()
        self._changing = threading.Lock()
        self._ending = False

    def answers(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the answers to the messages of one call. Raises `Unavailable` where the gateway ends before them."""
        stream = _OpenStream(self._service, messages, context)
        with self._changing:
            self._open.add(stream)
            if self._ending:
                stream.end()
        try:
            yield from stream.answers()
        finally:
            with self._changing:
                self._open.discard(stream)

    def end(self) -> None:
        """End each stream as soon as all that was read of it is answered; new ones at once."""
        with self._changing:
            self._ending = True
            for stream in self._open:
                stream.end()


class _OpenStream:
    """One call of `ModelStreamInfer`."""

    def __init__(
        self, service: InferenceService, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self._service = service
        self._messages = messages
        self._context = context
        self._metadata = metadata_of(context)
        self._read = 0
        self._answered = 0
        self._ending = False
        options = StreamOptions(
            max_in_flight=MAX_IN_FLIGHT,
            ordered=True,
            on_error="yield",
            deadline=None,
            priority=0,
            caller=service.caller_of(context, self._metadata),
        )
        self._stream: Stream[Result | Failed] = Stream(service.client, None, self._items(), options)

    def answers(self) -> Iterator[bytes]:
        with self._stream:
            if not self._context.add_callback(self._stream.close):
                return
            self._close_if_ended()
            for item in self._stream:
                yield self._answer(item)
                self._answered += 1
                self._close_if_ended()
        if self._ending and self._context.is_active():
            raise Unavailable("the gateway ends, and takes nothing new")

    def end(self) -> None:
        """Close the stream as soon as all that was read is answered."""
        self._ending = True
        self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._ending and self._answered >= self._read:
            self._stream.close()

    # ------------------------------------------------------------ the producer's thread

    def _items(self) -> Iterator[OwnItem]:
        while (message := self._next()) is not None:
            self._read += 1
            asked = _Asked(time.monotonic())
            try:
                yield self._item(message, asked)
            except RequestError as error:
                yield OwnItem(key=asked, error=error)

    def _next(self) -> bytes | None:
        """Return the next message, or None at the end of the call."""
        try:
            return next(self._messages, None)
        except grpc.RpcError:  # cancelled
            return None

    def _item(self, message: bytes, asked: _Asked) -> OwnItem:
        read = self._service.read(message)
        request = read.request
        asked.id, asked.model_name = request.id, request.model_name
        deadline_s = deadline_of(self._context, read.options.deadline_s)
        model = self._service.opened(request.model_name, deadline_s)
        inputs = read_inputs(read, model.signature)
        asked.outputs = read_outputs(read, model.signature)
        return OwnItem(
            key=asked,
            model=model,
            inputs=inputs,
            deadline=None if deadline_s is None else asked.began + deadline_s - time.monotonic(),
            priority=read.options.priority,
            request_id=own_id(request.id, self._metadata.get(OWN_ID)),
            trace=self._metadata,
        )

    # ------------------------------------------------------------ the thread of the call

    def _answer(self, item: Result | Failed) -> bytes:
        asked: _Asked = item.key
        if item.ok is True:
            return stream_response(asked.model_name, asked.id, asked.outputs, item)
        return stream_error(asked.model_name, asked.id, item.error.message)


def refuse(context: grpc.ServicerContext, error: RequestError) -> None:
    """End a call by the status of an error. Raises gRPC's own exception."""
    context.set_trailing_metadata((pushback_of(error),))
    context.abort(status_of(error), error.message[:MOST_WORDS])


def metadata_of(context: grpc.ServicerContext) -> dict[str, str]:
    """Return the metadata of a call that are text; names are lower-case."""
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def peer_of(peer: str) -> str:
    """Return the address of a peer without its port: gRPC says `ipv4:127.0.0.1:5`, and `ipv6:%5B::1%5D:5`."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def deadline_of(context: grpc.ServicerContext, wish: float | None) -> float | None:
    """Return the seconds that a request has: the smaller of its own wish and what its call has left; None for no end."""
    # gRPC says some centuries where a call has no deadline.
    left = checked_deadline(context.time_remaining())
    return min((seconds for seconds in (wish, left) if seconds is not None), default=None)


STATUSES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    UnknownService: grpc.StatusCode.NOT_FOUND,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    # gRPC itself says the same of a message that is larger than it takes.
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    WorkerLost: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
}
"""Statuses of errors; any other error is INTERNAL."""
PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata: milliseconds after which a client that retries by itself may do so; below 0, never."""
MOST_WORDS = 2048
"""Characters of a status message. It travels percent-encoded in trailing metadata, which clients limit to 8 KiB."""


def status_of(error: RequestError) -> grpc.StatusCode:
    """Return the status of an error."""
    return STATUSES.get(type(error), grpc.StatusCode.INTERNAL)


def pushback_of(error: RequestError) -> tuple[str, str]:
    """Return the metadata that says when a request may be tried again."""
    if not error.retryable:
        return PUSHBACK, "-1"
    seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return PUSHBACK, str(max(1, math.ceil(seconds * 1000)))
