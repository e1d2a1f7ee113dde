"""Files that another party names: what is opened, how much of it is read, and how much it may unpack to."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shapestream_engine import SignatureError
from shapestream_engine.files import open_regular, read_plain, read_regular
from shapestream_engine.probing import inputs


def test_a_file_behind_links_is_read(tmp_path: Path) -> None:
    """Caches of models are made of links."""
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert b"bytes" == file.read()
    assert b"bytes" == read_regular(tmp_path / "link", 5)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing"])
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    """It names the path."""
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match="x") as caught:
        open_regular(path)
    assert str(path) == str(caught.value.filename)


def test_a_longer_file_is_not_read(tmp_path: Path) -> None:
    """Nor is an entry of a cache that no shapestream has written."""
    (tmp_path / "x").write_bytes(b"123456")
    with pytest.raises(OSError, match="longer than 5 bytes"):
        read_regular(tmp_path / "x", 5)
    (tmp_path / "entry.json").write_text("1")
    assert 1 == read_plain(tmp_path / "entry.json")
    (tmp_path / "entry.json").write_bytes(b"1" + b" " * (16 << 20))
    assert read_plain(tmp_path / "entry.json") is None


def test_samples_that_unpack_to_more_than_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is unpacked; a megabyte of zeros is a kilobyte of archive."""
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((4, 1 << 16), np.float32))
    assert ["x"] == list(inputs.read_samples(tmp_path / "x.npz", {"x": 0}))
    monkeypatch.setattr(inputs, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(SignatureError, match="unpacked, and this machine's memory has 1048576"):
        inputs.read_samples(tmp_path / "x.npz", {"x": 0})
