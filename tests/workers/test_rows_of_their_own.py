"""Models whose batching is not proved, served from a YAML: no call has a row that its request did not send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from onnx import helper
from tests.onnx_files import write_onnx
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.echo_model import model_settings
from tests.pipeline.serving.real_sockets import socket_serving

import shapestream
from shapestream.errors import ConfigurationError
from shapestream.loading.models import compile_models
from shapestream.serving.server import serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ServerSettings, load_settings
from shapestream.transport.zeromq import BlockingDealer, DealerSocket
from shapestream_engine import CompiledModel
from shapestream_workers.worker import Worker

IMPORTABLE = Path(__file__).parents[1] / "engine" / "importable"
Array = np.ndarray[Any, Any]

YAML = """\
server: {{listen: ["{address}"]}}
models:
  - name: m
    {source}
    inputs: {{x: {{shape: "batch:1..16, n:1..32", element_type: f32{pad}}}}}
    outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
    shapes: {shapes}
    batching: {batching}
    calibration_s: 0
    {more}
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(IMPORTABLE))


def blended(x: Array) -> Array:
    """What both models compute: each element and the mean of its column, which mixes rows."""
    return np.asarray(x + x.mean(axis=0, keepdims=True), np.float32)


def onnx_file(folder: Path) -> str:
    """`blended` as an ONNX file."""
    mean = helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1)
    nodes = [mean, helper.make_node("Add", ["x", "mean"], ["y"])]
    path = write_onnx(folder / "blended.onnx", nodes, {"x": ["batch", "n"]}, {"y": ["batch", "n"]})
    return f"path: {path}"


def written(
    folder: Path,
    source: str,
    shapes: str,
    batching: str = "{max_batch: 1}",
    pad: str = "",
    more: str = "trust: false",
) -> Path:
    """A configuration of one model."""
    path = folder / "x.yaml"
    address = f"ipc://{folder}/s"
    path.write_text(
        YAML.format(address=address, source=source, shapes=shapes, batching=batching, pad=pad, more=more)
    )
    return path


def compiled(path: Path) -> Mapping[str, CompiledModel]:
    """The models, tried; raises `ConfigurationError`."""
    loaded = load_settings(path)
    return compile_models(loaded, loaded.settings.models, slots=2, threads=1)


def requests() -> list[Array]:
    """Sixty of many sizes, of which no two hold the same."""
    random = np.random.default_rng(3)
    sizes = [(int(random.integers(1, 9)), int(random.integers(1, 33))) for _ in range(60)]
    return [random.standard_normal(size).astype(np.float32) for size in sizes]


async def answers(address: str, arrays: Sequence[Array]) -> list[Array]:
    """Of a stream of all of them, in their order."""
    found: dict[int, Array] = {}
    async with shapestream.connect(address) as client:
        source = ((number, {"x": array}) for number, array in enumerate(arrays))
        async with client.stream("m", source, max_in_flight=16) as results:
            async for result in results:
                found[result.key] = result["y"]
    return [found[number] for number in range(len(arrays))]


def wrong(arrays: Sequence[Array], found: Sequence[Array], expected: Callable[[Array], Array]) -> list[int]:
    """The requests that did not get what the model gives each of them alone."""
    return [
        number
        for number, (array, own) in enumerate(zip(arrays, found, strict=True))
        if own.shape != array.shape or not np.allclose(own, expected(array), rtol=1e-4, atol=1e-5)
    ]


async def served(path: Path, arrays: Sequence[Array]) -> list[Array]:
    """The answers of a server of this configuration, over sockets."""
    settings = load_settings(path).settings
    models = compiled(path)
    (address,) = settings.server.listen
    async with socket_serving(address, SlotThreads(models=models, slots=2), models=settings.models_by_name):
        return await answers(address, arrays)


@pytest.mark.parametrize("kind", ["function", "onnx"])
@pytest.mark.parametrize("shapes", ["{max_prepared: 4}", "{max_prepared: 12, static: [{batch: 8, n: 32}]}"])
@real_time
async def test_a_model_that_mixes_rows_is_never_given_copies_of_them(
    tmp_path: Path, kind: str, shapes: str
) -> None:
    """`max_batch: 1` is how docs/safety.md serves it; a cap on shapes leaves its rows as they are."""
    source = "function: breakable:blended" if kind == "function" else onnx_file(tmp_path)
    arrays = requests()
    assert [] == wrong(arrays, await served(written(tmp_path, source, shapes), arrays), blended)


@real_time
async def test_other_dimensions_are_still_rounded_under_the_cap(tmp_path: Path) -> None:
    """Padding is proved by itself: columns of zeros change nothing for the columns of a request."""
    path = written(tmp_path, "function: breakable:blended", "{max_prepared: 4}", pad=", pad: {n: 0}")
    arrays = [array for array in requests() for _ in range(3)]
    settings = load_settings(path).settings
    (address,) = settings.server.listen
    local = SlotThreads(models=compiled(path), slots=2)
    async with socket_serving(address, local, models=settings.models_by_name) as server:
        assert [] == wrong(arrays, await answers(address, arrays), blended)
        assert server.statistics()["distinct_shapes"] <= 8 * 4, "four at most for each number of rows"


@real_time
async def test_copies_of_rows_are_not_made_where_the_trial_could_tell_nothing(tmp_path: Path) -> None:
    """Requests may share calls then, with a warning; nothing that was not sent is added to a call."""
    path = written(tmp_path, "function: breakable:secretly_counted", "{max_prepared: 4}", "{}")
    arrays = [np.full((rows, 3), 7.0, np.float32) for rows in (1, 2, 3, 5, 6, 7, 9, 11, 3, 5)]
    settings = load_settings(path).settings
    (address,) = settings.server.listen
    async with (
        socket_serving(address, SlotThreads(models=compiled(path)), models=settings.models_by_name),
        shapestream.connect(address) as client,
    ):
        for array in arrays:  # one after the other, so that none has company
            result = await client.infer("m", {"x": array})
            assert float(len(array)) == result["y"].max()


@pytest.mark.parametrize(
    ("function", "batching", "shapes", "promised"),
    [
        ("blended", "{max_batch: 1}", "{}", None),
        ("blended_from_nine", "{max_batch: 8}", "{}", None),
        ("blended_from_nine", "{max_batch: 8}", "{}", 64),
        ("blended_from_nine", "{max_batch: 8}", "{static: [{batch: 16, n: 3}]}", None),
    ],
)
@real_time
async def test_a_server_makes_no_larger_calls_than_a_worker_has_tried(
    tmp_path: Path, function: str, batching: str, shapes: str, promised: int | None
) -> None:
    """The worker's configuration alone has `max_batch`; the server knows the model from the worker, or has another."""
    models = compiled(written(tmp_path, f"function: breakable:{function}", shapes, batching))
    clients, workers = f"ipc://{tmp_path}/c", f"ipc://{tmp_path}/w"
    arrays = [np.random.default_rng(number).random((2, 3), np.float32) for number in range(60)]
    async with trio.open_nursery() as nursery:
        known = {} if promised is None else {"m": model_settings(max_batch=promised)}
        settings = ServerSettings(listen=(clients,), worker_listen=workers)
        await nursery.start(partial(serve, settings, models=known))

        def connect() -> Any:
            socket = DealerSocket()
            socket.connect(workers)
            return socket

        dial = partial(BlockingDealer, workers)
        joined = trio.Event()
        worker = Worker("w", SlotThreads(models=models, dial=dial), connect, ready=joined.set)
        nursery.start_soon(worker.run)
        await joined.wait()  # else the server may know no model yet
        found = await answers(clients, arrays)
        nursery.cancel_scope.cancel()
    assert [] == wrong(arrays, found, blended if function == "blended" else np.copy)


@pytest.mark.parametrize("bound", [64, 12])
def test_calls_that_a_cap_fills_up_are_tried(tmp_path: Path, bound: int) -> None:
    """A request of more rows than `max_batch` is filled up to the bound: for a model that mixes so many that is refused."""
    path = written(tmp_path, "function: breakable:blended_from_nine", "{max_prepared: 4}", "{max_batch: 8}")
    path.write_text(path.read_text().replace("batch:1..16", f"batch:1..{bound}"))
    with pytest.raises(ConfigurationError, match=r"output 'y'.*batching.*changes the results"):
        compiled(path)


@pytest.mark.parametrize("batching", ["{max_batch: 1}", "{batch_invariant: 1, max_batch: 1}"])
def test_rows_are_not_divided_over_calls_before_that_is_tried(tmp_path: Path, batching: str) -> None:
    """Calls of one row divide every larger request: for a model that mixes rows that is refused."""
    shapes = "{strategy: partitioned, batch: [1]}" if "invariant" not in batching else "{}"
    with pytest.raises(
        ConfigurationError,
        match=r"output 'y'.*(changes the results|the results depend on the rest of the call)",
    ):
        compiled(written(tmp_path, "function: breakable:blended", shapes, batching))
