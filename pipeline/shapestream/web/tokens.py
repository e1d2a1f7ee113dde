"""The callers of a port that speaks HTTP or gRPC, and the tokens by which it knows them.

The file has a line `NAME TOKEN` for each caller, besides empty lines and those that begin with `#`. A caller may have
several tokens, so that one can be replaced while the other is still in use. The admin port has one caller, and its file the
token alone.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from shapestream.errors import ConfigurationError
from shapestream.secret_files import read_secret
from shapestream.web.messages import HttpError, HttpRequest
from shapestream.wire.tags import CALLER, can_be_sent, rule_of

MAX_FILE_BYTES = 4 << 20
"""Largest file of tokens: of some 40,000 callers."""
_HOW = (("WWW-Authenticate", "Bearer"),)


class UnknownCaller(Exception):
    """A request without a known token; the message says why."""


class Tokens:
    """The names of callers by their tokens."""

    def __init__(self, lines: str) -> None:
        """`lines`: the content of a file. Raises `ConfigurationError` with every line that cannot be used."""
        # Digests are looked up, so the time that it takes says nothing of a token.
        self._names: dict[bytes, str] = {}
        problems = []
        for number, line in enumerate(lines.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                problems.append(f"line {number}: {len(words)} words (write NAME TOKEN)")
            elif not can_be_sent(CALLER, words[0]):
                problems.append(f"line {number}: a name has {rule_of(CALLER)}")
            elif self._names.setdefault(_digest(words[1]), words[0]) != words[0]:
                problems.append(f"line {number}: the token of {words[0]} is another caller's too")
        if not self._names and not problems:
            problems.append("no token (write a line NAME TOKEN for each caller)")
        if problems:
            raise ConfigurationError(problems)

    def caller_of(self, request: HttpRequest) -> str:
        """Return the name of the caller of a request. Raises HttpError 401 for one without a known token."""
        try:
            return self.name_of(request.headers.get("authorization", ""))
        except UnknownCaller as error:
            raise HttpError(401, str(error), _HOW) from None

    def name_of(self, authorization: str) -> str:
        """Return the name of the caller with this header `Authorization`. Raises `UnknownCaller`."""
        scheme, _, token = authorization.partition(" ")
        if not token:
            raise UnknownCaller("this server asks for a token (send the header Authorization: Bearer TOKEN)")
        name = self._names.get(_digest(token.strip())) if scheme.lower() == "bearer" else None
        if name is None:
            raise UnknownCaller("this token is not known here")
        return name


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: Path, only: str | None = None) -> Tokens:
    """Read a file of tokens; with `only`, that of the token of this one caller.

    Raises `ConfigurationError` as `read_secret` does, and with every line that cannot be used.
    """
    data = read_secret(path, MAX_FILE_BYTES, holds="a token")
    try:
        text = data.decode()
        if only is not None and len(text.split()) != 1:
            raise ConfigurationError(["expected a token of one word"])
        return Tokens(text if only is None else f"{only} {text}")
    except UnicodeDecodeError as error:
        # Its words would show a byte of a token.
        raise ConfigurationError([f"{path}: is not UTF-8"]) from error
    except ConfigurationError as error:
        raise ConfigurationError([f"{path}: {problem}" for problem in error.problems]) from error
