"""The sources of models as the YAML names them: a file or a folder, a function, the engine that runs it, and its digest.

A model's path is checked by its kind here, so that a checkpoint, a URL or a hub's id gets the way to a file that an engine
reads. The engine itself decides on the content.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationInfo, ValidatorFunctionWrapHandler

from shapestream.settings.values import (
    Finding,
    absolute_path,
    check_name,
    describe,
    files_must_exist,
    is_there,
    read_path,
    wrong,
)
from shapestream_engine.backends.registry import ENGINES_OF_SUFFIX, known_engines

# ---------------------------------------------------------------- engines

AUTO_ENGINE = "auto"
"""The engine by the file, and of the engines that read it the first that takes it; the same as no engine."""
SUFFIXES: dict[str, list[str]] = {
    engine: [suffix for suffix, engines in ENGINES_OF_SUFFIX.items() if engine in engines]
    for engines in ENGINES_OF_SUFFIX.values()
    for engine in engines
}
"""Engine -> the suffixes of the files that it reads."""
_KINDS = {".xml": "IR", ".onnx": "ONNX", ".pt2": "torch.export"}


def check_engine(value: Any) -> str:
    """Check the name of an engine: a built-in one, or one of an installed package."""
    return check_name(value, "engine", known_engines())


def read_engine(value: Any) -> Any:
    """Read `auto` as no engine, which is the default."""
    return None if value == AUTO_ENGINE else value


# ---------------------------------------------------------------- files

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""The form of a model's id on Hugging Face's hub, which relative paths have as well."""
_FROM_TORCH = "by torch.export.save as .pt2, or by torch.onnx.export as .onnx: docs/models.md"
_FROM_TENSORFLOW = "export the model as .onnx: python -m tf2onnx.convert, docs/models.md"
_WAYS_OUT = {
    ".pth": f"weights of PyTorch without their program (load them into their module, and export it {_FROM_TORCH})",
    ".pt": f"weights or a script of PyTorch (export the module {_FROM_TORCH})",
    ".ckpt": f"a checkpoint of a training (load it into its module, and export that {_FROM_TORCH})",
    ".bin": f"weights alone (of an IR, write its .xml; else load them into their module, and export it {_FROM_TORCH})",
    ".safetensors": "weights alone (export the folder of the model: optimum-cli export onnx --model FOLDER FOLDER/onnx, or "
    f"its module {_FROM_TORCH})",
    ".pb": f"a graph of TensorFlow ({_FROM_TENSORFLOW})",
    ".h5": f"a model of Keras ({_FROM_TENSORFLOW})",
    ".keras": f"a model of Keras ({_FROM_TENSORFLOW})",
    ".tflite": f"a model of TensorFlow Lite ({_FROM_TENSORFLOW})",
    ".pkl": "a pickle of Python (export the model as .onnx, such as by skl2onnx: docs/models.md)",
    ".joblib": "a pickle of Python (export the model as .onnx, such as by skl2onnx: docs/models.md)",
}
"""Suffix of a file that no engine here reads -> what it is, and the way to one that an engine reads."""


def read_model_path(value: Any, info: ValidationInfo) -> str:
    """Read the path of a model. What is no path of a file here has the way out in its error."""
    if isinstance(value, str) and files_must_exist(info):
        if _URL.fullmatch(value):
            raise wrong(
                f"{describe(value)} is a URL, and nothing is downloaded (download it, and write the path of the file)"
            )
        if not (is_file := is_there(Path.exists, absolute_path(value, info))) and _VARIABLE.search(value):
            raise wrong(
                f"{describe(value)} holds a variable, and none is replaced in this file (write the path itself, or make the "
                "file by a program, such as envsubst)"
            )
        if not is_file and _HUB_ID.fullmatch(value) and PurePath(value).suffix not in {*_KINDS, *_WAYS_OUT}:
            raise wrong(
                f"no such file: {absolute_path(value, info)} (a relative path starts at the folder of this YAML; a model of "
                f"Hugging Face's hub is downloaded before: hf download {value} --local-dir FOLDER, and FOLDER is the path)"
            )
    return read_path(value, info, expected="a model file")


def suffix_problems(path: PurePath, engine: str | None) -> Iterator[Finding]:
    """Yield the problem of a file that the engine does not read. Engines of packages may read any file."""
    way_out = _WAYS_OUT.get(path.suffix.lower())
    if way_out is not None and (engine is None or engine in SUFFIXES):
        yield ("path",), f'"{path.name}" is {way_out}'
    elif engine is None and path.suffix not in _KINDS:
        known = ", ".join(f"{what} ({suffix})" for suffix, what in _KINDS.items())
        words = f'"{path.name}" is of no known kind: {known} (add the engine that reads it)'
        yield ("path",), words
    elif engine is not None and path.suffix not in SUFFIXES.get(engine, [path.suffix]):
        read = " and ".join(SUFFIXES[engine])
        yield ("path",), f'engine "{engine}" reads {read}, not "{path.name}"'


_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")


def check_digest(value: Any) -> str:
    """Check a sha256 in hexadecimal."""
    if isinstance(value, str) and _DIGEST.fullmatch(value) is not None:
        return value.lower()
    raise wrong(
        f"expected 64 hexadecimal digits, got {describe(value)} (write the output of sha256sum in quotes)"
    )


# ---------------------------------------------------------------- functions

FUNCTIONS_GROUP = "shapestream.functions"
"""Group of the entry points by which packages register functions."""
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def registered_functions() -> dict[str, str]:
    """Return the functions that installed packages register, `package.module:name` by name."""
    return {point.name: point.value.replace(" ", "") for point in entry_points(group=FUNCTIONS_GROUP)}


class GivenFunction(str):
    """The reference `package.module:name` of a function that was given as an object, by the program that serves it."""

    __slots__ = ()


def read_function(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> str:
    """Read a function: an object of this program, or its reference as text."""
    if not callable(value):
        return str(check(check_function(value, info)))
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: Any = None if module == "__main__" else sys.modules.get(module or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise wrong(
            f"the process that proves the model cannot import {name or describe(value)} of {module or 'no module'} "
            "(define it at the top of a module, a file such as my_models.py beside the program or notebook, and import it)"
        )
    return GivenFunction(f"{module}:{name}")


def check_function(value: Any, info: ValidationInfo) -> str:
    """Check `package.module:name`, or replace a registered name by it."""
    if isinstance(value, str) and _FUNCTION.fullmatch(value) is not None:
        return value
    registered = registered_functions()
    if isinstance(value, str) and value in registered:
        return registered[value]
    if isinstance(value, str) and _FUNCTION_NAME.fullmatch(value) and not files_must_exist(info):
        return value  # its package need not be installed here
    hint = (
        f"or a registered name: {', '.join(sorted(registered))}"
        if registered
        else "the module must be installed"
    )
    raise wrong(f"expected package.module:name, got {describe(value)} ({hint})")
