"""What only programs of `torch.export` have: symbols without names, bounds in the file, state, and XLA's preparations."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conformance.engines import PRESENT
from tests.engine.conformance.models import AFFINE, PAIR, affine

from shapestream_engine import (
    Dimension,
    EngineMissing,
    InferenceError,
    InputSpec,
    ModelLoadError,
    ModelSpec,
    OutputSpec,
    Preparations,
    SignatureError,
    compile_model,
)
from shapestream_engine.compiled_model import PreparedLimits
from shapestream_engine.strategy import parse_strategy

torch = pytest.importorskip("torch")
DEVICES = [engine for engine in PRESENT if engine.engine == "torch"]
XLA = [engine for engine in DEVICES if engine.device == "xla"]


def exported(module: Any, *examples: Any, **dynamic: Any) -> Any:
    """The module as an exported program."""
    return torch.export.export(module, examples, dynamic_shapes=dynamic or None)


def spec_of(program: Any, **given: Any) -> ModelSpec:
    """A program in memory."""
    return ModelSpec(name="m", model=program, engine="torch", **given)


class Found(torch.nn.Module):
    """The places of what is not zero in a square of a fixed size: at most so many as it has elements."""

    def forward(self, x: Any) -> Any:
        """The call."""
        return torch.nonzero(x)


class Nested(torch.nn.Module):
    """Takes and returns what is not flat."""

    def forward(self, pair: Any, *, scale: Any) -> Any:
        """The call."""
        return [pair["a"] * scale, (pair["b"] + scale,)]


class Twice(torch.nn.Module):
    """An axis twice as long as that of the input."""

    def forward(self, x: Any) -> Any:
        """The call."""
        return {"y": torch.cat([x, x], 1)}


class InPlace(torch.nn.Module):
    """Writes, but only into its own."""

    def forward(self, x: Any) -> Any:
        """The call."""
        y = x + 1
        y.add_(1)
        return y


class Counter(torch.nn.Module):
    """Counts its calls, which requests would see of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        """The call."""
        self.calls.add_(1)
        return x + self.calls


def test_without_names_the_symbols_of_the_program_tie_its_ports(tmp_path: Path) -> None:
    """What is the same size has one name, though not the one it had when it was exported."""
    spec = DEVICES[0].spec(PAIR, tmp_path)
    signature = compile_model(ModelSpec(name="m", path=spec.path)).signature
    (batch, n), _ = (port.shape.names for port in signature.inputs)
    assert (batch, n) == signature.inputs[1].shape.names == signature.outputs[0].shape.names
    assert (batch,) == signature.outputs[1].shape.names
    assert batch != n
    assert not signature.has_batch


def test_a_name_for_a_symbol_goes_wherever_it_stands(tmp_path: Path) -> None:
    """Named in one input, `batch` is found in the others and in the outputs, which get their rule by it."""
    spec = DEVICES[0].spec(PAIR, tmp_path)
    inputs = {"a": InputSpec(shape="batch:1..8, ?")}
    signature = compile_model(ModelSpec(name="m", path=spec.path, inputs=inputs)).signature
    assert signature.has_batch
    assert ["rows", "rows"] == [port.rule.NAME for port in signature.outputs]
    assert "batch" == signature.inputs[1].shape.names[0]
    assert Dimension(1, 8) == signature.bounds[0]


def test_bounds_of_the_program_are_kept_and_cannot_be_exceeded() -> None:
    """A program refuses sizes beyond the bounds that it was exported with, so a configuration cannot promise them."""
    rows = torch.export.Dim("rows", min=2, max=32)
    program = exported(Twice(), torch.ones(4, 3), x={0: rows})
    assert Dimension(2, 32) == compile_model(spec_of(program)).signature.bounds[0]
    narrower = spec_of(program, inputs={"x": InputSpec(shape="batch:4..8, 3")})
    assert Dimension(4, 8) == compile_model(narrower).signature.bounds[0]
    for wanted in ("batch:1..32", "batch:2..64"):
        with pytest.raises(SignatureError, match=rf"'x': axis 0 is 2..32 in .* and {wanted[6:]} in"):
            compile_model(spec_of(program, inputs={"x": InputSpec(shape=f"{wanted}, 3")}))


@pytest.mark.parametrize(
    ("dynamic", "least"),
    [(torch.export.Dim.AUTO, 0), (torch.export.Dim.DYNAMIC, 0), (torch.export.Dim("n", min=3), 3)],
    ids=["AUTO", "DYNAMIC", "min=3"],
)
def test_a_dimension_without_a_maximum_is_open(tmp_path: Path, dynamic: Any, least: int) -> None:
    """From a file, too: it has no upper bound, sizes of 0 and 1 are taken, and a configuration may bound it."""
    program = exported(Twice(), torch.ones(4, 5), x={0: torch.export.Dim.AUTO, 1: dynamic})
    path = tmp_path / "open.pt2"
    torch.export.save(program, path)
    (x,) = compile_model(ModelSpec(name="m", path=path)).signature.inputs
    assert (Dimension(0, None), Dimension(least, None)) == x.shape.dimensions
    bounded = ModelSpec(name="m", path=path, inputs={"x": InputSpec(shape="batch:1..8, n:3..64")})
    model = compile_model(bounded)
    assert (Dimension(1, 8), Dimension(3, 64)) == model.signature.bounds
    request = model.create_infer_request()
    for rows, length in ((1, 3), (8, 64), (2, 5)):
        request.input_tensor(0).shape = (rows, length)
        request.input_tensor(0).data[...] = rows
        request.infer()
        assert (rows, 2 * length) == request.outputs()[0].shape


def test_axes_that_are_computed_from_a_size_do_not_follow_it() -> None:
    """Twice a size is none of the request's own sizes; the axis stays open."""
    program = exported(Twice(), torch.ones(4, 3), x={1: torch.export.Dim("n", min=1, max=9)})
    output = compile_model(spec_of(program)).signature.outputs[0]
    assert ((None, None), Dimension(4, 4)) == (output.shape.names, output.shape.dimensions[0])
    assert output.is_dynamic


def test_nested_arguments_and_results_are_flattened() -> None:
    """Inputs have the names of their places; outputs that have no key are numbered."""
    pair = {"a": torch.ones(2), "b": torch.ones(2)}
    program = torch.export.export(Nested(), (pair,), {"scale": torch.ones(1)})
    request = compile_model(spec_of(program)).create_infer_request()
    assert ["pair_a", "pair_b", "scale"] == [port.name for port in request.signature.inputs]
    assert ["output0", "output1"] == [port.name for port in request.signature.outputs]
    for tensor, value in zip(request.input_tensors, (2, 3, 10), strict=True):
        tensor.data[...] = value
    request.infer()
    assert [[20, 20], [13, 13]] == [output.tolist() for output in request.outputs()]


def test_operations_in_place_that_nobody_sees_are_welcome() -> None:
    """A program may write into tensors that it has made itself."""
    request = compile_model(spec_of(exported(InPlace(), torch.ones(2)))).create_infer_request()
    for _ in range(2):
        request.input_tensor(0).data[...] = 1
        request.infer()
        assert [3, 3] == request.outputs()[0].tolist()


@pytest.mark.parametrize("engine", DEVICES, ids=lambda engine: engine.name)
def test_a_program_that_keeps_a_state_is_refused(engine: Any) -> None:
    """Requests would find what other requests left behind."""
    with pytest.raises(SignatureError, match="changes calls in each call"):
        compile_model(spec_of(exported(Counter(), torch.ones(1)), device=engine.device))


@pytest.mark.parametrize("engine", DEVICES, ids=lambda engine: engine.name)
def test_sizes_that_depend_on_the_data_keep_within_their_bound(engine: Any) -> None:
    """Of 25 elements at most 25 are not zero, `<=25`: the output says so, and comes in its true size."""
    model = compile_model(spec_of(exported(Found(), torch.ones(5, 5)), device=engine.device))
    bound = model.signature.outputs[0].partial_shape
    assert (Dimension.parse("<=25"), 2) == (bound[0], bound[1].maximum)
    request = model.create_infer_request()
    random = np.random.default_rng(0)
    for share in (0.0, 0.5, 1.0, 0.2):
        x = (random.random((5, 5)) < share).astype(np.float32)
        request.input_tensor(0).data[...] = x
        request.infer()
        places = request.outputs()[0]
        np.testing.assert_array_equal(np.argwhere(x), places)
        assert bound.admits(places.shape)
        assert np.dtype(np.int64) == places.dtype


def test_a_result_that_is_not_as_stated_fails_its_call() -> None:
    """A configuration that promises fewer rows than come is found out in the call."""
    outputs = {"output0": OutputSpec(shape="..3, 2")}
    request = compile_model(
        spec_of(exported(Found(), torch.ones(5, 5)), outputs=outputs)
    ).create_infer_request()
    request.input_tensor(0).data[...] = 1
    with pytest.raises(InferenceError, match=r"output 'output0' is i64 \[..3,2\] .* \[25, 2\]"):
        request.infer()


def test_without_torch_xla_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch alone does not bring the device; its extra is another than PyTorch's."""
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setenv("XLA_EXPERIMENTAL", "")
    with pytest.raises(EngineMissing, match=r"'shapestream\[torch-xla\]'"):
        compile_model(replace(DEVICES[0].spec(AFFINE, tmp_path), device="xla"))


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own log, a traceback, is in the error and nowhere else."""
    spec = DEVICES[0].spec(AFFINE, tmp_path)
    assert spec.path is not None
    spec.path.write_bytes(spec.path.read_bytes()[:-200])
    with pytest.raises(ModelLoadError, match=r"as a program of torch\.export: ") as caught:
        compile_model(spec)
    assert 1 == len(str(caught.value).splitlines())
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda:x"])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    """Before anything is read."""
    with pytest.raises(ModelLoadError, match=f"no device '{device}'"):
        compile_model(replace(DEVICES[0].spec(AFFINE, tmp_path), device=device))


def test_the_precision_of_matrix_products_is_f32_unless_asked_otherwise(tmp_path: Path) -> None:
    """Its one property is checked, and shows among the effective ones."""
    spec = DEVICES[0].spec(AFFINE, tmp_path)
    assert "highest" == compile_model(spec).properties["float32_matmul_precision"]
    wanted = replace(spec, properties={"float32_matmul_precision": "high"})
    assert "high" == compile_model(wanted).properties["float32_matmul_precision"]
    with pytest.raises(SignatureError, match="expected one of highest, high, medium, not 'low'"):
        compile_model(replace(spec, properties={"float32_matmul_precision": "low"}))
    compile_model(spec)


@pytest.mark.parametrize("engine", XLA, ids=lambda engine: engine.name)
def test_xla_compiles_once_for_each_shape_and_says_so(engine: Any, tmp_path: Path) -> None:
    """A shape that comes again is found compiled; sizes that depend on the data are not compiled for anew."""
    model = compile_model(engine.spec(AFFINE, tmp_path))
    request = model.create_infer_request()
    assert Preparations(count=0, hits=0) == model.preparations
    for rows in (1003, 1004, 1003, 1004, 1004):  # that no other test has
        request.input_tensor(0).shape = (rows, 4)
        request.input_tensor(0).data[...] = rows
        request.infer()
        np.testing.assert_array_equal(affine(np.full((rows, 4), rows, np.float32)), request.outputs()[0])
    assert Preparations(count=2, hits=3) == model.preparations
    found = compile_model(spec_of(exported(Found(), torch.ones(5, 5)), device=engine.device))
    request = found.create_infer_request()
    for count in range(1, 25):
        request.input_tensor(0).data[...] = np.arange(25).reshape(5, 5) < count
        request.infer()
        assert count == len(request.outputs()[0])
    prepared = found.preparations
    assert prepared is not None
    assert prepared.count <= 2


@pytest.mark.parametrize("engine", XLA, ids=lambda engine: engine.name)
def test_xla_compiles_the_allowed_shapes_at_the_start_if_asked(engine: Any, tmp_path: Path) -> None:
    """With a warm-up no call of an allowed shape compiles any more."""
    strategy = parse_strategy({"strategy": "bucketed", "batch": [2011, 2017]})
    spec = replace(engine.spec(AFFINE, tmp_path), strategy=strategy, prepared=PreparedLimits(warm_up=True))
    model = compile_model(spec)
    assert model.preparations is not None
    assert 2 == model.preparations.count
    request = model.create_infer_request()
    for rows in (2017, 2011, 2017):
        request.input_tensor(0).shape = (rows, 4)
        request.infer()
    assert Preparations(count=2, hits=3) == model.preparations
