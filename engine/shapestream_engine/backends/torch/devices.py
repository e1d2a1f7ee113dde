"""The devices that programs run on: the host's CPUs, and CUDA devices. `xla` has the third kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export.passes import move_to_device_pass

from shapestream_engine.backends.host_request import InputTensor
from shapestream_engine.errors import ModelLoadError
from shapestream_engine.model import Preparations

__all__ = ["CudaDevice", "Device", "PinnedTensor", "Program", "find_device"]

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
        from shapestream_engine.backends.torch.xla import (
            XlaDevice,
        )  # needs a package that is not always there

        return XlaDevice.of(model, name)
    raise ModelLoadError(f"model {model!r}: no device {name!r}; the engine torch has cpu, cuda and xla")
