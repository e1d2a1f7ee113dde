"""The engines of the conformance suite: how each is given a model, and what it can do."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.engine.conformance.models import Model

from shapestream_engine import ELEMENT_TYPES, InputSpec, ModelSpec, OutputSpec

_ALL = frozenset(ELEMENT_TYPES)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine on a device."""

    name: str
    engine: str
    device: str = "CPU"
    package: str | None = None
    """The module that must be installed."""
    files: str | None = None
    """The module of the suite that writes files for it; None: it takes the callable."""
    element_types: frozenset[str] = _ALL
    many: int = 200
    """How many different shapes a test may take its time for: some devices compile each."""

    def missing(self) -> str | None:
        """Why it cannot be tested here."""
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.device == "cuda" and not importlib.import_module("torch").cuda.is_available():
            return "there is no CUDA device"
        return None

    def spec(self, model: Model, folder: Path, shapes: Mapping[str, str] | None = None) -> ModelSpec:
        """The model for this engine, its inputs with these shapes instead of those of the file."""
        shapes = shapes or {}
        if self.files is None:
            return ModelSpec(
                name=model.name,
                model=model.function,
                inputs={
                    name: InputSpec(shape=shapes.get(name, shape), element_type=element_type)
                    for name, (element_type, shape) in model.inputs.items()
                },
                outputs={
                    name: OutputSpec(shape=shape, element_type=element_type)
                    for name, (element_type, shape) in model.outputs.items()
                },
            )
        # Only ONNX Runtime takes the names from the file; saying them again changes nothing for it.
        return ModelSpec(
            name=model.name,
            path=_file(self.files, folder, model),
            engine=self.engine,
            device=self.device,
            inputs={
                name: InputSpec(shape=shapes.get(name, shape)) for name, (_, shape) in model.inputs.items()
            },
        )


def _file(files: str, folder: Path, model: Model) -> Path:
    path: Path = importlib.import_module(f"tests.engine.conformance.{files}").write(model, folder)
    return path


_TORCH = _ALL - {"u16", "u32", "u64"}  # PyTorch 2.13 cannot concatenate these
_OPENVINO = _ALL - {"f64", "u64"}  # OpenVINO computes these as narrower ones, so such models are refused

ENGINES = (
    Engine(
        name="openvino", engine="openvino", package="openvino", files="onnx_files", element_types=_OPENVINO
    ),
    Engine(name="onnxruntime", engine="onnxruntime", package="onnxruntime", files="onnx_files"),
    Engine(name="torch", engine="torch", package="torch", files="torch_files", element_types=_TORCH),
    Engine(
        name="torch-cuda",
        engine="torch",
        device="cuda",
        package="torch",
        files="torch_files",
        element_types=_TORCH,
    ),
    Engine(
        name="torch-xla",
        engine="torch",
        device="xla",
        package="torch_xla",
        files="torch_files",
        element_types=_TORCH,
        many=5,
    ),
    Engine(name="function", engine="function"),
)

DEMANDED = os.environ.get("SHAPESTREAM_TEST_ENGINES", "").split()
"""Engines that must be there, separated by blanks: for environments that were made to test them."""

if "torch-xla" in DEMANDED:
    os.environ.setdefault("PJRT_DEVICE", "CPU")

PRESENT = [engine for engine in ENGINES if engine.missing() is None]
ABSENT = [engine for engine in ENGINES if engine not in PRESENT]
