"""Cost tables on disk: what is kept, what makes one void, and who waits for whom."""

from __future__ import annotations

import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapestream_engine import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.calibration import (
    ENVIRONMENT,
    Calibration,
    CostCache,
    are_alike,
    calibrate,
    corners_of,
    cost_key,
)
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.machine import cpu_name
from shapestream_engine.probe import ProbeOptions, ProofCache

SPEC = ModelSpec(
    name="m",
    function="numpy:nan_to_num",
    inputs={"x": InputSpec(shape="batch:1..4, seq:1..8", element_type="f32")},
    outputs={"y": OutputSpec(shape="batch, seq", element_type="f32")},
)
TABLE = CostTable(
    key="k", dimensions=("batch", "seq"), points=(CostPoint(sizes=(1, 8), seconds=0.25, first_seconds=1.0),)
)


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    """A folder of one's own."""
    return CostCache(tmp_path / "costs")


def counting(calls: list[tuple[int, ...]]) -> CompiledModel:
    """A model that writes down what it is called with."""

    def function(x: np.ndarray) -> np.ndarray:
        calls.append(x.shape)
        return x

    return compile_model(replace(SPEC, function=None, model=function))


def key(**changes: object) -> str:
    """The key of the model, with what is different."""
    spec = replace(SPEC, **changes.pop("spec", {}))  # type: ignore[arg-type] # the test's own
    arguments = {"slots": 1, "threads": 1, "budget_s": 5.0, **changes}
    return cost_key(spec, compile_model(spec).signature, ProbeOptions(), **arguments)  # type: ignore[arg-type]


def test_a_table_is_read_back(cache):
    """What was written is what is read, and nothing else is."""
    with cache.entry("k") as entry:
        assert entry.read() is None
        entry.write(TABLE)
    with cache.entry("k") as entry:
        assert TABLE == entry.read()
    with cache.entry("other") as entry:
        assert entry.read() is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"key": "k", "dimensions": [], "points": [[[1], 1.0, null]]}', "[" * 100_000],
    ids=["empty", "cut short", "a list", "no dimensions", "nested without end"],
)
def test_what_cannot_be_read_is_measured_again(cache, content):
    """A file that was cut short, or is of somebody else's making, is replaced."""
    with cache.entry("k") as entry:
        entry.path.write_text(content)
        assert entry.read() is None
    calls: list[tuple[int, ...]] = []
    calibration = calibrate(
        counting(calls), slots=1, max_batch=None, budget_s=60.0, values={}, key="k", cache=cache
    )
    assert calls
    with cache.entry("k") as entry:
        assert calibration.table == entry.read()


def test_the_second_start_measures_nothing(cache):
    """The saved table is the first one's, and not one call is made for it."""
    first = calibrate(counting([]), slots=1, max_batch=None, budget_s=60.0, values={}, key="k", cache=cache)
    calls: list[tuple[int, ...]] = []
    second = calibrate(
        counting(calls), slots=1, max_batch=None, budget_s=60.0, values={}, key="k", cache=cache
    )
    assert (False, True) == (first.from_cache, second.from_cache)
    assert first.table == second.table
    assert [] == calls


def test_a_calibration_that_was_cut_short_is_told_and_not_kept(cache):
    """Its few points serve this process; the next start measures again, and keeps the whole."""

    def start(budget_s: float) -> Calibration:
        return calibrate(
            counting([]), slots=1, max_batch=None, budget_s=budget_s, values={}, key="k", cache=cache
        )

    first, second, third = start(1e-6), start(60.0), start(60.0)
    assert [False, False, True] == [each.from_cache for each in (first, second, third)]
    assert any("cut short" in finding for finding in first.findings)
    assert () == second.findings
    assert len(first.table.points) < len(second.table.points)


def test_with_patience_nothing_is_cut_short(cache):
    """A model that is measured once for many starts is measured to the end, on however slow a machine."""
    calls: list[tuple[int, ...]] = []

    def start(patience: float) -> Calibration:
        return calibrate(
            counting(calls),
            slots=1,
            max_batch=None,
            budget_s=1e-6,
            values={},
            key="k",
            cache=cache,
            patience=patience,
        )

    assert not start(1.0).is_complete
    whole = start(1e9)
    assert (True, ()) == (whole.is_complete, whole.findings)
    assert start(1.0).from_cache
    assert {(1, 1), (4, 8)} <= {*calls}


def test_what_a_predecessor_knows_is_tested_and_not_kept(cache):
    """Under the own key, by which traffic corrects it; an own measurement goes first."""
    known = CostTable(key="old", dimensions=TABLE.dimensions, points=(CostPoint(sizes=(1, 4), seconds=0.01),))
    calls: list[tuple[int, ...]] = []

    def start(**more: Any) -> Calibration:
        return calibrate(
            counting(calls), slots=1, max_batch=None, budget_s=60.0, values={}, key="k", cache=cache, **more
        )

    found = start(predecessor=known)
    assert ({(1, 4)}, replace(known, key="k"), "predecessor") == ({*calls}, found.table, found.source)
    own = start()
    assert (4, 8) in calls
    assert own.table == start(predecessor=known).table


def test_a_predecessor_whose_calls_grew_otherwise_is_not_believed(cache):
    """Its calls of eight columns took a million times those of one."""
    points = tuple(CostPoint(sizes=(1, n), seconds=seconds) for n, seconds in ((1, 5e-8), (8, 0.05)))
    known = CostTable(key="old", dimensions=TABLE.dimensions, points=points)
    found = calibrate(
        counting([]),
        slots=1,
        max_batch=None,
        budget_s=60.0,
        values={},
        key="k",
        cache=cache,
        predecessor=known,
    )
    assert ("measured", True) == (found.source, len(found.table.points) > 2)
    with cache.entry("k") as entry:
        assert found.table == entry.read()


def test_calls_are_alike_by_one_factor_for_all():
    """The corners of the short calls are tested."""

    def points(*seconds: float) -> tuple[CostPoint, ...]:
        sizes = ((1, 1), (4, 1), (1, 8), (4, 8), (4, 64))
        return tuple(CostPoint(sizes=one, seconds=each) for one, each in zip(sizes, seconds, strict=False))

    before = points(1e-3, 2e-3, 3e-3, 8e-3, 0.5)
    table = CostTable(key="k", dimensions=TABLE.dimensions, points=before)
    assert [(1, 1), (4, 1), (1, 8), (4, 8)] == corners_of(table)
    assert [] == corners_of(replace(table, points=before[4:]))
    assert are_alike(before, points(3e-3, 7e-3, 12e-3, 16e-3))
    assert not are_alike(before, points(3e-3, 7e-3, 13e-3, 16e-3))
    assert not are_alike(before, ())


def test_a_saved_table_of_other_dimensions_is_not_used(cache):
    """A key that somebody reused does not lend a model another one's costs."""
    with cache.entry("k") as entry:
        entry.write(replace(TABLE, dimensions=("batch", "width")))
    calibration = calibrate(
        counting([]), slots=1, max_batch=None, budget_s=60.0, values={}, key="k", cache=cache
    )
    assert not calibration.from_cache


def test_what_ended_its_process_twice_is_measured_no_more(cache):
    """A model that crashes on inputs that nobody sends must not end every worker at its start."""
    for _ in range(2):
        with cache.entry("k") as entry:
            assert entry.begin()  # and never comes to `end`
    calls: list[tuple[int, ...]] = []
    calibration = calibrate(
        counting(calls), slots=1, max_batch=None, budget_s=60.0, values={}, key="k", cache=cache
    )
    assert ([], ()) == (calls, calibration.table.points)
    assert ("the process ended each time that it was measured",) == calibration.findings


def test_what_has_ended_well_counts_for_nothing(cache):
    """Neither do tries of yesterday."""
    with cache.entry("k") as entry:
        for _ in range(5):
            assert entry.begin()
            entry.end()
        entry.path.with_suffix(".tries").write_text("1000 2000 3000")
        assert entry.begin()


@pytest.mark.parametrize(("kind", "name"), [(CostCache, "costs"), (ProofCache, "probe")])
def test_the_environment_says_where(monkeypatch, tmp_path, kind, name):
    """A folder, off, or the user's own cache."""
    monkeypatch.setenv(kind.VARIABLE, str(tmp_path))
    assert tmp_path == kind.of_environment().folder
    monkeypatch.setenv(kind.VARIABLE, "off")
    assert kind.of_environment().folder is None
    monkeypatch.delenv(kind.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "shapestream" / name == kind.of_environment().folder


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    """Containers may run as a number that no user has."""

    def nobody(uid):
        raise KeyError(uid)

    for variable in (ENVIRONMENT, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert CostCache.of_environment().folder is None


def test_a_folder_that_cannot_be_made_only_costs_time(tmp_path):
    """A read-only disk is no reason not to serve."""
    (tmp_path / "file").write_text("")
    with CostCache(tmp_path / "file" / "costs").entry("k") as entry:
        entry.write(TABLE)
        assert entry.read() is None


def test_without_a_cache_nothing_is_kept():
    """`off` means that every start measures."""
    with CostCache(None).entry("k") as entry:
        entry.write(TABLE)
        assert entry.read() is None


def test_a_key_names_what_seconds_depend_on():
    """Another model, device, setting, number of slots or threads, or time to measure makes another key; a name does not."""
    usual = key()
    assert usual == key() == key(spec={"name": "another"})
    others = [
        key(slots=2),
        key(threads=2),
        key(budget_s=1.0),
        key(spec={"device": "GPU"}),
        key(spec={"function": "numpy:sinc"}),
        key(spec={"inputs": {"x": InputSpec(shape="batch:1..4, seq:1..9", element_type="f32")}}),
    ]
    assert len({usual, *others}) == 1 + len(others)


def test_the_processor_has_a_name():
    """Tables of one kind of machine are not taken for another's."""
    assert cpu_name()
