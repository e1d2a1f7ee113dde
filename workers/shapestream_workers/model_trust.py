"""Trust in models: files whose digest the configuration states, and functions that an installed package registers.

A configuration names the code that a process loads and runs. So a `function:` needs more than a line of YAML: a package
that registers it,

    [project.entry-points."shapestream.functions"]
    rank = "acme_ranking.serving:rank"

or the option `--any-function` of the user who starts the process. The setting `server.model_root` limits where files may
be. None of this makes a hostile model harmless: an engine runs the files that it loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shapestream.settings import ModelSettings, registered_functions
from shapestream_engine.errors import ModelLoadError
from shapestream_engine.model_files import digest_of_model

ENVIRONMENT = "SHAPESTREAM_ANY_FUNCTION"
"""1: any importable function may be served. A server's workers inherit it."""


class Distrusted(ModelLoadError):
    """The configuration does not allow this model to be loaded."""


def allow_any_function() -> None:
    """Allow any importable function in this process and those that it starts."""
    os.environ[ENVIRONMENT] = "1"


def require_trusted(model: ModelSettings) -> str | None:
    """Return the sha256 of the model's files; None for a function.

    Raises `Distrusted` for a function that is neither registered nor allowed, and for files of other bytes than the
    configuration says, `ModelLoadError` for files that cannot be read.
    """
    if model.function is not None:
        _require_registered(model.function)
    if model.file is None:
        return None
    digest = _digest(Path(model.file))
    if model.sha256 is not None and digest != model.sha256:
        raise Distrusted(
            f"{model.file} has another sha256, {digest} (restore the file, or write this digest)",
            key=("sha256",),
        )
    return digest


def digests_of(models: Iterable[ModelSettings]) -> dict[str, str]:
    """Return the sha256 of the files of each model, by its name; what cannot be read now is left out."""
    digests: dict[str, str] = {}
    for model in models:
        if model.file is not None:
            with suppress(ModelLoadError):
                digests[model.name] = _digest(Path(model.file))
    return digests


def _require_registered(function: str) -> None:
    registered = registered_functions()
    if os.environ.get(ENVIRONMENT) == "1" or function in registered.values():
        return
    known = f"registered are {', '.join(sorted(registered))}" if registered else "none is registered"
    raise Distrusted(
        f"no installed package registers {function!r} as an entry point of shapestream.functions, {known} "
        f"(to serve any function that can be imported, start with --any-function, or set {ENVIRONMENT}=1)",
        key=("function",),
    )


def _digest(path: Path) -> str:
    try:
        return digest_of_model(path)
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror}") from error
