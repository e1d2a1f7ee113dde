"""Names with versions, as clients have opened them: the signature that they were told, and the versions that take it.

A name has a number on the wire like a model, and no queue: each of its requests becomes one of the version that it is drawn
for (`Versions.draw`), at admission, and stays that. A version that has not come, or whose workers were given up, gets
nothing: the version with the rest gets its share. Only that one is answered `unavailable`, so a canary never has to carry
the whole traffic.

A version gets nothing, either, if it does not take all that clients were told (`version_fit.py`). Then the log says why, and
it is served to those who name it. Pure, but for that line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shapestream.errors import InvalidRequest
from shapestream.telemetry.logging import get_logger
from shapestream.version_fit import Fit, misfit, other_ports, rearranged
from shapestream.versions import Versions, versioned
from shapestream_engine.layout import Layout, Tensors
from shapestream_engine.signature import ModelSignature

log = get_logger()


class Routed(NamedTuple):
    """How a request that named no version came to its version."""

    number: int
    """The number of the name, which the client used."""
    layout: Layout
    """The layout that the client sent, by which its repetition is recognised."""
    fit: Fit


class Announced:
    """The versions behind one number: a name with the signature that clients were told."""

    __slots__ = (
        "_before", "_fits", "_is_replaced", "_told", "idempotent", "name", "number", "signature", "versions"
    )  # fmt: skip

    def __init__(
        self, number: int, versions: Versions, signature: ModelSignature, *, idempotent: bool
    ) -> None:
        self.number = number
        self.name = versions.name
        self.versions = versions
        self._before: Versions | None = None
        """Those that get the requests until a reload's version with the rest is live; None once it was."""
        self._is_replaced = False
        """True if the name has another number now. Then a version takes what fits by name, type and number of axes."""
        self.signature = signature
        """With the bare name. It never changes, since clients send tensors by its places."""
        self.idempotent = idempotent
        self._fits: dict[str, Fit | str] = {}
        """For each version that has come, by its model: the places of its ports, or why it gets nothing."""
        self._told: set[str] = set()
        """The misfits that the log has told."""

    def change(self, versions: Versions) -> None:
        """Draw by these versions once the one with the rest is live; until then, by the last ones that were."""
        if (
            versions.rest != self.versions.rest
            and self.fit_of(versioned(self.name, self.versions.rest)) is not None
        ):
            self._before = self.versions
        self.versions = versions

    def fit(self, model: str, signature: ModelSignature, *, idempotent: bool) -> None:
        """Note the signature of a version. It changes only with a generation of that (`forget`)."""
        known = self._fits.get(model)
        if known is None:
            why = (other_ports if self._is_replaced else misfit)(self.signature, signature)
            if why is None and idempotent != self.idempotent:
                why = f"idempotent is {str(idempotent).lower()}, and clients know {str(self.idempotent).lower()}"
            known = self._fits[model] = Fit.of(self.signature, signature) if why is None else why
        version = self.versions.models.get(model, "")
        announced_anew = self._is_replaced or version == self.versions.rest
        if (
            isinstance(known, str)
            and self.versions.shares.get(version)
            and not announced_anew
            and model not in self._told
        ):
            self._told.add(model)
            log.error(
                "version gets no traffic",
                model=model,
                why=known,
                advice="it is served to those who name it",
            )

    def replaced(self) -> None:
        """Note that the name has another number now: this one is for clients that do not know it."""
        self._is_replaced = True
        self._fits.clear()

    def forget(self, model: str) -> None:
        """Forget the signature of a version, which has another one now."""
        self._fits.pop(model, None)
        self._told.discard(model)

    @property
    def misfits(self) -> dict[str, str]:
        """The versions that should have traffic and get none, by model, each with the reason."""
        shares = self.versions.shares
        return {
            model: known
            for model, known in self._fits.items()
            if isinstance(known, str) and shares.get(self.versions.models.get(model, ""))
        }

    def fit_of(self, model: str) -> Fit | None:
        """Return the places of a version's ports; None where it has not come, or takes no such requests."""
        fit = self._fits.get(model)
        return fit if isinstance(fit, Fit) else None

    def route(self, who: bytes, sequence: int, is_live: Callable[[str], bool]) -> tuple[str, Fit]:
        """Return the model that a request goes to, and the places of its ports.

        `who`: the client's bytes, or its caller's name. `is_live` tells whether a model can be asked for now. Raises
        `InvalidRequest` if the version that gets the rest has another signature by now.
        """
        versions, before = self.versions, self._before
        if before is not None:
            if is_live(versioned(self.name, versions.rest)):
                self._before = None
            elif is_live(versioned(self.name, before.rest)):
                versions = before
        model = versioned(self.name, versions.draw(who, sequence))
        fit = self._fits.get(model)
        if not isinstance(fit, Fit) or not is_live(model):
            model = versioned(self.name, versions.rest)
            fit = self._fits.get(model)
        if isinstance(fit, Fit):
            return model, fit
        why = fit or "it is not here any more"
        raise InvalidRequest(
            f"model {self.name!r} has changed: version {self.versions.rest!r}: {why}; open it again"
        )


def drawn_by(versions: Versions, client: bytes, key: str | None, caller: str | None) -> bytes:
    """Return the bytes by which a request is drawn: its client's, or its caller's. `caller`: as its gateway named it."""
    if versions.by == "request":
        return client
    if caller is not None:
        return caller.encode()
    return client if key is None else key.encode()


def routed_tensors(tensors: Tensors, fit: Fit) -> Tensors:
    """Return the tensors of a request with the ports' numbers at its version."""
    return tensors if fit.inputs is None else rearranged(tensors, fit.inputs)


def sent_tensors(tensors: Tensors, routed: Routed) -> Tensors:
    """Return the tensors of a request as its client sent them."""
    places = routed.fit.inputs
    return tensors if places is None else rearranged(tensors, [places.index(at) for at in range(len(places))])


def answer_of(tensors: Tensors, routed: Routed | None) -> Tensors:
    """Return a version's answer with the ports' numbers that its client knows."""
    if routed is None or routed.fit.outputs is None:
        return tensors
    return rearranged(tensors, routed.fit.outputs)
