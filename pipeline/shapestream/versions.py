"""The versions of a model: their names, their shares of the requests, and the draw between them. Pure.

Clients ask for a name, such as `embeddings`, or for one version of it, `embeddings@4`. Below the clients' port a version is
a model of its own, whose name is the second one: it has its own queue, prices, workers, audits and counts. What is left of
versions is one decision for each request that names none (`Versions.draw`).

The draw is a hash of the client's sixteen bytes, the request's number and the name, so one request has one version whichever
gateway or server process decides. With `by="caller"` the number is left out, and a caller keeps its version. The hash is
compared with the shares in the order of the file, in which the rest comes last: a share that grows takes requests from those
behind it only. It is routing and no protection: a client chooses its bytes.

What this file does not do: it knows neither signatures nor whether a version is ready (`serving/announced.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias

ONLY = "1"
"""The version of a model that states none."""
WHOLE = 1_000_000
"""All requests of a name: shares are counted in millionths."""
MOST_VERSIONS = 16
"""Versions of one name: each has processes of its own."""
By: TypeAlias = Literal["request", "caller"]
"""Each request is drawn by itself, or each caller once."""
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*"
"""The form of a name without its version, of at most `MOST_NAME` characters."""
MOST_NAME = 200
VERSION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}"
"""The form of a version."""
_MARK = "@"
"""Between a name and a version. No name of a file has it."""
_HASH_BYTES = 8


def versioned(name: str, version: str) -> str:
    """Return the name of one version: `embeddings@4`."""
    return f"{name}{_MARK}{version}"


def parted(name: str) -> tuple[str, str | None]:
    """Return the name and the version of `embeddings@4`; without a version it is None."""
    base, mark, version = name.rpartition(_MARK)
    return (base, version) if mark else (name, None)


def is_name(name: str) -> bool:
    """Tell whether a model can have this name, perhaps with a version."""
    base, version = parted(name)
    if len(base) > MOST_NAME or re.fullmatch(NAME, base) is None:
        return False
    return version is None or re.fullmatch(VERSION, version) is not None


def answering(name: str, version: str | None) -> str:
    """Return the model that answered a request for a name: a version, where the answer names one."""
    return name if version is None else versioned(parted(name)[0], version)


def spell_share(millionths: int) -> str:
    """Return a share as the YAML has it: `5%`, `12.5%`."""
    return f"{millionths / (WHOLE // 100):.4f}".rstrip("0").rstrip(".") + "%"


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one name, with the share of the requests that each gets."""

    name: str
    shares: dict[str, int]
    """Version -> millionths of the requests that name none, in the order of the draw."""
    rest: str
    """The version that announces the signature of the name, and gets what the others leave."""
    by: By = "request"
    shadows: dict[str, int] = field(default_factory=dict)
    """Versions without traffic that run answered requests of the rest again, with the millionths of these."""

    @classmethod
    def of(
        cls,
        name: str,
        stated: Iterable[tuple[str, int | None]],
        by: By = "request",
        shadows: Mapping[str, int] | None = None,
    ) -> Versions:
        """Return the versions of a file: pairs of a version and its share, of which one may be None.

        The one without a share is the rest. Where all have one, the first with the largest is.
        """
        pairs = list(stated)
        left = WHOLE - sum(share or 0 for _, share in pairs)
        counted = [(version, left if share is None else share) for version, share in pairs]
        open_ones = [version for version, share in pairs if share is None]
        rest = open_ones[0] if open_ones else max(counted, key=lambda pair: pair[1])[0]
        shares = {version: share for version, share in counted if version != rest}
        return cls(name, {**shares, rest: dict(counted)[rest]}, rest, by, dict(shadows or {}))

    @property
    def models(self) -> dict[str, str]:
        """The version of each model, by the model's name."""
        return {versioned(self.name, version): version for version in self.shares}

    @property
    def listed(self) -> list[str]:
        """The versions in the order of people: 9 before 10."""
        return sorted(self.shares, key=_by_numbers)

    def told(self) -> dict[str, int]:
        """Return the shares in that order, as plain data."""
        return {version: self.shares[version] for version in self.listed}

    def draw(self, who: bytes, sequence: int) -> str:
        """Return the version of a request. `who`: the client's bytes, or its caller's name; `sequence`: its number."""
        point = point_of(self.name, who, sequence if self.by == "request" else 0)
        for version, share in self.shares.items():
            point -= share
            if point < 0:
                return version
        return self.rest


def _by_numbers(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", version)]


def point_of(name: str, who: bytes, sequence: int) -> int:
    """Return the place of a request among all, from 0 to 999,999, as docs/protocol.md states it."""
    digest = blake2b(who + sequence.to_bytes(8, "little") + name.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little") * WHOLE >> 8 * _HASH_BYTES


def canaries(known: Mapping[str, Versions]) -> dict[str, str]:
    """Return the models of versions that do not get the rest, each with the one of its name that does."""
    return {
        model: versioned(versions.name, versions.rest)
        for versions in known.values()
        for model, version in versions.models.items()
        if version != versions.rest
    }
