"""The element types that OpenVINO computes as narrower ones: f64 as f32, i64 and u64 as i32.

Its CPU plugin converts the whole graph (openvinotoolkit/openvino, issues 35822, 35823 and 24072; tried with 2026.4). So
`x - 1.7e9` of f64 loses the fraction, and an index of 2^32 + 1 selects row 1. What only depends on the *shapes* of a
request fits: ShapeOf and what follows from it are exempt, and with them the constants of nearly all text models.

- **f64**: a value of a request that passes any operation is rounded to f32, also where it is only copied. The model is
  refused.
- **u64**: such a value is wrapped into i32, also where it is only copied. The model is refused.
- **i64**: such values are ids and masks as a rule, and fit. The model is served, and a request with a value that does not
  fit i32 is `InvalidInput` (`OpenVinoRequest`). What grows beyond i32 within the model is not found here.

Exempt is an input that goes to a result as it is, and one that is converted to a float of 32 bits or less at once: that
rounds as the model asks. The bodies of If and Loop are not looked into.
"""

from __future__ import annotations

import numpy as np
import openvino as ov

from shapestream_engine.errors import InvalidInput, ModelLoadError
from shapestream_engine.tensor import Array

_LEAST, _LARGEST = int(np.iinfo(np.int32).min), int(np.iinfo(np.int32).max)
_REFUSED = {ov.Type.f64: "f32", ov.Type.u64: "i32"}
"""The element type by which OpenVINO computes each."""
_NARROW_FLOATS = (ov.Type.f32, ov.Type.f16, ov.Type.bf16)


def bounded_inputs(model: ov.Model, name: str) -> tuple[int, ...]:
    """Return the numbers of the inputs whose values must fit i32.

    Raises `ModelLoadError` if a request's values of f64 or u64 pass an operation.
    """
    numbers = {node.get_friendly_name(): number for number, node in enumerate(model.get_parameters())}
    depends: set[str] = set(numbers)
    """The operations whose values depend on those of a request."""
    bounded: set[int] = set()
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        values = [value for value in node.input_values() if value.get_node().get_friendly_name() in depends]
        touched = [value.get_node() for value in values]
        if not touched or kind == "ShapeOf":
            continue
        depends.add(node.get_friendly_name())
        if all(source.get_type_name() == "Parameter" for source in touched) and _is_exempt(node, kind):
            continue
        # Constants do not count: ArgMax of ONNX has axes of u64.
        for element_type in (*(value.get_element_type() for value in values), *_outputs(node)):
            if element_type in _REFUSED:
                raise ModelLoadError(_refusal(name, node, element_type))
        bounded |= {
            numbers[source.get_friendly_name()]
            for source in touched
            if source.get_type_name() == "Parameter" and source.get_output_element_type(0) == ov.Type.i64
        }
    return tuple(sorted(bounded))


def check_range(name: str, data: Array) -> None:
    """Raise `InvalidInput` if a value does not fit i32."""
    if data.size:
        least, largest = int(data.min()), int(data.max())
        if least < _LEAST or largest > _LARGEST:
            value = least if least < _LEAST else largest
            raise InvalidInput(
                f"input {name!r} has the value {value}, and OpenVINO computes i64 as i32: send values from {_LEAST} to "
                f"{_LARGEST} (engine: onnxruntime computes i64 as it is)"
            )


def _is_exempt(node: ov.Node, kind: str) -> bool:
    if kind == "Result":
        return True
    return kind == "Convert" and node.get_output_element_type(0) in _NARROW_FLOATS


def _outputs(node: ov.Node) -> list[ov.Type]:
    return [node.get_output_element_type(number) for number in range(node.get_output_size())]


def _refusal(name: str, node: ov.Node, element_type: ov.Type) -> str:
    wide = element_type.get_type_name()
    return (
        f"model {name!r}: OpenVINO computes {wide} as {_REFUSED[element_type]}, and values of a request pass "
        f"{node.get_type_name()} {node.get_friendly_name()!r} as {wide}: answers would be wrong (engine: onnxruntime "
        f"computes {wide} as it is; or convert the model)"
    )
