"""The promises about the code's structure."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    ROOT / "engine/shapestream_engine",
    ROOT / "pipeline/shapestream",
    ROOT / "workers/shapestream_workers",
]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

# What each extra brings, and the one place that may import it (STYLE: optional engines in exactly one place).
OPTIONAL = {
    "openvino": "engine/shapestream_engine/backends/openvino/",
    "onnxruntime": "engine/shapestream_engine/backends/onnxruntime/",
    "tokenizers": "engine/shapestream_engine/backends/tokenizer.py",
    "torch": "engine/shapestream_engine/backends/torch/",
    "torch_xla": "engine/shapestream_engine/backends/torch/devices.py",
    "httptools": "pipeline/shapestream/web/parser.py",
    "orjson": "pipeline/shapestream/gateway/json_text.py",
    "grpc": "pipeline/shapestream/gateway/grpc_",
    "google": (
        "pipeline/shapestream/gateway/open_inference_pb2.py",
        "pipeline/shapestream/gateway/grpc_messages.py",
        "pipeline/shapestream/gateway/grpc_service.py",
    ),
    "prometheus_client": "pipeline/shapestream/serving/admin_pages.py",
    "pyarrow": "workers/shapestream_workers/offline/tables.py",
    "ray": "pipeline/shapestream/ray.py",
    "PIL": "workers/shapestream_workers/offline/pictures.py",
    "opentelemetry": (
        "pipeline/shapestream/serving/tracing.py",
        "pipeline/shapestream/client/tickets.py",
    ),
}


@cache
def imported_names(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "attr", ""),
            getattr(node.func, "id", ""),
        ):
            found |= {
                str(word.value).partition(".")[0] for word in node.args if isinstance(word, ast.Constant)
            }
    return found


def test_modules_are_found() -> None:
    """The checks below look at real files."""
    assert len(MODULES) > 30


@pytest.mark.parametrize("engine", OPTIONAL)
def test_optional_libraries_are_imported_in_one_place(engine: str) -> None:
    """Only the engine's own backend imports it, or the admin port, so that the bare install works without it."""
    importers = {str(path.relative_to(ROOT)) for path in MODULES if engine in imported_names(path)}
    assert importers, f"no module imports {engine}: the check has lost its object"
    assert [name for name in importers if not name.startswith(OPTIONAL[engine])] == []


def test_the_face_imports_without_any_engine() -> None:
    """`import shapestream` loads neither an engine nor the workers."""
    script = "import sys, shapestream; print(sorted({'openvino', 'shapestream_workers', 'typer'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_nothing_catches_base_exception() -> None:
    """No handler swallows cancellation or Ctrl-C, but where a model's own code runs.

    The slot's thread is meant by neither of them; the message of a model's error lets Ctrl-C through.
    """
    named = {"engine/shapestream_engine/slot.py", "engine/shapestream_engine/errors.py"}
    offenders = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = "bare" if node.type is None else ast.unparse(node.type)
                reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if ("BaseException" in caught or caught == "bare") and not reraises:
                    offenders.add(str(path.relative_to(ROOT)))
    assert offenders == named


@pytest.mark.parametrize("package", [package.name for package in PACKAGES])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """What a module imports can be read before it, imports for annotations included."""
    graph = grimp.build_graph(package)
    left = set(graph.modules)
    while ends := {
        module
        for module in left
        if not graph.find_modules_directly_imported_by(module) & left
        or not graph.find_modules_that_directly_import(module) & left
    }:
        left -= ends
    assert [] == sorted(left), "these modules, and those between them, are a circle"


def test_no_test_imports_from_another_test() -> None:
    """What tests share stands in a module that is named after it."""
    offenders = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith("test_")
    }
    assert set() == offenders


BARE = """
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for name in MODULES:
    importlib.import_module(name)
"""
STARTED = [
    "shapestream",
    "shapestream.aio",
    "shapestream.blocking",
    "shapestream.local",
    "shapestream.testing",
    *[
        f"shapestream_workers.{name}"
        for name in (
            "cli",
            "serve",
            "worker_process",
            "check",
            "costs",
            "gateways",
            "health",
            "stats",
            "target",
            "offline.job",
        )
    ],
]


def test_the_bare_install_starts_without_any_extra() -> None:
    """What the commands import before they know which extras a configuration needs."""
    names = {name for name in OPTIONAL if name != "google"} | {"ruamel"}
    program = BARE.replace("OPTIONAL", repr(names)).replace("MODULES", repr(STARTED))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (0, "") == (ran.returncode, ran.stderr)
