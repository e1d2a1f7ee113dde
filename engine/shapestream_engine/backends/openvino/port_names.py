"""What the ports of a model are called, and which of them a configuration means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shapestream_engine.errors import SignatureError

__all__ = ["SpecNames", "match_spec"]


@dataclass(frozen=True, slots=True)
class SpecNames:
    """The names of the ports of one kind, by number, and what else each is called."""

    kind: str
    names: tuple[str, ...]
    aliases: tuple[frozenset[str], ...]

    def resolve(self, name: str) -> str:
        """The port's name for any of its names; raises `SignatureError` that lists the names."""
        if name in self.names:
            return name
        found = [own for own, others in zip(self.names, self.aliases, strict=True) if name in others]
        if len(found) == 1:
            return found[0]
        if found:
            raise SignatureError(
                f"{self.kind} {name!r} may be any of {', '.join(found)}", key=(f"{self.kind}s", name)
            )
        raise SignatureError(
            f"there is no {self.kind} {name!r}; the model has {', '.join(self.names) or 'none'}",
            key=(f"{self.kind}s", name),
        )


def match_spec(kind: str, ports: Sequence[Any], configured: Iterable[str]) -> SpecNames:
    """Names for the ports: as the configuration calls them, else the model's own, else by position, `input0`.

    A configuration may use any of a tensor's names, the name of its node, or its position.
    """
    known = _known_names(kind, ports)
    names = list(known.names)
    chosen: dict[int, str] = {}
    for name in configured:
        number = known.names.index(known.resolve(name))
        if number in chosen:
            raise SignatureError(
                f"{kind} {known.names[number]!r} is configured twice: as {chosen[number]!r} and {name!r}",
                key=(f"{kind}s", known.names[number]),
            )
        chosen[number] = names[number] = name
    return SpecNames(
        kind, tuple(names), tuple(known.aliases[i] | {known.names[i]} for i in range(len(names)))
    )


def _known_names(kind: str, ports: Sequence[Any]) -> SpecNames:
    names: list[str] = []
    aliases = []
    for number, port in enumerate(ports):
        position = f"{kind}{number}"
        own = sorted(port.names)
        name = str(port.any_name) if own else position
        # Two outputs may be the same tensor, and then have the same names.
        names.append(name if name not in names else position)
        aliases.append(frozenset({*own, str(port.node.friendly_name), position}))
    return SpecNames(kind, tuple(names), tuple(aliases))
