"""The policy of text-embeddings-inference as a function of this process: texts in order of arrival, cut by a token budget.

A batch takes texts in the order of their calls while its rows, padded to its longest, have at most so many tokens. Each
thread has a request of the model, so that both cores work; nothing is paid for HTTP and for processes. The tokens are made
in the caller's thread. https://github.com/huggingface/text-embeddings-inference, core/src/queue.rs: `max_batch_tokens` is
16,384 if nothing else is said.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

DEFAULT_TOKENS = 16_384
Ids: TypeAlias = list[int]
Vector: TypeAlias = NDArray[np.float32]


class TokenBudget:
    """A model and its queue; `embed` may be called by many threads."""

    def __init__(self, model: Path, tokenizer: Tokenizer, *, tokens: int, threads: int) -> None:
        import openvino as ov

        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self._compiled = ov.Core().compile_model(model, "CPU", properties)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._queue: deque[tuple[Ids, Future[Vector]]] = deque()
        self._arrived = threading.Condition()
        self._ended = False
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; nothing may be queued."""
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join()

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Vectors of the texts of one call."""
        futures: list[Future[Vector]] = [Future() for _ in texts]
        encoded = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        with self._arrived:
            self._queue.extend(zip(encoded, futures, strict=True))
            self._arrived.notify()
        return [future.result() for future in futures]

    def _work(self) -> None:
        request = self._compiled.create_infer_request()
        while batch := self._next():
            ids = [each for each, _ in batch]
            width = max(map(len, ids))
            tokens, mask = np.zeros((2, len(ids), width), np.int64)
            for row, each in enumerate(ids):
                tokens[row, : len(each)] = each
                mask[row, : len(each)] = 1
            vectors = request.infer([tokens, mask], share_inputs=True)[0]
            for (_, future), vector in zip(batch, vectors, strict=True):
                future.set_result(vector.copy())

    def _next(self) -> list[tuple[Ids, Future[Vector]]]:
        """Take a batch from the queue; none once it is closed."""
        batch: list[tuple[Ids, Future[Vector]]] = []
        longest = 0
        with self._arrived:
            while not self._queue and not self._ended:
                self._arrived.wait()
            while self._queue:
                longest = max(longest, len(self._queue[0][0]))
                if batch and longest * (len(batch) + 1) > self._tokens:
                    break
                batch.append(self._queue.popleft())
            if self._queue:
                self._arrived.notify()
        return batch
