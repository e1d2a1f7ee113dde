"""Batches and reports as the server makes and gets them, any field given."""

from __future__ import annotations

from typing import Any

from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.layout import RequestShape, Tensors
from shapestream_engine.signature import ModelSignature


def batch_of(signature: ModelSignature, *members: Tensors, **fields: Any) -> BatchInputs:
    """These requests of the model, in slot 0, without deadlines; of one request, the call has its sizes."""
    shapes = tuple(signature.resolve(member.layout) for member in members)
    values: dict[str, Any] = {"batch": 1, "slot": 0, "sizes": shapes[0].sizes, "start_before": None, **fields}
    return BatchInputs(model=signature.name, members=members, shapes=shapes, **values)


def report_of(batch: BatchInputs, **fields: Any) -> BatchReport:
    """What became of it: nothing, in no time, but for the fields that are given."""
    values: dict[str, Any] = {
        "outputs": None,
        "run_s": 0.0,
        "busy_s": 0.0,
        "reallocations": 0,
        "preparations": 0,
        "code": None,
        "message": "",
        **fields,
    }
    return BatchReport(batch=batch.batch, **values)


def record_of(
    session: ClientSession, sequence: int, model: ServedModel, shape: RequestShape, tensors: Tensors
) -> RequestRecord:
    """An admitted request that arrived at 0."""
    return RequestRecord(
        id=1,
        client=session.number,
        model=model.name,
        sizes=shape.rounded,
        nbytes=shape.total_nbytes,
        session=session,
        sequence=sequence,
        served=model,
        shape=shape,
        tensors=tensors,
        arrived=0.0,
    )
