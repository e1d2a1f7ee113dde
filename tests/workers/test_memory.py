"""The memory watermark: what is measured, how it is judged, and what follows."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import trio
import trio.testing

from shapestream.settings.values import spell_bytes
from shapestream_engine.machine import resident_bytes
from shapestream_workers.upkeep import watch_memory

MIB = 1 << 20


def test_resident_memory_is_measured() -> None:
    """64 MiB that are written to count, within a few MiB."""
    before = resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        grown = resident_bytes() - before
    assert 60 * MIB < grown < 80 * MIB


def test_the_second_number_of_statm_is_read(tmp_path: Path) -> None:
    """proc(5): size, resident, shared, ... in pages."""
    statm = tmp_path / "statm"
    statm.write_text("1000 300 20 1 0 500 0\n")
    assert 300 * mmap.PAGESIZE == resident_bytes(statm)


def watch(measurements: list[int]) -> list[str]:
    """What a watch of these measurements does; a process that is measured any further is far above its limit."""
    told: list[str] = []
    left = iter(measurements)

    async def main() -> None:
        def measure() -> int:
            measured = next(left, None)
            if measured is None:
                scope.cancel()
            return 10**9 if measured is None else measured

        with trio.CancelScope() as scope:
            await watch_memory(
                100,
                lambda measured: told.append(f"passed at {measured}"),
                measure=measure,
                give_back=lambda: told.append("given back"),
            )

    # Memory is given back in a thread, which a clock that jumps would jump past; this one is only fast.
    trio.run(main, clock=trio.testing.MockClock(rate=50.0))
    return told


def test_freed_memory_is_given_back_before_anything_else() -> None:
    """What the C library had kept is no reason to replace a process."""
    assert ["given back"] == watch([50, 150, 90, 50])


def test_a_process_that_stays_above_the_limit_says_so_once() -> None:
    """The watch ends then."""
    assert ["given back", "passed at 150"] == watch([150, 150, 150, 150, 150])


def test_a_moment_above_the_limit_is_no_reason() -> None:
    """Three measurements in a row are; one at the limit between them starts the count anew."""
    assert ["given back", "given back", "passed at 103"] == watch([100, 101, 300, 100, 101, 102, 103, 104])


@pytest.mark.parametrize(
    ("count", "spelling"),
    [(1, "1 MiB"), (312 * MIB, "312 MiB"), (312 * MIB + 1, "313 MiB"), (20 << 30, "20.0 GiB")],
)
def test_sizes_are_rounded_up(count: int, spelling: str) -> None:
    """So that the number in a message is large enough to be written into the setting."""
    assert spelling == spell_bytes(count)
