"""What settings of the server cannot be judged by alone: times that belong together, and who is let in where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.settings_raw import Finding, is_number, mapping, sequence
from shapestream.yaml_source import Location

__all__ = ["server_findings"]


def server_findings(server: Mapping[str, Any], models: Sequence[Any]) -> Iterator[Finding]:
    """What the server's settings disagree about, among themselves and with the models'."""
    beat = server.get("heartbeat_s", 1.0)
    for key, default in (("client_silence_s", 10.0), ("worker_silence_s", 3.0)):
        silence = server.get(key, default)
        if is_number(beat) and is_number(silence) and silence < 2 * beat:
            where = ("server", key if key in server else "heartbeat_s")
            yield where, f"{key} ({silence}) must be at least twice heartbeat_s ({beat})"
    yield from _security(server)
    yield from _hangs(server, models)


def _hangs(server: Mapping[str, Any], models: Sequence[Any]) -> Iterator[Finding]:
    """Where a network may break, a silent worker must count as lost before what it runs counts as hanging."""
    if server.get("worker_listen") is None:
        return
    beat, silence = server.get("heartbeat_s", 1.0), server.get("worker_silence_s", 3.0)
    if not (is_number(beat) and is_number(silence)):
        return
    limits: list[tuple[Location, Any]] = [
        (
            ("models", index, "batching", "hang_after_s"),
            mapping(mapping(model).get("batching")).get("hang_after_s"),
        )
        for index, model in enumerate(models)
    ]
    limits.append((("server", "hang_min_s"), server.get("hang_min_s")))
    for where, limit in limits:
        if is_number(limit) and limit < silence + beat:
            yield (
                where,
                (
                    f"a batch hangs after {limit:g} s, which must not be less than worker_silence_s + heartbeat_s "
                    f"({silence + beat:g}) where workers dial in: else a broken connection passes for a request that hangs"
                ),
            )


def _security(server: Mapping[str, Any]) -> Iterator[Finding]:
    """An address that other machines reach needs keys, or a word that the network is safe."""
    security = server.get("security")
    listens = [
        (("server", "listen", index), address) for index, address in enumerate(sequence(server.get("listen")))
    ]
    dials_in = server.get("worker_listen")
    if security is None:
        for where, address in [*listens, (("server", "worker_listen"), dials_in)]:
            if isinstance(address, str) and is_beyond_loopback(address):
                yield where, f'"{address}" is open to other machines ({_HOW_TO_BE_SAFE})'
        return
    keys, where = mapping(security), ("server", "security")
    if not isinstance(security, dict):
        return
    if (mode := keys.get("mode", "keys")) != "keys":
        for role in ("key", "clients", "admins", "workers"):
            if mode == "network" and keys.get(role) is not None:
                yield (*where, role), 'the mode "network" asks nobody for a key (remove one of them)'
        return
    if keys.get("key") is None:
        yield where, 'missing "key" (the server\'s secret key: shapestream keys new server)'
    protected = [address for _, address in listens if isinstance(address, str) and is_protectable(address)]
    if protected and not keys.get("clients") and not keys.get("admins"):
        yield where, f'nobody could use "{protected[0]}" (list public keys in clients, or in admins)'
    if isinstance(dials_in, str) and is_protectable(dials_in) and not keys.get("workers"):
        yield where, f'no worker could use "{dials_in}" (list public keys in workers)'


_HOW_TO_BE_SAFE = (
    "add security: {key: ..., clients: ...} as docs/security.md shows, or security: network where the network itself "
    "keeps strangers away, or listen on tcp://127.0.0.1:PORT or ipc://PATH"
)
