"""Errors that gateways find themselves, before the server is asked. Over HTTP and over gRPC they have a status each."""

from __future__ import annotations

from shapestream.errors import InvalidRequest, ModelError


class UnknownModel(InvalidRequest):
    """No model, or no version of it, has this name."""


class UnknownService(InvalidRequest):
    """A health check asks for a service that is not here."""


class Unsupported(InvalidRequest):
    """The request asks for a part of the protocol that is not served here."""


class UnusableVectors(ModelError):
    """The model gave no vector for each text, or vectors of no numbers: its own fault, and not that of the texts."""


class UnknownCaller(Exception):
    """A request without a known token; the message says why."""


class WrongField(InvalidRequest):
    """A field of the request's body has a wrong value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class EmptyList(WrongField):
    """A list of texts has none."""


class NotGiven(InvalidRequest):
    """The model does not give what the endpoint needs."""
