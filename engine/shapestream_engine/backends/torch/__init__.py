"""The PyTorch engine: programs of `torch.export` with dynamic dimensions, on CPU, CUDA and XLA devices.

This folder is the only place that imports `torch` and `torch_xla`. The way of a model: `reading` (file to exported
program), `ports` (what the program says of its inputs and outputs), `devices` and `xla` (where it runs), `compiling`,
`request` (the calls), `conversion` (arrays to tensors and back, without a copy).
"""

from shapestream_engine.backends.torch.compiling import TorchModel, compile_spec
from shapestream_engine.backends.torch.request import TorchRequest

__all__ = ["TorchModel", "TorchRequest", "compile_spec"]
