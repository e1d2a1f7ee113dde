"""The watermark of a server that runs models in its own process (`in_process`): nobody can replace it."""

from __future__ import annotations

import structlog

from shapestream.serving.server import Server
from shapestream_workers.memory import spell_bytes, watch_memory

__all__ = ["InProcessMemory"]

log = structlog.get_logger()


class InProcessMemory:
    """Warns when the server holds too much, and may refuse what makes it grow: requests of new shapes."""

    def __init__(self, server: Server, limit_bytes: int, *, refuses: bool) -> None:
        self._server = server
        self._limit_bytes = limit_bytes
        self._refuses = refuses
        self._warned = False

    async def run(self) -> None:
        """Watches until cancelled."""
        await watch_memory(self._limit_bytes, self.passed, self.below)

    def passed(self, resident: int) -> None:
        """More is held than should be."""
        if not self._warned:  # once: who did not act on it will not act on the tenth either
            self._warned = True
            log.warning(
                "memory limit passed",
                resident=spell_bytes(resident),
                limit=spell_bytes(self._limit_bytes),
                what="requests of new shapes are refused"
                if self._refuses
                else "in_process: nothing can be done",
            )
        if self._refuses:
            limit = spell_bytes(self._limit_bytes)
            self._server.refuse_new_shapes(
                f"the server holds more than {limit} of memory, and takes no request of a shape that it has not met"
            )

    def below(self, resident: int) -> None:
        """There is room again."""
        log.info("memory limit kept again", resident=spell_bytes(resident))
        self._server.refuse_new_shapes(None)
