"""The states of a connected worker's session, and the table of their changes.

`CONNECTED_WORKER_TABLE` says by the name of a change which state follows which. A change that it does not list raises
KeyError. `ConnectedWorker.change` alone writes a state; docs/reliability.md#states-of-a-connected-worker draws the table.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class WorkerState(Enum):
    """The progress of a worker's session. It gets batches while it serves, and in no other state."""

    GREETING = "greeting"
    """The worker has greeted, and not all of its slots have."""
    SERVING = "serving"
    DRAINING = "draining"
    """The worker asked to leave. It is dismissed when it has answered its batches."""
    LEAVING = "leaving"
    """The worker said goodbye, and reports of it may be unread on its slots' connections."""
    UNREACHABLE = "unreachable"
    """Its connection broke, or its process ended. The last reports are read before it leaves."""
    CONDEMNED = "condemned"
    """One of its slots hangs. Its process is killed, or it is cut off where another host runs it."""
    GONE = "gone"


CONNECTED_WORKER_TABLE: Final[dict[str, dict[WorkerState, WorkerState]]] = {
    "serve": {WorkerState.GREETING: WorkerState.SERVING},
    "drain": {
        WorkerState.GREETING: WorkerState.DRAINING,
        WorkerState.SERVING: WorkerState.DRAINING,
        WorkerState.DRAINING: WorkerState.DRAINING,
        WorkerState.LEAVING: WorkerState.LEAVING,
        WorkerState.UNREACHABLE: WorkerState.UNREACHABLE,
        WorkerState.CONDEMNED: WorkerState.CONDEMNED,
    },
    "say goodbye": {
        WorkerState.GREETING: WorkerState.LEAVING,
        WorkerState.SERVING: WorkerState.LEAVING,
        WorkerState.DRAINING: WorkerState.LEAVING,
        WorkerState.LEAVING: WorkerState.LEAVING,
        WorkerState.UNREACHABLE: WorkerState.LEAVING,
        WorkerState.CONDEMNED: WorkerState.CONDEMNED,
    },
    "lose touch": {
        WorkerState.GREETING: WorkerState.UNREACHABLE,
        WorkerState.SERVING: WorkerState.UNREACHABLE,
        WorkerState.DRAINING: WorkerState.UNREACHABLE,
        WorkerState.LEAVING: WorkerState.LEAVING,
        WorkerState.UNREACHABLE: WorkerState.UNREACHABLE,
        WorkerState.CONDEMNED: WorkerState.CONDEMNED,
    },
    "condemn": {
        WorkerState.SERVING: WorkerState.CONDEMNED,
        WorkerState.DRAINING: WorkerState.CONDEMNED,
        WorkerState.LEAVING: WorkerState.CONDEMNED,
        WorkerState.UNREACHABLE: WorkerState.CONDEMNED,
        WorkerState.CONDEMNED: WorkerState.CONDEMNED,
    },
    "end": {
        WorkerState.GREETING: WorkerState.GONE,
        WorkerState.SERVING: WorkerState.GONE,
        WorkerState.DRAINING: WorkerState.GONE,
        WorkerState.LEAVING: WorkerState.GONE,
        WorkerState.UNREACHABLE: WorkerState.GONE,
        WorkerState.CONDEMNED: WorkerState.GONE,
    },
}
