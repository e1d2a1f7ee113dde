"""Addresses of servers as they are given: those that stay, and names that are looked up again and again.

A name stands for the servers behind it, such as the pods behind a headless service. It is looked up every `LOOK_UP_S` in a
thread, since the C library's look-up blocks, and soon after a server has gone: another may have taken its place. An empty
answer, or none, changes nothing: servers that are there keep their links while the names' own server is away.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shapestream.addresses import is_protectable
from shapestream.client.connector import Address, Addresses

LOOK_UP_S = 10.0
"""Seconds between look-ups of a name."""
SOON_S = 1.0
"""Seconds until the next look-up, at least, where servers go: they may go one after the other, and the answer be late."""


class LookUps:
    """The addresses that a client was given, and those that their names have now.

    One thread looks names up; the owner takes what was found in its own.
    """

    def __init__(self, given: Addresses, found: Callable[[], None]) -> None:
        """`found` is called in the thread that looks names up, after each answer."""
        every: Sequence[Address] = (
            [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        )
        self.fixed = [each for each in every if not _has_name(each)]
        """Those without a name to look up, endpoints in memory among them."""
        self._names = [str(each) for each in every if _has_name(each)]
        self._tell = found
        self._answers: deque[tuple[str, list[str]]] = deque()
        """New answers, a name and its addresses. Each is taken within a turn of the owner, which it wakes."""
        self._latest: dict[str, list[str]] = {}
        self._ended = threading.Event()
        self._hastened = threading.Event()

    def start(self) -> None:
        """Begin to look names up, if there are any."""
        if self._names:
            threading.Thread(target=self._look_up, name="shapestream-names", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end. A look-up that is under way is not waited for."""
        self._ended.set()
        self._hastened.set()

    def hasten(self) -> None:
        """Look names up soon. Any number of times."""
        self._hastened.set()

    def take(self) -> dict[str, list[str]] | None:
        """Return the addresses of each name, if there is a new answer; else None."""
        if not self._answers:
            return None
        while self._answers:
            name, found = self._answers.popleft()
            self._latest[name] = found
        return self._latest

    @property
    def without(self) -> list[str]:
        """The names that have had no address so far."""
        return [name for name in self._names if name not in self._latest]

    def _look_up(self) -> None:
        while not self._ended.is_set():
            self._hastened.clear()
            for name in self._names:
                try:
                    found = addresses_of(name)
                except OSError:
                    found = []
                if found:
                    self._answers.append((name, found))
                    self._tell()
            if self._hastened.wait(LOOK_UP_S):
                self._ended.wait(SOON_S)


def _has_name(address: Address) -> bool:
    """Tell whether an address has a name to look up."""
    if not isinstance(address, str) or not is_protectable(address):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def addresses_of(address: str) -> list[str]:
    """Return the IPv4 addresses that the name in `tcp://NAME:PORT` has now. Raises OSError where it has none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(f"tcp://{place[0]!s}:{port}" for *_, place in found))
