"""Whose client ids are whose. Pure.

A client's id is sixteen bytes of its own choice; the session, its unfinished requests and the kept replies hang on it. Where
peers prove a key, an id belongs to the key that first used it. Another key that presents it is refused; and should this
table have forgotten it by then, it is still another id to the server, since the key is part of what it is kept under.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

__all__ = ["ClientOwners"]

# The largest number of sessions that a server may be allowed; the ids that were not heard for longest are forgotten.
MAX_OWNED = 65_536


class ClientOwners:
    """The key that first used each client id."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, str | None] = OrderedDict()

    def claim(self, client: bytes, key: str | None) -> bytes | None:
        """What the server keeps this client under; None when its id belongs to another key.

        `key` is what the peer has proved to own: None over an address that asks for none, where the id is kept as it is.
        """
        if self._keys.setdefault(client, key) != key:
            return None
        self._keys.move_to_end(client)
        if len(self._keys) > MAX_OWNED:
            self._keys.popitem(last=False)
        return client if key is None else blake2b(client, digest_size=16, key=key.encode()).digest()
