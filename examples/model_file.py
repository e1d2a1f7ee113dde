"""Models as files: made once, whole or not at all, and made anew when the code that makes them has changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import openvino as ov


def write(model: ov.Model, path: Path) -> None:
    """Writes OpenVINO IR, NAME.xml and NAME.bin, in full precision.

    Each file is replaced at once: a server that has the old one open keeps it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        ov.save_model(model, made, compress_to_fp16=False)
        for suffix in (".bin", ".xml"):
            os.replace(made.with_suffix(suffix), path.with_suffix(suffix))


def ensure(path: Path, source: ModuleType, build: Callable[[], ov.Model]) -> None:
    """Writes the model unless the file is there and not older than the module `source`, which builds it."""
    if not path.exists() or path.stat().st_mtime < Path(str(source.__file__)).stat().st_mtime:
        write(build(), path)
