"""CURVE key pairs and the files that hold them.

A pair is two files: `NAME.secret`, mode 0600, for the process that proves to be NAME, and `NAME.pub`, for
processes that recognise NAME. Both are in the format of CZMQ's and pyzmq's certificates, so that other ZeroMQ
programs read them. A secret is in no message, no repr and no log line; the public key names its owner.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from shapestream.errors import ConfigurationError
from shapestream.secret_files import read_secret
from shapestream_engine.files import read_regular

SECRET_SUFFIX, PUBLIC_SUFFIX = ".secret", ".pub"
# A key file is 200 bytes long; a much longer file is none, and is not read.
MAX_FILE_BYTES = 4096
_ADVICE = "make keys with: shapestream keys new NAME"
# Keys in one folder, at most: each costs an entry of a look-up table, and a folder with more files holds no keys.
MAX_KEYS = 65_536
# Z85 (ZeroMQ's RFC 32): 32 bytes as 40 printable characters.
_KEY = r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
_Z85 = re.compile(_KEY)
_LINE = re.compile(rf'^\s*(public|secret)-key\s*=\s*"({_KEY})"\s*$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A key pair, both halves in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerKeys:
    """Keys of a client or worker of a protected server: its own, and the server's public one."""

    key: KeyPair
    server_key: str

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket prove this key, and talk to the owner of `server_key` only; before it connects."""
        socket.set(zmq.CURVE_PUBLICKEY, self.key.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.key.secret.encode())
        socket.set(zmq.CURVE_SERVERKEY, self.server_key.encode())


def new_key_pair() -> KeyPair:
    """Make a key pair from the operating system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def write_key_pair(folder: Path, name: str, pair: KeyPair) -> tuple[Path, Path]:
    """Write `folder/NAME.secret` (0600) and `folder/NAME.pub`; returns both paths.

    A missing folder is made, with mode 0700. Raises `ConfigurationError` rather than overwrite a key.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret, public = folder / f"{name}{SECRET_SUFFIX}", folder / f"{name}{PUBLIC_SUFFIX}"
    for path in (secret, public):
        if path.exists():
            raise ConfigurationError([f"{path}: is there already (remove it, or choose another name)"])
    note = "# ZeroMQ CURVE, the secret half: it stays on the machine that proves to be this one, mode 0600.\n"
    _write(
        secret, 0o600, f'{note}curve\n    public-key = "{pair.public}"\n    secret-key = "{pair.secret}"\n'
    )
    note = "# ZeroMQ CURVE, the public half: for everybody who is to recognise its owner.\n"
    _write(public, 0o644, f'{note}curve\n    public-key = "{pair.public}"\n')
    return secret, public


def _write(path: Path, mode: int, text: str) -> None:
    # Exclusive, and private from the first moment: no window in which another user could open it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def read_key_pair(path: Path) -> KeyPair:
    """Return the pair in a secret file.

    Raises `ConfigurationError` as `read_secret` does, and when its halves do not belong together.
    """
    data = read_secret(path, MAX_FILE_BYTES, holds="a secret key", advice=_ADVICE)
    found = _keys_in(path, data)
    if "secret" not in found:
        raise ConfigurationError([f"{path}: holds no secret key (name the {SECRET_SUFFIX} file)"])
    if zmq.curve_public(found["secret"].encode()).decode() != found["public"]:
        raise ConfigurationError([f"{path}: its public and its secret key do not belong together"])
    return KeyPair(public=found["public"], secret=found["secret"])


def public_key(text: str) -> str:
    """Return a public key in Z85, from the key itself or from the path of a `.pub` file; raises `ConfigurationError`."""
    if _Z85.fullmatch(text):
        return text
    return public_key_of(Path(text))


def public_key_of(path: Path) -> str:
    """Return the public key in a `.pub` file; raises `ConfigurationError`."""
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError([f"{path}: {reason} ({_ADVICE})"]) from error
    found = _keys_in(path, data)
    if "secret" in found:
        raise ConfigurationError([f"{path}: holds a secret key (name the {PUBLIC_SUFFIX} file)"])
    return found["public"]


def read_key_folder(folder: Path) -> dict[str, str]:
    """Return the public keys in a folder's `.pub` files, each with its file's name; raises `ConfigurationError`."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == PUBLIC_SUFFIX)
    except OSError as error:
        raise ConfigurationError(
            [f"{folder}: {error.strerror} (a folder of {PUBLIC_SUFFIX} files)"]
        ) from error
    if len(paths) > MAX_KEYS:
        raise ConfigurationError([f"{folder}: {len(paths)} keys; a folder may hold {MAX_KEYS}"])
    return {public_key_of(path): path.stem for path in paths}


def _keys_in(path: Path, data: bytes) -> dict[str, str]:
    lines = _LINE.findall(data.decode("utf-8", "replace"))
    found = dict(lines)
    if "public" not in found or len(found) != len(lines):
        raise ConfigurationError([f"{path}: is no key file ({_ADVICE})"])
    return found
