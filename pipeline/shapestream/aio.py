"""shapestream for asyncio: `async with shapestream.aio.connect(address) as client`."""

from __future__ import annotations

from shapestream.client.aio_client import connect
from shapestream.client.async_face import Client, Stream

__all__ = ["Client", "Stream", "connect"]
