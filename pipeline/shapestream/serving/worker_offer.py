"""What a worker offers in its greeting, read and checked.

A greeting is from a peer that is half-trusted: it is bounded before it is read, and read in slices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shapestream.slices import Slices
from shapestream.wire.messages import WorkerHello
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.machine import MAX_SLOTS
from shapestream_engine.probing.tolerances import OutputTolerance
from shapestream_engine.signature import ModelSignature

# Clients are told the name with every result, and people read it in logs.
MAX_NAME = 200
# Models of one worker, and the same times its slots: for each pair the scheduler takes 2 us when the worker joins.
MOST_OFFERED = 256
MOST_PAIRS = 2048
# Points of a table of costs: the most that a calibration measures, where only certain sizes are allowed. They take the
# scheduler 9 ms when they are told.
MOST_COST_POINTS = 1024

_DIGEST = re.compile("[0-9a-f]{64}")


class GreetingRefused(Exception):
    """A worker cannot be welcomed; the text says why, about "it"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A worker's greeting, as it was read and checked."""

    name: str
    pid: int
    slots: int
    models: Mapping[str, ModelSignature]
    costs: Mapping[str, CostTable] = field(default_factory=dict)
    """Measured costs of calls, of some of the models."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the files that models were read from, of some of them."""
    tolerances: Mapping[str, Mapping[str, OutputTolerance]] = field(default_factory=dict)
    """How far two equal results may lie apart, by model and output."""


def read_offer(hello: WorkerHello) -> Slices[Offer]:
    """Read what a worker offers, a model per slice.

    Raises GreetingRefused for what is no signature, or no table of costs of a model that it serves.
    """
    models, costs = {}, {}
    try:
        for name, plain in hello.models.items():
            models[name] = ModelSignature.from_dict(plain)
            yield
        for name, plain in hello.costs.items():
            costs[name] = CostTable.from_dict(plain)
            yield
        tolerances = read_tolerances(hello.tolerances, models)
    except EngineError as error:
        raise GreetingRefused(str(error)) from None
    for name, table in costs.items():
        if name not in models or table.dimensions != models[name].dimensions:
            raise GreetingRefused(f"its costs of {name!r} are not those of a model that it serves")
        if len(table.points) > MOST_COST_POINTS:
            raise GreetingRefused(f"its costs of {name!r} have more than {MOST_COST_POINTS} points")
    for name, digest in hello.digests.items():
        if name not in models or not _DIGEST.fullmatch(digest):
            raise GreetingRefused(f"its digest of {name!r} is not that of a model that it serves")
    return Offer(
        name=hello.worker,
        pid=hello.pid,
        slots=hello.slots,
        models=models,
        costs=costs,
        digests=hello.digests,
        tolerances=tolerances,
    )


def read_tolerances(
    plain: Mapping[str, Mapping[str, Any]], models: Mapping[str, ModelSignature]
) -> dict[str, dict[str, OutputTolerance]]:
    """Return the tolerances by model and output; raises `EngineError` for what is none of an output of these models."""
    found: dict[str, dict[str, OutputTolerance]] = {}
    for model, outputs in plain.items():
        ranks = {port.name: port.shape.rank for port in models[model].outputs} if model in models else {}
        found[model] = {name: OutputTolerance.from_dict(one) for name, one in outputs.items()}
        for name, one in found[model].items():
            if any(not 0 <= axis < ranks.get(name, 0) for axis, _ in one.spreads) or name not in ranks:
                raise EngineError(
                    f"its tolerance of {model!r}, {name!r} is not that of an output that it serves"
                )
    return found


def check_form(hello: WorkerHello) -> None:
    """Raise GreetingRefused for a name that cannot be shown, and for a number of slots that cannot be."""
    if len(hello.worker) > MAX_NAME or not hello.worker.isprintable():
        raise GreetingRefused(f"a worker's name is printable, of at most {MAX_NAME} characters")
    if not 1 <= hello.slots <= MAX_SLOTS:
        raise GreetingRefused(f"it has {hello.slots} slots; 1 to {MAX_SLOTS} it may have")


def check_number(hello: WorkerHello) -> None:
    """Raise GreetingRefused for more models than the event loop has time for."""
    number = max(len(hello.models), len(hello.costs))
    if number > MOST_OFFERED:
        raise GreetingRefused(f"it has {number} models; {MOST_OFFERED} it may have at most")
    if number * hello.slots > MOST_PAIRS:
        text = f"it has {number} models in {hello.slots} slots; models x slots may be {MOST_PAIRS} at most"
        raise GreetingRefused(text)
