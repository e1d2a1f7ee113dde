"""The pages of the OCR example: drawn alike for a seed, with lines where the pixels have ink."""

from __future__ import annotations

import numpy as np
from examples.ocr.pages import draw_pages

LONG = 14


def test_a_seed_draws_the_same_pages() -> None:
    """Pixels and lines are equal for one seed, and others for another."""
    first, again, other = (draw_pages(3, seed=seed) for seed in (1, 1, 2))
    assert [page.lines for page in first] == [page.lines for page in again]
    assert all(np.array_equal(page.pixels, its.pixels) for page, its in zip(first, again, strict=True))
    assert [page.lines for page in first] != [page.lines for page in other]


def test_pages_are_empty_ordinary_and_long() -> None:
    """Every eighth page has no line, the last but one 200, the others at least one."""
    counts = [len(page.lines) for page in draw_pages(16)]
    assert [7, 15] == [number for number, count in enumerate(counts) if count == 0]
    assert (200, 200) == (counts[LONG], max(counts))


def test_lines_are_where_the_ink_is() -> None:
    """Around the centre of each line, also of turned pages, pixels differ more than paper does by its noise."""
    pages = draw_pages(6)
    for page in pages:
        for line in page.lines:
            x, y = (round(place) for place in line.centre)
            around = page.pixels[max(0, y - 6) : y + 7, max(0, x - 40) : x + 41]
            assert np.ptp(around.astype(int)) > 100, (page.name, line)
    assert 40 < sum(len(page.lines) for page in pages)
