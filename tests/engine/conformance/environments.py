"""`make test-engines`: the conformance suite in an environment for each engine that cannot live in the common one.

PyTorch for CPUs and PyTorch for XLA need different versions, and both are large, so neither is among what `make test`
installs. An environment is made where its pinned versions come without CUDA's libraries (gigabytes), or where it is
asked for by name, and kept. What is left out is said in one line. Needs nothing but Python's own library and pip.

    make test-engines                       # what installs in reasonable size
    make test-engines ENGINES="torch-xla"   # the same and this, whatever its size
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SUITE = "tests/engine/conformance"
INSTALL_S = 600
SUITE_S = 900


@dataclass(frozen=True)
class Environment:
    """An engine's own environment."""

    extra: str
    folder: str
    engines: str
    """The suite's names of what it must be able to test."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return ROOT / self.folder / "bin/python"

    @property
    def pins(self) -> Path:
        """Its constraints, beside the common ones."""
        return ROOT / f"constraints-{self.extra}.txt"

    @property
    def stamp(self) -> Path:
        """Written when it was made; older than its pins, it is made again."""
        return ROOT / self.folder / ".ready"

    @property
    def ready(self) -> bool:
        """It was made from the present pins."""
        inputs = [self.pins, ROOT / "constraints.txt", ROOT / "pyproject.toml"]
        return self.stamp.exists() and all(
            path.stat().st_mtime <= self.stamp.stat().st_mtime for path in inputs
        )

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs its pip with all pins."""
        pins = ["-c", "constraints.txt", "-c", self.pins.name]
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, *pins]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )


ENVIRONMENTS = (
    Environment("torch", ".venv-torch", "torch"),
    Environment("torch-xla", ".venv-xla", "torch torch-xla"),
)


def why_not(environment: Environment, *, demanded: bool) -> str | None:
    """Makes the environment; why it cannot be made, or should not."""
    if environment.ready:
        return None
    if not environment.python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / environment.folder)], check=True)
    wanted = ["-e", f".[{environment.extra}]", "--group", "test"]
    try:
        if (failed := environment.pip("install", "pip")).returncode:
            return last_line(failed.stderr)
        if not demanded:
            planned = environment.pip("install", "--dry-run", "--report", "-", *wanted)
            if planned.returncode:
                return last_line(planned.stderr)
            names = [each["metadata"]["name"] for each in json.loads(planned.stdout)["install"]]
            if cuda := [name for name in names if name.startswith("nvidia-")]:
                return (
                    f"its pinned PyTorch brings {len(cuda)} libraries of CUDA here, gigabytes that the suite does not "
                    f"use (make test-engines ENGINES={environment.extra})"
                )
        print(f"setting up {environment.folder} (once; minutes)", flush=True)
        if (failed := environment.pip("install", *wanted)).returncode:
            return last_line(failed.stderr)
    except subprocess.TimeoutExpired:
        return f"pip took more than {INSTALL_S} s"
    environment.stamp.touch()
    return None


def last_line(text: str) -> str:
    """What pip said in the end."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip failed without a word"


def run_suite(python: Path, engines: str) -> bool:
    """The suite, in which the engines are not allowed to be missing."""
    print(f"=== {engines}", flush=True)
    environ = {**os.environ, "SHAPESTREAM_TEST_ENGINES": engines}
    if "torch-xla" in engines:
        environ.setdefault("PJRT_DEVICE", "CPU")
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", SUITE], cwd=ROOT, env=environ, timeout=SUITE_S, check=False
    )
    return done.returncode == 0


def main() -> int:
    """0 if every suite that was run has passed, and everything that was demanded has been run."""
    demanded = os.environ.get("ENGINES", "").split()
    passed = run_suite(Path(sys.executable), "openvino onnxruntime function")
    skipped = []
    for environment in ENVIRONMENTS:
        reason = why_not(environment, demanded=environment.extra in demanded)
        if reason is None:
            passed = run_suite(environment.python, environment.engines) and passed
            continue
        skipped.append(f"skipped {environment.extra}: {reason}")
        passed = passed and environment.extra not in demanded
    for line in skipped:
        print(line)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
