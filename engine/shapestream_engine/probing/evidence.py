"""Evidence: what the results of one treatment say about each output, and the verdict that follows.

A treatment is one kind of company: batched, padded along some dimensions, at a static shape. A result in company is
compared with the result of the same request alone. There are three answers, and each is counted for each output:

- *for*: the results agree, and they could have differed. The request had company (another request, or padding), and its
  tolerance is smaller than the spread of the output. A result that could not have differed counts for nothing.
- *against*: some element differs, and rounding does not move that element.
- *not judged*: some element differs, and it cannot be told whether rounding or the company is the reason. Either rounding
  moves the element as far (*explained*), or the model refuses the changed inputs that would show it (*refused*), or a crash
  has ended such calls (*skipped*). Requests that a crash kept from being made count as skipped as well.

"Cannot tell" is never "equal". The verdict follows from the counts:

- `refuted`: one result is against;
- `unproved`: the output is constant, empty or not finite, so no result can be for or against;
- `unjudged`: the results that are not judged exceed their bound, or too few results are for;
- `proved`: otherwise.

The bounds. Where two scores are equal, rounding decides, so right models have explained differences as well. In floats they
may be up to `MOST_EXPLAINED` of the results, and up to `MOST_AT_ELEMENT` of the results at each element: one sensitive
element must not speak for the others. In whole values a shifted threshold looks like a tie, so `MOST_TIES` different
requests is the bound, whatever their share. The same bound holds for refused and skipped differences, of every output. A
model of which no part is sensitive has none of them. Requests that were never made are bounded by `MOST_SKIPPED`.

Enough evidence. An output is proved by at least `LEAST_REQUESTS` different requests where the budget or the model kept
other requests from being tried, and by `ENOUGH` where all that exist were tried. An output of whole values changes in steps.
So `ENOUGH` of its requests must lie near a step. Each number of rows that may be served has results of its own; `rows` says
up to which number all were judged.

This file knows neither models nor time. It does not promise more than was tried: the counts are samples.

A `Finding` is a verdict with its counts, a `ProbeReport` the findings of one proof, as plain data and as text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from shapestream_engine.probing.tolerances import Difference

# ---------------------------------------------------------------- findings

Verdict: TypeAlias = Literal["proved", "refuted", "unproved", "unjudged"]
"""`unproved`: the output is constant, empty or not finite. `unjudged`: it cannot be told whether results stay equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """A way in which requests share calls; results may or may not stay equal under it."""

    kind: Literal["batching", "padding", "strategy", "static", "invariance"]
    dimensions: tuple[str, ...] = ()
    """The dimensions that are padded."""
    name: str = ""
    """The strategy's name, for the kind `strategy`: calls are filled up, divided and rejoined as in service.

    `static`: calls of compiled models for single shapes. `invariance`: calls that differ only in the other requests,
    compared to the bit.
    """

    def __str__(self) -> str:
        if self.kind == "strategy":
            return f"strategy {self.name}"
        if self.kind == "static":
            return "running at a static shape"
        return (
            " and ".join([f"{self.kind} of {self.dimensions[0]}", *self.dimensions[1:]])
            if self.dimensions
            else self.kind
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one output under one treatment."""

    treatment: Treatment
    output: str | None
    """The output's name; None for all outputs, if a call failed."""
    verdict: Verdict
    cases: int = 0
    """Results for the output: they agreed, and could have differed."""
    requests: int = 0
    """Different requests among these results."""
    against: int = 0
    """Results that differed by more than rounding."""
    follows_rows: bool = False
    """True if each of these equals, to the bit, the result of the request beside its own copies in a call of as many rows:
    the number of rows decides, not the other requests."""
    unjudged: Mapping[str, int] = field(default_factory=dict)
    """Different requests that are not judged, by reason: `explained`, `refused` or `skipped` (`evidence.Doubt`)."""
    rows: int = 0
    """Rows of the largest call that ran; 0 if none ran. If `is_short`: up to this number, every number was tried."""
    is_short: bool = False
    """True if larger calls, which may be served, were not tried."""
    largest: float | None = None
    """The largest difference relative to its bound; None if values could not be subtracted."""
    allowed: float | None = None
    """The tolerance at that element."""
    spread: float | None = None
    """The spread of ordinary results, which the tolerance follows; None for exact outputs."""
    why: str = ""
    """The error, or the reason for the verdict."""
    case: str = ""
    """The case in which the difference showed."""
    call_s: float | None = None
    """Wall-clock seconds of a call, if the proof ended for lack of time before there was enough evidence; otherwise None."""

    @property
    def subject(self) -> str:
        """The output as text for messages: `output 'embedding'`."""
        return "every output" if self.output is None else f"output {self.output!r}"

    def __str__(self) -> str:
        about = f"{self.treatment}, {self.subject}"
        match self.verdict:
            case "proved":
                off = (
                    f", largest difference {self.largest:.3g} ({self.allowed:.3g} is allowed)"
                    if self.largest
                    else ""
                )
                up_to = f" of up to {self.rows} rows" if self.rows > 1 else ""
                checked = f"checked on {self.requests} different requests in {self.cases} cases"
                beyond = f"; not tried beyond {self.rows} rows: {self.why}" if self.is_short else ""
                return f"{about}: proved, {checked}{up_to}, none against, {self.left_open}{off}{beyond}"
            case "unproved" | "unjudged":
                counts = f" ({self.counts})" if self.output is not None else ""
                return f"{about}: {self.verdict}, {self.why}{counts}"
            case "refuted":
                counts = f"; {self.counts}" if self.output is not None else ""
                return f"{about}: refuted, {self.evidence}{counts}"

    @property
    def left_open(self) -> str:
        """The requests that are not judged, as text: `3 not judged (explained 2, refused 1)`."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.unjudged.items())
        return f"{sum(self.unjudged.values())} not judged" + (f" ({reasons})" if reasons else "")

    @property
    def counts(self) -> str:
        """The three counts as text."""
        return f"{self.cases} results for, {self.against} against, {self.left_open}"

    @property
    def evidence(self) -> str:
        """The difference or error of a refuted finding, and the case."""
        seen = self.why
        if self.largest is not None and math.isfinite(self.largest):
            seen = f"largest difference {self.largest:.3g} where {self.allowed:.3g} is allowed" + (
                f", {seen}" if seen else ""
            )
        return f"{seen} ({self.case})" if self.case else seen


def refuted(treatment: Treatment, why: str, case: str = "") -> Finding:
    """Return the verdict on all outputs after a call failed."""
    return Finding(treatment=treatment, output=None, verdict="refuted", why=why, case=case)


def unjudged(treatment: Treatment, why: str) -> Finding:
    """Return the verdict on all outputs where nothing could be tried."""
    return Finding(treatment=treatment, output=None, verdict="unjudged", why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The findings of one proof of a model."""

    model: str
    findings: tuple[Finding, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Description of the values of each input."""
    sizes: tuple[str, ...] = ()
    """Sizes of the requests, as text."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """The axes of each output, by the dimensions that they followed."""
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For outputs without a configured rule: the only rule that held in every case."""
    unruled: Mapping[str, str] = field(default_factory=dict)
    """What was tried for outputs of which no rule is certain, and what came of it."""
    tolerances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`OutputTolerance.to_dict` by output; empty if the model does not repeat its results, or was not tried."""
    engine: str = ""
    """The engine that was chosen, if that was the question."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Engines before it, and why each does not run the model."""
    notes: tuple[str, ...] = ()
    conclusive: bool = True
    """True if the verdicts need no other proof: the budget sufficed, and no crash or hang decided one of them."""
    ran_short: bool = False
    """True if nothing but time makes it inconclusive: another proof may try larger calls."""
    seconds: float = 0.0
    from_cache: bool = field(default=False, compare=False)
    """True if the report comes from the cache."""

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        """Return the findings with this verdict."""
        return tuple(finding for finding in self.findings if finding.verdict == verdict)

    def lines(self) -> Iterator[str]:
        """Yield the findings as text lines."""
        for output, axes in self.follows.items():
            yield f"{output} is seen to be [{axes}]"
        for output, rule in self.rules.items():
            yield f"{output} is seen to follow the rule {{{', '.join(f'{key}: {value}' for key, value in rule.items())}}}"
        yield from map(str, self.findings)
        if self.inputs:
            yield "tried with " + "; ".join(f"{name}: {words}" for name, words in self.inputs.items())
        if self.sizes:
            yield "requests of " + "; ".join(self.sizes)
        yield from self.notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; `from_dict` makes an equal report of it."""
        plain = asdict(self)
        for finding in plain["findings"]:
            for key in ("largest", "allowed", "spread"):
                if finding[key] is not None and not math.isfinite(finding[key]):
                    finding[key] = None
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ProbeReport:
        """Return the report that `plain` describes; raises `TypeError` or `KeyError` for other data."""
        tuples = {key: tuple(plain[key]) for key in ("sizes", "notes")}
        findings = tuple(finding_from_dict(each) for each in plain["findings"])
        return cls(**{**plain, **tuples, "findings": findings})


def finding_from_dict(plain: Mapping[str, Any]) -> Finding:
    """Return the finding from its `asdict` form."""
    treatment = plain["treatment"]
    return Finding(
        **{**plain, "treatment": Treatment(**{**treatment, "dimensions": tuple(treatment["dimensions"])})}
    )


# ---------------------------------------------------------------- counts

ENOUGH = 3
"""Results for an output; with fewer, nothing is proved."""
LEAST_REQUESTS = 32
"""Different requests for an output of which others were left out. On 11 to 72 requests in a budget of 1.5 s, five wrong
models were proved that 30 s refuted; 32 requests hold each pattern of contents about twice."""
MOST_TIES = 2
"""Different requests whose difference is not judged: of whole values, and where changed inputs are refused."""
MOST_EXPLAINED = 0.05
"""Share of the results of a float output whose difference rounding explains."""
MOST_AT_ELEMENT = 0.25
"""Share of such results at one element. Far positions have few results, so it is larger."""
MOST_JUMP = 10.0
"""Largest ratio of the spreads of one output in one report."""
MOST_SKIPPED = 0.05
"""Share of the requests that a crash kept from being made."""


class Doubt(StrEnum):
    """The reason why a difference is not judged."""

    EXPLAINED = "rounding moves the result of the request alone as far"
    REFUSED = "the model refuses the changed inputs that would tell rounding from company"
    SKIPPED = "a crash or a hang ended calls of this kind"


class OutputEvidence:
    """The counts of one output under one treatment."""

    def __init__(
        self, name: str, *, blank: str = "", is_whole: bool = False, spread: float | None = None
    ) -> None:
        """`blank`: why the output can show no difference, or "". `is_whole`: its values change in steps. `spread`: of its
        ordinary results."""
        self.name = name
        self._spread = spread
        self._blank = blank
        self._is_whole = is_whole
        self.results = 0
        """Results for."""
        self.requests: set[Hashable] = set()
        """Different requests among them."""
        self.near: set[Hashable] = set()
        """Different requests that lie near a step of this output."""
        self.hidden: set[Hashable] = set()
        """Requests whose tolerance exceeds the spread of the output: equality shows nothing."""
        self.against = 0
        self.by_rows = 0
        """Results against that equal those of the request beside its own copies, in a call of as many rows."""
        self.doubts: dict[Doubt, set[Hashable]] = {doubt: set() for doubt in Doubt}
        """Different requests that are not judged."""
        self._explained = 0
        """Results that are not judged, because rounding explains the difference."""
        self._shapes: Counter[tuple[int, ...]] = Counter()
        """Compared results by the shape of one row."""
        self._at: Counter[tuple[int, ...]] = Counter()
        """Explained differences by the index of the element in its row."""
        self._rows: Counter[int] = Counter()
        """Results for by the rows of their call."""
        self._worst: tuple[Difference, str] | None = None
        """The largest difference so far, and its case."""

    def agrees(
        self,
        request: Hashable,
        *,
        rows: int,
        shape: tuple[int, ...],
        difference: Difference,
        case: str,
        is_near: bool,
    ) -> None:
        """Count a result for the output. `rows` is the number of rows that its call judges, 0 for none; `shape` is the
        shape of one row."""
        if self._blank:
            return
        self.results += 1
        self.requests.add(request)
        self._rows[rows] += 1
        self._shapes[shape] += 1
        if is_near:
            self.near.add(request)
        self._rank(difference, case)

    def differs(self, difference: Difference, case: str, *, by_rows: bool = False) -> None:
        """Count a result against the output. `by_rows`: the number of rows explains it, not the other requests."""
        self.against += 1
        self.by_rows += by_rows
        self._rank(difference, case)

    def cannot_tell(
        self,
        request: Hashable,
        doubt: Doubt,
        *,
        shape: tuple[int, ...] = (),
        elements: Iterable[tuple[int, ...]] = (),
    ) -> None:
        """Count a result that is not judged. `elements` are the indices in a row that differ."""
        self.doubts[doubt].add(request)
        if doubt is Doubt.EXPLAINED:
            self._explained += 1
            self._shapes[shape] += 1
            self._at.update(set(elements))

    def judged_at(self, rows: int) -> bool:
        """Tell whether a call of this number of rows was judged."""
        return bool(self._blank) or self._rows[rows] > 0

    @property
    def is_settled(self) -> bool:
        """Tell whether the verdict is final."""
        return self.against > 0

    def missing(self, requests: int) -> int:
        """Return how many different requests the output lacks of so many; 0 if it cannot have them."""
        shown = self.requests if self.requests else self.hidden
        return 0 if self._blank else max(0, max(ENOUGH, requests) - len(shown))

    @property
    def unjudged(self) -> int:
        """Different requests that are not judged, for any reason."""
        return len(set().union(*self.doubts.values()))

    def _rank(self, difference: Difference, case: str) -> None:
        if self._worst is None or difference.excess > self._worst[0].excess:
            self._worst = difference, case

    def verdict(self, least: int, skipped: int) -> tuple[Verdict, str]:
        """Return the verdict and its reason. `least`: different requests that are enough. `skipped`: requests never made."""
        if self.against:
            assert self._worst is not None  # each result against has its difference
            return "refuted", self._worst[0].words
        if self._blank:
            return "unproved", self._blank
        why = self._too_little(least) or self._too_much(skipped)
        return ("unjudged", why) if why else ("proved", "")

    def _too_little(self, least: int) -> str:
        if self.hidden and self.results < ENOUGH:
            return "results differ by less than rounding is allowed to change them"
        if self.results < ENOUGH:
            return f"only {self.results} results would have shown anything"
        if len(self.requests) < least:
            return f"only {len(self.requests)} different requests would have shown anything, of {least}"
        if self._is_whole and len(self.near) < ENOUGH:
            return f"only {len(self.near)} requests were near a change of its values"
        return ""

    def _too_much(self, skipped: int) -> str:
        for doubt in (Doubt.REFUSED, Doubt.SKIPPED):
            if (found := len(self.doubts[doubt])) > MOST_TIES:
                return f"{found} requests got other results, and cannot be judged: {doubt}"
        ties = len(self.doubts[Doubt.EXPLAINED])
        if ties > MOST_TIES:
            if self._is_whole:
                return f"{ties} requests lie where rounding decides, and got other results"
            compared = self.results + self._explained
            if self._explained > MOST_EXPLAINED * compared:
                return f"{self._explained} of {compared} results differ where rounding decides"
            if (element := self._unsure_element()) is not None:
                return (
                    f"rounding decides element {list(element)} in {self._at[element]} results, which differ"
                )
        if skipped > MOST_SKIPPED * (skipped + len(self.requests)):
            return f"{skipped} requests of realistic values were not made: {Doubt.SKIPPED}"
        return ""

    def _unsure_element(self) -> tuple[int, ...] | None:
        """Return an element that too many results leave open; None if there is none."""
        for element, count in self._at.items():
            if count <= MOST_TIES:
                continue
            compared = sum(
                number
                for shape, number in self._shapes.items()
                if len(shape) == len(element)
                and all(index < size for index, size in zip(element, shape, strict=True))
            )
            if count > MOST_AT_ELEMENT * compared:
                return element
        return None

    def finding(
        self,
        treatment: Treatment,
        least: int,
        skipped: int,
        rows: int,
        short: str,
        call_s: float | None = None,
    ) -> Finding:
        """Return the verdict with its counts. `short`: why calls of more than `rows` rows were not tried, or "". `call_s`:
        wall-clock seconds of a call, if the time was over before there was enough evidence."""
        verdict, why = self.verdict(least, skipped)
        if verdict != "unjudged" or self.hidden or not self._too_little(least):
            call_s = None  # more time would not help
        if call_s is not None:
            why = f"{why}: a call takes {call_s:.2g} s, and the time was over"
        worst, case = (None, "") if self._worst is None else self._worst
        if worst is not None and not math.isfinite(worst.amount):
            worst = None
        counts = {doubt: len(found) for doubt, found in self.doubts.items()}
        counts[Doubt.SKIPPED] += 0 if self._blank else skipped
        return Finding(
            treatment=treatment,
            output=self.name,
            verdict=verdict,
            cases=self.results,
            requests=len(self.requests),
            against=self.against,
            follows_rows=self.against > 0 and self.by_rows == self.against,
            unjudged={doubt.name.lower(): count for doubt, count in counts.items() if count},
            rows=rows,
            is_short=bool(short) and verdict in ("proved", "unproved"),
            largest=None if worst is None else worst.amount,
            allowed=None if worst is None else worst.allowed,
            spread=self._spread,
            why=why or short,
            call_s=call_s,
            case=case if verdict == "refuted" else "",
        )


class Evidence:
    """The evidence about all outputs under one treatment."""

    def __init__(self, treatment: Treatment, outputs: Sequence[OutputEvidence]) -> None:
        self._treatment = treatment
        self.outputs = tuple(outputs)
        self._failure: tuple[str, str] | None = None
        self._rows = 0
        self._stopped: tuple[Sequence[int], int, str] | None = None
        self.skipped = 0
        """Requests of realistic values that were not made, because a crash ended others like them."""
        self.least = 1
        """Different requests that are enough; more where many contents are tried."""
        self.call_s: float | None = None
        """Wall-clock seconds of a call, if the time was over before there was enough evidence."""

    def ran(self, rows: int) -> None:
        """Record that a call of this number of rows ran."""
        self._rows = max(self._rows, rows)

    def fail(self, message: str, case: str) -> None:
        """Record that a call failed although each of its requests runs alone."""
        self._failure = self._failure or (message, case)

    def stop(self, counts: Sequence[int], rows: int, why: str) -> None:
        """Record the reason why calls of more than `rows` rows were not tried, of all these numbers of rows."""
        self._stopped = counts, rows, why

    @property
    def _limit(self) -> tuple[int, str]:
        """The largest number of rows that may be served, and why larger ones may not; "" if there are none.

        Other calls may have tried the numbers of rows that the calls of many rows did not reach.
        """
        if self._stopped is None:
            return self._rows, ""
        counts, rows, why = self._stopped
        for count in counts:
            if count > rows and not self.judged_at(count):
                return rows, why
            rows = max(rows, count)
        return rows, ""

    def judged_at(self, rows: int) -> bool:
        """Tell whether every output has a judged result in a call of this number of rows."""
        return all(output.judged_at(rows) for output in self.outputs)

    @property
    def is_settled(self) -> bool:
        """Tell whether the verdict of every output is final."""
        return self._failure is not None or all(output.is_settled for output in self.outputs)

    def missing(self, requests: int) -> int:
        """Return how many different requests the output with the fewest lacks of so many."""
        return max((output.missing(requests) for output in self.outputs), default=0)

    def findings(self) -> Iterator[Finding]:
        """Yield a verdict per output; one verdict for all outputs where a call failed."""
        if self._failure is not None:
            message, case = self._failure
            why = f"the call fails, while each of its requests runs alone: {message}"
            yield Finding(treatment=self._treatment, output=None, verdict="refuted", why=why, case=case)
            return
        rows, short = self._limit
        for output in self.outputs:
            yield output.finding(self._treatment, self.least, self.skipped, rows, short, self.call_s)


def without_jumps(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; a proof whose tolerance is far larger than another's of the same output is not judged.

    After a crash, another process goes on, and may have found other ordinary requests. What it allows must not depend on
    that.
    """
    least: dict[str | None, float] = {}
    for finding in findings:
        if finding.spread is not None:
            least[finding.output] = min(least.get(finding.output, math.inf), finding.spread)
    judged = []
    for finding in findings:
        own, other = finding.spread, least.get(finding.output, math.inf)
        if finding.verdict == "proved" and own is not None and own > MOST_JUMP * other:
            why = f"the spread of its results went from {other:.3g} to {own:.3g} after a crash or a hang"
            finding = replace(finding, verdict="unjudged", why=why, is_short=False)
        judged.append(finding)
    return judged
