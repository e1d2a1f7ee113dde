"""`shapestream reload`: ask a server to read its configuration again, wait for the end, and print the result.

It asks the admin port; `reloads.py` is the server's side. SIGHUP requests the same, without an answer.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapestream.addresses import reached_from_here
from shapestream.errors import ConfigurationError, ShapestreamError
from shapestream.secret_files import read_secret
from shapestream.settings import load_settings
from shapestream.settings.values import spell_bytes

POLL_S = 0.2
"""Seconds between two questions for the result: a person does not notice them, and they cost a server nothing."""
ANSWER_S = 5.0
"""Seconds for one answer; the admin port itself gives up its main event loop after 0.8 s."""
MOST_TOKEN_BYTES = 65536
"""Largest file of one token: a header that is longer is refused."""

_ADDRESS = re.compile(r"(?P<host>\[[^]]+\]|[^:/\s]+):(?P<port>[0-9]{1,5})")


class NoAdminPort(Exception):
    """A configuration names no admin port that can be asked."""


class Refused(ConfigurationError):
    """The configuration cannot be used, so the server was not asked."""


class ReloadFailed(ShapestreamError):
    """The server cannot be asked, or has ended before its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAddress:
    """An admin port and its token."""

    host: str
    port: int
    token: str | None


def admin_port_of(target: str, token_file: Path | None) -> AdminAddress:
    """Return the admin port at HOST:PORT, or that of a YAML.

    Raises `Refused` for a YAML that cannot be used, NoAdminPort where it names none, `ConfigurationError` for a token
    that cannot be read.
    """
    address = _ADDRESS.fullmatch(target)
    if address is None:
        try:
            loaded = load_settings(target)
        except ConfigurationError as error:
            raise Refused(error.problems) from error
        admin = loaded.settings.server.admin
        if admin is None:
            raise NoAdminPort(f"{target} has no server.admin (add it, or send the server SIGHUP)")
        token_file = token_file or (None if admin.token_file is None else Path(admin.token_file))
        reached = reached_from_here(f"tcp://{admin.address}").removeprefix("tcp://")
        address = _ADDRESS.fullmatch(reached)
        if address is None or address["port"] == "0":
            raise NoAdminPort(
                f"the server of {target} chooses its admin port when it starts (name the HOST:PORT in its log)"
            )
    return AdminAddress(
        host=address["host"].strip("[]"),
        port=int(address["port"]),
        token=None if token_file is None else _token_in(token_file),
    )


def _token_in(file: Path) -> str:
    data = read_secret(file, MOST_TOKEN_BYTES, holds="a token").strip()
    if not data.isascii():
        raise ConfigurationError([f"{file}: is not ASCII"])
    return data.decode()


def reload_server(admin: AdminAddress, what: str, *, timeout_s: float) -> dict[str, Any]:
    """Request a reload, wait for its end, and return it as the server reports it.

    `what`: which processes it replaces (`ReloadRequest`). `timeout_s`: seconds to wait for a server that does not answer.
    Raises ReloadFailed.
    """
    started = _ask(admin, "PUT", "/reload", timeout_s, json.dumps({"what": what}).encode())
    while not started["ended"]:
        time.sleep(POLL_S)
        started = _ask(admin, "GET", f"/reload?number={started['number']}", timeout_s)
    return started


def _ask(
    admin: AdminAddress, method: str, path: str, timeout_s: float, body: bytes | None = None
) -> dict[str, Any]:
    """Return the JSON of a good answer; a server whose event loop is busy is asked again."""
    give_up_at = time.monotonic() + timeout_s
    headers = {"Content-Type": "application/json"}
    if admin.token is not None:
        headers["Authorization"] = f"Bearer {admin.token}"
    where = f"http://{f'[{admin.host}]' if ':' in admin.host else admin.host}:{admin.port}"
    while True:
        connection = http.client.HTTPConnection(admin.host, admin.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            # A second reload does no harm, so the request is repeated if the answer was lost.
            status, why = 503, f"no admin port of a server answers at {where}: {error}"
        else:
            try:
                told: dict[str, Any] = json.loads(text)
                why = f"{where} says: {told.get('error', status)}"
            except (ValueError, AttributeError):
                raise ReloadFailed(
                    f"{where} is no admin port: it answers {status} (name the server's admin port)"
                ) from None
            if status == 200 and "ended" in told:
                return told
        finally:
            connection.close()
        if (status == 404 and method == "PUT") or status == 405:
            why = f"{where} has no reloads: its server is of an earlier release, or it is a worker's port"
        if status == 401:
            why += " (add --token-file FILE)"
        if status != 503 or time.monotonic() > give_up_at:
            raise ReloadFailed(why)
        time.sleep(POLL_S)


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for people."""
    if found["state"] == "refused":
        yield from found["why"]
        yield from _needs_lines(found.get("needs"))  # none where the command has read the file
        yield "refused: the server goes on unchanged"
        return
    models = found["models"]
    for word in ("added", "removed"):
        if models[word]:
            yield f"models {word}: {', '.join(models[word])}"
    for name, keys in models["changed"].items():
        yield f"model changed: {name} ({', '.join(keys)})"
    if not any(models.values()):
        yield "no model changed"
    is_plan = found["what"] == "nothing"
    for kind in ("worker", "gateway"):
        yield from _process_lines(kind, found[f"{kind}s"], is_plan=is_plan)
    if found["need_restart"]:
        yield f"changed only by a restart of the server: {', '.join(found['need_restart'])}"
    yield from found["why"]
    if is_plan:
        yield from _needs_lines(found["needs"])
        yield "nothing was changed"
        return
    done = "done" if found["state"] == "ok" else "not done everywhere"
    yield f"{done} after {found['seconds']:.1f} s"


def _needs_lines(needs: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the line that tells the time and the memory of a reload that was not carried out."""
    if needs is not None:
        memory, free = spell_bytes(needs["memory_bytes"]), spell_bytes(needs["free_bytes"])
        yield f"it would take about {needs['seconds']:.0f} s, and {memory} of memory in addition meanwhile; {free} are free"


def _process_lines(kind: str, processes: Mapping[str, Any], *, is_plan: bool) -> Iterator[str]:
    """Yield a line for the processes of a kind that were replaced, or would be, and for each that was to be."""
    for state, done in (
        ("added", "added"),
        ("replaced", "replaced"),
        ("removed", "removed"),
        ("unchanged", "left alone"),
    ):
        if processes[state]:
            words = f"would be {done}" if is_plan else done
            yield f"{kind}s {words}: {', '.join(processes[state])}"
    for state, words in (
        ("kept", "goes on unchanged"),
        ("given_up", "is given up"),
        ("starting", "is not replaced yet"),
    ):
        for name, why in processes[state].items():
            yield f"{kind} {name} {words}: {why}"
