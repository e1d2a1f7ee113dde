"""Forged greetings of workers, over real sockets: names, slots, models, shapes, strategies; costs: test_worker_costs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.entries import WORKER_PROTOCOL, Goodbye, Role, WorkerRefused
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile import Hostile, assert_memory_kept, watched
from tests.pipeline.serving.raw_messages import INLINE, LAYOUT, Frames, message, packed
from tests.pipeline.serving.real_sockets import dialled
from tests.pipeline.serving.remote_workers import (
    REMOTE,
    answer_remote,
    ask_remote,
    remote_worker,
    worker_name,
)

from shapestream_engine.probing.tolerances import TOLERANCES, OutputTolerance

pytestmark = pytest.mark.usefixtures("resident_at_first")


DESCRIBED = REMOTE.to_dict()
TOLERANCE = OutputTolerance(TOLERANCES["f32"]).to_dict()


def hello(**changes: Any) -> Frames:
    """A worker's greeting, by hand."""
    fields = {"name": worker_name(), "pid": 1, "slots": 1, "models": {"remote": DESCRIBED}, "costs": {}}
    fields |= {
        "digests": {},
        "protocol": WORKER_PROTOCOL,
        "once": [],
        "tolerances": {},
        "engines": {},
        "wide": {},
    }
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
    "257 slots": hello(slots=257),
    "2^63-1 slots": hello(slots=2**63 - 1),
    "a name of 201 characters": hello(name="w" * 201),
    "a name of 513 characters": hello(name="w" * 513),
    "a name of two lines": hello(name="w\nserver stopped"),
    "a name with the codes of a terminal": hello(name="\x1b[2J"),
    "models in a list": hello(models=["remote"]),
    "a model that is nothing": hello(models={"remote": {}}),
    "a model under another name": hello(models={"other": DESCRIBED}),
    "a model nested too deeply": model(name="other", extra=deep(40)),
    "inputs in a map": model(name="other", inputs={"x": {}}),
    "65 inputs": model(
        name="other", inputs=[{"name": f"x{n}", "element_type": "f32", "shape": "batch"} for n in range(65)]
    ),
    "two inputs of one name": model(name="other", inputs=[DESCRIBED["inputs"][0]] * 2),
    "an input of objects": port(element_type="object"),
    "a shape upside down": port(shape="batch:8..1, n"),
    "a shape beyond 63 bits": port(shape=f"batch:1..{2**70}, n"),
    "a shape of 33 dimensions": port(shape=", ".join(["batch", *["?"] * 32])),
    "a shape of 10,000 dimensions": port(shape=", ".join(["?"] * 10_000)),
    "padding with a map": port(pad={"n": {}}),
    "a mask of itself": port(mask_of="x"),
    "a mask of nobody": port(mask_of="y"),
    "a rule that nobody knows": model(
        name="other",
        outputs=[{"name": "y", "element_type": "f32", "shape": "batch, n", "rule": {"rule": "mine"}}],
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
    "a digest of a model that it does not have": hello(digests={"other": "a" * 64}),
    "a digest of 63 digits": hello(digests={"remote": "a" * 63}),
    "a digest in capitals": hello(digests={"remote": "A" * 64}),
    "an engine of a model that it does not have": hello(engines={"other": "openvino"}),
    "an engine of two lines": hello(engines={"remote": "openvino\nserver stopped"}),
    "an engine of 201 characters": hello(engines={"remote": "e" * 201}),
    "what may not run twice in a text": hello(once="remote"),
    "a tolerance of no output": hello(tolerances={"remote": {"other": {}}}),
    "a tolerance of no model": hello(tolerances={"other": {"y": {}}}),
    "a tolerance that is a list": hello(tolerances={"remote": {"y": [1]}}),
    "a tolerance of an axis that there is not": hello(
        tolerances={"remote": {"y": {**TOLERANCE, "spreads": [[7, [1.0]]]}}}
    ),
    "a class without values to judge it": hello(tolerances={"remote": {"y": {"margins": "y.values"}}}),
    "a class that is judged by itself": hello(tolerances={"remote": {"y": {"margins": "y"}}}),
    "a tolerance in words": hello(tolerances={"remote": {"y": {**TOLERANCE, "overall": "much"}}}),
    "a wide slot for a model that it does not have": hello(
        wide={"other": {"key": "k", "dimensions": ["batch", "n"], "points": []}}
    ),
    "a wide slot for other dimensions": hello(
        wide={"remote": {"key": "k", "dimensions": ["batch"], "points": []}}
    ),
    "a wide slot in words": hello(wide={"remote": "fast"}),
    "more models than a server holds": hello(
        models={f"m{n}": {**DESCRIBED, "name": f"m{n}"} for n in range(1_100)}
    ),
    "a client's greeting": message([10, 0, bytes(16), "x"]),
    "the server's own order": message(
        [51, 0, 1, 1, 0, 0, "remote", [2, 3], [[None, packed(LAYOUT), INLINE]]]
    ),
    "garbage": [b"\xc1"],
    "a frame nobody owns": [packed([1, []]), b"x"],
}


@pytest.mark.parametrize("name", FORGED)
@real_time
async def test_a_forged_worker_is_cut_off(name: str, server: Hostile) -> None:
    """Goodbye, before it was given anything to do; a good one joins afterwards, and the model is as it was."""
    async with watched(server) as watch, dialled(server.workers, Role.WORKER) as forged:
        forged.connection.send_nowait(FORGED[name])
        await forged.hear(Goodbye)
        async with remote_worker(server, watch.honest) as good:
            await ask_remote(watch.honest, 500)
            await answer_remote(good, watch.honest, 500)
        await watch.done("bad_messages.workers")


@real_time
async def test_a_known_model_with_another_signature_is_refused_by_its_name(server: Hostile) -> None:
    """No forgery: a reload may have changed the model since the worker has read it."""
    async with watched(server) as watch, dialled(server.workers, Role.WORKER) as other:
        other.connection.send_nowait(
            hello(models={"scaled": {**DESCRIBED, "name": "scaled"}}, engines={"scaled": "function"})
        )
        assert "scaled" == (await other.hear(WorkerRefused)).model
        await other.hear(Goodbye)
        await watch.moved(None)


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)
