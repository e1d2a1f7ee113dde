"""Corrections of a cost table: as plain data, and in the folder where they are kept."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine.calibration import MOST_LEARNED, CostCache
from shapestream_engine.cost_table import MAX_POINTS, MAX_SECONDS, CostPoint, CostTable, LearnedCosts
from shapestream_engine.errors import EngineError

TABLE = CostTable(key="k", dimensions=("batch", "seq"), points=(CostPoint(sizes=(1, 8), seconds=0.25),))
LEARNED = LearnedCosts(
    table=TABLE.digest, batches=3, saved_at=1e9, seconds={(1, 8): 0.5}, preparation={8.0: 0.1, 64.0: 0.3}
)
SECONDS = st.floats(0.0, MAX_SECONDS)


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    """A folder of one's own, which is not there yet."""
    return CostCache(tmp_path / "costs")


def test_a_corrected_table_has_what_traffic_learned():
    """Preparation takes as much more as before; shapes that ran without being measured are points, too."""
    table = replace(
        TABLE,
        points=(CostPoint(sizes=(1, 8), seconds=0.25, first_seconds=1.0), CostPoint(sizes=(4, 8), seconds=1)),
    )
    corrected = table.corrected(replace(LEARNED, seconds={(1, 8): 0.5, (2, 8): 0.75}))
    assert {
        (1, 8): (0.5, 1.25),
        (4, 8): (1, None),
        (2, 8): (0.75, None),
    } == {point.sizes: (point.seconds, point.first_seconds) for point in corrected.points}
    assert table.key == corrected.key


@given(
    st.dictionaries(st.tuples(st.integers(0, 1 << 26), st.integers(0, 1 << 26)), SECONDS, max_size=5),
    st.dictionaries(SECONDS, SECONDS, max_size=2),
)
def test_plain_data_tells_all(seconds, preparation):
    """What was written is what is read, through JSON."""
    learned = replace(LEARNED, seconds=seconds, preparation=preparation)
    assert learned == LearnedCosts.from_dict(json.loads(json.dumps(learned.to_dict())))


@pytest.mark.parametrize(
    "change",
    [
        {"table": 3},
        {"batches": -1},
        {"batches": "3"},
        {"saved_at": "yesterday"},
        {"saved_at": float("inf")},
        {"seconds": 3},
        {"seconds": [[[1, 8], -0.1]]},
        {"seconds": [[[1, 8], float("nan")]]},
        {"seconds": [[[1, "x"], 0.1]]},
        {"seconds": [[[1, 8]]]},
        {"seconds": [[[1, size], 0.1] for size in range(MAX_POINTS + 1)]},
        {"preparation": [[1, 1], [2, 2], [3, 3]]},
        {"preparation": [[1, -1]]},
        {"seconds": [[[1, 8], 1e160]]},
        {"seconds": [[[2**30, 2**30], 0.1]]},
        {"preparation": [[1, 1e160]]},
        {"preparation": [[1e160, 1]]},
    ],
)
def test_what_cannot_be_corrections_is_refused(change):
    """By an error of the engine's own, whatever a file holds."""
    with pytest.raises(EngineError):
        LearnedCosts.from_dict({**LEARNED.to_dict(), **change})


@pytest.mark.parametrize("plain", [None, [], 3, {}, {"table": "x"}])
def test_other_data_is_refused(plain):
    """A file of somebody else's making."""
    with pytest.raises(EngineError):
        LearnedCosts.from_dict(plain)


def test_a_table_is_named_by_what_was_measured():
    """The same through JSON; another with another key, or another time of one call."""
    again = CostTable.from_dict(json.loads(json.dumps(TABLE.to_dict())))
    others = [replace(TABLE, key="other"), replace(TABLE, points=(CostPoint(sizes=(1, 8), seconds=0.26),))]
    assert TABLE.digest == again.digest
    assert TABLE.digest not in {other.digest for other in others}


def test_corrections_are_kept_beside_their_table(cache):
    """By the table, for those who have it; and all at once, for a server that does not know yet who will come."""
    assert (None, {}) == (cache.learned(TABLE), cache.all_learned())
    cache.keep_learned(LEARNED)
    assert (LEARNED, {TABLE.digest: LEARNED}) == (cache.learned(TABLE), cache.all_learned())
    newer = replace(LEARNED, batches=4)
    cache.keep_learned(newer)
    assert newer == cache.learned(TABLE)
    assert cache.learned(replace(TABLE, key="other")) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"table": "another", "batches": 1}'])
def test_what_cannot_be_read_is_learned_again(cache, content):
    """A file that was cut short, or copied from another table's, is as good as none."""
    cache.keep_learned(LEARNED)
    (path,) = cache.folder.iterdir()
    path.write_text(content)
    assert (None, {}) == (cache.learned(TABLE), cache.all_learned())
    path.write_text(json.dumps(replace(LEARNED, table="another").to_dict()))
    assert (None, {}) == (cache.learned(TABLE), cache.all_learned())


def test_so_many_are_kept_and_the_oldest_go_first(cache):
    """Models come and go, and so do versions of each. What killed processes left half written goes, too."""
    cache.keep_learned(LEARNED)
    (first,) = cache.folder.iterdir()
    (cache.folder / f"{TABLE.digest}.learned.x7").touch()
    (cache.folder / "k.json").write_text("a table")
    for path in cache.folder.iterdir():
        os.utime(path, (1.0, 1.0))
    for number in range(MOST_LEARNED):
        cache.keep_learned(replace(LEARNED, table=f"{number:040}"))
    assert MOST_LEARNED == len(cache.all_learned())
    assert (False, True) == (first.exists(), (cache.folder / "k.json").exists())
    assert MOST_LEARNED + 1 == len(list(cache.folder.iterdir()))


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path):
    """A disk that is full or read-only costs batches at the next start, and nothing else; `off` asks for that."""
    (tmp_path / "file").touch()
    for cache in (CostCache(tmp_path / "file"), CostCache(None)):
        cache.keep_learned(LEARNED)
        assert (None, {}) == (cache.learned(TABLE), cache.all_learned())
