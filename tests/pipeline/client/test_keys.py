"""Clients that prove a key, in each face, and what is said where the keys that were given cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.client.real_server import real_server

from shapestream.errors import ConfigurationError, Unavailable
from shapestream.transport.curve import KeyRing, ServerSecurity
from shapestream.transport.curve_keys import new_key_pair, write_key_pair

SERVER, ALICE, STRANGER = (new_key_pair() for _ in range(3))
SECURITY = ServerSecurity(key=SERVER, ring=KeyRing(clients={ALICE.public: "alice"}))


@pytest.fixture
def protected(face: Any) -> Iterator[Any]:
    """A face, and the address of a server that asks for keys."""
    with real_server("tcp://127.0.0.1:*", keys=SECURITY) as face.address:
        yield face


async def test_every_face_proves_its_key(protected: Any, tmp_path: Path) -> None:
    """A listed key is let in; another one is told that it is refused."""
    secret, _ = write_key_pair(tmp_path, "alice", ALICE)
    strange, _ = write_key_pair(tmp_path, "stranger", STRANGER)
    _, public = write_key_pair(tmp_path, "server", SERVER)
    async with protected.connect(key=str(secret), server_key=SERVER.public) as client:
        assert "forbidden" in await client.statistics()
    with pytest.raises(Unavailable, match="it refuses this key"):
        async with protected.connect(connect_timeout=6, key=strange, server_key=public):
            pytest.fail("connected with a key that is not listed")


async def test_keys_that_cannot_be_used(face: Any, tmp_path: Path) -> None:
    """Each is said before a connection is tried: half of a pair, a key over ipc, a file that is none."""
    secret, public = write_key_pair(tmp_path, "alice", ALICE)
    tcp, given = "tcp://127.0.0.1:1", {"key": secret, "server_key": public}
    for face.address, keys, words in (
        (tcp, {"key": secret}, "server_key is missing"),
        (tcp, {"server_key": public}, "^key is missing"),
        (f"ipc://{tmp_path}/s", given, "keys are for tcp"),
        (tcp, {**given, "key": tmp_path / "none"}, "shapestream keys new"),
        (tcp, {**given, "key": public}, "holds no secret key|lets others"),
        (tcp, {**given, "server_key": "too short"}, "No such file"),
        (tcp, {**given, "server_key": secret}, "holds a secret key"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            async with face.connect(**keys):
                pytest.fail("connected with keys that cannot be used")
