"""The sections `server.http` and `server.grpc` of the YAML: gateways for clients of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from shapestream.settings.values import Bytes, FilePath, Section, TokenPort, read_list
from shapestream.settings.yaml_source import Location


class TlsSettings(Section):
    """Files in PEM for TLS."""

    certificate: FilePath
    """The certificate, and those that it was signed with."""
    key: FilePath
    """The certificate's secret key."""


class GatewaySettings(TokenPort):
    """Settings that gateways of both kinds have; their `token_file` has a line `NAME TOKEN` for each caller."""

    processes: int = Field(default=1, ge=1, le=64)
    """Gateway processes, which share the address."""
    tls: TlsSettings | None = None
    """Files for TLS. Default: none is spoken."""
    max_body: Bytes = 64 << 20
    """Bytes of one request's body or message, at most, after it is decompressed."""


class HttpSettings(GatewaySettings):
    """HTTP for clients of the Open Inference Protocol (docs/http.md). HOST:PORT is short for {address}."""

    max_connection_s: float = Field(default=300.0, gt=0, le=86400, allow_inf_nan=False)
    """Age in seconds, a tenth more or less, from which a connection ends with its next answer."""
    openai: Annotated[tuple[str, ...], BeforeValidator(read_list, json_schema_input_type=str | list[str])] = (
        Field(default=(), strict=False)
    )
    """Names of the models and chains that embed texts, at OpenAI's /v1/embeddings. Default: none."""
    tei: str | None = None
    """Name of the model or chain behind the endpoints of text-embeddings-inference: /embed and more. Default: none."""

    def services(self) -> Iterator[tuple[Location, str]]:
        """Yield the models and chains that endpoints for texts name, each with its place."""
        for index, name in enumerate(self.openai):
            yield ("openai", index), name
        if self.tei is not None:
            yield ("tei",), self.tei


class GrpcSettings(GatewaySettings):
    """gRPC for clients of the Open Inference Protocol (docs/grpc.md). HOST:PORT is short for {address}."""
