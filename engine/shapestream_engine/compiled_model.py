"""Compiled models: the interface that every backend keeps, and the models that are prepared for single shapes.

A device runs a static shape faster than a dynamic one, or runs nothing else; preparing takes seconds, and memory. So
prepared models are made when they are first needed, and those unused for the longest time make room for new ones.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from shapestream_engine.infer_request import InferRequest
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature

PreparedSizes: TypeAlias = tuple[int | None, ...]
"""A size per dimension, or None for one of which any size is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLimits:
    """Bounds on the prepared models that are kept at a time. One that runs is never dropped."""

    max_prepared: int = 64
    max_prepared_bytes: int | None = None
    """Bytes of their weights and inputs, at most: the part of their memory that an engine knows. None: any."""
    warm_up: bool = False
    """Prepare as many as are kept before the first request comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparations:
    """Preparations of a device so far, where it prepares itself for each shape."""

    count: int
    """Shapes that it met for the first time, and compiled or built something for."""
    hits: int
    """Calls that found everything prepared."""


class CompiledModel(ABC):
    """A model that is ready to run, from any number of requests at a time."""

    prepares: ClassVar[bool] = False
    """True if the engine gains by a model of its own for each allowed shape; see `prepare`."""

    def __init__(self, signature: ModelSignature, properties: Mapping[str, Any]) -> None:
        self.signature = signature
        self.properties: Mapping[str, Any] = dict(properties)
        """The engine's properties in effect, defaults included, as plain data for a log."""
        self.prepared: PreparedModels | None = None
        """The models for single shapes, where the strategy asks for some and the engine makes them."""
        self.digest: str | None = None
        """The sha256 of the files that it was read from, if its caller computed one; None for a function."""
        self.states: tuple[str, ...] = ()
        """Names of what the model would keep from call to call. Each call begins with their initial values."""
        self.tolerances: Mapping[str, Mapping[str, Any]] = {}
        """By output, `OutputTolerance.to_dict`, as its proof found them; empty: nothing may be compared."""

    @property
    def inputs(self) -> tuple[InputPort, ...]:
        """Inputs in the order of their ports, with `name`, `element_type`, `shape` and `partial_shape`."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        """Outputs in the order of their ports, with the same attributes."""
        return self.signature.outputs

    @property
    def nbytes(self) -> int:
        """Memory that it takes, as far as the engine tells; 0 where it does not."""
        return 0

    def prepare(self, sizes: PreparedSizes) -> CompiledModel:
        """A model for calls of these sizes alone; whose `prepares` is false has none, and runs all shapes itself."""
        raise NotImplementedError(f"{self!r} prepares nothing for {sizes}")

    @property
    def preparations(self) -> Preparations | None:
        """Preparations of the device for new shapes; None where the engine does not count them, or makes none."""
        return None

    @abstractmethod
    def create_infer_request(self) -> InferRequest:
        """A request with tensors of its own; raises `is_closed()` after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the device's resources. Requests that were made of it must not be used afterwards."""

    def is_closed(self) -> RuntimeError:
        """Make the error of a closed model that is asked for a request."""
        return RuntimeError(f"{self!r} is closed and makes no requests; compile it anew")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.signature.name!r})"


@dataclass(slots=True)
class _CacheEntry:
    model: CompiledModel
    free: list[InferRequest] = field(default_factory=list)
    """Requests that are not lent; the one used last is lent next."""
    leased: int = 0


class PreparedModels:
    """Lends requests of models that are prepared for the sizes asked for. Used from any thread.

    Two threads that need the same new shape prepare it once; while one is prepared, others go on running.
    """

    def __init__(self, prepare: Callable[[PreparedSizes], CompiledModel], limits: PreparedLimits) -> None:
        """`prepare` makes a model; whatever it raises is raised to whom it was made for."""
        if limits.max_prepared < 1:
            raise ValueError(f"at least one prepared model is kept, not {limits.max_prepared}")
        self._prepare = prepare
        self._limits = limits
        # Guards what follows, and wakes the threads that wait for a model that another one prepares.
        self._changed = threading.Condition()
        self._entries: OrderedDict[PreparedSizes, _CacheEntry] = OrderedDict()
        """Prepared models by sizes; those used last stand last."""
        self._in_preparation: set[PreparedSizes] = set()
        self.preparations = 0
        """Models prepared so far."""
        self.hits = 0
        """Leases that found theirs prepared."""

    @property
    def nbytes(self) -> int:
        """Bytes of all models that are kept."""
        return sum(entry.model.nbytes for entry in self._entries.values())

    def lease(self, sizes: PreparedSizes) -> tuple[InferRequest, bool]:
        """A request of the model for these sizes, and whether it had to be prepared. To be given back."""
        entry, new = self._entry(sizes)
        try:
            return entry.free.pop(), new
        except IndexError:
            pass
        request = None
        try:
            request = entry.model.create_infer_request()
        finally:
            if request is None:
                self._return(entry)
        return request, new

    def give_back(self, sizes: PreparedSizes, request: InferRequest) -> None:
        """End the lease: the caller must not use the request's tensors any more."""
        entry = self._entries[sizes]  # what is lent is never dropped
        entry.free.append(request)
        self._return(entry)

    def warm_up(self, shapes: Iterable[PreparedSizes]) -> None:
        """Prepares the first of these, as many as are kept."""
        for number, sizes in enumerate(shapes):
            if number == self._limits.max_prepared:
                return
            self.give_back(sizes, self.lease(sizes)[0])

    def close(self) -> None:
        """Let go of all models. None of their requests may be used afterwards."""
        with self._changed:
            for entry in self._entries.values():
                entry.model.close()
            self._entries.clear()

    def _entry(self, sizes: PreparedSizes) -> tuple[_CacheEntry, bool]:
        with self._changed:
            while sizes in self._in_preparation:
                self._changed.wait()
            entry = self._entries.get(sizes)
            if entry is not None:
                self._entries.move_to_end(sizes)
                entry.leased += 1
                self.hits += 1
                return entry, False
            self._in_preparation.add(sizes)
            self._make_room(self._limits.max_prepared - 1)  # before the new one takes its memory
        try:
            entry = _CacheEntry(self._prepare(sizes), leased=1)
        finally:
            with self._changed:
                self._in_preparation.discard(sizes)
                self._changed.notify_all()
                if entry is not None:
                    self._entries[sizes] = entry
                    self.preparations += 1
                    self._make_room(self._limits.max_prepared)
        return entry, True

    def _return(self, entry: _CacheEntry) -> None:
        with self._changed:
            entry.leased -= 1
            self._make_room(self._limits.max_prepared)

    def _make_room(self, count: int) -> None:
        """Drop the models used least recently that are not lent, until the limits hold or none is left to drop."""
        most = self._limits.max_prepared_bytes
        idle = [sizes for sizes, entry in self._entries.items() if not entry.leased]
        for sizes in idle:
            # A single one is kept, however large: it would be prepared again for every call.
            too_large = most is not None and len(self._entries) > 1 and self.nbytes > most
            if len(self._entries) <= count and not too_large:
                return
            self._entries.pop(sizes).model.close()

    def __repr__(self) -> str:
        leased = sum(entry.leased for entry in self._entries.values())
        return f"{len(self._entries)} prepared, {leased} leased"
