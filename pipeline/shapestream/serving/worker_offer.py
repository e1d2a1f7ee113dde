"""A worker's offer: its greeting, read and checked.

Workers are trusted only in part. So the size of a greeting is checked before it is read, and it is read in slices.
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

MAX_NAME = 200
"""Characters of a worker's name, which every result and many log lines carry, and of an engine's."""
MOST_OFFERED = 256
"""Models of one worker."""
MOST_PAIRS = 2048
"""Models of one worker times its slots: the scheduler takes 2 us for each pair when the worker joins."""
MOST_COST_POINTS = 1024
"""Points of a table of costs: the most that a calibration measures. The scheduler takes 9 ms to read them."""

_DIGEST = re.compile("[0-9a-f]{64}")


class GreetingRefused(Exception):
    """A worker cannot be welcomed. The message gives the reason, and calls the worker "it"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A worker's greeting, as it was read and checked."""

    name: str
    pid: int
    slots: int
    models: Mapping[str, ModelSignature]
    costs: Mapping[str, CostTable] = field(default_factory=dict)
    """Measured costs of calls, by model; some models may have none."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of models' files, by model; some models may have none."""
    tolerances: Mapping[str, Mapping[str, OutputTolerance]] = field(default_factory=dict)
    """The largest difference between two results that count as equal, by model and output."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """The engine that computes each model, with its version, in the worker's words; some models may have none."""


def read_offer(hello: WorkerHello) -> Slices[Offer]:
    """Read a worker's offer, a model per slice.

    Raises GreetingRefused for an invalid signature, and for costs, digests or tolerances of a model that it does not serve.
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
            raise GreetingRefused(
                f"it has costs of {name!r}, but serves no such model with the dimensions {table.dimensions}"
            )
        if len(table.points) > MOST_COST_POINTS:
            raise GreetingRefused(
                f"its costs of {name!r} have {len(table.points)} points; at most {MOST_COST_POINTS} are allowed"
            )
    for name, digest in hello.digests.items():
        if name not in models:
            raise GreetingRefused(f"it has a digest of {name!r}, but serves no such model")
        if not _DIGEST.fullmatch(digest):
            raise GreetingRefused(f"its digest of {name!r} is not a sha256 of 64 hexadecimal digits")
    for name, engine in hello.engines.items():
        if name not in models:
            raise GreetingRefused(f"it has an engine of {name!r}, but serves no such model")
        if len(engine) > MAX_NAME or not engine.isprintable():
            raise GreetingRefused(
                f"its engine of {name!r} must be printable and have at most {MAX_NAME} characters"
            )
    return Offer(
        name=hello.worker,
        pid=hello.pid,
        slots=hello.slots,
        models=models,
        costs=costs,
        digests=hello.digests,
        tolerances=tolerances,
        engines=hello.engines,
    )


def read_tolerances(
    plain: Mapping[str, Mapping[str, Any]], models: Mapping[str, ModelSignature]
) -> dict[str, dict[str, OutputTolerance]]:
    """Read tolerances by model and output. Raises EngineError for one that is of no output of these models."""
    found: dict[str, dict[str, OutputTolerance]] = {}
    for model, outputs in plain.items():
        ranks = {port.name: port.shape.rank for port in models[model].outputs} if model in models else {}
        found[model] = {name: OutputTolerance.from_dict(one) for name, one in outputs.items()}
        for name, one in found[model].items():
            if any(not 0 <= axis < ranks.get(name, 0) for axis, _ in one.spreads) or name not in ranks:
                text = f"it has a tolerance of {model!r}, {name!r}, but serves no such output, or none with these axes"
                raise EngineError(text)
    return found


def check_form(hello: WorkerHello) -> None:
    """Raise GreetingRefused for a name that cannot be shown, or an impossible number of slots."""
    if len(hello.worker) > MAX_NAME or not hello.worker.isprintable():
        raise GreetingRefused(f"its name must be printable and have at most {MAX_NAME} characters")
    if not 1 <= hello.slots <= MAX_SLOTS:
        raise GreetingRefused(f"it has {hello.slots} slots; 1 to {MAX_SLOTS} are allowed")


def check_number(hello: WorkerHello) -> None:
    """Raise GreetingRefused for more models than the event loop has time for."""
    number = max(len(hello.models), len(hello.costs))
    if number > MOST_OFFERED:
        raise GreetingRefused(f"it has {number} models; at most {MOST_OFFERED} are allowed")
    if number * hello.slots > MOST_PAIRS:
        text = (
            f"it has {number} models in {hello.slots} slots; at most {MOST_PAIRS} models x slots are allowed"
        )
        raise GreetingRefused(text)
