"""The answer of `shapestream models`: the models and chains of a running server, or of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shapestream.loading.models import plan_chains, read_signatures
from shapestream.loading.proof import why_alone
from shapestream.loading.sources import digests_of
from shapestream.settings import LoadedSettings
from shapestream.versions import spell_share
from shapestream_engine.signature import ModelSignature
from shapestream_workers.chains import describe_chain
from shapestream_workers.target import ServerAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """Models and chains, for a person and for a script."""

    lines: tuple[str, ...]
    plain: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]


def list_of_server(access: ServerAccess) -> ModelList:
    """List what a server offers. It tells clients the inputs and outputs of a chain, not its stages."""
    with access.connect() as client:
        told = client.statistics()
        unavailable: Mapping[str, str] = told["unavailable"]
        bare = told.get("versions", {})  # each version is there, too
        signatures = [
            client.signature(name) for name in told["models"] if name not in unavailable and name not in bare
        ]
    # Older servers tell neither chains nor digests.
    chains, digests = frozenset(told.get("chains", ())), told.get("digests", {})
    lines: list[str] = []
    plain: list[Mapping[str, Any]] = []
    for signature in signatures:
        is_chain, digest = signature.name in chains, digests.get(signature.name)
        lines += describe_chain(signature) if is_chain else _model_lines(signature, digest)
        plain.append({**signature.to_dict(), "digest": digest, "is_chain": is_chain})
    plain += [{"name": name, "unavailable": why} for name, why in unavailable.items()]
    lines += _share_lines(told.get("versions", {}))
    models = [signature for signature in signatures if signature.name not in chains]
    return ModelList(
        lines=(*lines, *unavailable.values()), plain=tuple(plain), warnings=tuple(why_alone(models))
    )


def list_of_configuration(loaded: LoadedSettings) -> ModelList:
    """List the models and chains of a configuration. Raises `ConfigurationError` if one cannot be served."""
    read = read_signatures(loaded)
    chains = plan_chains(loaded, {signature.name: signature for signature in read.signatures})
    digests = digests_of(loaded.settings.models)
    lines: list[str] = []
    for signature in read.signatures:
        lines += _model_lines(signature, digests.get(signature.name))
    for chain in chains:
        lines += chain.lines()
    lines += _share_lines({name: versions.told() for name, versions in loaded.settings.versions.items()})
    models = [
        {**signature.to_dict(), "digest": digests.get(signature.name), "is_chain": False}
        for signature in read.signatures
    ]
    of_chains = [{**chain.signature.to_dict(), "digest": None, "is_chain": True} for chain in chains]
    return ModelList(lines=tuple(lines), plain=(*models, *of_chains), warnings=read.warnings)


def _share_lines(versions: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for name, shares in versions.items():
        yield f"versions of {name}: " + ", ".join(
            f"{one} {spell_share(share)}" for one, share in shares.items()
        )


def _model_lines(signature: ModelSignature, digest: str | None) -> Iterator[str]:
    yield from signature.describe()
    if digest is not None:
        yield f"  sha256 {digest}"
