"""Lending inference requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapestream_engine import CompiledModel, InputSpec, ModelSpec, OutputSpec, RequestPool, compile_model


def model() -> CompiledModel:
    """A model that returns its input."""

    def identity(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x

    return compile_model(
        ModelSpec(
            name="m",
            model=identity,
            inputs={"x": InputSpec(shape="batch", element_type="f32")},
            outputs={"y": OutputSpec(shape="batch", element_type="f32")},
        )
    )


def test_requests_are_lent_and_given_back() -> None:
    """As many as there are, none twice at a time, and the one that came back last goes out first."""
    pool = RequestPool(model(), 2)
    first, second = pool.try_lease(), pool.try_lease()
    assert first is not None
    assert second is not None
    assert first is not second
    assert pool.try_lease() is None
    assert "2 leased, 0 free" == repr(pool)
    pool.give_back(second)
    pool.give_back(first)
    assert 0 == pool.leased
    assert first is pool.try_lease()
    assert "1 leased, 1 free" == repr(pool)


def test_only_what_was_lent_is_taken_back() -> None:
    """A request that is free already, or of another pool, would end up with two borrowers."""
    pool, other = RequestPool(model(), 1), RequestPool(model(), 1)
    request, foreign = pool.try_lease(), other.try_lease()
    assert request is not None
    assert foreign is not None
    pool.give_back(request)
    for wrong in (request, foreign):
        with pytest.raises(ValueError, match="not lent by this pool"):
            pool.give_back(wrong)


def test_reallocations_are_those_of_all_requests() -> None:
    """The pool counts what its requests count."""
    pool = RequestPool(model(), 2)
    first, second = pool.try_lease(), pool.try_lease()
    assert first is not None
    assert second is not None
    first.input_tensor(0).shape = (100_000,)
    second.input_tensor(0).shape = (200_000,)
    assert 2 == pool.reallocations


def test_a_pool_is_not_empty() -> None:
    """A pool that can never lend anything is a mistake."""
    with pytest.raises(ValueError, match="at least one request"):
        RequestPool(model(), 0)
