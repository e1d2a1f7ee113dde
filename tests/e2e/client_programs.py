"""Programs that ask a server by a client of others, run by the Python of that client's environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "clients"
ENVIRONMENTS = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def python_of(client: str) -> Path:
    """The Python of a client's environment."""
    return ENVIRONMENTS / f".venv-client-{client}" / "bin" / "python"


def needs(client: str) -> pytest.MarkDecorator:
    """Skips a test before it starts a server, where that environment is not made."""
    return pytest.mark.skipif(not python_of(client).exists(), reason="needs `make test-clients`")


def told_by(client: str, program: str, server: str, given: Any) -> Any:
    """The JSON that a program prints, with this JSON to read."""
    ran = subprocess.run(
        [str(python_of(client)), "-P", str(PROGRAMS / program), server],
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return json.loads(ran.stdout)
