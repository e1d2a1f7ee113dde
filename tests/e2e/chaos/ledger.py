"""The ledger's process: `python -I -S ledger.py SOCKET`. Takes facts from every process of a chaos run, judges at the end.

It shares no code with the server, knows none of its words, and is never stopped or killed. One packet of its socket
(SOCK_SEQPACKET, so that whoever is killed leaves whole packets behind) holds one JSON object: a *fact*, which is not
answered, or a question (`ask`), which is.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from typing import Any

if __name__ == "__main__":  # started in isolation: only this folder is added
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from book import Book  # type: ignore[import-not-found]
else:
    from tests.e2e.chaos.book import Book

MAX_PACKET_BYTES = 1 << 16
QUESTIONS = (
    "cut_short", "in_flight", "in_reply", "in_run", "late_starts_s", "lies", "recovery", "runs_of", "summary",
    "withdrawn", "zeros",
)  # fmt: skip
"""Methods of the book that can be asked for."""


class Ledger:
    """Reads every connection, and answers questions about the book."""

    def __init__(self, path: str) -> None:
        self._book = Book()
        self._selector = selectors.DefaultSelector()
        self._watches: list[tuple[float, dict[str, Any], socket.socket]] = []
        """Questions that wait for a fact, with the time when they are given up."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path + ".new")
        listener.listen(64)
        os.rename(path + ".new", path)  # whoever sees it can connect
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Until it is killed, when everything is over."""
        while True:
            for key, _ in self._selector.select(0.05):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                else:
                    self._read(key.fileobj)
            self._give_up_watches()

    def _read(self, connection: socket.socket) -> None:
        """One packet."""
        try:
            packet = connection.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            self._selector.unregister(connection)
            connection.close()
            return
        said = json.loads(packet)
        if "fact" in said:
            self._book.take(said)
            self._notice(said)
        elif said["ask"] == "watch":
            self._watches.append((time.monotonic() + said["within_s"], said, connection))
        else:
            question = said.pop("ask")
            if question not in QUESTIONS:
                raise ValueError(f"unknown question {question!r}")
            _answer(connection, getattr(self._book, question)(**said))

    def _notice(self, fact: dict[str, Any]) -> None:
        """Whoever lies in wait for such a fact hears of it at once."""
        for watch in list(self._watches):
            _, said, connection = watch
            if fact["fact"] == said["wanted"] and _concerns(fact, said):
                self._watches.remove(watch)
                _answer(connection, fact)

    def _give_up_watches(self) -> None:
        now = time.monotonic()
        for watch in [watch for watch in self._watches if watch[0] <= now]:
            self._watches.remove(watch)
            _answer(watch[2], None)


def _concerns(fact: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether it is about that process, that step, and that client, where these are asked for."""
    client = said.get("client")
    for what in ("pid", "step"):
        if said.get(what) not in (None, fact.get(what)):
            return False
    tokens = fact.get("tokens", ())
    return client is None or fact.get("client") == client or any(token >> 32 == client for token in tokens)


def _answer(connection: socket.socket, value: Any) -> None:
    try:
        connection.send(json.dumps(value).encode())
    except OSError:
        return  # who asked is gone


if __name__ == "__main__":
    Ledger(sys.argv[1]).run()
