"""docs/protocol.md says what the codec does: its tables, its limits and every byte of its examples."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from shapestream import errors
from shapestream.wire import limits, messages
from shapestream.wire.codec import decode, encode
from shapestream.wire.messages import (
    GRANTS_VERSION,
    Ask,
    AsksFirst,
    Entry,
    Failure,
    GrantBounds,
    Granted,
    Hello,
    OpenModel,
    RequestEntry,
    ResultEntry,
    Role,
    Timings,
    Welcome,
)
from shapestream.wire.tensor_frames import from_array
from shapestream_engine.batch import BatchReport
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.layout import Tensors
from shapestream_engine.string_arrays import STRING_TYPES

DOCUMENT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
BLOCKS = dict(re.findall(r"```hex (\w+)\n(.*?)```", DOCUMENT, re.DOTALL))
LAYOUT = ((0, "f32", (1, 2)),)


def floats(*values: float) -> Tensors:
    """One f32 row, as in the examples."""
    return Tensors(layout=LAYOUT, buffers=(np.array([values], "<f4").tobytes(),))


EXAMPLES: dict[str, tuple[Role, list[Entry]]] = {
    "hello": (
        Role.SERVER_OF_CLIENTS,
        [Hello(client=bytes(range(16)), software="example"), OpenModel(name="double")],
    ),
    "welcome": (
        Role.CLIENT,
        [Welcome(epoch=b"\xff" * 16, window_requests=1024, window_bytes=2**29, heartbeat_ms=1000)],
    ),
    "request": (
        Role.SERVER_OF_CLIENTS,
        [RequestEntry(sequence=1, model=0, remaining_ms=500, priority=0, tensors=floats(1, 2))],
    ),
    "result": (
        Role.CLIENT,
        [
            ResultEntry(
                sequence=1,
                timings=Timings(
                    queue_us=120, run_us=200, total_us=350, batch_requests=3, batch_rows=5, worker="w/0"
                ),
                tensors=floats(2, 4),
            ),
            Failure(sequence=2, code="overloaded", message="full", retryable=True, retry_after_ms=50),
        ],
    ),
    "framed": (
        Role.SERVER_OF_CLIENTS,
        [
            RequestEntry(
                sequence=3,
                model=0,
                remaining_ms=None,
                priority=0,
                tensors=Tensors(
                    layout=((0, "u8", (2000,)), (1, "boolean", ())), buffers=[b"\x07" * 2000, b"\x01"]
                ),
            )
        ],
    ),
    "asks_first": (Role.SERVER_OF_CLIENTS, [AsksFirst(version=GRANTS_VERSION)]),
    "bounds": (Role.CLIENT, [GrantBounds(unasked_bytes=1 << 20, most_bytes=1 << 29)]),
    "ask": (Role.SERVER_OF_CLIENTS, [Ask(sequence=5, nbytes=48 << 20, remaining_ms=None)]),
    "granted": (Role.CLIENT, [Granted(sequence=5)]),
    "texts": (
        Role.SERVER_OF_CLIENTS,
        [
            RequestEntry(
                sequence=4,
                model=0,
                remaining_ms=None,
                priority=0,
                tensors=Tensors(
                    layout=((0, "str", (2, 3)),), buffers=(from_array(np.array(["né", ""], object))[2],)
                ),
            )
        ],
    ),
}


def frames_of(block: str) -> list[bytes]:
    """The frames that a block of the document spells out."""
    header, raw = b"", []
    for line in block.splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("+"):
            byte, _, count = text[1:].partition("*")
            raw.append(bytes.fromhex(byte) * int(count))
        else:
            header += bytes.fromhex(text)
    return [header, *raw]


def test_every_example_is_checked() -> None:
    """A block without an expectation here would be a claim that nobody tests."""
    assert set(EXAMPLES) == set(BLOCKS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_means_what_it_says(name: str) -> None:
    """The bytes of the document decode to the entries that it describes, and those encode to the same bytes."""
    role, entries = EXAMPLES[name]
    envelope = decode(frames_of(BLOCKS[name]), role=role)
    assert [] == envelope.bad
    assert entries == envelope.entries
    assert frames_of(BLOCKS[name]) == encode(entries)


def test_a_client_without_our_code_writes_the_same_bytes() -> None:
    """Nested lists and any msgpack library make the same request."""
    layout = msgpack.packb([[0, "f32", [1, 2]]])
    request = [12, 0, 1, 0, 500, 0, layout, [np.array([1, 2], "<f4").tobytes()]]
    assert frames_of(BLOCKS["request"]) == [msgpack.packb([1, [request]])]


def test_elements_that_may_be_left_out_and_added_are_understood() -> None:
    """Timings of servers before `digest` and after it, a request without tags, a greeting of a worker without digests."""
    layout = msgpack.packb([])
    for more, digest in (([], None), (["ab" * 32], "ab" * 32), ([None, "of later"], None)):
        result = [24, 0, 1, [1, 2, 3, 1, 1, "w/0", *more], layout, []]
        (entry,) = decode([msgpack.packb([1, [result]])], role=Role.CLIENT).entries
        assert isinstance(entry, ResultEntry)
        assert digest == entry.timings.digest
    for more, tags in (
        ([], None),
        ([None], None),
        ([{}], None),
        ([{"request_id": "a", "of": "later"}], {"request_id": "a"}),
    ):
        request = [12, 0, 1, 0, None, 0, layout, [], *more]
        (asked,) = decode([msgpack.packb([1, [request]])], role=Role.SERVER_OF_CLIENTS).entries
        assert isinstance(asked, RequestEntry)
        assert tags == asked.tags
    hello = [40, 0, "w", 1, 1, {}, {}]
    (greeting,) = decode([msgpack.packb([1, [hello]])], role=Role.SERVER_OF_WORKERS).entries
    assert messages.WorkerHello(worker="w", pid=1, slots=1, models={}) == greeting


def documented_kinds() -> dict[str, tuple[int, list[str]]]:
    """Kind number and field names of each entry in the document's tables."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*?) \|", DOCUMENT, re.MULTILINE)
    return {name: (int(kind), re.findall(r"`(\w+)`:", fields)) for kind, name, fields in rows}


def test_the_tables_list_every_kind_with_its_fields_in_order() -> None:
    """Number, name and order of fields are those of messages.py, no kind is missing or invented."""
    defined: dict[str, tuple[int, list[str]]] = {
        kind.NAME: (kind.KIND, [field.name for field in dataclasses.fields(kind)])
        for kind in messages.KINDS.values()
    }
    documented = documented_kinds()
    # A batch and a report, and fields of their own: the next tests look at what is written.
    for name in ("Execute", "BatchDone"):
        assert defined.pop(name)[0] == documented.pop(name)[0]
    assert defined == documented


def test_a_batch_is_written_in_the_order_of_the_table() -> None:
    """Each field where the document has it; a deadline, in microseconds, leads its member."""
    execute = messages.Execute(
        batch=1,
        session=2,
        slot=3,
        sent_us=4,
        model="m",
        sizes=(5, 6),
        members=(Tensors(layout=(), buffers=()),) * 2,
        start_before=(None, 0.25),
    )
    header = msgpack.unpackb(bytes(encode([execute])[0]))
    members = [[at, msgpack.packb([]), []] for at in (None, 250_000)]
    written = {
        "batch": 1,
        "session": 2,
        "slot": 3,
        "sent_us": 4,
        "model": "m",
        "sizes": [5, 6],
        "members": members,
    }
    _, names = documented_kinds()["Execute"]
    assert written == dict(zip(names, header[1][0][2:], strict=True))


def test_a_report_is_written_in_the_order_of_the_table() -> None:
    """Times in microseconds; a member without outputs is nil."""
    report = BatchReport(
        batch=1,
        outputs=(None,),
        gather_s=9e-6,
        run_s=3e-6,
        busy_s=4e-6,
        reallocations=5,
        preparations=6,
        calls=((7, (8,)),),
    )
    header = msgpack.unpackb(bytes(encode([messages.BatchDone(session=2, report=report)])[0]))
    _, names = documented_kinds()["BatchDone"]
    assert [
        "batch",
        "session",
        "run_us",
        "busy_us",
        "reallocations",
        "preparations",
        "calls",
        "outputs",
        "gather_us",
    ] == names
    assert [1, 2, 3, 4, 5, 6, [[7, [8]]], [None], 9] == header[1][0][2:]


def test_kinds_are_numbered_once() -> None:
    """No two entries share a number."""
    kinds = [kind.KIND for kind in messages.KINDS.values()]
    assert len(set(kinds)) == len(kinds)


def test_the_documented_types_are_those_that_are_checked() -> None:
    """`16 bytes`, `boolean`, `name`, `words` and `or nil` stand where the classes say the same."""
    words: dict[str, Any] = {
        "16 bytes": "bytes",
        "boolean": "bool",
        "name": "str",
        "words": "str",
        "integer": "int",
        "integer or nil": "int | None",
        "map or nil": "dict[str, str] | None",
    }
    rows = re.findall(r"^\| \d+ \| `(\w+)` \| (.*?) \|", DOCUMENT, re.MULTILINE)
    kinds = {kind.NAME: kind for kind in messages.KINDS.values()}
    for name, fields in rows:
        kind = kinds[name]
        types = {field.name: field.type for field in dataclasses.fields(kind)}
        for field, described in re.findall(r"`(\w+)`: ([^,|]+?)(?=,|$)", fields):
            if described in words and name != "BatchDone":  # its report is the engine's
                assert words[described] == types[field], (name, field)


def test_the_limits_are_those_of_the_code() -> None:
    """Every number in the limits section is the constant that is enforced."""
    for constant in (
        limits.CLIENT_LIMITS.max_entries,
        limits.CLIENT_LIMITS.max_frames,
        limits.CLIENT_LIMITS.max_header_bytes,
        limits.WORKER_LIMITS.max_frames,
        limits.WORKER_LIMITS.max_header_bytes,
        limits.WORKER_LIMITS.max_members,
    ):
        assert f"| {constant} |" in DOCUMENT
    for phrase in (
        f"{limits.MAX_INLINE_BYTES} bytes of one inline tensor",
        f"{limits.MAX_TENSORS} tensors of one request",
        f"{limits.MAX_RANK} dimensions",
        f"{limits.MAX_NAME_CHARACTERS} characters of a name",
        f"{limits.MAX_MESSAGE_CHARACTERS} of a message",
        f"{limits.MAX_PLAIN_ITEMS} elements",
        f"{limits.MAX_PLAIN_DEPTH} levels",
        f"{limits.MAX_TAGS} tags",
        f"{limits.MAX_TAGS_CHARACTERS} characters in all",
        f"1 to {limits.MAX_REQUEST_ID_CHARACTERS} printable ASCII characters",
        f"1 to {limits.MAX_TRACE_CHARACTERS} of them each",
        f"more than {limits.MAX_STRINGS} strings",
        f"more than {limits.MAX_TEXT_BYTES} bytes",
    ):
        assert phrase in " ".join(DOCUMENT.split())
    assert 2**63 - 1 == limits.MAX_INTEGER


def test_the_codes_are_those_of_the_errors() -> None:
    """Each code of errors.py is documented with the same advice on retrying, and no other."""
    documented = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|", DOCUMENT, re.MULTILINE))
    defined = {
        kind.code: "yes" if kind.retryable else "no"
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.RequestError)
        and kind is not errors.RequestError
    }
    assert defined == documented


def test_the_element_types_are_those_of_the_engine() -> None:
    """Each element type, with its size, stands in the table."""
    documented: dict[str, int] = {}
    table = DOCUMENT.partition("| element type | bytes | elements |")[2].partition("\n\n")[0]
    for names, sizes in re.findall(r"^\| ([a-z0-9, ]+) \| ([0-9, ]+) \|", table, re.MULTILINE):
        documented |= dict(zip(names.split(", "), map(int, sizes.split(", ")), strict=True))
    assert {name: dtype.itemsize for name, dtype in ELEMENT_TYPES.items()} == {
        name: size for name, size in documented.items() if name in ELEMENT_TYPES
    }
    assert set(documented) - set(ELEMENT_TYPES) <= {"bf16"}
    assert all(f"\n| {name} | any |" in table for name in STRING_TYPES)
