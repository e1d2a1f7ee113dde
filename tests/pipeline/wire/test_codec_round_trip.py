"""What is encoded is decoded again, in as few messages as the limits allow, in an order that keeps the meaning."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.wire.strategies import comparable, entries_for

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.transport.zeromq import SocketOptions
from shapestream.wire.codec import decode, encode, pack_messages
from shapestream.wire.limits import (
    CLIENT_LIMITS,
    MAX_CLIENT_ENTRY_BYTES,
    MAX_FRAME_BYTES,
    WORKER_LIMITS,
    Limits,
)
from shapestream.wire.messages import (
    BatchDone,
    BatchFailedEntry,
    Cancel,
    Entry,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    OpenModel,
    RequestEntry,
    ResultEntry,
    Role,
    Timings,
)
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Buffer, Tensors

ROLES = st.sampled_from(list(Role))


def request(sequence: int = 1, *buffers: Buffer) -> RequestEntry:
    """A request whose tensors are u8 vectors that hold `buffers`."""
    layout = tuple((port, "u8", (memoryview(buffer).nbytes,)) for port, buffer in enumerate(buffers))
    return RequestEntry(
        sequence=sequence,
        model=0,
        remaining_ms=None,
        priority=0,
        tensors=Tensors(layout=layout, buffers=buffers),
    )


def decoded(messages: list[list[Buffer]], role: Role, limits: Limits = CLIENT_LIMITS) -> list[Entry]:
    """All entries of these messages, none of them bad."""
    entries: list[Entry] = []
    for frames in messages:
        envelope = decode(frames, role=role, limits=limits)
        assert [] == envelope.bad
        entries += envelope.entries
    return entries


@given(st.data(), ROLES)
@settings(deadline=None)
def test_every_kind_survives_the_round_trip(data: st.DataObject, role: Role) -> None:
    """Entries of every kind come out as they went in, types and order included."""
    entries = data.draw(entries_for(role))
    envelope = decode(encode(entries, limits=WORKER_LIMITS), role=role, limits=WORKER_LIMITS)
    assert [] == envelope.bad
    assert [comparable(entry) for entry in entries] == [comparable(entry) for entry in envelope.entries]


@given(st.data(), ROLES, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_packing_loses_nothing_and_keeps_the_limits(
    data: st.DataObject, role: Role, max_entries: int
) -> None:
    """Many messages hold the same entries as one would, and none passes a limit."""
    limits = Limits(max_entries=max_entries, max_frames=12, max_header_bytes=8000, max_members=10)
    entries = data.draw(entries_for(role, max_size=20))
    messages = pack_messages(entries, limits=limits)
    for frames in messages:
        assert len(frames) <= limits.max_frames + 1
        assert len(frames[0]) <= limits.max_header_bytes
    came = [repr(comparable(entry)) for entry in decoded(messages, role, limits)]
    assert sorted(repr(comparable(entry)) for entry in entries) == sorted(came)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_requests_keep_their_order(data: st.DataObject) -> None:
    """However control entries overtake them, requests leave in the order in which they were given."""
    entries = data.draw(entries_for(Role.SERVER_OF_CLIENTS, max_size=20))
    came = decoded(pack_messages(entries), Role.SERVER_OF_CLIENTS)
    assert [comparable(entry) for entry in entries if isinstance(entry, RequestEntry)] == [
        comparable(entry) for entry in came if isinstance(entry, RequestEntry)
    ]


@given(st.lists(st.lists(st.integers(0, 700), min_size=60, max_size=64), min_size=8, max_size=8))
@settings(max_examples=40, deadline=None)
def test_long_headers_are_read_in_parts(sizes: list[list[int]]) -> None:
    """Of more bytes than one entry may have: each request comes out as it went in, wherever a part ends."""
    some = [request(number, *map(bytes, of_one)) for number, of_one in enumerate(sizes)]
    entries = [*some, *[request(99, *[bytes(1024)] * 64)] * 3, *some[::-1]]
    frames = encode([request(), *entries])
    assert len(frames[0]) > MAX_CLIENT_ENTRY_BYTES
    assert [request(), *entries] == decode(frames, role=Role.SERVER_OF_CLIENTS).entries


def test_large_tensors_are_not_copied() -> None:
    """Beyond 1 KiB the very buffer that was given becomes the frame, and the received frame the tensor."""
    small, large = b"s" * 1024, b"l" * 1025
    frames = encode([request(1, small, large)])
    assert 2 == len(frames)
    assert frames[1] is large
    (entry,) = decode(frames, role=Role.SERVER_OF_CLIENTS).entries
    assert isinstance(entry, RequestEntry)
    assert entry.tensors.buffers[1] is large
    assert small == entry.tensors.buffers[0]


@pytest.mark.parametrize("size", [0, 8, 2000, 100_000])
def test_buffers_of_all_sorts_are_accepted(size: int) -> None:
    """bytearray, memoryview, array and ZeroMQ frame travel like bytes."""
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    buffers = [
        bytearray(content),
        memoryview(content),
        np.frombuffer(content, "u1").reshape(1, -1),
        zmq.Frame(content),
    ]
    frames = encode([request(1, *buffers)])
    (entry,) = decode(frames, role=Role.SERVER_OF_CLIENTS).entries
    assert isinstance(entry, RequestEntry)
    assert [content] * 4 == [bytes(memoryview(buffer)) for buffer in entry.tensors.buffers]


def test_a_header_may_be_a_zeromq_frame() -> None:
    """A header large enough to be received without a copy is read all the same."""
    entries = [request(number, b"x" * 1000) for number in range(100)]
    header, *rest = encode(entries)
    assert len(header) > 65536
    envelope = decode([zmq.Frame(header), *rest], role=Role.SERVER_OF_CLIENTS)
    assert entries == envelope.entries


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (b"12345", "has 5 bytes, but its layout takes 4"),
        (b"x" * 2000, "has 2000 bytes, but its layout takes 4"),
        (np.zeros((2, 4), "u1")[:, ::2], "C-contiguous"),
    ],
)
def test_tensors_that_do_not_match_their_layout_are_not_sent(buffer: Buffer, words: str) -> None:
    """A wrong length is found where it arises, not by the receiver."""
    bad = RequestEntry(
        sequence=1,
        model=0,
        remaining_ms=None,
        priority=0,
        tensors=Tensors(layout=((0, "u8", (4,)),), buffers=(buffer,)),
    )
    with pytest.raises(InvalidRequest, match=words):
        encode([bad])


def test_a_negative_remaining_time_travels_as_zero() -> None:
    """A request that is late already when it is sent is the receiver's to refuse."""
    late = RequestEntry(
        sequence=1, model=0, remaining_ms=-5, priority=0, tensors=Tensors(layout=(), buffers=())
    )
    (entry,) = decode(encode([late]), role=Role.SERVER_OF_CLIENTS).entries
    assert isinstance(entry, RequestEntry)
    assert 0 == entry.remaining_ms


def test_long_words_of_an_engine_are_cut() -> None:
    """An error text longer than the receiver takes arrives shortened, not refused."""
    failures: list[Entry] = [BatchFailedEntry(batch=1, session=1, code="model_error", message="w" * 100_000)]
    (entry,) = decode(encode(failures), role=Role.SERVER_OF_WORKERS).entries
    assert isinstance(entry, BatchFailedEntry)
    assert "w" * 8192 == entry.message


def test_words_of_an_engine_that_are_no_text_arrive_as_question_marks() -> None:
    """A file name that is not UTF-8, say: the codec must not fail where somebody tells of a failure."""
    failures: list[Entry] = [
        BatchFailedEntry(batch=1, session=1, code="model_error", message="no file caf\udce9.bin")
    ]
    (entry,) = decode(encode(failures), role=Role.SERVER_OF_WORKERS).entries
    assert isinstance(entry, BatchFailedEntry)
    assert "no file caf?.bin" == entry.message


def test_a_tensor_that_would_end_the_connection_is_not_sent() -> None:
    """The other side's libzmq drops whoever announces a larger frame, and all that was on its way there."""
    assert SocketOptions().max_frame_bytes == MAX_FRAME_BYTES
    with mmap.mmap(-1, MAX_FRAME_BYTES + 1) as nothing_written:  # so it takes no memory
        tensors = Tensors(layout=((0, "u8", (MAX_FRAME_BYTES + 1,)),), buffers=(nothing_written,))
        done = BatchDone(session=1, report=BatchReport(batch=1, outputs=(tensors,)))
        with pytest.raises(TooLarge, match="a tensor of 1073741825 bytes"):
            encode([done], limits=WORKER_LIMITS)


def test_sixteen_entries_and_more_have_a_longer_array_header() -> None:
    """The count of entries is written in msgpack's shortest form on both sides of each border."""
    for count in (0, 1, 15, 16, 255, 256):
        entries: list[Entry] = [Heartbeat()] * count
        assert entries == decode(encode(entries), role=Role.CLIENT).entries


def test_encode_refuses_more_than_one_message_holds() -> None:
    """Entries, frames and header bytes beyond the limits need `pack_messages`."""
    for entries in (
        [Heartbeat()] * 257,
        [request(number, *[b"l" * 1100] * 60) for number in range(18)],
        [request(number, *[b"s" * 1000] * 60) for number in range(20)],
    ):
        with pytest.raises(TooLarge):
            encode(entries)
        assert len(entries) == len(decoded(pack_messages(entries), Role.SERVER_OF_CLIENTS))


def test_one_entry_that_no_message_can_hold_is_refused() -> None:
    """A batch too large for the connection raises instead of being cut in two."""
    member = request(1, b"x" * 1024).tensors
    execute = Execute(batch=1, session=1, slot=0, sent_us=0, model="m", sizes=(), members=(member,) * 1024)
    with pytest.raises(TooLarge, match="Execute"):
        pack_messages([execute])
    (message,) = pack_messages([execute], limits=WORKER_LIMITS)
    assert [execute] == decode(message, role=Role.WORKER, limits=WORKER_LIMITS).entries


def test_a_message_does_not_grow_without_bound_in_bytes() -> None:
    """Large tensors are spread over messages, so that a heartbeat need not wait behind all of them."""
    entries = [request(number, b"x" * 1_000_000) for number in range(20)]
    limits = Limits(preferred_message_bytes=8_000_000)
    messages = pack_messages(entries, limits=limits)
    assert [8, 8, 4] == [len(frames) - 1 for frames in messages]
    # A tensor that is larger than that by itself still travels.
    assert 20 == len(pack_messages(entries, limits=Limits(preferred_message_bytes=500_000)))


def test_control_entries_go_first() -> None:
    """A heartbeat or a cancellation of something sent earlier overtakes bulk; a farewell does not."""
    bulk = [request(5, b"x"), request(6, b"y")]
    entries: list[Entry] = [*bulk, Goodbye(), Cancel(sequence=1), OpenModel(name="m"), Heartbeat()]
    assert [Cancel(sequence=1), OpenModel(name="m"), Heartbeat(), *bulk, Goodbye()] == decoded(
        pack_messages(entries), Role.SERVER_OF_CLIENTS
    )


def test_a_cancellation_stays_behind_what_it_cancels() -> None:
    """Were it first, it would name a request that the receiver has not seen, and do nothing."""
    entries: list[Entry] = [request(5, b"x"), Cancel(sequence=5), request(6, b"x"), Cancel(sequence=4)]
    assert [Cancel(sequence=4), *entries[:3]] == decoded(pack_messages(entries), Role.SERVER_OF_CLIENTS)


def test_bulk_alone_keeps_its_order() -> None:
    """Failures and results are both terminal replies; neither overtakes the other."""
    failure = Failure(sequence=9, code="invalid", message="", retryable=False, retry_after_ms=None)
    assert [failure, failure] == decoded(pack_messages([failure, failure]), Role.CLIENT)


def test_each_result_has_its_own_timings() -> None:
    """Equal ones behind one another are read once; what follows with another number, or a wrong one, is not mixed up."""
    row = Timings(queue_us=1, run_us=2, total_us=3, batch_requests=4, batch_rows=5, worker="w/0")
    told = [row, row, row._replace(total_us=9), row, row._replace(digest="d"), row._replace(run_us=-1), row]
    results = [
        ResultEntry(sequence=number, timings=timings, tensors=Tensors(layout=(), buffers=()))
        for number, timings in enumerate(told)
    ]
    envelope = decode(encode(results), role=Role.CLIENT)
    good = [entry for entry in envelope.entries if isinstance(entry, ResultEntry)]
    assert [timings for timings in told if timings.run_us > 0] == [entry.timings for entry in good]
    assert [5] == [bad.id for bad in envelope.bad]
    assert good[0].timings is good[1].timings
