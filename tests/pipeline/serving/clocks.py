"""On what clock a test runs: one that jumps over waiting, or the real one for real threads and sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import ParamSpec

import trio
from trio.abc import Clock
from trio.testing import MockClock

P = ParamSpec("P")
AsyncTest = Callable[P, Awaitable[None]]
PATIENCE_S = 600.0
"""Of the jumping clock."""
REAL_PATIENCE_S = 600.0
"""No bound of anything that is tested: what never comes is an error, not a hang, also on a busy machine."""


def virtual_time(test: AsyncTest[P]) -> Callable[P, None]:
    """Runs a test whose peers and slots are all in memory: waiting takes no time."""
    return _run_on(partial(MockClock, autojump_threshold=0), PATIENCE_S, test)


def real_time(test: AsyncTest[P]) -> Callable[P, None]:
    """Runs a test of real sockets or threads, which a jumping clock would not wait for."""
    return _run_on(lambda: None, REAL_PATIENCE_S, test)


def _run_on(clock: Callable[[], Clock | None], patience_s: float, test: AsyncTest[P]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def in_time() -> None:
            with trio.fail_after(patience_s):
                await test(*args, **kwargs)

        trio.run(in_time, clock=clock())

    return run
