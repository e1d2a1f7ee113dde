"""Workers as the server knows them, and their slots.

A worker has one link for its control, and one for each slot. A batch leaves on its slot's link as an `Execute`, whose
tensors are the received frames, untouched. The scheduler's own slot refers to its `SlotRecord` as its peer.

`CONNECTED_WORKER_TABLE` says by the name of a change which state of a session follows which. A change that it does not list
raises KeyError. `ConnectedWorker.change` alone writes a state; docs/reliability.md#states-of-a-connected-worker draws the
table.

Workers are trusted only in part. So the size of a greeting is checked before it is read, and it is read in slices
(`read_offer`). The codec has checked the element types and byte lengths of a report; `ReportCheck` checks it against the
model and the batch. A layout that was found good for a request's sizes is remembered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any, Final, TypeVar

from shapestream.scheduling.batches import Batch
from shapestream.serving.port_traffic import Outgoing, PeerLink
from shapestream.serving.served_models import ServedModel
from shapestream.serving.slot_threads import SlotThreads
from shapestream.slices import Slices
from shapestream.telemetry.logging import get_logger
from shapestream.wire.messages import (
    BatchDone,
    BatchFailedEntry,
    CancelBatchEntry,
    RecallBatchEntry,
    WorkerHello,
)
from shapestream.wire.tensor_frames import check_outputs
from shapestream_engine.batch import BatchInputs, BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Layout
from shapestream_engine.machine import MAX_SLOTS
from shapestream_engine.output_rules import With
from shapestream_engine.ports import OutputPort
from shapestream_engine.probing.tolerances import OutputTolerance
from shapestream_engine.signature import ModelSignature

log = get_logger()
V = TypeVar("V")

# How long before a slot becomes free its next batch is sent, to be there in time: the event loop's turn, the decision, the
# sockets and the thread's wake-up. Seen on two busy cores: without prefetch a slot stood still for 0.2 to 0.3 ms between
# two batches, 0.5 ms in one of twenty. What comes late costs the slot that much idle time, what comes early is decided
# without the requests that arrive in between, so this is about twice what is usual.
LOCAL_PREFETCH_S = 0.0005
# The same to a slot of a worker: the way there and back took 1.1 to 1.8 ms over ipc on two busy cores, up to 200 KB of
# tensors making no difference.
REMOTE_PREFETCH_S = 0.002
# Codes of batches that a slot may be rid of before it has answered an earlier one.
GIVEN_BACK = (ErrorCode.CANCELLED, ErrorCode.RECALLED)


class WorkerState(Enum):
    """The progress of a worker's session. It gets batches while it serves, and in no other state."""

    GREETING = "greeting"
    """The worker has greeted, and not all of its slots have; or they are held until those of others are there, too."""
    SERVING = "serving"
    DRAINING = "draining"
    """The worker asked to leave. It is dismissed when it has answered its batches."""
    LEAVING = "leaving"
    """The worker said goodbye, and reports of it may be unread on its slots' connections."""
    UNREACHABLE = "unreachable"
    """Its connection broke, or its process ended. The last reports are read before it leaves."""
    CONDEMNED = "condemned"
    """One of its slots hangs. Its process is killed, or it is cut off where another host runs it."""
    GONE = "gone"


def _to(after: WorkerState, *before: WorkerState) -> dict[WorkerState, WorkerState]:
    return dict.fromkeys(before, after)


def _kept(*states: WorkerState) -> dict[WorkerState, WorkerState]:
    return {state: state for state in states}


_S = WorkerState
CONNECTED_WORKER_TABLE: Final[dict[str, dict[WorkerState, WorkerState]]] = {
    "serve": _to(_S.SERVING, _S.GREETING),
    "drain": _to(_S.DRAINING, _S.GREETING, _S.SERVING)
    | _kept(_S.DRAINING, _S.LEAVING, _S.UNREACHABLE, _S.CONDEMNED),
    "say goodbye": _to(_S.LEAVING, _S.GREETING, _S.SERVING, _S.DRAINING, _S.LEAVING, _S.UNREACHABLE)
    | _kept(_S.CONDEMNED),
    "lose touch": _to(_S.UNREACHABLE, _S.GREETING, _S.SERVING, _S.DRAINING)
    | _kept(_S.LEAVING, _S.UNREACHABLE, _S.CONDEMNED),
    "condemn": _to(_S.CONDEMNED, _S.SERVING, _S.DRAINING, _S.LEAVING, _S.UNREACHABLE, _S.CONDEMNED),
    "end": _to(_S.GONE, *[state for state in _S if state is not _S.GONE]),
}
"""The state that follows each, by the name of a change."""


MAX_REMEMBERED = 4096
"""Layouts that are remembered per worker. Beyond it all are forgotten and checked again."""
MAX_TIME_S = 30 * 86_400.0
MAX_CALLS = 1 << 20
MAX_ELEMENTS = 1 << 53
"""More than any honest batch takes, and so little that sums over years still fit in messages."""


class ReportRefused(Exception):
    """The report contradicts the signature or the batch; the message says where."""


class ReportCheck:
    """Checks the reports of one model of one worker."""

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._gives_strings = any(port.is_string for port in signature.outputs)
        self._good: set[tuple[tuple[int, ...], Layout]] = set()

    def check(self, batch: BatchInputs, report: BatchReport) -> None:
        """Raise ReportRefused unless each member has its outputs, or lacks them because its deadline had passed."""
        outputs = report.outputs or ()
        self._check_calls(batch, report)
        if len(outputs) != len(batch.members):
            raise ReportRefused(f"{len(outputs)} results for {len(batch.members)} requests")
        start_before = batch.start_before
        for index, tensors in enumerate(outputs):
            if tensors is None:
                if start_before is None or start_before[index] is None:
                    raise ReportRefused(f"member {index} has no result, but no deadline could have passed")
                continue
            key = (batch.shapes[index].sizes, tensors.layout)
            if key not in self._good:
                self._check_layout(*key)
                if len(self._good) >= MAX_REMEMBERED:
                    self._good.clear()
                self._good.add(key)
            if self._gives_strings:
                try:
                    check_outputs(self._signature.outputs, tensors)
                except ValueError as error:
                    raise ReportRefused(str(error)) from None

    def _check_calls(self, batch: BatchInputs, report: BatchReport) -> None:
        """Check times and calls, which statistics and costs use. Each call runs a row that no other call runs."""
        signature, calls = self._signature, report.calls
        preparations, reallocations = report.preparations, report.reallocations
        if max(report.gather_s, report.run_s, report.busy_s) > MAX_TIME_S:
            text = f"it ran for {report.run_s:.0f} s and was busy for {report.busy_s:.0f} s"
            raise ReportRefused(f"{text}; at most {MAX_TIME_S:.0f} s are allowed")
        total = 0
        for count, sizes in calls:
            if count < 1 or len(sizes) != len(signature.dimensions):
                raise ReportRefused(
                    f"{count} calls of {list(sizes)}; the dimensions are {list(signature.dimensions)}"
                )
            if count * prod(sizes) > MAX_ELEMENTS:
                raise ReportRefused(f"{count} calls of {list(sizes)} are more than {MAX_ELEMENTS} elements")
            total += count
        total = total or 1
        most = max(batch.sizes[0] if signature.has_batch else 1, len(batch.members))
        if total > min(most, MAX_CALLS):
            raise ReportRefused(f"{total} calls for {most} rows")
        if preparations > total:
            raise ReportRefused(f"{preparations} preparations in {total} calls")
        if reallocations > total * (len(signature.inputs) + len(signature.outputs)):
            raise ReportRefused(f"{reallocations} reallocations in {total} calls")

    def _check_layout(self, sizes: tuple[int, ...], layout: Layout) -> None:
        signature = self._signature
        if len(layout) != len(signature.outputs):
            raise ReportRefused(f"{len(layout)} outputs; the model has {len(signature.outputs)}")
        own = dict(zip(signature.dimensions, sizes, strict=True))
        leading: dict[str, int] = {}
        for number, (port, (reported, element_type, shape)) in enumerate(
            zip(signature.outputs, layout, strict=True)
        ):
            if reported != number:
                raise ReportRefused(f"output {number} has the number {reported}")
            if element_type != port.element_type:
                raise ReportRefused(f"output {port.name!r} is {element_type}, not {port.element_type}")
            _check_shape(port, shape, own)
            leading[port.name] = shape[0] if port.shape.rank else 0
        for port in signature.outputs:
            if isinstance(port.rule, With) and leading[port.name] != leading[port.rule.output]:
                text = f"{leading[port.name]} rows, {port.rule.output!r} has {leading[port.rule.output]}"
                raise ReportRefused(f"output {port.name!r} has {text}")


def _check_shape(port: OutputPort, shape: tuple[int, ...], own: dict[str, int]) -> None:
    """Check that dimensions follow the request's sizes, or lie within the signature's bounds.

    Of the axis along which the data decides a request may have any part, nothing included. The shape of strings ends with
    their bytes, which may be any.
    """
    if port.is_string:
        shape = shape[:-1]
    if len(shape) != port.shape.rank:
        raise ReportRefused(f"output {port.name!r} has shape {list(shape)}, not [{port.shape}]")
    for axis, (size, wanted, admitted) in enumerate(
        zip(shape, port.own_sizes(own), port.shape.dimensions, strict=True)
    ):
        if axis == port.data_axis:
            most = admitted.maximum if wanted is None else wanted
            if most is not None and size > most:
                raise ReportRefused(f"output {port.name!r} has {size} along axis {axis}, at most {most} fit")
        elif wanted is not None and size != wanted:
            follows = port.shape.names[axis] or str(port.extents[axis])
            raise ReportRefused(
                f"output {port.name!r} has {size} along {follows!r}; its request has {wanted}"
            )
        elif wanted is None and size not in admitted:
            raise ReportRefused(f"output {port.name!r} has shape {list(shape)}, not [{port.shape}]")


MAX_NAME = 200
"""Characters of a worker's name, which every result and many log lines carry, and of an engine's."""
MOST_OFFERED = 256
"""Models of one worker."""
MOST_PAIRS = 2048
"""Models of one worker times its slots: the scheduler takes 2 us for each pair when the worker joins."""
MOST_COST_POINTS = 1024
"""Points of a table of costs: the most that a calibration measures. The scheduler takes 9 ms to read them."""

_DIGEST = re.compile("[0-9a-f]{64}")


class GreetingRefused(Exception):
    """A worker cannot be welcomed. The message gives the reason, and calls the worker "it"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A worker's greeting, as it was read and checked."""

    name: str
    pid: int
    slots: int
    models: Mapping[str, ModelSignature]
    costs: Mapping[str, CostTable] = field(default_factory=dict)
    """Measured costs of calls, by model; some models may have none."""
    wide: Mapping[str, CostTable] = field(default_factory=dict)
    """The same of its wide slot, whose number is `slots`, by the models that it serves; empty: it has none."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of models' files, by model; some models may have none."""
    tolerances: Mapping[str, Mapping[str, OutputTolerance]] = field(default_factory=dict)
    """The largest difference between two results that count as equal, by model and output."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """The engine that computes each model, with its version, in the worker's words; some models may have none."""


def narrowed(offer: Offer, without: Collection[str]) -> Offer:
    """Return the offer without these models."""

    def left(found: Mapping[str, V]) -> dict[str, V]:
        return {name: value for name, value in found.items() if name not in without}

    return replace(
        offer,
        models=left(offer.models),
        costs=left(offer.costs),
        wide=left(offer.wide),
        digests=left(offer.digests),
        tolerances=left(offer.tolerances),
        engines=left(offer.engines),
    )


def read_offer(hello: WorkerHello) -> Slices[Offer]:
    """Read a worker's offer, a model per slice.

    Raises GreetingRefused for an invalid signature, and for costs, digests or tolerances of a model that it does not serve.
    """
    models = {}
    tables: tuple[dict[str, CostTable], dict[str, CostTable]] = ({}, {})
    try:
        for name, plain in hello.models.items():
            models[name] = ModelSignature.from_dict(plain)
            yield
        for told, found in zip((hello.costs, hello.wide), tables, strict=True):
            for name, plain in told.items():
                found[name] = CostTable.from_dict(plain)
                yield
        tolerances = read_tolerances(hello.tolerances, models)
    except EngineError as error:
        raise GreetingRefused(str(error)) from None
    costs, wide = tables
    for name, table in (*costs.items(), *wide.items()):
        if name not in models or table.dimensions != models[name].dimensions:
            raise GreetingRefused(
                f"it has costs of {name!r}, but serves no such model with the dimensions {table.dimensions}"
            )
        if len(table.points) > MOST_COST_POINTS:
            raise GreetingRefused(
                f"its costs of {name!r} have {len(table.points)} points; at most {MOST_COST_POINTS} are allowed"
            )
    _check_files(hello, models)
    return Offer(
        name=hello.worker,
        pid=hello.pid,
        slots=hello.slots,
        models=models,
        costs=costs,
        wide=wide,
        digests=hello.digests,
        tolerances=tolerances,
        engines=hello.engines,
    )


def _check_files(hello: WorkerHello, models: Collection[str]) -> None:
    """Raise GreetingRefused for a digest or an engine that is none, or is of no model of these."""
    for name, digest in hello.digests.items():
        if name not in models:
            raise GreetingRefused(f"it has a digest of {name!r}, but serves no such model")
        if not _DIGEST.fullmatch(digest):
            raise GreetingRefused(f"its digest of {name!r} is not a sha256 of 64 hexadecimal digits")
    for name, engine in hello.engines.items():
        if name not in models:
            raise GreetingRefused(f"it has an engine of {name!r}, but serves no such model")
        if len(engine) > MAX_NAME or not engine.isprintable():
            raise GreetingRefused(
                f"its engine of {name!r} must be printable and have at most {MAX_NAME} characters"
            )


def read_tolerances(
    plain: Mapping[str, Mapping[str, Any]], models: Mapping[str, ModelSignature]
) -> dict[str, dict[str, OutputTolerance]]:
    """Read tolerances by model and output. Raises EngineError for one that is of no output of these models."""
    found: dict[str, dict[str, OutputTolerance]] = {}
    for model, outputs in plain.items():
        ranks = {port.name: port.shape.rank for port in models[model].outputs} if model in models else {}
        found[model] = {name: OutputTolerance.from_dict(one) for name, one in outputs.items()}
        for name, one in found[model].items():
            if any(not 0 <= axis < ranks.get(name, 0) for axis, _ in one.spreads) or name not in ranks:
                text = f"it has a tolerance of {model!r}, {name!r}, but serves no such output, or none with these axes"
                raise EngineError(text)
            if one.margins and (one.margins not in found[model] or found[model][one.margins].margins):
                raise EngineError(f"{model!r}, {name!r} is judged by {one.margins!r}, which has no tolerance")
    return found


def check_form(hello: WorkerHello) -> None:
    """Raise GreetingRefused for a name that cannot be shown, or an impossible number of slots."""
    if len(hello.worker) > MAX_NAME or not hello.worker.isprintable():
        raise GreetingRefused(f"its name must be printable and have at most {MAX_NAME} characters")
    if not 1 <= hello.slots <= MAX_SLOTS:
        raise GreetingRefused(f"it has {hello.slots} slots; 1 to {MAX_SLOTS} are allowed")


def check_number(hello: WorkerHello) -> None:
    """Raise GreetingRefused for more models than the event loop has time for."""
    number = max(len(hello.models), len(hello.costs), len(hello.wide))
    if number > MOST_OFFERED:
        raise GreetingRefused(f"it has {number} models; at most {MOST_OFFERED} are allowed")
    if number * hello.slots > MOST_PAIRS:
        text = (
            f"it has {number} models in {hello.slots} slots; at most {MOST_PAIRS} models x slots are allowed"
        )
        raise GreetingRefused(text)


class ConnectedWorker(PeerLink):
    """A worker in one session, and the link to its control; its slots have links of their own."""

    __slots__ = (
        "_checks",
        "answered_at",
        "condemned_for",
        "costs",
        "dialled_in",
        "digests",
        "engines",
        "greets_anew",
        "models",
        "name",
        "pid",
        "port",
        "serves",
        "session",
        "since",
        "slots",
        "state",
        "token",
        "tolerances",
        "wide",
    )

    prefetch_s = REMOTE_PREFETCH_S
    in_server = False

    def __init__(
        self,
        peer: bytes | None,
        offer: Offer,
        serves: Mapping[str, ServedModel],
        outgoing: Outgoing,
        now: float,
        *,
        session: int,
        dialled_in: bool,
    ) -> None:
        """Begin a session. `serves`: the models of the offer as the server has them, by name."""
        super().__init__(peer, now)
        self.state = WorkerState.GREETING
        self.since = now
        """When that state began."""
        self.dialled_in = dialled_in
        """Whether its process was started elsewhere, so that this server cannot kill it, nor be told how it ended."""
        self.name = offer.name
        """As it appears in timings and logs: `name/slot`."""
        self.pid = offer.pid
        self.models = offer.models
        self.serves = dict(serves)
        self.costs = offer.costs
        self.wide = offer.wide
        """Costs of the models of its wide slot, which is the last one of `slots`; empty: it has none."""
        self.digests = offer.digests
        self.engines = offer.engines
        self.greets_anew = False
        """True if it drains to greet once more, since a reload has changed what it serves."""
        self.tolerances = offer.tolerances
        self.session = session
        """Number of the session; this server uses none twice."""
        self.token = os.urandom(16)
        """The proof by which its slots are known."""
        self.port = outgoing
        self.slots = [SlotRecord(self, slot, now) for slot in range(offer.slots)]
        if offer.wide:
            self.slots.append(SlotRecord(self, offer.slots, now, wide=True))
        self._checks = {key: ReportCheck(signature) for key, signature in offer.models.items()}
        self.condemned_for = ""
        """Why its process is to be ended, once that is so."""
        self.answered_at: float | None = None
        """When it last reported a batch that had run."""

    @property
    def running(self) -> list[int]:
        """Batches that it has not reported yet: those that run, and those that are queued behind."""
        return [batch for slot in self.slots for batch in slot.running]

    def change(self, name: str, now: float) -> None:
        """Change the state of its session; raises KeyError for a change that the table does not list."""
        state = CONNECTED_WORKER_TABLE[name][self.state]
        if state is not self.state:
            self.state, self.since = state, now

    @property
    def is_serving(self) -> bool:
        """Whether it gets batches."""
        return self.state is WorkerState.SERVING

    @property
    def has_greeted(self) -> bool:
        """Whether all its slots have greeted."""
        return all(slot.has_greeted for slot in self.slots)

    def cancel(self, slot: SlotRecord, batch: int) -> None:
        """Say that the results of a batch are not needed; its report still comes."""
        self.port.say(self, CancelBatchEntry(batch=batch, slot=slot.slot))

    def recall(self, slot: SlotRecord, batch: int) -> None:
        """Ask for a batch back; whether it had begun is in its report."""
        self.port.say(self, RecallBatchEntry(batch=batch, slot=slot.slot))

    def kill(self, reason: str, now: float) -> None:
        """End its process, since a slot hangs: the worker port does so when this turn's decisions are carried out."""
        if self.state not in (WorkerState.CONDEMNED, WorkerState.GONE):  # its other slots may hang, too
            self.change("condemn", now)
            self.condemned_for = reason
            self.port.lost.append((self, reason))

    def judge(self, batch: Batch, report: BatchReport, now: float) -> BatchReport:
        """Return the report with its times clipped to the time since the batch was sent.

        Raises ReportRefused where it contradicts the model or the batch.
        """
        assert batch.inputs is not None
        self._checks[batch.model].check(batch.inputs, report)
        most_s = now - batch.sent_at
        if max(report.gather_s, report.run_s, report.busy_s) <= most_s:
            return report
        return replace(
            report,
            gather_s=min(report.gather_s, most_s),
            run_s=min(report.run_s, most_s),
            busy_s=min(report.busy_s, most_s),
        )

    def left(self, now: float) -> None:
        """End its session: nothing more is sent to it."""
        self.change("end", now)
        self.peer = None
        for slot in self.slots:
            slot.peer = None
            slot.running.clear()


class LocalWorker(ConnectedWorker):
    """The slots of the server's own process: their supervision is a call away."""

    __slots__ = ("_own",)

    prefetch_s = LOCAL_PREFETCH_S
    in_server = True

    def __init__(
        self,
        own: SlotThreads,
        serves: Mapping[str, ServedModel],
        outgoing: Outgoing,
        now: float,
        *,
        session: int,
        name: str = "local",
    ) -> None:
        offer = Offer(
            name=name,
            pid=os.getpid(),
            slots=own.slots,
            models=own.models,
            costs=own.costs,
            wide=own.wide_costs,
            digests=own.digests,
            tolerances=read_tolerances(own.tolerances, own.models),
        )
        super().__init__(None, offer, serves, outgoing, now, session=session, dialled_in=False)
        self._own = own

    def cancel(self, slot: SlotRecord, batch: int) -> None:
        """Interrupt a batch, or withdraw it."""
        self._own.withdraw(slot.slot, batch, ErrorCode.CANCELLED)

    def recall(self, slot: SlotRecord, batch: int) -> None:
        """Withdraw a batch if it has not begun."""
        self._own.withdraw(slot.slot, batch, ErrorCode.RECALLED)

    def kill(self, reason: str, now: float) -> None:
        """Log that nothing can end a thread: the slot stays occupied."""
        self.condemned_for = reason
        advice = "use worker processes; a reload replaces the slots, and the call goes on"
        log.error("slot hangs", worker=self.name, why=reason, advice=advice)

    def judge(self, batch: Batch, report: BatchReport, now: float) -> BatchReport:
        """Return the report as it is: it comes from this process."""
        return report


class SlotRecord(PeerLink):
    """A slot of a worker, and the link to it."""

    __slots__ = ("at_work", "batches", "busy_s", "label", "number", "running", "slot", "wide", "worker")

    def __init__(self, worker: ConnectedWorker, slot: int, now: float, *, wide: bool = False) -> None:
        super().__init__(None, now)
        self.worker = worker
        self.slot = slot
        """The worker's number of it."""
        self.number = -1
        """The scheduler's number of it, from when it joins; never used twice."""
        self.wide = wide
        """Whether it runs lone requests on all threads of its process."""
        self.label = f"{worker.name}/{'wide' if wide else slot}"
        self.running: dict[int, Batch] = {}
        """Batches that were sent on this link and not answered: the one that runs, and those behind it."""
        self.at_work = False
        """Whether the dispatcher counts its time: from a batch that is sent to it until none is left."""
        self.batches = 0
        self.busy_s = 0.0

    @property
    def has_greeted(self) -> bool:
        """Whether it has a connection, or had one until it ended."""
        return self.peer is not None or self.number >= 0

    def __repr__(self) -> str:
        return f"<slot {self.label}: {self.batches} batches>"

    def report(self, entry: BatchDone | BatchFailedEntry, now: float) -> BatchReport:
        """Return the report that an entry carries; its batch is open no more.

        Raises ReportRefused where it contradicts the model or the batch, for a batch that this slot was never sent, or has
        reported before, and out of turn: only a batch that is given back may be reported before an earlier one, or before
        one that was asked back. Then nothing that the worker says can be believed.
        """
        number = entry.report.batch if isinstance(entry, BatchDone) else entry.batch
        batch = self.running.get(number)
        if batch is None:
            raise ReportRefused("it was never sent this batch, or has answered it already")
        if isinstance(entry, BatchDone):
            report = self.worker.judge(batch, entry.report, now)
            self.worker.answered_at = now
        else:
            report = _failure(entry)
            if report.code is ErrorCode.RECALLED and not batch.recalled:
                # Only what was asked back runs again without counting as an attempt.
                report = replace(report, code=ErrorCode.INTERNAL)
        if report.code not in GIVEN_BACK:
            for before, earlier in self.running.items():
                if before < number and not earlier.recalled:
                    raise ReportRefused("it was sent another batch before, and has not answered that")
        del self.running[number]
        return report


def _failure(entry: BatchFailedEntry) -> BatchReport:
    """Return the report of a batch that failed. A code that is unknown here is `internal`."""
    try:
        code = ErrorCode(entry.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return BatchReport(batch=entry.batch, outputs=None, code=code, message=entry.message)
