"""Workers that lie about their batches, over real sockets: false reports, and those that are not theirs. See hostile.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.entries import Execute, Failure, Goodbye, ResultEntry, Role, Unknown
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile import Hostile, assert_memory_kept, watched
from tests.pipeline.serving.raw_messages import Frames, entry, message, packed
from tests.pipeline.serving.raw_peer import ending
from tests.pipeline.serving.real_sockets import dialled
from tests.pipeline.serving.remote_workers import (
    ANSWER,
    OUTPUT,
    REMOTE,
    answer_remote,
    ask_remote,
    gone,
    output,
    remote_report,
    remote_worker,
    worker_name,
)

pytestmark = pytest.mark.usefixtures("resident_at_first")


def reported(**changes: Any) -> Callable[[Execute], Frames]:
    """A report of the batch with these fields."""
    return lambda order: message(remote_report(order, **changes))


LIES: dict[str, Callable[[Execute], Frames]] = {
    "a batch that it was never sent": lambda order: message(remote_report(order, batch=order.batch + 1_000)),
    "the failure of a batch that it was never sent": lambda order: message(
        [42, 0, order.batch + 1_000, order.session, "internal", "no"]
    ),
    "no results": reported(outputs=()),
    "two results for one request": reported(outputs=(OUTPUT, OUTPUT)),
    "no result, and no deadline that could have passed": reported(outputs=(None,)),
    "other rows": reported(outputs=output((0, "f32", (3, 2)))),
    "another rank": reported(outputs=output((0, "f32", (6,)))),
    "another element type": reported(outputs=output((0, "i32", (2, 3)))),
    "another output": reported(outputs=output((1, "f32", (2, 3)))),
    "no output": reported(outputs=output(inline=())),
    "an output too many": reported(outputs=output((0, "f32", (2, 3)), (1, "f32", (2, 3)), inline=(ANSWER, ANSWER))),
    "a byte too few": reported(outputs=output((0, "f32", (2, 3)), inline=(ANSWER[:-1],))),
    "a frame that is missing": reported(outputs=output((0, "f32", (2, 3)), inline=(None,))),
    "a frame nobody owns": lambda order: message(remote_report(order, frames=1), frames=(b"x",)),
    "a shape of 2^63": reported(outputs=output((0, "f32", (2**63, 3)))),
    "an endless time": reported(run_us=2**63 - 1, busy_us=2**63 - 1),
    "another size of a named dimension": reported(outputs=output((0, "f32", (2, 4)), inline=(bytes(32),))),
    "more calls than rows": reported(calls=((3, (2, 3)),)),
    "more preparations than calls": reported(preparations=2),
    "more reallocations than tensors": reported(reallocations=4),
    "calls of another model": reported(calls=((1, (2, 3, 4)),)),
    "no calls of its shape": reported(calls=((0, (2, 3)),)),
    "2^40 calls": reported(calls=((2**40, (2, 3)),)),
    "a call of 2^62 rows": reported(calls=((1, (2**62, 2**62)),)),
    "a failure with a number as its code": lambda order: message([42, 0, order.batch, order.session, 5, "no"]),
    "a report without its number": reported(batch=2**63),
    "a client's request": lambda order: message(entry()),
    "garbage behind its report": lambda order: [packed([1, [remote_report(order)]]) + b"\xc1"],
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
@real_time
async def test_a_worker_that_lies_is_cut_off_and_its_work_is_done_again(name: str, server: Hostile) -> None:
    """The client gets the answer of another worker, and never learns of the lie."""
    async with watched(server) as watch, dialled(server.workers, Role.WORKER) as liar:
        await liar.join_as_worker(worker_name(), signature=REMOTE)
        await ask_remote(watch.honest, 500)
        liar.slots[0].send_nowait(LIES[name](await liar.hear(Execute)))
        await liar.hear(Goodbye)
        async with remote_worker(server, watch.honest) as good:
            await answer_remote(good, watch.honest, 500)
        await watch.done("bad_messages.workers")


MISPLACED: dict[str, Callable[[Execute], Frames]] = {
    "results of a batch": reported(),
    "another slot's greeting": lambda order: message([44, 0, bytes(16), 0]),
}


@pytest.mark.parametrize("name", MISPLACED)
@real_time
async def test_a_worker_that_uses_its_control_as_a_slot_is_cut_off(name: str, server: Hostile) -> None:
    """Otherwise its batch would wait until it counts as hung."""
    async with watched(server) as watch, dialled(server.workers, Role.WORKER) as confused:
        await confused.join_as_worker(worker_name(), signature=REMOTE)
        await ask_remote(watch.honest, 500)
        confused.connection.send_nowait(MISPLACED[name](await confused.hear(Execute)))
        await confused.hear(Goodbye)
        async with remote_worker(server, watch.honest) as good:
            await answer_remote(good, watch.honest, 500)
        await watch.done("bad_messages.workers")


@real_time
async def test_a_stale_report_answers_nobody(server: Hostile) -> None:
    """A worker that was replaced by one of its name reports its batch on the old connection: it is a stranger there."""
    async with watched(server) as watch, dialled(server.workers, Role.WORKER) as former:
        name = worker_name()
        await former.join_as_worker(name, signature=REMOTE)
        await ask_remote(watch.honest, 500)
        order = await former.hear(Execute)
        async with dialled(server.workers, Role.WORKER) as latter:
            await latter.join_as_worker(name, signature=REMOTE)
            former.slots[0].send_nowait(
                message(remote_report(order, outputs=output((0, "f32", (2, 3)), inline=(bytes(24),))))
            )
            await former.hear(Unknown)
            await answer_remote(latter, watch.honest, 500)
            latter.say(Goodbye())
            await gone(watch.honest, name)
        await watch.done("strangers.workers")


@real_time
async def test_a_report_that_comes_twice_answers_once(server: Hostile) -> None:
    """Nobody honest says so twice: the second report ends the worker, after the first one was delivered."""
    async with watched(server) as watch, dialled(server.workers, Role.WORKER) as joined:
        await joined.join_as_worker(worker_name(), signature=REMOTE)
        await ask_remote(watch.honest, 500)
        order = await joined.hear(Execute)
        joined.slots[0].send_nowait(message(remote_report(order), remote_report(order)))
        await joined.hear(Goodbye)
        assert 500 == (await watch.honest.hear(ResultEntry)).sequence
        await watch.done("bad_messages.workers")
        assert [] == [entry for entry in watch.honest.heard if isinstance(entry, ResultEntry)]


@pytest.mark.parametrize("code", ["poisoned", "overloaded", "recalled", "", "\x1b[2J", "ok"])
@real_time
async def test_a_worker_cannot_choose_every_code(code: str, server: Hostile) -> None:
    """What it may not say is `internal`: it cannot have a request quarantined, retried for ever, or counted anew."""
    async with watched(server) as watch, remote_worker(server, watch.honest) as joined:
        await ask_remote(watch.honest, 500)
        order = await joined.hear(Execute)
        joined.slots[0].send_nowait(message([42, 0, order.batch, order.session, code, "words\n" * 50]))
        assert (500, "internal") == ending(await watch.honest.hear(Failure))
        await watch.moved("failures.internal")


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)
