"""Three counts and a verdict: what speaks for an output, what against it, and what cannot be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.engine.wrong_models import careful
from tests.engine.wrong_models.counter_examples import (
    COUNTER_EXAMPLES,
    CounterExample,
    classes_of_counts,
)

from shapestream_engine import compile_model
from shapestream_engine.probe import prove
from shapestream_engine.probing import model_calls
from shapestream_engine.probing.cases import EVERY_COUNT
from shapestream_engine.probing.evidence import (
    ENOUGH,
    LEAST_REQUESTS,
    MOST_AT_ELEMENT,
    MOST_EXPLAINED,
    MOST_SKIPPED,
    MOST_TIES,
    Doubt,
    Finding,
    OutputEvidence,
    Treatment,
    without_jumps,
)
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.probing.inputs import Integers
from shapestream_engine.probing.model_calls import WALL
from shapestream_engine.probing.tolerances import Difference

Array: TypeAlias = np.ndarray[Any, Any]

WRONG_IN_COMPANY = (44, 47, 51, 54)
"""Draws of seed 7 that are wrong at some numbers of rows and end no process."""

BATCHING = Treatment(kind="batching")
EQUAL = Difference(amount=0.0, allowed=1.0)
APART = Difference(amount=2.0, allowed=1.0)


def evidence(results: int = 100, *, is_whole: bool = False, near: int = 0) -> OutputEvidence:
    """Evidence of as many requests for an output of rows [4]."""
    found = OutputEvidence("y", is_whole=is_whole)
    for number in range(results):
        found.agrees(number, rows=2, shape=(4,), difference=EQUAL, case="", is_near=number < near)
    return found


def verdict(found: OutputEvidence, *, skipped: int = 0) -> str:
    """The verdict where other requests were left out."""
    return found.verdict(LEAST_REQUESTS, skipped)[0]


def explained(found: OutputEvidence, count: int, element: int = 0) -> OutputEvidence:
    """Add requests of which rounding explains a difference at one element."""
    for number in range(count):
        found.cannot_tell(f"tie {number}", Doubt.EXPLAINED, shape=(4,), elements=[(element,)])
    return found


@pytest.mark.parametrize("results", [0, ENOUGH - 1, LEAST_REQUESTS - 1, LEAST_REQUESTS])
def test_too_few_requests_for_an_output_prove_nothing(results: int) -> None:
    """Where others were left out; if all that exist were tried, three are enough."""
    assert ("proved" if results == LEAST_REQUESTS else "unjudged") == verdict(evidence(results))
    all_tried = evidence(results).verdict(ENOUGH, 0)[0]
    assert ("proved" if results >= ENOUGH else "unjudged") == all_tried


def test_one_result_against_refutes() -> None:
    """Whatever speaks for the output."""
    found = evidence()
    found.differs(APART, "beside another")
    assert "refuted" == verdict(found)
    assert "100 results for, 1 against, 0 not judged" in str(found.finding(BATCHING, ENOUGH, 0, 8, ""))


@pytest.mark.parametrize("doubt", [Doubt.REFUSED, Doubt.SKIPPED])
def test_differences_that_no_run_can_judge_are_not_equal(doubt: Doubt) -> None:
    """A few may be ties; more are neither for nor against, and the report says how many and why."""
    found = evidence(1000)
    for number in range(MOST_TIES):
        found.cannot_tell(number, doubt)
    assert "proved" == verdict(found)
    found.cannot_tell(MOST_TIES, doubt)
    assert "unjudged" == verdict(found)
    assert f"3 not judged ({doubt.name.lower()} 3)" in str(found.finding(BATCHING, ENOUGH, 0, 8, ""))


@pytest.mark.parametrize(("ties", "expected"), [(5, "proved"), (6, "unjudged"), (50, "unjudged")])
def test_rounding_may_explain_a_share_of_the_floats(ties: int, expected: str) -> None:
    """A twentieth of the results."""
    assert expected == verdict(explained(evidence(100), ties))


def test_rounding_may_not_explain_most_of_one_element() -> None:
    """One element that only long results have, in a quarter of them."""
    found = evidence(500)
    for number in range(6):
        long = ("long", number)
        found.agrees(long, rows=2, shape=(9,), difference=EQUAL, case="", is_near=False)
        found.cannot_tell(long, Doubt.EXPLAINED, shape=(9,), elements=[(8,)])
    assert "element [8]" in found.verdict(ENOUGH, 0)[1]


def test_three_ties_of_whole_values_are_too_many() -> None:
    """A threshold that moved looks like them. Three requests must lie near a step in any case."""
    assert "unjudged" == verdict(evidence(is_whole=True, near=ENOUGH - 1))
    assert "proved" == verdict(explained(evidence(is_whole=True, near=ENOUGH), MOST_TIES))
    assert "unjudged" == verdict(explained(evidence(is_whole=True, near=ENOUGH), MOST_TIES + 1))


@pytest.mark.parametrize(("skipped", "expected"), [(5, "proved"), (6, "unjudged")])
def test_requests_that_a_crash_left_out_count(skipped: int, expected: str) -> None:
    """They are evidence that the proof lacks, up to a twentieth."""
    assert expected == verdict(evidence(100), skipped=skipped)


def test_an_output_that_cannot_change_is_unproved_and_nothing_worse() -> None:
    """It is constant, empty or not finite."""
    assert ("unproved", "it was empty") == OutputEvidence("y", blank="it was empty").verdict(ENOUGH, 0)


def test_a_tolerance_that_jumps_after_a_crash_judges_nothing() -> None:
    """Another process may have found other ordinary requests."""

    def finding(kind: str, spread: float) -> Finding:
        treatment = Treatment(kind="padding", dimensions=("n",)) if kind == "padding" else BATCHING
        return Finding(treatment=treatment, output="y", verdict="proved", spread=spread)

    assert ["proved", "unjudged"] == [
        each.verdict for each in without_jumps([finding("batching", 0.9), finding("padding", 800.0)])
    ]
    assert ["proved", "proved"] == [
        each.verdict for each in without_jumps([finding("batching", 0.9), finding("padding", 1.1)])
    ]


@pytest.mark.parametrize("example", COUNTER_EXAMPLES, ids=[each.name for each in COUNTER_EXAMPLES])
def test_no_counter_example_is_proved(example: CounterExample) -> None:
    """Each was proved once, while at least a third of its requests get another answer in company."""
    assert example.wrong_of(48) >= 16
    spec = example.spec()
    report = prove(spec, compile_model(spec), example.options(budget_s=5.0))
    found = {str(finding.treatment): finding for finding in report.findings}
    assert found[example.treatment].verdict in ("refuted", "unjudged"), str(found[example.treatment])


def test_a_right_model_that_refuses_all_but_whole_numbers_is_proved() -> None:
    """Its steps are found between whole numbers, and no difference needs a change that it refuses."""
    for drawn in _right_and_whole(count=2):
        assert {"proved"} == {finding.verdict for finding in drawn.findings(budget_s=5.0)}, drawn.words


def test_rounding_of_logits_refutes_no_rare_class() -> None:
    """Whole inputs cannot be changed to tell rounding from company, and a rare class varies by 1e-8 only."""
    spec = CounterExample(
        call=classes_of_counts, shape="batch:1..32, 16", output="batch, 64", probe=Integers(0, 9)
    ).spec()
    report = prove(spec, compile_model(spec), ProbeOptions(values={"x": Integers(0, 9)}, budget_s=5.0))
    assert {"proved"} == {finding.verdict for finding in report.findings}, [*map(str, report.findings)]


def _right_and_whole(count: int) -> Iterator[careful.Careful]:
    number = 0
    while count:
        number += 1
        drawn = careful.draw(5, number)
        if ", care whole," in drawn.words and careful.truth_of(drawn).is_right:
            count -= 1
            yield drawn


def test_no_drawn_model_is_served_where_it_is_wrong() -> None:
    """Mixing, padding, output and care of each are drawn; `python -m tests.engine.wrong_models --careful` draws more."""
    tally = careful.run(8, 4, seed=45, budget_s=5.0)
    assert ([], []) == (tally.false_proofs, tally.refused)


@pytest.mark.parametrize(
    "call_s", [1.0, *(pytest.param(call_s, marks=pytest.mark.thorough) for call_s in (0.5, 2.0))]
)
def test_no_slow_model_is_served_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch, call_s: float) -> None:
    """Fewer requests and numbers of rows are tried, and less is served: a case that hides exchanged rows, such as a request
    on both sides of another, judges no number of rows."""
    now_s = 0.0
    monkeypatch.setattr(model_calls, "process_time", lambda: 0.0)
    monkeypatch.setattr(model_calls, "monotonic", lambda: now_s)

    def slow(call: Callable[[Array], Array]) -> Callable[[Array], Array]:
        def later(x: Array) -> Array:
            nonlocal now_s
            now_s += call_s
            return call(x)

        return later

    tally = careful.Tally()
    for number in WRONG_IN_COMPANY:
        drawn = careful.draw(7, number)
        truth = careful.truth_of(drawn)
        now_s = 0.0
        findings = replace(drawn, call=slow(drawn.call)).findings(budget_s=30.0)
        tally.count(drawn, truth, findings)
    assert (len(WRONG_IN_COMPANY), []) == (tally.wrong, tally.false_proofs)


def test_the_document_names_the_bounds() -> None:
    """docs/safety.md says in words how many cases of each kind a verdict needs."""
    text = " ".join((Path(__file__).parents[2] / "docs" / "safety.md").read_text().split())
    words = {2: "two", 3: "three", 0.05: "a twentieth", 0.25: "a quarter"}
    for promise in (
        f"Every number of rows up to {EVERY_COUNT} is tried",
        f"*Enough*: {LEAST_REQUESTS} different requests if the budget ended the proof",
        f"{words[ENOUGH]} if all that exist were tried",
        f"of floats {words[MOST_EXPLAINED]} of the results, and {words[MOST_AT_ELEMENT]} of those at one element",
        f"of whole values {words[MOST_TIES]} requests",
        f"and {words[MOST_SKIPPED]} of the requests that a crash left out",
        f"Its budget is {ProbeOptions().budget_s:g} seconds of work",
        f"{words[int(WALL * ProbeOptions().budget_s / 60)]} minutes of wall-clock time",
    ):
        assert promise in text, promise
