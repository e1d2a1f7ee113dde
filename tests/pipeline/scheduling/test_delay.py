"""`max_delay_s`: how long a free slot waits for company. Without it, test_answer_waits.py says when one does."""

from __future__ import annotations

from shapestream.scheduling.events import RequestCancelled


def test_a_free_slot_waits_no_longer_than_the_delay(stage):
    """The first request waits for its delay, and takes along what came meanwhile."""
    stage.model(max_delay_s=0.5)
    stage.slots(0)
    stage.arrive((1, 4), at=1.0)
    stage.arrive((1, 4), at=1.3)
    assert [] == stage.started
    assert 1.5 == stage.scheduler.next_wakeup()
    stage.wait(1.5)
    assert [(1, 2)] == stage.starts()
    assert stage.scheduler.next_wakeup() is None


def test_a_full_batch_does_not_wait(stage):
    """What fills a batch goes at once; the rest waits for its own company, undivided."""
    stage.model(max_delay_s=0.5, max_batch=4)
    stage.slots(0, 1, 2)
    stage.arrive(*[(1, 4)] * 6)
    assert [(1, 2, 3, 4)] == stage.starts()
    stage.wait(0.5)
    assert [(5, 6)] == stage.starts()


def test_a_batch_filled_by_padding_does_not_wait(stage):
    """Neighbours count towards a full batch as far as the padding allows."""
    stage.model(padded=True, max_padding_ratio=0.25, max_delay_s=0.5, max_batch=3)
    stage.slots(0)
    stage.arrive((1, 8), (1, 7))
    stage.arrive((1, 100))
    assert [] == stage.started
    stage.arrive((1, 6))
    assert [{1, 2, 4}] == [set(start.requests) for start in stage.started]


def test_a_full_bucket_behind_a_waiting_one_goes(stage):
    """The oldest request may still wait while another shape has filled its batch."""
    stage.model(max_delay_s=0.5, max_batch=2)
    stage.slots(0)
    stage.arrive((1, 9))
    stage.arrive((1, 4), (1, 4))
    assert [(2, 3)] == stage.starts()


def test_of_full_buckets_the_oldest_goes_first(stage):
    """Two shapes that have filled their batches take turns by age."""
    stage.model(max_delay_s=0.5, max_batch=2)
    stage.arrive((1, 9), (1, 4), (1, 4), (1, 9))
    stage.slots(0)
    assert [(1, 4)] == stage.starts()


def test_busy_slots_do_not_wake_anybody(stage):
    """With no free slot the end of the delay is nothing to wake up for; the next free slot takes all."""
    stage.model(max_delay_s=0.5, max_batch=2)
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 4))
    assert stage.scheduler.next_wakeup() is None
    stage.finish(stage.started[0], at=0.2)
    assert 0.5 == stage.scheduler.next_wakeup()
    stage.wait(0.5)
    assert [(3,)] == stage.starts()


def test_a_delay_does_not_cost_a_deadline(stage):
    """A request whose deadline leaves no room for the delay and the call starts at once."""
    stage.model(max_delay_s=0.5)
    stage.slots(0)
    stage.arrive((1, 4), deadline=0.4)
    assert [(1,)] == stage.starts()
    stage.finish(stage.started[0], run_s=0.3)
    stage.arrive((1, 4), deadline=0.7)
    assert [(2,)] == stage.starts()
    stage.finish(stage.started[1], run_s=0.3)
    stage.arrive((1, 4), deadline=0.9)
    assert [] == stage.starts()


def test_a_cancelled_request_delays_nobody(stage):
    """The wakeup follows those that still wait."""
    stage.model(max_delay_s=0.5, max_batch=2)
    stage.slots(0)
    stage.arrive((1, 4), at=0.0)
    stage.arrive((1, 9), at=0.3)
    stage.play(RequestCancelled(id=1))
    assert 0.8 == stage.scheduler.next_wakeup()


def test_cancelling_out_of_a_full_bucket_makes_it_wait_again(make_stage):
    """A bucket that is no longer full has no claim to go before its delay has ended."""
    stage = make_stage()
    stage.model(max_delay_s=0.5, max_batch=2)
    stage.arrive((1, 4), (1, 4))
    stage.play(RequestCancelled(id=1))
    stage.slots(0)
    assert [] == stage.started
    stage.wait(0.5)
    assert [(2,)] == stage.starts()


def test_without_a_batch_axis_there_is_nothing_to_wait_for(stage):
    """A model whose requests run alone ignores its delay."""
    stage.model(dimensions=("length",), max_delay_s=0.5)
    stage.slots(0)
    stage.arrive((4,))
    assert [(1,)] == stage.starts()
