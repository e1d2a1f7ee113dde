"""Models that cost nothing, or exactly the time that they say and no CPU, and the configurations that serve the former."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

Engine: TypeAlias = Literal["function", "openvino"]

TINY = "tiny"
LARGE = "large"
RANDOM = "random"
TINY_WIDTH = 16
# 1 MiB of float32 in one row.
LARGE_WIDTH = 256 * 1024


def identity(**inputs: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns its one input as `y`."""
    (array,) = inputs.values()
    return {"y": array}


CALL_S = 0.008
ROW_S = 0.004
MOST_ROWS = 8
"""The sleeping model takes `CALL_S` seconds per call and `ROW_S` per row, of `MOST_ROWS` at most: its capacity is known."""


def sleeping(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input and one, after a time for the call and for each of its rows."""
    time.sleep(CALL_S + ROW_S * len(x))
    return x + 1


ONCE_S = 0.001


def sleeping_once(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input, after a millisecond."""
    time.sleep(ONCE_S)
    return x


READ_CALL_S = 0.005
READ_ROW_S = 0.001


def reading(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input, after a shorter time for the call and for each of its rows: a recogniser of crops."""
    time.sleep(READ_CALL_S + READ_ROW_S * len(x))
    return x


VERY_SLOW_S = 0.2


def very_slow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input, after a long time."""
    time.sleep(VERY_SLOW_S)
    return x


def lengths(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The characters of each text."""
    return np.array([*map(len, x.tolist())], np.int64)


def embed(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean of each row's tokens."""
    return np.asarray(ids.mean(axis=1, keepdims=True), np.float32)


GROWN = 1_000_000
"""Elements of a row of what `grow` gives: 4 MB."""


def grow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A long row for each number."""
    return np.broadcast_to(x, (len(x), GROWN)).copy()


def many(x: np.ndarray[Any, Any]) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Return as many small arrays as the input says."""
    return {"items": [np.zeros(1, np.float32)] * int(x[0])}


def write_identity_ir(folder: Path) -> None:
    """Writes `identity.xml`: one OpenVINO operation that cannot be folded away, adding 0."""
    import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry

    # isort: split
    import openvino as ov
    from openvino import opset15 as ops

    x = ops.parameter([-1, -1], np.float32, name="x")
    x.output(0).set_names({"x"})
    y = ops.add(x, ops.constant(np.zeros((1, 1), np.float32)))
    y.output(0).set_names({"y"})
    ov.save_model(ov.Model([y], [x], "identity"), folder / "identity.xml", compress_to_fp16=False)


_SHAPES = {
    TINY: f"batch:1..64, {TINY_WIDTH}",
    LARGE: f"batch:1..4, {LARGE_WIDTH}",
    RANDOM: "batch:1..16, width:1..512",
}
# A megabyte of copying costs as much alone as in company, and leaves the caches warmer alone.
_BATCHING = {LARGE: ", batching: {max_batch: 1}"}


def _model(name: str, engine: Engine) -> str:
    shape = _SHAPES[name]
    source = (
        "engine: function, function: benchmarks.models:identity"
        if engine == "function"
        else "engine: openvino, path: identity.xml"
    )
    return (
        f"  - {{name: {name}, {source}, trust: true{_BATCHING.get(name, '')},\n"
        f"     inputs: {{x: {{shape: '{shape}', element_type: f32}}}},\n"
        f"     outputs: {{y: {{shape: '{shape}', element_type: f32, rule: rows}}}}}}\n"
    )


def write_configuration(
    folder: Path,
    *,
    label: str,
    engine: Engine = "function",
    workers: int | None = None,
    slots: int = 1,
    protected: str | None = None,
    models: Sequence[str] = (TINY, LARGE, RANDOM),
) -> tuple[Path, str]:
    """Writes a server's YAML with these models; returns its path and the address that it listens on.

    `workers` processes of so many slots, or slots in the server's own process where it is None. `protected` is a tcp
    address to listen on besides, for the owner of `keys/client.pub`.
    """
    if engine == "openvino":
        write_identity_ir(folder)
    address = f"ipc://{folder}/{label}.sock"
    described = "".join(_model(name, engine) for name in models)
    names = ", ".join(models)
    placement = (
        "in_process: true\n"
        if workers is None
        else f"workers:\n  - {{count: {workers}, models: [{names}], slots: {slots}}}\n"
    )
    path = folder / f"{label}.yaml"
    listen, security = f'["{address}"]', ""
    if protected is not None:
        listen = f'["{address}", "{protected}"]'
        security = "  security: {key: keys/server.secret, clients: [keys/client.pub]}\n"
    path.write_text(
        f"server:\n  listen: {listen}\n{security}models:\n{described}{placement}logging: {{level: warning}}\n"
    )
    return path, address
