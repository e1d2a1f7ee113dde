"""The reusable inference requests of one model: as many as calls may run at a time, made once."""

from __future__ import annotations

from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.batching.pieces import PieceCutter
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.memo import Memo


class RequestPool:
    """Lends each request to one borrower at a time and never waits.

    All requests, and the memory that they reserve, are made at once. The one given back last is lent next, since its
    tensors are the likeliest to be in a cache. `try_lease` and `give_back` may be called from any thread.
    """

    def __init__(self, model: CompiledModel, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least one request, not {size}")
        self.signature = model.signature
        self.resolve = Memo(model.signature.resolve)
        """`ModelSignature.resolve`; one look-up for a layout that was seen before."""
        self.assembly = Assembly(model.signature)
        self.planner = CallPlanner(model.signature)
        self.cutter = PieceCutter(model.signature)
        self.prepared = model.prepared
        """The models for single shapes, which lend the requests of such calls; None where there are none."""
        takes_any = self.prepared is None or not model.signature.strategy.sizes
        wanted = size if takes_any else 0
        self._all = tuple(model.create_infer_request() for _ in range(wanted))
        self._free = list(self._all)

    def try_lease(self) -> InferRequest | None:
        """A free request, which is the caller's until it is given back; None if all are out."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, request: InferRequest) -> None:
        """End the lease: the caller must not use the request's tensors any more. Raises `ValueError` if it was not lent."""
        if request in self._free or request not in self._all:
            raise ValueError("this request was not lent by this pool")
        self._free.append(request)

    @property
    def leased(self) -> int:
        """Requests that are lent at present."""
        return len(self._all) - len(self._free)

    @property
    def reallocations(self) -> int:
        """Reallocations of the input tensors of all requests, since the pool was made."""
        return sum(request.reallocations for request in self._all)

    def __repr__(self) -> str:
        return f"{self.leased} leased, {len(self._free)} free"
