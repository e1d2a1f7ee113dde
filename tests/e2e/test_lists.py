"""A function that returns a list of arrays, one per box, is served as other models: in process, in workers, over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import trio

import shapestream
from shapestream import aio
from shapestream.client.opened_models import Result

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock], http: "127.0.0.1:0"}
    models:
      - name: crop
        function: cropping:crop
        inputs:
          image: {shape: "height, width, 3", element_type: u8}
          boxes: {shape: "boxes, 4", element_type: i64}
        outputs:
          images: {rule: list, shape: "height, width, 3", element_type: u8}
          count: {shape: "", element_type: i64}
        calibration_s: 0
"""
PLACES = {"in process": "in_process: true", "worker": "workers: [{count: 1, slots: 1}]"}
PICTURE = np.random.default_rng(3).integers(0, 255, (70, 90, 3), np.uint8)
BOXES = np.array([[0, 0, 1, 1], [5, 6, 40, 30], [69, 0, 9, 9], [10, 10, 0, 4]], np.int64)
INPUTS = {"image": PICTURE, "boxes": BOXES}
CROPS = [PICTURE[0:1, 0:1], PICTURE[5:45, 6:36], PICTURE[69:70, 0:9], PICTURE[10:10, 10:14]]


@pytest.fixture(scope="module", params=PLACES)
def crop_server(request: pytest.FixtureRequest, module_workplace: Any) -> Iterator[Any]:
    """The server, with the function in its own process or in a worker's."""
    served = module_workplace.serve(SERVED + f"    {PLACES[request.param]}\n")
    served.wait_for("gateways ready")
    yield served
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def check(result: Result, crops: list[np.ndarray[Any, Any]]) -> None:
    """Holds a result against NumPy: two keys, and the crops as views that cannot be written."""
    assert ["images", "count"] == list(result)
    assert (2, False) == (len(result), "images.shapes" in result)
    images = result["images"]
    assert [(each.shape, each.tobytes()) for each in crops] == [
        (each.shape, each.tobytes()) for each in images
    ]
    assert len(crops) == result["count"]
    elements = result.tensor("images")
    assert not any(each.flags.writeable for each in images)
    assert all(np.shares_memory(each, elements) for each in images if each.size)
    assert [list(each.shape) for each in crops] == result.tensor("images.shapes").tolist()
    assert images is result["images"]


def test_a_list_reaches_each_face_of_the_sdk(crop_server: Any) -> None:
    """Blocking, trio and asyncio: single requests and streams give the same list."""
    with crop_server.client() as client:
        check(client.infer("crop", INPUTS), CROPS)
        with client.stream("crop", [INPUTS, INPUTS]) as results:
            for result in results:
                check(result, CROPS)

    async def by_trio() -> Result:
        async with shapestream.connect(crop_server.address) as client:
            return await client.infer("crop", INPUTS)

    async def by_asyncio() -> Result:
        async with aio.connect(crop_server.address) as client:
            return await client.infer("crop", INPUTS)

    check(trio.run(by_trio), CROPS)
    check(asyncio.run(by_asyncio()), CROPS)


def test_no_boxes_and_thousands_of_boxes(crop_server: Any) -> None:
    """The number of arrays is that of the data: none, or 2,000."""
    with crop_server.client() as client:
        check(client.infer("crop", {**INPUTS, "boxes": np.zeros((0, 4), np.int64)}), [])
        check(client.infer("crop", {**INPUTS, "boxes": np.tile(BOXES, (500, 1))}), CROPS * 500)


def test_http_gives_the_two_tensors(crop_server: Any) -> None:
    """The protocol knows no lists: the elements in one row, and the shapes."""
    (ready,) = crop_server.events("http ready")
    connection = HTTPConnection("127.0.0.1", int(ready["address"].rpartition(":")[2]), timeout=120)
    image = PICTURE[:8, :9]
    body = {
        "inputs": [
            {"name": "image", "datatype": "UINT8", "shape": image.shape, "data": image.ravel().tolist()},
            {"name": "boxes", "datatype": "INT64", "shape": [2, 4], "data": [[0, 0, 2, 3], [1, 1, 1, 1]]},
        ]
    }
    connection.request("POST", "/v2/models/crop/infer", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    outputs = {output["name"]: (output["shape"], output["data"]) for output in answer["outputs"]}
    elements = np.concatenate([image[:2, :3].ravel(), image[1, 1]]).tolist()
    assert {
        "images": ([21], elements),
        "images.shapes": ([2, 3], [2, 3, 3, 1, 1, 3]),
        "count": ([], [2]),
    } == outputs


def test_infer_prints_and_saves_each_array(crop_server: Any, module_workplace: Any) -> None:
    """A list in JSON, a line per array as text, a file per array."""
    np.save(module_workplace.folder / "image.npy", PICTURE)
    np.save(module_workplace.folder / "boxes.npy", BOXES)
    arguments = ("infer", crop_server.address, "crop", "image=image.npy", "boxes=boxes.npy")
    ran = module_workplace.run(*arguments, "--json", "--save", "out")
    images = json.loads(ran.stdout)["outputs"]["images"]
    assert [crop.tolist() for crop in CROPS] == [image["data"] for image in images]
    np.testing.assert_array_equal(CROPS[1], np.load(module_workplace.folder / "out" / "images.1.npy"))
    lines = module_workplace.run(*arguments).stdout.splitlines()
    assert ["images: 4 arrays", "images[0]: u8 [1, 1, 3]"] == lines[:2]
