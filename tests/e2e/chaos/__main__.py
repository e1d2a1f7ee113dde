"""`python -m tests.e2e.chaos`: real processes and sockets, killed, stopped, starved and lied to; the ledger's four zeros."""

from __future__ import annotations

import argparse
import random
import sys

from tests.e2e.chaos.defective_server import DEFECTS
from tests.e2e.chaos.performance import perform, perform_defective
from tests.e2e.interruption import obey

MUTATION_S = 3.0


def main() -> int:
    """Prints what happened; 0 only if nothing was lost, doubled, wrong or late, and every kind of fault hit."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the order of the faults; default: any")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds; each kind comes at least once")
    parser.add_argument("--only", action="append", help="a kind of fault; may be repeated")
    parser.add_argument("--mutations", action="store_true", help="instead: can each zero become a number?")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    if given.mutations:
        return mutations(seed)
    outcome = perform(
        seed, given.duration, only=given.only, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print("\n".join(outcome.lines()))
    return 1 if outcome.problems else 0


def mutations(seed: int) -> int:
    """One defect after the other; 0 only if each turned its zero into a number, and nothing did without one."""
    risen = perform_defective(seed, MUTATION_S)
    for defect, counts in risen.items():
        print(f"{defect}: {counts}")
    blind = [defect for defect, zero in DEFECTS.items() if not risen[defect][zero]]
    return 1 if blind or any(risen["none"].values()) else 0


if __name__ == "__main__":
    obey()
    sys.exit(main())
