"""`make answers`: is every answer right, whatever is withdrawn, late or killed beside it?

    clients: product's own (single requests, streams), raw ZeroMQ      server      two workers with model files

Every answer is compared with a formula of NumPy that is computed in the client and shares nothing with the product.
Requests are withdrawn and expire while they are queued or running, and clients are killed. The run fails if an answer
is wrong, a request fails in another way than it was made to, has no end, or two.
"""

from __future__ import annotations

import argparse
import random
import sys
from importlib.util import find_spec

from tests.e2e.answers.run import FILE_DEFECTS, FILES, SERVER_DEFECTS, Outcome, Settings, run, table
from tests.e2e.interruption import obey


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 only if nothing was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.answers", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--engine", action="append", choices=list(FILES), help="may be repeated; default: all installed"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="of each engine")
    parser.add_argument("--seed", type=int, default=None, help="default: any")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each engine at most")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds until a request counts as lost"
    )
    parser.add_argument("--trust", action="store_true", help="serve without proof and calibration")
    parser.add_argument(
        "--defect", choices=[*FILE_DEFECTS, *SERVER_DEFECTS], help="the run must find it, and fail"
    )
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    outcomes = []
    for engine in given.engine or FILES:
        if find_spec(engine) is None:
            print(f"{engine} is not installed: left out", file=sys.stderr)
            continue
        settings = Settings(
            engine=engine,
            requests=given.requests,
            seed=seed,
            patience_s=given.patience,
            most_s=given.seconds,
            trust=given.trust,
            defect=given.defect,
        )
        outcomes.append(run(settings))
    report(seed, outcomes)
    return 1 if not outcomes or any(outcome.failed for outcome in outcomes) else 0


def report(seed: int, outcomes: list[Outcome]) -> None:
    """Prints the table, and what the first defects looked like."""
    print(f"seed {seed}")
    print(table(outcomes))
    for outcome in outcomes:
        for line in [*outcome.problems, *outcome.shown_notes()]:
            print(f"{outcome.engine}: {line}")


if __name__ == "__main__":
    obey()
    sys.exit(main())
