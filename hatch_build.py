"""The build's one option: with COMPILED=1, mypyc compiles the scheduler of a wheel into C extensions.

The wheel holds them beside the Python sources that they were made from, and Python imports the extensions. An editable
install is always pure Python: an extension in the source tree would go on running code that its source no longer holds.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

IMPORT_ROOT = Path("pipeline")
PACKAGE = Path("shapestream/scheduling")
INTERPRETED = {
    "__init__.py",
    # Callers extend its dataclasses. An interpreted class cannot extend a compiled one.
    "events.py",
    # The annotations of a compiled dataclass may not name `Exception`: importing it is a KeyError.
    "actions.py",
}
SHARED = "shapestream.scheduling.compiled"
"""The extension that holds the code of all modules; one small extension per module refers to it."""


class CompiledScheduler(BuildHookInterface[Any]):
    """Adds the extensions to a wheel where COMPILED=1 asks for them; otherwise it does nothing."""

    def dependencies(self) -> list[str]:
        """Name the compiler, and the project's dependencies: mypyc compiles by their types."""
        if not _wanted():
            return []
        return ["mypy>=2.4", "setuptools>=65.5", *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and list the extensions among the wheel's files."""
        if version == "editable" or not _wanted():
            return
        for extension in _compile(Path(self.root)):
            build_data["force_include"][str(extension)] = str(PACKAGE / extension.name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _wanted() -> bool:
    return os.environ.get("COMPILED") == "1"


def _compile(root: Path) -> list[Path]:
    """Return the extensions, made anew."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    os.chdir(root)  # mypy's settings are in pyproject.toml, and tracebacks name files from here
    build = root / "build" / "mypyc"
    shutil.rmtree(build, ignore_errors=True)
    sources = sorted(
        str(path) for path in (IMPORT_ROOT / PACKAGE).glob("*.py") if path.name not in INTERPRETED
    )
    extensions = mypycify(
        sources, only_compile_paths=sources, group_name=SHARED, target_dir=str(build), debug_level="0"
    )
    command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(build / "lib"), str(build / "temp")
    command.ensure_finalized()
    command.run()
    return sorted((build / "lib" / PACKAGE).iterdir())
