"""The base class of the sections, the texts of their errors, and the values that several of them read.

Each `read_` or `check_` function, here and beside the section that uses it, takes a raw value of the YAML. It returns
the value to keep, or raises an error made by `wrong`, with the text "what is wrong (what to do)". Pydantic's validation
context holds the folder from which relative paths start.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError

from shapestream.addresses import is_beyond_loopback
from shapestream.settings.yaml_source import Location
from shapestream_engine.backends.registry import ENGINES_OF_SUFFIX

Finding: TypeAlias = tuple[Location, str]
"""The place of the key to change, and the problem with its remedy in brackets."""


def below(location: Location, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings of a section, with places that start at `location` of the section around it."""
    for where, words in findings:
        yield (*location, *where), words


_IN_NO_FILE: JsonDict = {"in_files": False}
"""The mark of fields that are no keys."""


def constant(value: Any, *, is_shown: bool = False) -> Any:
    """Return a field that no file can set: a constant, which `LoadedSettings.with_server` and tests may replace.

    `is_shown`: another form of the file can change it, so `shapestream check --show` shows it.
    """
    return Field(default=value, exclude=not is_shown, json_schema_extra=_IN_NO_FILE)


class Section(BaseModel):
    """Base of all sections. It is strict: nothing is converted, and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    SHORT: ClassVar[str | None] = None
    """The key whose value may be written instead of the section, where most files have that key alone."""

    @classmethod
    def file_keys(cls) -> list[str]:
        """Return the keys that a file may have in this section."""
        return [name for name, field in cls.model_fields.items() if field.json_schema_extra != _IN_NO_FILE]

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        if cls.SHORT is None or isinstance(value, dict | Section):
            return value
        return {cls.SHORT: value}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON Schema with the fields' docstrings as descriptions.

        They are read here because `use_attribute_docstrings` reads the source at import: a twelfth of a process's start.
        """
        schema = handler(core_schema)
        section = handler.resolve_ref_schema(schema)
        properties = section.get("properties", {})
        for key in properties.keys() - set(cls.file_keys()):
            del properties[key]
        if cls.SHORT is not None:
            section["type"] = ["object", "string"]
        for base in cls.__mro__[: cls.__mro__.index(Section)]:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, text in itertools.pairwise(definition.body):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=key)),
                        ast.Expr(value=ast.Constant(value=str(words))),
                    ) if key in properties:
                        properties[key]["description"] = inspect.cleandoc(words)
        return schema


def describe(value: Any) -> str:
    """Return a value as the user wrote it, in short form: `"8"`, `true`, `a list`, `nothing`."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def address_meant(value: Any) -> str | None:
    """Return the address that a text without `tcp://` or `ipc://` probably means, or None."""
    if not isinstance(value, str) or "://" in value:
        return None
    host, colon, port = value.rpartition(":")
    if colon and port.isascii() and port.isdigit() and "/" not in value:
        return f"tcp://{host or '127.0.0.1'}:{port}"
    return f"ipc://{value}" if value.endswith(".sock") or "/" in value else None


def check_host_and_port(value: Any) -> str:
    """Check the `HOST:PORT` of a port for HTTP. Port 0 means any free port; the log names it."""
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        plain = host and "/" not in host and host != "*"
        if plain and port.isascii() and port.isdigit() and int(port) <= 65535:
            return value
    port = str(value) if type(value) is int else "8000"
    raise wrong(f'expected HOST:PORT, got {describe(value)} (write "127.0.0.1:{port}")')


def wrong(message: str) -> PydanticCustomError:
    """Return the error to raise for a value; `message` is the problem with its remedy in brackets."""
    # Pydantic formats its text as a template; braces in `message` must not count as fields.
    return PydanticCustomError("setting", "{message}", {"message": message})


def check_name(value: Any, what: str, known: Iterable[str]) -> str:
    """Check that a value is one of the known names of `what`."""
    if isinstance(value, str) and value in known:
        return value
    raise wrong(f"unknown {what} {describe(value)} (write one of: {', '.join(known)})")


MAX_BYTES = 1 << 53
"""Largest number of bytes, 8 PiB: more than any machine has, and exact in every format that carries it."""

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SIZE = re.compile(r"(\d{1,12})\s*([A-Za-z]*)")


def spell_bytes(count: int) -> str:
    """Return the bytes for people, `312 MiB` or `2.5 GiB`; rounded up, so that a setting can hold them."""
    mebibytes = -(-count // (1 << 20))
    return f"{mebibytes} MiB" if mebibytes < 10_240 else f"{mebibytes / 1024:.1f} GiB"


def read_bytes(value: Any) -> int:
    """Read a number of bytes, or a text such as "256 MiB"."""
    if type(value) is int and value > 0:
        return _believable(value, value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) is not None:
        scale = _UNITS.get(match[2].upper())
        if scale is not None and int(match[1]) > 0:
            return _believable(int(match[1]) * scale, value)
    raise wrong(f'expected a size, got {describe(value)} (write bytes, or "256 MiB")')


def _believable(nbytes: int, value: Any) -> int:
    if nbytes > MAX_BYTES:
        raise wrong(f"{describe(value)} is more than any machine has (write at most {MAX_BYTES})")
    return nbytes


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 1}

Bytes: TypeAlias = Annotated[
    int, BeforeValidator(read_bytes), WithJsonSchema({"anyOf": [COUNT, {**TEXT, "examples": ["256 MiB"]}]})
]


def read_path(
    value: Any,
    info: ValidationInfo,
    *,
    expected: str,
    kind: Literal["file", "folder"] = "file",
    suffix: str = "",
) -> str:
    """Read the path of a file or folder that exists, as an absolute path. `expected` names the object in errors."""
    if not isinstance(value, str) or not value or not value.endswith(suffix):
        raise wrong(f"expected the path of {expected}, got {describe(value)}")
    path = absolute_path(value, info)
    must_be_there(path, kind, info)
    return str(path)


def must_be_there(path: Path, kind: Literal["file", "folder"], info: ValidationInfo) -> None:
    """Raise an error unless the path is an existing file or folder, if files must exist."""
    if not files_must_exist(info) or is_there(Path.is_file if kind == "file" else Path.is_dir, path):
        return
    if kind == "file" and is_there(Path.is_dir, path):
        raise wrong(f"{path} is a folder (name the file in it{_models_in(path)})")
    if is_there(Path.exists, path):
        raise wrong(f"{path} is {'a file (name a folder)' if kind == 'folder' else 'not a regular file'}")
    raise wrong(f"no such {kind}: {path} (a relative path starts at the folder of this YAML)")


def _models_in(folder: Path) -> str:
    """Return the end of a hint, `: folder/model.onnx`, for the model files in a folder; empty if there are none."""
    try:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in ENGINES_OF_SUFFIX)
    except OSError:
        return ""
    return f": {', '.join(str(folder / name) for name in found[:3])}" if found else ""


def absolute_path(value: str, info: ValidationInfo) -> Path:
    """Return the absolute path of a value. It starts at the folder of the YAML; `~` is the user's home."""
    if "\0" in value:
        raise wrong(f"{describe(value)} is no path (remove the zero byte)")
    try:
        base = Path((info.context or {}).get("base", "."))
        return (base / Path(value).expanduser()).absolute()
    except RuntimeError as error:  # ~NAME of an unknown user
        raise wrong(f"{describe(value)} is no path: {error}") from error


def is_there(is_one: Callable[[Path], bool], path: Path) -> bool:
    """Return the answer of `is_one`. Raises an error for a path that cannot be looked at."""
    try:
        return is_one(path)
    except OSError as error:  # it is too long, or in a folder that this user cannot read
        raise wrong(f"{describe(str(path))} cannot be looked at: {error.strerror}") from error


FilePath: TypeAlias = Annotated[str, BeforeValidator(partial(read_path, expected="a file"))]


def read_list(value: Any) -> Any:
    """Read a list, or a text as short for a list of one."""
    return (value,) if isinstance(value, str) else value


class TokenPort(Section):
    """A port for callers that may have to show a token."""

    SHORT = "address"
    address: Annotated[str, BeforeValidator(check_host_and_port), WithJsonSchema(TEXT)]
    """HOST:PORT; beyond loopback with `token_file`, or with `security: network`."""
    token_file: FilePath | None = None
    """File with the token, or the tokens, that callers must show."""

    def is_open(self, *, network_is_safe: bool) -> str | None:
        """Return the problem of an address that other machines reach and that asks for no token, or None."""
        safe = network_is_safe or self.token_file is not None
        if safe or not is_beyond_loopback(f"tcp://{self.address}"):
            return None
        advice = "add token_file, or security: network, or use 127.0.0.1"
        return f'"{self.address}" is open to other machines ({advice})'


def files_must_exist(info: ValidationInfo) -> bool:
    """Tell whether named files and folders must exist. They need not where a command only looks for an address."""
    return bool((info.context or {}).get("files_must_exist", False))


def keys_must_exist(info: ValidationInfo) -> bool:
    """Tell whether the files of the server's keys must exist. They need not on a worker's host, which has none."""
    return bool((info.context or {}).get("keys_must_exist", False))
