"""What type checkers see of the three faces: mypy checks this file (`make lint`), and pytest runs it."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, assert_type

import numpy as np
import pytest

import shapestream
from shapestream import Failed, Result, aio, blocking
from shapestream.testing import ScriptedServer

IMPORTS = "from typing import assert_type\nfrom shapestream import Failed, Result"
GOOD = {"x": np.ones((1, 3), np.float32)}
BAD = {"x": -np.ones((1, 3), np.float32)}


def told_apart(items: list[Result | Failed]) -> list[float | str]:
    """`ok is True` narrows in both branches, and so does isinstance, for mypy and pyright alike."""
    told: list[float | str] = []
    for item in items:
        if item.ok is True:
            assert_type(item, Result)
            told.append(float(item["y"].sum()))
        else:
            assert_type(item, Failed)
            told.append(item.error.code)
        if isinstance(item, Failed):
            assert_type(item, Failed)
        else:
            assert_type(item, Result)
    return told


def test_pyright_tells_them_apart_too(tmp_path: Path) -> None:
    """Where pyright is installed: it reads `told_apart`, and would refuse a type that is not as stated."""
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    source = f"{IMPORTS}\n\n{inspect.getsource(told_apart)}"
    (tmp_path / "told.py").write_text(source)
    ran = subprocess.run(
        [pyright, "--pythonpath", sys.executable, str(tmp_path / "told.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 0 == ran.returncode, ran.stdout


def test_blocking(address: str) -> None:
    """A stream that raises gives results, one that yields gives failures as well."""
    with blocking.connect(address) as client:
        assert_type(client, blocking.Client)
        assert_type(client.infer("double", GOOD), Result)
        with client.stream("double", [GOOD]) as results:
            assert_type(results, blocking.Stream[Result])
            for result in results:
                assert_type(result, Result)
        with client.stream("double", [GOOD], on_error="raise") as results:
            assert_type(next(results), Result)
        with client.stream("double", [GOOD, BAD], on_error="yield") as items:
            assert_type(items, blocking.Stream[Result | Failed])
            assert [6.0, "model_error"] == told_apart(list(items))
        either: Literal["raise", "yield"] = "yield"
        with client.stream("double", [GOOD], on_error=either) as some:
            assert [6.0] == told_apart(list(some))


async def test_trio(trio_face: Any) -> None:
    """The same of the faces for event loops."""
    async with shapestream.connect(trio_face.address) as client:
        assert_type(client, shapestream.Client)
        assert_type(await client.infer("double", GOOD), Result)
        async with client.stream("double", [GOOD]) as results:
            assert_type(results, shapestream.Stream[Result])
            async for result in results:
                assert_type(result, Result)
        async with client.stream("double", [GOOD, BAD], on_error="yield") as items:
            assert_type(items, shapestream.Stream[Result | Failed])
            assert [6.0, "model_error"] == told_apart([item async for item in items])


def test_what_type_checkers_refuse(server: ScriptedServer, address: str) -> None:
    """mypy runs with `warn_unused_ignores`: each line would be an error there if it were right."""

    def refused(client: blocking.Client, async_client: aio.Client, item: Result | Failed) -> Any:
        client.stream("double", [GOOD], on_error="ignore")  # type: ignore[call-overload]
        print(item.error)  # type: ignore[union-attr]
        with async_client.stream("double", [GOOD]):  # type: ignore[attr-defined]
            pass
        aio.connect(address).infer("double", GOOD)  # type: ignore[attr-defined]

    assert callable(refused)
    assert server.requests == []
