"""The tritonserver that lies in PyTriton's wheel: started without PyTriton, on a CPU, over a folder of models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import PATIENCE_S, until
from tests.e2e.triton.models import write_repository


@contextmanager
def triton_server(environment: Path, folder: Path) -> Iterator[int]:
    """The port of a server of all models; `environment` is a virtual environment with nvidia-pytriton."""
    repository, log = folder / "repository", folder / "triton.log"
    write_repository(repository)
    with log.open("wb") as out:
        process = subprocess.Popen(
            _command(environment, folder, repository),
            env=_variables(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        port: int = until("Triton's port", lambda: _port(process, log))
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found


def _command(environment: Path, folder: Path, repository: Path) -> list[str]:
    triton = _packages(environment) / "pytriton" / "tritonserver"
    # The wheel has a stub for each version of Python; the server looks for it beside the backend.
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    version = _packages(environment).parent.name.removeprefix("python")
    for file in (
        *triton.glob("backends/python/*.*"),
        triton / "python_backend_stubs" / version / "triton_python_backend_stub",
    ):
        (backend / file.name).symlink_to(file)
    return [
        str(triton / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backend.parent}",
        f"--backend-config=python,shm-region-prefix-name={folder.name}-{os.getpid()}",
        *("--http-address=127.0.0.1", "--http-port=0", "--allow-grpc=false", "--allow-metrics=false"),
    ]


def _variables(environment: Path) -> dict[str, str]:
    """The environment's Python and its shared library are those of the models."""
    python = environment / "bin" / "python"
    library = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    shared = subprocess.run(
        [str(python), "-c", library], capture_output=True, text=True, check=True
    ).stdout.strip()
    variables = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{_packages(environment) / 'nvidia_pytriton.libs'}{os.pathsep}{shared}",
    }
    _need_shared_python(environment, variables)
    return variables


def _need_shared_python(environment: Path, variables: dict[str, str]) -> None:
    """Skip where Python has no shared library, which Triton's backend for models in Python needs."""
    name = f"lib{_packages(environment).parent.name}.so.1.0"
    load = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})"]
    if subprocess.run(load, env=variables, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"Triton's models in Python need {name}, a Python that is built with --enable-shared")


def _port(process: subprocess.Popen[bytes], log: Path) -> int | None:
    """Its port, which the system chose; it is opened once all models are ready."""
    if process.poll() is not None:
        raise AssertionError(f"Triton ended with {process.returncode}:\n{log.read_text()}")
    found = [
        one.laddr.port
        for one in psutil.Process(process.pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
    return found[0] if found else None
