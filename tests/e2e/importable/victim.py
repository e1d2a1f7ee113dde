"""A process whose event loop is blocked on demand, for the tests of broken connections.

`python victim.py server FOLDER [KEYS]`, `python victim.py client|worker ADDRESS [KEYS]`: KEYS is a JSON object of Z85 keys.
On stdin: `block` blocks the event loop until the next line, `end` ends the process with status 0. stdout says what it does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

import shapestream
from shapestream.serving.server import serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ServerSettings
from shapestream.telemetry.logging import configure
from shapestream.transport.curve import KeyRing, ServerSecurity
from shapestream.transport.curve_keys import CallerKeys, KeyPair
from shapestream.transport.interface import Connection, Wake
from shapestream.transport.zeromq import BlockingDealer, DealerSocket, SocketOptions
from shapestream_workers.worker import Worker


def say(**what: Any) -> None:
    """One line to the test."""
    print(json.dumps(what), flush=True)


async def obey(run: Callable[[], Awaitable[None]]) -> None:
    """Runs the process's own task beside what the test asks for."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        while True:
            asked = (await trio.to_thread.run_sync(sys.stdin.readline)).strip()
            if asked != "block":
                break
            say(state="blocked")
            sys.stdin.readline()  # on the event loop's own thread
            say(state="free")
        nursery.cancel_scope.cancel()


def pair(keys: dict[str, str], whose: str) -> KeyPair:
    """The key pair of one party."""
    return KeyPair(public=keys[f"{whose}_public"], secret=keys[f"{whose}_secret"])


async def run_server(folder: str, keys: dict[str, str] | None) -> None:
    """Serves no model, at tcp and ipc (plain) or at tcp (with keys), for clients and workers."""
    security = None
    if keys is not None:
        peer = keys["peer_public"]
        ring = KeyRing(clients={peer: "peer"}, workers={peer: "peer"})
        security = ServerSecurity(key=pair(keys, "server"), ring=ring)
    settings = ServerSettings(
        listen=("tcp://127.0.0.1:*", f"ipc://{folder}/c"),
        worker_listen="tcp://127.0.0.1:*",
        client_silence_s=600.0,
        worker_silence_s=600.0,
    )
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve, settings, keys=security, own_workers=f"ipc://{folder}/w"))
        say(clients=server.addresses, workers=server.worker_addresses)


async def run_client(address: str, keys: dict[str, str] | None) -> None:
    """Connects for as long as it takes."""
    options: dict[str, Any] = {}
    if keys is not None:
        options = {"key": keys["peer_file"], "server_key": keys["server_file"]}
    async with shapestream.connect(address, connect_timeout=3600, **options):
        await trio.sleep_forever()


async def run_worker(address: str, keys: dict[str, str] | None) -> None:
    """Dials in with one slot and no model."""

    options = SocketOptions(immediate=True)
    own = None if keys is None else CallerKeys(key=pair(keys, "peer"), server_key=keys["server_public"])

    def connect() -> Connection:
        connection = DealerSocket(keys=own, options=options)
        connection.connect(address)
        return connection

    def dial(wake: Wake) -> BlockingDealer:
        return BlockingDealer(address, wake, keys=own, options=options)

    await Worker("victim", SlotThreads(models={}, slots=1, dial=dial), connect).run()


if __name__ == "__main__":
    role, place = sys.argv[1:3]
    given = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else None
    configure("info", "json")
    trio.run(
        obey, partial({"server": run_server, "client": run_client, "worker": run_worker}[role], place, given)
    )
