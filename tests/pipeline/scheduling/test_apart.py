"""Requests that fail cost their own client: it pays for what runs again, and runs apart for a while."""

from __future__ import annotations

from collections.abc import Callable

CALL_S, ROW_S = 0.02, 0.001


def _beside(stage, bad_client: Callable[[int], int | None], *, seconds: float = 20.0) -> int:
    """Results of a client that always has 32 requests without a result, beside one request in flight that fails.

    `bad_client`: the client of each of these, by number; None: there are none.
    """
    stage.model(max_batch=8)
    stage.measured_slots(0, call_s=CALL_S, token_s=ROW_S / 4)
    bad: set[int] = set()

    def fail_another() -> None:
        client = bad_client(len(bad))
        if client is not None:
            bad.update(stage.arrive((1, 4), client=client))

    stage.arrive(*[(1, 4)] * 32, client=1)
    fail_another()
    done = 0
    while stage.now < seconds:
        start = stage.started[-1]
        stage.now += CALL_S + ROW_S * start.sizes[0]
        if bad.intersection(start.requests):
            stage.fail(start)
            if bad <= stage.ends.keys():
                fail_another()
        else:
            done += len(start.requests)
            stage.arrive(*[(1, 4)] * len(start.requests), client=1)
            stage.finish(start, run_s=CALL_S + ROW_S * start.sizes[0])
    assert {"model_error"} >= {stage.ends[id_] for id_ in bad & stage.ends.keys()}
    return done


def test_a_failing_request_in_flight_costs_others_no_more_than_its_turns(make_stage):
    """Two clients, so the good one keeps at least half of the slot's time, in full batches."""
    alone = _beside(make_stage(), lambda _: None)
    assert 0.5 * alone <= _beside(make_stage(), lambda _: 2)


def test_new_clients_that_send_what_has_failed_find_no_company(make_stage):
    """Each failing request comes from a client that was never here, with other sizes than the good ones."""
    stage = make_stage()
    stage.model(padded=True, max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    stage.arrive(*[(1, 4)] * 3, client=1)
    (bad,) = stage.arrive((1, 5), client=2)
    stage.finish(stage.started[-1])
    while bad not in stage.ends:
        start = stage.started[-1]
        (stage.fail if bad in start.requests else stage.finish)(start)
    stage.arrive((1, 4), client=1)
    good = stage.arrive(*[(1, 4)] * 3, client=1)
    (again,) = stage.arrive((1, 5), client=3)
    while not {again, *good} <= stage.ends.keys():
        start = stage.started[-1]
        if again in start.requests:
            assert (again,) == start.requests
            stage.fail(start)
        else:
            stage.finish(start)


def _fail_once(stage) -> None:
    """A request of client 2 fails in company of client 1's, and is found."""
    stage.arrive((1, 4), client=1)
    stage.arrive(*[(1, 4)] * 3, client=1)
    (bad,) = stage.arrive((1, 4), client=2)
    stage.finish(stage.started[-1])
    while len(stage.finished) < len(stage.started) or bad not in stage.ends:
        start = stage.started[-1]
        if bad in start.requests:
            stage.fail(start)
            stage.finished.add(start.batch)
        else:
            stage.finish(start)


def _company(stage) -> set[int]:
    """The sizes of the batches in which requests of client 2 run beside those of client 1."""
    stage.arrive((1, 4), client=3)
    own = stage.arrive((1, 4), client=2)
    others = stage.arrive(*[(1, 4)] * 2, client=1)
    first = len(stage.started) - 1
    while not {*own, *others} <= stage.ends.keys():
        stage.finish(stage.started[-1])
    return {len(start.requests) for start in stage.started[first:] if set(own) & set(start.requests)}


def test_a_client_that_failed_has_company_again_when_as_many_as_a_batch_ran_well(stage):
    """Four requests in a row that run well, one at a time, where a batch holds four."""
    stage.model(max_batch=4)
    stage.slots(0)
    assert {3} == _company(stage)
    _fail_once(stage)
    for _ in range(4):
        assert {1} == _company(stage)
    assert {3} == _company(stage)


def test_a_client_that_failed_costs_one_call_per_failure_however_many_requests_it_has_waiting(stage):
    """Its requests run one at a time, so no batch of it has to be halved before others have their turn."""
    stage.model(max_batch=16)
    stage.slots(0)
    _fail_once(stage)
    stage.arrive((1, 4), client=3)
    bad = set(stage.arrive(*[(1, 4)] * 40, client=2))
    good = set(stage.arrive(*[(1, 4)] * 4, client=1))
    first = len(stage.started)
    stage.finish(stage.started[-1])
    while not good <= stage.ends.keys():
        start = stage.started[-1]
        (stage.fail if bad.intersection(start.requests) else stage.finish)(start)
    calls = [start.requests for start in stage.started[first:] if bad.intersection(start.requests)]
    assert {1} >= set(map(len, calls))
    assert 4 >= len(calls)


def _turns_before_the_next(stage, *, fails: bool) -> int:
    """Requests of others that go before the next one of client 2, after one of its own has failed, or not."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 4), client=1)
    stage.arrive(*[(1, 4)] * 100, client=1)
    (bad,) = stage.arrive((1, 4), client=2)
    stage.finish(stage.started[-1])
    while bad not in stage.ends:
        start = stage.started[-1]
        (stage.fail if fails and bad in start.requests else stage.finish)(start)
    earlier = {id_ for start in stage.started for id_ in start.requests}
    (following,) = stage.arrive((1, 4), client=2)
    while following not in stage.started[-1].requests:
        stage.finish(stage.started[-1])
    return len({id_ for start in stage.started[:-1] for id_ in start.requests} - earlier)


def test_what_runs_again_is_charged_to_the_client_whose_request_failed(make_stage):
    """Eight requests ran again because of its one, so others go before its next."""
    assert _turns_before_the_next(make_stage(), fails=False) < _turns_before_the_next(
        make_stage(), fails=True
    )
