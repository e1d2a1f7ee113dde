"""Versions in the YAML: how they are written, their contradictions, and what a file with versions stands for.

In a file, each entry of `models` has a `name`, perhaps a `version`, and perhaps a share of the `traffic`. The rest of the
program knows no versions: `named` gives each entry that has one, or shares its name with others, the name `embeddings@4`,
and each group of workers the names that it serves.
A canary that no group names gets a group of one process, like that of the version that gets the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from shapestream.settings.values import TEXT, Finding, describe, wrong
from shapestream.versions import (
    MOST_VERSIONS,
    ONLY,
    VERSION,
    WHOLE,
    By,
    Versions,
    parted,
    spell_share,
    versioned,
)

_VERSION = re.compile(VERSION)
_SHARE = re.compile(r"(\d{1,3})(?:\.(\d{1,4}))?\s*%")
_PERCENT = WHOLE // 100
_FORM = "a letter or digit, then up to 31 of these, dots, dashes and underscores"
ROUTING = ("version", "traffic", "traffic_by", "shadow")
"""Keys of a model that say which requests it gets. A change of them changes no answer of the model."""


def read_version(value: Any) -> str:
    """Read a version: text, or an integer without a sign."""
    if type(value) is int and value >= 0:
        value = str(value)
    if isinstance(value, str):
        if _VERSION.fullmatch(value):
            return value
        raise wrong(f"{describe(value)} is no version ({_FORM})")
    hint = f' (put it in quotes: "{value}")' if type(value) is float else f" ({_FORM})"
    raise wrong(f"expected a version, got {describe(value)}{hint}")


def read_share(value: Any) -> int:
    """Read a share of requests, such as 5% or 12.5%, as millionths. Shares that were read before stay."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        share = int(match[1]) * _PERCENT + int((match[2] or "0").ljust(4, "0"))
        if share <= WHOLE:
            return share
        raise wrong(f"{describe(value)} is more than all requests (write at most 100%)")
    hint = ""
    if type(value) in (int, float) and 0 <= value <= 100:
        hint = f" (write {value:g}%" + (f", or {value * 100:g}%?)" if 0 < value < 1 else ")")
    raise wrong(f"expected a share of the requests, got {describe(value)}{hint or ' (write 5%)'}")


Version: TypeAlias = Annotated[
    str,
    BeforeValidator(read_version),
    WithJsonSchema(
        {"anyOf": [{**TEXT, "pattern": f"^{_VERSION.pattern}$"}, {"type": "integer", "minimum": 0}]}
    ),
]
Share: TypeAlias = Annotated[
    int,
    BeforeValidator(read_share),
    PlainSerializer(spell_share, return_type=str),
    WithJsonSchema({**TEXT, "examples": ["5%", "12.5%"]}),
]


class Stated(Protocol):
    """What an entry of `models` says of its version."""

    @property
    def name(self) -> str:
        """The name that clients use."""

    @property
    def version(self) -> str | None:
        """The version; None where the entry states none."""

    @property
    def traffic(self) -> int | None:
        """Millionths of the requests; None: what the others leave."""

    @property
    def traffic_by(self) -> By | None:
        """What is drawn; None where the entry does not say."""


def versions_of(models: Sequence[Stated]) -> dict[str, Versions]:
    """Return the versions of each name that has several, or that states one. The entries agree (`problems`)."""
    found: dict[str, Versions] = {}
    for name, entries in _by_name(models).items():
        own = [models[index] for index in entries]
        if len(own) > 1 or own[0].version is not None or own[0].name != name:
            by: By = next((model.traffic_by for model in own if model.traffic_by is not None), "request")
            shadows = {
                model.version or ONLY: share for model in own if (share := shadow_of(model)) is not None
            }
            stated = [(model.version or ONLY, model.traffic) for model in own]
            found[name] = Versions.of(name, stated, by, shadows)
    return found


def shadow_of(model: Stated) -> int | None:
    """Return the millionths of the answered requests that an entry runs again; None where it is no shadow, as a chain."""
    share: int | None = getattr(model, "shadow", None)
    return share


def _by_name(models: Sequence[Stated]) -> dict[str, list[int]]:
    entries: dict[str, list[int]] = {}
    for index, model in enumerate(models):
        entries.setdefault(parted(model.name)[0], []).append(index)
    return entries


def problems(models: Sequence[Stated]) -> Iterator[Finding]:
    """Yield the contradictions between entries of one name, with the place in `models` of the one to change."""
    for name, entries in _by_name(models).items():
        yield from _equal_versions(models, name, entries)
        yield from _shares(models, name, entries)
        for index in entries:
            if shadow_of(models[index]) is not None and models[index].traffic != 0:
                yield (index, "shadow"), "a shadow gets no traffic (write traffic: 0%, or remove the shadow)"
        if len(entries) > MOST_VERSIONS:
            words = (
                f'"{name}" has {len(entries)} versions (at most {MOST_VERSIONS} at a time: remove old ones)'
            )
            yield (entries[MOST_VERSIONS], "name"), words
        first = next((index for index in entries if models[index].traffic_by is not None), None)
        for index in entries:
            by = models[index].traffic_by
            if first is not None and by not in (None, models[first].traffic_by):
                yield (index, "traffic_by"), f"models[{first}] has another one for this name (write it once)"


def _equal_versions(models: Sequence[Stated], name: str, entries: Sequence[int]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index in entries:
        version = models[index].version or ONLY
        if first.setdefault(version, index) == index:
            continue
        if models[index].version is None and models[first[version]].version is None:
            words = f'models[{first[version]}] has the name "{name}" too (names must be unique, or add a version: 2)'
            yield (index, "name"), words
        else:
            words = f'models[{first[version]}] is version {version} of "{name}" too (write another version)'
            yield (index, "version" if models[index].version else "name"), words


def _shares(models: Sequence[Stated], name: str, entries: Sequence[int]) -> Iterator[Finding]:
    open_ones = [index for index in entries if models[index].traffic is None]
    stated = [index for index in entries if models[index].traffic is not None]
    total = sum(models[index].traffic or 0 for index in stated)
    versions = {models[index].version or ONLY for index in entries}
    if len(open_ones) > 1 and len(versions) == len(entries):
        words = f'"{name}" has two versions without traffic, of which models[{open_ones[0]}] is one (write traffic: 0%)'
        yield (open_ones[1], "name"), words
    elif total > WHOLE:
        yield (stated[-1], "traffic"), f'the shares of "{name}" make {spell_share(total)} (at most 100%)'
    elif not open_ones and total < WHOLE:
        words = f'the shares of "{name}" make {spell_share(total)} (leave traffic out at one version, which gets the rest)'
        yield (stated[-1], "traffic"), words


def names_of(models: Sequence[Stated]) -> dict[int, str]:
    """Return the name of each entry in the rest of the program: `embeddings@4`, or as it is without versions."""
    known = versions_of(models)
    bases = [parted(model.name)[0] for model in models]
    return {
        index: versioned(base, models[index].version or ONLY) if base in known else base
        for index, base in enumerate(bases)
    }


def names_meant(models: Sequence[Stated]) -> list[str]:
    """Return the names by which a file may mean a model or chain: `embeddings`, and with versions `embeddings@4` too."""
    bare = dict.fromkeys(parted(model.name)[0] for model in models)
    return [*bare, *(name for name in names_of(models).values() if name not in bare)]


def served_name(name: str, known: Mapping[str, Versions]) -> str:
    """Return the model that a group of workers means: of a bare name the version that gets the rest."""
    base, version = parted(name)
    if base not in known:
        return base if version == ONLY else name
    return versioned(base, known[base].rest) if version is None else name
