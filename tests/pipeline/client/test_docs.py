"""The examples in the documents and docstrings run as they stand."""

from __future__ import annotations

import asyncio
import re
import textwrap
from contextlib import nullcontext
from inspect import getdoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import shapestream
from shapestream.errors import InvalidRequest, RequestError
from shapestream.testing import Arrays, ScriptedModel, ScriptedServer, serve_in_thread
from shapestream_engine.output_rules import IndexColumn, Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

DOCS = Path(__file__).parents[3] / "docs"


def port(kind: Any, name: str, element_type: str, shape: str, *rest: Any) -> Any:
    """A port, from text."""
    return kind(name, element_type, NamedShape.parse(shape), *rest)


EMBEDDINGS = ModelSignature(
    name="embeddings",
    inputs=(
        port(InputPort, "input_ids", "i64", "batch:1..64, seq:1..512"),
        port(InputPort, "attention_mask", "i64", "batch, seq"),
    ),
    outputs=(port(OutputPort, "embedding", "f32", "batch, 384", Rows()),),
)
DETECTOR = ModelSignature(
    name="detector",
    inputs=(port(InputPort, "image", "f32", "batch:1..64, 1, height:1..512, width:1..512"),),
    outputs=(port(OutputPort, "peaks", "i64", "n, 4", IndexColumn()),),
)


def embed(inputs: Arrays) -> Arrays:
    """Stands for the model of the examples."""
    return {"embedding": np.zeros((len(inputs["input_ids"]), 384), np.float32)}


def detect(inputs: Arrays) -> Arrays:
    """Finds nothing."""
    return {"peaks": np.zeros((0, 4), np.int64)}


def examples(name: str) -> list[Any]:
    """The Python blocks of one document, each with the line that it begins at."""
    text = (DOCS / name).read_text()
    return [
        pytest.param(match[1], id=f"{name}:{text[: match.start()].count(chr(10)) + 2}")
        for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]


@pytest.mark.parametrize("code", examples("client.md"))
def test_the_example_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a scripted server in the place of the address that the document names."""
    server = ScriptedServer(ScriptedModel(EMBEDDINGS, embed), ScriptedModel(DETECTOR, detect))
    with serve_in_thread(server, "tcp://127.0.0.1:*") as address:
        exec(compile(code.replace("ipc://run/shapestream.sock", address), "<example>", "exec"), {})
    if "print(" in code and "with" in code:
        assert "" != capsys.readouterr().out


def example_of(function: Any) -> str:
    """The lines of a docstring's example."""
    return textwrap.dedent((getdoc(function) or "").split("Example:\n")[1])


CALLS = ["infer", "stream", "signature", "statistics", "stories"]


@pytest.mark.parametrize("call", ["connect", *CALLS])
@pytest.mark.parametrize("face", ["shapestream", "shapestream.aio", "shapestream.blocking"])
def test_the_example_of_a_docstring_runs(face: str, call: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In each face: without `async` and `await` in the blocking one. A scripted server keeps no stories, and says so."""
    module = eval(face, {"shapestream": shapestream})
    if call == "connect":
        code = example_of(module.connect)
    else:
        code = f"async with {face}.connect(ADDRESS) as client:\n"
        code += textwrap.indent(example_of(getattr(module.Client, call)), "    ")
    if face == "shapestream.blocking":
        code = code.replace("async ", "").replace("await ", "")
    code = "async def main():\n" + textwrap.indent(code, "    ")
    server = ScriptedServer(ScriptedModel(EMBEDDINGS, embed), ScriptedModel(DETECTOR, detect))
    with serve_in_thread(server, "tcp://127.0.0.1:*") as address:
        code = code.replace("ipc://run/shapestream.sock", address)
        names: dict[str, Any] = {"shapestream": shapestream, "np": np, "ADDRESS": address}
        exec(compile(code, "<example>", "exec"), names)
        run = asyncio.run if face == "shapestream.aio" else lambda main: trio.run(lambda: main)
        with pytest.raises(InvalidRequest, match="no stories") if call == "stories" else nullcontext():
            run(names["main"]())
    assert call == "stories" or "" != capsys.readouterr().out


def test_the_table_of_errors_has_every_error_with_its_code_and_whether_a_retry_can_help() -> None:
    """Rows of client.md that begin with the name of an error; each error is exported under that name."""
    told: dict[str, tuple[str, bool]] = {}
    text = (DOCS / "client.md").read_text()
    for names, codes, retry in re.findall(r"^\| (`[A-Z].*?) \| (`.*?) \| (yes|no) \|", text, re.MULTILINE):
        for name, code in zip(re.findall(r"`(\w+)`", names), re.findall(r"`(\w+)`", codes), strict=True):
            told[name] = code, retry == "yes"
    errors = RequestError.__subclasses__()
    assert {error.__name__: (error.code, error.retryable) for error in errors} == told
    assert all(getattr(shapestream, error.__name__) is error for error in errors)
