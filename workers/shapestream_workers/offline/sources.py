"""The rows of an input, in their order: files of arrays, pictures, or lines and rows of tables.

    a folder of .npy, .npz and pictures         a file is a row, in the order of their names; its key is its path below
    .jsonl, .ndjson; .parquet, .arrow, .feather a line or a row of the table is a row
    a folder of such tables                     one after the other, in the order of their names

A row that cannot be read is a failed row: a `BadRow` in its place. What concerns all rows, such as a missing column or a
table that was cut off, raises `ConfigurationError`.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream_engine.files import open_regular
from shapestream_engine.signature import ModelSignature
from shapestream_workers.offline.pictures import Decoder, PictureFormat

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
"""Suffixes of pictures."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read, and why."""

    why: str


Values = Mapping[str, Any] | BadRow


class RowSource(Protocol):
    """An input."""

    total: int
    """Its rows."""
    adds_batch: bool
    """True if no value has the batch axis, as in tables; `row_values` adds it."""
    files: Sequence[Path]

    def key(self, row: int) -> str | None:
        """Return the name of a row; None where it has only its number."""

    def rows(self, first: int) -> Iterator[Values]:
        """Yield the values of the rows from `first` on, by column."""

    def check(self, signature: ModelSignature, columns: Mapping[str, str]) -> None:
        """Raise `ConfigurationError` for columns, by port, that are not there, or hold another type."""


def identity_of(source: RowSource) -> str:
    """Return a digest of the names, sizes and times of the input's files: the rows of another one are others."""
    digest = hashlib.sha256()
    for file in source.files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def missing(path: Path, column: str, columns: Sequence[str]) -> ConfigurationError:
    """Return the error about a column that is not there."""
    return ConfigurationError(
        [
            f"{path}: column {column!r} is missing (columns: {', '.join(columns)}; --column INPUT=COLUMN names another)"
        ]
    )


class FolderSource:
    """A folder of arrays, or of pictures: a file is a row."""

    def __init__(self, folder: Path, files: list[Path], pictures: PictureFormat) -> None:
        self._folder = folder
        self.files: Sequence[Path] = files
        self.total = len(files)
        self.adds_batch = files[0].suffix.lower() in PICTURES
        self._read: Callable[[Path], dict[str, Any]] = read_arrays
        if self.adds_batch:
            self._read = Decoder(pictures).read

    def key(self, row: int) -> str | None:
        """Return the path of the row's file below the folder."""
        return str(self.files[row].relative_to(self._folder))

    def rows(self, first: int) -> Iterator[Values]:
        """Yield the arrays of each file: those of an .npz by name; a single one, of any name, as `""`."""
        for file in self.files[first:]:
            try:
                yield self._read(file)
            except (OSError, ValueError, MemoryError, EOFError, KeyError, zipfile.BadZipFile) as error:
                yield BadRow(f"{file.name} cannot be read: {error}")

    def check(self, signature: ModelSignature, columns: Mapping[str, str]) -> None:
        """Refuse a model with several inputs for files that hold one array each."""
        one_each = all(file.suffix.lower() != ".npz" for file in self.files)
        if one_each and len(columns) > 1:
            kind = "a picture" if self.adds_batch else "a .npy file"
            raise ConfigurationError(
                [f"{self._folder}: {kind} is one array, the model has {', '.join(columns)} (use .npz files)"]
            )


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz by name, or that of an .npy as `""`. Raises OSError, ValueError, BadZipFile."""
    with open_regular(path) as file:
        if path.suffix.lower() == ".npy":
            return {"": np.lib.format.read_array(file, allow_pickle=False)}
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)


class LineSource:
    """JSON lines: a line with an object is a row. Lines are counted first, and read one at a time."""

    def __init__(self, files: list[Path]) -> None:
        self.files: Sequence[Path] = files
        self.adds_batch = True
        self.total = sum(1 for _ in self._lines())

    def key(self, row: int) -> str | None:
        """Return None: a line has only its number."""
        return None

    def rows(self, first: int) -> Iterator[Values]:
        """Yield the object of each line, or the reason why it is none."""
        for row, line in enumerate(self._lines()):
            if row >= first:
                yield _object(line)

    def check(self, signature: ModelSignature, columns: Mapping[str, str]) -> None:
        """Look at the first line that is an object: others may differ, and fail alone."""
        for line in self._lines():
            if isinstance(found := _object(line), dict):
                for column in columns.values():
                    if column not in found:
                        raise missing(self.files[0], column, list(found))
                return

    def _lines(self) -> Iterator[bytes]:
        for path in self.files:
            with open_regular(path) as file:
                yield from (line for line in file if line.strip())


def _object(line: bytes) -> Values:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"the line is not JSON: {error}")
    return found if isinstance(found, dict) else BadRow("the line is no JSON object")
