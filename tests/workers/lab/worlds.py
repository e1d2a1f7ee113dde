"""Small worlds for the tests of the lab."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shapestream.scheduling.actions import Action
from shapestream.scheduling.events import Event, ModelProfile
from shapestream.scheduling.scheduler import Scheduler
from shapestream.telemetry.trace import TraceRequest, header_line, request_line
from shapestream_workers.lab.simulator import Policy, Scenario, Simulated, simulate
from shapestream_workers.lab.true_cost import FormulaCost


def write_trace(
    path: Path, requests: Iterable[TraceRequest], models: Mapping[str, tuple[str, ...]] | None = None
) -> Path:
    """A trace file, by default of the model m alone."""
    lines = [header_line(models or {"m": ("batch", "seq")}), *map(request_line, requests)]
    path.write_text("".join(lines))
    return path


def profile(name: str = "m", **fields: Any) -> ModelProfile:
    """A model with rows and one dimension that may be padded."""
    given: dict[str, Any] = {
        "dimensions": ("batch", "seq"),
        "has_batch": True,
        "paddable": (True, True),
        "max_batch": 16,
        **fields,
    }
    return ModelProfile(name=name, **given)


class CheckedScheduler:
    """The server's own, whose books are checked after every so many events."""

    def __init__(self, max_queued_requests: int = 100_000, *, every: int = 100) -> None:
        self._scheduler = Scheduler(max_queued_requests=max_queued_requests, max_queued_bytes=1 << 40)
        self._handled, self._every = 0, every
        self.next_wakeup, self.statistics = self._scheduler.next_wakeup, self._scheduler.statistics

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide, and check."""
        actions = self._scheduler.handle(event, now)
        self._handled += 1
        if self._handled % self._every == 0:
            self._scheduler.check_invariants()
        return actions


def play(
    policy: Policy,
    requests: Iterable[TraceRequest],
    *,
    slots: int = 1,
    fixed_s: float = 0.003,
    per_element_s: float = 0.00013,
    profiles: list[ModelProfile] | None = None,
    in_flight: int | None = None,
    speeds: tuple[float, ...] = (1.0,),
    calibrated: bool = True,
    prepare_s: float = 0.0,
    **truth: Any,
) -> Simulated:
    """A simulation with one formula for all models."""
    models = profiles or [profile()]
    cost = FormulaCost(
        fixed_s=fixed_s, per_element_s=per_element_s, prepare_s=prepare_s, largest=(16, 256, 256)
    )
    costs = {model.name: cost for model in models}
    scenario = Scenario(
        profiles=models,
        costs=costs,
        traffic=requests,
        believed=costs if calibrated else {},
        slots=slots,
        speeds=speeds,
        in_flight=in_flight,
        **truth,
    )
    return simulate(policy, scenario)
