"""Well-formed messages that are lies: verbs out of order, foreign names, forged workers, floods. Over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.harness import RawPeer, ending
from tests.pipeline.serving.hostile import (
    INLINE,
    INVERTED,
    LAYOUT,
    PATIENCE_S,
    Frames,
    Hostile,
    Watch,
    assert_memory_kept,
    assert_served,
    client,
    entry,
    hostile_server,
    message,
    packed,
    peer,
    some_client,
)
from tests.pipeline.serving.hostile_server import WINDOW_REQUESTS

from shapestream.wire.codec import Role
from shapestream.wire.messages import (
    Cancel,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    Request,
    Result,
    Statistics,
    StatisticsRequest,
    Unknown,
    Welcome,
)
from shapestream_engine.layout import Tensors
from shapestream_engine.rules import Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import InputPort, ModelSignature, OutputPort

_workers = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    """One for all the cases of this file."""
    with hostile_server() as running:
        yield running


@pytest.fixture(scope="module")
def resident_at_first(server: Hostile) -> int:
    """What the server holds after its first requests."""

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with client(server.ipc) as honest:
                for sequence in range(200):
                    await assert_served(honest, sequence)

    trio.run(main)
    return server.resident_bytes


pytestmark = pytest.mark.usefixtures("resident_at_first")

# ---------------------------------------------------------------- clients

BEFORE_HELLO: dict[str, Frames] = {
    "a model": message([11, 0, "scaled"]),
    "a request": message(entry()),
    "a cancellation": message([13, 0, 7]),
    "a question": message([14, 0]),
    "a farewell": message([1, 0]),
    "a heartbeat": message([0, 0]),
}


@pytest.mark.parametrize("name", BEFORE_HELLO)
@real_time
async def test_nothing_comes_before_the_greeting(name: str, server: Hostile) -> None:
    """The sender learns that it is unknown, and may greet on the same connection."""
    async with client(server.ipc) as honest, peer(server.ipc) as stranger:
        watch = await Watch.begin(server, honest)
        stranger.connection.send_nowait(BEFORE_HELLO[name])
        await stranger.hear(Unknown)
        await stranger.open_session(some_client(), "scaled")
        await assert_served(stranger, 1)
        await watch.done("strangers.clients")


@real_time
async def test_a_request_behind_a_farewell_is_of_a_stranger(server: Hostile) -> None:
    """Entries are carried out in their order; what had not ended is dropped."""
    async with client(server.ipc) as honest, client(server.ipc) as odd:
        watch = await Watch.begin(server, honest)
        odd.connection.send_nowait(message([1, 0], entry()))
        await odd.hear(Unknown)
        await watch.done("strangers.clients")


@real_time
async def test_greetings_without_end_open_one_session(server: Hostile) -> None:
    """A connection has one session at most, however many ids it invents."""
    async with client(server.ipc) as honest, peer(server.ipc) as odd:
        watch = await Watch.begin(server, honest)
        before = (await honest.statistics())["clients"]
        for _ in range(20):
            odd.connection.send_nowait(message(*[[10, 0, some_client(), "x"] for _ in range(50)]))
        odd.say(StatisticsRequest())
        await odd.hear(Statistics)
        assert before + 1 == (await honest.statistics())["clients"]
        await watch.done(None)


@real_time
async def test_a_replayed_identity_moves_the_session_and_its_owner_takes_it_back(server: Hostile) -> None:
    """Without keys an id is all that a client has; see docs/security.md. Nobody else is touched."""
    number = some_client()
    async with (
        client(server.ipc) as honest,
        client(server.ipc, number) as owner,
        peer(server.ipc) as thief,
    ):
        watch = await Watch.begin(server, honest)
        thief.say(Hello(client=number, software="thief"))
        await thief.hear(Welcome)
        owner.say(Heartbeat())
        await owner.hear(Unknown)
        owner.say(Hello(client=number, software="owner"))
        await owner.hear(Welcome)
        await assert_served(owner, 1)
        await watch.done("strangers.clients")


@real_time
async def test_one_client_cannot_cancel_what_another_waits_for(server: Hostile) -> None:
    """Numbers belong to their client: cancelling all of the small ones touches nobody else's."""
    async with client(server.ipc) as honest, client(server.ipc) as odd:
        watch = await Watch.begin(server, honest)
        honest.connection.send_nowait(message(*[entry(sequence=n) for n in range(50)]))
        for _ in range(4):
            odd.say(*[Cancel(sequence=n) for n in range(200)])
        assert list(range(50)) == sorted([(await honest.hear(Result)).sequence for _ in range(50)])
        await assert_served(odd, 1)
        await watch.done(None)


@pytest.mark.parametrize("excess", [1, 36, 192])
@real_time
async def test_credit_that_is_overdrawn_is_refused(excess: int, server: Hostile) -> None:
    """In one message: as many as the window has room for are served, each of the others is told so."""
    async with client(server.ipc) as honest, client(server.ipc) as greedy:
        watch = await Watch.begin(server, honest)
        entries = [entry(sequence=n) for n in range(WINDOW_REQUESTS + excess)]
        greedy.connection.send_nowait(message(*entries))
        for _ in range(excess):
            failure = await greedy.hear(Failure)
            assert ("overloaded", True) == (failure.code, failure.retryable)
        for _ in range(WINDOW_REQUESTS):
            await greedy.hear(Result)
        await watch.done("failures.overloaded", excess)


@real_time
async def test_bytes_that_are_overdrawn_are_refused(server: Hostile) -> None:
    """Five requests of 300,000 bytes in one message, where 1 MiB may be unanswered: three are served."""
    async with client(server.ipc) as honest, client(server.ipc) as greedy:
        watch = await Watch.begin(server, honest)
        layout = ((0, "boolean", (1, 300_000)),)
        entries = [
            entry(frames=1, sequence=n, model=INVERTED, layout=layout, inline=(None,)) for n in range(5)
        ]
        greedy.connection.send_nowait(message(*entries, frames=(bytes(300_000),) * 5))
        for sequence in (3, 4):
            failure = await greedy.hear(Failure)
            assert (sequence, "overloaded", True) == (
                failure.sequence,
                failure.code,
                failure.retryable,
            )
        for _ in range(3):
            await greedy.hear(Result)
        await watch.done("failures.overloaded", 2)


NAMES = {
    "none": "",
    "of 512 characters": "n" * 512,
    "with a line break and a line of its own": 'x"}\n{"event": "server stopped", "level": "info"}',
    "with the codes of a terminal": "\x1b[2J\x1b[31m\x07\x00",
    "written from right to left": "\u202edelacs\u2028\u2029\ufeff",
    "with the fields of a template": "{0} {name} %s %n ${jndi:ldap://127.0.0.1/x}",
    "up and out": "../../../../etc/passwd",
    "nearly the right one": "scaled\x00",
}


@pytest.mark.parametrize("name", NAMES)
@real_time
async def test_a_name_stays_a_name(name: str, server: Hostile) -> None:
    """As software and as a model: it is answered, the log stays one JSON object per line, and no counter is named so."""
    async with client(server.ipc) as honest, peer(server.ipc) as odd:
        watch = await Watch.begin(server, honest)
        odd.say(Hello(client=some_client(), software=NAMES[name]))
        await odd.hear(Welcome)
        odd.say(OpenModel(name=NAMES[name]))
        refused = await odd.hear(ModelRefused)
        assert ("invalid", NAMES[name]) == (refused.code, refused.name)
        odd.say(Goodbye())
        await watch.done(None)
        joined = [line for line in server.lines() if line["event"] == "client joined"]
        assert NAMES[name] in {line["software"] for line in joined}
        assert not [line for line in server.lines() if line["event"] == "server stopped"]


@real_time
async def test_labels_do_not_multiply(server: Hostile) -> None:
    """5,000 names of software and models, and no counter more."""
    async with client(server.ipc) as honest, client(server.ipc) as odd:
        watch = await Watch.begin(server, honest)
        before = len(repr(await odd.statistics()))
        for first in range(0, 5_000, 100):
            odd.say(*[OpenModel(name=f"model-{first + n}") for n in range(100)])
            for _ in range(100):
                await odd.hear(ModelRefused)
        assert len(repr(await odd.statistics())) < before + 200
        await watch.done(None)


@real_time
async def test_a_flood_of_bad_messages_costs_a_count_each(server: Hostile) -> None:
    """10,000 bad entries: the honest client beside is served in between."""
    async with client(server.ipc) as honest, client(server.ipc) as flooding:
        watch = await Watch.begin(server, honest)
        for turn in range(40):
            flooding.connection.send_nowait(message(*[[9_999, 0]] * 250))
            await assert_served(honest, turn)
        flooding.say(StatisticsRequest())
        await flooding.hear(Statistics)
        await watch.done("bad_messages.clients", 10_000)


# ---------------------------------------------------------------- workers

REMOTE = ModelSignature(
    name="remote",
    inputs=(
        InputPort("x", "f32", NamedShape.parse("batch:1..8, n:1..1000")),
        InputPort("scale", "f32", NamedShape.parse("batch:1..8")),
    ),
    outputs=(OutputPort("y", "f32", NamedShape.parse("batch, n"), Rows()),),
)
DESCRIBED = REMOTE.to_dict()
ANSWER = bytes(range(24))
OUTPUT = [packed([[0, "f32", [2, 3]]]), [ANSWER]]


def worker_name() -> str:
    """One that no other worker of these tests has."""
    return f"worker-{next(_workers)}"


def hello(**changes: Any) -> Frames:
    """A worker's greeting, by hand."""
    fields = {"name": worker_name(), "pid": 1, "slots": 1, "models": {"remote": DESCRIBED}, "costs": {}}
    return message([40, 0, *(fields | changes).values()])


def model(**changes: Any) -> Frames:
    """The greeting of a worker whose one model is described so."""
    described = {**DESCRIBED, **changes}
    return hello(models={described["name"]: described})


def port(**changes: Any) -> Frames:
    """The same, with one input."""
    return model(
        name="other", inputs=[{"name": "x", "element_type": "f32", "shape": "batch:1..8, n", **changes}]
    )


def deep(depth: int) -> Any:
    """A map within a map."""
    return {"a": deep(depth - 1)} if depth else 1


FORGED: dict[str, Frames] = {
    "no slots": hello(slots=0),
    "1,025 slots": hello(slots=1025),
    "2^63-1 slots": hello(slots=2**63 - 1),
    "half a slot": hello(slots=0.5),
    "a negative process": hello(pid=-1),
    "a name that fills a result": hello(name="w" * 512),
    "a name of 513 characters": hello(name="w" * 513),
    "a name of two lines": hello(name="w\nserver stopped"),
    "a name with the codes of a terminal": hello(name="\x1b[2J"),
    "a name that is a number": hello(name=1),
    "models in a list": hello(models=["remote"]),
    "a model that is nothing": hello(models={"remote": {}}),
    "a model that is nil": hello(models={"remote": None}),
    "a model under another name": hello(models={"other": DESCRIBED}),
    "a known model with another signature": model(name="scaled"),
    "a model nested too deeply": model(name="other", extra=deep(40)),
    "inputs in a map": model(name="other", inputs={"x": {}}),
    "an input that is a text": model(name="other", inputs=["x"]),
    "65 inputs": model(
        name="other", inputs=[{"name": f"x{n}", "element_type": "f32", "shape": "batch"} for n in range(65)]
    ),
    "4,000 inputs": model(
        name="other",
        inputs=[{"name": f"x{n}", "element_type": "f32", "shape": "batch, ?"} for n in range(4_000)],
    ),
    "two inputs of one name": model(name="other", inputs=[DESCRIBED["inputs"][0]] * 2),
    "an input of objects": port(element_type="object"),
    "an input whose type is a number": port(element_type=4),
    "a shape upside down": port(shape="batch:8..1, n"),
    "a shape beyond 63 bits": port(shape=f"batch:1..{2**70}, n"),
    "a shape that is a list": port(shape=[1, 2]),
    "a shape of 33 dimensions": port(shape=", ".join(["batch", *["?"] * 32])),
    "a shape of 10,000 dimensions": port(shape=", ".join(["?"] * 10_000)),
    "padding with a map": port(pad={"n": {}}),
    "padding in a list": port(pad=["n"]),
    "a mask of itself": port(mask_of="x"),
    "a mask of nobody": port(mask_of="y"),
    "a rule that nobody knows": model(
        name="other",
        outputs=[{"name": "y", "element_type": "f32", "shape": "batch, n", "rule": {"rule": "mine"}}],
    ),
    "a rule that is a text": model(
        name="other", outputs=[{"name": "y", "element_type": "f32", "shape": "batch, n", "rule": "rows"}]
    ),
    "a strategy that nobody knows": model(name="other", shapes={"strategy": "none"}),
    "a strategy of negative sizes": model(name="other", shapes={"strategy": "padded", "batch": [-1]}),
    "a strategy that takes for ever to work out": model(
        name="other",
        inputs=[{"name": "x", "element_type": "f32", "shape": "batch:1..100000, n"}],
        shapes={"strategy": "partitioned", "batch": [1, 16_384]},
    ),
    "a strategy of 4,000 sizes": model(
        name="other",
        inputs=[{"name": "x", "element_type": "f32", "shape": "batch:1..100000, n"}],
        shapes={"strategy": "partitioned", "batch": list(range(1, 4_000))},
    ),
    "a strategy of texts": model(name="other", shapes={"strategy": "bucketed", "n": ["8"]}),
    "costs of a model that it does not have": hello(
        costs={"other": {"key": "", "dimensions": [], "points": []}}
    ),
    "costs of other dimensions": hello(costs={"remote": {"key": "", "dimensions": ["n"], "points": []}}),
    "costs that are not numbers": hello(
        costs={"remote": {"key": "", "dimensions": ["batch", "n"], "points": [[[1, 1], float("nan"), None]]}}
    ),
    "costs below nothing": hello(
        costs={"remote": {"key": "", "dimensions": ["batch", "n"], "points": [[[1, 1], -1.0, None]]}}
    ),
    "costs of sizes that are texts": hello(
        costs={"remote": {"key": "", "dimensions": ["batch", "n"], "points": [[["1", "1"], 1.0, None]]}}
    ),
    "costs in a text": hello(costs={"remote": {"key": "", "dimensions": ["batch", "n"], "points": "abc"}}),
    "more models than a server holds": hello(
        models={f"m{n}": {**DESCRIBED, "name": f"m{n}"} for n in range(1_100)}
    ),
    "a client's greeting": message([10, 0, bytes(16), "x"]),
    "a request": message(entry()),
    "the server's own order": message([51, 0, 1, 0, "remote", [2, 3], [[None, packed(LAYOUT), INLINE]]]),
    "garbage": [b"\xc1"],
    "no frames but one empty": [b""],
    "a frame nobody owns": [packed([1, []]), b"x"],
}


@pytest.mark.parametrize("name", FORGED)
@real_time
async def test_a_forged_worker_is_cut_off(name: str, server: Hostile) -> None:
    """Goodbye, before it was given anything to do; a good one joins afterwards, and the model is as it was."""
    async with client(server.ipc) as honest, peer(server.workers, Role.WORKER) as forged:
        watch = await Watch.begin(server, honest)
        forged.connection.send_nowait(FORGED[name])
        await forged.hear(Goodbye)
        await serve_remote(server, honest)
        await watch.done("bad_messages.workers")


async def gone(honest: RawPeer, name: str) -> None:
    """Returns when the server has no such worker any more."""
    while True:
        if f"{name}/0" not in (await honest.statistics())["slots"]:
            return


@asynccontextmanager
async def worker(server: Hostile, honest: RawPeer) -> AsyncIterator[RawPeer]:
    """A worker with the model `remote`, which leaves behind nothing that the next test could meet."""
    async with peer(server.workers, Role.WORKER) as joined:
        name = worker_name()
        await joined.join_as_worker(name, signature=REMOTE)
        yield joined
        joined.say(Goodbye())
        await gone(honest, name)


async def ask_remote(honest: RawPeer, sequence: int) -> None:
    """The honest client's request for what workers run."""
    honest.say(OpenModel(name="remote"))
    number = (await honest.hear(ModelOpened)).number
    tensors = Tensors(layout=LAYOUT, buffers=INLINE)
    honest.say(Request(sequence=sequence, model=number, remaining_ms=None, priority=0, tensors=tensors))


async def answer(good: RawPeer, honest: RawPeer, sequence: int) -> None:
    """A good worker runs it."""
    order = await good.hear(Execute)
    good.connection.send_nowait(message(done(order)))
    result = await honest.hear(Result)
    assert (sequence, ANSWER) == (result.sequence, bytes(result.tensors.buffers[0]))


async def serve_remote(server: Hostile, honest: RawPeer) -> None:
    """A good worker comes, and serves."""
    async with worker(server, honest) as good:
        await ask_remote(honest, 500)
        await answer(good, honest, 500)


def done(
    order: Execute, *, batch: Any = None, run_us: Any = 5, busy_us: Any = 6, reallocations: Any = 0,
    preparations: Any = 0, calls: Any = (), outputs: Any = (OUTPUT,), frames: int = 0,
) -> list[Any]:  # fmt: skip
    """A good report, any field replaced."""
    number = order.batch if batch is None else batch
    return [41, frames, number, run_us, busy_us, reallocations, preparations, calls, outputs]


def output(*rows: tuple[Any, ...], inline: tuple[Any, ...] = (ANSWER,)) -> tuple[Any, ...]:
    """The outputs of the batch's one request."""
    return ([packed(rows), inline],)


LIES: dict[str, Callable[[Execute], Frames]] = {
    "a batch that it was never sent": lambda order: message(done(order, batch=order.batch + 1_000)),
    "the failure of a batch that it was never sent": lambda order: message(
        [42, 0, order.batch + 1_000, "internal", "no"]
    ),
    "ten hours in a moment": lambda order: message(done(order, run_us=5, busy_us=36_000_000_000)),
    "no results": lambda order: message(done(order, outputs=())),
    "two results for one request": lambda order: message(done(order, outputs=(OUTPUT, OUTPUT))),
    "no result, and no deadline that could have passed": lambda order: message(done(order, outputs=(None,))),
    "other rows": lambda order: message(done(order, outputs=output((0, "f32", (3, 2))))),
    "another rank": lambda order: message(done(order, outputs=output((0, "f32", (6,))))),
    "another element type": lambda order: message(done(order, outputs=output((0, "i32", (2, 3))))),
    "another output": lambda order: message(done(order, outputs=output((1, "f32", (2, 3))))),
    "no output": lambda order: message(done(order, outputs=output(inline=()))),
    "an output too many": lambda order: message(
        done(order, outputs=output((0, "f32", (2, 3)), (1, "f32", (2, 3)), inline=(ANSWER, ANSWER)))
    ),
    "a byte too few": lambda order: message(done(order, outputs=output((0, "f32", (2, 3)), inline=(ANSWER[:-1],)))),
    "a frame that is missing": lambda order: message(
        done(order, outputs=output((0, "f32", (2, 3)), inline=(None,)))
    ),
    "a frame nobody owns": lambda order: message(done(order, frames=1), frames=(b"x",)),
    "a shape of 2^63": lambda order: message(done(order, outputs=output((0, "f32", (2**63, 3))))),
    "an endless time": lambda order: message(done(order, run_us=2**63 - 1, busy_us=2**63 - 1)),
    "a time that is not a number": lambda order: message(done(order, run_us=float("nan"))),
    "a negative time": lambda order: message(done(order, busy_us=-1)),
    "2^63-1 preparations": lambda order: message(done(order, preparations=2**63 - 1)),
    "2^63-1 reallocations": lambda order: message(done(order, reallocations=2**63 - 1)),
    "calls of another model": lambda order: message(done(order, calls=((1, (2, 3, 4)),))),
    "no calls of its shape": lambda order: message(done(order, calls=((0, (2, 3)),))),
    "2^40 calls": lambda order: message(done(order, calls=((2**40, (2, 3)),))),
    "a call of 2^62 rows": lambda order: message(done(order, calls=((1, (2**62, 2**62)),))),
    "a failure with a number as its code": lambda order: message([42, 0, order.batch, 5, "no"]),
    "a report without its number": lambda order: message(done(order, batch=2**63)),
    "a client's request": lambda order: message(entry()),
    "garbage behind its report": lambda order: [packed([1, [done(order)]]) + b"\xc1"],
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
@real_time
async def test_a_worker_that_lies_is_cut_off_and_its_work_is_done_again(name: str, server: Hostile) -> None:
    """The client gets the answer of another worker, and never learns of the lie."""
    async with client(server.ipc) as honest, peer(server.workers, Role.WORKER) as liar:
        await liar.join_as_worker(worker_name(), signature=REMOTE)
        watch = await Watch.begin(server, honest)
        await ask_remote(honest, 500)
        liar.connection.send_nowait(LIES[name](await liar.hear(Execute)))
        await liar.hear(Goodbye)
        async with worker(server, honest) as good:
            await answer(good, honest, 500)
        await watch.done("bad_messages.workers")


@real_time
async def test_a_stale_report_answers_nobody(server: Hostile) -> None:
    """A worker that was replaced by one of its name reports its batch on the old connection: it is a stranger there."""
    async with client(server.ipc) as honest, peer(server.workers, Role.WORKER) as former:
        name = worker_name()
        await former.join_as_worker(name, signature=REMOTE)
        watch = await Watch.begin(server, honest)
        await ask_remote(honest, 500)
        order = await former.hear(Execute)
        async with peer(server.workers, Role.WORKER) as latter:
            await latter.join_as_worker(name, signature=REMOTE)
            former.connection.send_nowait(
                message(done(order, outputs=output((0, "f32", (2, 3)), inline=(bytes(24),))))
            )
            await former.hear(Unknown)
            await answer(latter, honest, 500)
            latter.say(Goodbye())
            await gone(honest, name)
        await watch.done("strangers.workers")


@real_time
async def test_a_report_that_comes_twice_answers_once(server: Hostile) -> None:
    """Nobody honest says so twice: the second report ends the worker, after the first one was delivered."""
    async with client(server.ipc) as honest, peer(server.workers, Role.WORKER) as joined:
        await joined.join_as_worker(worker_name(), signature=REMOTE)
        watch = await Watch.begin(server, honest)
        await ask_remote(honest, 500)
        order = await joined.hear(Execute)
        joined.connection.send_nowait(message(done(order), done(order)))
        await joined.hear(Goodbye)
        assert 500 == (await honest.hear(Result)).sequence
        await watch.done("bad_messages.workers")
        assert [] == [entry for entry in honest.heard if isinstance(entry, Result)]


@pytest.mark.parametrize("code", ["poisoned", "overloaded", "recalled", "", "\x1b[2J", "ok"])
@real_time
async def test_a_worker_cannot_choose_every_code(code: str, server: Hostile) -> None:
    """What it may not say is `internal`: it cannot have a request quarantined, retried for ever, or counted anew."""
    async with client(server.ipc) as honest, worker(server, honest) as joined:
        watch = await Watch.begin(server, honest)
        await ask_remote(honest, 500)
        order = await joined.hear(Execute)
        joined.connection.send_nowait(message([42, 0, order.batch, code, "words\n" * 50]))
        assert (500, "internal") == ending(await honest.hear(Failure))
        await watch.moved("failures.internal")


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)
