"""Inputs that the requests of a call have in common: a rate, a flag, a threshold, without the batch axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_onnx

from shapestream_engine import (
    InputPort,
    InputSpec,
    ModelSpec,
    OutputSpec,
    ShapeError,
    SignatureError,
    compile_model,
)
from shapestream_engine.batch_axis import with_batch_axis, without_rules
from shapestream_engine.batching.calls import Piece
from shapestream_engine.compiled_model import RequestPool
from shapestream_engine.layout import Tensors
from shapestream_engine.probe import ProbeOptions, ProbeReport, prove
from shapestream_engine.probing.inputs import Integers
from shapestream_engine.shapes import NamedShape
from shapestream_engine.slot import Runner, run_batch

IMPORTABLE = Path(__file__).parent / "importable"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(IMPORTABLE)


def spec_of(function: str = "scaled", value: float | None = None, rate: str = "") -> ModelSpec:
    """A function of rows and a rate."""
    return ModelSpec(
        name="m",
        function=f"breakable:{function}",
        inputs={
            "x": InputSpec(shape="batch:1..16, 3", element_type="f32"),
            "rate": InputSpec(shape=rate, element_type="i64", value=value),
        },
        outputs={"y": OutputSpec(shape="batch, 3", element_type="f32")},
    )


def request(rows: int, rate: int | None) -> Tensors:
    """Rows that count from 1; without a rate that input is left out."""
    x = np.arange(1, 1 + 3 * rows, dtype=np.float32).reshape(rows, 3)
    layout: list[Any] = [(0, "f32", (rows, 3))]
    buffers = [x.tobytes()]
    if rate is not None:
        layout.append((1, "i64", ()))
        buffers.append(np.int64(rate).tobytes())
    return Tensors(layout=tuple(layout), buffers=buffers)


def run(spec: ModelSpec, *members: Tensors) -> list[list[float]] | str:
    """The first row of each answer of one call, or why it failed."""
    with_model = compile_model(spec)
    runner = Runner("s", {"m": RequestPool(with_model, 1)})
    signature = with_model.signature
    report = run_batch(runner, signature, members, [signature.resolve(member.layout) for member in members])
    if report.outputs is None:
        return report.message
    return [
        np.frombuffer(output.buffers[0], np.float32)[:3].tolist()
        for output in report.outputs
        if output is not None
    ]


def test_requests_with_equal_bytes_share_a_call() -> None:
    """The input is written once; each request has its own rows of the answer."""
    assert [[2, 4, 6], [2, 4, 6]] == run(spec_of(), request(1, 2), request(2, 2))


def test_requests_with_other_bytes_share_none() -> None:
    """Whoever put them together is told, and nobody gets an answer of another rate."""
    assert "requests with other bytes of input 'rate' share no call" in str(
        run(spec_of(), request(1, 2), request(1, 3))
    )


def test_a_fixed_value_need_not_be_sent_and_cannot_be_another() -> None:
    """Left out or sent, it is the same; with another one the request fails."""
    fixed = spec_of(value=5)
    assert [[5, 10, 15], [5, 10, 15]] == run(fixed, request(1, None), request(1, 5))
    assert "input 'rate' is always 5 (leave it out, or send that)" in str(run(fixed, request(1, 6)))


def test_what_is_not_fixed_must_be_sent() -> None:
    """The message says which inputs may be left out."""
    signature = compile_model(spec_of()).signature
    with pytest.raises(
        ShapeError, match=r"missing input 'rate'.*only masks and fixed values may be left out"
    ):
        signature.resolve(request(1, None).layout)


def test_a_request_of_several_calls_has_its_input_in_each() -> None:
    """Its rows are divided, what it has in common is not."""
    model = compile_model(spec_of())
    pool = RequestPool(model, 1)
    member = request(4, 7)
    shape = model.signature.resolve(member.layout)
    cut, own = pool.cutter.cut(Piece(0, 1, 3), [member], [shape])
    assert ((2, 3), ()) == tuple(entry[2] for entry in cut.layout)
    assert (2, np.int64(7).tobytes()) == (own.rows, bytes(cut.buffers[1]))


def test_rows_without_elements_need_no_call_whatever_they_have_in_common() -> None:
    """The rate is no element of theirs."""
    spec = spec_of()
    signature = compile_model(
        ModelSpec(
            name="m",
            function="breakable:scaled",
            inputs={**spec.inputs, "x": InputSpec(shape="batch, 3", element_type="f32")},
            outputs=spec.outputs,
        )
    ).signature
    answer = signature.resolve(request(0, 2).layout).answer
    assert answer is not None
    assert ((0, "f32", (0, 3)),) == answer.layout


@pytest.mark.parametrize(
    ("port", "words"),
    [
        (
            {"shape": "batch", "element_type": "i64", "value": 1},
            "is for numbers of one shape, without a batch axis",
        ),
        (
            {"shape": "257", "element_type": "f32", "value": 1},
            "of at most 1024 bytes; this input is f32 [257]",
        ),
        ({"shape": "", "element_type": "str", "value": 1}, "this input is str []"),
        ({"shape": "", "element_type": "u8", "value": 256}, "value: u8 cannot hold 256"),
        ({"shape": "", "element_type": "i64", "value": 1.5}, "value: i64 cannot hold 1.5"),
    ],
)
def test_a_value_that_cannot_be_fixed_is_refused(port: dict[str, Any], words: str) -> None:
    """With what the input is."""
    with pytest.raises(SignatureError) as refused:
        InputPort("k", port["element_type"], NamedShape.parse(port["shape"]), value=port["value"])
    assert words in str(refused.value)


def proof_of(spec: ModelSpec, **values: Integers) -> ProbeReport:
    """The report of a proof."""
    return prove(spec, compile_model(spec), ProbeOptions(values=values, budget_s=4.0), threads=1)


def test_a_model_is_proved_at_several_values_of_what_requests_have_in_common() -> None:
    """The report names them; at a rate of 0 every answer is 0, which would show nothing."""
    report = proof_of(spec_of())
    assert ["proved"] == [finding.verdict for finding in report.findings]
    assert "1, 8000, 2, 10, 100, 1000, 16000" == report.inputs["rate"]


def test_a_model_that_mixes_rows_at_one_value_is_refuted() -> None:
    """Though it keeps them apart at the others; where only other values are declared, it is proved."""
    assert ["refuted"] == [finding.verdict for finding in proof_of(spec_of("blended_at_rate")).findings]
    report = proof_of(spec_of("blended_at_rate"), rate=Integers(8000, 8000))
    assert (["proved"], "8000") == ([finding.verdict for finding in report.findings], report.inputs["rate"])
    fixed = proof_of(spec_of("blended_at_rate", value=16000))
    assert (["refuted"], "16000") == ([finding.verdict for finding in fixed.findings], fixed.inputs["rate"])


def test_the_batch_axis_is_looked_for_in_the_other_inputs(tmp_path: Path) -> None:
    """It may be a later one, if that is the only one without a name whose size is open: the state of a layer."""
    nodes = [
        helper.make_node("Mul", ["x", "k"], ["scaled"]),
        helper.make_node("Add", ["scaled", "state"], ["y"]),
    ]
    types = dict.fromkeys(("x", "k", "state", "y"), TensorProto.FLOAT)
    path = write_onnx(
        tmp_path / "m.onnx",
        nodes,
        {"x": [None, 4], "k": [], "state": [2, None, 4]},
        {"y": [2, None, 4]},
        types=types,
    )
    spec = ModelSpec(path=path, engine="onnxruntime")
    guess = with_batch_axis(spec, without_rules(spec))
    assert isinstance(guess, ModelSpec)
    assert {"x": "batch, 4", "state": "2, batch, 4"} == {
        name: port.shape for name, port in guess.inputs.items()
    }
