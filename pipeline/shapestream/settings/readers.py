"""The readers of each key, which decide what a reload does about it: at once, by new processes, or not at all.

`READERS` names every key of a file once, down to the sections that are read as a whole. docs/reliability.md has the table
for people, and a test compares the two, and both with the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from shapestream.settings.model_settings import BatchingSettings, ModelSettings
from shapestream.settings.version_settings import ROUTING


class Reader(StrEnum):
    """The reader of a key; the value is the word of docs/reliability.md for what a reload does."""

    SERVER = "at once"
    """The server's process, which can change it while it runs."""
    WORKER = "new workers"
    """A worker, when it starts; or the server's own process with `in_process`, which loads its models again."""
    GATEWAY = "new gateways"
    START = "stays"
    """The server's process, when it starts."""


_BATCHING: Mapping[str, Reader] = {
    "max_batch": Reader.WORKER,
    "max_delay_ms": Reader.SERVER,
    "max_padding_ratio": Reader.SERVER,
    "max_batch_bytes": Reader.SERVER,
    "batch_invariant": Reader.WORKER,
    "hang_after_s": Reader.SERVER,
}
READERS: Mapping[str, Mapping[str, Reader]] = {
    "models": {
        **dict.fromkeys(ModelSettings.file_keys(), Reader.WORKER),
        **dict.fromkeys((*ROUTING, "audit"), Reader.SERVER),
    },
    "models.batching": _BATCHING,
    "chains": {"chains": Reader.SERVER},
    "workers": dict.fromkeys(
        ("count", "models", "device", "slots", "threads", "memory_limit", "wide"), Reader.WORKER
    ),
    "in_process": {
        **dict.fromkeys(("slots", "threads", "wide"), Reader.WORKER),
        "memory_limit": Reader.START,
    },
    "logging": dict.fromkeys(("level", "format"), Reader.SERVER),
    "server": {
        **dict.fromkeys(
            (
                *("listen", "worker_listen", "max_queued_requests", "max_queued_bytes", "window_requests"),
                *("window_bytes", "max_clients", "heartbeat_s", "client_silence_s", "worker_silence_s"),
                *("model_root", "grace_s", "lame_duck_s", "admin", "tracing"),
            ),
            Reader.START,
        ),
        **dict.fromkeys(("reload_s", "surge"), Reader.SERVER),
    },
    "server.security": {
        **dict.fromkeys(("clients", "admins", "gateways", "workers"), Reader.SERVER),
        "key": Reader.START,
    },
    "server.http": {
        "address": Reader.START,
        **dict.fromkeys(
            ("count", "tls", "max_body", "max_connection_s", "token_file", "texts"), Reader.GATEWAY
        ),
    },
    "server.grpc": {
        "address": Reader.START,
        **dict.fromkeys(("count", "tls", "max_body", "max_connection_s", "token_file"), Reader.GATEWAY),
    },
}


def for_a_process(model: ModelSettings) -> ModelSettings:
    """Return the settings of a model without those that only the server reads."""
    batching = {key: _default(BatchingSettings, key) for key in _of_the_server("models.batching")}
    return model.model_copy(
        update={
            **{key: _default(ModelSettings, key) for key in _of_the_server("models")},
            "batching": model.batching.model_copy(update=batching),
        }
    )


def _of_the_server(section: str) -> list[str]:
    return [key for key, reader in READERS[section].items() if reader is Reader.SERVER]


def _default(section: type[BatchingSettings | ModelSettings], key: str) -> Any:
    return section.model_fields[key].default
