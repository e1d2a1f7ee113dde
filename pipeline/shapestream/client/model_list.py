"""The list of a server's models, as `client.models()` tells it: names, versions, shares, readiness and signatures.

It is read from the server's counters, which every key may ask for, and from the signatures of models that can be asked for
now. Servers that are used side by side (`spread`) have one list: what any of them has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shapestream.versions import ONLY, WHOLE, parted, versioned
from shapestream_engine.signature import ModelSignature


class ListedModel(NamedTuple):
    """A version of a model, or a chain."""

    name: str
    """The name that clients ask for."""
    version: str
    """"1" where the model states none."""
    share: float
    """Share of the requests that name no version, from 0 to 1, as the configuration has it."""
    not_ready: tuple[str, ...]
    """The reasons why it should get no requests now; empty: it is ready."""
    digest: str | None
    """The sha256 of its files, in hexadecimal; None for a function or a chain, and where no worker has named it."""
    is_chain: bool
    signature: ModelSignature | None
    """Its inputs and outputs; None where no worker has brought it, or its workers were given up."""

    @property
    def is_ready(self) -> bool:
        """Tell whether it can be asked now."""
        return not self.not_ready


def listed(told: Mapping[str, Any]) -> list[ListedModel]:
    """Return the models that a server tells of, without their signatures. `told`: its counters, or those of several."""
    found: dict[tuple[str, str], ListedModel] = {}
    for counters in told["servers"].values() if "servers" in told else (told,):
        for model in _rows(counters):
            known = found.get((model.name, model.version))
            if known is None or (model.is_ready and not known.is_ready):
                found[model.name, model.version] = model
    return list(found.values())


def _rows(counters: Mapping[str, Any]) -> Iterator[ListedModel]:
    # Older servers tell no versions, chains or digests.
    versions: Mapping[str, Mapping[str, int]] = counters.get("versions", {})
    not_ready: Mapping[str, Any] = counters.get("models_not_ready", {})
    chains, digests = counters.get("chains", ()), counters.get("digests", {})
    for name in counters.get("models", ()):
        if name in versions:
            continue  # each of its versions is there, too
        base, version = parted(name)
        share = versions.get(base, {}).get(version or ONLY, 0 if version else WHOLE)
        yield ListedModel(
            name=base,
            version=version or ONLY,
            share=share / WHOLE,
            not_ready=tuple(not_ready.get(name, ())),
            digest=digests.get(name),
            is_chain=name in chains,
            signature=None,
        )


def asked_as(model: ListedModel, told: Mapping[str, Any]) -> str:
    """Return the name by which the server opens a listed model."""
    servers = told["servers"].values() if "servers" in told else (told,)
    has_versions = any(model.name in counters.get("versions", {}) for counters in servers)
    return versioned(model.name, model.version) if has_versions else model.name
