"""Single values of the configuration: what each may be, and the words for what it is not.

Each function takes a raw value of the YAML and returns the value to keep, or raises pydantic's
`PydanticCustomError`, whose text is "what is wrong (what to do)". The folder that relative paths start from
comes in pydantic's validation context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from shapestream_engine.backends.registry import known_engines
from shapestream_engine.batching.strategy import complaint_about
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.errors import ShapeError
from shapestream_engine.shapes import NamedShape

__all__ = [
    "check_address",
    "check_digest",
    "check_element_type",
    "check_engine",
    "check_function",
    "check_pad_value",
    "check_shape",
    "describe",
    "engine_of_path",
    "is_public_key",
    "read_auto",
    "read_bytes",
    "read_key_list",
    "read_memory_limit",
    "read_model_path",
    "read_model_root",
    "read_property",
    "read_rule_argument",
    "read_samples_path",
    "read_secret_path",
    "read_security_mode",
    "registered_functions",
]

# sun_path of sockaddr_un holds 108 bytes on Linux, the closing zero included; the transport binds PATH.new first.
MAX_IPC_PATH_BYTES = 103

# A Python process with NumPy and one small model takes more.
MIN_MEMORY_LIMIT = 64 << 20

_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A CURVE key in Z85 (ZeroMQ's RFC 32)."""

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
FUNCTIONS_GROUP = "shapestream.functions"
"""The entry points by which packages register functions that may be served."""
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def describe(value: Any) -> str:
    """A value as the user wrote it, short: `"8"`, `true`, `a list`, `nothing`."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(message: str) -> PydanticCustomError:
    # The text is a template for pydantic; braces of ours are not fields of it.
    return PydanticCustomError("setting", "{message}", {"message": message})


def check_address(value: Any, info: ValidationInfo) -> str:
    """`ipc://PATH`, made absolute, or `tcp://HOST:PORT`. Who may listen beyond loopback is checked with `security`."""
    if not isinstance(value, str):
        raise _wrong(f"expected an address, got {describe(value)} (write ipc://PATH or tcp://127.0.0.1:PORT)")
    scheme, separator, rest = value.partition("://")
    if separator and scheme == "ipc":
        return _ipc_address(rest, info)
    if separator and scheme == "tcp":
        return _tcp_address(value, rest)
    raise _wrong(f"{describe(value)} is not an address (write ipc://PATH or tcp://127.0.0.1:PORT)")


def _ipc_address(path: str, info: ValidationInfo) -> str:
    if not path or path.startswith("@"):
        raise _wrong("an ipc address needs a path (write ipc://run/shapestream.sock)")
    absolute = str(_absolute(path, info))
    if len(absolute.encode()) > MAX_IPC_PATH_BYTES:
        advice = f"at most {MAX_IPC_PATH_BYTES} bytes; use a shorter, absolute path such as ipc:///run/shapestream.sock"
        raise _wrong(f"the socket's path {absolute} is too long ({advice})")
    return f"ipc://{absolute}"


def _tcp_address(value: str, rest: str) -> str:
    host, _, port = rest.rpartition(":")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise _wrong(f"{describe(value)} has no port between 0 and 65535 (write tcp://127.0.0.1:5555)")
    if not host:
        raise _wrong(f"{describe(value)} has no host (write tcp://127.0.0.1:5555)")
    return value


def is_public_key(text: str) -> bool:
    """Whether this is a key and not a path, as far as 40 characters can tell. Of a path write ./PATH."""
    return _Z85_KEY.fullmatch(text) is not None


def read_security_mode(word: str) -> dict[str, str]:
    """The short form of {mode: network}."""
    if word != "network":
        raise _wrong(
            f"expected keys, or the word network, got {describe(word)} (write {{key: FILE, clients: FOLDER}})"
        )
    return {"mode": word}


def read_secret_path(value: Any, info: ValidationInfo) -> str:
    """A secret key's file, as an absolute path. A key itself has no place in a YAML, and is not repeated in the error."""
    if not isinstance(value, str) or not value:
        raise _wrong("expected the path of a secret key's file (make one with: shapestream keys new NAME)")
    if is_public_key(value) and not (_base(info) / value).exists():
        raise _wrong(
            "a key stands here, in a file that is no secret (make a new one, and write the path of its file)"
        )
    path = _absolute(value, info)
    if _must_exist(info) and not _found(Path.is_file, path):
        raise _wrong(f"no such file: {path} (make it with: shapestream keys new NAME --folder {path.parent})")
    return str(path)


def read_key_list(value: Any, info: ValidationInfo) -> str | tuple[str, ...]:
    """A folder of public keys, as an absolute path, or a list of them: each in Z85, or the path of a .pub file."""
    if isinstance(value, str) and value and not is_public_key(value):
        folder = _absolute(value, info)
        if _must_exist(info) and not _found(Path.is_dir, folder):
            raise _wrong(f"no such folder: {folder} (it holds a .pub file for each key that is let in)")
        return str(folder)
    if not isinstance(value, list) or not all(isinstance(key, str) and key for key in value):
        raise _wrong(f"expected a folder of .pub files, or a list of public keys, got {describe(value)}")
    return tuple(_listed_key(key, info) for key in value)


def _listed_key(key: str, info: ValidationInfo) -> str:
    if is_public_key(key):
        return key
    path = _absolute(key, info)
    if _must_exist(info) and not _found(Path.is_file, path):
        raise _wrong(f"{describe(key)} is neither a public key, of 40 characters, nor a file")
    return str(path)


def read_bytes(value: Any) -> int:
    """A number of bytes, or a text such as "256 MiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) is not None:
        scale = _UNITS.get(match[2].upper())
        if scale is not None and int(match[1]) > 0:
            return int(match[1]) * scale
    raise _wrong(f'expected a size, got {describe(value)} (write bytes, or "256 MiB")')


def read_memory_limit(value: Any) -> int:
    """A size that a process can live in: a bare 2 or 2048 was meant in another unit."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MIN_MEMORY_LIMIT:
        raise _wrong(f'{value} bytes is less than any process takes (name the unit: "{value} MiB"?)')
    try:
        limit = read_bytes(value)
    except PydanticCustomError:
        raise _wrong(f'expected a size, got {describe(value)} (write "2 GiB", or remove the key)') from None
    if limit < MIN_MEMORY_LIMIT:
        raise _wrong(f"{describe(value)} is less than any process takes (at least 64 MiB)")
    return limit


def read_auto(value: Any) -> Any:
    """A count, or `auto`."""
    if value == "auto":
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024:
        return value
    hint = "remove the quotes" if isinstance(value, str) and value.isdigit() else "write auto, or 1 to 1024"
    raise _wrong(f"expected auto or a count, got {describe(value)} ({hint})")


def read_hang_limit(value: Any) -> Any:
    """Seconds, `auto` or `off`."""
    if value in ("auto", "off"):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 86400:
        return value
    raise _wrong(
        f"expected seconds, auto or off, got {describe(value)} (write auto, off, or a number up to 86400)"
    )


def check_shape(value: Any) -> str:
    """A shape in OpenVINO's spelling, with names; a list of its entries is as good."""
    if isinstance(value, list) and all(type(entry) in (int, str) for entry in value):
        value = ", ".join(str(entry) for entry in value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise _wrong(f'expected a shape, got {describe(value)} (write "batch:1..64, seq:1..512, 384")')
    try:
        NamedShape.parse(value)
    except ShapeError as error:
        raise _wrong(f"{describe(value)} is not a shape: {error}") from error
    return value


def read_sizes(value: Any) -> tuple[int, ...]:
    """The allowed sizes of a dimension: one, or an ascending list."""
    sizes = value if isinstance(value, list) else [value]
    if not isinstance(value, list) and type(value) is not int:
        raise _wrong(
            f"expected a size or a list of sizes, got {describe(value)} (write [32, 64]; what is no setting is a dimension)"
        )
    for size in sizes:
        if type(size) is not int or size < 1:
            raise _wrong(f"expected sizes, which are integers from 1, got {describe(size)}")
    if (complaint := complaint_about(sizes)) is not None:
        hint = "list each once" if "twice" in complaint else "write them from small to large"
        raise _wrong(
            f"{complaint.replace('; write at least one', '')} ({hint if sizes else 'write [32, 64]'})"
        )
    return tuple(sizes)


def read_invariant(value: Any) -> bool | int:
    """Whether, or with how many rows, calls are all alike."""
    if isinstance(value, bool):
        return value
    if type(value) is not int or value < 1:
        raise _wrong(
            f"expected true, false or a number of rows from 1, got {describe(value)} (write true, or 8)"
        )
    return value


def check_element_type(value: Any) -> str:
    """One of the engine's element types."""
    if isinstance(value, str) and value in ELEMENT_TYPES:
        return value
    raise _wrong(f"unknown element type {describe(value)} (write one of: {', '.join(ELEMENT_TYPES)})")


def check_engine(value: Any) -> str:
    """One of ours, or one that an installed package brings."""
    known = known_engines()
    if isinstance(value, str) and value in known:
        return value
    raise _wrong(
        f"unknown engine {describe(value)} (write one of: {', '.join(known)}; packages may add others)"
    )


def engine_of_path(path: str) -> str:
    """The engine that reads files of this kind where none is named."""
    return "torch" if path.lower().endswith(".pt2") else "openvino"


def check_pad_value(value: Any) -> Any:
    """A number or a truth value."""
    if isinstance(value, (bool, int, float)):
        return value
    hint = " (remove the quotes)" if isinstance(value, str) else " (write the value to pad with, such as 0)"
    raise _wrong(f"expected a number, got {describe(value)}{hint}")


def read_property(value: Any) -> str:
    """A property of the engine, which takes texts: true is YES, false is NO."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise _wrong(f"expected a text or a number, got {describe(value)}")


def read_rule_argument(value: Any) -> int | None:
    """The column of a rule: a count from 0."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise _wrong(f"expected a column, got {describe(value)} (write 0 for the first)")


def registered_functions() -> dict[str, str]:
    """What installed packages offer as models, by name: `package.module:name`."""
    return {point.name: point.value.replace(" ", "") for point in entry_points(group=FUNCTIONS_GROUP)}


def check_function(value: Any, info: ValidationInfo) -> str:
    """`package.module:name`; a registered name becomes that."""
    if isinstance(value, str) and _FUNCTION.fullmatch(value) is not None:
        return value
    registered = registered_functions()
    if isinstance(value, str) and value in registered:
        return registered[value]
    if isinstance(value, str) and _FUNCTION_NAME.fullmatch(value) and not _must_exist(info):
        return value  # of a package that need not be installed here
    hint = (
        f"or a registered name: {', '.join(sorted(registered))}"
        if registered
        else "the module must be installed"
    )
    raise _wrong(f"expected package.module:name, got {describe(value)} ({hint})")


def check_digest(value: Any) -> str:
    """A sha256 in hexadecimal."""
    if isinstance(value, str) and _DIGEST.fullmatch(value) is not None:
        return value.lower()
    raise _wrong(
        f"expected 64 hexadecimal digits, got {describe(value)} (sha256sum prints them; put them in quotes)"
    )


def read_model_root(value: Any, info: ValidationInfo) -> str:
    """A folder that exists, as an absolute path without symbolic links."""
    if not isinstance(value, str) or not value:
        raise _wrong(f"expected the path of a folder, got {describe(value)}")
    path = _absolute(value, info)
    if _must_exist(info) and not _found(Path.is_dir, path):
        raise _wrong(f"no such folder: {path} (a relative path starts at the folder of this YAML)")
    return str(path.resolve())


def read_model_path(value: Any, info: ValidationInfo) -> str:
    """A model file that exists, as an absolute path."""
    if not isinstance(value, str) or not value:
        raise _wrong(f"expected the path of a model file, got {describe(value)}")
    path = _absolute(value, info)
    if _must_exist(info) and not _found(Path.is_file, path):
        raise _wrong(f"no such file: {path} (a relative path starts at the folder of this YAML)")
    return str(path)


def read_output_path(value: Any, info: ValidationInfo) -> str:
    """A file to be written, as an absolute path; its folder is there."""
    if not isinstance(value, str) or not value or value.endswith("/"):
        raise _wrong(f"expected the path of a file to write, got {describe(value)}")
    path = _absolute(value, info)
    if _must_exist(info) and not _found(Path.is_dir, path.parent):
        raise _wrong(f"no such folder: {path.parent} (a relative path starts at the folder of this YAML)")
    return str(path)


def read_samples_path(value: Any, info: ValidationInfo) -> str:
    """An .npz that exists, as an absolute path."""
    if not isinstance(value, str) or not value.endswith(".npz"):
        raise _wrong(f"expected the path of an .npz of samples, got {describe(value)}")
    path = _absolute(value, info)
    if _must_exist(info) and not _found(Path.is_file, path):
        raise _wrong(f"no such file: {path} (a relative path starts at the folder of this YAML)")
    return str(path)


def _absolute(value: str, info: ValidationInfo) -> Path:
    """The path from the folder of the YAML; `~` is the home of whoever runs this."""
    if "\0" in value:
        raise _wrong(f"{describe(value)} is no path (it holds a zero byte)")
    try:
        return (_base(info) / Path(value).expanduser()).absolute()
    except RuntimeError as error:  # ~somebody who is not known here
        raise _wrong(f"{describe(value)} is no path: {error}") from error


def _found(is_one: Callable[[Path], bool], path: Path) -> bool:
    """Whether there is such a file, or folder."""
    try:
        return is_one(path)
    except OSError as error:  # too long, or in a folder that is closed to us
        raise _wrong(f"{describe(str(path))} cannot be looked at: {error.strerror}") from error


def _base(info: ValidationInfo) -> Path:
    context = info.context or {}
    return Path(context.get("base", "."))


def _must_exist(info: ValidationInfo) -> bool:
    return bool((info.context or {}).get("files_must_exist", False))
