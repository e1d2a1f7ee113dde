"""Compiled models: the interface of every backend, and the cache of models that are prepared for single shapes.

A device runs a static shape faster than a dynamic one, or runs nothing else. So a backend may *prepare* a model: compile
it for one shape, which takes seconds and memory. `PreparedModels` owns the prepared models of one model:

- a model is prepared when a call first needs it, or by a warm-up;
- two threads that need the same new shape prepare it once, and other shapes run meanwhile;
- a call leases a request of the model and gives it back;
- above `PreparedLimits`, the models used least recently are closed, but never a leased one.

A single model above the byte limit is kept, because every call would prepare it again.

`RequestPool` has the inference requests of one model: one per call that may run at a time, made once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.calls import CallPlanner, PieceCutter
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.layout import REMEMBERED
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature

PreparedSizes: TypeAlias = tuple[int | None, ...]
"""A size per dimension; None for a dimension that stays dynamic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLimits:
    """Limits of the prepared models that are kept at a time; a leased model is never dropped."""

    max_prepared: int = 64
    warm_up: bool = False
    """True: prepare `max_prepared` models before the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparations:
    """Number of preparations of a device that prepares itself for each shape."""

    count: int
    """New shapes, for which the device compiled or built something."""
    hits: int
    """Calls of shapes that were prepared already."""


class CompiledModel(ABC):
    """A model that is ready to run; any number of requests may use it at a time."""

    prepares: bool = False
    """True if the engine prepares a model for each allowed shape; see `prepare`."""

    def __init__(self, signature: ModelSignature, properties: Mapping[str, Any]) -> None:
        self.signature = signature
        self.properties: Mapping[str, Any] = dict(properties)
        """The effective engine properties, defaults included, as plain data for a log."""
        self.engine = ""
        """The name of its engine; `compile_model` sets it."""
        self.prepared: PreparedModels | None = None
        """The prepared models; None if the strategy or the engine uses none."""
        self.digest: str | None = None
        """The sha256 of its files, if the caller computed one; None for a function."""
        self.states: tuple[str, ...] = ()
        """Names of the states that the model would keep between calls; each call begins with their initial values."""
        self.tolerances: Mapping[str, Mapping[str, Any]] = {}
        """`OutputTolerance.to_dict` by output, from the proof; empty: results may not be compared."""
        self.compile_again: Callable[[int, int], CompiledModel] | None = None
        """Compiles the same file for other slots and threads; `compile_model` sets it. None: the model is of no file."""

    @property
    def inputs(self) -> tuple[InputPort, ...]:
        """The inputs, each with `name`, `element_type`, `shape` and `partial_shape`."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        """The outputs, each with the same attributes as an input."""
        return self.signature.outputs

    @property
    def nbytes(self) -> int:
        """Memory of the model in bytes; 0 if the engine does not report it."""
        return 0

    def prepare(self, sizes: PreparedSizes) -> CompiledModel:
        """Compile the model for calls of these sizes only; raises `NotImplementedError` if `prepares` is false."""
        raise NotImplementedError(f"{self!r} prepares nothing for {sizes}")

    @property
    def preparations(self) -> Preparations | None:
        """Preparations of the device; None if the engine makes none, or does not count them."""
        return None

    @abstractmethod
    def create_infer_request(self) -> InferRequest:
        """Create a request with its own tensors; raises `is_closed()` after `close`.

        request = model.create_infer_request()
        """

    @abstractmethod
    def close(self) -> None:
        """Release the device's resources; requests of the model must not be used afterwards."""

    def is_closed(self) -> RuntimeError:
        """Make the error for a request to a closed model."""
        return RuntimeError(f"{self!r} is closed and makes no requests; compile it anew")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.signature.name!r})"


@dataclass(slots=True)
class _CacheEntry:
    model: CompiledModel
    free: list[InferRequest] = field(default_factory=list)
    """Free requests; the one used last is leased next."""
    leased: int = 0


class PreparedModels:
    """Leases requests of prepared models; thread-safe."""

    def __init__(self, prepare: Callable[[PreparedSizes], CompiledModel], limits: PreparedLimits) -> None:
        """`prepare` compiles a model; its errors reach the caller of `lease`."""
        if limits.max_prepared < 1:
            raise ValueError(f"at least one prepared model is kept, not {limits.max_prepared}")
        self._prepare = prepare
        self._limits = limits
        # Guards the entries, and wakes threads that wait for a preparation.
        self._changed = threading.Condition()
        self._entries: OrderedDict[PreparedSizes, _CacheEntry] = OrderedDict()
        """Prepared models by sizes, least recently used first."""
        self._in_preparation: set[PreparedSizes] = set()
        self.preparations = 0
        """Number of models prepared so far."""
        self.hits = 0
        """Number of leases of models that were prepared already."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of all kept models."""
        return sum(entry.model.nbytes for entry in self._entries.values())

    def lease(self, sizes: PreparedSizes) -> tuple[InferRequest, bool]:
        """Lease a request of the model for these sizes; the flag tells whether the model was prepared now."""
        entry, new = self._entry(sizes)
        try:
            return entry.free.pop(), new
        except IndexError:
            pass
        try:
            return entry.model.create_infer_request(), new
        except BaseException:
            self._return(entry)
            raise

    def give_back(self, sizes: PreparedSizes, request: InferRequest) -> None:
        """End the lease; the caller must not use the request's tensors any more."""
        entry = self._entries[sizes]  # leased models are never dropped
        entry.free.append(request)
        self._return(entry)

    def warm_up(self, shapes: Iterable[PreparedSizes]) -> None:
        """Prepare models for the first `max_prepared` of these shapes."""
        for number, sizes in enumerate(shapes):
            if number == self._limits.max_prepared:
                return
            self.give_back(sizes, self.lease(sizes)[0])

    def close(self) -> None:
        """Close all models; their requests must not be used afterwards."""
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
            self._make_room(self._limits.max_prepared - 1)  # memory is freed before the new model takes some
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
        """Close the least recently used models that are not leased, until `count` are left."""
        idle = [sizes for sizes, entry in self._entries.items() if not entry.leased]
        for sizes in idle[: max(0, len(self._entries) - count)]:
            self._entries.pop(sizes).model.close()

    def __repr__(self) -> str:
        leased = sum(entry.leased for entry in self._entries.values())
        return f"{len(self._entries)} prepared, {leased} leased"


# ---------------------------------------------------------------- the requests of a model


class RequestPool:
    """Leases each request to one caller at a time, without waiting; thread-safe.

    All requests and their reserved memory are made at once. The request given back last is leased next, because its
    tensors are most likely cached.
    """

    __slots__ = (
        "_all",
        "_free",
        "assembly",
        "cutter",
        "planner",
        "prepared",
        "resolve",
        "shape_of_tensors",
        "signature",
    )

    def __init__(self, model: CompiledModel, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least one request, not {size}")
        self.signature = model.signature
        self.resolve = lru_cache(REMEMBERED)(model.signature.resolve)
        """`ModelSignature.resolve`, remembered per layout."""
        has_strings = any(port.is_string for port in model.signature.inputs)
        self.shape_of_tensors = model.signature.shape_of_tensors if has_strings else None
        """`ModelSignature.shape_of_tensors`; None where sizes are those of tensors."""
        self.assembly = Assembly(model.signature)
        self.planner = CallPlanner(model.signature)
        self.cutter = PieceCutter(model.signature)
        self.prepared = model.prepared
        """The prepared models, which lease requests for their shapes; None without prepared models."""
        takes_any = self.prepared is None or not model.signature.strategy.sizes
        wanted = size if takes_any else 0
        self._all = tuple(model.create_infer_request() for _ in range(wanted))
        self._free = list(self._all)

    def try_lease(self) -> InferRequest | None:
        """Lease a free request; None if all are leased."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, request: InferRequest) -> None:
        """End the lease; raises `ValueError` for a request that is not leased."""
        if request in self._free or request not in self._all:
            raise ValueError("this request was not lent by this pool")
        self._free.append(request)

    @property
    def leased(self) -> int:
        """Number of leased requests."""
        return len(self._all) - len(self._free)

    @property
    def reallocations(self) -> int:
        """Number of input tensor reallocations of all requests since the pool was made."""
        return sum(request.reallocations for request in self._all)

    def __repr__(self) -> str:
        return f"{self.leased} leased, {len(self._free)} free"
