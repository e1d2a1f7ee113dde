"""Calibration: which calls are measured, how, and what is left out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shapestream_engine import (
    CompiledModel,
    InputSpec,
    ModelSpec,
    OutputSpec,
    Strategy,
    compile_model,
)
from shapestream_engine.calibration import MOST_FAILURES, Calibration, calibrate
from shapestream_engine.calibration_shapes import COARSE, MOST_ALLOWED, MOST_NBYTES, call_nbytes, stages
from shapestream_engine.cost_table import CostTable
from shapestream_engine.probing.inputs import Integers

Array = np.ndarray[Any, Any]
PLENTY_S = 60.0


def model(
    function: Callable[[Array], Any] = lambda x: x,
    strategy: Strategy = Strategy(),  # noqa: B008 - frozen
    shape: str = "batch:1..16, seq:1..64",
) -> CompiledModel:
    """A function over `x`, of which every row is a request's own."""
    names = ", ".join(part.split(":")[0] for part in shape.split(", "))
    padded = {} if "seq" not in names else {"seq": 0}
    return compile_model(
        ModelSpec(
            name="m",
            model=function,
            strategy=strategy,
            inputs={"x": InputSpec(shape=shape, element_type="i64", pad=padded)},
            outputs={"y": OutputSpec(shape=names, element_type="i64")},
        )
    )


def calibrated(
    compiled: CompiledModel, *, slots: int = 1, max_batch: int | None = None, budget_s: float = PLENTY_S
) -> Calibration:
    """With values that only this test uses."""
    values = {"x": Integers(5, 9)}
    return calibrate(compiled, slots=slots, max_batch=max_batch, budget_s=budget_s, values=values, key="k")


def sizes_of(calibration: Calibration) -> list[tuple[int, ...]]:
    """What was measured, in order."""
    return [point.sizes for point in calibration.table.points]


def test_a_grid_within_bounds_is_measured():
    """Rows and sizes are spread geometrically, from the smallest call to the largest that batching makes."""
    calibration = calibrated(model(), max_batch=8)
    assert ("k", ("batch", "seq"), ()) == (
        calibration.table.key, calibration.table.dimensions, calibration.findings,
    )  # fmt: skip
    measured = set(sizes_of(calibration))
    assert {(1, 1), (1, 64), (8, 1), (8, 64), (4, 8)} <= measured
    assert all(1 <= rows <= 8 and 1 <= seq <= 64 for rows, seq in measured)
    assert not calibration.from_cache


def test_small_calls_come_first():
    """When time is up, what is missing are the largest calls of the finer points."""
    for stage in stages(model().signature, None):
        elements = [rows * seq for rows, seq in stage]
        assert elements == sorted(elements)


def test_every_call_is_one_call_of_real_inputs():
    """What the function is given has the shape that the point names, and the values that the probe says."""
    seen: Counter[tuple[int, ...]] = Counter()

    def function(x: Array) -> Array:
        assert x.min() >= 5
        assert x.max() <= 9
        seen[x.shape] += 1
        return x

    calibration = calibrated(model(function))
    assert set(sizes_of(calibration)) == set(seen)
    # The first call of a shape, and at least two more.
    assert min(seen.values()) >= 3


def test_all_slots_are_busy_with_the_same_at_the_same_time():
    """Each call waits until there are as many as slots: measured one after the other they would wait for ever."""
    together = threading.Barrier(3, timeout=30)

    def function(x: Array) -> Array:
        together.wait()
        return x

    calibration = calibrated(model(function), slots=3, max_batch=2)
    assert (2, 8) in sizes_of(calibration)
    assert not calibration.findings


def test_first_times_are_kept_apart():
    """The very first call of the process counts for nothing; later shapes have a time for their first call."""
    first, *others = calibrated(model()).table.points
    assert first.first_seconds is None
    assert all(point.first_seconds is not None and point.seconds > 0.0 for point in others)


def test_time_that_is_used_up_ends_it():
    """With next to no time there is no grid, and with none at all nothing is even tried."""
    assert len(sizes_of(calibrated(model(), budget_s=1e-6))) <= 1
    assert () == calibrated(model(), budget_s=0.0).table.points


def test_shapes_that_the_model_refuses_are_left_out_and_told():
    """One bad shape does not spoil the others."""

    def function(x: Array) -> Array:
        if x.shape[1] == 8:
            raise ValueError("eights are not for me")
        return x

    calibration = calibrated(model(function), max_batch=1)
    assert (1, 64) in sizes_of(calibration)
    assert (1, 8) not in sizes_of(calibration)
    assert any("eights are not for me" in finding for finding in calibration.findings)


def test_a_model_that_refuses_everything_is_soon_left_alone():
    """Its table is empty, so its costs are learned from traffic."""

    def function(x: Array) -> Array:
        raise ValueError("never")

    calibration = calibrated(model(function))
    assert () == calibration.table.points
    assert MOST_FAILURES == len(calibration.findings)


@pytest.mark.parametrize(
    ("strategy", "allowed"),
    [
        (Strategy({"seq": (16, 64)}), {(rows, seq) for rows in (1, 2, 4, 8, 16) for seq in (16, 64)}),
        (Strategy({"batch": (1, 5), "seq": (32,)}, partitioned=True), {(1, 32), (5, 32)}),
    ],
)
def test_only_allowed_call_shapes_are_measured(strategy, allowed):
    """A strategy's sizes are the grid."""
    assert allowed == set(sizes_of(calibrated(model(strategy=strategy))))


def test_static_shapes_are_points_of_their_own():
    """However odd their sizes, and before anything else."""
    strategy = Strategy(static_shapes=((("batch", 3), ("seq", 7)), (("batch", 2), ("seq", 9))))
    assert [(2, 9), (3, 7)] == sorted(sizes_of(calibrated(model(strategy=strategy)))[:2])


def test_a_cap_on_shapes_leaves_room_for_traffic():
    """Of 16 shapes a process may meet, a calibration takes two."""
    measured = sizes_of(calibrated(model(strategy=Strategy(max_prepared=16))))
    assert 2 == len(measured)


def test_without_a_batch_axis_sizes_alone_are_measured():
    """Every request runs alone."""
    calibration = calibrated(model(shape="length:1..100"))
    assert (1,) == sizes_of(calibration)[0]
    assert (100,) in sizes_of(calibration)


def test_a_model_of_one_shape_has_one_point():
    """Its cost is still worth knowing."""
    assert [()] == sizes_of(calibrated(model(shape="4")))


def test_an_unbounded_dimension_ends_somewhere():
    """No call is measured whose inputs take more than 64 MiB."""
    signature = model(shape="batch, seq, 1024").signature
    shapes = [sizes for stage in stages(signature, 64) for sizes in stage]
    assert max(call_nbytes(signature, sizes) for sizes in shapes) <= MOST_NBYTES
    assert max(seq for _, seq in shapes) >= 8 * COARSE


def test_a_process_that_grows_measures_nothing_larger():
    """A model that keeps memory for good is not given its largest calls before anybody asks for them."""
    kept: list[Array] = []
    called: set[int] = set()

    def function(x: Array) -> Array:
        called.add(x.shape[1])
        kept.append(np.ones(1 << 27, np.int8) if x.shape[1] >= 8 else x)
        return x

    calibration = calibrated(model(function, shape="batch:1..16, seq:1..4096"), max_batch=1)
    assert (1, 1) in sizes_of(calibration)
    assert (1, 4096) not in sizes_of(calibration)
    assert 1 == sum("they take much memory" in finding for finding in calibration.findings)
    assert max(called) <= 16


def test_a_batch_axis_from_two_is_respected():
    """Requests of one row would be refused, so one request fills the call."""
    calibration = calibrated(model(shape="batch:2..4, seq:1..8"))
    assert {2, 4} <= {rows for rows, _ in sizes_of(calibration)}
    assert not calibration.findings


def test_openvino_is_calibrated_too():
    """A real engine, on a tiny model: larger calls are in the table, with plausible times."""
    openvino = pytest.importorskip("openvino")
    ops = pytest.importorskip("openvino.opset13")
    x = ops.parameter(openvino.PartialShape([-1, -1]), np.float32, name="x")
    network = openvino.Model([ops.result(ops.relu(x))], [x], "tiny")
    x.output(0).get_tensor().set_names({"x"})
    compiled = compile_model(
        ModelSpec(name="tiny", model=network, inputs={"x": InputSpec(shape="batch:1..4, seq:1..32")}),
        slots=2,
        threads=2,
    )
    try:
        calibration = calibrate(
            compiled, slots=2, max_batch=None, budget_s=PLENTY_S, values={}, key="openvino"
        )
    finally:
        compiled.close()
    assert {(1, 1), (1, 32), (4, 32)} <= set(sizes_of(calibration))
    assert all(0.0 < point.seconds < PLENTY_S for point in calibration.table.points)


def many(dimensions: int, strategy: Strategy = Strategy(), bounds: str = "1..64") -> CompiledModel:  # noqa: B008 - frozen
    """A function over so many inputs, each of a length of its own."""
    names = [f"n{number}" for number in range(dimensions)]
    return compile_model(
        ModelSpec(
            name="m",
            model=lambda **inputs: inputs["x0"][:, :1],
            strategy=strategy,
            inputs={
                f"x{number}": InputSpec(
                    shape=f"batch:1..4, {name}:{bounds}", element_type="i64", pad={name: 0}
                )
                for number, name in enumerate(names)
            },
            outputs={"y": OutputSpec(shape="batch, 1", element_type="i64")},
        )
    )


@pytest.mark.parametrize("dimensions", [1, 3, 4, 5, 8, 12, 17, 20, 64])
def test_any_number_of_open_dimensions_is_calibrated(dimensions: int) -> None:
    """However many there are: a few points, every number of rows among them, and a table that can be read."""
    calibration = calibrated(many(dimensions), budget_s=2.0)
    points = sizes_of(calibration)
    assert 2 <= len(points) <= 64
    assert () == calibration.findings
    assert {1, 4} <= {rows for rows, *_ in points}
    assert calibration.table == CostTable.from_dict(calibration.table.to_dict())


@pytest.mark.parametrize("dimensions", [5, 8, 12])
def test_many_dimensions_grow_together(dimensions: int) -> None:
    """All of a point's sizes are equally far along: the table is a line for each number of rows."""
    for stage in stages(many(dimensions).signature, None):
        assert all(1 == len(set(sizes)) for _, *sizes in stage)
        assert len({tuple(sizes) for _, *sizes in stage}) >= 2


@pytest.mark.parametrize("dimensions", [1, 3, 4, 5, 12, 64])
def test_any_number_of_allowed_sizes_is_calibrated(dimensions: int) -> None:
    """Their combinations are thinned before they are listed."""
    strategy = Strategy({f"n{number}": tuple(range(1, 301)) for number in range(dimensions)})
    shapes = [
        sizes for stage in stages(many(dimensions, strategy, "1..300").signature, None) for sizes in stage
    ]
    assert 2 <= len(shapes) <= MOST_ALLOWED
    assert (4,) + (1,) * dimensions in shapes
