"""Runs beside the baseline's packages: plays ablations on virtual time, and prints a line of JSON for all of them."""

from __future__ import annotations

import json
import sys
from multiprocessing import Pool

from benchmarks.ablations.mechanisms import MECHANISMS, here, without
from benchmarks.ablations.scenarios import SCENARIOS, run

Task = tuple[str, list[str], int]
"""A scenario, what is off, and the seed."""
Played = tuple[dict[str, float], dict[str, int]]
"""Figures, and how often what is watched was at work."""


def play(task: Task) -> Played:
    """One simulation."""
    scenario, off, seed = task
    with here(off) if off and MECHANISMS[off[0]].is_here else without(off) as patches:
        figures = run(SCENARIOS[scenario], seed, lambda: patches.spent_s)
        return figures, dict(patches.fired)


def main() -> None:
    """Reads tasks from the standard input; the argument says how many processes play them."""
    tasks: list[Task] = json.load(sys.stdin)
    with Pool(int(sys.argv[1])) as pool:
        json.dump(pool.map(play, tasks, chunksize=1), sys.stdout)


if __name__ == "__main__":
    main()
