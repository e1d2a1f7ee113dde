"""OpenVINO's inference requests, whose own input tensors are resized in place and reused."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import openvino as ov

from shapestream_engine.backends.openvino.engine_words import engine_words
from shapestream_engine.backends.openvino.tensor import OpenVinoTensor
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import InferenceError
from shapestream_engine.model import InferRequest
from shapestream_engine.reservation import reserved, upper_bounds
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import TensorLike

__all__ = ["OpenVinoRequest"]

_Array: TypeAlias = "np.ndarray[Any, Any]"

_SHORT_CALL_S = 0.002
"""Calls that follow a shorter one run in the caller's thread: 10 us of CPU for a tiny call, where handing it to a thread of
OpenVINO's and waiting costs 22 us, and 61 us when that thread must be woken up.

Not all of them, because on one stream with one thread such a call ignores `cancel` (all measured on OpenVINO 2026.4).
"""


class OpenVinoRequest(InferRequest):
    """An `ov.InferRequest` and its own tensors, wrapped once."""

    def __init__(self, signature: ModelSignature, request: ov.InferRequest, *, stateful: bool) -> None:
        super().__init__(signature)
        self.engine_request = request
        """OpenVINO's own."""
        self._stateful = stateful
        self._last_call_s = inf
        self.running = False
        """A call that `start_async` began is not over, or `infer` runs."""
        bounds = upper_bounds(signature)
        self._tensors = tuple(
            OpenVinoTensor(self, number, port, bound, reserve=at_once)
            for number, (port, bound, at_once) in enumerate(
                zip(signature.inputs, bounds, reserved(bounds), strict=True)
            )
        )
        self._dtypes = tuple(dtype_of(port.element_type) for port in signature.outputs)

    @property
    def input_tensors(self) -> Sequence[TensorLike]:
        """The request's own input tensors, in the order of the signature."""
        return self._tensors

    def infer(self) -> None:
        """Run to the end; raises `InferenceError` with OpenVINO's words. Other threads run meanwhile.

        In this thread if the last call was short, else on a thread of OpenVINO's: see `_SHORT_CALL_S`.
        """
        began = perf_counter()
        if self._last_call_s >= _SHORT_CALL_S:
            self.start_async()
            try:
                self.wait()
            finally:
                self._last_call_s = perf_counter() - began
            return
        self.running = True
        try:
            if self._stateful:
                self.engine_request.reset_state()
            self.engine_request.infer(share_outputs=True, decode_strings=False)
        except RuntimeError as error:
            raise InferenceError(engine_words(error)) from error
        finally:
            self.running = False
            self._last_call_s = perf_counter() - began

    def start_async(self) -> None:
        """Begin to run on a thread of OpenVINO's."""
        self.running = True
        try:
            if self._stateful:
                self.engine_request.reset_state()
            self.engine_request.start_async()
        except RuntimeError as error:
            self.running = False
            raise InferenceError(engine_words(error)) from error

    def wait(self) -> None:
        """Until the call is over; raises `InferenceError` with OpenVINO's words. Other threads run meanwhile."""
        try:
            self.engine_request.wait()
        except RuntimeError as error:
            raise InferenceError(engine_words(error)) from error
        finally:
            self.running = False

    def cancel(self) -> None:
        """Ask the running call to stop: it raises, and the request can be used again. Short calls may not hear it."""
        self.engine_request.cancel()

    def outputs(self) -> list[_Array]:
        """The outputs of the last call, as views of OpenVINO's memory: copy before the next call."""
        tensor = self.engine_request.get_output_tensor
        return [
            data if (data := tensor(number).data).dtype == dtype else data.view(dtype)
            for number, dtype in enumerate(self._dtypes)
        ]
