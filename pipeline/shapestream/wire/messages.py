"""Entries of protocol version 1, after decoding and before encoding. This file alone defines them.

A message is one msgpack header frame, `[version, [entry, ...]]`, and raw frames for large tensors. An entry is a
msgpack array: the number of its kind, the number of raw frames that it owns, then its fields.

A kind of entry is one class, such as this one, which does not exist:

    @entry(90, Role.CLIENT, optional=1)    # its number on the wire, and the roles that accept it
    class Pause(Entry):
        '''The server takes no requests for so many milliseconds.'''

        duration_ms: int                   # the fields, in their order on the wire
        reason: str = ""                   # the last `optional` fields have defaults: older peers leave them out

The class is all that a new kind needs, with its row in docs/protocol.md. `fields.py` makes the reader and the writer from
the annotations, and refuses an annotation that it has no check for. Kinds that carry tensors have readers and writers by
hand in `tensor_entries.py`. A number is used once and never again; `entry` refuses one that is taken.

A tensor's description is a `Layout` row `(port, element type, shape)`. The server looks a whole layout up in a
dictionary of checked layouts, hence the plain tuples. A tensor's bytes are inline (`bytes` in `inline`) or the
next frame of the entry (`None` in `inline`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.layout import Tensors, value

PROTOCOL_VERSION = 1
"""The version of messages, which each of them begins with."""
GRANTS_VERSION = 1
"""The version of what clients and the server say of grants: `AsksFirst` tells it."""
WORKER_PROTOCOL = 5
"""The version of what a server and its workers say to each other: `WorkerHello` tells it."""


class Timings(NamedTuple):
    """Times of one request, measured by the server, in microseconds. Users get it, hence a type that none can change."""

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
    """The sha256 of the model's files, in hexadecimal; None for a function, and from older servers."""
    version: str | None = None
    """The version that answered; None where the model states none, and from older servers."""


class Role(Enum):
    """Reader of a message, and the peer that wrote it; a role decides which kinds are accepted."""

    __hash__ = object.__hash__  # an enum's own is a call in Python, and each message looks its role up

    SERVER_OF_CLIENTS = auto()
    CLIENT = auto()
    SERVER_OF_WORKERS = auto()
    WORKER = auto()


class Entry:
    """Base of all kinds of entries. A kind is complete with its class here and its row in docs/protocol.md."""

    __slots__ = ()
    KIND: ClassVar[int]
    """The kind's number on the wire."""
    NAME: ClassVar[str]
    """The kind's name in docs/protocol.md and in errors: that of the class, without a last `Entry`."""
    ROLES: ClassVar[frozenset[Role]]
    """Roles that accept the kind."""
    OPTIONAL: ClassVar[int]
    """Number of last fields that older peers leave out; they have defaults."""


KINDS: dict[int, type[Entry]] = {}
"""All kinds of entries, by their numbers."""
E = TypeVar("E", bound=Entry)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def entry(kind: int, *roles: Role, optional: int = 0) -> Callable[[type[E]], type[E]]:
    """Make the class a kind of entry: a slotted, keyword-only `value` that is known by its number."""

    def register(cls: type[E]) -> type[E]:
        made = value(cls)
        made.KIND, made.ROLES, made.OPTIONAL = kind, frozenset(roles), optional
        made.NAME = made.__name__.removesuffix("Entry")
        if KINDS.setdefault(kind, made) is not made:
            raise ValueError(f"{made.__name__} and {KINDS[kind].__name__} have the number {kind}")
        return made

    return register


# ---------------------------------------------------------------- both ways


@entry(0, *Role)
class Heartbeat(Entry):
    """The sender's loop is alive. Any other traffic says so too; a heartbeat has no answer."""


@entry(1, *Role)
class Goodbye(Entry):
    """The sender leaves on purpose; its unfinished requests or batches may be dropped."""


@entry(2, Role.SERVER_OF_CLIENTS, Role.WORKER)
class Clock(Entry):
    """The sender's clock at the time of sending, in microseconds from any beginning; the clock must never jump.

    From a client, deadlines of this message, and of later ones up to the next `Clock`, count from that time; a sender of
    one `Clock` puts one into each message with deadlines. From a server, it tells a worker how the clocks differ.
    """

    sent_us: int


@entry(34, Role.SERVER_OF_CLIENTS, Role.CLIENT)
class RunsAlone(Entry):
    """From the server: this request, which its client names as a suspect, is about to run where nothing else runs.

    The client repeats the entry, and the run begins after that: so the client knows what ran if the server vanishes.
    """

    sequence: int | None
    """None, from the server: the request of the last `RunsAlone` runs no more, though it has no terminal reply yet."""


# ---------------------------------------------------------------- client -> server


@entry(10, Role.SERVER_OF_CLIENTS)
class Hello(Entry):
    """Opens a session, or moves it to this connection. `client` is 16 random bytes, kept for life."""

    client: bytes
    software: str


@entry(11, Role.SERVER_OF_CLIENTS)
class OpenModel(Entry):
    """Asks for a model by name; answered by `ModelOpened` or `ModelRefused`."""

    name: str


@entry(12, Role.SERVER_OF_CLIENTS, optional=1)
class RequestEntry(Entry):
    """One inference request. `sequence` and the session's client id together are the request's id."""

    sequence: int
    model: int
    remaining_ms: int | None
    """Milliseconds from sending to the deadline."""
    priority: int
    tensors: Tensors
    tags: dict[str, str] | None = None
    """For logs and traces, by name (`tags.py`); None for none, which takes no bytes."""


@entry(13, Role.SERVER_OF_CLIENTS)
class Cancel(Entry):
    """Withdraws a request. Its terminal reply (`cancelled`, or a result that was faster) still comes."""

    sequence: int


@entry(14, Role.SERVER_OF_CLIENTS)
class StatisticsRequest(Entry):
    """Asks for the server's counters; answered by `StatisticsEntry`."""


@entry(15, Role.SERVER_OF_CLIENTS)
class Explain(Entry):
    """Asks for stories of requests; answered by `Explanation`."""

    question: int
    """Any number, which the answer repeats."""
    request: str
    """A request's id, as its user knows it. Empty: the slowest requests are asked for."""
    slowest: int
    """The number of these, at most."""


@entry(17, Role.SERVER_OF_CLIENTS)
class AcknowledgeAudit(Entry):
    """Lets the requests of a model share calls again; without effect without the role `admin`, where keys are asked for."""

    model: str


@entry(30, Role.SERVER_OF_CLIENTS)
class AsksFirst(Entry):
    """The client asks before it sends a large request. It says so behind each `Hello`; answered by `GrantBounds`."""

    version: int
    """`GRANTS_VERSION` of the client."""


@entry(32, Role.SERVER_OF_CLIENTS)
class Ask(Entry):
    """Asks to send the request with this number; answered by `Granted`, or by the request's own `Failure`."""

    sequence: int
    nbytes: int
    """Bytes of the request's tensors."""
    remaining_ms: int | None
    """As that of `RequestEntry`."""


# ---------------------------------------------------------------- server -> client


@entry(20, Role.CLIENT)
class Welcome(Entry):
    """Answers `Hello`. A new `epoch` means a new server process, which knows no old requests.

    The window is the session's credit: the most requests, and bytes of tensors, without a terminal reply.
    """

    epoch: bytes
    window_requests: int
    window_bytes: int
    heartbeat_ms: int


@entry(21, Role.CLIENT, Role.WORKER)
class Unknown(Entry):
    """The server does not know this connection; the client starts again with `Hello`."""


@entry(22, Role.CLIENT)
class ModelOpened(Entry):
    """A model's number within this epoch, and its signature as plain data (`ModelSignature.to_dict`)."""

    name: str
    number: int
    signature: dict[str, Any]


@entry(23, Role.CLIENT)
class ModelRefused(Entry):
    """Answers `OpenModel`: the model does not exist, or is not available."""

    name: str
    code: str
    message: str


@entry(24, Role.CLIENT)
class ResultEntry(Entry):
    """A request's terminal reply: its outputs."""

    sequence: int
    timings: Timings
    tensors: Tensors


@entry(25, Role.CLIENT)
class Failure(Entry):
    """A request's terminal reply: the reason for having no result."""

    sequence: int
    code: str
    message: str
    retryable: bool
    retry_after_ms: int | None


@entry(26, Role.SERVER_OF_CLIENTS, Role.CLIENT)
class Credit(Entry):
    """Replaces the window of `Welcome`. A client repeats it, and keeps to it from then on."""

    window_requests: int
    window_bytes: int


@entry(27, Role.CLIENT)
class StatisticsEntry(Entry):
    """The server's counters, as plain data."""

    values: dict[str, Any]


@entry(28, Role.CLIENT)
class Explanation(Entry):
    """Answers `Explain`: `stories` as plain data; where there are none, `unknown` says why."""

    question: int
    values: dict[str, Any]


@entry(31, Role.CLIENT)
class GrantBounds(Entry):
    """Answers `AsksFirst`: requests of more than `unasked_bytes` bytes of tensors are asked for, from now on."""

    unasked_bytes: int
    most_bytes: int
    """Bytes of the largest request that is ever granted."""


@entry(33, Role.CLIENT)
class Granted(Entry):
    """Answers `Ask`: the request with this number may be sent now. Its bytes count in no window."""

    sequence: int


# ---------------------------------------------------------------- worker -> server


@entry(40, Role.SERVER_OF_WORKERS, optional=6)
class WorkerHello(Entry):
    """A worker is ready: its models are compiled. Slots are numbered 0 .. slots - 1.

    This connection is the worker's control. Each slot makes a connection of its own, and greets there (`SlotHello`).
    """

    worker: str
    """A name of this process that no other has, such as `w0-9f3c0a1b`: it ends with random digits, drawn at each start."""
    pid: int
    slots: int
    models: dict[str, dict[str, Any]]
    """Model name -> signature as plain data."""
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model name -> measured costs of its calls (`CostTable`), as plain data. Unmeasured models are left out."""
    digests: dict[str, str] = field(default_factory=dict)
    """Model name -> sha256 of its files, in hexadecimal. Models that are functions are left out."""
    protocol: int = 1
    """`WORKER_PROTOCOL` of the worker. The first version did not say it."""
    once: tuple[str, ...] = ()
    """Names of the models whose requests must not run twice (`idempotent: false`)."""
    tolerances: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model name -> output name -> how far two equal results may lie apart, as plain data. Models whose proof found no
    tolerances are left out."""
    engines: dict[str, str] = field(default_factory=dict)
    """Model name -> the engine that computes it, with the versions of its packages: `openvino openvino==2026.4.1`."""
    wide: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model name -> measured costs of its calls on the wide slot, whose number is `slots`. Empty: there is no such slot."""


@entry(41, Role.SERVER_OF_WORKERS)
class BatchDone(Entry):
    """A batch ran. Its report is written out on the wire, with times in microseconds."""

    session: int
    report: BatchReport

    @property
    def batch(self) -> int:
        """The batch's number."""
        return self.report.batch


@entry(42, Role.SERVER_OF_WORKERS)
class BatchFailedEntry(Entry):
    """A batch did not run: `invalid` and `model_error` blame the data, `unavailable` the device.

    `cancelled` and `recalled` answer `CancelBatchEntry` and `RecallBatchEntry`. `recalled` comes from the worker's control,
    all other reports come from the slot.
    """

    batch: int
    session: int
    code: str
    message: str


@entry(43, Role.SERVER_OF_WORKERS)
class WorkerDraining(Entry):
    """The worker wants to leave and takes no new batches. It answers earlier ones, until the server's `Goodbye`."""


@entry(44, Role.SERVER_OF_WORKERS)
class SlotHello(Entry):
    """A slot takes batches on this connection. `token` is that of `WorkerWelcome`."""

    token: bytes
    slot: int


@entry(45, Role.SERVER_OF_WORKERS)
class SlotEnded(Entry):
    """The thread of a slot has ended: it runs nothing more. The worker's control says so."""

    slot: int
    session: int
    batch: int | None
    """The batch that it had begun, and that may be to blame."""


# ---------------------------------------------------------------- server -> worker


@entry(50, Role.WORKER)
class WorkerWelcome(Entry):
    """Answers `WorkerHello`: a session begins, and the slots may greet."""

    epoch: bytes
    token: bytes
    """16 random bytes, which the worker's slots greet with."""
    session: int
    """Number of the session; a server uses none twice."""
    heartbeat_ms: int


@entry(54, Role.WORKER)
class WorkerRefused(Entry):
    """Answers `WorkerHello`: the worker must end.

    It has other files or another engine of this model than the server serves, or, where `model` is empty, it speaks
    another version.
    """

    model: str
    message: str


@entry(55, Role.WORKER)
class SetLogLevel(Entry):
    """Log at this level from now on: `debug`, `info`, `warning` or `error`. Only workers that the server started hear it."""

    level: str


@entry(51, Role.WORKER)
class Execute(Entry, BatchInputs):
    """Run this batch on the slot that the connection belongs to. Others may be queued behind the one that runs.

    The members' tensors are relayed as they came. Deadlines are of the server's clock, and travel in microseconds; the
    members' `shapes` do not travel.
    """

    session: int
    sent_us: int
    """Time of sending, by the server's clock (`Clock`)."""


@entry(52, Role.WORKER)
class CancelBatchEntry(Entry):
    """Stop this batch early, if possible: its results are not needed. Its slot answers it all the same, in its turn."""

    batch: int
    slot: int


@entry(53, Role.WORKER)
class RecallBatchEntry(Entry):
    """Return this batch by `BatchFailedEntry` with `recalled` on the control, if it has not begun; otherwise go on."""

    batch: int
    slot: int
