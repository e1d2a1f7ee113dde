"""Trace files: what is written is read again, and what is no trace is refused with its line."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream.errors import ConfigurationError
from shapestream.telemetry.trace import (
    TraceChain,
    TracePart,
    TraceReader,
    TraceRecorder,
    TraceRequest,
    TraceStage,
    chain_line,
    chain_request_line,
    header_line,
    request_line,
)

HEADER = '{"shapestream_trace": 1, "models": {"m": ["batch", "seq"]}}\n'


CHAIN = (
    '{"chain": "reading", "stages": {"find": {"needs": [], "at_most": null}, '
    '"read": {"needs": ["find"], "at_most": 200}}}\n'
)


def write(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.write_text("".join(lines))
    return path


requests = st.builds(
    TraceRequest,
    at_s=st.integers(0, 10**9).map(lambda us: us / 1e6),
    model=st.just(0),
    client=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    deadline_s=st.none() | st.integers(0, 10**9).map(lambda us: us / 1e6),
    priority=st.integers(-(2**31), 2**31),
    part=st.none() | st.builds(TracePart, parent=st.just(3), stage=st.integers(0, 1)),
)
STAGES = {"find": TraceStage(()), "read": TraceStage(("find",), 200)}
ROOT = TraceChain(0.0, 0, 7, number=3)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    """Line by line, to the microsecond; reading twice gives the same."""

    @settings(max_examples=50, deadline=None)
    @given(st.lists(requests, max_size=20))
    def check(written: list[TraceRequest]) -> None:
        written.sort(key=lambda request: request.at_s)
        text = header_line({"m": ("batch", "seq")}) + chain_line("reading", STAGES) + chain_request_line(ROOT)
        text += "".join(map(request_line, written))
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        reader = TraceReader(path)
        assert written == list(reader)
        assert written == list(reader)
        assert [("reading", STAGES)] == reader.chains
        by_clients = [request for request in written if request.part is None]
        root, *others = reader.sent()
        assert by_clients == others
        rows = [
            [(0, each.sizes) for each in written if each.part is not None and each.part.stage == stage]
            for stage in range(2)
        ]
        assert ROOT._replace(rows=rows) == root

    check()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty"),
        (["hello\n"], ":1: not JSON"),
        (['{"models": {}}\n'], ":1: a trace begins with"),
        (['{"shapestream_trace": 2, "models": {}}\n'], ":1: version 2; this program reads 1"),
        (['{"shapestream_trace": 1, "models": {"m": "seq"}}\n'], ":1: model 'm'"),
        ([HEADER, "[0.5,0,0,[1,2],null]\n"], ":2: expected [t_s, model"),
        ([HEADER, "[-1,0,0,[1,2],null,0]\n"], ":2: t_s"),
        ([HEADER, "[NaN,0,0,[1,2],null,0]\n"], ":2: t_s"),
        ([HEADER, f"[{'9' * 400},0,0,[1,2],null,0]\n"], ":2: t_s"),
        ([HEADER, f"[0,0,0,[1,2],{'9' * 400},0]\n"], ":2: deadline_s"),
        ([HEADER, "[true,0,0,[1,2],null,0]\n"], ":2: t_s"),
        ([HEADER, "[0,1,0,[1,2],null,0]\n"], ":2: model: expected a number below 1, got 1"),
        ([HEADER, "[0,0,0.5,[1,2],null,0]\n"], ":2: client"),
        ([HEADER, "[0,0,0,[1],null,0]\n"], ":2: sizes: this model has 2 dimensions, not 1"),
        ([HEADER, "[0,0,0,[1,-2],null,0]\n"], ":2: sizes"),
        ([HEADER, "[0,0,0,[1,2],-1,0]\n"], ":2: deadline_s"),
        ([HEADER, "[2,0,0,[1,2],null,0]\n", "[1,0,0,[1,2],null,0]\n"], ":3: time goes back"),
        ([HEADER, '{"models": {"m": ["seq"]}}\n'], ":2: model 'm' had other dimensions"),
        ([HEADER, CHAIN.replace("find", "seek", 1)], ":2: stage 'read': needs a stage"),
        ([HEADER, CHAIN.replace("200", "0")], ":2: stage 'read': expected"),
        ([HEADER, CHAIN.replace('"reading"', "7")], ":2: expected"),
        ([HEADER, "[0,0,0,null,null,0,1]\n"], ":2: chain: expected a number below 0, got 0"),
        ([HEADER, CHAIN, "[0,0,0,[1],null,0,1]\n"], ":3: expected"),
        ([HEADER, CHAIN, "[0,0,0,null,null,0,1]\n", "[0,0,0,[1,2],null,0,1,2]\n"], ":4: parent, stage"),
        ([HEADER, CHAIN, "[0,0,0,[1,2],null,0,1,0]\n"], ":3: parent, stage"),
        ([HEADER, "[" * 100_000 + "\n"], ":2: not JSON"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, lines: list[str], words: str) -> None:
    """Strictly: nothing is guessed, nothing is skipped."""
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(ConfigurationError) as error:
        list(TraceReader(path))
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_and_binary_rubbish_are_named(tmp_path: Path) -> None:
    """Neither is a traceback."""
    with pytest.raises(ConfigurationError, match="no such file"):
        TraceReader(tmp_path / "gone.jsonl")
    (tmp_path / "t.gz").write_bytes(b"\x80\x81")
    with pytest.raises(ConfigurationError, match="gz"):
        TraceReader(tmp_path / "t.gz")
    (tmp_path / "t").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigurationError, match="utf-8"):
        TraceReader(tmp_path / "t")


def test_a_trace_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    """A crash or a full disk ends a file in the middle of a line, or of a compressed block."""
    whole = [HEADER, "[0,0,0,[1,2],null,0]\n"]
    assert 1 == len(list(TraceReader(write(tmp_path / "t", *whole, "[1,0,0,[1"))))
    data = gzip.compress("".join(whole).encode() * 1)
    (tmp_path / "t.gz").write_bytes(data[:-4])
    assert 1 >= len(list(TraceReader(tmp_path / "t.gz")))


def record(recorder: TraceRecorder, now: float, model: str = "m", **fields: Any) -> None:
    """One request of two dimensions."""
    given: dict[str, Any] = {"client": 7, "sizes": (1, 9), "deadline": None, "priority": 0, **fields}
    recorder.record(now, model=model, dimensions=("batch", "seq"), **given)


def test_a_recording_is_read_again(tmp_path: Path) -> None:
    """Times from the first request, clients numbered anew, models as they come."""
    recorder = TraceRecorder(tmp_path / "t.jsonl.gz")
    record(recorder, 100.0)
    record(recorder, 100.5, client=9, deadline=101.0, priority=2)
    record(recorder, 101.0, model="late", sizes=(3, 4))
    recorder.close()
    recorder.close()
    reader = TraceReader(tmp_path / "t.jsonl.gz")
    assert [
        TraceRequest(0.0, 0, 0, (1, 9), None, 0),
        TraceRequest(0.5, 0, 1, (1, 9), 0.5, 2),
        TraceRequest(1.0, 1, 0, (3, 4), None, 0),
    ] == list(reader)
    assert {"m": ("batch", "seq"), "late": ("batch", "seq")} == reader.models


def test_what_was_recorded_is_there_a_second_later(tmp_path: Path) -> None:
    """Whoever reads the file of a running server sees all but the last second."""
    recorder = TraceRecorder(tmp_path / "t.jsonl")
    for now in (0.0, 0.5, 1.5):
        record(recorder, now)
    assert 3 == len(list(TraceReader(tmp_path / "t.jsonl")))
    recorder.close()


def test_an_earlier_trace_is_never_overwritten(tmp_path: Path) -> None:
    """A recorder of the same file is not made."""
    recorder = TraceRecorder(tmp_path / "t.jsonl")
    record(recorder, 0.0)
    recorder.close()
    with pytest.raises(FileExistsError):
        TraceRecorder(tmp_path / "t.jsonl")
    assert 1 == len(list(TraceReader(tmp_path / "t.jsonl")))


def test_a_recording_ends_at_its_limit(tmp_path: Path) -> None:
    """The disk's share is bounded; what comes after is not written and costs nothing."""
    recorder = TraceRecorder(tmp_path / "t.jsonl", max_requests=2)
    for now in range(5):
        record(recorder, float(now))
    recorder.close()
    assert 2 == len(list(TraceReader(tmp_path / "t.jsonl")))


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/dev/full` is one."""
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - the recorder closes it
    monkeypatch.setattr("shapestream.telemetry.trace.open_text", lambda path, mode: full)
    recorder = TraceRecorder(tmp_path / "t")
    for now in range(5):
        record(recorder, float(now))
    assert 5 > recorder.recorded
    recorder.close()
