"""Whatever the workers, the order of things and the poisons: two deaths per poison at most, every innocent is answered."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pipeline.scheduling.seen import CancelAsked, RecallAsked, Started
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.events import (
    BatchFailed,
    BatchFinished,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
)


class World:
    """Workers that start again whenever they die, which they do when, and as long as, a poison runs in them."""

    def __init__(
        self, seed: int, poisons: set[int], slots_of_workers: list[int], prefetch_s: float | None
    ) -> None:
        self.random = Random(seed)
        self.poisons = poisons
        self.prefetch_s = prefetch_s
        self.stage = Stage()
        self.stage.model(max_batch=4)
        self.numbers = 0
        self.held: dict[int, list[Started]] = {}
        """By slot, what runs there, and what waits behind it."""
        self.recalled: list[Started] = []
        self.workers: dict[str, list[int]] = {}
        self.deaths: list[int] = []
        """The poisons that killed a worker."""
        for slots in slots_of_workers:
            self._join(slots)

    def play(self, event) -> None:
        """One event, and what it starts and takes back."""
        for action in self.stage.play(event, at=self.stage.now + 0.02):
            match action:
                case Started():
                    self.held[action.slot].append(action)
                case RecallAsked():
                    self.recalled.append(
                        next(start for start in self.held[action.slot] if start.batch == action.batch)
                    )
                case CancelAsked():
                    raise AssertionError("nobody withdrew anything")
                case _:
                    pass

    def arrive(self, requests: int) -> None:
        """Requests arrive, all alike."""
        self.stage.arrive(*[(1, 4)] * requests, at=self.stage.now + 0.02)
        for action in self.stage.last:
            if isinstance(action, Started):
                self.held[action.slot].append(action)

    def _join(self, slots: int) -> None:
        name = f"w{self.numbers}"
        numbers = range(self.numbers, self.numbers + slots)
        self.numbers += slots
        self.workers[name] = list(numbers)
        self.held.update({number: [] for number in numbers})
        costs = {"text": table(0.096, 0.001, key="slot")}
        joined = [
            SlotJoined(
                slot=number, models=frozenset({"text"}), worker=name, costs=costs, prefetch_s=self.prefetch_s
            )
            for number in numbers
        ]
        self.play(SlotsJoined(slots=tuple(joined)))

    def step(self) -> bool:
        """Something happens; False when nothing can any more."""
        moves = [lambda start=start: self._give_back(start) for start in self.recalled]
        for slot, held in self.held.items():
            if held:
                moves.append(lambda slot=slot: self._finish(slot))
        if not moves:
            return False
        self.random.choice(moves)()
        return True

    def _give_back(self, start: Started) -> None:
        self.recalled.remove(start)
        if start in self.held[start.slot][1:]:  # or it began meanwhile
            self.held[start.slot].remove(start)
            self.play(BatchFailed(batch=start.batch, code="recalled", message="as asked"))

    def _finish(self, slot: int) -> None:
        """The slot's batch ends, by its report or by the death of all that is beside it."""
        name = next(name for name, slots in self.workers.items() if slot in slots)
        begun = [held[0] for held in map(self.held.get, self.workers[name]) if held]
        # The batch before it may have ended without a word.
        begun += [held[1] for held in map(self.held.get, self.workers[name]) if held and len(held) > 1]
        killers = sorted(
            self.poisons & {id_ for start in begun[: self.random.randint(1, 8)] for id_ in start.requests}
        )
        if killers:
            self._die(name, killers[0])
        elif not self.poisons & set(self.held[slot][0].requests):
            start = self.held[slot].pop(0)
            self.play(BatchFinished(batch=start.batch, busy_s=0.1))

    def _die(self, name: str, killer: int) -> None:
        self.deaths.append(killer)
        slots = self.workers.pop(name)
        for slot in slots:
            self.play(SlotClosing(slot=slot))
        self.recalled = [start for start in self.recalled if start.slot not in slots]
        for slot in slots:
            del self.held[slot]
            self.play(SlotLeft(slot=slot, died=True))
        self._join(len(slots))


@given(
    st.integers(0, 1 << 30),
    st.sets(st.integers(1, 40), max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.sampled_from([None, 0.01, 5.0]),
    st.lists(st.integers(1, 10), min_size=1, max_size=4),
)
@example(0, {2}, [1], 5.0, [8])
def test_two_deaths_per_poison_and_every_innocent_is_answered(
    seed, poisons, slots, prefetch_s, arrivals
) -> None:
    """Several workers of several slots, batches sent ahead, ends that were never reported."""
    world = World(seed, poisons, slots, prefetch_s)
    for requests in arrivals:
        world.arrive(requests)
        for _ in range(world.random.randint(0, 6)):
            world.step()
    for _ in range(1000):
        if not world.step():
            break
    total = sum(arrivals)
    expected = {id_: "poisoned" if id_ in poisons else "delivered" for id_ in range(1, total + 1)}
    assert expected == world.stage.ends
    assert all(world.deaths.count(poison) <= 2 for poison in poisons)
    assert world.stage.scheduler.statistics().slots_reserved == 0


@pytest.mark.parametrize("slots", [1, 4])
def test_a_crowd_of_poisons_is_found_one_by_one(slots) -> None:
    """Each is killed for once in company, if at all, and once alone."""
    world = World(1, set(range(1, 13)), [slots], None)
    world.arrive(12)
    while world.step():
        pass
    assert dict.fromkeys(range(1, 13), "poisoned") == world.stage.ends
    assert len(world.deaths) <= 12 + 3
