"""A stage for the scheduler: plays events at a time that the test sets, and checks the books after each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from tests.pipeline.scheduling.seen import Delivered, Failed, Forgotten, Seen, Started, seen

from shapestream.scheduling import Scheduler
from shapestream.scheduling.actions import ReportFault
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    Event,
    ModelAdded,
    ModelProfile,
    RequestsArrived,
    SlotJoined,
    SlotsJoined,
    TimePassed,
)
from shapestream_engine.cost_table import CostPoint, CostTable


def table(
    call_s: float, token_s: float, *, key: str = "slot", dimensions: tuple[str, ...] = ("batch", "seq")
) -> CostTable:
    """Measured costs: a fixed part per call and a part per element; along (batch, seq), or one dimension."""
    grid = [(rows, seq) for rows in (1, 2, 4, 8, 16, 32, 64) for seq in (1, 4, 8, 16, 32, 64, 128, 256)]
    points = [(sizes[2 - len(dimensions) :], call_s + token_s * sizes[0] * sizes[1]) for sizes in grid]
    if len(dimensions) == 1:
        points = [((seq,), call_s + token_s * seq) for rows, seq in grid if rows == 1]
    return CostTable(
        key=key,
        dimensions=dimensions,
        points=tuple(CostPoint(sizes=sizes, seconds=seconds) for sizes, seconds in points),
    )


class Stage:
    """A scheduler, its time, and what it last wanted done."""

    def __init__(self, max_queued_requests: int = 1000, max_queued_bytes: int = 10**9, **limits: Any) -> None:
        self.scheduler = Scheduler(max_queued_requests, max_queued_bytes, **limits)
        self.now = 0.0
        self.last: list[Seen] = []
        self.played: list[list[Seen]] = []
        """What every event led to."""
        self.started: list[Started] = []
        self.ends: dict[int, str] = {}
        self.finished: set[int] = set()
        """The batches that were reported."""
        self.faults: list[ReportFault] | None = None
        """What could not be worked out; None: that is a defect."""
        self._ids = count(1)

    def play(self, event: Event, *, at: float | None = None) -> list[Seen]:
        """Handles one event, notes starts and endings, and checks the invariants."""
        self.now = self.now if at is None else at
        self.last = seen(self.scheduler.handle(event, self.now))
        self.played.append(self.last)
        for action in self.last:
            match action:
                case Started():
                    self.started.append(action)
                case Delivered():
                    for id_ in action.requests:
                        self._end(id_, "delivered")
                case Failed():
                    self._end(action.id, action.code)
                case Forgotten():
                    self._end(action.id, "forgotten")
                case ReportFault() if self.faults is None:
                    raise action.error
                case ReportFault():
                    self.faults.append(action)
        self.scheduler.check_invariants()
        return self.last

    def _end(self, id_: int, how: str) -> None:
        assert id_ not in self.ends, f"request {id_} ended twice"
        self.ends[id_] = how

    def model(self, name: str = "text", padded: bool | Sequence[bool] = False, **options: Any) -> None:
        """Adds a model with dimensions batch and, by default, seq."""
        dimensions = options.pop("dimensions", ("batch", "seq"))
        has_batch = dimensions[:1] == ("batch",)
        rest = len(dimensions) - has_batch
        flags = (padded,) * rest if isinstance(padded, bool) else tuple(padded)
        profile = ModelProfile(
            name=name,
            dimensions=dimensions,
            has_batch=has_batch,
            paddable=(False,) * has_batch + flags,
            max_batch=options.pop("max_batch", 8),
            **options,
        )
        self.play(ModelAdded(model=profile))

    def slots(self, *ids: int, models: Sequence[str] = ("text",), **options: Any) -> None:
        """Lets slots join, one after the other."""
        for id_ in ids:
            self.play(SlotJoined(slot=id_, models=frozenset(models), **options))

    def arrive(self, *sizes: tuple[int, ...], at: float | None = None, **options: Any) -> list[int]:
        """Requests of these sizes arrive in one turn; their ids, numbered from 1."""
        arrivals = [
            Arrival(
                id=next(self._ids),
                client=options.get("client", 0),
                model=options.get("model", "text"),
                sizes=size,
                nbytes=options.get("nbytes", 10),
                deadline=options.get("deadline"),
                priority=options.get("priority", 0),
                since=options.get("since"),
                then=options.get("then", ()),
                suspect=options.get("suspect", False),
                group=options.get("group"),
                submitted=options.get("submitted", 1),
            )
            for size in sizes
        ]
        self.play(RequestsArrived(requests=tuple(arrivals)), at=at)
        return [arrival.id for arrival in arrivals]

    def finish(self, start: Started, run_s: float | None = None, **options: Any) -> list[Seen]:
        """A batch ran. Without `run_s` nothing is learned from it: its shape was new to the device."""
        at = options.pop("at", None)
        self.finished.add(start.batch)
        if run_s is None:
            options.setdefault("preparations", 1)
        return self.play(BatchFinished(batch=start.batch, busy_s=run_s or 0.0, **options), at=at)

    def fail(self, start: Started, code: str = "model_error", message: str = "bad data") -> list[Seen]:
        """A batch failed."""
        return self.play(BatchFailed(batch=start.batch, code=code, message=message))

    def wait(self, until: float) -> list[Seen]:
        """Time passes."""
        return self.play(TimePassed(), at=until)

    def repeat_ids(self) -> None:
        """Numbers what arrives from 1 again, as a broken caller would."""
        self._ids = count(1)

    def measured_slots(
        self, *ids: int, call_s: float = 0.096, token_s: float = 0.001, **options: Any
    ) -> None:
        """Lets slots join together, with measured costs of the model `text`; by default a row of 4 takes 0.1 s."""
        costs = {"text": table(call_s, token_s, key=options.pop("key", "slot"))}
        joined = [SlotJoined(slot=id_, models=frozenset({"text"}), costs=costs, **options) for id_ in ids]
        self.play(SlotsJoined(slots=tuple(joined)))

    def starts(self) -> list[tuple[int, ...]]:
        """The members of the batches that the last event started."""
        return [action.requests for action in self.last if isinstance(action, Started)]
