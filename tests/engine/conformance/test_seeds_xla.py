"""The fifth seed's claims, about bounded dynamic shapes, on XLA's CPU device, where torch_xla is installed.

    make test-engines ENGINES="torch-xla"

The numbers are those of tests/engine/seeds.md, which says what each claim is and how it fares.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from shapestream_engine import Dimension, InputSpec, ModelSpec, Preparations, compile_model

on_xla = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")

FOUND = """
import torch, torch_xla
square = torch.arange(25).reshape(5, 5) % 3
places = torch.nonzero(square.to(torch_xla.device()))
print(places.shape, len(places.cpu()) == int((square != 0).sum()))
"""

UNBOUNDED = """
import torch, torch_xla
x = torch.ones(4, 3).to(torch_xla.device())
torch_xla._XLAC._xla_mark_dynamic(x, 0)
try:
    (x + 1).cpu()
except RuntimeError as error:
    print(" ".join(str(error).split()))
"""


def printed(script: str, **environment: str) -> str:
    """What a fresh process prints last: XLA reads its settings once."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PJRT_DEVICE": "CPU", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1]


@on_xla
@pytest.mark.seeds("S004-02", "S004-03", "S004-04", "S004-09")
def test_xla_prints_the_bound_only_under_its_flag() -> None:
    """With it the size is `<=25` until it is fetched; without it the operation runs on the host, and the size is exact."""
    assert "torch.Size([<=25, 2]) True" == printed(FOUND, XLA_EXPERIMENTAL="nonzero:masked_select")
    exact = printed(FOUND, XLA_EXPERIMENTAL="")
    assert "<=" not in exact
    assert exact.endswith("True")


@on_xla
@pytest.mark.seeds("S004-12")
def test_xla_runs_no_unbounded_sizes() -> None:
    """They can be written down, for export, but the device refuses to compile them."""
    assert "Unbounded dynamism is disabled" in printed(UNBOUNDED)


@on_xla
@pytest.mark.seeds("S004-01", "S004-05")
def test_the_engine_knows_xlas_bound_and_gives_the_true_size() -> None:
    """As of a program exported for a square of 5."""
    model = compile_model(ModelSpec(name="m", model=_found(), engine="torch", device="xla"))
    shape = model.signature.outputs[0].partial_shape
    assert Dimension.parse("<=25") == shape[0]
    request = model.create_infer_request()
    for count in (0, 7, 25):
        request.infer([(np.arange(25).reshape(5, 5) < count).astype(np.float32)])
        assert (count, 2) == request.output_tensor().shape


@on_xla
@pytest.mark.seeds("S004-08", "S004-11")
def test_bounded_sizes_save_recompilations_of_a_perceptron() -> None:
    """Random row counts compile once for each that is new; rounded up to a few sizes, once for each of these."""
    random = np.random.default_rng(0)
    rows = [int(count) for count in random.integers(1, 97, 40)]
    compiled = []
    for sizes in (None, (32, 64, 96)):
        model = compile_model(
            ModelSpec(
                name="m",
                model=_perceptron(8 if sizes else 12),
                engine="torch",
                device="xla",
                inputs={"x": InputSpec(shape=f"batch:1..96, {8 if sizes else 12}")},
            )
        )
        request = model.create_infer_request()
        before: Any = model.preparations
        for count in rows:
            size = count if sizes is None else next(size for size in sizes if size >= count)
            request.infer([np.ones((size, 8 if sizes else 12))])
            assert (size, 2) == request.output_tensor().shape
        after: Any = model.preparations
        assert isinstance(after, Preparations)
        compiled.append(after.count - before.count)
    assert [len(set(rows)), 3] == compiled


def _found() -> Any:
    import torch

    class Found(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nonzero(x)

    return torch.export.export(Found(), (torch.ones(5, 5),))


def _perceptron(width: int) -> Any:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    class Perceptron(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    rows = torch.export.Dim("batch", min=1, max=96)
    return torch.export.export(Perceptron().eval(), (torch.ones(4, width),), dynamic_shapes={"x": {0: rows}})
