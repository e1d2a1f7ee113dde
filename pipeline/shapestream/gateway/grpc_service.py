"""The calls of the Open Inference Protocol over gRPC: which one has which answer.

Each call runs in a thread of gRPC's pool, which waits there for its message and for the server. Its caller is looked at
first (`RunningCalls`). So all calls are handled as streams of messages: of any other, gRPC would read the message first.

Messages arrive here as bytes: gRPC answers a message that protobuf cannot read by INTERNAL, and it is its sender's mistake.

    ModelInfer, ModelStreamInfer ── bytes ──▶ grpc_messages ─▶ client of the server ─▶ grpc_messages ── bytes ──▶
    other calls                  ── protobuf ─▶ model_pages: the same pages as over HTTP ─▶ protobuf ─▶

Beside them stands the check of `grpc.health.v1`, which probes of Kubernetes and balancers call.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
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
from shapestream.gateway.grpc_calls import MESSAGE_S, TRANSFER_S, RunningCall, RunningCalls
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
    FRESH_S,
    PAGE_S,
    READY_S,
    asked_for,
    bare,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
    versions_of,
    why_not_ready,
    why_server_is_not_ready,
)
from shapestream.telemetry.logging import get_logger
from shapestream.web.quotas import BeyondQuota, Holding, Quotas
from shapestream.web.tokens import Tokens, UnknownCaller

log = get_logger()

SERVICE = "inference.GRPCInferenceService"
MOST_PAGE_BYTES = 64 * 1024
"""Bytes of a request for a page. It has a name and a version at most."""
_DEFECT = "the gateway has a defect; its log says more"
HEALTH_SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""The name under which a health check asks whether the gateway lives. Any other one asks whether the server is ready."""


class InferenceService:
    """Answers the calls of one gateway, through one client of the server, in any number of threads."""

    def __init__(
        self,
        client: Client,
        calls: RunningCalls,
        *,
        tokens: Tokens | None = None,
        default_priority_level: int = DEFAULT_PRIORITY_LEVEL,
    ) -> None:
        """Without `tokens`, callers are told apart by their addresses."""
        self.leaves = False
        """The gateway leaves: balancers are told that it is not ready, although its server may be."""
        self.client = client
        self._calls = calls
        self.in_flight = Quotas(lambda: client.window_requests, "requests in flight")
        """All callers' requests at the server. Beyond the client's window they would wait in one queue, whoever asks."""
        self._tokens = tokens
        self._default_priority_level = default_priority_level
        self._asking = threading.Lock()
        self._told: dict[str, Any] = {}
        self._told_at = -math.inf
        self.streams = OpenStreams(self)

    def handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """Return the handler of each call, by the names of its service and of the call."""
        open_page, page = self._open_page_handler, self._page_handler
        calls = {
            "ServerLive": open_page(self._live, protocol.ServerLiveRequest),
            "ServerReady": open_page(self._ready, protocol.ServerReadyRequest),
            "ServerMetadata": page(self._server, protocol.ServerMetadataRequest),
            "RepositoryIndex": page(self._index, protocol.RepositoryIndexRequest),
            "ModelReady": page(self._model_ready, protocol.ModelReadyRequest),
            "ModelMetadata": page(self._metadata, protocol.ModelMetadataRequest),
            "ModelConfig": page(self._config, protocol.ModelConfigRequest),
            "ModelStatistics": page(self._statistics, protocol.ModelStatisticsRequest),
            "ModelInfer": grpc.stream_unary_rpc_method_handler(_answering(self._infer)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        return {
            SERVICE: calls,
            # No Watch: each would hold a thread, and clients that get UNIMPLEMENTED for it go on without. Any other refusal
            # is ill health to them.
            HEALTH_SERVICE: {"Check": open_page(self._health, protocol.HealthCheckRequest)},
        }

    def _page_handler(self, page: Callable[[Any], Any], kind: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call that has a page."""

        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._calls.of(self.caller_of(context, metadata_of(context)), context, MESSAGE_S) as call:
                answer = page(_asked_for(call.read(messages), kind)).SerializeToString()
                return self._calls.sends(call, answer)

        return grpc.stream_unary_rpc_method_handler(_answering(answer))

    def _open_page_handler(
        self, page: Callable[[Any, grpc.ServicerContext], Any], kind: Any
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a call that asks for no token: balancers and supervisors have none."""

        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            message = self._calls.read_open(messages, context)
            return page(_asked_for(message, kind), context).SerializeToString()

        return grpc.stream_unary_rpc_method_handler(_answering(answer))

    # ---------------------------------------------------------------- pages about the server

    def _live(self, request: Any, context: grpc.ServicerContext) -> Any:
        return protocol.ServerLiveResponse(live=True)

    def _ready(self, request: Any, context: grpc.ServicerContext) -> Any:
        return protocol.ServerReadyResponse(ready=self._is_ready(context))

    def _health(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.service not in ("", SERVICE, LIVENESS):
            raise UnknownService(f"the health of {request.service[:200]!r} is not known here")
        serves = request.service == LIVENESS or self._is_ready(context)
        status = protocol.HealthCheckResponse.ServingStatus
        return protocol.HealthCheckResponse(status=status.SERVING if serves else status.NOT_SERVING)

    def _is_ready(self, context: grpc.ServicerContext) -> bool:
        with self._calls.asks_the_server(peer_of(context.peer())):
            try:
                return not self.leaves and why_server_is_not_ready(self._counters(READY_S)) is None
            except Unavailable:
                return False

    def _server(self, request: Any) -> Any:
        return ParseDict(server_metadata(), protocol.ServerMetadataResponse())

    def _index(self, request: Any) -> Any:
        rows = repository_index(self._counters(PAGE_S), ready_only=request.ready)
        return ParseDict({"models": rows}, protocol.RepositoryIndexResponse())

    def _counters(self, seconds: float) -> dict[str, Any]:
        """Return what the server tells of itself, `FRESH_S` old at most; one thread asks for all."""
        try:
            if not self._asking.acquire(timeout=seconds):
                raise DeadlineExceeded("others wait for the answer as well")
            try:
                if time.monotonic() - self._told_at > FRESH_S:
                    self._told = self.client.statistics(deadline=seconds)
                    self._told_at = time.monotonic()
                return self._told
            finally:
                self._asking.release()
        except DeadlineExceeded:
            raise Unavailable(f"the server has not answered for {seconds:g} s") from None

    # ---------------------------------------------------------------- pages about a model

    def _model_ready(self, request: Any) -> Any:
        name = asked_for(request.name, request.version)
        try:
            self.opened(name, READY_S)
            why = "leaves" if self.leaves else why_not_ready(name, self._counters(READY_S))
        except (DeadlineExceeded, Unavailable):
            why = "no answer"
        return protocol.ModelReadyResponse(ready=why is None)

    def _metadata(self, request: Any) -> Any:
        signature = self._loaded(request)
        with suppress(Unavailable):
            self._counters(READY_S)
        told = model_metadata(
            signature, versions_of(request.name, self._told)
        )  # of a silent server, as it said last
        return ParseDict(told, protocol.ModelMetadataResponse())

    def _config(self, request: Any) -> Any:
        return ParseDict({"config": model_config(self._loaded(request))}, protocol.ModelConfigResponse())

    def _statistics(self, request: Any) -> Any:
        if request.name:
            self._loaded(request)
        name = asked_for(request.name, request.version) if request.name else None
        told = model_statistics(name, self._counters(PAGE_S))
        return ParseDict(told, protocol.ModelStatisticsResponse())

    def _loaded(self, request: Any) -> Any:
        """Return the signature of the model of a page. One that no worker has brought in time is not ready."""
        try:
            return self.opened(asked_for(request.name, request.version), PAGE_S).signature
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
        return read_message(message, self._default_priority_level)

    def caller_of(self, context: grpc.ServicerContext, metadata: Mapping[str, str]) -> str:
        """Return the name of a caller: of its token, or its address."""
        if self._tokens is not None:
            return self._tokens.name_of(metadata.get("authorization", ""))
        return peer_of(context.peer())

    def _infer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        metadata = metadata_of(context)
        with self._calls.of(self.caller_of(context, metadata), context, TRANSFER_S) as call:
            message = call.read(messages)
            with self._calls.holding(call, len(message)):
                answer = self._inferred(message, call.caller, metadata, context)
            return self._calls.sends(call, answer)

    def _inferred(
        self, message: bytes, caller: str, metadata: Mapping[str, str], context: grpc.ServicerContext
    ) -> bytes:
        began = time.monotonic()
        asked = self.read(message)
        request = asked.request
        deadline_s = deadline_of(context, asked.options.deadline_s)
        name = asked_for(request.model_name, request.model_version)
        model = self.opened(name, deadline_s)
        inputs = read_inputs(asked, model.signature)
        names = read_outputs(asked, model.signature)
        inference = Inference(
            self.client,
            name,
            inputs,
            deadline=None if deadline_s is None else began + deadline_s - time.monotonic(),
            priority=asked.options.priority,
            request_id=own_id(metadata.get(OWN_ID), request.id),
            trace=metadata,
            caller=caller,
        )
        # Weakly: the call outlives its inference, until its peer has read the answer, and gRPC has copies of that already.
        withdraw = weakref.WeakMethod(inference.withdraw)

        def over() -> None:
            if (still_runs := withdraw()) is not None:
                still_runs()

        if not context.add_callback(over):
            inference.withdraw()
        with self.in_flight.one(caller):
            result = inference.result()
        return infer_response(bare(name), request.id, names, result)

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            # A stream may wait for its first message: Triton's clients open one before they have a request.
            with self._calls.of(self.caller_of(context, metadata_of(context)), context, math.inf) as call:
                yield from self.streams.answers(call, messages, self._calls)
        except (RequestError, UnknownCaller) as error:
            refuse(context, error)
        except Exception:  # as in `_answering`
            log.exception("gRPC call failed", peer=context.peer())
            refuse(context, InternalError(_DEFECT))


def _asked_for(message: bytes, kind: Any) -> Any:
    """Return what a call for a page asks for; raises `TooLarge`, `InvalidRequest`."""
    if len(message) > MOST_PAGE_BYTES:
        raise TooLarge(f"{len(message)} bytes; at most {MOST_PAGE_BYTES} are taken by this call")
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.name}: {error}") from None


def _answering(
    handler: Callable[[Iterator[bytes], grpc.ServicerContext], bytes],
) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes | None]:
    """Return a handler that answers errors by their statuses."""

    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        try:
            return handler(messages, context)
        except (RequestError, UnknownCaller) as error:
            refuse(context, error)
        except grpc.RpcError:
            raise  # the call was cancelled while its message was read: there is nothing to answer
        except Exception:  # a defect of the gateway costs one call
            log.exception("gRPC call failed", peer=context.peer())
            refuse(context, InternalError(_DEFECT))
        return None

    return answer


MAX_IN_FLIGHT = 64
"""Requests of one stream that are under way, as by default in the SDK."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Facts of a request that its answer needs."""

    began: float
    held_bytes: int
    """Bytes of its message, and of the answer that is expected; after that, of its answer."""
    id: str = ""
    model_name: str = ""
    model_version: str = ""
    """As it was asked for; empty where any was."""
    outputs: Any = ()


class OpenStreams:
    """The streams of one gateway."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._open: set[_OpenStream] = set()
        self._changing = threading.Lock()
        self._ending = False

    def answers(self, call: RunningCall, messages: Iterator[bytes], calls: RunningCalls) -> Iterator[bytes]:
        """Yield the answers to the messages of one call. Raises `Unavailable` where the gateway ends before them."""
        stream = _OpenStream(self._service, call, messages, calls)
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
        self,
        service: InferenceService,
        call: RunningCall,
        messages: Iterator[bytes],
        calls: RunningCalls,
    ) -> None:
        self._service = service
        self._calls = calls
        self._call = call
        self._messages = messages
        self._context = call.context
        self._metadata = metadata_of(call.context)
        self._read = 0
        self._answered = 0
        self._ending = False
        self._requests = Holding(service.in_flight, call.caller)
        self._bytes = Holding(calls.held_bytes, call.caller)
        self._largest_answer = calls.held_bytes_of_one // MAX_IN_FLIGHT // 2
        """Bytes; at first a guess, which leaves as many to each message. As many are counted for each request, so that its
        sender waits before answers are dropped."""
        self._has_answered = False
        options = StreamOptions(
            max_in_flight=MAX_IN_FLIGHT,
            ordered=True,
            on_error="yield",
            deadline=None,
            priority=0,
            caller=call.caller,
        )
        self._stream: Stream[Result | Failed] = Stream(
            service.client, None, self._items(), options, keeps=self._keep
        )

    def answers(self) -> Iterator[bytes]:
        try:
            with self._stream:
                if not self._context.add_callback(self._stream.close):
                    return
                self._close_if_ended()
                for item in self._stream:
                    answer = self._answer(item)
                    self._calls.begin_to_send(self._call)
                    yield answer
                    self._call.has_sent()
                    self._requests.change(1, 0)
                    self._bytes.change(item.key.held_bytes, 0)
                    self._answered += 1
                    self._close_if_ended()
        finally:
            self._call.has_sent()
            self._requests.close()
            self._bytes.close()
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
            held_bytes = len(message) + self._largest_answer
            # Its sender waits, too: nothing more is read.
            if not (self._take(self._requests, 1) and self._take(self._bytes, held_bytes)):
                return
            asked = _Asked(time.monotonic(), held_bytes)
            try:
                yield self._item(message, asked)
            except RequestError as error:
                yield OwnItem(key=asked, error=error)

    def _take(self, holding: Holding, amount: int) -> bool:
        """Wait until the caller's quota has room for more. False: the call is over."""
        return holding.take_in_turn(amount, lambda: not self._context.is_active())

    def _next(self) -> bytes | None:
        """Return the next message, or None at the end of the call."""
        try:
            return next(self._messages, None)
        except grpc.RpcError:  # cancelled
            return None

    def _item(self, message: bytes, asked: _Asked) -> OwnItem:
        read = self._service.read(message)
        request = read.request
        name = asked_for(request.model_name, request.model_version)
        asked.id, asked.model_name, asked.model_version = request.id, bare(name), request.model_version
        deadline_s = deadline_of(self._context, read.options.deadline_s)
        model = self._service.opened(name, deadline_s)
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

    # ------------------------------------------------------------ the client's thread

    def _keep(self, asked: _Asked, nbytes: int) -> None:
        """Count an answer instead of its message. Raises `BeyondQuota` where it cannot be kept until it is read."""
        largest = max(self._largest_answer, nbytes) if self._has_answered else nbytes
        self._largest_answer = min(largest, self._calls.max_message_bytes)
        self._has_answered = True
        self._bytes.change(asked.held_bytes, nbytes)
        asked.held_bytes = nbytes

    # ------------------------------------------------------------ the thread of the call

    def _answer(self, item: Result | Failed) -> bytes:
        asked: _Asked = item.key
        if item.ok is True:
            return stream_response(asked.model_name, asked.id, asked.outputs, item)
        return stream_error(asked.model_name, asked.model_version, asked.id, item.error.message)


def refuse(context: grpc.ServicerContext, error: RequestError | UnknownCaller) -> None:
    """End a call by the status of an error. Raises gRPC's own exception."""
    if isinstance(error, UnknownCaller):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        return
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
    BeyondQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
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
