"""Suspects that clients name, on slots in the server's process: nothing else runs there, and their clients know before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.seen import Failed, LoneRunTold, RecallAsked, Started
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.events import LoneRunKnown, RequestCancelled, SlotClosing, SlotLeft


def _told(stage) -> list[int]:
    """The requests whose clients the last event told."""
    return [action.id for action in stage.last if isinstance(action, LoneRunTold)]


def _running(stage) -> list[Started]:
    return [start for start in stage.started if start.batch not in stage.finished]


def _serve(stage, count: int, wait_s: float = 0.0) -> list[int]:
    """Let so many requests end, one batch after the other, of 0.1 s each. Clients answer after `wait_s`. The order."""
    order: list[int] = []
    known: set[int] = set()
    while len(stage.ends) < count:
        told = [
            action.id for actions in stage.played for action in actions if isinstance(action, LoneRunTold)
        ]
        for id_ in told:
            if id_ not in known:
                known.add(id_)
                stage.now += wait_s
                stage.play(LoneRunKnown(id=id_))
        assert _running(stage), "nothing runs, and something waits"
        start = min(_running(stage), key=lambda start: start.batch)
        order.extend(start.requests)
        stage.now += 0.1
        stage.finish(start, 0.1)
    return order


def test_a_suspect_begins_when_its_client_knows(stage):
    """Until then nothing begins; meanwhile, and afterwards, all slots are as before."""
    stage.model(max_batch=4)
    stage.slots(0, 1, worker="local", in_server=True)
    stage.arrive((1, 4), suspect=True)
    assert ([1], []) == (_told(stage), stage.starts())
    stage.arrive((1, 4), (1, 4))
    assert ([], []) == (_told(stage), stage.starts())
    stage.play(LoneRunKnown(id=1))
    assert [(1,)] == stage.starts()
    stage.arrive((1, 4))
    assert [] == stage.starts()
    stage.finish(_running(stage)[0])
    assert {1: "delivered"} == stage.ends
    assert [2, 3, 4] == sorted(id_ for members in stage.starts() for id_ in members)


def test_what_runs_ends_before_a_suspect_is_told_of(stage):
    """A loss before that would not be its own."""
    stage.model()
    stage.slots(0, 1, worker="local", in_server=True)
    stage.arrive((1, 4))
    stage.arrive((1, 4), suspect=True)
    assert ([], []) == (_told(stage), stage.starts())
    stage.finish(_running(stage)[0])
    assert [2] == _told(stage)


def test_suspects_run_one_after_the_other(stage):
    """Each shares no call, though their sizes are equal, and waits until its own client knows."""
    stage.model(max_batch=8)
    stage.slots(0, 1, worker="local", in_server=True)
    stage.arrive(*[(1, 4)] * 5, suspect=True)
    for id_ in range(1, 6):
        assert [id_] == _told(stage)
        stage.play(LoneRunKnown(id=id_))
        assert [(id_,)] == stage.starts()
        stage.finish(_running(stage)[0])
    assert dict.fromkeys(range(1, 6), "delivered") == stage.ends


def test_a_suspect_waits_for_its_turn(stage):
    """A client that names all its requests as suspects gets no more of the slots than another one."""
    stage.model(max_batch=1)
    stage.measured_slots(0, worker="local", in_server=True)
    stage.arrive(*[(1, 4)] * 8, suspect=True, client=1)
    stage.arrive(*[(1, 4)] * 8, client=2)
    order = _serve(stage, 16)
    assert 4 <= sum(id_ <= 8 for id_ in order[:10]) <= 6


def test_a_client_pays_for_the_time_in_which_it_is_waited_for(stage):
    """While the slots wait for its word they do nothing for others: these get as much time afterwards."""
    stage.model(max_batch=1)
    stage.measured_slots(0, worker="local", in_server=True)
    stage.arrive(*[(1, 4)] * 4, suspect=True, client=1)
    stage.arrive(*[(1, 4)] * 20, client=2)
    order = _serve(stage, 24, wait_s=0.9)
    places = [place for place, id_ in enumerate(order) if id_ <= 4]
    assert places[1] - places[0] >= 8, order


def test_a_suspect_in_a_worker_of_another_process_needs_no_word(stage):
    """That process outlives the server's, and its death is counted here: the suspect shares no call, and that is all."""
    stage.model(max_batch=8)
    stage.slots(0, worker="w")
    stage.arrive((1, 4))
    stage.arrive((1, 4), (1, 4), suspect=True)
    stage.arrive((1, 4), (1, 4))
    while _running(stage):
        stage.finish(_running(stage)[0])
    assert [] == [action for actions in stage.played for action in actions if isinstance(action, LoneRunTold)]
    assert [(1,), (2,), (3,), (4, 5)] == sorted(start.requests for start in stage.started)


def test_a_suspect_that_ends_before_it_begins_lets_the_slots_go(stage):
    """Its client has withdrawn it; what the client says later changes nothing."""
    stage.model()
    stage.slots(0, worker="local", in_server=True)
    stage.arrive((1, 4), suspect=True)
    stage.arrive((1, 4))
    stage.play(RequestCancelled(id=1))
    assert [(2,)] == stage.starts()
    assert [] == stage.play(LoneRunKnown(id=1))


def test_a_suspect_whose_deadline_passes_before_it_begins_ends(stage):
    """It is not told of twice, and does not begin late."""
    stage.model()
    stage.slots(0, worker="local", in_server=True)
    stage.arrive((1, 4), suspect=True, deadline=1.0)
    stage.wait(1.0)
    assert [(1, "deadline_exceeded")] == [(end.id, end.code) for end in stage.last if isinstance(end, Failed)]
    stage.play(LoneRunKnown(id=1))
    assert [] == stage.started


@pytest.mark.parametrize("suspects", [1, 3])
def test_nothing_is_queued_behind_what_runs_once_a_suspect_has_the_turn(stage, suspects):
    """What runs ends, and what was queued behind it before; then the suspect is next, with nothing behind it."""
    stage.model(max_batch=1)
    stage.measured_slots(0, 1, worker="local", in_server=True, prefetch_s=5.0)
    stage.arrive((1, 4), (1, 4), (1, 4))
    assert 1 == sum(start.behind is not None for start in stage.started)
    stage.arrive(*[(1, 4)] * suspects, suspect=True)
    stage.arrive((1, 4))
    _serve(stage, 4 + suspects)
    alone = [start for start in stage.started if 4 <= start.requests[0] < 4 + suspects]
    assert [None] * suspects == [start.behind for start in alone]
    assert [] == [action for actions in stage.played for action in actions if isinstance(action, RecallAsked)]


class _Told:
    """Judges starts by what clients were told and have said. Slots below 3 are in the server's process."""

    def __init__(self, stage) -> None:
        self._stage = stage
        self._seen = 0
        self.asked: int | None = None
        self.known = False

    def judge(self, suspects: set[int]) -> None:
        """Look at what was decided since the last call."""
        for actions in self._stage.played[self._seen :]:
            for action in actions:
                if isinstance(action, LoneRunTold):
                    assert action.id in suspects
                    self.asked, self.known = action.id, False
                elif isinstance(action, Started) and suspects.intersection(action.requests):
                    assert 1 == len(action.requests)
                    if action.slot < 3:
                        assert (action.requests[0], True) == (self.asked, self.known)
                        self.asked = None
        self._seen = len(self._stage.played)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_a_suspect_begins_alone_and_after_the_word_of_its_client(data):
    """Requests come, end, are withdrawn and lost with a worker; each ends once, and the slots serve all."""
    stage = Stage()
    stage.model(max_batch=4)
    stage.measured_slots(
        0, 1, 2, worker="local", in_server=True, prefetch_s=data.draw(st.sampled_from([None, 5.0]))
    )
    told, suspects, submitted = _Told(stage), set(), 0
    worker = data.draw(st.booleans())
    if worker:
        stage.measured_slots(3, worker="w")
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["arrive", "suspects", "finish", "know", "withdraw", "fail", "die"])):
            case "arrive" | "suspects" as what:
                sizes = data.draw(st.lists(st.sampled_from([(1, 4), (2, 4), (0, 4)]), min_size=1, max_size=4))
                named = what == "suspects"
                coming = set(range(submitted + 1, submitted + len(sizes) + 1))
                suspects |= coming if named else set()
                submitted += len(sizes)
                stage.arrive(*sizes, client=data.draw(st.integers(0, 1)), suspect=named)
            case "finish" if _running(stage):
                stage.finish(_first(stage, data), 0.1)
            case "know" if told.asked is not None:
                told.known = True
                stage.play(LoneRunKnown(id=told.asked))
            case "withdraw" if submitted:
                stage.play(RequestCancelled(id=data.draw(st.integers(1, submitted))))
            case "fail" if _running(stage):
                start = _first(stage, data)
                stage.finished.add(start.batch)
                stage.fail(start, data.draw(st.sampled_from(["unavailable", "model_error"])))
            case "die" if worker:
                worker = False
                stage.finished.update(start.batch for start in stage.started if start.slot == 3)
                stage.play(SlotClosing(slot=3))
                stage.play(SlotLeft(slot=3, died=True))
        stage.now += 0.01
        told.judge(suspects)
    while _running(stage) or told.asked is not None or len(stage.ends) < submitted:
        if told.asked is not None:
            told.known = True
            stage.play(LoneRunKnown(id=told.asked))
            told.asked = None if stage.last == [] else told.asked
        if _running(stage):
            stage.finish(min(_running(stage), key=lambda start: (start.slot, start.batch)), 0.1)
        stage.wait(stage.now + 10.0)
        told.judge(suspects)
        assert stage.now < 10_000.0, "something waits for ever"
    assert set(range(1, submitted + 1)) == set(stage.ends)


def _first(stage, data) -> Started:
    """The batch that some slot runs."""
    slot = data.draw(st.sampled_from(sorted({start.slot for start in _running(stage)})))
    return min((start for start in _running(stage) if start.slot == slot), key=lambda start: start.batch)
