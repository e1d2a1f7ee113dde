"""What an error keeps alive after its caller has handled it: nothing, also before the garbage collector runs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import trio
from tests.pipeline.client.virtual_time import serving

import shapestream
from shapestream.errors import DeadlineExceeded
from shapestream.testing import ScriptedModel, identity_signature

WIDE = ScriptedModel(identity_signature("wide", "batch:1..64, n"))


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """The garbage collector does not run, so only what no reference is left to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def noted(kept: list[weakref.ref[Any]]) -> dict[str, Any]:
    """Inputs of 4 MiB, which the client does not copy, and a note of their array."""
    x = np.zeros((1, 1 << 20), np.float32)
    kept.append(weakref.ref(x))
    return {"x": x}


def test_an_error_that_was_raised_keeps_no_tensors() -> None:
    """The frames of a failed call hold its inputs; they go when the error has been handled."""

    async def main() -> None:
        async with serving(WIDE) as (_, endpoint), shapestream.connect(endpoint.connect) as client:
            await client.signature("wide")
            with without_collector():
                kept: list[weakref.ref[Any]] = []
                with contextlib.suppress(DeadlineExceeded):
                    await client.infer("wide", noted(kept), deadline=0)
                    raise AssertionError("the deadline was over before")
                await trio.lowlevel.checkpoint()
                assert [True] == [note() is None for note in kept]

    trio.run(main)
