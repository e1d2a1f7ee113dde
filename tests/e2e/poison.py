"""A server with a model that some inputs crash, or keep from ever ending (`importable/poisonous.py`)."""

from __future__ import annotations

import signal

from tests.e2e.importable.poisonous import CRASH, EXIT, HANG

GRACE_S = 0.5
"""The server's `hang_grace_s`: seconds until the worker of a hanging batch is killed."""
ENDS = {CRASH: -signal.SIGSEGV, EXIT: 7, HANG: -signal.SIGKILL}
"""By the number that does it, the status that the worker ends with."""


def poisonous(*, slots: int, hang_after_s: str, server: str = "") -> str:
    """The YAML: two worker processes with so many slots each, and more settings of the server."""
    return f"""\
    server: {{listen: [ipc://s.sock]{server}}}
    models:
      - name: poisonous
        function: poisonous:double
        inputs: {{x: {{shape: "batch:1..8, n:1..64", element_type: f32}}}}
        outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
        batching: {{max_batch: 8, hang_after_s: {hang_after_s}}}
        trust: true
        calibration_s: 0
    workers: [{{count: 2, slots: {slots}, threads: {slots}}}]
"""
