"""The watch for peers that close their connection while their request is being answered.

A task that answers a request does not read, and a peer may have sent more requests before it closed: reading would find
those first. The kernel tells of a closed peer whatever is unread (EPOLLRDHUP). One epoll object and one task watch all
connections: each is registered once, and a request costs nothing.

A peer that has closed its connection, and one that has only shut down its writing side and waits, look the same (FIN). Both
are taken for closed, as nginx (status 499), uvicorn, hypercorn and Go's net/http do: a gateway that computed answers for the
closed ones would work for nobody, and hardly any client does the other.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

# Edge-triggered: a hang-up is told once, and not again in every turn of the loop until the connection is closed.
_EVENTS = select.EPOLLRDHUP | select.EPOLLET


class HangupWatch:
    """The watch of one server's connections."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}

    @contextmanager
    def watching(self, descriptor: int, hung_up: Callable[[], None]) -> Iterator[None]:
        """Call `hung_up` if the peer of the socket closes during the block, or has closed before."""
        self._epoll.register(descriptor, _EVENTS)
        self._calls[descriptor] = hung_up
        try:
            yield
        finally:
            del self._calls[descriptor]
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for descriptor, _ in self._epoll.poll(0):
                self._calls[descriptor]()

    def close(self) -> None:
        """Give the descriptor back. No connection is watched any more."""
        self._epoll.close()
