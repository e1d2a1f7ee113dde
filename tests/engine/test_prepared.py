"""Prepared models: made once, lent, dropped when others need the room, never while they run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from shapestream_engine import CompiledModel, InferRequest, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.compiled_model import PreparedLimits, PreparedModels, PreparedSizes
from shapestream_engine.errors import ModelLoadError

TIMEOUT_S = 30


class Prepared(CompiledModel):
    """A model of which it is known whether it was closed."""

    def __init__(self, inner: CompiledModel, nbytes: int) -> None:
        super().__init__(inner.signature, {})
        self.inner = inner
        self.size = nbytes
        self.closed = False

    @property
    def nbytes(self) -> int:
        """As scripted."""
        return self.size

    def create_infer_request(self) -> InferRequest:
        """A request of the function."""
        return self.inner.create_infer_request()

    def close(self) -> None:
        """Noted."""
        assert not self.closed
        self.closed = True


class Maker:
    """Makes models, and remembers them by their sizes."""

    def __init__(self) -> None:
        self.made: list[PreparedSizes] = []
        self.models: dict[PreparedSizes, Prepared] = {}
        self.inner = compile_model(
            ModelSpec(
                name="m",
                model=same,
                inputs={"x": InputSpec(shape="batch", element_type="f32")},
                outputs={"y": OutputSpec(shape="batch", element_type="f32")},
            )
        )

    def __call__(self, sizes: PreparedSizes) -> Prepared:
        """A model for these sizes."""
        self.made.append(sizes)
        self.models[sizes] = Prepared(self.inner, 10 * (sizes[0] or 0))
        return self.models[sizes]

    def open(self) -> set[int | None]:
        """The sizes of the models that are not closed."""
        return {sizes[0] for sizes, model in self.models.items() if not model.closed}


def same(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A model."""
    return x


def use(models: PreparedModels, *sizes: int) -> list[bool]:
    """Leases and gives back; whether each had to be prepared."""
    new = []
    for size in sizes:
        request, prepared = models.lease((size,))
        models.give_back((size,), request)
        new.append(prepared)
    return new


def test_a_shape_is_prepared_once() -> None:
    """Later leases hit it, and get the request that was given back."""
    maker = Maker()
    models = PreparedModels(maker, PreparedLimits())
    first, _ = models.lease((1,))
    models.give_back((1,), first)
    again, new = models.lease((1,))
    assert again is first
    assert not new
    assert (1, 1) == (models.preparations, models.hits)
    assert "1 prepared, 1 leased" == repr(models)


def test_the_one_not_used_for_longest_makes_room() -> None:
    """Bounded by count."""
    maker = Maker()
    models = PreparedModels(maker, PreparedLimits(max_prepared=2))
    assert [True, True, False, True, True] == use(models, 1, 2, 1, 3, 2)
    assert {2, 3} == maker.open()


def test_one_that_runs_is_not_dropped() -> None:
    """It goes when it is given back, if there is still no room for it."""
    maker = Maker()
    models = PreparedModels(maker, PreparedLimits(max_prepared=1))
    running, _ = models.lease((1,))
    other, _ = models.lease((2,))
    assert {1, 2} == maker.open()
    models.give_back((1,), running)
    assert {2} == maker.open()
    models.give_back((2,), other)
    assert {2} == maker.open()


def test_each_lease_has_a_request_of_its_own() -> None:
    """Two slots may run the same shape at a time."""
    models = PreparedModels(Maker(), PreparedLimits())
    assert models.lease((1,))[0] is not models.lease((1,))[0]


def test_a_failed_preparation_leaves_nothing_behind() -> None:
    """It is raised to whom it was for, and tried again for the next one."""
    maker = Maker()
    fails = [True]

    def prepare(sizes: PreparedSizes) -> CompiledModel:
        if fails.pop():
            raise ModelLoadError("no such shape")
        return maker(sizes)

    models = PreparedModels(prepare, PreparedLimits())
    with pytest.raises(ModelLoadError, match="no such shape"):
        models.lease((1,))
    fails.append(False)
    assert [True] == use(models, 1)
    assert 1 == models.preparations


def test_two_threads_prepare_a_shape_once() -> None:
    """The second waits for the first."""
    maker = Maker()
    entered, go_on = threading.Event(), threading.Event()

    def prepare(sizes: PreparedSizes) -> CompiledModel:
        entered.set()
        assert go_on.wait(TIMEOUT_S)
        return maker(sizes)

    models = PreparedModels(prepare, PreparedLimits())
    new: list[bool] = []
    threads = [threading.Thread(target=lambda: new.extend(use(models, 1))) for _ in range(2)]
    threads[0].start()
    assert entered.wait(TIMEOUT_S)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [False, True] == sorted(new)
    assert [(1,)] == maker.made


def test_warm_up_prepares_no_more_than_are_kept() -> None:
    """Nothing would be won by preparing what is dropped at once."""
    maker = Maker()
    models = PreparedModels(maker, PreparedLimits(max_prepared=2))
    models.warm_up([(1,), (2,), (3,)])
    assert [(1,), (2,)] == maker.made
    models.close()
    assert set() == maker.open()
