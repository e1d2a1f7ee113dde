"""Files and functions that the configuration names: model files, samples, what packages register.

As in settings_values.py. The folder that relative paths start from comes in pydantic's validation context.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from shapestream.settings_words import describe, wrong

__all__ = [
    "FUNCTIONS_GROUP",
    "absolute_path",
    "check_digest",
    "check_function",
    "files_must_exist",
    "is_there",
    "read_model_path",
    "read_model_root",
    "read_output_path",
    "read_samples_path",
    "registered_functions",
]

FUNCTIONS_GROUP = "shapestream.functions"
"""The entry points by which packages register functions that may be served."""
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def registered_functions() -> dict[str, str]:
    """What installed packages offer as models, by name: `package.module:name`."""
    return {point.name: point.value.replace(" ", "") for point in entry_points(group=FUNCTIONS_GROUP)}


def check_function(value: Any, info: ValidationInfo) -> str:
    """`package.module:name`; a registered name becomes that."""
    if isinstance(value, str) and _FUNCTION.fullmatch(value) is not None:
        return value
    registered = registered_functions()
    if isinstance(value, str) and value in registered:
        return registered[value]
    if isinstance(value, str) and _FUNCTION_NAME.fullmatch(value) and not files_must_exist(info):
        return value  # of a package that need not be installed here
    hint = (
        f"or a registered name: {', '.join(sorted(registered))}"
        if registered
        else "the module must be installed"
    )
    raise wrong(f"expected package.module:name, got {describe(value)} ({hint})")


def check_digest(value: Any) -> str:
    """A sha256 in hexadecimal."""
    if isinstance(value, str) and _DIGEST.fullmatch(value) is not None:
        return value.lower()
    raise wrong(
        f"expected 64 hexadecimal digits, got {describe(value)} (sha256sum prints them; put them in quotes)"
    )


def read_model_root(value: Any, info: ValidationInfo) -> str:
    """A folder that exists, as an absolute path without symbolic links."""
    if not isinstance(value, str) or not value:
        raise wrong(f"expected the path of a folder, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path, Path.is_dir, "folder", info)
    return str(path.resolve())


def read_model_path(value: Any, info: ValidationInfo) -> str:
    """A model file that exists, as an absolute path."""
    if not isinstance(value, str) or not value:
        raise wrong(f"expected the path of a model file, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path, Path.is_file, "file", info)
    return str(path)


def read_output_path(value: Any, info: ValidationInfo) -> str:
    """A file to be written, as an absolute path; its folder is there."""
    if not isinstance(value, str) or not value or value.endswith("/"):
        raise wrong(f"expected the path of a file to write, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path.parent, Path.is_dir, "folder", info)
    return str(path)


def read_samples_path(value: Any, info: ValidationInfo) -> str:
    """An .npz that exists, as an absolute path."""
    if not isinstance(value, str) or not value.endswith(".npz"):
        raise wrong(f"expected the path of an .npz of samples, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path, Path.is_file, "file", info)
    return str(path)


def _must_be_there(path: Path, is_one: Callable[[Path], bool], what: str, info: ValidationInfo) -> None:
    if files_must_exist(info) and not is_there(is_one, path):
        if what == "file" and is_there(Path.is_dir, path):
            raise wrong(f"{path} is a folder (name the file in it{_models_in(path)})")
        if what == "folder" and is_there(Path.exists, path):
            raise wrong(f"{path} is a file (name a folder)")
        raise wrong(f"no such {what}: {path} (a relative path starts at the folder of this YAML)")


def _models_in(folder: Path) -> str:
    """`: folder/model.onnx`, for the model files in a folder."""
    try:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".xml", ".onnx", ".pt2"))
    except OSError:
        return ""
    return f": {', '.join(str(folder / name) for name in found[:3])}" if found else ""


def absolute_path(value: str, info: ValidationInfo) -> Path:
    """The path from the folder of the YAML; `~` is the home of whoever runs this."""
    if "\0" in value:
        raise wrong(f"{describe(value)} is no path (it holds a zero byte)")
    try:
        return (_base(info) / Path(value).expanduser()).absolute()
    except RuntimeError as error:  # ~somebody who is not known here
        raise wrong(f"{describe(value)} is no path: {error}") from error


def is_there(is_one: Callable[[Path], bool], path: Path) -> bool:
    """Whether there is such a file, or folder."""
    try:
        return is_one(path)
    except OSError as error:  # too long, or in a folder that is closed to us
        raise wrong(f"{describe(str(path))} cannot be looked at: {error.strerror}") from error


def _base(info: ValidationInfo) -> Path:
    context = info.context or {}
    return Path(context.get("base", "."))


def files_must_exist(info: ValidationInfo) -> bool:
    """Whether files and folders that are named must be there: not where a file is only read, for a schema or a test."""
    return bool((info.context or {}).get("files_must_exist", False))
