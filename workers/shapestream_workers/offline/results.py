"""Rows with their results, and their form as .npz; that as Parquet is in tables.py."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRow:
    """A row with its results, or with the reason why it has none."""

    number: int
    key: str | None
    outputs: Mapping[str, Any] | None
    error: str | None

    @property
    def nbytes(self) -> int:
        """About the bytes of its results."""
        total = 0
        for value in (self.outputs or {}).values():
            total += sum(each.nbytes for each in value) if isinstance(value, list) else value.nbytes
        return total


class Results(Protocol):
    """A form of parts and of the results, which are the parts one after the other."""

    suffix: str

    def write(self, path: Path, rows: Sequence[DoneRow]) -> None:
        """Write rows as one file. Raises OSError."""

    def merge(self, parts: Sequence[Path], path: Path) -> None:
        """Write the rows of all parts, in their order, as one file. Raises OSError."""


class NpzResults:
    """An .npz whose arrays are called `ROW/OUTPUT`; `ROW/error` for a failed row. ROW is its key, or else its number."""

    suffix = ".npz"

    def write(self, path: Path, rows: Sequence[DoneRow]) -> None:
        """Write rows as one file. Raises OSError."""
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for row in rows:
                name = str(row.number) if row.key is None else row.key
                if row.outputs is None:
                    _put(archive, f"{name}/error", np.array(row.error))
                    continue
                for output, value in row.outputs.items():
                    if isinstance(value, list):
                        for index, array in enumerate(value):
                            _put(archive, f"{name}/{output}.{index}", array)
                    else:
                        _put(archive, f"{name}/{output}", value)

    def merge(self, parts: Sequence[Path], path: Path) -> None:
        """Copy the arrays of all parts, one at a time. Raises OSError."""
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for part in parts:
                with zipfile.ZipFile(part) as found:
                    for info in found.infolist():
                        archive.writestr(info, found.read(info))


def _put(archive: zipfile.ZipFile, name: str, value: np.ndarray[Any, Any]) -> None:
    array = np.asarray(value)
    if array.dtype == object:  # strings; .npy has those of a fixed length only
        kind = "S" if any(isinstance(each, bytes) for each in array.ravel().tolist()) else "U"
        array = array.astype(kind)
    # Always the same time: the same rows give the same bytes.
    info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
    with archive.open(info, "w", force_zip64=True) as file:
        np.lib.format.write_array(
            file, np.ascontiguousarray(array) if array.ndim else array, allow_pickle=False
        )
