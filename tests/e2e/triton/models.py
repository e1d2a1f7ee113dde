"""The models of the comparison, and what each server is given to serve them: one table, two configurations."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import IMPORTABLE

INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_ELEMENT_TYPES = {
    "BOOL": "boolean",
    "FP16": "f16",
    "FP32": "f32",
    "FP64": "f64",
    **{name: name.lower().replace("uint", "u").replace("int", "i") for name in INTEGERS},
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an output; sizes are numbers or names of dimensions, without the batch axis."""

    name: str
    datatype: str
    dims: tuple[str | int, ...] = ("n",)


@dataclass(frozen=True, slots=True)
class Model:
    """A function of `importable/beside_triton.py`, served by both."""

    name: str
    function: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch: int = 8
    """Most rows of a request; 0: no batch axis."""


_TYPED = tuple(Tensor(name.lower(), name) for name in ("BOOL", "FP32", "FP64", *INTEGERS))
MODELS = (
    Model("sort", "sort", (Tensor("a", "FP32"),), (Tensor("sorted", "FP32"),)),
    Model(
        "places",
        "places",
        (Tensor("a", "FP32", ("height", "width")),),
        (Tensor("places", "INT64", ("count", 2)),),
        max_batch=0,
    ),
    Model(
        "scale",
        "scale",
        (Tensor("x", "FP32"), Tensor("k", "INT64", (1,))),
        (Tensor("scaled", "FP32"), Tensor("count", "INT32", (1,))),
    ),
    Model("types", "same", _TYPED, tuple(Tensor(f"{one.name}_out", one.datatype) for one in _TYPED)),
    Model("half", "same", (Tensor("x", "FP16"),), (Tensor("x_out", "FP16"),)),
    Model("root", "root", (Tensor("x", "FP32"),), (Tensor("y", "FP32"),)),
    Model("fail", "fail", (Tensor("x", "FP32"),), (Tensor("y", "FP32"),)),
    Model("counted", "fail", (Tensor("x", "FP32"),), (Tensor("y", "FP32"),)),
)


# ---------------------------------------------------------------- Triton's model repository

_MODEL = """\
import beside_triton
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            given = {{tensor.name(): tensor.as_numpy() for tensor in request.inputs()}}
            results = beside_triton.{function}(**given)
        except Exception as error:
            return pb.InferenceResponse([], pb.TritonError(str(error)))
        wanted = request.requested_output_names()
        return pb.InferenceResponse([pb.Tensor(name, results[name]) for name in results if name in wanted])
"""


def write_repository(folder: Path) -> None:
    """Write the folder that Triton serves from."""
    for model in MODELS:
        version = folder / model.name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL.format(function=model.function))
        shutil.copy(IMPORTABLE / "beside_triton.py", version)  # its Python looks nowhere else
        (folder / model.name / "config.pbtxt").write_text(_config(model))


def _config(model: Model) -> str:
    lines = [
        'backend: "python"',
        f"max_batch_size: {model.max_batch}",
        "instance_group [{kind: KIND_CPU count: 1}]",
    ]
    if model.max_batch:
        lines.append("dynamic_batching {}")
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            dims = ", ".join(str(size if isinstance(size, int) else -1) for size in tensor.dims)
            lines.append(
                f'{kind} [{{name: "{tensor.name}" data_type: TYPE_{tensor.datatype} dims: [{dims}]}}]'
            )
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the YAML of ours


def our_models() -> str:
    """Return the YAML's `models`, as indented lines."""
    return "".join(f"  - {_yaml(model)}\n" for model in MODELS)


def _yaml(model: Model) -> str:
    def ports(tensors: tuple[Tensor, ...], *, bounds: bool) -> str:
        return ", ".join(
            f'{tensor.name}: {{shape: "{_shape(model, tensor, bounds=bounds)}", '
            f"element_type: {_ELEMENT_TYPES[tensor.datatype]}}}"
            for tensor in tensors
        )

    return (
        f"{{name: {model.name}, function: 'beside_triton:{model.function}', trust: true, calibration_s: 0, "
        f"batching: {{max_batch: {max(model.max_batch, 1)}}}, "
        f"inputs: {{{ports(model.inputs, bounds=True)}}}, outputs: {{{ports(model.outputs, bounds=False)}}}}}"
    )


def _shape(model: Model, tensor: Tensor, *, bounds: bool) -> str:
    batch = () if not model.max_batch else (f"batch:1..{model.max_batch}" if bounds else "batch",)
    sizes = (f"{size}:0..4096" if bounds and isinstance(size, str) else str(size) for size in tensor.dims)
    return ", ".join((*batch, *sizes))
