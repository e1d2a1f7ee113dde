"""Costs that a server knows, for the processes that a reload starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shapestream.known_costs import (
    KnownCosts,
    known_table,
    private_folder,
    read_known_costs,
    write_known_costs,
)
from shapestream_engine import InputPort, ModelSignature, NamedShape, OutputPort, Rows
from shapestream_engine.cost_table import CostPoint, CostTable

SHAPE = NamedShape.parse("batch:1..8")
SIGNATURE = ModelSignature("m@3", (InputPort("x", "f32", SHAPE),), (OutputPort("y", "f32", SHAPE, Rows()),))
TABLE = CostTable(key="k", dimensions=("batch",), points=(CostPoint(sizes=(1,), seconds=0.25),))


def test_a_process_finds_the_costs_of_its_model_or_of_another_version(tmp_path: Path) -> None:
    """Where the signature is the same: names, types, shapes and rules of the ports."""
    other = replace(TABLE, key="other")
    known = [KnownCosts.of(SIGNATURE, TABLE), KnownCosts.of(replace(SIGNATURE, name="n"), other)]
    write_known_costs(tmp_path, known)
    found = read_known_costs(tmp_path)
    assert known == found
    assert [TABLE, TABLE, other, None] == [
        known_table(found, replace(SIGNATURE, name=name)) for name in ("m@3", "m@4", "n", "p")
    ]
    wide = NamedShape.parse("batch:1..9")
    assert known_table(found, replace(SIGNATURE, inputs=(InputPort("x", "f32", wide),))) is None


@pytest.mark.parametrize(
    "text", ["", "3", "[3]", '[{"model": "m"}]', json.dumps([{"model": "m", "ports": "", "key": 1}])]
)
def test_a_file_that_cannot_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    """So the process measures."""
    assert () == tuple(read_known_costs(tmp_path))
    write_known_costs(tmp_path, [KnownCosts.of(SIGNATURE, TABLE)])
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert () == tuple(read_known_costs(tmp_path))


def test_only_a_folder_of_the_server_is_read() -> None:
    """A worker that dials in elsewhere has no predecessor."""
    assert [Path("/tmp/shapestream-x"), None, None] == [
        private_folder(address)
        for address in ("ipc:///tmp/shapestream-x/workers", "ipc:///run/workers", "tcp://127.0.0.1:5")
    ]
