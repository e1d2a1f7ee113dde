"""Every predicted price is tried: whatever was measured, and whatever changes, calls are shared where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from tests.workers.lab.worlds import CheckedScheduler

from shapestream.scheduling.actions import Action, StartBatch
from shapestream.scheduling.events import Event, InputBytes, ModelProfile
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.simulate import figures_of
from shapestream_workers.lab.simulator import Policy, Scenario, simulate
from shapestream_workers.lab.true_cost import FormulaCost, TrueCost

Sizes = tuple[int, ...]
LENGTH = 16
POINTS: tuple[Sizes, ...] = ((1, LENGTH), (4, LENGTH), (16, LENGTH), (64, LENGTH))

FLAT = FormulaCost(fixed_s=1.0)
QUICKER = FormulaCost(fixed_s=0.3)
STEPS = FormulaCost(per_row_s=0.05, step_rows=4)
NOT_FULL = FormulaCost(per_row_s=0.02, full_rows=32)
LINEAR = FormulaCost(per_row_s=0.1)


@dataclass(slots=True, kw_only=True, eq=False)
class Measured(TrueCost):
    """A truth of which a calibration measured some points, and which is another one after so many calls."""

    truth: TrueCost
    points: Sequence[Sizes] = ()
    then: TrueCost | None = None
    calls: int = 0
    ran: int = 0

    def seconds(self, sizes: Sizes) -> float:
        """Seconds of the next call."""
        self.ran += 1
        return self._seconds(sizes)

    def _seconds(self, sizes: Sizes) -> float:
        return (self.truth if self.then is None or self.ran <= self.calls else self.then).seconds(sizes)

    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """The points, as they were at first."""
        points = tuple(CostPoint(sizes=sizes, seconds=self.truth.seconds(sizes)) for sizes in self.points)
        return CostTable(key=profile_key, dimensions=dimensions, points=points)


class Watched(CheckedScheduler):
    """Notes the requests of every batch, and what batches were predicted to take and took until then."""

    def __init__(self) -> None:
        super().__init__(every=25)
        self.members: list[int] = []
        self.seconds: list[tuple[float, float]] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide, and note."""
        actions = super().handle(event, now)
        for action in actions:
            if isinstance(action, StartBatch):
                self.members += [len(batch.arrivals) for batch in action.batches]
                (model,) = self.statistics().models
                self.seconds.append((model.predicted_s, model.measured_s))
        return actions


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A closed loop of equal requests on one slot."""

    cost: Callable[[], Measured]
    requests: int = 400
    in_flight: int = 32
    noise: float = 0.0
    deadline_s: float | None = None
    profile: dict[str, Any] = field(default_factory=dict)

    def play(self, policy: Policy) -> dict[str, float]:
        """The figures under a policy."""
        given = {"bounds": (16, 256), "max_batch": 16, "paddable": (False, True), **self.profile}
        model = ModelProfile(name="m", dimensions=("batch", "seq"), has_batch=True, **given)
        cost = self.cost()
        requests = [TraceRequest(0.0, 0, 0, (1, LENGTH), self.deadline_s, 0)] * self.requests
        scenario = Scenario(
            profiles=[model],
            costs={"m": cost},
            traffic=requests,
            believed={"m": cost} if cost.points else {},
            in_flight=self.in_flight,
            noise=self.noise,
            way_s=0.25e-3,
        )
        return figures_of(simulate(policy, scenario))


def measured(truth: TrueCost, points: int, **more: Any) -> Callable[[], Measured]:
    """So many of `POINTS`, the smallest first."""
    return lambda: Measured(truth=truth, points=POINTS[:points], **more)


INPUTS = (InputBytes(nbytes=4, axes=(0, 1)),)
CAPPED = {"max_shapes": 8, "fills_rows": True, "paddable": (True, True)}


@pytest.mark.parametrize("points", [0, 1, 2, 4])
@pytest.mark.parametrize("truth", [FLAT, QUICKER, STEPS, NOT_FULL])
def test_heavy_calls_are_shared(truth: TrueCost, points: int) -> None:
    """Whatever was measured: at least 0.8 times the rate of fixed batches of 16, the first batches included."""
    world = World(cost=measured(truth, points))
    watched = Watched()
    fixed = world.play(PlainServer(16))["goodput"]
    assert world.play(watched)["goodput"] >= 0.8 * fixed
    if truth is not STEPS:  # batches of 4 are as good there
        assert max(watched.members[:5]) >= 10


@pytest.mark.parametrize("points", [1, 2, 4])
@pytest.mark.parametrize("truth", [FLAT, QUICKER, STEPS, NOT_FULL])
def test_heavy_calls_are_shared_under_a_cap_on_shapes(truth: TrueCost, points: int) -> None:
    """The same where call shapes are rounded up to at most eight."""
    world = World(cost=measured(truth, points), profile=CAPPED)
    fixed = world.play(PlainServer(16))["goodput"]
    assert world.play(Watched())["goodput"] >= 0.8 * fixed


@pytest.mark.parametrize("points", [1, 2, 4])
def test_sixteen_in_flight_share_their_calls(points: int) -> None:
    """All that is in flight goes in one call: 29 answers in 30 s became as many as with fixed batches of 16."""
    world = World(cost=measured(FLAT, points), in_flight=16)
    fixed = world.play(PlainServer(16))["goodput"]
    assert world.play(Watched())["goodput"] >= 0.8 * fixed


@pytest.mark.parametrize("in_flight", [8, 16, 32])
@pytest.mark.parametrize("truth", [FLAT, QUICKER])
def test_two_waves_join(truth: TrueCost, in_flight: int) -> None:
    """Batches have room for more than is in flight, so that only the slot can bring both waves together."""
    world = World(
        cost=measured(truth, 1),
        in_flight=in_flight,
        requests=40 * in_flight,
        profile={"max_batch": 64, "bounds": (64, 256)},
    )
    fixed = world.play(PlainServer(in_flight))["goodput"]
    assert world.play(Watched())["goodput"] >= 0.9 * fixed


def test_one_length_that_was_measured_says_little_about_others() -> None:
    """One call of 8 tokens was measured, and all requests have 16."""
    world = World(cost=lambda: Measured(truth=FLAT, points=((1, 8),)))
    fixed = world.play(PlainServer(16))["goodput"]
    assert world.play(Watched())["goodput"] >= 0.8 * fixed


@dataclass(slots=True, kw_only=True, eq=False)
class Cliff(TrueCost):
    """A call of more than four rows takes twenty times as long per row."""

    def _seconds(self, sizes: Sizes) -> float:
        return 0.02 + 0.01 * sizes[0] * (1 if sizes[0] <= 4 else 20)

    def calibration(self, profile_key: str, dimensions: tuple[str, ...], max_batch: int) -> CostTable:
        """Never asked for."""
        raise NotImplementedError


CHANGES = {
    "slower": (QUICKER, FormulaCost(fixed_s=3.0)),
    "faster": (FormulaCost(fixed_s=3.0), QUICKER),
    "slower, linear": (LINEAR, FormulaCost(per_row_s=1.0)),
    "faster, linear": (FormulaCost(per_row_s=1.0), LINEAR),
    "all slope, then all fixed": (LINEAR, FormulaCost(fixed_s=0.1)),
    "all slope, then as much fixed": (LINEAR, FormulaCost(fixed_s=1.6)),
    "all fixed, then all slope": (FormulaCost(fixed_s=0.1), LINEAR),
    "all alike, then a cliff": (FormulaCost(fixed_s=0.02, per_row_s=0.01), Cliff()),
}
BEFORE = 40
WITHIN = 50
CASES = [
    (change, points)
    for change, points in product(CHANGES, (0, 1, 4))
    if points or change != "all alike, then a cliff"  # no line has a cliff
]


@pytest.mark.parametrize(("change", "points"), CASES)
@pytest.mark.parametrize("noise", [0.0, pytest.param(0.1, marks=pytest.mark.thorough)])
def test_a_change_is_known_within_50_batches(change: str, points: int, noise: float) -> None:
    """Costs that change tenfold, or whose fixed part comes or goes: batches are as good again, and so are prices."""
    first, second = CHANGES[change]
    watched = Watched()
    World(cost=measured(first, points, then=second, calls=BEFORE), requests=3000, noise=noise).play(watched)
    after = watched.members[BEFORE + WITHIN :][:40]
    best = max(rows / second.seconds((rows, LENGTH)) for rows in range(1, 17))
    took_s = sum([second.seconds((rows, LENGTH)) for rows in after])
    assert sum(after) / took_s >= 0.9 * best
    ends = watched.seconds[BEFORE + WITHIN], watched.seconds[BEFORE + WITHIN + len(after) - 1]
    predicted_s, ran_s = (end - begin for begin, end in zip(*ends, strict=True))
    assert 1.0 == pytest.approx(predicted_s / ran_s, rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("points", [1, 4])
def test_honest_linear_models_lose_nothing(points: int, noise: float) -> None:
    """Where sharing does not pay, tries cost 2 % of the answers at most."""
    world = World(cost=measured(LINEAR, points), requests=1000, noise=noise)
    alone = world.play(PlainServer(1))["goodput"]
    assert world.play(Watched())["goodput"] >= 0.98 * alone


def test_what_turned_out_bad_is_not_tried_often() -> None:
    """Batches beyond the cliff together take 3 % of the time at most, those before any was seen left out."""
    watched = Watched()
    World(cost=measured(Cliff(), 2), requests=20_000).play(watched)
    truth = Cliff()
    batches = watched.members[10:]
    beyond_s = sum([truth.seconds((rows, LENGTH)) for rows in batches if rows > 4])
    assert 0.0 < beyond_s <= 0.03 * sum([truth.seconds((rows, LENGTH)) for rows in batches])


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"max_batch": 4}, 4), ({"inputs": INPUTS, "max_batch_bytes": 6 * LENGTH * 4}, 6)],
    ids=["max_batch", "max_batch_bytes"],
)
def test_tries_keep_the_limits_of_a_batch(limits: dict[str, Any], most: int) -> None:
    """No try is larger than a batch may be."""
    watched = Watched()
    World(cost=measured(FLAT, 1), profile=limits).play(watched)
    assert most == max(watched.members)


def test_tries_make_nobody_late() -> None:
    """Two rows take longer than requests have time, by all that is known: then no two share a call."""
    rows = []
    for deadline_s in (None, 0.19):
        watched = Watched()
        World(cost=measured(LINEAR, 2), in_flight=4, deadline_s=deadline_s, requests=300).play(watched)
        rows.append(set(watched.members))
    assert [{1, 2}, {1}] == rows
