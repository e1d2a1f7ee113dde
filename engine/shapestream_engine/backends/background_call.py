"""A call on a thread of its own, for engines whose calls block: what `start_async` and `wait` are made of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["BackgroundCall"]


class BackgroundCall:
    """Runs one call at a time beside the caller. Its thread starts with the first call and ends with the object."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._call: Future[None] | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Begin to call; raises `RuntimeError` while the last call was not waited for."""
        if self._call is not None:
            raise RuntimeError("the last call was not waited for")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="infer")
        self._call = self._executor.submit(function)

    def wait(self) -> None:
        """Until the call is over; raises what it raised. Without a call it returns at once."""
        call, self._call = self._call, None
        if call is not None:
            call.result()
