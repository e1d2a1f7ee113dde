"""The devices of programs: the host's CPUs, CUDA devices and XLA devices.

torch_xla's variable `PJRT_DEVICE` (`CPU`, `TPU`, …) chooses the XLA device.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export.passes import move_to_device_pass

from shapestream_engine.backends.host_request import InputTensor
from shapestream_engine.compiled_model import Preparations
from shapestream_engine.errors import EngineMissing, ModelLoadError

Program: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function from inputs on the device, in the signature's order, to outputs."""


class Device:
    """The host's CPUs; inputs are used without a copy."""

    kind: type[InputTensor] = InputTensor
    """The class of the requests' input tensors."""
    compiles = False
    """True if the first call of each shape compiles."""
    short_indices = False
    """True if i64 outputs of indices may arrive as i32."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        """PyTorch's name for the device."""

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one call, from host memory to host memory."""
        with torch.inference_mode():
            return program(inputs)

    def place(self, program: torch.export.ExportedProgram) -> torch.nn.Module:
        """Return the program's module, with its weights and constants on this device."""
        if self.name != "cpu":
            program = move_to_device_pass(program, self.name)
        module: torch.nn.Module = program.module()
        return module

    def preparations(self) -> Preparations | None:
        """Return the shapes that the device has compiled so far, for all models; None if it never compiles any."""
        return None


class PinnedTensor(InputTensor):
    """An input tensor in page-locked memory, which a CUDA device reads asynchronously."""

    __slots__ = ()

    def _new_storage(self, nbytes: int) -> np.ndarray[Any, Any]:
        storage: np.ndarray[Any, Any] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return storage


class CudaDevice(Device):
    """A CUDA device. Each slot's thread has its own stream, so that calls overlap."""

    kind = PinnedTensor

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._streams = threading.local()

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one call on the thread's stream: copy in, run, copy out."""
        stream = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = torch.cuda.Stream(self.name)
        with torch.inference_mode(), torch.cuda.stream(stream):
            outputs = program([tensor.to(self.name, non_blocking=True) for tensor in inputs])
            return [output.cpu() for output in outputs]


def find_device(model: str, name: str) -> Device:
    """Return the device of this name (`CPU`, `cuda`, `cuda:1`, `xla`); raises `ModelLoadError`, or `EngineMissing` for
    XLA."""
    name = name.lower()
    kind = name.partition(":")[0]
    if name == "cpu":
        return Device()
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = name.partition(":")[2] or "0"
        if number.isdecimal() and int(number) < count:
            return CudaDevice(f"cuda:{int(number)}")
        raise ModelLoadError(f"model {model!r}: no device {name!r} here; CUDA devices: {count}")
    if kind == "xla":
        return XlaDevice.of(model, name)
    raise ModelLoadError(f"model {model!r}: no device {name!r}; the engine torch has cpu, cuda and xla")


_BOUNDED = "nonzero:masked_select:masked_scatter"
"""Operations that stay on the device, with an upper bound for their result size, `<=25`, instead of running on the
host."""

_ONE_AT_A_TIME = threading.Lock()
"""The process has one graph of pending operations; calls in parallel would compile each other's operations."""


class XlaDevice(Device):
    """An XLA device. Calls of the process run one at a time; the first call of each shape compiles."""

    compiles = True
    short_indices = True  # indices of `nonzero`, seen on 2.9

    def __init__(self, name: str, xla: Any, metrics: Any) -> None:
        super().__init__(name)
        self._xla = xla
        self._metrics = metrics

    @classmethod
    def of(cls, model: str, name: str) -> XlaDevice:
        """Return the device `xla` or `xla:1`. Sets `XLA_EXPERIMENTAL`, which torch_xla reads once, unless it is set."""
        os.environ.setdefault("XLA_EXPERIMENTAL", _BOUNDED)
        try:
            xla: Any = importlib.import_module("torch_xla")
            metrics: Any = importlib.import_module("torch_xla.debug.metrics")
        except ModuleNotFoundError as error:
            if error.name != "torch_xla":
                raise
            raise EngineMissing("torch on xla", extra="torch-xla") from error
        except ImportError as error:
            raise ModelLoadError(f"torch_xla is installed but cannot be loaded: {error}") from error
        number = name.partition(":")[2] or "0"
        try:
            return cls(str(xla.device(int(number))), xla, metrics)
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"model {model!r}: no device {name!r} here: {' '.join(str(error).split())}"
            ) from error

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one call: record it, compile it if its shapes are new, run it, and copy its results in their true
        sizes."""
        # No `inference_mode`: torch_xla 2.9 cannot create tensors in it.
        with _ONE_AT_A_TIME, torch.no_grad():
            outputs = program([tensor.to(self.name) for tensor in inputs])
            self._xla.sync()  # one graph for all outputs; otherwise each copy would compile its own
            return [output.cpu() for output in outputs]

    def place(self, program: torch.export.ExportedProgram) -> torch.nn.Module:
        """Return the program's module without its checks of data-dependent sizes, which the host does not know."""
        module: Any = super().place(program)
        unwanted = (
            torch.ops.aten._assert_scalar.default,
            torch.ops.aten.sym_constrain_range_for_size.default,
            torch.ops.aten.sym_constrain_range.default,
        )
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in unwanted:
                module.graph.erase_node(node)
        module.graph.eliminate_dead_code()
        module.recompile()
        placed: torch.nn.Module = module
        return placed

    def preparations(self) -> Preparations:
        """Return compilations of this process, and calls whose graph was compiled already."""
        compiled = self._metrics.metric_data("CompileTime")
        return Preparations(
            count=0 if compiled is None else int(compiled[0]),
            hits=int(self._metrics.counter_value("CachedCompile") or 0),
        )
