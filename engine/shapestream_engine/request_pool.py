"""The pool of one model's inference requests: one per call that may run at a time, made once."""

from __future__ import annotations

from functools import lru_cache

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.batching.pieces import PieceCutter
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.layout import REMEMBERED


class RequestPool:
    """Leases each request to one caller at a time, without waiting; thread-safe.

    All requests and their reserved memory are made at once. The request given back last is leased next, because its
    tensors are most likely cached.
    """

    def __init__(self, model: CompiledModel, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least one request, not {size}")
        self.signature = model.signature
        self.resolve = lru_cache(REMEMBERED)(model.signature.resolve)
        """`ModelSignature.resolve`, remembered per layout."""
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
