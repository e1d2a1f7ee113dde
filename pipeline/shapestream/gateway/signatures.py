"""A model's signature, with the errors of a gateway."""

from __future__ import annotations

from shapestream.client.async_face import Client
from shapestream.errors import InvalidRequest
from shapestream.gateway.gateway_errors import UnknownModel
from shapestream_engine.signature import ModelSignature


async def signature_of(client: Client, model: str, deadline_s: float | None = None) -> ModelSignature:
    """Return a model's signature. Raises `UnknownModel` where the server has none of this name."""
    try:
        return await client.signature(model, deadline=deadline_s)
    except InvalidRequest as error:
        raise UnknownModel(error.message) from error
    except ValueError as error:  # a name that the server cannot be asked for
        raise UnknownModel(str(error)) from error
