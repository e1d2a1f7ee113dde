"""The sections `server.http` and `server.grpc` of the YAML: gateways for clients of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from shapestream.settings.values import TEXT, Bytes, Section, check_host_and_port, open_to_others, read_path
from shapestream.settings.yaml_source import Location
from shapestream.wire.limits import MAX_PRIORITY

FilePath = Annotated[str, BeforeValidator(partial(read_path, expected="a file"))]


class TlsSettings(Section):
    """Files in PEM for TLS."""

    certificate: FilePath
    """The certificate, and those that it was signed with."""
    key: FilePath
    """The certificate's secret key."""


class GatewaySettings(Section):
    """Settings that gateways of both kinds have."""

    address: Annotated[
        str,
        BeforeValidator(partial(check_host_and_port, example="127.0.0.1:8000")),
        WithJsonSchema(TEXT),
    ]
    """HOST:PORT; beyond loopback with `token_file`, or with `security: network`."""
    processes: int = Field(default=1, ge=1, le=64)
    """Gateway processes, which share the address."""
    token_file: FilePath | None = None
    """File of the callers: a line `NAME TOKEN` for each. Without it, callers are told apart by their addresses."""
    tls: TlsSettings | None = None
    """Files for TLS. Default: none is spoken."""
    default_priority_level: int = Field(default=1, ge=1, le=MAX_PRIORITY)
    """Triton's level of a request without a priority. Level p, where 1 is highest, is our priority D - p."""

    def is_open(self, *, network_is_safe: bool) -> str | None:
        """Return the problem of an address that other machines reach and that asks for no token, or None."""
        return None if network_is_safe or self.token_file is not None else open_to_others(self.address)


def _read_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class OpenAiSettings(Section):
    """What is served to clients of OpenAI's API (docs/http.md)."""

    embeddings: Annotated[
        tuple[str, ...],
        BeforeValidator(_read_names, json_schema_input_type=str | list[str]),
    ] = Field(strict=False, min_length=1)
    """Names of the models and chains that embed texts, at /v1/embeddings."""


class HttpSettings(GatewaySettings):
    """HTTP for clients of the Open Inference Protocol (docs/http.md). HOST:PORT is short for {address}."""

    max_body: Bytes = 64 << 20
    """Bytes of one request's body, at most, after it is decompressed."""
    max_connection_s: float = Field(default=300.0, gt=0, le=86400, allow_inf_nan=False)
    """Age in seconds, a tenth more or less, from which a connection ends with its next answer."""
    openai: OpenAiSettings | None = None
    """Endpoints of OpenAI's API. Default: none."""
    tei: str | None = None
    """Name of the model or chain behind the endpoints of text-embeddings-inference: /embed and more. Default: none."""

    def services(self) -> Iterator[tuple[Location, str]]:
        """Yield the models and chains that endpoints for texts name, each with its place."""
        if self.openai is not None:
            for index, name in enumerate(self.openai.embeddings):
                yield ("openai", "embeddings", index), name
        if self.tei is not None:
            yield ("tei",), self.tei


class GrpcSettings(GatewaySettings):
    """gRPC for clients of the Open Inference Protocol (docs/grpc.md). HOST:PORT is short for {address}."""

    max_message: Bytes = 64 << 20
    """Bytes of one message, at most, after it is decompressed."""
    max_calls: int = Field(default=128, ge=1, le=4096)
    """Calls and streams of one process at a time, at most. Each has a thread."""


def read_gateway(value: Any) -> Any:
    """Read a mapping, or HOST:PORT as short for {address}."""
    return value if value is None or isinstance(value, dict | GatewaySettings) else {"address": value}
