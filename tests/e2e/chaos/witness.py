"""The way to the ledger, for everything that takes part in a chaos run: facts out, questions answered.

Nothing but the standard library: the model that workers serve uses it as well.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

SOCKET_VARIABLE = "CHAOS_LEDGER"
"""The environment variable that holds the path of the ledger's socket."""


class Witness:
    """One connection. A fact is with the kernel when `tell` returns, so it outlives the process that told it."""

    def __init__(self, path: str | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path or os.environ[SOCKET_VARIABLE])
        self._lock = threading.Lock()

    def tell(self, fact: str, **details: Any) -> None:
        """One fact; it is not answered."""
        self._socket.send(json.dumps({"fact": fact, **details}).encode())

    def ask(self, question: str, **details: Any) -> Any:
        """The answer to a question."""
        with self._lock:
            self._socket.send(json.dumps({"ask": question, **details}).encode())
            answer = self._socket.recv(1 << 20)
        if not answer:
            raise RuntimeError("the ledger has ended; its log says why")
        return json.loads(answer)

    def close(self) -> None:
        """Ends this connection."""
        self._socket.close()
