"""The sources of models: everything that a process reads for a model besides its settings. Equal sources, equal models.

A reload leaves a process alone whose models have the settings and the sources that they had. So what cannot be known is
equal to nothing: such a model is loaded anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from shapestream.loading.models import model_spec
from shapestream.settings import ModelSettings
from shapestream_engine.errors import EngineError
from shapestream_engine.model_files import digest_of_model
from shapestream_engine.probing.cache import code_of

Sources: TypeAlias = tuple[str, ...]
"""Digests, versions, and times of files of one model."""


def digests_of(models: Iterable[ModelSettings]) -> dict[str, str]:
    """Return the sha256 of the files of each model, by its name; what cannot be read now is left out."""
    digests: dict[str, str] = {}
    for model in models:
        if model.file is not None:
            with suppress(OSError, EngineError):
                digests[model.name] = digest_of_model(Path(model.file))
    return digests


def sources_of(models: Iterable[ModelSettings], digests: Mapping[str, str]) -> dict[str, Sources | None]:
    """Return the sources of each model, by its name; None where they cannot be known.

    `digests`: sha256 of the models' files, by name, as `digests_of` reads them.
    """
    return {model.name: _sources(model, digests.get(model.name)) for model in models}


def _sources(model: ModelSettings, digest: str | None) -> Sources | None:
    if model.file is not None and digest is None:
        return None
    with suppress(OSError, EngineError):
        code = code_of(model_spec(model))
        if code is not None:
            # An interpreter that was replaced has another file, or another time.
            return (digest or "", code, _stamp(sys.executable), *_samples(model))
    return None


def _samples(model: ModelSettings) -> Iterable[str]:
    """Yield the stamps of files with realistic inputs, which decide what a proof finds."""
    for one in model.probe.values():
        if one.samples is not None:
            yield _stamp(one.samples)


def _stamp(file: str) -> str:
    """Return the size and time of a file; raises `OSError`."""
    path = Path(file)
    found = path.stat()
    return f"{os.path.realpath(path)} {found.st_size} {found.st_mtime_ns}"
