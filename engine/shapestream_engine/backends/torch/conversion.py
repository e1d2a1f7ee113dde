"""NumPy's arrays as PyTorch's tensors and back, over the same memory."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from shapestream_engine.element_types import dtype_of

__all__ = ["ELEMENT_TYPES", "array_of", "tensor_of"]

_Array: TypeAlias = "np.ndarray[Any, Any]"

ELEMENT_TYPES: dict[torch.dtype, str] = {
    torch.bool: "boolean",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
}
"""PyTorch's type -> OpenVINO's name."""


def tensor_of(array: _Array, element_type: str) -> torch.Tensor:
    """A tensor over the array's memory."""
    if element_type == "bf16":  # NumPy's bf16 is not known to PyTorch
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> _Array:
    """An array over the memory of a tensor in host memory, or of a copy if its elements do not lie in order."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: _Array = tensor.view(torch.uint16).numpy()
        return bits.view(dtype_of("bf16"))
    array: _Array = tensor.numpy()
    return array
