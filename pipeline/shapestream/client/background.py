"""The trio core in a thread of its own, for the faces that have no trio: asyncio and blocking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import trio

from shapestream.client.connector import Connector
from shapestream.client.core import Core
from shapestream.client.link import LinkSettings
from shapestream.client.tickets import AnyTicket

__all__ = ["BackgroundCore"]

# How long leaving waits for the thread. It has nothing to wait for itself, so this is for a machine that
# hangs.
_JOIN_S = 5.0


class BackgroundCore:
    """A core, and the thread that runs it. A daemon: a client that nobody closes keeps no process alive."""

    def __init__(
        self,
        connector: Connector,
        *,
        software: str,
        settings: LinkSettings,
        deliver: Callable[[list[AnyTicket]], None],
        ended: Callable[[], None],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        self.core = Core(
            connector,
            software=software,
            settings=settings,
            clock=time.monotonic,
            deliver=deliver,
            is_abandoned=is_abandoned,
        )
        self.error: Exception | None = None
        """What ended the core, if it was not `stop`."""
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="shapestream-client", daemon=True)

    def start(self) -> None:
        """Start the thread. What was posted before is taken in its first turn."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the core to end; from any thread, any number of times. A forked child asks nobody."""
        self.core.stop()

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive, in this process."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread's end. A Ctrl-C interrupts it."""
        self._thread.join(_JOIN_S)

    def check(self) -> None:
        """Raise what ended the core, if it was not `stop`."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            trio.run(self.core.run)
        except Exception as error:  # noqa: BLE001 - the thread's edge; `check` raises it for the caller
            self.error = error
        finally:
            self._ended()
