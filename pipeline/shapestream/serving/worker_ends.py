"""How workers end that do not leave by themselves: their process ends, cannot be reached, hangs or stays silent.

Of a process that was started here its owner is asked, and tells; one that dialled in can only be cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import trio

from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.process_owner import LastState, ProcessOwner
from shapestream.serving.remote_executor import RemoteExecutor

__all__ = ["WorkerEnds"]

log = structlog.get_logger()

# Between the end of a process and its leaving: libzmq's thread reads what it said last, so that a batch which it had
# answered is not taken for one that it died of.
LAST_WORDS_S = 0.05
# How long the end of a process is waited for once it cannot be reached: how it ended says whether it was what it ran.
EXIT_NEWS_S = 1.0
# A process of our own that was silent for so many times `worker_silence_s` is killed, and so replaced: it is lost
# already, and what it ran was run elsewhere. One that was only stopped for a while may come back before that.
SILENCES_TO_KILL = 10
# Workers that dialled in and hung, remembered so that they are not welcomed with a slot that is still held.
MAX_HUNG = 256


class WorkerEnds:
    """Decides when a worker has left for good. `workers` are those of the port, by routing id.

    `leave(worker, why, now, died)` takes one out of the books.
    """

    def __init__(
        self,
        workers: Mapping[bytes, RemoteExecutor],
        dispatcher: Dispatcher,
        leave: Callable[[RemoteExecutor, str, float, bool], None],
        *,
        read_now: Callable[[RemoteExecutor | None], None],
        clock: Callable[[], float],
        silence_s: float,
    ) -> None:
        """`read_now` reads what has arrived at the port so far, and serves what one worker said."""
        self._workers = workers
        self._dispatcher = dispatcher
        self._leave = leave
        self._read_now = read_now
        self._clock = clock
        self._silence_s = silence_s
        self.owner: ProcessOwner | None = None
        """Whoever started the workers' processes, as far as that was done here."""
        self._silent: dict[tuple[str, int], float] = {}
        """Processes of our own that were given up for their silence, and when."""
        self._hung: dict[str, None] = {}

    def may_join(self, name: str, pid: int) -> bool:
        """Whether a worker that greets may be welcomed: one that hung holds a slot, whatever it says."""
        self._silent.pop((name, pid), None)
        return name not in self._hung

    async def process_ended(self, name: str, pid: int, *, died: bool) -> LastState:
        """The process of this worker has ended: it leaves as soon as its last words are read.

        `died`: by a signal, or with an error. Returns what is known of it.
        """
        worker = self._named(name, pid)
        if worker is not None:
            self._part(worker, self._clock())
            self._dispatcher.end_turn()
        await trio.sleep(LAST_WORDS_S)
        self._read_now(worker)
        worker = self._named(name, pid) or worker
        self._silent.pop((name, pid), None)
        if worker is None:
            return LastState()
        state = LastState(busy=bool(worker.running), answered_at=worker.answered_at)
        self._leave(worker, "its process died" if died else "its process ended", self._clock(), died)
        self._dispatcher.end_turn()
        return state

    def unreachable(self, worker: RemoteExecutor, now: float) -> bool:
        """Its connection is gone: whether its end is waited for, since how it ended will be told."""
        if worker.parting_since is None and not self._is_ours(worker):
            return False
        self._part(worker, now)
        return True

    def hangs(self, worker: RemoteExecutor, why: str, now: float) -> bool:
        """It is to be ended: whether it has to be cut off, since nobody here can kill it."""
        if self.owner is not None and self._is_ours(worker):
            self._part(worker, now)
            self.owner.kill(worker.name, worker.pid, why)
            return False
        advice = "it is cut off; end it and start it again"
        log.error("worker hangs", worker=worker.name, pid=worker.pid, why=why, what=advice)
        self._hung[worker.name] = None
        if len(self._hung) > MAX_HUNG:
            del self._hung[next(iter(self._hung))]
        self._leave(worker, "hangs", now, True)
        return True

    def beat(self, now: float, *, read_empty: bool) -> None:
        """Once per heartbeat interval: gives up workers that are silent, or cannot be reached.

        `read_empty`: the port has no unread messages; else a worker that seems silent may be heard in a moment.
        """
        for worker in list(self._workers.values()):
            parting = worker.parting_since if worker.killed_for is None else None
            if parting is not None and now - parting > EXIT_NEWS_S:
                # Its process has not ended either: only the connection broke.
                self._leave(worker, "gone", now, False)
            elif read_empty and now - worker.heard_at > self._silence_s:
                if self._is_ours(worker):
                    self._silent[worker.name, worker.pid] = now
                self._leave(worker, "silent", now, False)
        for (name, pid), since in list(self._silent.items()):
            if self.owner is None or not self.owner.owns(name, pid):
                del self._silent[name, pid]
            elif now - since > SILENCES_TO_KILL * self._silence_s:
                del self._silent[name, pid]
                self.owner.kill(name, pid, f"it was silent for {now - since:.0f} s")

    def _part(self, worker: RemoteExecutor, now: float) -> None:
        """It gets nothing more; what it had is waited for, for a moment."""
        if worker.parting_since is None:
            worker.parting_since = now
            self._dispatcher.executor_closing(worker, now)

    def _is_ours(self, worker: RemoteExecutor) -> bool:
        return self.owner is not None and self.owner.owns(worker.name, worker.pid)

    def _named(self, name: str, pid: int) -> RemoteExecutor | None:
        return next((one for one in self._workers.values() if (one.name, one.pid) == (name, pid)), None)
