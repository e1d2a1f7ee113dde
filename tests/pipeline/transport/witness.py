"""A context of libzmq's that shows the sockets which the product makes, and what waits in a router's outboxes."""

from __future__ import annotations

from typing import Any

import zmq

from shapestream.transport.router import Outbox, OutboxRoom


class Witness(zmq.Context[Any]):
    """Makes sockets in another context, and remembers them in `made`, in their order."""

    made: list[zmq.Socket[Any]]

    def __init__(
        self, of: zmq.Context[Any] | None = None, *, kind: type[zmq.Socket[Any]] = zmq.Socket
    ) -> None:
        """Without a context, that of the process is used; `kind` is the class of the sockets."""
        super().__init__(of or zmq.Context.instance())
        # By its own __setattr__ each name is an option of libzmq's.
        self.__dict__["made"] = []
        self.__dict__["kind"] = kind

    def socket(self, socket_type: int, **options: Any) -> zmq.Socket[Any]:  # type: ignore[override]
        """Make a socket, and remember it."""
        made = super().socket(socket_type, self.__dict__["kind"], **options)
        self.made.append(made)
        return made


class WitnessedRoom(OutboxRoom):
    """Room for outboxes that tells how many bytes wait in all of them."""

    nbytes = 0

    def take(self, outbox: Outbox, nbytes: int) -> None:
        """Count them in."""
        self.nbytes += nbytes
        super().take(outbox, nbytes)

    def give_back(self, outbox: Outbox, nbytes: int) -> None:
        """Count them out."""
        self.nbytes -= nbytes
        super().give_back(outbox, nbytes)
