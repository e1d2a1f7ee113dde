"""What a worker says of itself when it greets, read as strictly as anything that comes from outside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shapestream.wire.messages import WorkerHello
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.signature import ModelSignature

__all__ = ["GreetingRefused", "Offer", "check_form", "read_offer"]

_DIGEST = re.compile("[0-9a-f]{64}")
# Slots of one worker, each a thread of it. So many join within 10 ms of the server's loop.
MAX_SLOTS = 256
# Clients are told the name with every result, and people read it in logs.
MAX_NAME = 200


class GreetingRefused(Exception):
    """A worker cannot be welcomed; the text says why, about "it"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a worker can do."""

    models: Mapping[str, ModelSignature]
    costs: Mapping[str, CostTable]
    """What it has measured of its models' calls; of some of them."""
    digests: Mapping[str, str]
    """Of the files that it has read its models from; of some of them."""


def check_form(hello: WorkerHello) -> None:
    """Raises GreetingRefused for a name that cannot be shown, and for a number of slots that cannot be."""
    if len(hello.worker) > MAX_NAME or not hello.worker.isprintable():
        raise GreetingRefused(f"a worker's name is printable, of at most {MAX_NAME} characters")
    if not 1 <= hello.slots <= MAX_SLOTS:
        raise GreetingRefused(f"it has {hello.slots} slots; 1 to {MAX_SLOTS} it may have")


def read_offer(hello: WorkerHello) -> Offer:
    """Raises GreetingRefused for what is no signature, or no table of costs of a model that it serves."""
    try:
        models = {name: ModelSignature.from_dict(plain) for name, plain in hello.models.items()}
        costs = {name: CostTable.from_dict(plain) for name, plain in hello.costs.items()}
    except EngineError as error:
        raise GreetingRefused(str(error)) from None
    for name, table in costs.items():
        if name not in models or table.dimensions != models[name].dimensions:
            raise GreetingRefused(f"its costs of {name!r} are not those of a model that it serves")
    for name, digest in hello.digests.items():
        if name not in models or not _DIGEST.fullmatch(digest):
            raise GreetingRefused(f"its digest of {name!r} is not that of a model that it serves")
    return Offer(models=models, costs=costs, digests=hello.digests)
