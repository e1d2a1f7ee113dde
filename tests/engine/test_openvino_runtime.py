"""What the process has of OpenVINO for as long as it lives."""

from __future__ import annotations

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


def test_a_version_that_keeps_its_fused_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without the property may still have the wrong kernel, so that no model is read instead of any answered."""

    class Newer(ov.Core):
        def set_property(self, *args: Any) -> None:
            super().set_property("CPU", {"PROPERTY_OF_THE_PAST": "DISABLE"})

    monkeypatch.setattr(runtime.ov, "Core", Newer)
    with pytest.raises(ModelLoadError, match=r"Unsupported property PROPERTY_OF_THE_PAST .* install"):
        runtime.core.__wrapped__()
