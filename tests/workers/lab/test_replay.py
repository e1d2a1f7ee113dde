"""The requests of a trace, errors for a trace that does not fit, and made-up inputs; and their replay."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.workers.lab.worlds import write_trace

from shapestream import connect
from shapestream.errors import ConfigurationError, InvalidRequest
from shapestream.settings import ModelSettings
from shapestream.telemetry.trace import TraceRequest
from shapestream.testing import Arrays, ScriptedModel, ScriptedServer, identity_signature, serve_in_thread
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab import serving
from shapestream_workers.lab.serving import InputMaker, read_requests

SIGNATURE = ModelSignature.from_dict(
    {
        "name": "m",
        "inputs": [{"name": "x", "element_type": "f32", "shape": "batch:1..8, seq:1..64", "pad": {"seq": 0}}],
        "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, 4", "rule": {"rule": "rows"}}],
    }
)


def test_one_models_requests_are_read(tmp_path: Path) -> None:
    """In order; those of other models are left out."""
    requests = [TraceRequest(number / 10, number % 2, 0, (1, 1 + number)) for number in range(10)]
    models = {"other": ("batch", "seq"), "m": ("batch", "seq")}
    found = read_requests(write_trace(tmp_path / "t", requests, models), SIGNATURE)
    assert [2, 4, 6, 8, 10] == [request.sizes[1] for request in found]


@pytest.mark.parametrize(
    ("models", "sizes", "words"),
    [
        ({"other": ("batch", "seq")}, (1, 1), "no request of the model 'm'; it is about other"),
        ({"m": ("batch", "length")}, (1, 1), r"\[batch, length\], but the model has \[batch, seq\]"),
        ({"m": ("seq",)}, (1,), "a trace of another model"),
        ({"m": ("batch", "seq")}, (1, 65), r"seq 65: the model takes 1\.\.64"),
        ({"m": ("batch", "seq")}, (9, 1), "batch 9: the model takes"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    tmp_path: Path, models: Mapping[str, tuple[str, ...]], sizes: tuple[int, ...], words: str
) -> None:
    """With the file, and what does not fit."""
    path = write_trace(tmp_path / "t", [TraceRequest(0.0, 0, 0, sizes)], models)
    with pytest.raises(ConfigurationError, match=words) as raised:
        read_requests(path, SIGNATURE)
    assert str(path) in str(raised.value)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    """Nothing can be learned from it."""
    with pytest.raises(ConfigurationError, match="no request"):
        read_requests(write_trace(tmp_path / "t", []), SIGNATURE)


MASKED = ModelSignature.from_dict(
    {
        "name": "m",
        "inputs": [
            {"name": "ids", "element_type": "i64", "shape": "batch:1..8, seq:1..64", "pad": {"seq": 0}},
            {
                "name": "mask",
                "element_type": "i64",
                "shape": "batch, seq",
                "pad": {"seq": 0},
                "mask_of": "ids",
            },
        ],
        "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, 4", "rule": {"rule": "rows"}}],
    }
)
SETTINGS = ModelSettings.model_validate(
    {"name": "m", "function": "numpy:sort", "probe": {"ids": {"integers": [5, 9]}}},
    context={"base": None, "files_must_exist": False},
)


def test_inputs_are_what_the_probe_describes_and_masks_are_left_to_the_server() -> None:
    """The same for the same sizes, so that making them costs nothing while something is measured."""
    maker = InputMaker(SETTINGS, MASKED)
    arrays = maker.arrays((2, 30))
    assert {"ids"} == set(arrays)
    assert (2, 30) == arrays["ids"].shape
    assert {5, 6, 7, 8, 9} == set(arrays["ids"].ravel().tolist())
    assert maker.arrays((2, 30)) is maker.arrays((2, 30))


def test_inputs_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before go when they are too many; the newest stays, however large."""
    monkeypatch.setattr(serving, "MAX_KEPT_BYTES", 3 * 8 * 10)
    maker = InputMaker(SETTINGS, MASKED)
    first = maker.arrays((1, 10))
    second = maker.arrays((1, 12))
    assert (True, True) == (first is maker.arrays((1, 10)), second is maker.arrays((1, 12)))
    third = maker.arrays((1, 9))
    assert (False, True) == (first is maker.arrays((1, 10)), third is maker.arrays((1, 9)))
    huge = maker.arrays((8, 64))
    assert huge is maker.arrays((8, 64))


def test_every_request_is_replayed_until_the_time_is_over_or_one_fails(tmp_path: Path) -> None:
    """At its own size; the rate is that of results."""
    seen: list[int] = []

    def answer(inputs: Arrays) -> Arrays:
        if len(inputs["x"]) > 8:
            raise InvalidRequest("too many rows")
        seen.append(len(inputs["x"]))
        return {"y": inputs["x"]}

    signature = identity_signature("m")
    settings = ModelSettings.model_validate(
        {"name": "m", "function": "numpy:sort"}, context={"base": None, "files_must_exist": False}
    )

    async def play(address: str, *rows: int, most_s: float = 60.0) -> float:
        requests = [TraceRequest(0.0, 0, 0, (each,)) for each in rows]
        async with connect(address) as client:
            return await serving.replay(
                client, "m", requests, InputMaker(settings, signature), in_flight=2, most_s=most_s
            )

    with serve_in_thread(ScriptedServer(ScriptedModel(signature, answer)), f"ipc://{tmp_path}/s") as address:
        assert trio.run(play, address, 1, 2, 3, 4, 5) > 0
        assert [1, 2, 3, 4, 5] == sorted(seen)
        assert 0 == trio.run(partial(play, address, 6, 7, most_s=-1.0))
        with pytest.raises(InvalidRequest, match="too many rows"):
            trio.run(play, address, 8, 9)
    assert 6 not in seen
