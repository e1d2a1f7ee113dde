"""`shapestream top`: the tables of `stats`, drawn again each second in a terminal, over one connection."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shapestream import blocking
from shapestream.errors import RequestError
from shapestream_workers.stats import counters_of, drawing, show
from shapestream_workers.target import ServerAccess

REFRESH_S = 1.0
PATIENCE_S = 2.0
"""Seconds to wait for an answer; after that the last tables stay, with a warning. Keys are read between two requests."""
LOOKS = 10
"""Refreshes over which the rates of workers are taken."""


def show_top(access: ServerAccess, *, once: bool, as_json: bool) -> None:
    """Draw until `q` or Ctrl-C; once for scripts, and where stdout is no terminal."""
    console = Console()
    with access.connect() as client:
        told = counters_of(client, access.address)
        if once or as_json or not console.is_terminal:
            show(access.address, told, as_json=as_json)
            return
        with suppress(KeyboardInterrupt), _keyboard() as pressed:
            _watch(client, access.address, told, console, pressed)


def _watch(
    client: blocking.Client,
    address: str,
    told: dict[str, Any],
    console: Console,
    pressed: Callable[[float], bytes],
) -> None:
    looks, answered_at, trouble = deque([told], maxlen=LOOKS), time.monotonic(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            before = looks[0] if len(looks) > 1 else None
            status = Text(trouble or "q ends", style="bold red" if trouble else "dim")
            live.update(Group(status, drawing(address, looks[-1], before)), refresh=True)
            if b"q" in pressed(REFRESH_S):
                return
            try:
                told = counters_of(client, address, PATIENCE_S)
            except RequestError as error:
                lost_s = time.monotonic() - answered_at
                trouble = f"no answer for {lost_s:.0f} s, trying on; this is what was last seen ({error.code}); q ends"
                continue
            if told["pid"] != looks[-1]["pid"]:
                looks.clear()
            looks.append(told)
            answered_at, trouble = time.monotonic(), ""


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that waits for pressed keys, at most so many seconds, and returns them. Keys are not echoed.

    The function returns `q` when the terminal has closed. Where stdin is no terminal, it only waits.
    """
    stdin = sys.stdin.fileno()
    watched = [stdin] if sys.stdin.isatty() else []

    def pressed(seconds: float) -> bytes:
        ready, _, _ = select.select(watched, [], [], seconds)
        return os.read(stdin, 64) or b"q" if ready else b""

    before = termios.tcgetattr(stdin) if watched else []
    if watched:
        tty.setcbreak(stdin)
    try:
        yield pressed
    finally:
        if watched:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
