"""Options of gateways: how they reach their server, what they ask of their callers, and the models of texts."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, replace

from shapestream.gateway.infer_tensors import DEFAULT_PRIORITY_LEVEL
from shapestream.telemetry.logging import get_logger
from shapestream.versions import versioned
from shapestream.web.ending import Asked, LameDuck
from shapestream.web.tokens import Tokens
from shapestream_engine.layout import value

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingOptions:
    """How a gateway reaches its server, and what it asks of its callers."""

    server: str
    """The server's address, `tcp://…` or `ipc://…`."""
    key: str | None = None
    server_key: str | None = None
    tokens: Tokens | None = None
    default_priority_level: int = DEFAULT_PRIORITY_LEVEL
    connect_timeout_s: float = 60.0
    """Seconds that the server may take to answer at first."""
    unavailable_after_s: float = 10.0
    """Seconds without a server, or with one that takes nothing new, after which requests are refused as unavailable."""
    lame_duck_s: float = 0.0
    """Seconds from SIGTERM for which requests are still taken, while peers are told to go elsewhere."""
    is_told: bool = False
    """The server's process tells when to leave (LEAVE), and then when to stop. SIGTERM alone is a replacement."""
    max_connection_s: float = 300.0
    """Age of a connection, a tenth more or less, from which it ends with its next answer. A new server gets its part of
    long-lived connections within minutes, and a connection is made anew once in thousands of requests."""
    grace_s: float = 25.0
    """Seconds that requests have from SIGTERM on. Those without an answer then are refused as unavailable."""

    def lame_duck(self, now: float) -> LameDuck:
        """Return the lame duck that begins now."""
        return LameDuck(began=now, seconds=self.lame_duck_s, ends_by_itself=not self.is_told)


def log_end(asked: Asked, number: int) -> None:
    """Write a line about a signal that ends this gateway."""
    name = signal.Signals(number).name
    if asked is Asked.LEAVE:
        log.info("gateway leaves", signal=name)
    else:
        log.info("gateway stops", signal=name)


def log_left() -> None:
    """Write a line about the end of the lame duck, after which no signal comes."""
    log.info("gateway stops", why="the lame duck is over")


@value
class TextService:
    """A model or chain of texts, and the models that it is made of, for callers that ask for a part of its work."""

    name: str
    encoder: str
    """The model that embeds tokens."""
    tokenizer: str
    """The model that makes them."""
    largest_token: int | None = None
    """The largest number of a token that the encoder knows; None: it is not known."""
    labels: tuple[str, ...] = ()
    """The names of the scores of a model that scores texts; empty: they are not known."""


def of_version(service: TextService, version: str) -> TextService:
    """Return the service of one version of a chain, or of one of its model."""
    return replace(
        service,
        name=versioned(service.name, version),
        encoder=versioned(service.encoder, version),
        tokenizer=versioned(service.tokenizer, version),
    )


TEXTS = (
    'NAME, or NAME={"encoder": MODEL, "tokenizer": MODEL, "largest_token": NUMBER, "labels": [LABEL, ...]}'
)
"""The texts that `text_service` reads; each part may be left out."""


def text_service(text: str) -> TextService:
    """Read the name of a service, and what is known of its models. Raises `ValueError`.

    By default its models are called as those of a folder are: `NAME.encoder`, `NAME.tokens`.
    """
    name, equals, told = text.partition("=")
    parts = json.loads(told) if equals else {}
    if isinstance(parts, dict):
        by_default = {"encoder": f"{name}.encoder", "tokenizer": f"{name}.tokens", "largest_token": None}
        parts = {**by_default, "labels": [], **parts}
    match parts:
        case {
            "encoder": str(encoder),
            "tokenizer": str(tokenizer),
            "largest_token": int() | None as largest,
            "labels": [*labels],
            **others,
        } if name and not others and all(isinstance(label, str) for label in labels):
            return TextService(
                name=name,
                encoder=encoder,
                tokenizer=tokenizer,
                largest_token=largest,
                labels=tuple(labels),
            )
    raise ValueError(f"expected {TEXTS}, not {text!r}")
