"""The PyTorch engine: programs of `torch.export` with dynamic dimensions, on CPU, CUDA and XLA devices.

This folder is the only code that imports `torch` and `torch_xla`. The way of a model: `compiling` (file to exported
program, ports, placement), `devices` (where the program runs; calls, and arrays as tensors without a copy).
"""

from shapestream_engine.backends.torch.compiling import TorchModel, compile_spec
from shapestream_engine.backends.torch.devices import TorchRequest

__all__ = ["TorchModel", "TorchRequest", "compile_spec"]
