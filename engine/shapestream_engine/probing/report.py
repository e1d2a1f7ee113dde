"""The findings of a proof: a verdict per output and treatment, as plain data and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

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
    tolerances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`OutputTolerance.to_dict` by output; empty if the model does not repeat its results, or was not tried."""
    notes: tuple[str, ...] = ()
    conclusive: bool = True
    """True if the verdicts need no other proof: the budget sufficed, and no crash or hang decided one of them."""
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
