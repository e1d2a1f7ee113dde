"""Results with lists of arrays, as a server may send them: whole, damaged, or in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import entries

from shapestream.client.opened_models import Result
from shapestream.errors import InternalError
from shapestream_engine.element_types import element_type_of
from shapestream_engine.layout import Tensors

NAMES = {0: "y", 1: "y.shapes", 2: "z"}


def result_of(*arrays: np.ndarray[Any, Any]) -> Result:
    """A result whose first output is a list, and the second has the shapes of its arrays."""
    tensors = Tensors(
        layout=tuple((number, element_type_of(each.dtype), each.shape) for number, each in enumerate(arrays)),
        buffers=[each.tobytes() for each in arrays],
    )
    answer = entries.result_of(1, tensors)
    return Result(None, answer, NAMES, lists={"y": "y.shapes"})


def test_a_list_takes_the_place_of_its_two_tensors() -> None:
    """Keys, length and items agree; the tensors stay within reach."""
    result = result_of(np.arange(5, dtype=np.int8), np.array([[1, 2], [3, 1], [0, 7]]), np.ones(2))
    assert (["y", "z"], 2) == (list(result), len(result))
    assert [[[0, 1]], [[2], [3], [4]], []] == [each.tolist() for each in result["y"]]
    assert ((5,), (3, 2)) == (result.tensor("y").shape, result.tensor("y.shapes").shape)
    with pytest.raises(KeyError):
        result["y.shapes"]


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ([np.zeros(5), np.array([[2, 2]])], "the server's list 'y' cannot be read: a list of 1 arrays of 32 bytes"),
        ([np.zeros(4), np.array([[-2, -2]])], "the server's list 'y' cannot be read: array 0"),
        ([np.zeros(4), np.array([2, 2])], "the server's list 'y' cannot be read: a list has elements"),
        ([np.zeros(4)], "the server sent the list 'y' without 'y.shapes', the shapes of its arrays"),
    ],
)  # fmt: skip
def test_a_damaged_list_is_an_error_of_the_server(arrays: list[np.ndarray[Any, Any]], complaint: str) -> None:
    """Each look at the result raises it; the tensors can still be read."""
    result = result_of(*arrays)
    for look in (lambda: result["y"], lambda: list(result), lambda: len(result)):
        with pytest.raises(InternalError, match=complaint):
            look()
    assert arrays[0].tolist() == result.tensor("y").tolist()
