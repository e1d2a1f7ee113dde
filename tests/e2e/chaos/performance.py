"""A chaos run from beginning to end, and what it says: faults one after the other under load, then the reckoning."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.e2e.chaos.defective_server import DEFECTS, mark
from tests.e2e.chaos.faults import Faults, Injection
from tests.e2e.chaos.stage import Stage, staged
from tests.e2e.conftest import Broken

CLIENTS = 3
ATTEMPTS = 5
"""How often a fault may miss before the run fails for want of it."""
FAREWELL_S = 90.0
"""How long clients may take for their last answers."""
DEFECT_S = 30.0
"""How long a defect may take to harm anybody."""

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run has shown."""

    seed: int
    zeros: dict[str, int] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    injections: list[Injection] = field(default_factory=list)
    recoveries: list[dict[str, float | None]] = field(default_factory=list)
    """One per injection, as `Book.recovery` says."""
    problems: list[str] = field(default_factory=list)
    """Why the run failed, in words; empty: it did not."""

    def judge(self, kinds: list[str]) -> None:
        """Adds to the problems what the figures say."""
        self.problems += [f"{count} {what}" for what, count in self.zeros.items() if count]
        hits = dict.fromkeys(kinds, 0)
        for injection in self.injections:
            hits[injection.kind] += injection.hit
        missed = [kind for kind, hit in hits.items() if not hit]
        self.problems += [f"no work in flight was hit: {', '.join(missed)}"] if missed else []
        if again := self.summary["once_run_again"]:
            self.problems.append(f"{again} requests ran again that may run only once")
        ends = self.summary["ends"]
        results, requests = ends.get("ok", 0), self.summary["requests"] - ends.get("withdrawn", 0)
        if 2 * results <= requests:
            self.problems.append(f"only {results} of {requests} requests that were not withdrawn got results")

    def lines(self) -> list[str]:
        """For people."""
        summary = self.summary
        lines = [f"seed {self.seed}: {summary['requests']} requests of {summary['clients']} clients"]
        ends = ", ".join(f"{count} {code}" for code, count in summary["ends"].items())
        lines += [f"  ends: {ends}; {summary['gone_with_their_client']} went with a killed client"]
        lines += [f"  runs per request: {summary['runs_per_request']}"]
        lines += [f"  may run only once: {summary['once']}; ran again: {summary['once_run_again']}"]
        lines += [f"  misdeeds: {', '.join(summary['misdeeds']) or 'none'}"]
        if summary["latest_start_s"] is not None:
            if summary["latest_start_s"] > 0.05:
                lines += [f"  the latest start: {summary['latest_start_of']}"]
                lines += [f"  faults: {[(i.kind, round(i.at, 2)) for i in self.injections]}"]
            latest, unexcused = summary["latest_start_s"], summary["latest_start_with_pauses_s"]
            lines += [
                f"  latest start after its deadline: {latest * 1000:+.0f} ms"
                f" ({unexcused * 1000:+.0f} ms where processes that stood still are not excused)"
            ]
        lines += [
            f"  {'fault':<26}{'times':>6}{'hit':>7}{'fresh result after (s)':>25}{'all settled (s)':>18}"
        ]
        for kind in dict.fromkeys(injection.kind for injection in self.injections):
            lines.append(self._line(kind))
        lines += [f"  {what.replace('_', ' ')}: {count}" for what, count in self.zeros.items()]
        lines += [f"  {zero}: {case}" for zero, cases in summary["violations"].items() for case in cases]
        return lines + [f"FAILED: {problem}" for problem in self.problems]

    def _line(self, kind: str) -> str:
        both = zip(self.injections, self.recoveries, strict=True)
        own = [(injection, recovery) for injection, recovery in both if injection.kind == kind]
        fresh = [r["first_result_s"] for _, r in own if r["first_result_s"] is not None]
        settled = [r["settled_s"] for _, r in own if r["settled_s"] is not None]
        hit = sum(injection.hit for injection, _ in own)
        return f"  {kind:<26}{len(own):>6}{hit:>7}{_spread(fresh):>25}{_spread(settled):>18}"


def _spread(values: list[float]) -> str:
    """Median and maximum."""
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"


def perform(
    seed: int,
    duration_s: float,
    *,
    only: list[str] | None = None,
    clients: int = CLIENTS,
    say: Say = lambda line: None,
) -> Outcome:
    """Every kind of fault once, in an order that the seed chooses, and then more until the time is up."""
    with staged(seed) as stage:
        faults = Faults(stage, seed)
        kinds = only or list(faults.kinds)
        outcome = Outcome(seed=seed)
        try:
            stage.start_server()
            stage.start_served_clients(clients)
            _inject_all(stage, faults, kinds, duration_s, outcome, say)
        except Broken as error:
            outcome.problems.append(str(error))
            say(stage.tail())
        stage.stop_clients(FAREWELL_S)
        outcome.problems += stage.unexpected_ends()
        outcome.zeros, outcome.summary = stage.ledger.ask("zeros"), stage.ledger.ask("summary")
        outcome.recoveries = [stage.ledger.ask("recovery", since=one.at) for one in outcome.injections]
        outcome.judge(kinds)
        if outcome.problems:
            say(stage.tail())
        return outcome


def perform_defective(seed: int, duration_s: float) -> dict[str, dict[str, int]]:
    """Load alone, on a server that gets one defect after the other: by how much each count rose, first without any.

    What was never answered is known at the end only, so the defect that drops replies comes last.
    """
    with staged(seed, defective=True) as stage:
        stage.start_server()
        stage.start_served_clients(CLIENTS)
        risen: dict[str, dict[str, int]] = {}
        before: dict[str, int] = dict.fromkeys(DEFECTS.values(), 0)
        for defect in ("none", *DEFECTS):
            marked = mark(stage.folder, defect)
            marked.touch()
            time.sleep(duration_s)
            _wait_until_it_shows(stage, defect, before)
            marked.unlink()
            if defect == [*DEFECTS][-1]:
                stage.stop_clients(patience_s=3.0)
            else:
                time.sleep(1.0)  # what was under way ends
            # What is under way has no end either; where one is missed at the end, nothing is under way.
            zeros, before["without_an_end"] = stage.ledger.ask("zeros"), 0
            risen[defect] = {zero: zeros[zero] - count for zero, count in before.items()}
            before = zeros
        for counts in [*risen.values()][:-1]:
            del counts["without_an_end"]
        return risen


def _wait_until_it_shows(stage: Stage, defect: str, before: dict[str, int]) -> None:
    """Where a slow machine has not come to harm anybody yet; what never shows is told by the counts."""
    zero = DEFECTS.get(defect)
    give_up_at = time.monotonic() + DEFECT_S
    while zero is not None and stage.ledger.ask("zeros")[zero] == before[zero]:
        if time.monotonic() > give_up_at:
            return
        time.sleep(0.1)


def _inject_all(
    stage: Stage, faults: Faults, kinds: list[str], duration_s: float, outcome: Outcome, say: Say
) -> None:
    chance = random.Random(f"order {outcome.seed}")
    began = time.monotonic()
    missing = dict.fromkeys(kinds, ATTEMPTS)
    while missing or time.monotonic() - began < duration_s:
        kind = chance.choice(list(missing or kinds))
        injection = faults.inject(kind)
        outcome.injections.append(injection)
        say(f"{injection.until - began:6.1f} s  {kind}: {injection.hit} hit")
        if kind in missing:
            missing[kind] -= 1
            if injection.hit or not missing[kind]:
                del missing[kind]
        stage.until(f"a fresh result after: {kind}", partial(_fresh, stage, injection))
        time.sleep(chance.uniform(0.05, 0.3))


def _fresh(stage: Stage, injection: Injection) -> bool:
    """Whether a request that was submitted after this fault has its result."""
    recovery = stage.ledger.ask("recovery", since=injection.until)
    return recovery["first_result_s"] is not None
