"""From a spec's device and properties to what ONNX Runtime calls providers, provider options and session options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import onnxruntime as ort

from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.model import ModelSpec

__all__ = ["provider_of", "session_options"]

_Provider: TypeAlias = "tuple[str, dict[str, str]]"


def session_options(
    spec: ModelSpec, slots: int, threads: int | None
) -> tuple[ort.SessionOptions, dict[str, Any]]:
    """The session's options, our defaults and then the spec's properties; and the same as plain data.

    Names with a dot are configuration entries of the session (`session.intra_op.allow_spinning`), which ONNX Runtime
    does not check; all others must be attributes of its `SessionOptions`. Raises `SignatureError`.
    """
    plain: dict[str, Any] = {
        # Keeps a plan of the memory for each shape that ever came, without end.
        "enable_mem_pattern": False,
        # Threads that wait in a loop for the next call take the CPUs of the other slots and processes.
        "session.intra_op.allow_spinning": "0",
        # Failures are reported as errors; its log would write them to stderr as well.
        "log_severity_level": 4,
    }
    if threads is not None:
        # Each slot's own thread takes part in its call; the threads of the pool are shared by all.
        plain["intra_op_num_threads"] = max(1, threads - slots + 1)
    for name, value in spec.properties.items():
        if not name.startswith("provider."):
            plain[name] = value
    options = ort.SessionOptions()
    for name, value in plain.items():
        try:
            _set(options, name, value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise SignatureError(
                f"model {spec.name!r}: property {name!r}: {error}", key=("properties", name)
            ) from error
    return options, plain


def _set(options: ort.SessionOptions, name: str, value: Any) -> None:
    if "." in name:
        options.add_session_config_entry(name, str(value))
    elif name in _CHOICES:
        choices = _CHOICES[name]
        if str(value) not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, not {value!r}")
        setattr(options, name, choices[str(value)])
    elif name in _READERS:
        setattr(options, name, _READERS[name](value))
    else:
        known = ", ".join(sorted([*_READERS, *_CHOICES]))
        raise ValueError(f"unknown; known are {known}, and names with a dot")


def provider_of(spec: ModelSpec) -> _Provider:
    """The execution provider of the spec's device, `CPU`, `CUDA` or `CUDA:1`, and its options; raises `ModelLoadError`."""
    device, _, number = spec.device.partition(":")
    known = {name.removesuffix("ExecutionProvider"): name for name in ort.get_available_providers()}
    found = next((name for short, name in known.items() if short.lower() == device.lower()), None)
    if found is None or (number and not number.isdecimal()):
        raise ModelLoadError(
            f"model {spec.name!r}: no device {spec.device!r} here; this ONNX Runtime has {', '.join(known)}"
        )
    options = {"device_id": number} if number else {}
    if device.upper() == "CUDA":
        options["use_tf32"] = "0"  # f32 unless the properties say otherwise, as everywhere
    return found, options | _provider_options(spec.properties)


def _provider_options(properties: Mapping[str, Any]) -> dict[str, str]:
    prefix = "provider."
    return {
        name.removeprefix(prefix): str(value) for name, value in properties.items() if name.startswith(prefix)
    }


def _truth(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "yes", "1", "false", "no", "0"):
        raise ValueError(f"expected true or false, not {value!r}")
    return text in ("true", "yes", "1")  # settings write true as YES, as OpenVINO does


_READERS: dict[str, Callable[[Any], Any]] = {
    "enable_cpu_mem_arena": _truth,
    "enable_mem_pattern": _truth,
    "enable_mem_reuse": _truth,
    "inter_op_num_threads": int,
    "intra_op_num_threads": int,
    "log_severity_level": int,
    "use_deterministic_compute": _truth,
}
_CHOICES: dict[str, dict[str, Any]] = {
    "execution_mode": {
        "sequential": ort.ExecutionMode.ORT_SEQUENTIAL,
        "parallel": ort.ExecutionMode.ORT_PARALLEL,
    },
    "graph_optimization_level": {
        "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    },
}
