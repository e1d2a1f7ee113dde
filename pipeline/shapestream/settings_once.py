"""What does not go together with `idempotent: false`: settings about sharing calls, and those that copy rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shapestream.settings_raw import Finding, mapping
from shapestream.yaml_source import Location

__all__ = ["once_findings"]

# The values beside `null` that say what holds anyway.
_ALONE = {"max_batch": (1,), "max_delay_ms": (0,), "max_padding_ratio": (), "max_batch_bytes": ()}


def once_findings(location: Location, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Problems of a model, from the raw values of the file, each with the place of the key to remove."""
    if model.get("idempotent") is not False:
        return
    batching, shapes = mapping(model.get("batching")), mapping(model.get("shapes"))
    for key, value in batching.items():
        if key in _ALONE and value is not None and value not in _ALONE[key]:
            message = 'requests of a model with "idempotent: false" run alone (remove this key)'
            yield (*location, "batching", key), message
    for where in _filled_up(batching, shapes):
        message = 'this fills calls up with copies of rows, of which "idempotent: false" allows none (remove this key)'
        yield (*location, *where), message


def _filled_up(batching: Mapping[Any, Any], shapes: Mapping[Any, Any]) -> Iterator[Location]:
    """Settings that make calls of more rows than the requests have."""
    strategy, rows = shapes.get("strategy", "native"), shapes.get("batch")
    sizes = rows if isinstance(rows, list) else [rows]
    # Of a partition into calls some of which have one row nothing is left over.
    if rows is not None and sizes != [1] and not (strategy == "partitioned" and 1 in sizes):
        yield "shapes", "batch"
    invariant = batching.get("batch_invariant")
    if invariant is True or invariant not in (None, False, 1):
        yield "batching", "batch_invariant"
