"""All strategies by name, and from a mapping such as `{strategy: bucketed, seq: [32, 64]}` to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapestream_engine.batching.bucketed import Bucketed
from shapestream_engine.batching.native import Native
from shapestream_engine.batching.padded import Padded
from shapestream_engine.batching.partitioned import Partitioned
from shapestream_engine.batching.static_shapes import parse_static
from shapestream_engine.batching.strategy import Strategy
from shapestream_engine.errors import SignatureError

__all__ = ["STRATEGIES", "parse_strategy"]

STRATEGIES: Mapping[str, type[Strategy]] = {
    strategy.NAME: strategy for strategy in (Native, Padded, Bucketed, Partitioned)
}


def parse_strategy(value: Mapping[str, Any]) -> Strategy:
    """The strategy that a mapping states; every key is a dimension but `strategy` and what native has besides.

    A size alone is as good as a list of one. Raises `SignatureError` for an unknown strategy and for wrong sizes.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SignatureError(
            f"shapes are a mapping such as {{strategy: bucketed, seq: [32, 64]}}, not {value!r}"
        )
    arguments = dict(value)
    name = arguments.pop("strategy", Native.NAME)
    kind = STRATEGIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SignatureError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}")
    # No size is `True`, so a dimension may be called like a flag.
    fills_rows = arguments.get("fill_rows") is True
    if fills_rows:
        del arguments["fill_rows"]
    # Sizes of a dimension of that name come as a list.
    most_rows = arguments.pop("most_rows") if type(arguments.get("most_rows")) is int else None
    cap = arguments.pop("max_prepared", None) if kind is Native else None
    static = parse_static(arguments.pop("static", ())) if kind is Native else ()
    sizes = {
        dimension: tuple(given) if isinstance(given, list | tuple) else (given,)
        for dimension, given in arguments.items()
    }
    if kind is Native:
        return Native(sizes, cap, static, fills_rows, most_rows=most_rows)
    if fills_rows:
        raise SignatureError(f"strategy {name}: fill_rows is for the strategy native", key=("strategy",))
    return kind(sizes, most_rows=most_rows)
