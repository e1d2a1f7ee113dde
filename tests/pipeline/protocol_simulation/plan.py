"""One run of the simulated world, written down beforehand: who is there, who asks what when, and what goes wrong when.

Plain data, so that hypothesis can make it up, and make it small again once it has found something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from hypothesis import strategies as st

from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def _model(name: str) -> ModelSignature:
    """Padded along `n`, so that requests of different lengths share calls."""
    shape = NamedShape.parse("batch:1..8, n:1..16")
    return ModelSignature(
        name=name,
        inputs=(InputPort("x", "i64", shape, pad={"n": 0}),),
        outputs=(OutputPort("y", "i64", NamedShape.parse("batch, n"), Rows()),),
    )


COMMON, RARE = _model("common"), _model("rare")
"""Every worker serves the first; the second, the first worker alone."""


class _Named(Enum):
    """As hypothesis prints it, it can be pasted back."""

    def __repr__(self) -> str:
        return str(self)


class Kind(_Named):
    """What a request does to the process that runs it."""

    GOOD = "good"
    BAD = "bad"
    """The model refuses it."""
    POISON = "poison"
    """The process dies."""
    STUCK = "stuck"
    """The call ends only when it is cancelled."""
    HANGING = "hanging"
    """The call never ends."""


DEADLY = (Kind.POISON, Kind.STUCK, Kind.HANGING)


class FaultKind(_Named):
    """What goes wrong. `target` numbers clients, or workers: those of the server first, then those that dial in."""

    CUT_CLIENT = "the connection breaks"
    HOLD_CLIENT = "nothing arrives for a while, then all of it"
    SWALLOW_CLIENT = "half open: all vanishes until the client gives the connection up"
    DOUBLE_CLIENT = "messages arrive twice"
    KILL_CLIENT = "the client is killed, and another takes its place"
    CUT_WORKER = "the worker's connection breaks"
    HOLD_WORKER = "nothing arrives at or from the worker for a while"
    SWALLOW_WORKER = "the worker's connection is half open"
    DOUBLE_WORKER = "what the worker says arrives twice"
    KILL_WORKER = "the worker is killed"
    STOP_WORKER = "the worker is asked to end"
    REPLACE_WORKER = "the worker wants to be replaced"
    RESTART_WORKERS = "all workers of the server, or all guests, are replaced, one after the other or at once"
    SLOW_WORKER = "the worker takes ten times as long"
    KILL_SERVER = "the server is killed, and its own workers with it"
    DRAIN_SERVER = "the server is asked to end, and started anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, or several that are alike."""

    at_s: float
    client: int = 0
    rare: bool = False
    rows: int = 1
    length: int = 1
    timeout_s: float | None = None
    cancel_after_s: float | None = None
    priority: int = 0
    kind: Kind = Kind.GOOD
    times: int = 1
    """So many of them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; `lasting_s` where it lasts, or how long the dead are away."""

    at_s: float
    kind: FaultKind
    target: int = 0
    lasting_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the top of this module. Times are seconds from the beginning."""

    seed: int = 0
    """Of everything that the plan leaves open: the network's jitter, who loses what when killed, …"""
    clients: int = 1
    own_workers: int = 1
    """Started by the server, which knows their processes."""
    guests: int = 0
    """Workers that dial in and live on when the server dies; something else restarts them."""
    slots: int = 1
    call_s: float = 0.02
    """What a call takes, and `row_s` for each of its rows."""
    row_s: float = 0.002
    delay_s: float = 0.0005
    jitter_s: float = 0.0
    capacity: int = 1024
    asks: tuple[Ask, ...] = ()
    faults: tuple[Fault, ...] = ()
    window_requests: int = 64
    max_queued_requests: int = 512

    @property
    def troubled_until_s(self) -> float:
        """When the last that was planned is over."""
        ends = [fault.at_s + fault.lasting_s for fault in self.faults] + [ask.at_s for ask in self.asks]
        return max(ends, default=0.0)

    @property
    def deadly(self) -> int:
        """How many requests do harm."""
        return sum(ask.times for ask in self.asks if ask.kind in DEADLY)


_times = st.integers(0, 200).map(lambda number: number / 20)
_short = st.sampled_from((0.01, 0.05, 0.2, 1.0, 4.0, 15.0))


def _asks(kinds: st.SearchStrategy[Kind]) -> st.SearchStrategy[tuple[Ask, ...]]:
    one = st.builds(
        Ask,
        at_s=_times,
        client=st.integers(0, 2),
        rare=st.booleans(),
        rows=st.integers(1, 8),
        length=st.integers(1, 16),
        timeout_s=st.none() | _short,
        cancel_after_s=st.none() | st.sampled_from((0.0, 0.03, 0.5)),
        priority=st.integers(0, 1),
        kind=kinds,
        # Much of what servers meet comes in bursts, and faults hit where much is under way.
        times=st.sampled_from((1, 1, 2, 5, 12)),
    )
    return st.lists(one.map(_bearable), min_size=1, max_size=8).map(tuple)


def _bearable(ask: Ask) -> Ask:
    """Not so many that hang, one after the other, that nothing else is played for long."""
    return replace(ask, times=min(ask.times, 2)) if ask.kind in DEADLY else ask


_kinds = st.sampled_from([Kind.GOOD] * 12 + [Kind.BAD] * 2 + [Kind.POISON, Kind.STUCK, Kind.HANGING])

_faults = st.lists(
    st.builds(
        Fault,
        at_s=_times,
        kind=st.sampled_from(FaultKind),
        target=st.integers(0, 2),
        lasting_s=st.sampled_from((0.05, 0.5, 2.0, 5.0, 12.0)),
    ),
    max_size=6,
).map(tuple)


def _worlds(
    asks: st.SearchStrategy[tuple[Ask, ...]], faults: st.SearchStrategy[tuple[Fault, ...]]
) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        seed=st.integers(0, 2**16),
        clients=st.integers(1, 3),
        own_workers=st.integers(1, 2),
        guests=st.integers(0, 1),
        slots=st.integers(1, 2),
        call_s=st.sampled_from((0.02, 0.001, 0.3)),
        row_s=st.sampled_from((0.002, 0.0)),
        delay_s=st.sampled_from((0.0005, 0.0, 0.02)),
        jitter_s=st.sampled_from((0.0, 0.0005, 0.1)),
        capacity=st.sampled_from((1024, 6)),
        window_requests=st.sampled_from((64, 2)),
        max_queued_requests=st.sampled_from((512, 6)),
        asks=asks,
        faults=faults,
    )


plans = _worlds(_asks(_kinds), _faults)
"""Anything may go wrong."""
harmful_plans = _worlds(_asks(_kinds), st.just(())).map(lambda plan: replace(plan, guests=0))
"""Nothing goes wrong but what requests do to workers that the server knows as its own processes."""
calm_plans = _worlds(_asks(st.sampled_from((Kind.GOOD, Kind.GOOD, Kind.BAD))), st.just(()))
"""Nothing goes wrong."""
