"""Tables of Parquet and Arrow, in and out: the one place that imports pyarrow (the extra `[files]`).

A tensor of a row is a nested list of its column, as deep as the port has axes without the batch axis. Rows may differ in
their sizes. Lists that are equally long become an array; where they are not, the row fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream.row_values import batch_axis
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature
from shapestream_workers.offline.results import DoneRow
from shapestream_workers.offline.sources import Values, missing

try:
    import pyarrow as pa
    from pyarrow import ipc, parquet
except ModuleNotFoundError:
    raise ConfigurationError(["Parquet and Arrow need pyarrow (pip install 'shapestream[files]')"]) from None

ROWS_AT_ONCE = 1024
"""Rows that are converted together."""


class TableSource:
    """Tables in files, one after the other."""

    adds_batch = True

    def __init__(self, files: list[Path]) -> None:
        """Count the rows. Raises `ConfigurationError` for a file that is no table, or was cut off."""
        self.files: Sequence[Path] = files
        self._columns: list[str] = []
        self._lengths = [_rows_of(path) for path in files]
        self.total = sum(self._lengths)

    def key(self, row: int) -> str | None:
        """Return None: a row of a table has only its number."""
        return None

    def check(self, signature: ModelSignature, columns: Mapping[str, str]) -> None:
        """Refuse tables without these columns, or with other types than the model takes."""
        self._columns = sorted(set(columns.values()))
        for path in self.files:
            schema = _schema_of(path)
            for port in signature.inputs:
                if (column := columns.get(port.name)) is None:
                    continue
                if column not in schema.names:
                    raise missing(path, column, schema.names)
                if (why := _misfit(schema.field(column).type, port)) is not None:
                    raise ConfigurationError([f"{path}: column {column!r} is {why}"])

    def rows(self, first: int) -> Iterator[Values]:
        """Yield the values of each row by column."""
        for path, length in zip(self.files, self._lengths, strict=True):
            if first >= length:
                first -= length
                continue
            for batch in _batches(path, self._columns, first):
                found = {name: _values(batch.column(name)) for name in self._columns}
                for row in range(batch.num_rows):
                    yield {name: values[row] for name, values in found.items()}
            first = 0


def _told(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError([f"{path}: no {path.suffix} file, or cut off: {str(error).splitlines()[0]}"])


def _rows_of(path: Path) -> int:
    try:
        if path.suffix.lower() == ".parquet":
            return int(parquet.read_metadata(path).num_rows)
        return sum(batch.num_rows for batch in _arrow_batches(path))
    except (pa.ArrowException, OSError) as error:
        raise _told(path, error) from error


def _schema_of(path: Path) -> Any:
    if path.suffix.lower() == ".parquet":
        return parquet.read_schema(path)
    with pa.memory_map(str(path)) as file:
        return _arrow_reader(file).schema


def _arrow_reader(file: Any) -> Any:
    """Return the reader of an Arrow file, or of a stream, which some programs write under the same suffix."""
    try:
        return ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        return ipc.open_stream(file)


def _arrow_batches(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as file:
        reader = _arrow_reader(file)
        if isinstance(reader, ipc.RecordBatchFileReader):
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        else:
            yield from reader


def _batches(path: Path, columns: list[str], first: int) -> Iterator[Any]:
    """Yield the rows of a file from `first` on, with these columns, some at a time."""
    try:
        for batch in _whole_batches(path, columns, first):
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)
    except (pa.ArrowException, OSError) as error:
        raise _told(path, error) from error


def _whole_batches(path: Path, columns: list[str], first: int) -> Iterator[Any]:
    if path.suffix.lower() == ".parquet":
        file = parquet.ParquetFile(path)
        for group in range(file.num_row_groups):
            length = file.metadata.row_group(group).num_rows
            if first >= length:
                first -= length
                continue
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                if first < batch.num_rows:
                    yield batch.slice(first)
                first = max(0, first - batch.num_rows)
    else:
        for batch in _arrow_batches(path):
            if first < batch.num_rows:
                yield batch.select(columns).slice(first)
            first = max(0, first - batch.num_rows)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _misfit(kind: Any, port: InputPort) -> str | None:
    """Return how a column's type differs from what the port takes; None where it may fit."""
    whole, depth = kind, 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    raw = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    fits = {"str": text, "bytes": raw}.get(port.element_type, number) or pa.types.is_null(kind)
    wanted = port.shape.rank - (batch_axis(port) is not None)
    if fits and (depth == wanted or pa.types.is_null(kind)):
        return None
    return f"{whole}, and the input {port.name!r} takes {port.element_type} in lists of depth {wanted} [{port.shape}]"


def _values(column: Any) -> Any:
    """Return the values of a column by row: arrays, None for nothing, lists where they are not rectangular, or texts."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _values(column.dictionary_decode())
    if not _is_list(kind):
        if column.null_count or not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        ):
            found: list[Any] = column.to_pylist()
            return found
        array: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
        return array
    if pa.types.is_fixed_size_list(kind):
        offsets = np.arange(column.offset, column.offset + len(column) + 1) * kind.list_size
    else:
        offsets = column.offsets.to_numpy()
    # Only what is in this slice: a whole table may lie behind it.
    inner = _values(column.values.slice(offsets[0], offsets[-1] - offsets[0]))
    offsets = offsets - offsets[0]
    present = column.is_valid().to_pylist()
    return [
        _stacked(inner[start:end]) if there else None
        for start, end, there in zip(offsets[:-1], offsets[1:], present, strict=True)
    ]


def _stacked(values: Any) -> Any:
    """Return values of one list as one array, if they can be; else as they are, for an error of the row."""
    if isinstance(values, np.ndarray) or not len(values):
        return values
    first = values[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(each, np.ndarray) and each.shape == first.shape for each in values
    ):
        return np.stack(values)
    return values


# ---------------------------------------------------------------- results


class ParquetResults:
    """Parts and results as Parquet: `row`, perhaps `key`, a column per output, and `error`, null where there is none."""

    suffix = ".parquet"

    def __init__(self, signature: ModelSignature, *, has_keys: bool, drops_batch: bool) -> None:
        """Make the schema. Raises `ConfigurationError` for an output called like another column."""
        self._ports = {
            port.name: (port, port.shape.rank - (drops_batch and batch_axis(port) is not None))
            for port in signature.outputs
            if not _is_shapes(port, signature)
        }
        own = ["row", *(["key"] if has_keys else []), "error"]
        if taken := sorted(self._ports.keys() & set(own)):
            raise ConfigurationError(
                [f"the output {taken[0]!r} is called like a column of the results (write .npz)"]
            )
        fields = [("row", pa.int64()), *([("key", pa.string())] if has_keys else [])]
        fields += [(name, _type_of(port, depth)) for name, (port, depth) in self._ports.items()]
        self._schema = pa.schema([*fields, ("error", pa.string())])
        self._has_keys = has_keys

    def write(self, path: Path, rows: Sequence[DoneRow]) -> None:
        """Write rows as one file. Raises OSError."""
        columns: list[Any] = [pa.array([row.number for row in rows], pa.int64())]
        if self._has_keys:
            columns.append(pa.array([row.key for row in rows], pa.string()))
        for name, (port, depth) in self._ports.items():
            values = [None if row.outputs is None else row.outputs[name] for row in rows]
            columns.append(_column(values, port, depth))
        columns.append(pa.array([row.error for row in rows], pa.string()))
        parquet.write_table(pa.Table.from_arrays(columns, schema=self._schema), path)

    def merge(self, parts: Sequence[Path], path: Path) -> None:
        """Write the rows of all parts, in their order, as one file; one part is held at a time. Raises OSError."""
        with parquet.ParquetWriter(path, self._schema) as writer:
            for part in parts:
                writer.write_table(parquet.read_table(part))


def _is_shapes(port: OutputPort, signature: ModelSignature) -> bool:
    from shapestream_engine.ports import shapes_of

    return port.name in {shapes_of(each.name) for each in signature.outputs if each.item is not None}


def _leaf(port: OutputPort) -> Any:
    known = {"boolean": pa.bool_(), "bf16": pa.float32(), "str": pa.string(), "bytes": pa.binary()}
    if port.element_type in known:
        return known[port.element_type]
    kind = {"i": "int", "u": "uint", "f": "float"}[port.element_type[0]]
    return pa.type_for_alias(f"{kind}{port.element_type[1:]}")


def _type_of(port: OutputPort, depth: int) -> Any:
    kind = _leaf(port)
    if port.item is not None:
        depth = 1 + port.item.rank
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def _column(values: Sequence[Any], port: OutputPort, depth: int) -> Any:
    """Return the column of one output: a nested list for each row, nothing for a failed one."""
    if port.item is not None:
        plain = [None if value is None else [array.tolist() for array in value] for value in values]
        return pa.array(plain, _type_of(port, depth))
    gone = np.array([value is None for value in values], bool)
    arrays = [value for value in values if value is not None]
    flat = np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0)
    if not depth:
        whole = np.zeros(len(values), object if flat.dtype == object else flat.dtype)
        whole[~gone] = flat
        return _leaves(whole, port, gone)
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), depth)
    found = _leaves(flat, port, None)
    for level in range(depth - 1, 0, -1):
        # One list for each place of the levels above, as long as this level is in its row.
        counts = np.repeat(shapes[:, level], shapes[:, :level].prod(axis=1))
        found = pa.ListArray.from_arrays(_offsets(counts), found)
    counts = np.zeros(len(values), np.int64)
    counts[~gone] = shapes[:, 0]
    return pa.ListArray.from_arrays(_offsets(counts), found, mask=pa.array(gone))


def _offsets(counts: np.ndarray[Any, Any]) -> Any:
    return pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())


def _leaves(flat: np.ndarray[Any, Any], port: OutputPort, gone: np.ndarray[Any, Any] | None) -> Any:
    if port.element_type in ("str", "bytes"):
        elements = flat.tolist()
        if gone is not None:
            elements = [None if lost else one for one, lost in zip(elements, gone, strict=True)]
        return pa.array(elements, _leaf(port))
    wide = np.float32 if flat.dtype.kind == "V" else _leaf(port).to_pandas_dtype()
    return pa.array(flat.astype(wide), _leaf(port), mask=gone)
