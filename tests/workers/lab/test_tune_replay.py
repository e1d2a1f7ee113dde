"""What a replay sends, and what it makes of the answers."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.settings import ModelSettings
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab import tune_inputs as inputs
from shapestream_workers.lab.tune_inputs import InputMaker
from shapestream_workers.lab.tune_replay import Round, quantile

SIGNATURE = ModelSignature.from_dict(
    {
        "name": "m",
        "inputs": [
            {"name": "ids", "element_type": "i64", "shape": "batch:1..8, seq:1..64", "pad": {"seq": 0}},
            {
                "name": "mask",
                "element_type": "i64",
                "shape": "batch, seq",
                "pad": {"seq": 0},
                "mask_of": "ids",
            },
        ],
        "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, 4", "rule": {"rule": "rows"}}],
    }
)
SETTINGS = ModelSettings.model_validate(
    {"name": "m", "function": "numpy:sort", "probe": {"ids": {"integers": [5, 9]}}},
    context={"base": None, "files_must_exist": False},
)


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=60), share=st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_that_is_large_enough(values: list[float], share: float) -> None:
    """As NumPy's inverted cumulative distribution."""
    assert np.quantile(values, share, method="inverted_cdf") == quantile(values, share)


def test_requests_without_a_result_count_as_endless() -> None:
    """One in a hundred may be late before the p99 is never; a round without requests has none."""
    answered = Round(requests=100, seconds=2.0, latencies_s=(0.1,) * 99, late=1)
    assert 0.1 == answered.p99_s
    assert 49.5 == answered.goodput_per_s
    assert inf == Round(requests=100, seconds=2.0, latencies_s=(0.1,) * 98, late=2).p99_s
    assert inf == Round(requests=0, seconds=0.0, latencies_s=()).p99_s


def test_inputs_are_what_the_probe_describes_and_masks_are_left_to_the_server() -> None:
    """The same for the same sizes, so that making them costs nothing while something is measured."""
    maker = InputMaker(SETTINGS, SIGNATURE)
    arrays = maker.arrays((2, 30))
    assert {"ids"} == set(arrays)
    assert (2, 30) == arrays["ids"].shape
    assert {5, 6, 7, 8, 9} == set(arrays["ids"].ravel().tolist())
    assert maker.tensors((2, 30)) is maker.tensors((2, 30))


def test_inputs_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one used longest ago goes; the newest stays, however large."""
    monkeypatch.setattr(inputs, "MAX_KEPT_BYTES", 3 * 8 * 10)
    maker = InputMaker(SETTINGS, SIGNATURE)
    first = maker.tensors((1, 10))
    second = maker.tensors((1, 12))
    assert first is maker.tensors((1, 10))
    maker.tensors((1, 9))
    assert second is not maker.tensors((1, 12))
    huge = maker.tensors((8, 64))
    assert huge is maker.tensors((8, 64))
