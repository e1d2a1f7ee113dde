"""Where model files may lie: in `server.model_root`, whatever a path, or a symbolic link on it, says.

Looked at when the settings are read. A file's weights (the .bin beside an .xml) are looked at as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shapestream.settings import Settings
from shapestream.yaml_source import Location

__all__ = ["outside_model_root"]


def outside_model_root(settings: Settings) -> Iterator[tuple[Location, str]]:
    """Every model whose file lies elsewhere, with the place of its path and what to do."""
    if settings.server.model_root is None:
        return
    root = Path(settings.server.model_root)
    for index, model in enumerate(settings.models):
        if model.path is None:
            continue
        path = Path(model.path)
        for file in (path, path.with_suffix(".bin")) if path.suffix == ".xml" else (path,):
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
