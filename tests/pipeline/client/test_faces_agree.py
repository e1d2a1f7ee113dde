"""The three faces take the same arguments, by the same names, with the same defaults: what one learns, all learn."""

from __future__ import annotations

from inspect import Parameter, getdoc, isasyncgenfunction, iscoroutinefunction, signature, unwrap
from typing import Any

import pytest

import shapestream
from shapestream import aio, blocking

CALLS = ["infer", "stream", "signature", "statistics"]


def parameters(function: Any) -> dict[str, Parameter]:
    """Names, kinds and defaults, without the types of what only some faces take."""
    return {
        name: parameter.replace(annotation=Parameter.empty)
        for name, parameter in signature(function).parameters.items()
    }


@pytest.mark.parametrize("face", [aio, blocking], ids=["aio", "blocking"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_the_same_in_each_face(face: Any, call: str) -> None:
    """`shapestream.Client` sets the example."""
    assert parameters(getattr(shapestream.Client, call)) == parameters(getattr(face.Client, call))


@pytest.mark.parametrize("face", [aio, blocking], ids=["aio", "blocking"])
def test_connecting_takes_the_same_in_each_face(face: Any) -> None:
    """Also what it says of it, in a few words, is there for whoever asks an editor."""
    assert parameters(shapestream.connect) == parameters(face.connect)
    assert (getdoc(face.connect) or "").startswith("Connect to a server; as `shapestream.connect`")


@pytest.mark.parametrize("face", [shapestream, aio], ids=["trio", "aio"])
def test_what_is_awaited_says_so(face: Any) -> None:
    """Editors and type checkers tell a stream, which is entered, from the calls that are awaited."""
    assert [True, False, True, True] == [iscoroutinefunction(getattr(face.Client, call)) for call in CALLS]
    assert isasyncgenfunction(unwrap(face.connect))
