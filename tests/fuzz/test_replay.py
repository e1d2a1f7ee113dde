"""The corpus, without a fuzzer: what was interesting once, or broke something once, breaks nothing now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.entries import request_of
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, frames_of

from shapestream.wire.codec import Envelope
from shapestream_engine.layout import Tensors

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    """And no folder of it is empty."""
    assert set(TARGETS) == {path.parent.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_input_of_the_corpus_breaks_anything(path: Path) -> None:
    """Whole, without its last byte, and without its first."""
    data = path.read_bytes()
    for piece in (data, data[:-1], data[1:]):
        TARGETS[path.parent.name](piece)


def test_a_target_tells_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not the reader's own, and a tensor that has fewer bytes than its layout says."""
    target = TARGETS["client_message"]
    good = (CORPUS / "client_message" / "good").read_bytes()
    short = Tensors(layout=((0, "f32", (2, 3)),), buffers=(b"",))

    def broken(*_: Any, **__: Any) -> Envelope:
        raise KeyError("defect")

    def lying(*_: Any, **__: Any) -> Envelope:
        request = request_of(1, short)
        return Envelope(entries=[request], bad=[])

    monkeypatch.setattr(targets, "decode", broken)
    with pytest.raises(KeyError):
        target(good)
    monkeypatch.setattr(targets, "decode", lying)
    with pytest.raises(AssertionError):
        target(good)


def test_frames_are_read_from_any_bytes() -> None:
    """How many raw frames, each behind its length, then the header."""
    assert [] == frames_of(b"")
    assert [b"header"] == frames_of(b"\0header")
    assert [b"header", b"abc", b""] == frames_of(b"\2\3abc\0header")
    assert [b"", b"ab", b"", b"", b""] == frames_of(b"\xff\x09ab")
