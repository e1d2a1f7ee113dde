"""An opened model, as the faces use it: what it takes, and the names of what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapestream.client.inputs import InputEncoder
from shapestream.client.tickets import ModelHandle, Owner, RequestTicket
from shapestream.errors import InternalError
from shapestream_engine.errors import EngineError
from shapestream_engine.signature import ModelSignature

__all__ = ["OpenModels", "OpenedModel"]


class OpenedModel:
    """A model's handle with its signature, ready to make requests."""

    def __init__(self, handle: ModelHandle) -> None:
        self.handle = handle
        try:
            self.signature = ModelSignature.from_dict(handle.signature)
            self._encode = InputEncoder(self.signature).encode
        except EngineError as error:
            raise InternalError(
                f"the server's signature of {handle.name!r} cannot be read: {error}"
            ) from error
        self.outputs: Mapping[int, str] = {
            number: port.name for number, port in enumerate(self.signature.outputs)
        }

    def request(
        self,
        owner: Owner,
        inputs: Mapping[str, Any],
        *,
        key: Any = None,
        place: int = 0,
        deadline: float | None = None,
        priority: int = 0,
    ) -> RequestTicket:
        """A ticket for these inputs; raises `InvalidRequest` where the model does not take them."""
        tensors, nbytes = self._encode(inputs)
        return RequestTicket(
            owner,
            key,
            place,
            deadline,
            model=self.handle,
            tensors=tensors,
            nbytes=nbytes,
            priority=priority,
        )


class OpenModels:
    """The models that this client has opened; read by any thread."""

    def __init__(self) -> None:
        self._models: dict[str, OpenedModel] = {}

    def get(self, name: str) -> OpenedModel | None:
        """The model, unless it must be opened (again)."""
        model = self._models.get(name)
        return None if model is None or model.handle.stale else model

    def add(self, handle: ModelHandle) -> OpenedModel:
        """Keep what the server has opened."""
        known = self._models.get(handle.name)
        if known is not None and known.handle is handle:
            return known
        model = self._models[handle.name] = OpenedModel(handle)
        return model
