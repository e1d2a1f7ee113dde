"""Random entries of every kind, for the tests of the codec."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import strategies as st

from shapestream.wire.messages import (
    AcknowledgeAudit,
    Ask,
    AsksFirst,
    BatchDone,
    BatchFailedEntry,
    Cancel,
    CancelBatchEntry,
    Clock,
    Credit,
    Entry,
    Execute,
    Failure,
    Goodbye,
    GrantBounds,
    Granted,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    RecallBatchEntry,
    RequestEntry,
    ResultEntry,
    Role,
    RunsAlone,
    SlotEnded,
    SlotHello,
    StatisticsEntry,
    StatisticsRequest,
    Timings,
    Unknown,
    Welcome,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shapestream_engine.batch import BatchReport
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.layout import Tensors
from shapestream_engine.string_arrays import STRING_TYPES, nbytes_of

integers = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
names = st.text(max_size=20)
uuids = st.binary(min_size=16, max_size=16)
remaining = st.none() | integers
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | names | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
plain_maps = st.dictionaries(names, plain, max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    """Up to four tensors, some of them too large to travel inline."""
    ports = draw(st.lists(st.integers(0, 63), unique=True, max_size=4))
    layout, buffers = [], []
    for port in ports:
        element_type = draw(st.sampled_from([*sorted(ELEMENT_TYPES), *STRING_TYPES]))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 17, 40]), max_size=3)))
        if element_type in STRING_TYPES:
            # The codec does not look at lengths and contents: bytes of any meaning fit.
            shape = (*shape, draw(st.sampled_from([0, 1, 7, 1500])))
            layout.append((port, element_type, shape))
            buffers.append(bytes(nbytes_of(shape)))
            continue
        nbytes = prod(shape) * ELEMENT_TYPES[element_type].itemsize
        layout.append((port, element_type, shape))
        largest = 1 if element_type == "boolean" else 255
        buffers.append(bytes([draw(st.integers(0, largest))]) * nbytes)
    return Tensors(layout=tuple(layout), buffers=tuple(buffers))


timings = st.builds(
    Timings,
    queue_us=integers,
    run_us=integers,
    total_us=integers,
    batch_requests=integers,
    batch_rows=integers,
    worker=names,
)
tag = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128)
tags = st.fixed_dictionaries(
    {"request_id": tag},
    optional={
        "traceparent": tag,
        "tracestate": tag,
        "suspect": st.sampled_from("012"),
        "together": st.sampled_from(["1", "64", "99999"]),
    },
)
requests = st.builds(
    RequestEntry,
    sequence=integers,
    model=integers,
    remaining_ms=remaining,
    priority=st.integers(-100, 100),
    tensors=tensors(),
    tags=st.none() | tags,
)
results = st.builds(ResultEntry, sequence=integers, timings=timings, tensors=tensors())
times = st.integers(0, 1 << 40).map(lambda number: number * 1e-6)
# Seconds that are whole microseconds, as the wire has them, and whole in binary. Fewer than 2**53, which floats hold.
deadlines = st.none() | st.integers(0, 1 << 38).map(lambda number: number / 64)


def _if_any(deadlines: tuple[float | None, ...]) -> tuple[float | None, ...] | None:
    return None if set(deadlines) == {None} else deadlines


BY_ROLE: dict[Role, list[st.SearchStrategy[Any]]] = {
    Role.SERVER_OF_CLIENTS: [
        st.builds(Heartbeat),
        st.builds(Goodbye),
        st.builds(RunsAlone, sequence=st.none() | integers),
        st.builds(Clock, sent_us=integers),
        st.builds(Hello, client=uuids, software=names),
        st.builds(OpenModel, name=names),
        requests,
        st.builds(Cancel, sequence=integers),
        st.builds(StatisticsRequest),
        st.builds(AcknowledgeAudit, model=names),
        st.builds(Credit, window_requests=integers, window_bytes=integers),
        st.builds(AsksFirst, version=integers),
        st.builds(Ask, sequence=integers, nbytes=integers, remaining_ms=remaining),
    ],
    Role.CLIENT: [
        st.builds(Heartbeat),
        st.builds(Goodbye),
        st.builds(RunsAlone, sequence=st.none() | integers),
        st.builds(
            Welcome,
            epoch=uuids,
            window_requests=integers,
            window_bytes=integers,
            heartbeat_ms=integers,
        ),
        st.builds(Unknown),
        st.builds(ModelOpened, name=names, number=integers, signature=plain_maps),
        st.builds(ModelRefused, name=names, code=names, message=names),
        results,
        st.builds(
            Failure,
            sequence=integers,
            code=names,
            message=names,
            retryable=st.booleans(),
            retry_after_ms=remaining,
        ),
        st.builds(Credit, window_requests=integers, window_bytes=integers),
        st.builds(StatisticsEntry, values=plain_maps),
        st.builds(GrantBounds, unasked_bytes=integers, most_bytes=integers),
        st.builds(Granted, sequence=integers),
    ],
    Role.SERVER_OF_WORKERS: [
        st.builds(Heartbeat),
        st.builds(Goodbye),
        st.builds(
            WorkerHello,
            worker=names,
            pid=integers,
            slots=integers,
            models=st.dictionaries(names, plain_maps, max_size=2),
            costs=st.dictionaries(names, plain_maps, max_size=2),
            digests=st.dictionaries(names, names, max_size=2),
            protocol=integers,
            once=st.lists(names, max_size=2).map(tuple),
            tolerances=st.dictionaries(names, plain_maps, max_size=2),
            engines=st.dictionaries(names, names, max_size=2),
        ),
        st.builds(
            BatchDone,
            session=integers,
            report=st.builds(
                BatchReport,
                batch=integers,
                gather_s=times,
                run_s=times,
                busy_s=times,
                reallocations=integers,
                preparations=integers,
                calls=st.lists(
                    st.tuples(integers, st.lists(integers, max_size=3).map(tuple)), max_size=2
                ).map(tuple),
                outputs=st.lists(st.none() | tensors(), min_size=1, max_size=3).map(tuple),
                code=st.none(),
                message=st.just(""),
            ),
        ),
        st.builds(BatchFailedEntry, batch=integers, session=integers, code=names, message=names),
        st.builds(WorkerDraining),
        st.builds(SlotHello, token=uuids, slot=integers),
        st.builds(SlotEnded, slot=integers, session=integers, batch=remaining),
    ],
    Role.WORKER: [
        st.builds(Heartbeat),
        st.builds(Goodbye),
        st.builds(Clock, sent_us=integers),
        st.builds(Unknown),
        st.builds(WorkerWelcome, epoch=uuids, token=uuids, session=integers, heartbeat_ms=integers),
        st.builds(WorkerRefused, model=names, message=names),
        st.lists(st.tuples(tensors(), deadlines), min_size=1, max_size=3).flatmap(
            lambda members: st.builds(
                Execute,
                batch=integers,
                session=integers,
                slot=integers,
                sent_us=integers,
                model=names,
                sizes=st.lists(integers, max_size=3).map(tuple),
                members=st.just(tuple([tensors for tensors, _ in members])),
                start_before=st.just(_if_any(tuple([deadline for _, deadline in members]))),
            )
        ),
        st.builds(CancelBatchEntry, batch=integers, slot=integers),
        st.builds(RecallBatchEntry, batch=integers, slot=integers),
    ],
}


def entries_for(role: Role, *, max_size: int = 6) -> st.SearchStrategy[list[Entry]]:
    """Lists of entries that `role` reads."""
    return st.lists(st.one_of(BY_ROLE[role]), max_size=max_size)


def comparable(entry: Entry) -> Any:
    """An entry as plain values: buffers as bytes, whatever held them."""

    def plain_value(value: Any) -> Any:
        if isinstance(value, Tensors):
            return (value.layout, tuple(bytes(memoryview(buffer)) for buffer in value.buffers))
        if hasattr(value, "__dataclass_fields__"):
            return (
                type(value).__name__,
                *(plain_value(getattr(value, name)) for name in value.__dataclass_fields__),
            )
        if isinstance(value, tuple):
            return tuple(plain_value(item) for item in value)
        return value

    return plain_value(entry)
