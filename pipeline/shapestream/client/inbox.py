"""What faces hand to the core, from any thread: each thing reaches its turn, or is refused after the end; none is lost.

There is no lock. Appending to a deque and taking from it are atomic, and what is posted late is refused by whichever
thread notices: the poster, if it finds the inbox closed, or the core, which looks once more after it has closed it.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import trio

from shapestream.client.tickets import AnyTicket, EndTicket, Owner, Question
from shapestream.errors import Cancelled

__all__ = ["Attend", "Inbox", "Posted", "Withdraw", "WithdrawAll", "closing"]


@dataclass(frozen=True, slots=True)
class Attend:
    """A stream begins: it is told when the client closes, whatever else it waits for."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for this ticket any more; its owner is closed already."""

    ticket: Question


@dataclass(frozen=True, slots=True)
class WithdrawAll:
    """A stream ends, early or not: nobody waits for its tickets any more. It is closed already."""

    owner: Owner


Posted: TypeAlias = AnyTicket | Attend | Withdraw | WithdrawAll


class Inbox:
    """Needs no bound: a call posts one ticket and waits, and a stream posts what it has permits for."""

    def __init__(self, deliver: Callable[[list[AnyTicket]], None]) -> None:
        """`deliver` gets what is refused."""
        self._deliver = deliver
        self._items: deque[Posted] = deque()
        self._awake = False
        """Whether a turn is due that has not begun: what is posted until then needs no further wake-up."""
        self._closed = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._wakeup = trio.Event()
        self._process = os.getpid()

    # ------------------------------------------------------------ faces

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: the core's thread exists in the parent only, so nobody would answer."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this client was connected before the process forked; in the child, connect anew"
            )

    def post(self, item: Posted) -> None:
        """Hand something to the core, from its own thread."""
        self._items.append(item)
        if not self._awake:
            self._awake = True
            self._wakeup.set()
        if self._closed:
            self._refuse_leftovers()

    def post_from_thread(self, item: Posted) -> None:
        """Hand something to the core, from another thread."""
        self._items.append(item)
        # Both threads may see False; then the core is woken twice. If a Ctrl-C strikes between the next two
        # lines, nobody wakes it: withdrawals therefore always do, and so does every heartbeat.
        if not self._awake or type(item) is Withdraw or type(item) is WithdrawAll:
            self._awake = True
            self.wake_from_thread()
        if self._closed:
            self._refuse_leftovers()

    def wake_from_thread(self) -> None:
        """Make the core take a turn soon; before it runs, it will take one anyway."""
        # A forked child would wake its parent, or wait for a lock that a thread of the parent held.
        if self._token is not None and os.getpid() == self._process:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self.wake)

    # ------------------------------------------------------------ the core

    def open(self) -> None:
        """The core runs in this trio run from now on."""
        self._token = trio.lowlevel.current_trio_token()

    def wake(self) -> None:
        """Another turn is due, whether or not something was posted."""
        self._wakeup.set()

    async def wait(self) -> None:
        """Until another turn is due."""
        await self._wakeup.wait()

    def turn_begins(self) -> None:
        """Whatever woke the core is looked at now; what comes from here on wakes it again."""
        self._wakeup = trio.Event()

    def take(self) -> Iterator[Posted]:
        """Everything that was posted, in order, also what is posted meanwhile."""
        self._awake = False
        items = self._items
        while items:
            yield items.popleft()

    def close(self) -> None:
        """Refuse what is there, and what will come."""
        # In this order: whoever posts from now on either finds it closed, or is found in here.
        self._closed = True
        self._refuse_leftovers()

    def _refuse_leftovers(self) -> None:
        """In whichever thread notices; two may be at it, and each refuses what it gets."""
        refused: list[AnyTicket] = []
        with contextlib.suppress(IndexError):
            while True:
                item = self._items.popleft()
                match item:
                    case Withdraw() | WithdrawAll():
                        continue
                    case Attend():
                        refused.append(closing(item.owner))
                        continue
                    case EndTicket():
                        pass
                    case _ if item.outcome is None:
                        item.outcome = Cancelled(_CLOSED)
                refused.append(item)
        if refused:
            self._deliver(refused)


def closing(owner: Owner) -> EndTicket:
    """Tells a stream that nothing more will come, since the client is closed."""
    return EndTicket(owner, place=-1, outcome=Cancelled(_CLOSED))


_CLOSED = "the client is closed"
