"""Tokens of callers: what a file may hold, and who is let in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.secret_files import write_secret

from shapestream.errors import ConfigurationError
from shapestream.web.messages import HttpError, HttpRequest
from shapestream.web.tokens import Tokens, read_tokens

FILE = """\
# of the shop
web   one-token
web   its-next-token

batch-7 another
"""


def asking(authorization: str | None) -> HttpRequest:
    """A request with this header."""
    headers = {} if authorization is None else {"authorization": authorization}
    return HttpRequest(method="GET", path="/v2", query="", headers=headers, body=b"", peer="127.0.0.1")


@pytest.mark.parametrize(
    ("authorization", "name"),
    [
        ("Bearer one-token", "web"),
        ("bearer its-next-token", "web"),
        ("Bearer  another", "batch-7"),
    ],
)
def test_a_token_names_its_caller(authorization: str, name: str) -> None:
    """However the scheme is written."""
    assert name == Tokens(FILE).caller_of(asking(authorization))


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer one",
        "Bearer web",
        "Basic one-token",
        "one-token",
        "Bearer \udcff\u20ac",
    ],
)
def test_nobody_else_is_let_in(authorization: str | None) -> None:
    """They learn that a token is asked for, and how to send it."""
    with pytest.raises(HttpError) as caught:
        Tokens(FILE).caller_of(asking(authorization))
    assert 401 == caught.value.status
    assert (("WWW-Authenticate", "Bearer"),) == caught.value.headers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no token (write a line NAME TOKEN for each caller)"),
        ("# nothing else\n", "no token (write a line NAME TOKEN for each caller)"),
        ("web one two\n", "line 1: 3 words (write NAME TOKEN)"),
        ("a t\nweb\n", "line 2: 1 words (write NAME TOKEN)"),
        (f"{'n' * 129} t\n", "line 1: a name has 1 to 128 printable ASCII characters"),
        ("a same\nb same\n", "line 2: the token of b is another caller's too"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(tmp_path: Path, text: str, problem: str) -> None:
    """The message never holds a token."""
    path = tmp_path / "tokens"
    write_secret(path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_tokens(path)
    assert [f"{path}: {problem}"] == caught.value.problems


def test_a_file_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    """A missing one, a folder, one of other bytes."""
    (tmp_path / "binary").write_bytes(b"a \xff\n")
    for name in ("missing", ".", "binary"):
        with pytest.raises(ConfigurationError) as caught:
            read_tokens(tmp_path / name)
        assert 1 == len(caught.value.problems)
