"""The models that clients can ask for. Workers bring them; each signature gets a number, once per server process.

A reload may change a model. Then its name has another *generation*: a `ServedModel` of its own, with a queue of its own at
the scheduler (`ServedModel.key`). A generation that differs in how it is batched, and not in its signature, keeps the number
and the slots. One with another signature has a new number. It is served from the moment when a slot of it joins (`promote`),
and from then on gets all requests of its name. What came before is finished by the old generation, which is forgotten when
it has no request left (`retire`). Requests under an old number are mapped to the new ports by name, where they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from itertools import count, zip_longest
from typing import NamedTuple

from shapestream.chains.plan import Chain, ChainRefused, plan_chain
from shapestream.chains.spec import ChainSpec
from shapestream.errors import ConfigurationError, InvalidRequest
from shapestream.serving.announced import Announced
from shapestream.serving.model_profiles import profile_of
from shapestream.settings import ModelSettings
from shapestream.settings.readers import for_a_process
from shapestream.settings.version_settings import ROUTING
from shapestream.slices import Slices
from shapestream.telemetry.logging import get_logger
from shapestream.version_fit import Fit, other_ports
from shapestream.versions import ONLY, Versions, is_name, parted, versioned
from shapestream.wire.limits import (
    MAX_RANK,
    MAX_TENSORS,
)
from shapestream_engine.batching.assembly import common_refused
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import REMEMBERED, RequestShape, Tensors
from shapestream_engine.signature import ModelSignature

log = get_logger()

MAX_MODELS = 1024
"""Models of one server at a time."""
MOST_OLD_NUMBERS = 8
"""Earlier signatures of a model whose numbers still mean something: those of the last reloads. A client that was told an
older one opens the model again."""
GROUP_BYTES = 7
"""Bytes of the digest of common inputs: as many as a machine's integer holds. Requests whose digests are equal by chance, or
by a client's search, are told apart by the worker, and run again in other calls."""


class ServedModel:
    """One model: its number on the wire, its signature, and how it is batched."""

    __slots__ = (
        "_common",
        "_fit",
        "_fits",
        "_fixed",
        "announced",
        "chain",
        "description",
        "has_alike",
        "has_left",
        "key",
        "like",
        "name",
        "number",
        "parts",
        "profile",
        "resolve",
        "settings",
        "signature",
        "successor",
        "takes_strings",
        "version",
    )

    def __init__(
        self,
        number: int,
        name: str,
        signature: ModelSignature,
        settings: ModelSettings,
        chain: Chain | None = None,
        *,
        generation: int = 1,
        parts: Mapping[str, ServedModel] | None = None,
    ) -> None:
        """`parts`: the models of a chain, by name."""
        self.number = number
        self.name = name
        self.signature = signature
        self.settings = settings
        self.chain = chain
        """The stages, if it is a chain of other models; no slot serves it, and the scheduler does not know it."""
        self.announced: Announced | None = None
        """The versions, if it is a name with several; each is a model of its own, and the scheduler knows only these."""
        self.version = parted(name)[1]
        """None: its name has no versions."""
        self.parts: Mapping[str, ServedModel] = {} if parts is None else parts
        self.successor: ServedModel | None = None
        """The generation that gets the requests of its name now; None while this one does."""
        self.has_left = False
        """True if no worker of it is left, since a reload has changed it."""
        self.like: str | None = None
        """The key of the generation before, if that has the same signature, and so the same slots."""
        self._fit: Fit | str | None = None
        """That of its number to the present generation, or why there is none; None where it was not worked out."""
        self._fits: ModelSignature | None = None
        """The signature that this was worked out for."""
        self.profile = profile_of(name, signature, settings, generation)
        self.key = self.profile.key
        """Its name at the scheduler."""
        self.takes_strings = any(port.is_string for port in signature.inputs)
        numbered = list(enumerate(signature.inputs))
        self._fixed = [(number, port) for number, port in numbered if port.value is not None]
        self._common = [
            number for number, port in numbered if signature.is_common(port) and port.value is None
        ]
        self.has_alike = bool(self._fixed or self._common)
        """Whether requests have inputs that `group_of` compares."""
        self.description = signature.to_dict()
        """The signature as plain data."""
        self.resolve = lru_cache(REMEMBERED)(signature.resolve)
        """`ModelSignature.resolve`, remembered by layout. Raises ShapeError.

        Use it only for layouts that the codec has read, which holds no `True` or `1.0` in place of an equal 1.
        """

    def latest(self) -> ServedModel:
        """Return the newest generation with this number."""
        model = self
        while model.successor is not None and model.successor.number == model.number:
            model = model.successor
        return model

    def present(self) -> tuple[ServedModel, Fit]:
        """Return the generation that gets requests now, and the places of its ports by those of this one's number.

        Raises `InvalidRequest` where this number's ports do not fit it by name.
        """
        model = self
        while model.successor is not None:
            model = model.successor
        if self._fit is None or self._fits is not model.signature:
            self._fits = model.signature
            why = other_ports(self.signature, model.signature)
            self._fit = Fit.of(self.signature, model.signature) if why is None else why
        if isinstance(self._fit, Fit):
            return model, self._fit
        raise InvalidRequest(f"model {self.name!r} has changed: {self._fit}; open it again")

    def group_of(self, shape: RequestShape, tensors: Tensors) -> int | None:
        """Return the digest of the inputs that a request must have in common with others of its call; None without such.

        Raises ShapeError for other bytes of an input than the value that the configuration fixes.
        """
        for number, port in self._fixed:
            position = shape.positions[number]
            if position is not None and bytes(memoryview(tensors.buffers[position])) != port.value_bytes:
                raise ShapeError(common_refused(port))
        if not self._common:
            return None
        digest = blake2b(digest_size=GROUP_BYTES)
        for number in self._common:
            position = shape.positions[number]
            assert position is not None  # only masks and fixed values may be left out
            digest.update(tensors.buffers[position])
        return int.from_bytes(digest.digest(), "little")


def _difference(known: ModelSignature, other: ModelSignature) -> tuple[str, str]:
    """Return the first line in which two descriptions differ, of each."""
    lines = zip_longest(known.describe(), other.describe(), fillvalue="nothing")
    ours, theirs = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
    return ours.strip(), theirs.strip()


def _by_default(name: str) -> ModelSettings:
    """Return the settings of a model that the configuration does not have; the name is a version's, or a worker's own."""
    return ModelSettings(name="any").model_copy(update={"name": name})


class ServedPart(Enum):
    """What all workers of a model must have alike; the value names it in messages."""

    FILES = "files"
    ENGINE = "engine"
    SIGNATURE = "signature"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """A model of a worker that is another one than the served model of its name."""

    name: str
    what: ServedPart
    serves: str
    """The digest of the served files, the served engine with its version, or a line of the served signature."""
    offers: str | None
    """The worker's; None if it did not say."""


class Offered(NamedTuple):
    """The models of a worker."""

    models: Mapping[str, ServedModel]
    """By name: known ones, and other generations of known ones, which are served once a slot has joined."""
    added: Sequence[ServedModel]
    """Those whose names are new, and what is complete by them."""


class ServedModels:
    """All models by number and by name, and the names of models that the configuration promises."""

    def __init__(
        self,
        expected: Mapping[str, ModelSettings],
        digests: Mapping[str, str] | None = None,
        chains: Iterable[ChainSpec] = (),
        versions: Mapping[str, Versions] | None = None,
    ) -> None:
        self.versions = dict(versions or {})
        """The versions that the configuration has, by the names that clients use."""
        self.by_bare_name: dict[str, ServedModel] = {}
        """The names with versions, of which the one with the rest has come."""
        self.expected = dict(expected)
        """Settings of the models that the configuration has or had, by name."""
        self.chains = {chain.name: chain for chain in chains}
        """The chains that the configuration has, by name. Each is served once all its models are."""
        self._withdrawn: set[str] = set()
        """Names that were removed from the configuration."""
        self.changing: set[str] = set()
        """Names whose signature the next worker may change, since a reload has read them anew."""
        self.retiring: dict[str, ServedModel] = {}
        """Generations that another one has replaced, and that still have requests, by key."""
        self._old_numbers: dict[str, list[int]] = {}
        """By name, the numbers of earlier signatures whose requests are mapped to the present one."""
        self._numbers = count()
        self.new: set[str] = set()
        """Promised names that were added to the configuration after the start, and that no worker has brought yet."""
        self.digests = dict(digests or {})
        """Known sha256 digests of the models' files, by name. The first worker of a model without one sets it."""
        self.former: dict[str, str] = {}
        """Digests of the files before a reload, by name, while no worker with the present ones has joined."""
        self._joined: set[str] = set()
        """Names that a worker has joined with, and not only greeted."""
        self.kept: set[str] = set()
        """Names whose files were replaced, and no worker could be started with the new ones."""
        self.engines: dict[str, str] = {}
        """The engine of each model, with its version, in the words of the first worker that brought one."""
        self.by_name: dict[str, ServedModel] = {}
        """The models that a worker has brought."""
        self.by_number: dict[int, ServedModel] = {}
        self.unavailable: dict[str, str] = {}
        """The reason for each model whose requests are refused, by name. `Availability` keeps it."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.by_name.values())

    @property
    def names(self) -> list[str]:
        """Return every name that may be asked for, sorted."""
        return sorted(self.by_name.keys() | self.expected.keys() | self.chains.keys() | self.versions.keys())

    @property
    def counted(self) -> list[str]:
        """Return the names by which requests are counted, sorted: of a name with versions those of the versions."""
        return [name for name in self.names if name not in self.versions]

    def find(self, name: str) -> ServedModel | None:
        """Return what clients mean by a name: a model, a chain, a version, or a name with versions."""
        if (found := self.by_bare_name.get(name) or self.by_name.get(name)) is not None:
            return found
        base, version = parted(name)
        return self.by_name.get(base) if version == ONLY and base not in self.versions else None

    def may_come(self, name: str) -> bool:
        """Tell whether the configuration promises this name."""
        base, version = parted(name)
        known = self.expected.keys() | self.chains.keys() | self.versions.keys()
        return name not in self._withdrawn and (
            name in known or (version == ONLY and base in known and base not in self.versions)
        )

    def awaited(self, name: str) -> str:
        """Return the model that clients wait for by this name: of a name with versions the one with the rest."""
        if (versions := self.versions.get(name)) is not None:
            return versioned(name, versions.rest)
        base, version = parted(name)
        return base if version == ONLY and base not in self.versions else name

    def unknown(self, name: str) -> str:
        """Say that no model has this name, and which there are."""
        base, version = parted(name)
        versions = self.versions.get(base)
        if version is not None and versions is not None:
            return f"{base!r} has no version {version!r}; it has: {', '.join(versions.listed)}"
        if version is not None and base in self.names:
            return f"{base!r} has the version {ONLY!r} only, and no {version!r}"
        known = [name for name in self.names if name not in self._withdrawn]
        return f"no model is called {name!r}; this server has: {', '.join(known) or 'none'}"

    def has_left(self, model: ServedModel) -> bool:
        """Tell whether this is a version that was removed from the configuration."""
        if model.chain is not None and model.version is not None:
            return model.name not in self.chains
        return model.version is not None and model.name in self._withdrawn

    def shares(self) -> dict[str, dict[str, int]]:
        """Return each name with versions, and the millionths of its requests that each version gets, as plain data."""
        return {name: versions.told() for name, versions in self.versions.items()}

    def misfits(self) -> list[str]:
        """Return a line for each version that gets no traffic, since it does not take what its name announced."""
        announced = [bare.announced for bare in self.by_bare_name.values() if bare.announced is not None]
        return [
            f"version {model} gets no traffic: {why}"
            for one in announced
            for model, why in one.misfits.items()
        ]

    def is_live(self, name: str) -> bool:
        """Tell whether a worker has joined with this model, or with those of this chain, and they were not given up.

        A worker that a reload holds back has brought its models, and has not joined.
        """
        model = self.by_name.get(name)
        if model is None or name in self.unavailable:
            return False
        if model.chain is None:
            return name in self._joined
        return all(part.announced is not None or self.is_live(part.name) for part in model.parts.values())

    def others(
        self, names: Iterable[str], digests: Mapping[str, str], engines: Mapping[str, str]
    ) -> Iterator[OtherModel]:
        """Yield what a worker has of these models that is not what is served: files, and engines."""
        for name in names:
            for what, served, offered in (
                (ServedPart.FILES, self.digests, digests),
                (ServedPart.ENGINE, self.engines, engines),
            ):
                mine = offered.get(name)
                if served.get(name) in (None, mine) or (
                    served is self.digests and self.former.get(name, "") == mine
                ):
                    continue
                yield OtherModel(name=name, what=what, serves=served[name], offers=mine)

    def other_signature(self, name: str, signature: ModelSignature) -> OtherModel | None:
        """Return a worker's model if it has another signature than the served one, and no reload lets it change that."""
        live = self.by_name.get(name)
        if live is None or name in self.changing:
            return None
        known = [live, *[old for old in self.retiring.values() if old.name == name]]
        if any(model.description == signature.to_dict() for model in known):
            return None
        ours, theirs = _difference(live.signature, signature)
        return OtherModel(name=name, what=ServedPart.SIGNATURE, serves=ours, offers=theirs)

    def joined(self, name: str, digest: str | None) -> None:
        """Note that a worker serves a model: if from the present files, no worker may join with those before any more."""
        self._joined.add(name)
        if digest == self.digests.get(name):
            self.former.pop(name, None)

    def serve_files(self, digests: Mapping[str, str], served: Collection[str]) -> None:
        """Serve the models from files of these digests. `served`: those that workers serve, perhaps from others.

        For a model without a digest the first worker that joins names it, and so it does for the engine of each model.
        """
        before, self.digests = self.digests, dict(digests)
        self.former = {
            name: self.former.get(name, digest)
            for name, digest in before.items()
            if name in served and digests.get(name) not in (None, digest)
        }
        self.kept.clear()
        self.engines.clear()

    def keep_files(self, digests: Mapping[str, str]) -> None:
        """Serve these models from files of these digests after all: no worker could be started with the others."""
        self.kept.update(digests)
        self.digests.update(digests)

    def lose_files(self, name: str) -> None:
        """Serve a model from what the next worker has read: the last one with the files before is gone, and so are they."""
        self.kept.remove(name)
        del self.digests[name]

    @property
    def promised(self) -> list[str]:
        """Return the names that the configuration has, sorted."""
        return sorted(self.expected.keys() - self._withdrawn)

    def withdraw(self, name: str) -> None:
        """Note that a name was removed from the configuration."""
        self._withdrawn.add(name)
        self.new.discard(name)

    def expect(self, name: str, settings: ModelSettings, *, may_change: bool = False) -> list[ServedModel]:
        """Expect a model that the configuration promises. Returns it, if only the way in which it is batched changes.

        `may_change`: the next worker may bring it with another signature. Until that has come, a model that is here keeps
        its settings.
        """
        if name not in self.expected or name in self._withdrawn:
            self.new.add(name)
        self._withdrawn.discard(name)
        self.expected[name] = settings
        self.changing.discard(name)
        live = self.by_name.get(name)
        if may_change:
            self.changing.add(name)
        elif live is not None and live.chain is None and _is_batched_otherwise(live.settings, settings):
            return self.promote(self._next(live, live.signature, settings))
        return []

    def add_all(
        self,
        signatures: Mapping[str, ModelSignature],
        digests: Mapping[str, str] | None = None,
        engines: Mapping[str, str] | None = None,
        once: Collection[str] = (),
    ) -> Slices[Offered]:
        """Take in the models of a worker, all or none, with the digests of their files and their engines.

        Each slice checks one model; the last one adds all. `once` names the models whose requests must not run twice, in
        addition to those of the configuration. Raises ConfigurationError for a model that is known with another signature
        and was not changed by a reload, or that does not fit the wire. Raises it, too, if there would be more than
        `MAX_MODELS`: workers could fill the memory.
        """
        offered: dict[str, ServedModel] = {}
        for name, signature in signatures.items():
            offered[name] = self._offered(name, signature, name in once)
            yield
        new = [model for model in offered.values() if model.number < 0 and model.profile.generation == 1]
        if any(model.name in self.by_name for model in new):  # another port has added it meanwhile
            return (yield from self.add_all(signatures, digests, engines, once))
        if len(self.by_number) + len(new) > MAX_MODELS:  # names with versions count, too
            raise ConfigurationError([f"more than {MAX_MODELS} models at a time, old signatures included"])
        for model in new:
            self._enter(model)
        if new:
            new += self._announce()  # what a stage names may be one of these
            new += self._complete_chains()
            new += self._announce()
        for name, digest in (digests or {}).items():
            self.digests.setdefault(name, digest)
        for name, engine in (engines or {}).items():
            self.engines.setdefault(name, engine)
        return Offered(offered, new)

    def _enter(self, model: ServedModel) -> None:
        model.number = next(self._numbers)
        self.by_name[model.name] = model
        self.by_number[model.number] = model

    # ---------------------------------------------------------------- generations

    def promote(self, model: ServedModel) -> list[ServedModel]:
        """Give all further requests of its name to this model, if it is a newer generation. Returns what is new by that."""
        live = self.by_name.get(model.name)
        if live is None or model.profile.generation <= live.profile.generation:
            return []
        if live.description == model.description and live.chain is None:
            model.number, model.like = live.number, live.key
        else:
            self.changing.discard(model.name)  # else an old worker that comes back would change it again
            model.number = next(self._numbers)
            self._keep_number(live)
        self.by_name[model.name] = self.by_number[model.number] = model
        live.successor = model
        for announced in self._announced(parted(model.name)[0]):
            announced.forget(model.name)
        if live.chain is None:
            self.retiring[live.key] = live
        return [model, *self._announce(), *self._complete_chains()] if model.chain is None else [model]

    def keys_of(self, model: ServedModel) -> list[str]:
        """Return the keys whose requests a slot with this model serves: its own, and those of earlier generations with
        its signature, whose own slots may be gone.
        """
        return [model.key, *[old.key for old in self.retiring.values() if old.latest() is model]]

    def _keep_number(self, model: ServedModel) -> None:
        """Map requests under a number that was replaced to what comes after it, while it is one of the last ones."""
        old = self._old_numbers.setdefault(model.name, [])
        old.append(model.number)
        while len(old) > MOST_OLD_NUMBERS:
            self.by_number.pop(old.pop(0), None)

    def retire(self, is_idle: Callable[[ServedModel], bool]) -> list[ServedModel]:
        """Forget the generations that have no request left, and return them."""
        gone = [model for model in self.retiring.values() if is_idle(model)]
        for model in gone:
            del self.retiring[model.key]
        return gone

    def forget(self, name: str) -> ServedModel | None:
        """Forget a model that was removed from the configuration, and has no request left; None if it had never come."""
        for names in (self._withdrawn, self._joined, self.kept):
            names.discard(name)
        for known in (self.expected, self.unavailable, self.digests, self.former, self.engines):
            known.pop(name, None)
        for number in self._old_numbers.pop(name, ()):
            self.by_number.pop(number, None)
        for announced in self._announced(parted(name)[0]):
            announced.forget(name)
        model = self.by_name.pop(name, None)
        if model is not None:
            self.by_number.pop(model.number, None)
        return model

    @property
    def withdrawn(self) -> list[str]:
        """Return the names that were removed from the configuration and are remembered."""
        return sorted(self._withdrawn)

    def _next(
        self,
        live: ServedModel,
        signature: ModelSignature,
        settings: ModelSettings,
        chain: Chain | None = None,
        parts: Mapping[str, ServedModel] | None = None,
    ) -> ServedModel:
        """Return another generation of a model, without its number."""
        known = [one.profile.generation for one in self.retiring.values() if one.name == live.name]
        generation = max([live.profile.generation, *known]) + 1
        return ServedModel(-1, live.name, signature, settings, chain, generation=generation, parts=parts)

    def change_versions(self, versions: Mapping[str, Versions]) -> list[ServedModel]:
        """Draw requests by these shares from now on. Those that were admitted keep their versions.

        Returns the names that have versions now and had none.
        """
        self.versions = dict(versions)
        for name in self.by_bare_name.keys() - self.versions.keys():
            bare = self.by_bare_name.pop(name)
            model = self.by_name.get(name)
            if model is not None and model.description == bare.description:
                self.by_number[bare.number] = model
        return self._announce()

    def _announce(self) -> list[ServedModel]:
        """Announce the names whose version with the rest has come. Clients that know another signature keep its number."""
        new = []
        for name, versions in self.versions.items():
            rest = self.by_name.get(versioned(name, versions.rest))
            known = self.by_bare_name.get(name)
            for announced in self._announced(name):
                announced.change(versions)
                self._fit(announced)
            if rest is None or (
                known is not None and known.announced is not None and known.announced.fit_of(rest.name)
            ):
                continue
            signature = replace(rest.signature, name=name)
            bare = ServedModel(-1, name, signature, rest.settings, rest.chain)
            before = self.by_name.get(name)  # it had no versions until now
            if known is None and before is not None and before.description == bare.description:
                bare.number = before.number
                self.by_number[bare.number] = bare
            else:
                bare.number = next(self._numbers)
                self.by_number[bare.number] = bare
                if known is not None and known.announced is not None:
                    self._keep_number(known)
                    known.announced.replaced()
                    self._fit(known.announced)
            bare.announced = Announced(bare.number, versions, signature, idempotent=rest.profile.idempotent)
            self._fit(bare.announced)
            self.by_bare_name[name] = bare
            new.append(bare)
        return new

    def _announced(self, name: str) -> list[Announced]:
        """Return the signatures of a name with versions: what is told to clients now, and what some still know."""
        found = [model.announced for model in self.by_number.values() if model.name == name]
        return [announced for announced in found if announced is not None]

    def _fit(self, announced: Announced) -> None:
        """Let a name know the signatures of its versions that have come."""
        for name in announced.versions.models:
            if (model := self.by_name.get(name)) is not None:
                announced.fit(name, model.signature, idempotent=model.profile.idempotent)

    def change_chains(self, chains: Iterable[ChainSpec]) -> list[ServedModel]:
        """Serve these chains, and no others, from now on; requests that have begun run on as they were.

        Returns the chains that are new, or have another signature.
        """
        before, self.chains = self.chains, {chain.name: chain for chain in chains}
        for name in before.keys() | self.chains.keys():
            self.unavailable.pop(name, None)
        for name in before.keys() - self.chains.keys():
            self.unavailable[name] = f"chain {name!r} was removed from the configuration"
        return [*self._complete_chains(), *self._announce()]

    def _complete_chains(self) -> list[ServedModel]:
        """Serve the chains whose models have all come. One that does not fit them is unavailable."""
        complete = []
        for name, spec in self.chains.items():
            known = self.by_name.get(name)
            if name in self.unavailable:
                continue
            found = {stage.model: self.find(stage.model) for stage in spec.stages}
            models = {name_of: model for name_of, model in found.items() if model is not None}
            if models.keys() != found.keys() or (known is not None and _is_made_of(known, spec, models)):
                continue
            signatures = {model.name: model.signature for model in models.values()}
            try:
                chain = plan_chain(spec, signatures)
            except ChainRefused as error:
                log.error("chain does not fit its models", chain=name, why=str(error))
                self.unavailable[name] = str(error)
                continue
            idempotent = all(model.profile.idempotent for model in models.values())
            settings = _by_default(name).model_copy(update={"idempotent": idempotent})
            if known is None:
                known = ServedModel(-1, name, chain.signature, settings, chain, parts=models)
                self._enter(known)
                complete.append(known)
            elif known.signature == chain.signature and known.profile.idempotent == idempotent:
                known.chain, known.parts = chain, models
            else:
                complete += self.promote(self._next(known, chain.signature, settings, chain, models))
        return complete

    def _offered(self, name: str, signature: ModelSignature, once: bool) -> ServedModel:
        """Return the model that a worker offers: a known generation, or a new one without its number."""
        if name != signature.name:
            raise ConfigurationError([f"model {name!r} calls itself {signature.name!r}"])
        if max(len(signature.inputs), len(signature.outputs)) > MAX_TENSORS:
            raise ConfigurationError([f"model {name!r} has more than {MAX_TENSORS} inputs or outputs"])
        shapes = [port.shape for port in signature.inputs] + [port.shape for port in signature.outputs]
        if any(shape.rank > MAX_RANK for shape in shapes):
            raise ConfigurationError([f"model {name!r} has a tensor of more than {MAX_RANK} dimensions"])
        settings = self.expected.get(name) or _by_default(name)
        if once:
            settings = settings.model_copy(update={"idempotent": False})
        live = self.by_name.get(name)
        if live is None:
            if not is_name(name):  # the worker's own, which no file could state
                raise ConfigurationError([f"no model can be called {name!r}"])
            return ServedModel(-1, name, signature, settings)
        description, changes = signature.to_dict(), name in self.changing
        if live.description == description and not (changes and _differ(live.settings, settings)):
            if once and live.profile.idempotent:
                text = (
                    f"requests of model {name!r} may run twice here, and this worker forbids it "
                    '(set "idempotent: false" in the server\'s file, and reload it)'
                )
                raise ConfigurationError([text])
            return live
        for old in self.retiring.values():
            if old.name == name and old.description == description and not changes:
                return old  # it has lost its connection
        if not changes:
            ours, theirs = _difference(live.signature, signature)
            text = (
                f"model {name!r} is served with another signature: {ours!r} here, {theirs!r} there "
                "(reload the server with the file of this worker, or give the model another name)"
            )
            raise ConfigurationError([text])
        return self._next(live, signature, settings)


def _is_made_of(known: ServedModel, spec: ChainSpec, models: Mapping[str, ServedModel]) -> bool:
    """Tell whether a chain has these stages, over models with these signatures."""
    return known.chain is not None and known.chain.spec == spec and all(
        name in known.parts and known.parts[name].number == model.number for name, model in models.items()
    )  # fmt: skip


def _differ(before: ModelSettings, now: ModelSettings) -> bool:
    """Tell whether two settings of a model differ in more than the place of its file and its share of requests."""
    unread = {"path", *ROUTING}
    return before.model_dump(exclude=unread) != now.model_dump(exclude=unread)


def _is_batched_otherwise(before: ModelSettings, now: ModelSettings) -> bool:
    """Tell whether two settings differ in keys that only the server reads, and in no others."""
    return _differ(before, now) and not _differ(for_a_process(before), for_a_process(now))
