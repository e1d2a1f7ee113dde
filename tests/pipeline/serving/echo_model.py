"""The model that most serving tests serve, its requests, and what an honest worker says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.entries import BatchDone, Execute, RequestEntry, request_of

from shapestream.settings import BatchingSettings, ModelSettings
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SIGNATURE = ModelSignature(
    name="echo",
    inputs=(
        InputPort("x", "f32", NamedShape.parse("batch:1..64, n:1..1000000")),
        InputPort("scale", "f32", NamedShape.parse("batch:1..64")),
    ),
    outputs=(OutputPort("y", "f32", NamedShape.parse("batch, n"), Rows()),),
)
"""Two inputs that share the batch dimension."""


def model_settings(*, idempotent: bool = True, **batching: Any) -> ModelSettings:
    """Settings of a model that is batched like this."""
    return ModelSettings(name="m", idempotent=idempotent, batching=BatchingSettings(**batching))


def echo_tensors(rows: int = 1, n: int = 4, value: float = 1.0) -> Tensors:
    """The inputs of a valid request for `SIGNATURE`."""
    x = np.full((rows, n), value, np.float32)
    scale = np.ones((rows,), np.float32)
    return Tensors(
        layout=((0, "f32", (rows, n)), (1, "f32", (rows,))),
        buffers=(x.tobytes(), scale.tobytes()),
    )


def echoed(tensors: Tensors) -> Tensors:
    """What the echo model answers: its first input."""
    return Tensors(layout=tensors.layout[:1], buffers=tuple(tensors.buffers[:1]))


def request(sequence: int, tensors: Tensors | None = None, **fields: Any) -> RequestEntry:
    """A request for model 0."""
    return request_of(sequence, echo_tensors() if tensors is None else tensors, **fields)


def done(execute: Execute, outputs: tuple[Tensors | None, ...] | None = None, **changes: Any) -> BatchDone:
    """The honest report of a batch, but for the fields that are given."""
    given = tuple(echoed(member) for member in execute.members) if outputs is None else outputs
    fields: dict[str, Any] = {
        "batch": execute.batch,
        "run_s": changes.pop("run_us", 500) * 1e-6,
        "busy_s": changes.pop("busy_us", 600) * 1e-6,
        "reallocations": 1,
        "preparations": 1,
    }
    session = changes.pop("session", execute.session)
    return BatchDone(session=session, report=BatchReport(outputs=given, **(fields | changes)))
