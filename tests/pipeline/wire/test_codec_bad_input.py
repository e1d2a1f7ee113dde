"""Whatever arrives: a `ProtocolError` for the message, or a bad entry by its id; never a wrong entry let through."""

from __future__ import annotations

from math import inf, prod
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.wire.strategies import comparable, entries_for

from shapestream.errors import ProtocolError
from shapestream.wire.codec import decode, encode
from shapestream.wire.limits import WORKER_LIMITS
from shapestream.wire.messages import Entry, RequestEntry, Role, Timings
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.layout import Tensors

SERVER = Role.SERVER_OF_CLIENTS
GOOD_LAYOUT = [[0, "f32", [2, 3]]]
HOSTILE: list[Any] = [
    None,
    True,
    False,
    1.0,
    -1,
    0,
    2**63,
    2**64 - 1,
    "f32",
    "",
    b"",
    b"\x90",
    [],
    [[]],
    {},
    {"a": 1},
]


def header(*entries: Any, version: Any = 1) -> bytes:
    """A header frame with these entries."""
    packed: bytes = msgpack.packb([version, list(entries)])
    return packed


def raw_request(**changes: Any) -> list[Any]:
    """The elements of a good request for one inline f32 [2, 3], with changes."""
    fields = {
        "kind": 12,
        "frames": 0,
        "sequence": 7,
        "model": 0,
        "remaining_ms": None,
        "priority": 0,
        "layout": msgpack.packb(GOOD_LAYOUT),
        "inline": [b"x" * 24],
    }
    return list((fields | changes).values())


def test_the_unchanged_request_of_these_tests_is_good() -> None:
    """The table below proves something only if its starting point is accepted."""
    envelope = decode([header(raw_request())], role=SERVER)
    assert [] == envelope.bad
    assert 1 == len(envelope.entries)


def test_a_message_without_frames_is_refused() -> None:
    """No socket gives one; what arrives on one and cannot be read stands in serving/test_hostile_messages.py."""
    with pytest.raises(ProtocolError, match="0 frames"):
        decode([], role=SERVER)


def layout(*rows: Any) -> bytes:
    """The bytes of a layout with these rows."""
    packed: bytes = msgpack.packb(list(rows))
    return packed


def nested(depth: int) -> Any:
    """Maps within maps."""
    return {"a": nested(depth - 1)} if depth else None


def test_a_bad_entry_is_named_by_its_id_where_that_can_be_read() -> None:
    """The sender learns which of its requests failed; an unreadable id is reported without one."""
    rows = [raw_request(sequence=41, model=None), raw_request(sequence=None), [13, 0, 42, 0], [11, 0, 5]]
    bad = decode([header(*rows)], role=SERVER).bad
    assert [(12, 41), (12, None), (13, 42), (11, None)] == [(entry.kind, entry.id) for entry in bad]
    bad = decode([header([53, 0, 43, None])], role=Role.WORKER).bad
    assert [(53, 43)] == [(entry.kind, entry.id) for entry in bad]
    only_for_workers = decode([header([53, 0, 44])], role=SERVER).bad
    assert [(53, 44)] == [(entry.kind, entry.id) for entry in only_for_workers]


FAILURE = [25, 0, 7, "invalid", "words", False, None]
RESULT = [24, 0, 7, [1, 2, 3, 4, 5, "w/0"], layout(*GOOD_LAYOUT), [b"x" * 24]]
MEMBER = [None, layout(*GOOD_LAYOUT), [b"x" * 24]]
EXECUTE = [51, 0, 7, 1, 0, 5, "model", [2], [MEMBER]]
DONE = [41, 0, 7, 1, 100, 120, 0, 1, [[2, [4, 8]]], [MEMBER[1:], None], 3]


@pytest.mark.parametrize(
    ("role", "good", "at", "value", "words"),
    [
        (Role.CLIENT, FAILURE, 3, None, "Failure.code must be a string"),
        (Role.CLIENT, FAILURE, 3, "c" * 513, "Failure.code must be a string of at most 512"),
        (Role.CLIENT, FAILURE, 4, b"words", "Failure.message must be a string"),
        (Role.CLIENT, FAILURE, 4, "w" * 8193, "Failure.message must be a string of at most 8192"),
        (Role.CLIENT, FAILURE, 5, 0, "Failure.retryable must be true or false"),
        (Role.CLIENT, FAILURE, 5, None, "Failure.retryable must be true or false"),
        (Role.CLIENT, FAILURE, 6, 1.5, "Failure.retry_after_ms must be an integer"),
        (Role.CLIENT, RESULT, 2, True, "Result.sequence"),
        (Role.CLIENT, RESULT, 3, [1, 2, 3, 4, 5], "Result.timings must be an array of at least 6"),
        (Role.CLIENT, RESULT, 3, [1, 2, 3, 4, 5, "w/0", 7], "Result.timings.digest must be a string"),
        (Role.CLIENT, RESULT, 3, None, "Result.timings must be an array of at least 6"),
        (Role.CLIENT, RESULT, 3, [1, 2, True, 4, 5, "w/0"], "each time in Result.timings must be an integer"),
        (Role.CLIENT, RESULT, 3, [1, 2, -3, 4, 5, "w/0"], "each time in Result.timings must be an integer"),
        (Role.CLIENT, RESULT, 3, [1, 2, 3, 4, 5, b"w/0"], "Result.timings.worker must be a string"),
        (Role.CLIENT, [26, 0, 1, 1], 3, True, "Credit.window_bytes must be an integer"),
        (
            Role.CLIENT,
            [20, 0, bytes(16), 1, 1, 1],
            2,
            bytes(15),
            "Welcome.epoch must be 16 bytes, not",
        ),
        (
            Role.CLIENT,
            [20, 0, bytes(16), 1, 1, 1],
            2,
            "x" * 16,
            "Welcome.epoch must be 16 bytes, not",
        ),
        (Role.CLIENT, [22, 0, "m", 1, {}], 4, [], "ModelOpened.signature must be a map"),
        (
            Role.SERVER_OF_WORKERS,
            [40, 0, "w", 1, 1, {"m": {}}, {}],
            5,
            {"m": []},
            "WorkerHello.models must be a map",
        ),
        (
            Role.SERVER_OF_WORKERS,
            [40, 0, "w", 1, 1, {"m": {}}, {"m": {}}],
            6,
            {"m": 1},
            "WorkerHello.costs must be a map",
        ),
        (Role.SERVER_OF_WORKERS, DONE, 2, -1, "BatchDone.batch must be an integer"),
        (Role.SERVER_OF_WORKERS, DONE, 10, -1, "BatchDone.gather_us must be an integer"),
        (Role.SERVER_OF_WORKERS, DONE, 5, 1.5, "BatchDone.busy_us must be an integer"),
        (Role.SERVER_OF_WORKERS, DONE, 7, True, "BatchDone.preparations must be an integer"),
        (Role.SERVER_OF_WORKERS, DONE, 8, None, "BatchDone.calls must be an array of at most 1024"),
        (Role.SERVER_OF_WORKERS, DONE, 8, [[2]], r"an element of BatchDone.calls must be [count, sizes]"),
        (Role.SERVER_OF_WORKERS, DONE, 8, [[-2, [4, 8]]], "a count in BatchDone.calls must be an integer"),
        (Role.SERVER_OF_WORKERS, DONE, 8, [[2, [4, 8.5]]], "a size in BatchDone.calls must be an integer"),
        (Role.SERVER_OF_WORKERS, DONE, 9, [], "1 to 1024 outputs"),
        (Role.SERVER_OF_WORKERS, DONE, 9, [[]], "an output of BatchDone must be nil or"),
        (Role.SERVER_OF_WORKERS, DONE, 9, [[MEMBER[1], [b"x"]]], "tensor 0 has 1 bytes"),
        (Role.SERVER_OF_WORKERS, DONE, 1, 1, "claims 1 frames more than its tensors use"),
        (Role.WORKER, EXECUTE, 3, True, "Execute.session must be an integer"),
        (Role.WORKER, EXECUTE, 4, None, "Execute.slot must be an integer"),
        (Role.WORKER, EXECUTE, 5, 0.5, "Execute.sent_us must be an integer"),
        (Role.WORKER, EXECUTE, 6, 5, "Execute.model must be a string"),
        (Role.WORKER, EXECUTE, 7, 2, "Execute needs an array of sizes"),
        (Role.WORKER, EXECUTE, 7, [True], "Execute.sizes must be an integer"),
        (Role.WORKER, EXECUTE, 8, [], "1 to 1024 members"),
        (Role.WORKER, EXECUTE, 8, [MEMBER[1:]], "a member of Execute must be"),
        (Role.WORKER, EXECUTE, 8, [[-1, *MEMBER[1:]]], "Execute.deadline_us must be an integer"),
        (Role.WORKER, EXECUTE, 1, 1, "claims 1 frames more than its tensors use"),
        (Role.WORKER, [53, 0, 7, 1], 2, -1, "RecallBatch.batch must be an integer"),
        (Role.WORKER, [53, 0, 7, 1], 2, True, "RecallBatch.batch must be an integer"),
        (Role.WORKER, [53, 0, 7, 1], 1, 1, "RecallBatch owns no frames, but claims 1"),
    ],
)
def test_bad_entries_between_servers_and_workers_and_to_clients(
    role: Role, good: list[Any], at: int, value: Any, words: str
) -> None:
    """Each field is checked, by name; the entry beside it is read. Clients' entries: serving/test_hostile_requests.py."""
    bad = [*good[:at], value, *good[at + 1 :]]
    frames = [header(good, bad), b""] if bad[1] else [header(good, bad)]
    envelope = decode(frames, role=role, limits=WORKER_LIMITS)
    assert 1 == len(envelope.entries)
    assert [good[0]] == [entry.kind for entry in envelope.bad]
    assert words in envelope.bad[0].message


@pytest.mark.parametrize("values", [[], {"a": [1] * 5000}, nested(40), {"": {"a": nested(40)}}])
def test_plain_data_is_bounded(values: Any) -> None:
    """Statistics that are no map, too long or nested too deeply are refused before anybody walks them."""
    try:
        bad = decode([header([27, 0, values])], role=Role.CLIENT).bad
    except ProtocolError:
        return
    assert [27] == [entry.kind for entry in bad]


@pytest.mark.parametrize("first", [{}, {"model": None}, {"layout": b""}, {"kind": 77}])
def test_a_bad_entry_takes_its_own_frames_with_it(first: dict[str, Any]) -> None:
    """The frames of the next entry are found, whatever is wrong with the one before."""
    large = layout([0, "u8", [2000]])
    rows = [
        raw_request(frames=2, layout=large, inline=[None]) if not first else raw_request(frames=2, **first),
        raw_request(sequence=8, frames=1, layout=large, inline=[None]),
    ]
    envelope = decode([header(*rows), b"a" * 2000, b"b" * 2000, b"c" * 2000], role=SERVER)
    (entry,) = envelope.entries
    assert isinstance(entry, RequestEntry)
    assert (8, b"c" * 2000) == (entry.sequence, entry.tensors.buffers[0])
    assert 1 == len(envelope.bad)


def test_an_entry_cannot_reach_into_the_frames_of_the_next() -> None:
    """A request that claims no frame gets none, even when the message has some left."""
    large = layout([0, "u8", [2000]])
    thief = raw_request(layout=large, inline=[None])
    owner = raw_request(sequence=8, frames=1, layout=large, inline=[None])
    envelope = decode([header(thief, owner), b"b" * 2000], role=SERVER)
    assert [8] == [entry.sequence for entry in envelope.entries if isinstance(entry, RequestEntry)]
    assert ["tensor 0 should be a frame, but the entry owns no more"] == [
        entry.message for entry in envelope.bad
    ]


@pytest.mark.parametrize(
    "lookalike", [[[0, "f32", [2, True]]], [[0, "f32", [2.0, 1]]], [[False, "f32", [2, 1]]]]
)
def test_an_equal_layout_of_other_types_does_not_pass_for_a_known_one(lookalike: Any) -> None:
    """`True == 1 == 1.0` in Python; a layout that merely equals a checked one is refused all the same."""
    good = raw_request(layout=layout([0, "f32", [2, 1]]), inline=[b"x" * 8])
    bad = raw_request(layout=layout(*lookalike), inline=[b"x" * 8])
    for rows, expected in (([good, bad, good], 2), ([bad, good, bad], 1)):
        envelope = decode([header(*rows)], role=SERVER)
        assert expected == len(envelope.entries)
        for entry in envelope.entries:
            assert isinstance(entry, RequestEntry)
            assert ((0, "f32", (2, 1)),) == entry.tensors.layout
            assert_valid(entry)


# ---------------------------------------------------------------- random mutation


def assert_valid(value: Any) -> None:
    """Checks a decoded entry anew, in another way than the codec does."""
    if isinstance(value, Tensors):
        assert len(value.layout) == len(value.buffers) == len({row[0] for row in value.layout})
        for (port, element_type, shape), buffer in zip(value.layout, value.buffers, strict=True):
            assert {int} >= {type(port), *map(type, shape)}
            assert min((port, *shape)) >= 0
            if element_type in ("str", "bytes"):
                nbytes = 4 * prod(shape[:-1]) + shape[-1]
            else:
                nbytes = ELEMENT_TYPES[element_type].itemsize * prod(shape)
            assert nbytes == memoryview(buffer).nbytes
    elif isinstance(value, Timings) or hasattr(value, "__dataclass_fields__"):
        hints = get_type_hints(type(value))
        for name in value._fields if isinstance(value, Timings) else value.__dataclass_fields__:
            item, declared = getattr(value, name), hints[name]
            if declared in {int, int | None}:
                assert type(item) is int or (item is None and declared == int | None)
                assert item is None or -(2**31) < item < 2**63
            elif declared in {str, bytes, bool, str | None}:
                assert isinstance(item, declared)
            elif declared == dict[str, str] | None:
                known = {"request_id", "traceparent", "tracestate", "caller", "suspect", "together"}
                assert item is None or known >= item.keys() != set()
                assert {str} >= set(map(type, (item or {}).values()))
            elif declared == tuple[str, ...]:
                assert {str} >= set(map(type, item))
            else:
                assert_valid(item)
    elif isinstance(value, tuple):
        for item in value:
            assert_valid(item)
    elif type(value) is float:
        assert 0.0 <= value < inf
    else:
        assert value is None or type(value) in {int, dict}


def decode_hostile(frames: list[Any], role: Role) -> list[Entry]:
    """Decodes; the only error that may come is `ProtocolError`, and what comes out must be valid."""
    try:
        envelope = decode(frames, role=role, limits=WORKER_LIMITS)
    except ProtocolError:
        return []
    for entry in envelope.entries:
        assert_valid(entry)
    return envelope.entries


@given(st.data(), st.sampled_from(list(Role)))
@settings(max_examples=200, deadline=None)
def test_damaged_bytes(data: st.DataObject, role: Role) -> None:
    """Flipped, lost, added and truncated bytes of the header never raise anything else or pass as valid."""
    frames = encode(data.draw(entries_for(role)), limits=WORKER_LIMITS)
    damaged = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["flip", "insert", "delete", "cut"])):
            case "flip" if at < len(damaged):
                damaged[at] = data.draw(st.integers(0, 255))
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=3))
            case "delete":
                del damaged[at : at + 1]
            case "cut":
                del damaged[at:]
    decode_hostile([bytes(damaged), *frames[1:]], role)


def places(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """The paths of all elements of nested lists."""
    found = [path]
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            found += places(item, (*path, index))
    return found


def replaced(tree: Any, path: tuple[int, ...], value: Any) -> Any:
    """A copy of nested lists with one element replaced."""
    if not path:
        return value
    copy = list(tree)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


@given(st.data(), st.sampled_from(list(Role)))
@settings(max_examples=300, deadline=None)
def test_damaged_structure(data: st.DataObject, role: Role) -> None:
    """A field of another type or value, anywhere, harms its own entry only, unless the envelope breaks."""
    entries = data.draw(entries_for(role).filter(bool))
    frames = encode(entries, limits=WORKER_LIMITS)
    _, rows = msgpack.unpackb(frames[0], use_list=True)
    victim = data.draw(st.integers(0, len(rows) - 1))
    path = data.draw(st.sampled_from(places(rows[victim])))
    rows[victim] = replaced(rows[victim], path, data.draw(st.sampled_from(HOSTILE)))
    came = decode_hostile([header(*rows), *frames[1:]], role)
    if len(path) > 1 or (path and path[0] > 1):  # not the entry as a whole, its kind or its frame count
        unharmed = [comparable(entry) for index, entry in enumerate(entries) if index != victim]
        survived = [comparable(entry) for entry in came]
        assert unharmed == survived[:victim] + survived[len(survived) - len(entries) + victim + 1 :]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_layouts(data: st.DataObject) -> None:
    """The same inside the layouts, which are msgpack within msgpack."""
    rows = [[0, "f32", [2, 3]], [1, "boolean", [4]], [2, "i64", []]]
    path = data.draw(st.sampled_from(places(rows)))
    mutated = replaced(rows, path, data.draw(st.sampled_from(HOSTILE)))
    inline = [b"x" * 24, b"x" * 4, b"x" * 8]
    request = raw_request(layout=msgpack.packb(mutated), inline=inline)
    decode_hostile([header(request)], SERVER)
    decode_hostile([header(raw_request(layout=msgpack.packb(rows), inline=inline))], SERVER)


@given(st.data(), st.sampled_from(list(Role)))
@settings(max_examples=100, deadline=None)
def test_frames_that_are_lost_added_or_of_another_size(data: st.DataObject, role: Role) -> None:
    """Too many and too few frames break the envelope; a frame of another size breaks its entry."""
    entries = data.draw(entries_for(role))
    frames = encode(entries, limits=WORKER_LIMITS)
    with pytest.raises(ProtocolError):
        decode([*frames, b""], role=role, limits=WORKER_LIMITS)
    if len(frames) > 1:
        at = data.draw(st.integers(1, len(frames) - 1))
        with pytest.raises(ProtocolError):
            decode(frames[:at] + frames[at + 1 :], role=role, limits=WORKER_LIMITS)
        frames[at] = bytes(memoryview(frames[at]))[:-1]
        assert len(entries) - 1 == len(decode_hostile(frames, role))


@given(st.lists(st.binary(max_size=200), max_size=4), st.sampled_from(list(Role)))
@settings(max_examples=300, deadline=None)
def test_noise(frames: list[bytes], role: Role) -> None:
    """Random bytes raise `ProtocolError` and nothing else."""
    decode_hostile(list(frames), role)
