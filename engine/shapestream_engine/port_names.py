"""The ports of an ONNX or IR file by their names and sizes, read without an engine.

A folder's configuration is made where no engine is loaded, perhaps on a host that has none. It needs the names of the ports
only. Names and sizes are those of the file; an engine may give an unnamed port another name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers import expat

from shapestream_engine.errors import ModelLoadError
from shapestream_engine.files import open_regular
from shapestream_engine.model_files import FilePorts, onnx_ports

VECTORS = ("last_hidden_state", "token_embeddings")
"""Usual names of a text encoder's output with a vector per token, the commonest first."""


def vectors_among(outputs: Iterable[str]) -> str | None:
    """Return the output with a vector per token: one with a usual name, else the only output; None if there are others."""
    names = list(outputs)
    usual = next((name for name in VECTORS if name in names), None)
    return names[0] if usual is None and len(names) == 1 else usual


@dataclass(frozen=True, slots=True, kw_only=True)
class PortNames:
    """The inputs and outputs of a model file."""

    inputs: FilePorts
    outputs: FilePorts


def port_names(path: Path) -> PortNames:
    """Read the ports of an `.onnx` or `.xml`; raises `ModelLoadError` for a file that cannot be read."""
    try:
        if path.suffix.lower() == ".xml":
            return _of_ir(path)
        found = onnx_ports(path)
    except OSError as error:
        raise ModelLoadError(f"cannot read the model {path}: {error.strerror}") from error
    if found is None or not found[1]:
        raise ModelLoadError(
            f"cannot read the model {path} as ONNX: the file is damaged, or of another format"
        )
    return PortNames(inputs=found[0], outputs=found[1])


def _of_ir(path: Path) -> PortNames:
    reader = _IrReader()
    with open_regular(path) as file:
        try:
            reader.parser.ParseFile(file)
        except (expat.ExpatError, ValueError, LookupError) as error:
            raise ModelLoadError(f"cannot read the model {path} as an IR: {error}") from error
    return reader.ports()


@dataclass(slots=True)
class _Layer:
    kind: str
    """`Parameter` is an input, `Result` an output."""
    name: str


class _IrReader:
    """Reads layers, their output ports and the edges to results from the events of an XML parser."""

    def __init__(self) -> None:
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.EntityDeclHandler = self._entity
        self._path: list[str] = []
        self._layers: dict[str, _Layer] = {}
        self._layer = ""
        self._port = ""
        self._names: dict[tuple[str, str], str] = {}
        """The name of an output port, by layer and port."""
        self._sizes: dict[tuple[str, str], list[int | None]] = {}
        self._edges: dict[str, tuple[str, str]] = {}
        """Layer -> the layer and the port from which its last input comes."""
        self._digits = ""

    def ports(self) -> PortNames:
        """Return what was read: an output is called as the port that a result takes."""
        inputs: FilePorts = {}
        outputs: FilePorts = {}
        for number, layer in self._layers.items():
            if layer.kind == "Parameter":
                port = next((key for key in self._sizes if key[0] == number), (number, "0"))
                inputs[self._names.get(port) or layer.name] = self._shape(port)
            elif layer.kind == "Result" and (origin := self._edges.get(number)) is not None:
                outputs[self._names.get(origin) or layer.name] = self._shape(origin)
        return PortNames(inputs=inputs, outputs=outputs)

    def _shape(self, port: tuple[str, str]) -> tuple[int | None, ...] | None:
        sizes = self._sizes.get(port)
        return None if sizes is None else tuple(sizes)

    def _start(self, tag: str, attributes: dict[str, Any]) -> None:
        self._path.append(tag)
        match self._path:
            case ["net", "layers", "layer"]:
                self._layer = attributes["id"]
                self._layers[self._layer] = _Layer(attributes["type"], attributes["name"])
            case ["net", "layers", "layer", "output", "port"]:
                self._port = attributes["id"]
                # Several names of one port are divided by commas; a comma in a name is escaped.
                self._names[self._layer, self._port] = attributes.get("names", "").split(",")[0]
                self._sizes[self._layer, self._port] = []
            case ["net", "edges", "edge"]:
                self._edges[attributes["to-layer"]] = attributes["from-layer"], attributes["from-port"]
            case [*_, "dim"]:
                self._digits = ""

    def _end(self, tag: str) -> None:
        if self._path == ["net", "layers", "layer", "output", "port", "dim"]:
            size = int(self._digits)
            self._sizes[self._layer, self._port].append(None if size < 0 else size)
        self._path.pop()

    def _text(self, text: str) -> None:
        self._digits += text if self._path[-1] == "dim" else ""

    def _entity(self, *_: Any) -> None:
        raise ValueError("it declares entities, which no IR has")
