"""Batch-invariant mode: the same bits whoever shares the call, proved at the start, or refused."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
from openvino import opset13 as op
from tests.engine.slot_bench import SlotBench
from tests.entries import Failure, ResultEntry, request_of
from tests.onnx_files import write_forest
from tests.pipeline.serving.harness import memory_serving

from shapestream.errors import ConfigurationError
from shapestream.loading.models import compile_models, model_spec
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import load_settings
from shapestream_engine import CompiledModel
from shapestream_engine.layout import Tensors
from shapestream_engine.strategy import Strategy

IMPORTABLE = Path(__file__).parents[1] / "engine" / "importable"
Array = np.ndarray[Any, Any]

YAML = """\
models:
  - name: m
    {source}
    inputs: {{x: {{shape: "batch:1..8, n:1..64", element_type: f32, pad: {{n: 0}}}}}}
    outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
    shapes: {shapes}
    batching: {batching}
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(IMPORTABLE))


def written(
    folder: Path, batching: str, source: str = "function: breakable:slightly", shapes: str = "{}"
) -> Path:
    """A configuration of one model."""
    path = folder / "x.yaml"
    path.write_text(YAML.format(source=source, shapes=shapes, batching=batching))
    return path


def compiled(path: Path) -> CompiledModel:
    """The model, proved; raises `ConfigurationError`."""
    loaded = load_settings(path)
    return compile_models(loaded, loaded.settings.models, slots=1, threads=1)["m"]


@pytest.mark.parametrize(
    ("batching", "rows"),
    [
        ("{}", None),
        ("{batch_invariant: false}", None),
        ("{batch_invariant: true}", 4),
        ("{batch_invariant: true, max_batch: 2}", 2),
        ("{batch_invariant: true, max_batch: 64}", 4),
        ("{batch_invariant: 8}", 8),
        ("{batch_invariant: 1}", 1),
    ],
)
def test_every_call_has_as_many_rows_as_is_said_and_nothing_is_padded(
    tmp_path: Path, batching: str, rows: int | None
) -> None:
    """`true` means 4, or fewer where a batch has no more."""
    (model,) = load_settings(written(tmp_path, batching)).settings.models
    spec = model_spec(model)
    if rows is None:
        assert {"n": 0} == spec.inputs["x"].pad
        return
    assert Strategy({"batch": (rows,)}) == spec.strategy
    assert {} == spec.inputs["x"].pad


@pytest.mark.parametrize(
    ("batching", "shapes", "words"),
    [
        (
            "{batch_invariant: 0}",
            "{}",
            "batching.batch_invariant: expected true, false or a number of rows from 1",
        ),
        ("{batch_invariant: many}", "{}", 'a number of rows from 1, got "many" (write true, or 8)'),
        (
            "{batch_invariant: true}",
            "{max_prepared: 9}",
            "shapes.max_prepared: batch_invariant runs exact shapes",
        ),
        (
            "{batch_invariant: 2}",
            "{strategy: bucketed, n: 8}",
            "shapes.strategy: batch_invariant runs exact shapes",
        ),
        ("{batch_invariant: 2}", "{static: [{batch: 1, n: 8}]}", "shapes.static: batch_invariant runs exact"),
    ],
)
def test_what_contradicts_it_is_refused(tmp_path: Path, batching: str, shapes: str, words: str) -> None:
    """With the place of what to remove."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(written(tmp_path, batching, shapes=shapes))
    assert words in "\n".join(caught.value.problems)


def test_more_rows_than_the_model_takes_are_refused(tmp_path: Path) -> None:
    """Where the setting stands."""
    with pytest.raises(ConfigurationError) as caught:
        compiled(written(tmp_path, "{batch_invariant: 9}"))
    (problem,) = caught.value.problems
    assert "models[0].batching.batch_invariant" in problem
    assert "9 is not within 1..8" in problem


@pytest.mark.parametrize("function", ["barely", "by_position"])
def test_a_model_whose_last_bits_depend_on_the_company_is_refused(tmp_path: Path, function: str) -> None:
    """Though it is served without the mode, where that much is within the tolerance of its element type."""
    source = f"function: breakable:{function}"
    compiled(written(tmp_path, "{}", source)).close()
    with pytest.raises(ConfigurationError) as caught:
        compiled(written(tmp_path, "{batch_invariant: true}", source))
    refused = [line for line in caught.value.problems if "batching.batch_invariant" in line]
    assert 1 == len(refused)
    assert "output 'y': the results depend on the rest of the call: largest difference" in refused[0]
    assert "where 0 is allowed" in refused[0]


def test_steps_that_the_company_moves_are_found(tmp_path: Path) -> None:
    """By requests near them: few others show it."""
    with pytest.raises(ConfigurationError, match="depend on the rest of the call"):
        compiled(written(tmp_path, "{batch_invariant: true}", "function: breakable:near_its_steps"))


@pytest.mark.parametrize("batching", ["{batch_invariant: true}", "{batch_invariant: 1}"])
def test_floats_that_the_number_of_rows_moves_are_refused(tmp_path: Path, batching: str) -> None:
    """A lone request, or one of several rows, would get others than in a call of its own rows."""
    with pytest.raises(ConfigurationError, match="as they are served, the request alone gets other results"):
        compiled(written(tmp_path, batching, "function: breakable:by_count"))


FOREST = """\
models:
  - name: m
    path: forest.onnx
    engine: onnxruntime
    properties: {intra_op_num_threads: 2}
"""
STATED = '    inputs: {x: {shape: "batch:1..16, 8"}}\n'


@pytest.mark.parametrize("stated", [STATED, ""], ids=["stated", "shapes of the file"])
def test_a_forest_on_two_threads_gets_equal_rows_for_equal_labels(
    tmp_path: Path, stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without, labels differ in company: the proof says so, and the advice that it prints is right."""
    write_forest(tmp_path / "forest.onnx")
    path = tmp_path / "x.yaml"
    path.write_text(FOREST + stated)
    advice = "batching: {batch_invariant: true}"
    if stated:
        with pytest.raises(ConfigurationError) as caught:
            compiled(path)
        told = "\n".join(caught.value.problems)
    else:
        compiled(path).close()
        told = capsys.readouterr().out
    assert "output 'label': batching" in told
    assert "changes the results: largest difference" in told
    assert f"(set {advice}, because the number of rows decides" in told
    path.write_text(f"{FOREST}{stated}    {advice}\n")
    model = compiled(path)
    rows = np.random.default_rng(1).normal(size=(300, 8)).astype(np.float32)
    bench = SlotBench(model)
    alone = [answer["label"].tolist() for row in rows for answer in bench.results(row[None])]
    together = [
        answer["label"].tolist()
        for at in range(0, len(rows), 3)
        for answer in bench.results(*[row[None] for row in rows[at : at + 3]])
    ]
    model.close()
    assert alone == together


def test_a_verdict_on_the_same_calls_is_no_verdict_on_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proved as `padded`, which allows for rounding, a model is refused as `batch_invariant` all the same."""
    monkeypatch.setenv("SHAPESTREAM_PROBE_CACHE", str(tmp_path / "probe"))
    source = "function: breakable:barely"
    text = written(tmp_path, "{}", source, "{strategy: padded, batch: 4}")
    text.write_text(text.read_text().replace(", pad: {n: 0}", ""))
    compiled(text).close()
    with pytest.raises(ConfigurationError, match="depend on the rest of the call"):
        compiled(written(tmp_path, "{batch_invariant: 4}", source))


def mixing(folder: Path) -> Path:
    """[batch, n] -> [batch, n]: two layers over the last axis, of sums long enough to be added in several orders."""
    x = op.parameter([-1, -1], np.float32, name="x")
    random = np.random.default_rng(0)
    wide = op.unsqueeze(x, op.constant(np.int64(2)))
    for rows, columns in ((1, 256), (256, 257), (257, 1)):
        weights = op.constant(random.standard_normal((rows, columns)).astype(np.float32))
        wide = op.tanh(op.matmul(wide, weights, False, False))
    result = op.squeeze(wide, op.constant(np.int64(2)))
    result.output(0).get_tensor().set_names({"y"})
    path = folder / "mixing.xml"
    ov.save_model(ov.Model([op.result(result)], [x]), path, compress_to_fp16=False)
    return path


def served(model: CompiledModel, rounds: list[list[Array]]) -> list[list[bytes]]:
    """What a server answers to each round, all of whose requests come in one message."""
    answers: list[list[bytes]] = []

    async def main() -> None:
        # Real threads run, so the clock is the real one.
        with trio.fail_after(60):
            async with memory_serving(SlotThreads(models={"m": model})) as running:
                client = running.client()
                await client.open_session(model="m")
                number = 0
                for arrays in rounds:
                    got: dict[int, bytes] = {}
                    first = number
                    requests = []
                    for array in arrays:
                        tensors = Tensors(layout=((0, "f32", array.shape),), buffers=(array.tobytes(),))
                        requests.append(request_of(number, tensors))
                        number += 1
                    client.say(*requests)
                    while len(got) < len(arrays):
                        answer: Any = await client.hear((ResultEntry, Failure))  # type: ignore[arg-type] # either of them
                        assert isinstance(answer, ResultEntry), answer
                        got[answer.sequence] = bytes(answer.tensors.buffers[0])
                    answers.append([got[first + place] for place in range(len(arrays))])

    trio.run(main)
    return answers


def test_results_are_equal_to_the_bit_whoever_comes_along(tmp_path: Path) -> None:
    """On the real OpenVINO and through a real server: alone, at any place, beside anything, and in several rows."""
    path = written(tmp_path, "{batch_invariant: true}", f"path: {mixing(tmp_path)}")
    model = compiled(path)
    random = np.random.default_rng(1)
    ones = [random.standard_normal((1, 23)).astype(np.float32) for _ in range(3)]
    strangers = [(random.standard_normal((rows, 23)) * 1e3).astype(np.float32) for rows in (1, 2, 3, 1, 1)]
    rounds = [[one] for one in ones]
    rounds += [[*strangers[:place], one, *strangers[place:]] for one in ones for place in range(6)]
    rounds += [
        [ones[2], ones[1], ones[0]],
        [np.concatenate(ones)],
        [random.random((1, 9), np.float32), ones[0]],
    ]
    answers = served(model, rounds)
    alone = [answers[place][0] for place in range(3)]
    at = 3
    for number in range(3):
        for place in range(6):
            assert alone[number] == answers[at][place]
            at += 1
    assert alone[::-1] == answers[at]
    assert b"".join(alone) == answers[at + 1][0]
    assert alone[0] == answers[at + 2][1]
    model.close()


def test_the_signature_says_that_nothing_is_padded(tmp_path: Path) -> None:
    """What clients and `models` see."""
    model = compiled(written(tmp_path, "{batch_invariant: 2}", f"path: {mixing(tmp_path)}"))
    described = textwrap.dedent("\n".join(model.signature.describe()))
    assert "batch: 1..8, filled up to calls of 2" in described
    assert "n: 1..64, never padded" in described
    model.close()
