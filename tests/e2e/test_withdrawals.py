"""A real server with an OpenVINO model: what one client withdraws, or what fails, changes no answer of another's."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from onnx import TensorProto, helper

import shapestream

pytestmark = pytest.mark.e2e

ANSWERS = 600
MODEL = """\
    models: [{name: powers, path: powers.onnx, trust: true, calibration_s: 0}]
    workers: [{slots: 1, threads: 1}]
"""


def write_powers(folder: Path, second_axis: str = "n") -> None:
    """Thirty squares of a matrix, one after the other: a permutation's are exact, and one of 128 takes milliseconds."""
    names = ["x", *(f"r{number}" for number in range(29)), "y"]
    nodes = [helper.make_node("MatMul", [before, before], [after]) for before, after in pairwise(names)]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", second_axis]) for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "powers", ports[:1], ports[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        folder / "powers.onnx",
    )


def turned(size: int) -> np.ndarray[Any, Any]:
    """The unit matrix, its rows moved by one."""
    return np.roll(np.eye(size, dtype=np.float32), 1, axis=0)


def squared_30_times(size: int) -> np.ndarray[Any, Any]:
    """The unit matrix, its rows moved by 2 to the 30th."""
    return np.roll(np.eye(size, dtype=np.float32), 2**30 % size, axis=0)


async def ask(client: shapestream.Client) -> Counter[str]:
    """How the requests end of which none is withdrawn: fifty of each shape in turn."""
    ends: Counter[str] = Counter()
    for number in range(ANSWERS):
        size = (3, 5, 7)[number // 50 % 3]
        try:
            answer = (await client.infer("powers", {"x": turned(size)}))["y"]
        except shapestream.RequestError as error:
            ends[error.code] += 1
        else:
            ends["right" if np.array_equal(squared_30_times(size), answer) else "wrong"] += 1
    return ends


async def give_up(client: shapestream.Client, by_deadline: bool, ends: Counter[str]) -> None:
    """Ask for large calls, and give each up after another time, until cancelled."""
    number = 0
    while True:
        number += 1
        patience_s = number % 23 * 0.001
        with trio.move_on_after(patience_s if not by_deadline else 60.0) as scope:
            try:
                await client.infer(
                    "powers", {"x": turned(128)}, deadline=patience_s + 0.001 if by_deadline else None
                )
                ends["answered"] += 1
            except shapestream.RequestError as error:
                ends[error.code] += 1
        ends["withdrawn"] += scope.cancelled_caught


@pytest.mark.parametrize(
    "by_deadline", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["withdrawn", "expired"]
)
def test_requests_that_are_given_up_change_no_answer_of_anothers(workplace: Any, by_deadline: bool) -> None:
    """By their client, or by their deadlines, at any point of their run."""
    write_powers(workplace.folder)
    served = workplace.serve(MODEL)
    given_up: Counter[str] = Counter()
    found: list[Counter[str]] = []

    async def both() -> None:
        async with (
            shapestream.connect(served.address) as impatient,
            shapestream.connect(served.address) as patient,
            trio.open_nursery() as nursery,
        ):
            for _ in range(2):
                nursery.start_soon(give_up, impatient, by_deadline, given_up)
            found.append(await ask(patient))
            nursery.cancel_scope.cancel()

    trio.run(both)
    assert [Counter(right=ANSWERS)] == found
    assert given_up["deadline_exceeded" if by_deadline else "withdrawn"] > 0


def test_requests_that_fail_change_no_answer_of_anothers(workplace: Any) -> None:
    """A matrix that is not square fails in the model; the matrices around it have one size."""
    write_powers(workplace.folder, second_axis="m")
    served = workplace.serve(MODEL)
    with served.client() as failing, served.client() as asking:
        for columns in range(4, 24):
            assert np.array_equal(squared_30_times(3), asking.infer("powers", {"x": turned(3)})["y"])
            with pytest.raises(shapestream.ModelError):
                failing.infer("powers", {"x": np.ones((3, columns), np.float32)})
            assert np.array_equal(squared_30_times(3), asking.infer("powers", {"x": turned(3)})["y"])
