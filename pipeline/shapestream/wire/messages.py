"""The entries of protocol version 1, as they are after decoding and before encoding.

A message is one msgpack header frame, `[version, [entry, ...]]`, and raw frames for large tensors. An
entry is a msgpack array: its `KIND`, the number of raw frames that it owns, then the fields in the order of
the class. `Timings` and the members of a batch are arrays within it; `Tensors` are two elements.
docs/protocol.md is the specification; `codec.py` turns bytes into these and back.

A tensor's description is a `Layout` row `(port, element type, shape)`: plain tuples, because the server
looks a whole layout up in a dictionary of those that it has validated before. Its bytes are either inline
(`bytes` in `inline`) or the next of the entry's frames (`None` in `inline`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from shapestream_engine.layout import Tensors

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where one request's time went, as the server saw it; microseconds on the wire."""

    queue_us: int
    """From arrival at the server to the start of its batch."""
    run_us: int
    """The inference call alone."""
    total_us: int
    """From arrival at the server to its answer."""
    batch_requests: int
    """Requests that shared the inference call, this one included."""
    batch_rows: int
    """Rows that the inference call computed."""
    worker: str
    """The slot that ran it, as `worker/slot`."""
    digest: str | None = None
    """The sha256 of the model's files that ran, in hexadecimal; None for a function, and from servers that do not tell."""


# ---------------------------------------------------------------- both ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The sender's loop is alive. Any other traffic counts as well; nobody answers a heartbeat."""

    KIND: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The sender leaves on purpose; what it still had outstanding may be dropped."""

    KIND: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What the sender's clock shows while it sends this: the deadlines of this message, and of those behind it up to the
    next `Clock`, count from then, however long they were on their way.

    Microseconds from any beginning; the clock must never jump. Whoever sends it once sends it with all that has deadlines.
    """

    KIND: ClassVar[int] = 2
    sent_us: int


# ---------------------------------------------------------------- client -> server


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a session, or moves it to this connection. `client` is 16 random bytes, kept for life."""

    KIND: ClassVar[int] = 10
    client: bytes
    software: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """Asks for a model by name; answered by `ModelOpened` or `ModelRefused`."""

    KIND: ClassVar[int] = 11
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One inference request. `sequence` and the session's client id together are the request's id."""

    KIND: ClassVar[int] = 12
    sequence: int
    model: int
    remaining_ms: int | None
    """Time left until the deadline, in milliseconds, when the message was sent."""
    priority: int
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Withdraws a request. Its terminal reply (`cancelled`, or a result that was faster) still comes."""

    KIND: ClassVar[int] = 13
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRequest:
    """Asks for the server's counters; answered by `Statistics`."""

    KIND: ClassVar[int] = 14


# ---------------------------------------------------------------- server -> client


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers `Hello`. A new `epoch` means a new server process, which knows nothing of old requests.

    The window is the session's credit: at most so many requests, and bytes of tensors, without a terminal
    reply.
    """

    KIND: ClassVar[int] = 20
    epoch: bytes
    window_requests: int
    window_bytes: int
    heartbeat_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The server does not know this connection; the client starts again with `Hello`."""

    KIND: ClassVar[int] = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOpened:
    """A model's number within this epoch, and its signature as plain data (`ModelSignature.to_dict`)."""

    KIND: ClassVar[int] = 22
    name: str
    number: int
    signature: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRefused:
    """No such model, or it is not available."""

    KIND: ClassVar[int] = 23
    name: str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A request's terminal reply: its outputs."""

    KIND: ClassVar[int] = 24
    sequence: int
    timings: Timings
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request's terminal reply: why it has no result."""

    KIND: ClassVar[int] = 25
    sequence: int
    code: str
    message: str
    retryable: bool
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Replaces the window of `Welcome`. A client repeats it, and keeps to it from then on."""

    KIND: ClassVar[int] = 26
    window_requests: int
    window_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The server's counters, as plain data."""

    KIND: ClassVar[int] = 27
    values: dict[str, Any]


# ---------------------------------------------------------------- worker -> server


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """A worker is ready: its models are compiled. Slots are numbered 0 .. slots - 1."""

    KIND: ClassVar[int] = 40
    worker: str
    """A name unique to this process, such as `host-1234-0`."""
    pid: int
    slots: int
    models: dict[str, dict[str, Any]]
    """Model name -> signature as plain data."""
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model name -> what its calls cost here (`CostTable`), as plain data. What was not measured is left out."""
    digests: dict[str, str] = field(default_factory=dict)
    """Model name -> sha256 of the files that it was read from, in hexadecimal. Models that are functions are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDone:
    """A batch ran. One `Tensors` per member of `Execute`, in its order, or None where its time was over."""

    KIND: ClassVar[int] = 41
    batch: int
    run_us: int
    """Of the inference calls alone."""
    busy_us: int
    """Of the slot: from the beginning of its work on this batch until the results were copied out."""
    reallocations: int
    """Input tensors that had to grow for this batch."""
    preparations: int
    """Calls whose shape was new, and had to be prepared for."""
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    """How many calls of which sizes it took. Empty: one, of the sizes in `Execute`."""
    outputs: tuple[Tensors | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFailed:
    """A batch did not run: `model_error` blames the data, `unavailable` the device; `cancelled` and `recalled` were
    asked for.
    """

    KIND: ClassVar[int] = 42
    batch: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDraining:
    """The worker wants to leave: no new batches, please. It answers what it was sent, until the server's `Goodbye`."""

    KIND: ClassVar[int] = 43


# ---------------------------------------------------------------- server -> worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWelcome:
    """Answers `WorkerHello`."""

    KIND: ClassVar[int] = 50
    epoch: bytes
    heartbeat_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """Answers `WorkerHello`: the worker has read other bytes of this model than those that are served. It must end."""

    KIND: ClassVar[int] = 54
    model: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteMember:
    """One request of a batch, relayed as it came."""

    remaining_ms: int | None
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Run these requests in one inference call of this shape, on this slot.

    One may be sent while the slot runs another batch: it waits there.
    """

    KIND: ClassVar[int] = 51
    batch: int
    slot: int
    model: str
    sizes: tuple[int, ...]
    """The call's size of each of the signature's `dimensions`, padding included."""
    members: tuple[ExecuteMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelBatch:
    """Nobody waits for this batch any more; it may stop early. It is still answered."""

    KIND: ClassVar[int] = 52
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallBatch:
    """Give this batch back if it has not begun: `BatchFailed` with `recalled`. If it has, it just goes on."""

    KIND: ClassVar[int] = 53
    batch: int


Entry: TypeAlias = (
    Heartbeat
    | Goodbye
    | Clock
    | Hello
    | OpenModel
    | Request
    | Cancel
    | StatisticsRequest
    | Welcome
    | Unknown
    | ModelOpened
    | ModelRefused
    | Result
    | Failure
    | Credit
    | Statistics
    | WorkerHello
    | BatchDone
    | BatchFailed
    | WorkerDraining
    | WorkerWelcome
    | WorkerRefused
    | Execute
    | CancelBatch
    | RecallBatch
)
