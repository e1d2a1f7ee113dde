"""From a path to an `ov.Model`, with errors that name the path and the reason."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import openvino as ov

from shapestream_engine.backends.file_ports import no_tensors
from shapestream_engine.backends.openvino.engine_words import engine_words
from shapestream_engine.errors import ModelLoadError
from shapestream_engine.model_files import files_of_model, outputs_that_are_no_tensors

__all__ = ["read_model"]

_FORMATS = {".xml": "ir", ".onnx": "onnx"}


def read_model(core: ov.Core, path: Path) -> ov.Model:
    """The model in the file, as it is; raises `ModelLoadError`."""
    if not path.is_file():
        reason = "is a directory" if path.is_dir() else "no such file"
        raise ModelLoadError(f"cannot read the model {path}: {reason}")
    if strange := outputs_that_are_no_tensors(path):
        raise ModelLoadError(f"cannot read the model {path}: {no_tensors(strange)}")
    known = _FORMATS.get(path.suffix.lower())
    if known is not None and (reason_not := _unreadable(known, path)) is not None:
        raise ModelLoadError(f"cannot read the model {path} as {known.upper()}: {reason_not}")
    try:
        return core.read_model(str(path))
    except (RuntimeError, OSError) as error:
        advice = _advice(path)
        raise ModelLoadError(f"cannot read the model {path}: {engine_words(error)}{advice}") from error


def _advice(path: Path) -> str:
    """Another engine for an ONNX file that is whole, and that OpenVINO cannot convert all the same."""
    if path.suffix.lower() != ".onnx":
        return ""
    try:
        files_of_model(path)
    except (ModelLoadError, OSError):
        return ""
    return " (ONNX Runtime may have what OpenVINO lacks: engine: onnxruntime)"


def _unreadable(format_name: str, path: Path) -> str | None:
    """Why the reader of this format does not take the file; None if it does.

    `Core.read_model` asks the readers of all formats in turn; of a damaged file they write each their own complaint to
    stderr, and the error then holds none of the reasons.
    """
    frontends: Any = importlib.import_module("openvino.frontend")
    try:
        reader = frontends.FrontEndManager().load_by_framework(format_name)
        if reader is None or reader.supported(str(path)):
            return None
        reader.load(str(path))
    except Exception as error:  # noqa: BLE001 - the readers' errors have no common class but this
        return engine_words(error)
    return "the file is damaged, or of another format"
