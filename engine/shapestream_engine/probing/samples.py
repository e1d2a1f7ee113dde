"""Real inputs from an .npz: arrays called like the inputs, `ids`, or several per input, `ids.0`, `ids.1`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from shapestream_engine.errors import SignatureError
from shapestream_engine.probing.values import Array, Samples

__all__ = ["read_samples"]


def read_samples(
    path: Path, batch_axes: Mapping[str, int | None], *, only: str | None = None
) -> dict[str, Samples]:
    """The samples per input, of all inputs or of one; each array is a request, of which every row is a sample.

    `batch_axes` has the batch axis of each input. Raises `SignatureError` for files and names that are no use.
    """
    rows: dict[str, list[Array]] = {}
    for name, array in _arrays(path):
        port = _port_of(name, batch_axes)
        if port is None:
            first = next(iter(batch_axes), "x")
            known = ", ".join(batch_axes)
            raise SignatureError(
                f"{path}: {name!r} is no input (name arrays {known}; several {first}.0, {first}.1)",
                key=("probe",),
            )
        if only not in (None, port):
            continue
        axis = batch_axes[port]
        if array.size == 0 or (axis is not None and axis >= array.ndim):
            raise SignatureError(
                f"{path}: {name!r} has the shape {list(array.shape)}, which has no rows", key=("probe",)
            )
        own = [array] if axis is None else np.split(array, array.shape[axis], axis)
        rows.setdefault(port, []).extend(own)
    if only is not None and only not in rows:
        raise SignatureError(f"{path}: there is no array {only!r}, nor {only}.0 and so on", key=("probe",))
    return {port: Samples(tuple(own), batch_axes[port]) for port, own in rows.items()}


def _arrays(path: Path) -> list[tuple[str, Array]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [(name, archive[name]) for name in sorted(archive.files, key=_in_order)]
    except (OSError, ValueError, EOFError, BadZipFile, AttributeError) as error:
        raise SignatureError(f"cannot read samples from {path}: {error}", key=("probe",)) from error


def _in_order(name: str) -> tuple[str, int]:
    port, _, number = name.rpartition(".")
    return (port, int(number)) if number.isdigit() else (name, 0)


def _port_of(name: str, known: Mapping[str, int | None]) -> str | None:
    if name in known:
        return name
    port, _, number = name.rpartition(".")
    return port if number.isdigit() and port in known else None
