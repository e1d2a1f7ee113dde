"""A model whose batches wait until the test opens a gate, and requests to it in threads of their own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from tests.e2e.conftest import PATIENCE_S

import shapestream
from shapestream import blocking

GATED = """\
    models:
      - name: gated
        function: gated:double_when_open
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        batching: {max_batch: 8, hang_after_s: off}   # at the gate it is waited as long as it takes
        trust: true   # a proof would wait there,
        calibration_s: 0   # and so would measuring
"""


def rows(value: float, *, n: int = 3) -> dict[str, Any]:
    """One row of `n` equal numbers."""
    return {"x": np.full((1, n), value, np.float32)}


class Asking:
    """Requests in threads of their own, each with its answer or error as a future."""

    def __init__(self, client: blocking.Client, model: str) -> None:
        self._client = client
        self._model = model
        self._pool = ThreadPoolExecutor(32)

    def ask(self, value: float, **options: Any) -> Future[shapestream.Result]:
        """One request."""
        return self._pool.submit(self._client.infer, self._model, rows(value), **options)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Does not wait for threads that a broken server would hold."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def answer(future: Future[shapestream.Result]) -> list[list[float]]:
    """The output of a request, within reason."""
    result: list[list[float]] = future.result(PATIENCE_S)["y"].tolist()
    return result
