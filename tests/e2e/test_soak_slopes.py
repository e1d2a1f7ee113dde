"""The soak's measure of growth finds a leak, and takes nothing else for one."""

from __future__ import annotations

import random

import pytest
from tests.e2e.slopes import trend

TIMES_S = [float(second) for second in range(60)]


def noise(seed: int) -> list[float]:
    """What resident memory does by itself: a level, jitter of a megabyte, and now and then a large batch."""
    chance = random.Random(seed)
    return [100 + chance.uniform(-0.5, 0.5) + (20 if chance.random() < 0.05 else 0) for _ in TIMES_S]


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_beneath_the_noise_is_found_and_noise_is_no_leak(seed: int) -> None:
    """A tenth of a megabyte per sample; outliers, whenever they come, and pools that fill at the start."""
    quiet = noise(seed)
    assert not trend(TIMES_S, quiet).grows(by_more_than=2.0)
    leaking = [value + 0.1 * time_s for value, time_s in zip(quiet, TIMES_S, strict=True)]
    assert trend(TIMES_S, leaking).grows(by_more_than=2.0)
    filling = [value + 2.0 * min(time_s, 20.0) for value, time_s in zip(quiet, TIMES_S, strict=True)]
    assert not trend(TIMES_S, filling).grows(by_more_than=2.0)


def test_one_descriptor_that_is_lost_every_ten_samples_is_found() -> None:
    """Small whole numbers have many equal pairs; the slope is seen all the same."""
    lost = [float(40 + int(time_s) // 10) for time_s in TIMES_S]
    assert trend(TIMES_S, lost).grows(by_more_than=2.0)


def test_too_few_samples_are_no_verdict() -> None:
    """Rather than a green light that means nothing."""
    with pytest.raises(ValueError, match="too few"):
        trend(TIMES_S[:12], noise(1)[:12])
