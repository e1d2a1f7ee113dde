"""The model as it will be served: batches through a slot, by the strategy, on models prepared for their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.errors import InferenceError
from shapestream_engine.model import CompiledModel
from shapestream_engine.probing.bench import Announce, Sample, arrays_of
from shapestream_engine.probing.values import Array
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Slot

__all__ = ["ServedRunner", "Service"]


class Service:
    """One slot with one model."""

    def __init__(self, model: CompiledModel, announce: Announce) -> None:
        self._signature = model.signature
        self._announce = announce
        self._reports: SimpleQueue[BatchReport] = SimpleQueue()
        self._slot = Slot("probe", {self._signature.name: RequestPool(model, 1)}, self._reports.put)

    def run(self, members: Sequence[Sample], phase: str, words: str) -> list[list[Array]]:
        """The results of each member, per output; raises `InferenceError` for what a slot reports."""
        self._announce(phase, words)
        sizes = merge_sizes(self._signature, [member.shape.rounded for member in members])
        self._slot.start(
            Batch(
                batch=0,
                model=self._signature.name,
                sizes=sizes,
                members=tuple(member.tensors for member in members),
                shapes=tuple(member.shape for member in members),
            )
        )
        report = self._reports.get()
        if report.outputs is None:
            raise InferenceError(report.message)
        return [arrays_of(result) for result in report.outputs if result is not None]

    def close(self) -> None:
        """Ends the slot's thread."""
        self._slot.close()


class ServedRunner:
    """Runs requests alone as they are served: what fills such a call up is the request itself, again and again."""

    def __init__(self, service: Service, signature: ModelSignature) -> None:
        self.signature = signature
        self.phase = ""
        self._service = service

    def run(self, sizes: tuple[int, ...], members: Sequence[Sample], words: str) -> list[list[Array]]:
        """The results of each member, per output; the service chooses the sizes."""
        return self._service.run(members, self.phase, words)
