"""Room for chains: what waits, whose turn it is, and that nothing is left."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.chains.models import SIGNATURES, run, tensors_of

from shapestream.chains.plan import Chain, Held, plan_chain
from shapestream.chains.room import FEW as FEW_DEADLINES
from shapestream.chains.room import ChainRoom
from shapestream.chains.run import ChainRun, RunState
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream_engine.ports import list_ports
from shapestream_engine.shapes import NamedShape

CHAIN: Chain = plan_chain(
    ChainSpec(
        name="c",
        inputs={"x": "cut.x"},
        stages=[
            StageSpec(name="cut", model="split", inputs={"x": "x"}),
            StageSpec(
                name="read",
                model="norm",
                inputs={"x": "cut.parts"},
                each=["item of cut.parts"],
                at_most=10,
                at_most_bytes=1000,
            ),
        ],
        outputs={"b": "read.b"},
    ),
    SIGNATURES,
)


MOST_ROW = 9 * 4
"""Bytes of the longest row that `norm` takes."""


def _run(deadline: float | None = None) -> ChainRun:
    return ChainRun(CHAIN, tensors_of([np.ones((3, 4), np.float32)]), deadline)


def _alive() -> int:
    """Count the requests in memory."""
    gc.collect()
    return sum(type(each) is ChainRun for each in gc.get_objects())


def _finish(chain_run: ChainRun, room: ChainRoom) -> None:
    """Answer all requests of one chain."""
    while chain_run.ready:
        ready, chain_run.ready = chain_run.ready, []
        for request in ready:
            if request.tensors.layout[0][2] == (1, 0):
                chain_run.failed(request, "invalid", "empty", 1.0)
            else:
                chain_run.answered(request, run(request.stage.stage.model, request.tensors), 1.0)
            room.update(chain_run)


def test_a_request_reserves_what_its_inputs_tell() -> None:
    """An array per index of `n`, of which it has three: so much is held from the beginning, and no more later."""
    split = SIGNATURES["split"]
    counted = replace(split, outputs=list_ports("parts", "f32", NamedShape.parse("k"), "n"))
    chain = plan_chain(CHAIN.spec, SIGNATURES | {"split": counted})
    chain_run = ChainRun(chain, tensors_of([np.ones((3, 4), np.float32)]), None)
    assert {"read": Held(3, 3 * MOST_ROW)} == chain_run.most
    many = ChainRun(chain, tensors_of([np.ones((10, 4), np.float32)]), None)
    assert {"read": Held(10, 10 * MOST_ROW)} == many.most
    room = ChainRoom(6, 1000)
    for each in (chain_run, many):
        room.wait(each, 1)
    assert chain_run is room.next()
    assert room.next() is None
    assert Held(3, 3 * MOST_ROW) == room.reserved


def test_rows_of_an_input_are_known_and_bytes_without_a_bound_are_the_chains() -> None:
    """A row for each index of an input; its vectors may be of any length."""
    stage = StageSpec(name="s", model="flat", inputs={"v": "x"}, each=["row of x"], at_most_bytes=1000)
    chain = plan_chain(
        ChainSpec(name="c", inputs={"x": "s.v"}, stages=[stage], outputs={"o": "s.o"}), SIGNATURES
    )
    chain_run = ChainRun(chain, tensors_of([np.ones((3, 4), np.float32)]), None)
    assert {"s": Held(3, 1000)} == chain_run.most


def test_a_request_reserves_the_most_and_gives_back_what_it_does_not_need() -> None:
    """Three rows of ten, then nothing."""
    room = ChainRoom(100, 10_000)
    chain_run = _run()
    room.wait(chain_run, 1)
    assert chain_run is room.next()
    assert Held(10, 10 * MOST_ROW) == room.reserved
    chain_run.begin(0.0)
    (request,) = chain_run.ready
    chain_run.ready = []
    chain_run.answered(request, run("split", request.tensors), 1.0)
    room.update(chain_run)
    assert Held(3, 4 * (0 + 1 + 2)) == room.reserved
    _finish(chain_run, room)
    assert Held(0, 0) == room.reserved


def test_clients_take_turns_and_one_alone_always_begins() -> None:
    """Of five requests of one client and one of another, the second client's is the second to begin."""
    room = ChainRoom(5, 10_000)
    mine, other = [_run() for _ in range(5)], _run()
    for chain_run in mine:
        room.wait(chain_run, 1)
    room.wait(other, 2)
    order = []
    while (chain_run := room.next()) is not None:
        assert room.next() is None  # more than five are reserved
        order.append(chain_run)
        chain_run.begin(0.0)
        _finish(chain_run, room)
    assert [mine[0], other, *mine[1:]] == order
    assert 0 == len(room)


def test_a_request_that_ended_while_it_waited_is_passed_over() -> None:
    """And its deadline is looked at no longer."""
    room = ChainRoom(5, 10_000)
    first, second, third = _run(), _run(4.0), _run(9.0)
    for chain_run in (first, second, third):
        room.wait(chain_run, 1)
    assert first is room.next()
    first.begin(0.0)
    assert (4.0, None, second) == (room.next_deadline(), room.late(3.0), room.late(4.0))
    second.fail("deadline_exceeded", "late")
    assert 9.0 == room.next_deadline()
    _finish(first, room)
    assert third is room.next()


def test_requests_that_ended_while_they_waited_leave_nothing() -> None:
    """Neither a place nor a deadline, wherever they stood; the others' order is as it was."""
    room = ChainRoom(5, 10_000)
    first, last = _run(), _run(99.0)
    ended = [_run(float(number)) for number in range(1, 1001)]
    room.wait(first, 1)
    assert first is room.next()
    room.wait(last, 1)
    for chain_run in ended:
        room.wait(chain_run, 1)
        chain_run.fail("cancelled", "withdrawn")
        room.update(chain_run)
        assert (1, 99.0) == (len(room), room.next_deadline())
        assert {"waiting": 1, "running": 1} == room.statistics().to_dict("c")["chains"]["c"]
    first.begin(0.0)
    _finish(first, room)
    assert last is room.next()
    assert (0, None) == (len(room), room.next())


def test_a_request_is_gone_once_it_has_ended_though_one_with_an_earlier_deadline_waits() -> None:
    """What a thousand requests leave is no more than a few of them."""
    room = ChainRoom(5, 10_000)
    first, waits = _run(), _run(1.0)
    room.wait(first, 1)
    assert first is room.next()
    room.wait(waits, 1)
    before = _alive()
    for number in range(1000):
        chain_run = _run(2.0 + number)
        room.wait(chain_run, 2)
        chain_run.fail("cancelled", "withdrawn")
        room.update(chain_run)
    assert _alive() - before <= FEW_DEADLINES + 8
    assert (1, 1.0) == (len(room), room.next_deadline())


@given(clients=st.lists(st.integers(0, 3), min_size=1, max_size=30), most=st.integers(1, 60))
def test_every_request_begins_and_the_bound_holds(clients: list[int], most: int) -> None:
    """More than one reserve no more than the bound together."""
    room = ChainRoom(most, 10_000)
    runs = [_run() for _ in clients]
    for client, chain_run in zip(clients, runs, strict=True):
        room.wait(chain_run, client)
    running: list[ChainRun] = []
    ended = 0
    while len(room) or running:
        while (chain_run := room.next()) is not None:
            chain_run.begin(0.0)
            running.append(chain_run)
            assert len(running) == 1 or room.reserved.requests <= most
            waiting = len(runs) - len(running) - ended
            assert (waiting, len(running), room.reserved) == (
                room.statistics().waiting["c"],
                room.statistics().running["c"],
                room.statistics().reserved,
            )
        _finish(running.pop(0), room)
        ended += 1
    assert all(chain_run.state is not RunState.WAITING for chain_run in runs)
    assert {
        "waiting": 0,
        "running": 0,
        "reserved_requests": 0,
        "reserved_bytes": 0,
        "limit_requests": most,
        "limit_bytes": 10_000,
        "chains": {"c": {"waiting": 0, "running": 0}, "unused": {"waiting": 0, "running": 0}},
    } == room.statistics().to_dict(["c", "unused"])
