"""The record of a batch that ran, failed or was lost, and of its members: numbers, ids and times.

`serving/ends.py` makes it once, and all observers read it: counters, stories, spans. It holds neither tensors nor sessions,
so that it can be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from shapestream.scheduling.batches import CutFacts
from shapestream.wire.tags import trace_id

ClientId: TypeAlias = tuple[bytes, str | None]
"""A client: the sixteen bytes of its `Hello`, and the key that it proved; None where no key is required."""
Owner: TypeAlias = ClientId | str
"""Whom a request counts for: its client, or the caller that a gateway named."""


class RunMember(NamedTuple):
    """One request of a batch."""

    arrived: float
    number: int
    """The scheduler's id."""
    client: ClientId
    sequence: int
    sizes: tuple[int, ...]
    own_id: str | None
    """The id that its user gave it."""
    caller: str | None
    """The caller that a gateway named."""
    traceparent: str | None
    """Its place in a trace, as its client gave it."""

    @property
    def trace(self) -> str | None:
        """Return the 32 hexadecimal digits that name its trace."""
        return trace_id(self.traceparent)

    def is_called(self, text: str) -> bool:
        """Tell whether its user knows it by this id, or by this trace."""
        if self.own_id == text:
            return True
        return self.traceparent is not None and text in self.traceparent and self.trace == text

    @property
    def owner(self) -> Owner:
        """Return whom the request counts for."""
        return self.client if self.caller is None else self.caller

    @property
    def id(self) -> str:
        """Return the id by which its user knows it."""
        return self.own_id or f"{self.client[0].hex()}-{self.sequence}"


class Run(NamedTuple):
    """One run of a batch, as observers remember it: numbers, ids and times, neither tensors nor sessions."""

    batch: int
    model: str
    requests: tuple[int, ...]
    """The scheduler's ids; none for an audit."""
    sizes: tuple[int, ...]
    behind: int | None
    facts: CutFacts
    slot: str
    sent: float
    began: float
    """`inf` if it did not begin: it was queued at the slot, or its request was left out of the call."""
    ended: float
    """`inf` while it runs; `nan` if it went on after its request had ended, and its end was forgotten."""
    gather_us: int
    """Microseconds before and between its calls; `run_us`: of the calls; `busy_us`: of all that it held its slot for."""
    run_us: int
    busy_us: int
    reallocations: int
    preparations: int
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    code: str | None
    """The code of a run that failed."""
    owners: Mapping[int, Owner]
    """The owners of all its requests, by the scheduler's ids, if it answered none; else empty."""
    ran: int
    """Requests that were in its calls."""
    rows: int
    useful: int
    """Elements of the requests that ran."""
    members: Sequence[RunMember]
    """The requests that it answered."""

    @property
    def split_us(self) -> int:
        """Return the microseconds for its results, after and between its calls."""
        return max(0, self.busy_us - self.gather_us - self.run_us)

    @property
    def own_calls(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the number and sizes of its calls."""
        return self.calls or ((1, self.sizes),)

    @property
    def computed(self) -> int:
        """Return the elements that its calls computed."""
        return sum([count * prod(sizes) for count, sizes in self.own_calls])

    @property
    def padding_ratio(self) -> float:
        """Return the share of computed elements that are padding."""
        computed = self.computed
        return round(min(1.0, self.facts.padding / computed), 4) if computed else 0.0
