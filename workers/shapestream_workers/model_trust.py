"""What may be run: files whose bytes somebody vouched for, and functions that an installed package registers.

A configuration names what a process loads, and loading a function is running it. So a `function:` needs more than a
line of YAML: a package that registers it,

    [project.entry-points."shapestream.functions"]
    rank = "acme_ranking.serving:rank"

or the word of whoever starts the process (`--any-function`). Where the files may be is said, and checked, with the
settings (`server.model_root`). What a file does once it is loaded is the engine's affair: none of this makes a hostile
model harmless.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shapestream.settings_file_values import registered_functions
from shapestream.settings_models import ModelSettings
from shapestream_engine.errors import ModelLoadError

__all__ = ["ENVIRONMENT", "Distrusted", "allow_any_function", "digest_of_model", "require_trusted"]

ENVIRONMENT = "SHAPESTREAM_ANY_FUNCTION"
"""1: any importable function may be served. A server's workers inherit it."""

_CHUNK_BYTES = 1 << 20


class Distrusted(ModelLoadError):
    """This model must not be loaded; `key` is the setting that says why."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def allow_any_function() -> None:
    """For this process and those that it starts."""
    os.environ[ENVIRONMENT] = "1"


def require_trusted(model: ModelSettings) -> None:
    """Raises `Distrusted` for a function that nobody registered or allowed, and for a file of other bytes.

    Between this look at a file and the engine's there is a moment in which whoever may write the file can replace it.
    """
    if model.function is not None:
        _require_registered(model.function)
    elif model.path is not None and model.sha256 is not None:
        _require_digest(Path(model.path), model.sha256)


def _require_registered(function: str) -> None:
    registered = registered_functions()
    if os.environ.get(ENVIRONMENT) == "1" or function in registered.values():
        return
    known = f"registered are {', '.join(sorted(registered))}" if registered else "none is registered"
    raise Distrusted(
        "function",
        f"no installed package registers {function!r} as an entry point of shapestream.functions, {known} "
        f"(to serve any function that can be imported, start with --any-function, or set {ENVIRONMENT}=1)",
    )


def _require_digest(path: Path, expected: str) -> None:
    try:
        found = digest_of_model(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        raise Distrusted(
            "sha256",
            f"{path} is another file: its sha256 is {found} (restore the file, or write this digest)",
        )


def digest_of_model(path: Path) -> str:
    """The sha256 of a model file, 64 hex digits; of an IR that of the .xml and its .bin, one after the other.

    Raises OSError. Not covered: data that an ONNX file keeps in further files.
    """
    digest = hashlib.sha256()
    files = [path]
    weights = path.with_suffix(".bin")
    if path.suffix == ".xml" and weights.exists():
        files.append(weights)
    for name in files:
        with name.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
