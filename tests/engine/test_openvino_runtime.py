"""What the process has of OpenVINO for as long as it lives."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import openvino as ov
import pytest

from shapestream_engine import ModelLoadError
from shapestream_engine.backends.openvino import runtime

SCRIPT = """
import faulthandler, gc, signal, threading
import numpy as np
import openvino as ov
from openvino import opset13 as ops
from shapestream_engine import ModelSpec, compile_model

faulthandler.enable()  # signal handlers run on the signal stack, as Python's own do
x = ops.parameter([-1, 16], np.float32, name="x")
product = ops.matmul(x, ops.constant(np.ones((16, 16), np.float32)), False, False)
models = [compile_model(ModelSpec(name="product", model=ov.Model([product], [x])))]

def forget():
    models.clear()
    gc.collect()

thread = threading.Thread(target=forget)
thread.start()
thread.join()
try:
    signal.raise_signal(signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_after_the_last_model_is_gone_is_only_a_signal() -> None:
    """OpenVINO takes a signal stack back that the main thread still has, unless its core stays: Ctrl-C then crashed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (0, "interrupted") == (done.returncode, done.stdout.strip()), done.stderr


KERNELS = """
import os
import numpy as np
import openvino as ov
import psutil
from openvino import opset13 as ops
from shapestream_engine import ModelSpec, compile_model

x = ops.parameter([-1, 3, -1, -1], np.float32, name="x")
features = x
for channels in (3, 16, 16):
    kernel = ops.constant(np.full((16, channels, 3, 3), 0.01, np.float32))
    features = ops.convolution(features, kernel, [1, 1], [1, 1], [1, 1], [1, 1])
model = compile_model(ModelSpec(name="features", model=ov.Model([features], [x])), slots=2, threads=2)
requests = [model.create_infer_request() for _ in range(2)]
grown = []
for request in requests:
    before = psutil.Process().memory_info().rss
    for side in range(16, 516):
        request.infer({"x": np.ones((1, 3, 16 + side % 8, side), np.float32)})
    grown.append(psutil.Process().memory_info().rss - before)
print(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY"), grown[1] / grown[0])
"""


@pytest.mark.parametrize(
    ("said", "in_force", "are_shared"),
    [
        ({}, str(runtime.KERNELS), True),
        ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}, "0", False),
        ({"DNNL_PRIMITIVE_CACHE_CAPACITY": "0"}, "None", False),
    ],
    ids=["of itself", "the user's", "by its old name"],
)
def test_slots_share_what_they_generate_for_new_sizes(
    said: dict[str, str], in_force: str, are_shared: bool
) -> None:
    """A second slot needs little memory for sizes that the first one met, unless the environment says otherwise."""
    environment = {key: value for key, value in os.environ.items() if "PRIMITIVE_CACHE" not in key} | said
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    capacity, share = done.stdout.split()
    assert capacity == in_force
    assert (float(share) < 0.95) is are_shared, share


def test_a_version_that_keeps_its_fused_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without the property may still have the wrong kernel, so that no model is read instead of any answered."""

    class Newer(ov.Core):
        def set_property(self, *args: Any) -> None:
            super().set_property("CPU", {"PROPERTY_OF_THE_PAST": "DISABLE"})

    monkeypatch.setattr(runtime.ov, "Core", Newer)
    with pytest.raises(ModelLoadError, match=r"Unsupported property PROPERTY_OF_THE_PAST .* install"):
        runtime.core.__wrapped__()
