"""Notify systemd about this process (sd_notify(3)), by a datagram to the socket that the environment names.

Nothing is sent outside systemd, or if the unit does not ask for notifications.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import structlog
import trio

log = structlog.get_logger()


def notify(state: str) -> None:
    """Send an assignment such as `READY=1`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            # "@" stands for the zero byte of an abstract socket.
            sender.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError as error:
            log.warning("systemd was not told", state=state, why=str(error))


def watchdog_s() -> float | None:
    """Return the seconds within which systemd expects a sign of life; None where it expects none of this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    given = os.environ.get("WATCHDOG_USEC", "")
    return int(given) * 1e-6 if given.isascii() and given.isdigit() and int(given) else None


async def tend_watchdog(standstill: Callable[[], str | None]) -> None:
    """Send signs of life from the event loop until cancelled, except while `standstill` returns a reason."""
    expected_s = watchdog_s()
    while expected_s is not None:
        if standstill() is None:
            notify("WATCHDOG=1")
        await trio.sleep(expected_s / 3)
