"""The three faces take the same arguments, by the same names, with the same defaults: what one learns, all learn."""

from __future__ import annotations

import re
from inspect import Parameter, getdoc, isasyncgenfunction, iscoroutinefunction, signature, unwrap
from typing import Any

import pytest

import shapestream
from shapestream import aio, blocking

FACES = [shapestream, aio, blocking]
IDS = ["trio", "aio", "blocking"]
CALLS = ["infer", "stream", "signature", "statistics", "stories"]


def parameters(function: Any) -> dict[str, Parameter]:
    """Names, kinds and defaults, without the types of what only some faces take."""
    return {
        name: parameter.replace(annotation=Parameter.empty)
        for name, parameter in signature(function).parameters.items()
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_the_same_in_each_face(call: str) -> None:
    """`shapestream.Client` sets the example, and is that of asyncio as well."""
    assert parameters(getattr(shapestream.Client, call)) == parameters(getattr(blocking.Client, call))
    assert aio.Client is shapestream.Client


@pytest.mark.parametrize("face", [aio, blocking], ids=["aio", "blocking"])
def test_connecting_takes_the_same_in_each_face(face: Any) -> None:
    """The trio face sets the example here as well."""
    assert parameters(shapestream.connect) == parameters(face.connect)


@pytest.mark.parametrize("face", FACES, ids=IDS)
@pytest.mark.parametrize("call", [*CALLS, "connect"])
def test_a_docstring_is_whole(face: Any, call: str) -> None:
    """An editor shows it: it explains every argument, the unit of times, and the errors, and has an example."""
    function = face.connect if call == "connect" else getattr(face.Client, call)
    text = getdoc(function) or ""
    arguments = [name for name in parameters(function) if name != "self"]
    assert arguments == re.findall(
        r"^    (\w+): ", text.split("Arguments:\n")[1].split("\n\n")[0], re.MULTILINE
    )
    assert "second" in text
    assert re.search(r"^Raises:\n    \w+", text, re.MULTILINE)
    assert re.search(r"^Example:\n    \S", text, re.MULTILINE)
    assert "shapestream." not in text or call == "connect"


def test_what_is_awaited_says_so() -> None:
    """Editors and type checkers tell a stream, which is entered, from the calls that are awaited."""
    client = shapestream.Client
    assert [True, False, True, True, True] == [iscoroutinefunction(getattr(client, call)) for call in CALLS]
    assert all(isasyncgenfunction(unwrap(face.connect)) for face in (shapestream, aio))
