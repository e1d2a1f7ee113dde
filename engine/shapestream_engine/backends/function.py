"""The engine for Python callables over NumPy arrays: `function: package.module:name`.

The callable gets each input as a keyword argument. Arguments are views of the request's tensors, valid during the call. It
returns a mapping from output names to arrays; a single output may be returned as the array alone. Strings come as arrays of
objects, and may be returned as lists. An output with the rule `list` is a list of arrays, which `array_lists.py` packs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from numpy import ndarray

from shapestream_engine.array_lists import checked_array, pack
from shapestream_engine.backends.host_request import HostModel, HostRequest
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import (
    EngineError,
    InferenceError,
    InvalidInput,
    ModelLoadError,
    SignatureError,
    message_of,
)
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.output_rules import List, Rows, Rule, Whole, parse_rule
from shapestream_engine.ports import InputPort, OutputPort, has_batch_axis, list_ports, shapes_of
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

_Function: TypeAlias = Callable[..., Any]


def compile_spec(spec: ModelSpec, *, slots: int, threads: int | None) -> HostModel:
    """Make the model of a thread-safe callable. It runs in its caller's thread, so `slots` and `threads` have no effect."""
    if spec.path is not None:
        raise SignatureError(f"model {spec.name!r}: the engine function takes a function, not a file")
    if spec.properties:
        raise SignatureError(f"model {spec.name!r}: the engine function has no properties")
    function = spec.model if spec.function is None else _import(spec.name, spec.function)
    if not callable(function):
        raise ModelLoadError(f"model {spec.name!r}: {function!r} cannot be called")
    signature = _signature(spec)
    _check_arguments(function, signature)
    name = str(spec.function or getattr(function, "__qualname__", type(function).__name__))
    return HostModel(signature, {"function": name}, lambda: FunctionRequest(signature, function))


class FunctionRequest(HostRequest):
    """A request of a callable. Outputs may be views of the inputs."""

    def __init__(self, signature: ModelSignature, function: _Function) -> None:
        super().__init__(signature)
        self._function = function
        self._named = tuple(
            (port.name, tensor) for port, tensor in zip(signature.inputs, self._tensors, strict=True)
        )
        made = {shapes_of(port.name) for port in signature.outputs if isinstance(port.rule, List)}
        self._returned = tuple(
            (port, None if port.is_string or isinstance(port.rule, List) else dtype_of(port.element_type))
            for port in signature.outputs
            if port.name not in made
        )
        """The outputs that the function returns, arrays of numbers with their type: not the shapes of a list's arrays."""

    def run(self) -> list[Array]:
        """Call the function. Raises `InvalidInput` where it does, and `InferenceError` for its other errors, and for outputs
        that differ from their declaration.
        """
        arguments = {}
        for name, tensor in self._named:
            arguments[name] = tensor.data
        try:
            returned = self._function(**arguments)
        except KeyboardInterrupt:
            raise  # Ctrl-C, where a program calls the model in its main thread
        except InvalidInput:
            raise  # the function says of itself that the input is to blame
        except BaseException as error:
            # The model's own code may raise anything. SystemExit, asyncio's CancelledError and a panic of a Rust
            # extension are no `Exception`s; they must fail this call only, not the proof or the program.
            raise InferenceError(f"{type(error).__name__}: {message_of(error)}") from error
        return self._check(returned)

    def _check(self, returned: Any) -> list[Array]:
        expected = self._returned
        given = type(returned)  # `isinstance` runs Python code of `abc`
        if given is ndarray or (given is not dict and not isinstance(returned, Mapping)):
            if len(expected) != 1:
                names = ", ".join(port.name for port, _ in expected)
                raise InferenceError(f"the function returned {given.__name__}, not a mapping with {names}")
            returned = {expected[0][0].name: returned}
        outputs: list[Array] = []
        for port, dtype in expected:
            if port.name not in returned:
                names = ", ".join(map(str, returned)) or "nothing"
                raise InferenceError(f"the function returned no output {port.name!r}, only {names}")
            value = returned[port.name]
            # A dtype equals None where it is float64.
            is_array = dtype is not None and type(value) is ndarray and value.dtype == dtype
            if is_array and value.ndim == len(port.shape.dimensions):
                outputs.append(value)  # nothing else is to be checked
            elif isinstance(port.rule, List):
                outputs += pack(port, value)
            else:
                outputs.append(checked_array(port, value))
        if len(returned) != len(expected):
            extra = ", ".join(
                sorted(str(name) for name in returned.keys() - {port.name for port, _ in expected})
            )
            raise InferenceError(f"the function returned outputs that are not declared: {extra}")
        return outputs


def _import(name: str, reference: str) -> Any:
    module_name, _, attributes = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The import runs the user's code, whose SystemExit would end this process, perhaps with status 0.
        raise ModelLoadError(
            f"model {name!r}: cannot load the function {reference!r}: {type(error).__name__}: {message_of(error)}"
        ) from error
    return found


def _signature(spec: ModelSpec) -> ModelSignature:
    if not spec.inputs or not spec.outputs:
        raise SignatureError(
            f"model {spec.name!r}: a function needs inputs and outputs: nothing else says what they are"
        )
    try:
        inputs = tuple(
            InputPort(
                name,
                _stated(name, port.element_type, "element_type"),
                _shape(name, port),
                port.pad,
                port.mask_of,
                port.at_most_bytes,
                port.value,
            )
            for name, port in spec.inputs.items()
        )
        batched = has_batch_axis(inputs)
        outputs = tuple(
            port for name, output in spec.outputs.items() for port in _outputs(name, output, batched)
        )
    except EngineError as error:
        raise SignatureError(f"model {spec.name!r}: {error}", key=error.key) from error
    return ModelSignature(spec.name, inputs, outputs, spec.strategy)


def _outputs(name: str, port: OutputSpec, batched: bool) -> tuple[OutputPort, ...]:
    """Return the output; of a list of arrays, whose `shape` is that of one array, return its two outputs."""
    element_type, shape = _stated(name, port.element_type, "element_type"), _shape(name, port)
    if port.rule is not None and port.rule.get("rule") == List.NAME:
        rule = parse_rule({**port.rule, "of": str(shape)})  # refuses other arguments
        assert isinstance(rule, List)
        return list_ports(name, element_type, shape, rule.count)
    return (OutputPort(name, element_type, shape, _rule(port, batched)),)


def _rule(port: OutputSpec, batched: bool) -> Rule:
    if port.rule is not None:
        return parse_rule(port.rule)
    return Rows() if batched else Whole()


def _shape(name: str, port: InputSpec | OutputSpec) -> NamedShape:
    return NamedShape.parse(_stated(name, port.shape, "shape"))


def _stated(name: str, value: str | None, what: str) -> str:
    if value is None:
        raise SignatureError(
            f"port {name!r} needs its {what}; state it, because nothing else tells it of a function"
        )
    return value


def _check_arguments(function: _Function, signature: ModelSignature) -> None:
    try:
        inspect.signature(function).bind(**{port.name: None for port in signature.inputs})
    except TypeError as error:
        names = ", ".join(port.name for port in signature.inputs)
        raise SignatureError(
            f"model {signature.name!r}: the function cannot be called with the inputs {names}: {error}"
        ) from error
    except ValueError:
        return  # a callable in C may have no signature
