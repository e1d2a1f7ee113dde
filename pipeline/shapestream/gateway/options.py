"""Options of gateways: how they reach their server, what they ask of their callers, and the models of texts."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import structlog

from shapestream.gateway.infer_tensors import DEFAULT_PRIORITY_LEVEL
from shapestream.web.ending import Asked, LameDuck
from shapestream.web.tokens import Tokens
from shapestream_engine.layout import value

log = structlog.get_logger()


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


def text_services(
    names: Iterable[str] = (),
    *,
    encoders: Mapping[str, str] = MappingProxyType({}),
    tokenizers: Mapping[str, str] = MappingProxyType({}),
    largest_tokens: Mapping[str, int] = MappingProxyType({}),
    labels: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Mapping[str, TextService]:
    """Return the services by name. By default their models are called as those of a folder are: `NAME.encoder`."""
    return {
        name: TextService(
            name=name,
            encoder=encoders.get(name, f"{name}.encoder"),
            tokenizer=tokenizers.get(name, f"{name}.tokens"),
            largest_token=largest_tokens.get(name),
            labels=tuple(labels.get(name, ())),
        )
        for name in names
    }
