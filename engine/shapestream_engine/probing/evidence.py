"""What the cases of one treatment have shown so far, per output, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shapestream_engine.probing.baseline import Baseline, tells
from shapestream_engine.probing.bench import spell_sizes
from shapestream_engine.probing.cases import Case
from shapestream_engine.probing.comparison import Difference, compare
from shapestream_engine.probing.report import Finding, Treatment, Verdict
from shapestream_engine.probing.values import Array
from shapestream_engine.signature import ModelSignature

__all__ = ["Evidence"]

ENOUGH = 3
"""Results that would have shown a difference; with fewer nothing is called proved."""


@dataclass(slots=True)
class _Worst:
    difference: Difference
    case: str


class Evidence:
    """Collects, and concludes."""

    def __init__(self, treatment: Treatment, signature: ModelSignature, baseline: Baseline) -> None:
        self._treatment = treatment
        self._signature = signature
        self._baseline = baseline
        self._cases = [0] * len(signature.outputs)
        self._hidden = [0] * len(signature.outputs)
        self._worst: list[_Worst | None] = [None] * len(signature.outputs)
        self._failure: tuple[str, str] | None = None
        self._rows = 0
        self._stopped: tuple[int, str] | None = None

    def add(self, case: Case, results: Sequence[Sequence[Array]]) -> None:
        """A call that ran, and what each member got."""
        self._rows = max(self._rows, sum(member.shape.rows for member in case.members))
        for place, (member, got) in enumerate(zip(case.members, results, strict=True)):
            if member in case.guests:
                continue
            for number, tolerance in enumerate(self._baseline.tolerances):
                assert member.results is not None  # only requests that ran alone are put into cases
                alone = member.results[number]
                difference = compare(alone, got[number], tolerance)
                if difference.within and tolerance.hides(alone):
                    self._hidden[number] += 1
                    continue  # they would count as equal if they were another request's
                self._cases[number] += tells(alone) and number not in self._baseline.blank
                worst = self._worst[number]
                if worst is None or difference.excess > worst.difference.excess:
                    own = spell_sizes(self._signature.dimensions, member.sizes)
                    words = f"request {place + 1} of {len(case.members)}, of {own}: {case.words}"
                    self._worst[number] = _Worst(difference, words if len(case.members) > 1 else case.words)

    def fail(self, case: Case, message: str) -> None:
        """A call that failed though each of its members runs alone."""
        self._failure = self._failure or (message, case.words)

    def stop(self, rows: int, why: str) -> None:
        """Calls of more rows than these, which may be served, are not tried."""
        self._stopped = rows, why

    @property
    def is_settled(self) -> bool:
        """Whether no further case can change the verdict of any output."""
        return self._failure is not None or all(
            worst is not None and not worst.difference.within for worst in self._worst
        )

    @property
    def is_enough(self) -> bool:
        """Whether every output that can be proved could be by now."""
        return all(
            cases + hidden >= ENOUGH or number in self._baseline.blank
            for number, (cases, hidden) in enumerate(zip(self._cases, self._hidden, strict=True))
        )

    def findings(self) -> Iterator[Finding]:
        """A verdict per output; one for all where a call failed."""
        if self._failure is not None:
            message, case = self._failure
            yield Finding(
                treatment=self._treatment,
                output=None,
                verdict="refuted",
                why=f"the call fails, while each of its requests runs alone: {message}",
                case=case,
            )
            return
        for number, port in enumerate(self._signature.outputs):
            yield self._finding(number, port.name)

    def _finding(self, number: int, name: str) -> Finding:
        verdict, why = self._verdict(number)
        worst = self._worst[number]
        numbers = worst is not None and math.isfinite(worst.difference.amount)
        return Finding(
            treatment=self._treatment,
            output=name,
            verdict=verdict,
            cases=self._cases[number],
            rows=self._rows if self._stopped is None else self._stopped[0],
            is_short=self._stopped is not None and why == self._stopped[1],
            largest=worst.difference.amount if worst is not None and numbers else None,
            allowed=worst.difference.allowed if worst is not None and numbers else None,
            why=why,
            case=worst.case if worst is not None and verdict == "refuted" else "",
        )

    def _verdict(self, number: int) -> tuple[Verdict, str]:
        worst = self._worst[number]
        if worst is not None and not worst.difference.within:
            return "refuted", worst.difference.words
        if number in self._baseline.blank:
            return "unproved", self._baseline.blank[number]
        if self._hidden[number] and self._cases[number] < ENOUGH:
            return "unproved", "results differ by less than rounding is allowed to change them"
        if self._cases[number] < ENOUGH:
            return "unproved", f"only {self._cases[number]} results would have shown anything"
        if self._stopped is not None:
            return "unproved", self._stopped[1]
        return "proved", ""
