"""Judge the proof by models that were drawn at random: wrong ones that it proves, and right ones that it refuses."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from tests.engine.wrong_models import careful
from tests.engine.wrong_models.families import Drawn, draw
from tests.engine.wrong_models.truth import Judged, judge

from shapestream_engine import compile_model
from shapestream_engine.probing.evidence import Finding
from shapestream_engine.probing.examination import examine

MOST_S = 30.0
"""Seconds that the proof of one model may take."""
MOST_REFUSED = 0.05
"""Part of the right models that may be refused."""
_AGAIN = 10
"""Times as many requests before a model is called right that the proof has refuted."""


@dataclass(slots=True)
class Tally:
    """The figures so far."""

    wrong: int = 0
    right: int = 0
    unclear: int = 0
    constant: int = 0
    false_proofs: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    total_s: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        """Tell whether the proof holds what the documents promise."""
        return (
            not self.false_proofs
            and len(self.refused) <= MOST_REFUSED * self.right
            and self.slowest_s <= MOST_S
        )

    def lines(self) -> list[str]:
        """The figures in words."""
        models = self.wrong + self.right
        return [
            *(f"PROVED, AND WRONG: {words}" for words in self.false_proofs),
            *(f"refused, and right: {words}" for words in self.refused),
            f"wrong models: {self.wrong}, of which proved: {len(self.false_proofs)}",
            f"right models: {self.right}, of which refused or unproved: {len(self.refused)} "
            f"({len(self.refused) / max(1, self.right):.1%})",
            f"left out: {self.unclear} neither clearly right nor clearly wrong, {self.constant} with one answer for all",
            f"seconds per proof: {self.total_s / max(1, models):.2f} in the mean, {self.slowest_s:.2f} at most",
        ]


def proved(drawn: Drawn) -> list[Finding]:
    """The findings of the proof of one model, in this process."""
    findings: list[Finding] = []
    model = compile_model(drawn.spec)
    try:
        examine(model, drawn.options, findings.extend)
    finally:
        model.close()
    return findings


def count(tally: Tally, drawn: Drawn, truth: Judged, findings: list[Finding], label: str) -> None:
    """Add one model whose truth is known. Wrong are those that are wrong in what was proved of them."""
    of = {str(finding.treatment): finding for finding in findings}
    truths = {"batching": truth.batching, "padding of seq": truth.padding}
    told = f"{label}: {drawn.words}"
    if "wrong" in truths.values():
        tally.wrong += 1
        false = [kind for kind, known in truths.items() if known == "wrong" and of[kind].verdict == "proved"]
        if false:
            tally.false_proofs.append(f"{told}: {'; '.join(str(of[kind]) for kind in false)} ({truth.why})")
    else:
        tally.right += 1
        if poor := [finding for finding in findings if finding.verdict != "proved"]:
            tally.refused.append(f"{told}: {'; '.join(map(str, poor))}")


def add(tally: Tally, seed: int, number: int, draws: int) -> str:
    """Draw the model of that number and try it, if so many of its truth are still wanted; the verdict in words."""
    random = np.random.default_rng([seed, number])
    drawn = draw(random)
    truth = judge(drawn, random)
    if not truth.varies:
        tally.constant += 1
        return ""
    is_wrong = "wrong" in (truth.padding, truth.batching)
    if not is_wrong and "unclear" in (truth.padding, truth.batching):
        tally.unclear += 1
        return ""
    if (tally.wrong if is_wrong else tally.right) >= draws:
        return ""
    began = monotonic()
    findings = proved(drawn)
    seconds = monotonic() - began
    if not is_wrong and any(finding.verdict == "refuted" for finding in findings):
        truth = judge(drawn, random, requests=320 * _AGAIN)
        if "unclear" in (truth.padding, truth.batching):
            tally.unclear += 1
            return ""
    tally.slowest_s = max(tally.slowest_s, seconds)
    tally.total_s += seconds
    count(tally, drawn, truth, findings, f"seed {seed}, draw {number}")
    return f"{number}: {truth.padding}/{truth.batching} {drawn.words}: {'; '.join(map(str, findings))}"


def run(draws: int, seed: int, *, verbose: bool = False) -> Tally:
    """Draw until so many wrong and so many right models were tried."""
    tally = Tally()
    number = 0
    while tally.wrong < draws or tally.right < draws:
        number += 1
        words = add(tally, seed, number, draws)
        if verbose and words:
            print(words, flush=True)
    return tally


def main() -> int:
    """Run from the command line; the exit status is 0 if the proof holds what the documents promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.wrong_models", description=__doc__)
    parser.add_argument("--draws", type=int, default=500, help="wrong models, and as many right ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every model")
    parser.add_argument(
        "--only", type=int, metavar="DRAW", help="try this draw of the seed again, and no other"
    )
    parser.add_argument(
        "--careful", action="store_true", help="careful models, tables and models that count their rows"
    )
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a careful model's proof")
    arguments = parser.parse_args()
    if arguments.careful:
        judged = careful.run(
            arguments.draws,
            arguments.draws // 2,
            arguments.seed,
            budget_s=arguments.budget,
            verbose=arguments.verbose,
        )
        print("\n".join(judged.lines()))
        return 0 if judged.is_good else 1
    if arguments.only is None:
        tally = run(arguments.draws, arguments.seed, verbose=arguments.verbose)
    else:
        tally = Tally()
        print(add(tally, arguments.seed, arguments.only, draws=1))
    print("\n".join(tally.lines()))
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
