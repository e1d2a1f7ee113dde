"""A run of the installed wheel, outside the source tree, with no engine installed. `make wheel` calls it.

Not collected by pytest: it must not see the source tree. It prints `wheel: N passed, 0 failed`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODEL = """
import numpy

def double(x):
    return {"y": x * 2}
"""

FUNCTION_CONFIG = """
server: {{listen: ["ipc://{folder}/smoke.sock"]}}
models:
  - name: double
    engine: function
    function: smoke_model:double
    inputs: {{x: {{shape: "batch:1..8, width:1..100", element_type: f32}}}}
    outputs: {{y: {{shape: "batch, width", element_type: f32, rule: rows}}}}
in_process: true
"""

OPENVINO_CONFIG = """
server: {{listen: ["ipc://{folder}/missing.sock"]}}
models: [{{name: m, path: {folder}/m.onnx, engine: openvino}}]
in_process: true
"""


def environment(folder: Path) -> dict[str, str]:
    """The variables of a child that can import the smoke model, and nothing from a source tree."""
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def shapestream(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the installed command in `folder`."""
    command = [str(Path(sys.executable).parent / "shapestream"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=folder, env=environment(folder), check=False
    )


def check_top_level(_: Path) -> None:
    """The distribution installs exactly three import packages."""
    files = importlib.metadata.files("shapestream") or []
    names = {file.parts[0] for file in files if file.parts[0].isidentifier()}
    assert names == {"shapestream_engine", "shapestream", "shapestream_workers"}, names


def check_import(folder: Path) -> None:
    """The face imports with no engine installed, from the installed place."""
    script = "import shapestream, importlib.util as u; print(u.find_spec('openvino'), shapestream.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("None "), done.stdout
    assert "site-packages" in done.stdout, done.stdout


def check_form(_: Path) -> None:
    """The scheduler is compiled where COMPILED=1 asked for that, and Python elsewhere."""
    from shapestream.scheduling import scheduler

    assert (os.environ.get("COMPILED") == "1") != scheduler.__file__.endswith(".py"), scheduler.__file__


def check_version(folder: Path) -> None:
    """The command says the distribution's own version."""
    done = shapestream(folder, "version")
    assert importlib.metadata.version("shapestream") in done.stdout, done


def check_missing_engine(folder: Path) -> None:
    """A wanted engine that is missing gives one error that names the extra, and exit code 3."""
    (folder / "m.onnx").write_bytes(b"")  # an ONNX file without anything in it: its digest can be taken
    (folder / "openvino.yaml").write_text(OPENVINO_CONFIG.format(folder=folder))
    done = shapestream(folder, "check", "openvino.yaml")
    assert done.returncode == 3, done
    assert "shapestream[openvino]" in done.stderr, done.stderr


def check_serving(folder: Path) -> None:
    """The installed server serves a NumPy callable to the installed client."""
    import numpy as np

    import shapestream.blocking

    (folder / "smoke_model.py").write_text(MODEL)
    (folder / "function.yaml").write_text(FUNCTION_CONFIG.format(folder=folder))
    command = [str(Path(sys.executable).parent / "shapestream"), "serve", "--any-function", "function.yaml"]
    with subprocess.Popen(command, cwd=folder, env=environment(folder)) as server:
        try:
            with shapestream.blocking.connect(f"ipc://{folder}/smoke.sock", connect_timeout=30) as client:
                for width in (1, 5, 100):
                    sent = np.arange(2 * width, dtype=np.float32).reshape(2, width)
                    result = client.infer("double", {"x": sent}, deadline=30)
                    np.testing.assert_array_equal(sent * 2, result["y"])
        finally:
            server.terminate()
        assert server.wait(30) == 0


CHECKS: list[Callable[[Path], None]] = [
    check_top_level,
    check_import,
    check_form,
    check_version,
    check_missing_engine,
    check_serving,
]


def main() -> int:
    """Runs every check in one temporary folder."""
    failures = []
    with tempfile.TemporaryDirectory() as name:
        for check in CHECKS:
            try:
                check(Path(name))
            except Exception as error:  # noqa: BLE001 - every failure is reported, and decides the exit code
                failures.append({"check": check.__name__, "error": repr(error)})
    for failure in failures:
        print(json.dumps(failure))
    print(f"wheel: {len(CHECKS) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
