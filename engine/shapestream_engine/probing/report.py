"""The findings of a proof: a verdict per output and treatment, with the cases tried, as plain data and for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["proved", "refuted", "unproved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """A way in which the pipeline puts requests together; their results may or may not survive it."""

    kind: Literal["batching", "padding", "strategy", "static", "invariance"]
    dimensions: tuple[str, ...] = ()
    """The dimensions that are padded."""
    name: str = ""
    """The strategy's name, for the kind that is all of it: filling up, dividing and rejoining, as in service.

    `static`: calls on models of their own. `invariance`: equal calls in which only the company differs, bit by bit.
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
    """One output under one treatment."""

    treatment: Treatment
    output: str | None
    """The output's name; None for all, where the model did not get as far as to give any."""
    verdict: Verdict
    cases: int = 0
    """Results that were compared, and that would have shown a difference."""
    requests: int = 0
    """Different requests among them."""
    rows: int = 0
    """Rows of the largest call that ran; 0 where none did."""
    is_short: bool = False
    """True if larger calls, which may be served, were not tried, and only that leaves the output unproved."""
    largest: float | None = None
    """The largest difference seen (in proportion to what is allowed); None where nothing could be subtracted."""
    allowed: float | None = None
    """The bound on that difference."""
    why: str = ""
    """The error, or the reason why nothing could be said."""
    case: str = ""
    """The case that showed it."""

    @property
    def subject(self) -> str:
        """`output 'embedding'`, for messages."""
        return "every output" if self.output is None else f"output {self.output!r}"

    def __str__(self) -> str:
        match self.verdict:
            case "proved":
                off = (
                    f", largest difference {self.largest:.3g} ({self.allowed:.3g} is allowed)"
                    if self.largest
                    else ""
                )
                up_to = f" of up to {self.rows} rows" if self.rows > 1 else ""
                checked = f"checked on {self.requests} different requests in {self.cases} cases"
                return f"{self.treatment}, {self.subject}: proved, {checked}{up_to}{off}"
            case "unproved":
                return f"{self.treatment}, {self.subject}: unproved, {self.why}"
            case "refuted":
                return f"{self.treatment}, {self.subject}: refuted, {self.evidence}"

    @property
    def evidence(self) -> str:
        """The difference or error that refuted it, and the case."""
        seen = self.why
        if self.largest is not None and math.isfinite(self.largest):
            seen = f"largest difference {self.largest:.3g} where {self.allowed:.3g} is allowed" + (
                f", {seen}" if seen else ""
            )
        return f"{seen} ({self.case})" if self.case else seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The findings of one proof of a model."""

    model: str
    findings: tuple[Finding, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The values that each input was filled with."""
    sizes: tuple[str, ...] = ()
    """The shapes that requests had."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """The axes of each output, named after the dimensions that they were seen to follow."""
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The only rule that held in every case, for each output without one in the configuration."""
    tolerances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By output, how far two equal results may lie apart (`OutputTolerance.to_dict`); empty where the model does not
    repeat its own results, or was not tried."""
    notes: tuple[str, ...] = ()
    conclusive: bool = True
    """True if another proof would find the same: not after a crash, a hang, or a budget that ran out."""
    seconds: float = 0.0
    from_cache: bool = field(default=False, compare=False)
    """True if an earlier proof found this."""

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        """The findings with that verdict."""
        return tuple(finding for finding in self.findings if finding.verdict == verdict)

    def lines(self) -> Iterator[str]:
        """Describe the findings, for people."""
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
        """Plain data that `from_dict` turns into an equal report; JSON holds it."""
        plain = asdict(self)
        for finding in plain["findings"]:
            for key in ("largest", "allowed"):
                if finding[key] is not None and not math.isfinite(finding[key]):
                    finding[key] = None
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ProbeReport:
        """The report that `plain` describes; raises `TypeError` or `KeyError` for what is none."""
        tuples = {key: tuple(plain[key]) for key in ("sizes", "notes")}
        findings = tuple(finding_from_dict(each) for each in plain["findings"])
        return cls(**{**plain, **tuples, "findings": findings})


def finding_from_dict(plain: Mapping[str, Any]) -> Finding:
    """The finding that `asdict` made `plain` of."""
    treatment = plain["treatment"]
    return Finding(
        **{**plain, "treatment": Treatment(**{**treatment, "dimensions": tuple(treatment["dimensions"])})}
    )
