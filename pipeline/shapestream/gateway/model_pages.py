"""What the Open Inference Protocol tells about a model: metadata, and Triton's model configuration.

A model has one version, "1". Triton's configuration has a batch axis that stands in no `dims`; a model has one here if
`batch` is the first axis of all its inputs and outputs.
"""

from __future__ import annotations

from typing import Any

from shapestream.gateway.datatypes import DATATYPE_OF
from shapestream.gateway.infer_response import MODEL_VERSION
from shapestream_engine.ports import BATCH, InputPort, OutputPort
from shapestream_engine.signature import ModelSignature

PLATFORM = "shapestream"
MOST_ROWS = 2**31 - 1
"""`max_batch_size` of a model without a bound; Triton's is an int32."""


def metadata_page(signature: ModelSignature) -> dict[str, Any]:
    """Return a model's metadata. A size that is not fixed is -1."""
    return {
        "name": signature.name,
        "versions": [MODEL_VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(port) for port in signature.inputs],
        "outputs": [_tensor(port) for port in signature.outputs],
    }


def _tensor(port: InputPort | OutputPort) -> dict[str, Any]:
    return {"name": port.name, "datatype": DATATYPE_OF[port.element_type], "shape": _sizes(port)}


def _sizes(port: InputPort | OutputPort) -> list[int]:
    return [dimension.minimum if dimension.is_static else -1 for dimension in port.shape.dimensions]


def most_rows(signature: ModelSignature) -> int:
    """Return the largest batch of one request, where `batch` is the first axis of all ports; else 0."""
    ports = (*signature.inputs, *signature.outputs)
    if any(port.shape.names[:1] != (BATCH,) for port in ports):
        return 0
    bounds = [port.shape.dimensions[0].maximum for port in signature.inputs]
    return min([MOST_ROWS if bound is None else min(bound, MOST_ROWS) for bound in bounds])


def config_page(signature: ModelSignature) -> dict[str, Any]:
    """Return a model's configuration in Triton's form."""
    rows = most_rows(signature)

    def tensor(port: InputPort | OutputPort) -> dict[str, Any]:
        datatype = DATATYPE_OF[port.element_type]
        return {
            "name": port.name,
            "data_type": f"TYPE_{datatype}",
            "dims": _sizes(port)[1 if rows else 0 :],
        }

    return {
        "name": signature.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": rows,
        "input": [tensor(port) for port in signature.inputs],
        "output": [tensor(port) for port in signature.outputs],
        "model_transaction_policy": {"decoupled": False},
        **({"dynamic_batching": {}} if rows else {}),
    }
