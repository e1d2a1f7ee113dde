"""A precision in which a device computes faster than in f32: bf16, where its processor has instructions for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shapestream_engine.backends.openvino.runtime import core
from shapestream_engine.model import ModelSpec

_HINT = "INFERENCE_PRECISION_HINT"


def faster_precision(spec: ModelSpec) -> Mapping[str, str]:
    """Return the properties with which this device computes the model in bf16; empty if it has none, or the spec says
    a precision.
    """
    device = spec.device.partition(":")[0].partition(".")[0]
    try:
        capabilities = core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    except RuntimeError:
        return {}  # MULTI and HETERO tell nothing of their devices
    return bf16_if_offered(capabilities, spec.properties)


def bf16_if_offered(capabilities: Collection[str], properties: Mapping[str, object]) -> Mapping[str, str]:
    """Return the property for bf16 if the device is capable of it and `properties` leave the precision open."""
    return {_HINT: "bf16"} if "BF16" in capabilities and _HINT not in properties else {}
