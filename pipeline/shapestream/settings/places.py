"""Checks of addresses, keys, files and functions that the configuration names.

As in values.py. The folder that relative paths start from comes in pydantic's validation context.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from shapestream.settings.values import address_meant, describe, wrong

__all__ = [
    "check_address",
    "check_digest",
    "check_function",
    "is_public_key",
    "read_key_list",
    "read_model_path",
    "read_model_root",
    "read_output_path",
    "read_samples_path",
    "read_secret_path",
    "read_security_mode",
    "registered_functions",
]

FUNCTIONS_GROUP = "shapestream.functions"
"""Group of the entry points by which packages register functions."""
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def registered_functions() -> dict[str, str]:
    """The functions that installed packages register, `package.module:name` by name."""
    return {point.name: point.value.replace(" ", "") for point in entry_points(group=FUNCTIONS_GROUP)}


def check_function(value: Any, info: ValidationInfo) -> str:
    """Check `package.module:name`; a registered name becomes that."""
    if isinstance(value, str) and _FUNCTION.fullmatch(value) is not None:
        return value
    registered = registered_functions()
    if isinstance(value, str) and value in registered:
        return registered[value]
    if isinstance(value, str) and _FUNCTION_NAME.fullmatch(value) and not files_must_exist(info):
        return value  # of a package that need not be installed here
    hint = (
        f"or a registered name: {', '.join(sorted(registered))}"
        if registered
        else "the module must be installed"
    )
    raise wrong(f"expected package.module:name, got {describe(value)} ({hint})")


def check_digest(value: Any) -> str:
    """Check a sha256 in hexadecimal."""
    if isinstance(value, str) and _DIGEST.fullmatch(value) is not None:
        return value.lower()
    raise wrong(
        f"expected 64 hexadecimal digits, got {describe(value)} (sha256sum prints them; put them in quotes)"
    )


def read_model_root(value: Any, info: ValidationInfo) -> str:
    """Read a folder that exists, as an absolute path without symbolic links."""
    if not isinstance(value, str) or not value:
        raise wrong(f"expected the path of a folder, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path, Path.is_dir, "folder", info)
    return str(path.resolve())


def read_model_path(value: Any, info: ValidationInfo) -> str:
    """Read a model file that exists, as an absolute path."""
    if not isinstance(value, str) or not value:
        raise wrong(f"expected the path of a model file, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path, Path.is_file, "file", info)
    return str(path)


def read_output_path(value: Any, info: ValidationInfo) -> str:
    """Read a file to be written, as an absolute path; its folder exists."""
    if not isinstance(value, str) or not value or value.endswith("/"):
        raise wrong(f"expected the path of a file to write, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path.parent, Path.is_dir, "folder", info)
    return str(path)


def read_samples_path(value: Any, info: ValidationInfo) -> str:
    """Read an .npz that exists, as an absolute path."""
    if not isinstance(value, str) or not value.endswith(".npz"):
        raise wrong(f"expected the path of an .npz of samples, got {describe(value)}")
    path = absolute_path(value, info)
    _must_be_there(path, Path.is_file, "file", info)
    return str(path)


def _must_be_there(path: Path, is_one: Callable[[Path], bool], what: str, info: ValidationInfo) -> None:
    if files_must_exist(info) and not is_there(is_one, path):
        if what == "file" and is_there(Path.is_dir, path):
            raise wrong(f"{path} is a folder (name the file in it{_models_in(path)})")
        if what == "folder" and is_there(Path.exists, path):
            raise wrong(f"{path} is a file (name a folder)")
        raise wrong(f"no such {what}: {path} (a relative path starts at the folder of this YAML)")


def _models_in(folder: Path) -> str:
    """The end of a hint: `: folder/model.onnx` for the model files in a folder, or nothing."""
    try:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".xml", ".onnx", ".pt2"))
    except OSError:
        return ""
    return f": {', '.join(str(folder / name) for name in found[:3])}" if found else ""


def absolute_path(value: str, info: ValidationInfo) -> Path:
    """The absolute path of a value that starts at the folder of the YAML; `~` is the home of the process's user."""
    if "\0" in value:
        raise wrong(f"{describe(value)} is no path (it holds a zero byte)")
    try:
        return (_base(info) / Path(value).expanduser()).absolute()
    except RuntimeError as error:  # ~NAME of a user that is not known here
        raise wrong(f"{describe(value)} is no path: {error}") from error


def is_there(is_one: Callable[[Path], bool], path: Path) -> bool:
    """True where the file or folder exists, as `is_one` tells. Raises the error for a path that cannot be looked at."""
    try:
        return is_one(path)
    except OSError as error:  # too long, or in a folder that is closed to us
        raise wrong(f"{describe(str(path))} cannot be looked at: {error.strerror}") from error


def _base(info: ValidationInfo) -> Path:
    context = info.context or {}
    return Path(context.get("base", "."))


def files_must_exist(info: ValidationInfo) -> bool:
    """True where named files and folders must exist; false where the YAML is only read, for a test."""
    return bool((info.context or {}).get("files_must_exist", False))


# sun_path of sockaddr_un holds 108 bytes on Linux, the closing zero included; the transport binds PATH.new first.
MAX_IPC_PATH_BYTES = 103

_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A CURVE key in Z85 (ZeroMQ's RFC 32)."""


def check_address(value: Any, info: ValidationInfo) -> str:
    """Check `ipc://PATH`, made absolute, or `tcp://HOST:PORT`. Addresses beyond loopback are checked with `security`."""
    if not isinstance(value, str):
        raise wrong(f"expected an address, got {describe(value)} (write ipc://PATH or tcp://127.0.0.1:PORT)")
    scheme, separator, rest = value.partition("://")
    if separator and scheme == "ipc":
        return _ipc_address(rest, info)
    if separator and scheme == "tcp":
        return _tcp_address(value, rest)
    meant = address_meant(value) or "ipc://PATH or tcp://127.0.0.1:PORT"
    raise wrong(f"{describe(value)} is not an address (write {meant})")


def _ipc_address(path: str, info: ValidationInfo) -> str:
    if not path or path.startswith("@"):
        raise wrong("an ipc address needs a path (write ipc://run/shapestream.sock)")
    absolute = str(absolute_path(path, info))
    if len(absolute.encode()) > MAX_IPC_PATH_BYTES:
        advice = f"at most {MAX_IPC_PATH_BYTES} bytes; use a shorter, absolute path such as ipc:///run/shapestream.sock"
        raise wrong(f"the socket's path {absolute} is too long ({advice})")
    return f"ipc://{absolute}"


def _tcp_address(value: str, rest: str) -> str:
    host, _, port = rest.rpartition(":")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise wrong(f"{describe(value)} has no port between 0 and 65535 (write tcp://127.0.0.1:5555)")
    if not host:
        raise wrong(f"{describe(value)} has no host (write tcp://127.0.0.1:5555)")
    return value


def is_public_key(text: str) -> bool:
    """True for a text that has the form of a key. A path of that form is written ./PATH."""
    return _Z85_KEY.fullmatch(text) is not None


def read_security_mode(word: str) -> dict[str, str]:
    """Read the short form of {mode: network}."""
    if word != "network":
        raise wrong(
            f"expected keys, or the word network, got {describe(word)} (write {{key: FILE, clients: FOLDER}})"
        )
    return {"mode": word}


def read_secret_path(value: Any, info: ValidationInfo) -> str:
    """Read the path of a secret key's file, made absolute. A key in its place is refused, and not repeated in the error."""
    if not isinstance(value, str) or not value:
        raise wrong("expected the path of a secret key's file (make one with: shapestream keys new NAME)")
    if is_public_key(value) and not absolute_path(value, info).exists():
        raise wrong(
            "a key stands here, in a file that is no secret (make a new one, and write the path of its file)"
        )
    path = absolute_path(value, info)
    if files_must_exist(info) and not is_there(Path.is_file, path):
        raise wrong(f"no such file: {path} (make it with: shapestream keys new NAME --folder {path.parent})")
    return str(path)


def read_key_list(value: Any, info: ValidationInfo) -> str | tuple[str, ...]:
    """Read a folder of public keys, made absolute, or a list of them: each in Z85, or the path of a .pub file."""
    if isinstance(value, str) and value and not is_public_key(value):
        folder = absolute_path(value, info)
        if files_must_exist(info) and not is_there(Path.is_dir, folder):
            raise wrong(f"no such folder: {folder} (it holds a .pub file for each key that is let in)")
        return str(folder)
    if not isinstance(value, list) or not all(isinstance(key, str) and key for key in value):
        raise wrong(f"expected a folder of .pub files, or a list of public keys, got {describe(value)}")
    return tuple(_listed_key(key, info) for key in value)


def _listed_key(key: str, info: ValidationInfo) -> str:
    if is_public_key(key):
        return key
    path = absolute_path(key, info)
    if files_must_exist(info) and not is_there(Path.is_file, path):
        raise wrong(f"{describe(key)} is neither a public key, of 40 characters, nor a file")
    return str(path)
