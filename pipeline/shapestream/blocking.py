"""shapestream without async code: `with shapestream.blocking.connect(address) as client`."""

from __future__ import annotations

from shapestream.client.blocking_client import Client, Stream, connect

__all__ = ["Client", "Stream", "connect"]
