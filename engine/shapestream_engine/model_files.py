"""The files of a model and the digest of their bytes, for pins, caches and served models.

An OpenVINO IR is an .xml with a .bin beside it. An ONNX file, under any name, may keep tensors in further files, which it
names. It is read field by field here, by the field numbers of onnx.proto that lead to tensors. Every other model is one
file; a .pt2 is an archive.

A hostile file may name any file as its weights. So only regular files inside the model's folder are opened, and a model
larger than the machine's memory is refused before it is read.

The same reader finds the names of an ONNX file's input axes, for engines that drop them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias, TypeVar

from shapestream_engine.errors import ModelLoadError
from shapestream_engine.files import open_regular
from shapestream_engine.machine import memory_bytes

T = TypeVar("T")
FilePorts: TypeAlias = "dict[str, tuple[int | None, ...] | None]"
"""The size of each axis by the port's name; None for an open size, and for an open rank."""

MOST_TOKENIZER_BYTES = 64 << 20
"""Largest tokenizer.json that is read. The largest known, of 262,144 tokens, has 33 MB."""
_CHUNK_BYTES = 1 << 20
_BESIDE = {".xml": ".bin", ".pdmodel": ".pdiparams"}
"""Suffix of OpenVINO and PaddlePaddle files -> suffix of the weights file beside them."""


def check_file(path: Path) -> None:
    """Raise `ModelLoadError` unless all files of the model are regular and fit in memory."""
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "is not a regular file"
        reason = found if path.exists() else "no such file"
        raise ModelLoadError(f"cannot read the model {path}: {reason}")
    try:
        for file in _opened_files(path):
            file.close()
    except OSError as error:
        raise ModelLoadError(f"cannot read the model {path}: {error.filename}: {error.strerror}") from error


def is_whole(path: Path) -> bool:
    """Tell whether the file can be read as far as it says which files belong to it."""
    try:
        files_of_model(path)
    except (ModelLoadError, OSError):
        return False
    return True


def files_of_model(path: Path) -> list[Path]:
    """Return the model's files: `path`, then the files that it needs, existing or not.

    The weights of an IR are listed only if they, or a link to them, exist. Files that an ONNX file names are sorted, each
    once. Raises `OSError`, and `ModelLoadError` for a damaged ONNX file and for files outside its folder.
    """
    suffix = path.suffix.lower()
    if suffix in _BESIDE:
        weights = path.with_suffix(_BESIDE[suffix])
        return [path, weights] if os.path.lexists(weights) else [path]
    if suffix == ".json":
        return [path]  # a tokenizer
    try:
        names = sorted(_external_data(path))
    except ModelLoadError:
        if suffix == ".onnx":
            raise
        return [path]
    for name in names:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name or _IN_MEMORY in name:
            raise ModelLoadError(
                f"cannot read the model {path}: it names tensors in {name!r}, outside its folder "
                "(save it anew, with its data in files beside it)"
            )
    return [path, *(path.parent / name for name in names)]


def digest_of_model(path: Path) -> str:
    """Return the hexadecimal sha256 of the model's files, one after the other; raises as `files_of_model` does.

    Also raises `ModelLoadError` for files that together exceed the machine's memory.
    """
    digest = hashlib.sha256()
    for file in _opened_files(path):
        with file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _opened_files(path: Path) -> Iterator[BinaryIO]:
    """Yield each file of the model, opened for reading; raises as `digest_of_model` does."""
    most, total = memory_bytes(), 0
    for name in files_of_model(path):
        file = open_regular(name)
        # A sparse file of a petabyte takes a few bytes on disk, and days to read.
        total += os.fstat(file.fileno()).st_size
        if total > most:
            file.close()
            raise ModelLoadError(
                f"cannot read the model {path}: its files have {total} bytes, and this machine's memory {most}"
            )
        yield file


def outputs_that_are_no_tensors(path: Path) -> list[str]:
    """Return the outputs of an ONNX file that are sequences or maps, such as a ZipMap's; raises `OSError`."""

    def read(file: BinaryIO, whole: list[_Span]) -> list[str]:
        found: list[str] = []
        for value in _inner(file, whole, _GRAPH, _OUTPUT):
            types = [number for span in _inner(file, [value], _TYPE) for number, *_ in _fields(file, *span)]
            if types and _TENSOR_TYPE not in types:
                found += _texts(file, [value], KEY)
        return found

    return _read_onnx(path, read) or []


def opset_of(path: Path) -> int | None:
    """Return the opset of ONNX's own operators in an ONNX file; None for other files. Raises `OSError`."""

    def read(file: BinaryIO, whole: list[_Span]) -> int | None:
        own = [
            span
            for span in _inner(file, whole, _OPSET)
            if "".join(_texts(file, [span], _OPSET_DOMAIN)) in ("", "ai.onnx")
        ]
        fields = [field for span in own for field in _fields(file, *span)]
        return max((value or 0 for number, value, *_ in fields if number == _OPSET_VERSION), default=None)

    return _read_onnx(path, read)


def input_symbols(path: Path) -> dict[str, tuple[str | None, ...]]:
    """Read the names of an ONNX file's input axes (`dim_param`), by input; None for an axis without a name.

    Empty for other files. Inputs that are no tensors or have no rank are left out. Raises `OSError`.
    """

    def read(file: BinaryIO, whole: list[_Span]) -> dict[str, tuple[str | None, ...]]:
        return {
            "".join(_texts(file, [value], KEY)): tuple(
                "".join(_texts(file, [axis], _AXIS_NAME)) or None for axis in _inner(file, [shape], _AXIS)
            )
            for value in _inner(file, whole, _GRAPH, _INPUT)
            for shape in _inner(file, [value], _TYPE, _TENSOR_TYPE, _SHAPE)
        }

    return _read_onnx(path, read) or {}


def onnx_ports(path: Path) -> tuple[FilePorts, FilePorts] | None:
    """Read the sizes of an ONNX file's inputs and outputs by name; None for a damaged file. Raises `OSError`.

    Constants that old files list among the inputs are left out. Ports that are no tensors have no sizes.
    """

    def read(file: BinaryIO, whole: list[_Span]) -> tuple[FilePorts, FilePorts]:
        graph = _inner(file, whole, _GRAPH)
        constants = set(_texts(file, _inner(file, graph, _CONSTANT), _CONSTANT_NAME))
        inputs = _ports_of(file, _inner(file, graph, _INPUT))
        return (
            {name: sizes for name, sizes in inputs.items() if name not in constants},
            _ports_of(file, _inner(file, graph, _OUTPUT)),
        )

    return _read_onnx(path, read)


def _ports_of(file: BinaryIO, values: list[_Span]) -> FilePorts:
    ports: FilePorts = {}
    for value in values:
        shapes = _inner(file, [value], _TYPE, _TENSOR_TYPE, _SHAPE)
        axes = [_fields(file, *axis) for shape in shapes for axis in _inner(file, [shape], _AXIS)]
        sizes = [next((size for number, size, *_ in axis if number == _AXIS_SIZE), None) for axis in axes]
        ports["".join(_texts(file, [value], KEY))] = tuple(sizes) if shapes else None
    return ports


def _read_onnx(path: Path, read: Callable[[BinaryIO, list[_Span]], T]) -> T | None:
    """Return what `read` finds in the file; None for a damaged file and for another format. Raises `OSError`."""
    if path.suffix.lower() in _BESIDE:
        return None
    with open_regular(path) as file:
        try:
            return read(file, [(0, os.fstat(file.fileno()).st_size)])
        except ValueError:
            return None


# ---------------------------------------------------------------- ONNX

_TENSOR, _ENTRY = "TensorProto", "StringStringEntryProto"
MESSAGES: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: _TENSOR, 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: _TENSOR,
        6: "GraphProto",
        10: _TENSOR,
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: _TENSOR, 2: _TENSOR},
}
"""Message -> numbers of its fields that lead to tensors -> messages in those fields."""
EXTERNAL_DATA, DATA_LOCATION, EXTERNAL = 13, 14, 1
"""Field numbers of a tensor: its file entries and its data location; the location value for a file."""
KEY, VALUE = 1, 2
"""Field numbers of an entry."""
_GRAPH, _INPUT, _OUTPUT = 7, 11, 12
"""Field number of a model's graph, and of a graph's inputs and outputs."""
_TYPE, _TENSOR_TYPE, _SHAPE, _AXIS, _AXIS_NAME = 2, 1, 2, 1, 2
"""Field numbers from an input to the names of its axes; the input's name has the number of an entry's key."""
_AXIS_SIZE = 1
"""Field number of an axis's fixed size."""
_CONSTANT, _CONSTANT_NAME = 5, 8
"""Field number of a graph's constants, and of a constant's name."""
_OPSET, _OPSET_DOMAIN, _OPSET_VERSION = 8, 1, 2
"""Field number of a model's opsets, and of an opset's domain and version."""
_MOST_NAME_BYTES = 1 << 16
_IN_MEMORY = "_ORT_MEM_ADDR_"
"""In a file name, this marks an address in process memory for OpenVINO and ONNX Runtime."""
_INT32 = 0xFFFFFFFF
"""protobuf ignores higher bits of tags and enumerations."""
_WINDOW_BYTES = 1 << 16
"""Bytes that are read at once: fields of a forest's attributes have five."""
_HEAD_BYTES = 20
"""A tag, and the number or length behind it, have no more bytes."""
_NUMBERS = re.compile(
    b"(?:"
    + b"|".join(
        b"[" + re.escape(bytes(range(encoding | 8, 128, 8))) + b"]" + data
        for encoding, data in ((0, rb"[\x80-\xff]{0,9}[\x00-\x7f]"), (1, rb".{8}"), (5, rb".{4}"))
    )
    + b")+",
    re.DOTALL,
)
"""Fields in a row that are numbers. The attributes of a forest have millions; a loop over them takes a second per MB."""
_Span: TypeAlias = "tuple[int, int]"
"""Start and end of a message's bytes in its file."""


def _external_data(path: Path) -> set[str]:
    """Return the names of the files with an ONNX file's tensors, relative to its folder."""
    names: set[str] = set()
    with open_regular(path) as file:
        whole = os.fstat(file.fileno()).st_size
        # An explicit stack, because graphs may be nested more deeply than Python's calls.
        open_messages = [("ModelProto", 0, whole)]
        try:
            while open_messages:
                kind, start, end = open_messages.pop()
                if kind == _TENSOR:
                    names |= _file_of_tensor(file, start, end)
                    continue
                fields = MESSAGES[kind]
                for number, value, at, stop in _fields(file, start, end, numbers=False):
                    # Only bytes are a message: protobuf ignores a field of another encoding.
                    if number in fields and value is None:
                        open_messages.append((fields[number], at, stop))
        except ValueError as error:
            raise ModelLoadError(f"cannot read the model {path} as ONNX: {error}") from error
    return names


def _file_of_tensor(file: BinaryIO, start: int, end: int) -> set[str]:
    """Return the name of the file with a tensor's data; empty if the tensor holds the data."""
    locations, is_external = set(), False
    for number, value, at, stop in _fields(file, start, end):
        if number == DATA_LOCATION:
            is_external = is_external or (value is not None and value & _INT32 == EXTERNAL)
        elif number == EXTERNAL_DATA and value is None:
            key = text = b""
            for part, other, first, last in _fields(file, at, stop):
                if part == KEY and other is None:
                    key = _read(file, first, last)
                elif part == VALUE and other is None:
                    text = _read(file, first, last)
            if key == b"location":
                locations.add(text.decode())
    return locations if is_external else set()


def _inner(file: BinaryIO, messages: list[_Span], *numbers: int) -> list[_Span]:
    """Return the messages that these field numbers lead to, in order."""
    for wanted in numbers:
        messages = [
            (at, stop)
            for start, end in messages
            for number, value, at, stop in _fields(file, start, end)
            if number == wanted and value is None
        ]
    return messages


def _texts(file: BinaryIO, messages: list[_Span], number: int) -> list[str]:
    return [_read(file, at, stop).decode() for at, stop in _inner(file, messages, number)]


def _fields(
    file: BinaryIO, start: int, end: int, *, numbers: bool = True
) -> Iterator[tuple[int, int | None, int, int]]:
    """Yield number, value, start and end of each field of a message. The value is an integer, or None for bytes,
    which may be a message. Bytes and groups are skipped, not read: they may be weights. With `numbers` False, most fields
    that hold no bytes are left out."""
    at, depth = start, 0
    first, window = start, b""
    while at < end:
        if at + _HEAD_BYTES > first + len(window) and first + len(window) < end:
            file.seek(at)
            first, window = at, file.read(min(_WINDOW_BYTES, end - at))
        if not numbers and (run := _NUMBERS.match(window, at - first)) is not None:
            at = first + run.end()
            continue
        tag, place = _varint(window, at - first)
        number, encoding = (tag & _INT32) >> 3, tag & 7
        value: int | None
        value, begin = 0, first + place
        at = begin
        match encoding:
            case 0:
                value, place = _varint(window, place)
                at = first + place
            case 1:  # 64 bits
                at += 8
            case 2:  # bytes, or another message
                length, place = _varint(window, place)
                value, begin = None, first + place
                at = begin + length
            case 3:
                depth += 1
            case 4 if depth > 0:
                depth -= 1
            case 5:  # 32 bits
                at += 4
            case _:
                raise ValueError("the file is damaged, or of another format")
        if at > end:
            raise ValueError("the file is damaged, or cut short")
        if depth == 0 and encoding != 4:
            yield number, value, begin, at


def _varint(window: bytes, place: int) -> tuple[int, int]:
    """Read a varint (7 bits per byte); return its value and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(window):
            break
        byte = window[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("the file is damaged, or cut short")


def _read(file: BinaryIO, first: int, last: int) -> bytes:
    if last - first > _MOST_NAME_BYTES:
        raise ValueError(f"a name of {last - first} bytes")
    file.seek(first)
    return file.read(last - first)
