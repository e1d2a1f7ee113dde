"""Where model files may lie: in `server.model_root`, whatever a path, or a symbolic link on it, says.

Looked at when the settings are read. All files that the model consists of are looked at: weights beside it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shapestream.settings import Settings
from shapestream.yaml_source import Location
from shapestream_engine.errors import ModelLoadError
from shapestream_engine.model_files import files_of_model

__all__ = ["outside_model_root"]


def outside_model_root(settings: Settings) -> Iterator[tuple[Location, str]]:
    """Every model whose file lies elsewhere, with the place of its path and what to do."""
    if settings.server.model_root is None:
        return
    root = Path(settings.server.model_root)
    for index, model in enumerate(settings.models):
        if model.path is None:
            continue
        for file in _files(Path(model.path)):
            # resolve() raises RuntimeError, or OSError from Python 3.13 on, where links lead in a circle.
            try:
                real = file.resolve()
            except (OSError, RuntimeError) as error:
                yield ("models", index, "path"), f"{file} leads nowhere: {error}"
                break
            if not real.is_relative_to(root):
                message = f"{real} is not in server.model_root, {root} (move it there, or change that folder)"
                yield ("models", index, "path"), message
                break


def _files(path: Path) -> list[Path]:
    try:
        return files_of_model(path)
    except (OSError, ModelLoadError):
        return [path]  # that it cannot be read is said where it is loaded
