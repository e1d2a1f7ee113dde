"""The model in this process, without shapestream: batches through OpenVINO's own requests, assembled with NumPy."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from examples import model_file
from examples.embeddings import model
from examples.embeddings.corpus import Ids
from examples.embeddings.weights import load_weights, model_folder

MODEL_FILE = Path(__file__).parents[2] / ".cache" / "minilm.xml"

Minilm: TypeAlias = ov.Model
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sentences that run together, by their places in the trace, each padded to `length` tokens."""

    places: npt.NDArray[np.intp]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How OpenVINO is to use its threads: so many at a time, or as it thinks best for a hint."""

    streams: int = 0
    threads: int = 0
    hint: Literal["", "LATENCY", "THROUGHPUT"] = ""
    fused: bool = True
    """With OpenVINO's fused kernels (`SNIPPETS_MODE`); the product does without, since their answers may be wrong."""

    def properties(self) -> dict[str, Any]:
        """Never pinned: two processes of one thread each would share one core, and comparisons would lie."""
        common: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}
        if not self.fused:
            common["SNIPPETS_MODE"] = "DISABLE"
        if self.hint:
            return common | {"PERFORMANCE_HINT": self.hint}
        return common | {"NUM_STREAMS": str(self.streams), "INFERENCE_NUM_THREADS": self.threads}

    def __str__(self) -> str:
        words = self.hint.lower() or f"{self.streams} x {self.threads // self.streams} threads"
        return words if self.fused else f"{words}, no fused kernels"


Driver: TypeAlias = Literal["threads", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a trace is run in one process."""

    engine: EngineSettings
    driver: Driver = "threads"
    """A thread per request that gathers, waits and copies; or an AsyncInferQueue, whose callbacks copy."""
    requests: int = 2

    def __str__(self) -> str:
        return f"{self.engine}, {self.requests} requests, {self.driver}"


def read_minilm() -> Minilm:
    """Made by the example's own code where it is not there yet."""
    model_file.ensure(MODEL_FILE, model, lambda: model.build(load_weights(model_folder())))
    return _core().read_model(MODEL_FILE)


def _core() -> ov.Core:
    global _CORE  # noqa: PLW0603 - one per process, for life: see docs/architecture.md
    if _CORE is None:
        _CORE = ov.Core()
    return _CORE


_CORE: ov.Core | None = None


def compile_minilm(minilm: Minilm, engine: EngineSettings) -> ov.CompiledModel:
    """For the CPU."""
    return _core().compile_model(minilm, "CPU", engine.properties())


class OneStream:
    """One sentence at a time, and nothing else."""

    def __init__(self, minilm: Minilm) -> None:
        compiled = compile_minilm(minilm, EngineSettings(streams=1, threads=2))
        self._request = compiled.create_infer_request()

    def run(self, ids: Ids) -> Array:
        """The embedding [384] of token ids [seq]."""
        tokens, mask = ids[None], np.ones_like(ids)[None]
        _set_inputs(self._request, tokens, mask)
        self._request.start_async()
        self._request.wait()
        return np.array(self._request.get_output_tensor(0).data[0])


class InProcess:
    """Batches on all streams of one compiled model."""

    def __init__(self, minilm: Minilm, setting: Setting) -> None:
        self.setting = setting
        self.compiled = compile_minilm(minilm, setting.engine)
        self._queue = (
            ov.AsyncInferQueue(self.compiled, setting.requests) if setting.driver == "queue" else None
        )
        self._requests = (
            [] if self._queue else [self.compiled.create_infer_request() for _ in range(setting.requests)]
        )

    def run(
        self,
        batches: Sequence[Batch],
        ids: Sequence[Ids],
        answers: Array,
        ended: Callable[[], None] | None = None,
    ) -> float:
        """Run them in this order, write each row of `answers`, and return the seconds.

        `ended` is called after each batch by the thread that ran it; threads alone do so, not the queue.
        """
        started = time.perf_counter()
        if self._queue is not None:
            self._run_queue(self._queue, batches, ids, answers)
        else:
            self._run_threads(batches, ids, answers, ended)
        return time.perf_counter() - started

    def _run_threads(
        self,
        batches: Sequence[Batch],
        ids: Sequence[Ids],
        answers: Array,
        ended: Callable[[], None] | None,
    ) -> None:
        left = deque(batches)
        failures: list[BaseException] = []

        def work(request: ov.InferRequest) -> None:
            try:
                while left and not failures:
                    try:
                        batch = left.popleft()
                    except IndexError:
                        return
                    arrays = assemble(batch, ids)
                    _set_inputs(request, *arrays)
                    request.start_async()
                    request.wait()
                    answers[batch.places] = request.get_output_tensor(0).data
                    if ended is not None:
                        ended()
            except Exception as error:  # noqa: BLE001 - the thread's edge; raised below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(request,)) for request in self._requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _run_queue(
        self, queue: ov.AsyncInferQueue, batches: Sequence[Batch], ids: Sequence[Ids], answers: Array
    ) -> None:
        def copy(request: ov.InferRequest, batch: Batch) -> None:
            answers[batch.places] = request.get_output_tensor(0).data

        queue.set_callback(copy)
        for batch in batches:
            tokens, mask = assemble(batch, ids)
            queue.start_async({0: tokens, 1: mask}, userdata=batch)
        queue.wait_all()


def assemble(batch: Batch, ids: Sequence[Ids]) -> tuple[Array, Array]:
    """Token ids and mask, [rows, length]."""
    tokens = np.zeros((len(batch.places), batch.length), np.int64)
    mask = np.zeros_like(tokens)
    for row, place in enumerate(batch.places):
        own = ids[place]
        tokens[row, : len(own)] = own
        mask[row, : len(own)] = 1
    return tokens, mask


def _set_inputs(request: ov.InferRequest, tokens: Array, mask: Array) -> None:
    # Nothing is copied, and nothing keeps the arrays alive: the caller has to, until the call has ended.
    request.set_input_tensor(0, ov.Tensor(tokens, shared_memory=True))
    request.set_input_tensor(1, ov.Tensor(mask, shared_memory=True))
