"""The devices that programs run on: the host's CPUs, CUDA devices and XLA devices.

An XLA device is chosen by torch_xla's own variable, `PJRT_DEVICE` (`CPU`, `TPU`, …).
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
"""Inputs on the device, in the order of the signature -> outputs."""


class Device:
    """The host: inputs are used where they lie."""

    kind: type[InputTensor] = InputTensor
    """The class of the tensors that requests fill."""
    compiles = False
    """The first call of each shape takes much longer than later ones."""
    short_indices = False
    """Indices that the program calls i64 may come as i32."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        """PyTorch's name of the device."""

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call; from host memory, to host memory."""
        with torch.inference_mode():
            return program(inputs)

    def place(self, program: torch.export.ExportedProgram) -> torch.nn.Module:
        """The program's module, with its weights and the tensors that it makes on this device."""
        if self.name != "cpu":
            program = move_to_device_pass(program, self.name)
        module: torch.nn.Module = program.module()
        return module

    def preparations(self) -> Preparations | None:
        """The shapes that the device has prepared so far, for all models together; None where it never prepares any."""
        return None


class PinnedTensor(InputTensor):
    """An input tensor in page-locked memory, which a CUDA device reads by itself while the host goes on."""

    __slots__ = ()

    def _new_storage(self, nbytes: int) -> np.ndarray[Any, Any]:
        storage: np.ndarray[Any, Any] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return storage


class CudaDevice(Device):
    """A CUDA device; each slot's thread has a stream of its own, so that their calls overlap."""

    kind = PinnedTensor

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._streams = threading.local()

    def run(self, program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call on the thread's stream: copies in, the program, copies out, which wait for it."""
        stream = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = torch.cuda.Stream(self.name)
        with torch.inference_mode(), torch.cuda.stream(stream):
            outputs = program([tensor.to(self.name, non_blocking=True) for tensor in inputs])
            return [output.cpu() for output in outputs]


def find_device(model: str, name: str) -> Device:
    """The device of this name, `CPU`, `cuda`, `cuda:1` or `xla`; raises `ModelLoadError`, or `EngineMissing` for XLA."""
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
"""Operations that stay on the device with a bound for their result, `<=25`, instead of being run on the host."""

_ONE_AT_A_TIME = threading.Lock()
"""The device's graph of what is yet to run is one for the whole process: calls would compile each other's operations."""


class XlaDevice(Device):
    """An XLA device. Calls of the process run one after the other; the first one of each shape compiles."""

    compiles = True
    short_indices = True  # those of `nonzero` that stays on the device, seen on 2.9

    def __init__(self, name: str, xla: Any, metrics: Any) -> None:
        super().__init__(name)
        self._xla = xla
        self._metrics = metrics

    @classmethod
    def of(cls, model: str, name: str) -> XlaDevice:
        """The device `xla` or `xla:1`. Sets `XLA_EXPERIMENTAL`, which torch_xla reads once, unless it is set."""
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
        """One call: recorded, compiled if its shapes are new, run, and copied to the host in its true size."""
        # Not `inference_mode`: torch_xla 2.9 cannot make tensors in it.
        with _ONE_AT_A_TIME, torch.no_grad():
            outputs = program([tensor.to(self.name) for tensor in inputs])
            self._xla.sync()  # all outputs in one graph; each would be compiled by itself when it is copied
            return [output.cpu() for output in outputs]

    def place(self, program: torch.export.ExportedProgram) -> torch.nn.Module:
        """The program's module, less its own checks of sizes that depend on the data, which stay unknown to the host."""
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
        """Compilations, and graphs that were found compiled, of this process."""
        compiled = self._metrics.metric_data("CompileTime")
        return Preparations(
            count=0 if compiled is None else int(compiled[0]),
            hits=int(self._metrics.counter_value("CachedCompile") or 0),
        )
