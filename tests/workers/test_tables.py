"""Tables in and out: rows of Parquet, Arrow and JSON lines, and results as nested lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from shapestream.errors import ConfigurationError, InvalidRequest
from shapestream.row_values import inputs_of_row, outputs_of_row
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_workers.offline.results import DoneRow, NpzResults
from shapestream_workers.offline.sources import LineSource
from shapestream_workers.offline.tables import ParquetResults, TableSource


def port(kind: Any, name: str, element_type: str, shape: str, *rest: Any) -> Any:
    """A port, from text."""
    return kind(name, element_type, NamedShape.parse(shape), *rest)


SIGNATURE = ModelSignature(
    name="m",
    inputs=(
        port(InputPort, "x", "f32", "batch, length, 2"),
        port(InputPort, "ids", "i32", "batch, n"),
        port(InputPort, "text", "str", "batch"),
        port(InputPort, "rate", "f64", ""),
    ),
    outputs=(
        port(OutputPort, "y", "f32", "batch, length, 2", Rows()),
        port(OutputPort, "score", "f64", "batch", Rows()),
        port(OutputPort, "label", "str", "batch, k", Rows()),
        port(OutputPort, "flags", "boolean", "batch, ?, ?, ?", Rows()),
    ),
)
OUTPUTS = ("y", "score", "label", "flags")
COLUMNS = {name: name for name in ("x", "ids", "text", "rate")}
ROWS = [
    {"x": [[i, i + 0.5]] * (i % 4), "ids": list(range(i % 3)), "text": f"row {i}", "rate": i / 2}
    for i in range(40)
]
TYPES = pa.schema(
    [
        ("x", pa.list_(pa.list_(pa.float32(), 2))),
        ("ids", pa.large_list(pa.int64())),
        ("text", pa.dictionary(pa.int32(), pa.string())),
        ("rate", pa.float64()),
        ("other", pa.timestamp("s")),
    ]
)


def written(folder: Path, form: str) -> list[Path]:
    """The rows in one file, or in two."""
    table = pa.Table.from_pylist(ROWS, TYPES)
    paths = [folder / f"{number}.{form.partition('-')[0]}" for number in range(2)]
    for path, part in zip(paths, (table.slice(0, 13), table.slice(13)), strict=True):
        match form:
            case "parquet":
                parquet.write_table(part, path, row_group_size=5)
            case "arrow":
                with ipc.new_file(path, TYPES) as writer:
                    writer.write_table(part, max_chunksize=4)
            case "arrow-stream":
                with ipc.new_stream(path, TYPES) as writer:
                    writer.write_table(part, max_chunksize=4)
            case _:
                path.write_text("\n\n".join(map(json.dumps, part.drop_columns("other").to_pylist())) + "\n")
    return paths


def plain(values: Any) -> Any:
    """Inputs as lists, with their types."""
    arrays = inputs_of_row(SIGNATURE, values, adds_batch=True)
    return {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}


@pytest.mark.parametrize("form", ["parquet", "arrow", "arrow-stream", "jsonl"])
def test_rows_are_read_from_any_place_on(form: str, tmp_path: Path) -> None:
    """In order, over row groups and files; each with its batch axis and the types of the model, as from lists."""
    files = written(tmp_path, form)
    source = LineSource(files) if form == "jsonl" else TableSource(files)
    source.check(SIGNATURE, COLUMNS)
    assert 40 == source.total
    expected = [plain({**row, "x": np.array(row["x"], "f4").reshape(-1, 2)}) for row in ROWS]
    assert (1, 0, 2) == inputs_of_row(SIGNATURE, ROWS[0], adds_batch=True)["x"].shape
    found = list(source.rows(0))
    assert expected == [plain(values) for values in found]
    for first in (1, 5, 12, 13, 14, 39, 40):
        assert 40 - first == len([*source.rows(first)])
        for values in source.rows(first):
            assert isinstance(values, dict)
            assert ROWS[first]["text"] == values["text"]
            break


@pytest.mark.parametrize(
    ("column", "kind", "value", "words"),
    [
        ("x", pa.list_(pa.float32()), [1.0], "takes f32 in lists of depth 2"),
        ("x", pa.list_(pa.list_(pa.string())), [["1"]], "takes f32 in lists of depth 2"),
        ("ids", pa.string(), "1", "is string, and the input 'ids' takes i32"),
        ("text", pa.int64(), 1, "is int64, and the input 'text' takes str"),
        ("rate", pa.timestamp("s"), 0, "is timestamp"),
    ],
)
def test_a_column_of_another_type_is_refused_before_the_first_row(
    column: str, kind: Any, value: Any, words: str, tmp_path: Path
) -> None:
    """With the file, the type and what the model takes."""
    table = pa.Table.from_pylist(ROWS[:1], TYPES).drop_columns(column)
    path = tmp_path / "t.parquet"
    parquet.write_table(table.append_column(column, pa.array([value], kind)), path)
    with pytest.raises(ConfigurationError, match=words):
        TableSource([path]).check(SIGNATURE, COLUMNS)


GOOD = {"x": [[1, 2]], "ids": [1], "text": "t", "rate": 1}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": None}, "x: the value is nothing"),
        ({"x": [[1, 2], [3]]}, "x: the lists differ in length"),
        ({"x": [[1, None]]}, "x: there is nothing"),
        ({"ids": [1, None]}, "ids: there is nothing"),
        ({"ids": [1.5]}, "ids: expected i32, got float64"),
        ({"ids": [1 << 40]}, "ids: a number is beyond i32"),
        ({"x": [[1e300, 0]]}, "x: a number is beyond f32"),
        ({"x": [[True, False]]}, "x: expected f32, got bool"),
        ({"text": 3}, "text: expected str"),
        ({"text": b"t"}, "text: expected str, got bytes"),
        ({"rate": "fast"}, "rate: expected f64"),
    ],
)
def test_a_row_that_does_not_fit_fails_alone(changed: dict[str, Any], words: str) -> None:
    """The message names the input, and what was expected."""
    with pytest.raises(InvalidRequest, match=words):
        inputs_of_row(SIGNATURE, {**GOOD, **changed}, adds_batch=True)


sizes = st.integers(0, 3)


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Any] | None:
    """The outputs of a row with its batch axis; None for one that failed."""
    if draw(st.integers(0, 4)) == 0:
        return None
    length, k, a, b, c = (draw(sizes) for _ in range(5))
    labels = np.empty((1, k), object)
    labels[0] = [f"label {i}" for i in range(k)]
    return {
        "y": np.arange(2 * length, dtype="f4").reshape(1, length, 2),
        "score": np.array([draw(st.floats(allow_nan=False))]),
        "label": labels,
        "flags": np.arange(a * b * c).reshape(1, a, b, c) % 2 == 1,
    }


@given(rows=st.lists(outputs(), min_size=1, max_size=9), drops=st.booleans())
def test_results_of_all_sizes_come_back_as_they_were(
    rows: list[dict[str, Any] | None], drops: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As nested lists of Parquet, in two parts that are merged, and as arrays of an .npz; failed rows have their error."""
    folder = tmp_path_factory.mktemp("results")
    found = [None if row is None else outputs_of_row(SIGNATURE, row, drops_batch=drops) for row in rows]
    done = [
        DoneRow(number=n, key=None, outputs=row, error="invalid: no" if row is None else None)
        for n, row in enumerate(found)
    ]
    middle = len(done) // 2
    for form in ParquetResults(SIGNATURE, has_keys=False, drops_batch=drops), NpzResults():
        parts = [folder / f"{n}{form.suffix}" for n in range(2)]
        form.write(parts[0], done[:middle])
        form.write(parts[1], done[middle:])
        form.merge(parts, folder / f"all{form.suffix}")
    table = parquet.read_table(folder / "all.parquet").to_pylist()
    expected = [
        {
            "row": row.number,
            **{name: None if row.outputs is None else row.outputs[name].tolist() for name in OUTPUTS},
            "error": row.error,
        }
        for row in done
    ]
    assert expected == table
    with np.load(folder / "all.npz") as arrays:
        for row in done:
            if row.outputs is None:
                assert "invalid: no" == arrays[f"{row.number}/error"].item()
            else:
                assert {name: value.tolist() for name, value in row.outputs.items()} == {
                    name: arrays[f"{row.number}/{name}"].tolist() for name in row.outputs
                }
