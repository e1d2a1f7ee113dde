"""Chains at a real server: equal to their stages run alone, through every face, and whatever ends in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import trio
from tests.e2e.conftest import PATIENCE_S, until
from tests.e2e.reading_chain import MODELS, PLACES, Array, expected, picture, reading

import shapestream
from shapestream import aio

pytestmark = pytest.mark.e2e


def check(image: Array, result: shapestream.Result) -> None:
    """Hold a result against the stages run alone."""
    boxes, text = expected(image)
    np.testing.assert_array_equal(boxes, result["boxes"])
    np.testing.assert_array_equal(text, result["text"])
    assert (len(boxes), 2) == result["text"].shape


@pytest.fixture(scope="module", params=PLACES)
def served(request: pytest.FixtureRequest, module_workplace: Any) -> Iterator[Any]:
    """The server, with its slots in its own process or in two workers."""
    server = module_workplace.serve(MODELS + f"    {PLACES[request.param]}\n")
    server.wait_for("gateways ready")
    yield server
    server.send(signal.SIGTERM)
    assert 0 == server.wait()
    assert [] == server.events("scheduler fault")


def test_pictures_equal_their_stages_run_alone(served: Any) -> None:
    """No boxes, one, many: in streams of 64 in flight, rows in the order of the boxes; every request counts once."""
    pictures = [picture(seed, (0, 1, 3, 9, 30, 150)[seed % 6]) for seed in range(240)]
    with served.client() as client:
        with client.stream("reading", [{"image": image} for image in pictures], max_in_flight=64) as results:
            for image, result in zip(pictures, results, strict=True):
                check(image, result)
        numbers = client.statistics()
        assert numbers["requests"] == numbers["results"]
        assert ({}, 0) == (numbers["failures"], numbers["faults"])


def test_each_face_and_http_give_the_same(served: Any) -> None:
    """Trio, asyncio, and JSON over HTTP."""
    image = picture(7, 5)

    async def by_trio() -> shapestream.Result:
        async with shapestream.connect(served.address) as client:
            return await client.infer("reading", {"image": image})

    async def by_asyncio() -> shapestream.Result:
        async with aio.connect(served.address) as client:
            return await client.infer("reading", {"image": image})

    check(image, trio.run(by_trio))
    check(image, asyncio.run(by_asyncio()))
    (ready,) = served.events("http ready")
    connection = HTTPConnection("127.0.0.1", int(ready["address"].rpartition(":")[2]), timeout=PATIENCE_S)
    shape = {"name": "image", "datatype": "UINT8", "shape": image.shape}
    body = json.dumps({"inputs": [{**shape, "data": image.ravel().tolist()}]})
    connection.request("POST", "/v2/models/reading/infer", body)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    outputs = {
        output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]
    }
    boxes, text = expected(image)
    np.testing.assert_array_equal(boxes, outputs["boxes"])
    np.testing.assert_array_equal(text, outputs["text"].astype(np.float32))


def test_a_story_has_the_stages_and_their_last_requests(served: Any) -> None:
    """First the chain's, then one per stage: the request that was answered last. Of a failed one, what it failed in."""
    with served.client() as client:
        client.infer("reading", {"image": picture(1, 30)}, request_id="of thirty")
        whole, *parts = client.stories("of thirty")
        assert ("reading", "answered") == (whole["model"], whole["state"])
        assert [("find", 1), ("crop", 1), ("read", 30)] == [
            (each["stage"], each["requests"]) for each in whole["stages"]
        ]
        assert [each["last"] is not None for each in whole["stages"]] == [True] * 3
        assert ["finder", "cropper", "reader"] == [part["model"] for part in parts]
        assert whole["stages"][0]["ended_ms"] <= whole["stages"][1]["began_ms"]
        assert "in stage read (30 requests)" in whole["why"]
        with pytest.raises(shapestream.TooLarge):
            client.infer("reading", {"image": picture(1, 160)}, request_id="too many")
        failed, *_ = client.stories("too many")
        assert "too_large" == failed["state"]
        assert "It ended without a result: too_large: stage 'read' has 160 rows" in failed["why"]


def test_more_rows_than_allowed_are_too_large(served: Any) -> None:
    """The error names the stage and its limit, and nobody else is concerned."""
    with served.client() as client:
        with pytest.raises(
            shapestream.TooLarge, match=r"stage 'read' has 151 rows to run; its at_most is 150"
        ):
            client.infer("reading", {"image": picture(1, 151)})
        check(picture(1, 150), client.infer("reading", {"image": picture(1, 150)}))


def test_a_row_that_fails_fails_the_request(served: Any) -> None:
    """With the model's code, and the stage and the row in the message."""
    image = picture(3, 4)
    image[..., 0] = reading.BAD
    image[0, 0, 0] = 4
    with (
        served.client() as client,
        pytest.raises(shapestream.ModelError, match=r"stage 'read', row \d: .*cannot be read"),
    ):
        client.infer("reading", {"image": image})


def test_a_request_that_the_first_stage_does_not_take_is_invalid(served: Any) -> None:
    """As with any model: refused before anything runs."""
    with served.client() as client, pytest.raises(shapestream.InvalidRequest, match="height"):
        client.infer("reading", {"image": np.zeros((4, 9, 3), np.uint8)})


GATED = """\
    models:
      - name: gated
        function: reading:find_when_open
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        batching: {max_batch: 8, hang_after_s: off}
        trust: true
        calibration_s: 0
      - name: noted
        function: gated:noted_when_open
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        batching: {max_batch: 8, hang_after_s: off}
        trust: true
        calibration_s: 0
    chains:
      - name: twice
        inputs: {x: first.x}
        stages:
          - {name: first, model: gated, inputs: {x: x}}
          - {name: second, model: noted, inputs: {x: first.y}, each: row of first.y}
        outputs: {y: second.y}
    workers: [{count: 1, slots: 1}]
"""
X = {"x": np.arange(1, 7, dtype=np.float32).reshape(3, 2)}


def _noted(workplace: Any) -> list[float]:
    """The first numbers of the rows that the second stage was given."""
    path = workplace.folder / "begun"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def test_no_stage_begins_after_the_end_of_its_request(workplace: Any) -> None:
    """Of three requests in their first stage one is withdrawn, one's deadline passes, and one's client leaves."""
    served = workplace.serve(GATED)

    async def main() -> None:
        async with shapestream.connect(served.address, connect_timeout=PATIENCE_S) as client:
            async with trio.open_nursery() as nursery:

                async def withdrawn() -> None:
                    await client.infer("twice", X)

                nursery.start_soon(withdrawn)
                await trio.to_thread.run_sync(workplace.wait_entered)
                with pytest.raises(shapestream.DeadlineExceeded):
                    await client.infer("twice", X, deadline=0.5)
                nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery, shapestream.connect(served.address) as client:
            nursery.start_soon(client.infer, "twice", X)
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()

    trio.run(main)
    with served.client() as client:
        until("the server knows that they ended", lambda: not client.statistics()["chain_room"]["running"])
    workplace.open_gate()
    with served.client() as client:
        np.testing.assert_array_equal(4 * X["x"], np.array(client.infer("twice", X)["y"]).reshape(3, 2))
        assert sorted(_noted(workplace)) == sorted([2.0, 6.0, 10.0])
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def test_a_chain_that_has_begun_is_finished_while_the_server_drains(workplace: Any) -> None:
    """Its later stages run, a new request is refused, and the server ends by itself."""
    from tests.e2e.gate import Asking

    served = workplace.serve(GATED + "    logging: {level: debug}\n")
    with served.client() as client, Asking(client, "twice") as asking:
        future = asking.ask(3.0)
        workplace.wait_entered()
        served.send(signal.SIGTERM)
        served.wait_for("server drains")
        workplace.open_gate()
        assert [12.0] * 3 == np.array(future.result(PATIENCE_S)["y"]).ravel().tolist()
    assert 0 == served.wait()
    (ended,) = served.events("chain ended")
    assert ("twice", None, {"first": 1, "second": 1}) == (ended["model"], ended["code"], ended["stages"])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (2, 3))])
def test_workers_that_are_killed_in_mid_chain_change_no_answer(workplace: Any, seed: int) -> None:
    """Each request ends once, and right."""
    served = workplace.serve(MODELS + f"    {PLACES['workers']}\n")
    pictures = [picture(1000 * seed + number, number % 40) for number in range(150)]
    random = np.random.default_rng(seed)
    with served.client() as client:
        with client.stream("reading", [{"image": image} for image in pictures], max_in_flight=32) as results:
            for number, (image, result) in enumerate(zip(pictures, results, strict=True)):
                check(image, result)
                if number in (20, 60, 100):
                    pids = sorted(served.workers().values())
                    os.kill(pids[int(random.integers(len(pids)))], signal.SIGKILL)
        assert 150 == client.statistics()["results"]
    assert [] == served.events("scheduler fault")


SKIPS = MODELS.replace(
    "outputs: {boxes: find.boxes, text: read.text}",
    "outputs: {text: read.text, ok: read.ok}\n        on_error: skip",
)


def test_a_reload_changes_a_limit_and_a_row_that_fails_can_be_skipped(workplace: Any) -> None:
    """`ok` says which rows have a result; the others hold zeros. A new limit needs no restart."""
    served = workplace.serve(SKIPS + f"    {PLACES['workers']}\n")
    image = picture(3, 6)
    boxes = reading.find(image)
    top, left, high, wide = boxes[2].tolist()
    image[top : top + high, left : left + wide, 0] = reading.BAD
    if (top, left) == (0, 0):
        image[0, 0, 0] = 6
    crops = reading.crop(image, boxes)["images"]
    ok = np.array([not (crop[..., 0] == reading.BAD).all() for crop in crops])
    assert not ok.all()
    with served.client() as client:
        result = client.infer("reading", {"image": image})
        np.testing.assert_array_equal(ok, result["ok"])
        for crop, row, good in zip(crops, result["text"], ok, strict=True):
            assert (reading.read(crop[None])[0].tolist() if good else [0.0, 0.0]) == row.tolist()
        workplace.write((SKIPS + f"    {PLACES['workers']}\n").replace("at_most: 150", "at_most: 2"))
        served.send(signal.SIGHUP)
        served.wait_for("reload ended")
        with pytest.raises(shapestream.TooLarge, match="its at_most is 2"):
            client.infer("reading", {"image": image})
        until("the reload is whole", lambda: "ok" == served.events("reload ended")[0]["result"])


def test_a_mistake_in_a_chain_is_found_before_anything_is_served(workplace: Any) -> None:
    """`check` and `serve` name its place."""
    text = (MODELS + f"    {PLACES['in process']}\n").replace(
        "image: crop.images}, each: item of crop.images", "image: find.boxes}"
    )
    config = workplace.write(text)
    for command in ("check", "serve"):
        ran = workplace.run(command, str(config))
        assert 3 == ran.returncode
        assert (
            'chains[0].stages[2].inputs.image: "image" takes u8, and find.boxes is i64 [?, 4]'
            in ran.stdout + ran.stderr
        )


def test_a_story_has_other_requests_of_the_same_id_too(served: Any) -> None:
    """An id may be that of a chain's request and of others: only the stages' requests are left out."""
    with served.client() as client:
        client.infer("finder", {"image": picture(1, 2)}, request_id="twice")
        client.infer("reading", {"image": picture(1, 30)}, request_id="twice")
        models = [story["model"] for story in client.stories("twice")]
        assert ["finder", "reading", "finder", "cropper", "reader"] == models
