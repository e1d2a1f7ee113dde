"""The pages about the server and its models: signatures, metadata, model configurations, statistics and the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import inf
from typing import Any

import trio

from shapestream.client.async_face import Client
from shapestream.errors import DeadlineExceeded, Forbidden, InvalidRequest
from shapestream.gateway.errors import UnknownModel
from shapestream.gateway.infer_tensors import DATATYPES, config_datatype
from shapestream.gateway.json_text import write_json
from shapestream.slices import LongSteps, Slices
from shapestream.versions import ONLY, parted, versioned
from shapestream.web.messages import Buffer, HttpResponse
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import BATCH
from shapestream_engine.signature import ModelSignature

PAGE_S = 10.0
"""Seconds that the server may take to answer what a page needs."""
FRESH_S = 0.1
"""Seconds for which an answer of the server about itself serves all callers. So nobody makes it count for each request."""
READY_S = 1.0
"""Seconds after which a server, or a model, that has not answered is not ready. Probes commonly wait no longer."""
PLATFORM = "shapestream"
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "statistics",
)
MOST_ROWS = 2**31 - 1
"""`max_batch_size` of a model that takes any number of rows. Its field is of 32 bits."""


def asked_for(model: str, version: str) -> str:
    """Return the name by which the server knows a version of a model. Of an empty one the server draws one."""
    return versioned(model, version) if version else model


def bare(name: str) -> str:
    """Return a model's name without its version, as the protocol has them apart."""
    return parted(name)[0]


def models_of(name: str, statistics: Mapping[str, Any]) -> list[str]:
    """Return the models that a name stands for: all versions of it, the one that it names, or itself."""
    versions: Mapping[str, Any] = statistics.get("versions", {})
    if name in versions:
        return [versioned(name, version) for version in versions[name]]
    base, version = parted(name)
    return [base] if version == ONLY and base not in versions else [name]


def versions_of(name: str, statistics: Mapping[str, Any]) -> list[str]:
    """Return the versions of a model."""
    return [*statistics.get("versions", {}).get(bare(name), [ONLY])]


def server_metadata() -> dict[str, Any]:
    """Return the name and version of the server, and the protocol's extensions that it has."""
    try:
        own = version("shapestream")
    except PackageNotFoundError:  # run from a source tree that is not installed
        own = "unknown"
    return {"name": PLATFORM, "version": own, "extensions": list(EXTENSIONS)}


def model_metadata(signature: ModelSignature, versions: Sequence[str] = (ONLY,)) -> dict[str, Any]:
    """Return the inputs and outputs of a model. A size of -1 is open."""
    return {
        "name": bare(signature.name),
        "versions": [*versions],
        "platform": PLATFORM,
        "inputs": [_metadata(port) for port in signature.inputs],
        "outputs": [_metadata(port) for port in signature.outputs],
    }


def _metadata(port: InputPort | OutputPort) -> dict[str, Any]:
    return {"name": port.name, "datatype": DATATYPES[port.element_type], "shape": _dims(port)}


def _dims(port: InputPort | OutputPort) -> list[int]:
    data_axis = port.data_axis if isinstance(port, OutputPort) else None
    return [
        -1 if size.is_dynamic or axis == data_axis else size.minimum
        for axis, size in enumerate(port.shape.dimensions)
    ]


def model_config(signature: ModelSignature) -> dict[str, Any]:
    """Return a model's configuration in Triton's form.

    Where the batch is axis 0 of every input and output, `max_batch_size` is above 0, and `dims` lack that axis. Clients
    such as perf_analyzer then send several rows in one request.
    """
    most = max_batch_size(signature)
    from_axis = 1 if most else 0
    return {
        "name": bare(signature.name),
        "platform": "",
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": most,
        "input": [
            {
                **_config(port, from_axis),
                "format": "FORMAT_NONE",
                "allow_ragged_batch": False,
                "optional": port.may_lack,
            }
            for port in signature.inputs
        ],
        "output": [{**_config(port, from_axis), "label_filename": ""} for port in signature.outputs],
        "instance_group": [],
        "default_model_filename": "",
        "parameters": {},
        "model_transaction_policy": {"decoupled": False},
        **({"dynamic_batching": {}} if most else {}),
    }


def _config(port: InputPort | OutputPort, from_axis: int) -> dict[str, Any]:
    return {
        "name": port.name,
        "data_type": config_datatype(port.element_type),
        "dims": _dims(port)[from_axis:],
        "is_shape_tensor": False,
    }


def max_batch_size(signature: ModelSignature) -> int:
    """Return the most rows of one request; 0 where the batch is not axis 0 of every input and output."""
    if not signature.has_batch:
        return 0
    if any(port.axis_names[:1] != (BATCH,) for port in signature.inputs):
        return 0
    if any(port.batch_axis != 0 for port in signature.outputs):
        return 0
    most = signature.bounds[0].maximum
    return MOST_ROWS if most is None else min(most, MOST_ROWS)


# ---------------------------------------------------------------- readiness, by the server's statistics


def why_server_is_not_ready(statistics: Mapping[str, Any]) -> str | None:
    """Return the reasons why the server should get no requests now; None if there is none."""
    return "; ".join(statistics["not_ready"]) or None


def why_not_ready(name: str, statistics: Mapping[str, Any]) -> str | None:
    """Return the reason why a model cannot run now; None where it can."""
    known = name if name in statistics["models"] else models_of(name, statistics)[0]
    if known not in statistics["models"]:
        return f"no model is called {name!r}"
    return "; ".join(statistics["models_not_ready"].get(known, ())) or None


def repository_index(statistics: Mapping[str, Any], *, ready_only: bool) -> list[dict[str, str]]:
    """Return the models by name, each with its state, and the reason where that is not ready."""
    rows = []
    names = [name for name in statistics.get("models", ()) if name not in statistics.get("versions", {})]
    for name in names:
        why = why_not_ready(name, statistics)
        model, version = parted(name)
        row = {"name": model, "version": version or ONLY}
        if why is None:
            rows.append({**row, "state": "READY"})
        elif not ready_only:
            rows.append({**row, "state": "UNAVAILABLE", "reason": why})
    return rows


class ServerCounters:
    """What the server tells of itself, for all callers of a gateway: one question at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._turns = trio.StrictFIFOLock()
        self._told: dict[str, Any] = {}
        self._told_at = -inf
        self._page: HttpResponse | None = None
        """The page of all models, as it was told last."""

    async def read(self, seconds: float) -> dict[str, Any]:
        """Return the counters, `FRESH_S` old at most. Raises `DeadlineExceeded` after so many seconds."""
        with trio.move_on_after(seconds):
            async with self._turns:
                if trio.current_time() - self._told_at > FRESH_S:
                    self._told = await self._client.statistics(deadline=seconds)
                    self._told_at, self._page = trio.current_time(), None
                return self._told
        raise DeadlineExceeded(f"the server has not answered for {seconds:g} s")

    async def read_or_last(self, seconds: float) -> dict[str, Any]:
        """Return the counters, or those that were told last where the server has not answered for so many seconds."""
        with suppress(DeadlineExceeded):
            return await self.read(seconds)
        return self._told

    async def statistics_page(self, steps: LongSteps) -> HttpResponse:
        """Return the page of all models, which is written once for all who ask for it meanwhile."""
        told = await self.read(PAGE_S)
        if self._page is None:
            totals = totals_of(told)
            page = await steps.run_slices(PAGE_BYTES * len(totals), _statistics_page(totals))
            if told is self._told:
                self._page = page
            return page
        return self._page


PAGE_BYTES = 1024
"""Bytes of a model in the page of all, about."""
SLICE_MODELS = 64
"""Models that are written in a turn of the event loop, in 1 ms."""


def _statistics_page(totals: Mapping[str, Any]) -> Slices[HttpResponse]:
    pieces: list[Buffer] = [b'{"model_stats":[']
    names = list(totals)
    for begin in range(0, len(names), SLICE_MODELS):
        if begin:
            pieces.append(b",")
            yield
        rows = [_counts(name, totals[name]) for name in names[begin : begin + SLICE_MODELS]]
        pieces.append(write_json(rows)[1:-1])
    return HttpResponse(body=(*pieces, b"]}"))


def totals_of(statistics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the server's sums by model. Raises `Forbidden` where it tells none."""
    totals: Mapping[str, Any] | None = statistics.get("totals")
    if totals is None:
        raise Forbidden("the server tells its counts to keys with the role gateways or admins only")
    return totals


def model_statistics(model: str | None, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a model, or of all, from the server's sums of the requests of all clients.

    Raises `Forbidden` where the server tells no sums.
    """
    totals = totals_of(statistics)
    names = totals if model is None else models_of(model, statistics)
    return {"model_stats": [_counts(name, totals[name]) for name in names if name in totals]}


def _counts(name: str, totals: Mapping[str, int]) -> dict[str, Any]:
    """Return a model's counts as the statistics extension has them, in nanoseconds.

    As at Triton, each request counts the whole time of its batch.
    """
    done, nothing = totals["results"], {"count": 0, "ns": 0}

    def time_of(part: str) -> dict[str, int]:
        return {"count": done, "ns": totals[part] * 1000}

    return {
        "name": bare(name),
        "version": parted(name)[1] or ONLY,
        "last_inference": totals["last_ms"],
        "inference_count": totals["rows"],
        "execution_count": totals["calls"],
        "inference_stats": {
            "success": time_of("total_us"),
            "fail": {"count": totals["failures"], "ns": 0},  # the server sums no times of failed requests
            "queue": time_of("queue_us"),
            "compute_input": time_of("gather_us"),
            "compute_infer": time_of("run_us"),
            "compute_output": time_of("split_us"),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
        "memory_usage": [],
        "response_stats": {},
    }


async def signature_of(client: Client, model: str, deadline_s: float | None = None) -> ModelSignature:
    """Return a model's signature. Raises `UnknownModel` where the server has none of this name."""
    try:
        return await client.signature(model, deadline=deadline_s)
    except InvalidRequest as error:
        raise UnknownModel(error.message) from error
    except ValueError as error:  # a name that the server cannot be asked for
        raise UnknownModel(str(error)) from error
