"""Addresses and keys in the configuration: what each may be, and the words for what it is not.

As in settings_values.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from shapestream.settings_file_values import absolute_path, files_must_exist, is_there
from shapestream.settings_words import address_meant, describe, wrong

__all__ = ["check_address", "is_public_key", "read_key_list", "read_secret_path", "read_security_mode"]

# sun_path of sockaddr_un holds 108 bytes on Linux, the closing zero included; the transport binds PATH.new first.
MAX_IPC_PATH_BYTES = 103

_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A CURVE key in Z85 (ZeroMQ's RFC 32)."""


def check_address(value: Any, info: ValidationInfo) -> str:
    """`ipc://PATH`, made absolute, or `tcp://HOST:PORT`. Who may listen beyond loopback is checked with `security`."""
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
    """Whether this is a key and not a path, as far as 40 characters can tell. Of a path write ./PATH."""
    return _Z85_KEY.fullmatch(text) is not None


def read_security_mode(word: str) -> dict[str, str]:
    """The short form of {mode: network}."""
    if word != "network":
        raise wrong(
            f"expected keys, or the word network, got {describe(word)} (write {{key: FILE, clients: FOLDER}})"
        )
    return {"mode": word}


def read_secret_path(value: Any, info: ValidationInfo) -> str:
    """A secret key's file, as an absolute path. A key itself has no place in a YAML, and is not repeated in the error."""
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
    """A folder of public keys, as an absolute path, or a list of them: each in Z85, or the path of a .pub file."""
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
