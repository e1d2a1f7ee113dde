"""The inputs of a model in the YAML, and its section `shapes`: the call shapes of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from shapestream.settings.values import (
    COUNT,
    TEXT,
    Bytes,
    Finding,
    Section,
    check_element_type,
    check_pad_value,
    check_shape,
    closest,
    did_you_mean,
    read_sizes,
)
from shapestream_engine.errors import ShapeError, SignatureError
from shapestream_engine.ports import BATCH
from shapestream_engine.shapes import Dimension, NamedShape
from shapestream_engine.strategy import Strategy, parse_strategy

__all__ = ["ElementType", "InputSettings", "Shape", "ShapesSettings"]

Shape: TypeAlias = Annotated[
    str,
    BeforeValidator(check_shape),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": {"type": ["string", "integer"]}}]}),
]
ElementType: TypeAlias = Annotated[str, BeforeValidator(check_element_type), WithJsonSchema(TEXT)]
PadValue: TypeAlias = Annotated[
    Any, BeforeValidator(check_pad_value), WithJsonSchema({"type": ["number", "boolean"]})
]
AllowedSizes: TypeAlias = Annotated[
    tuple[int, ...],
    BeforeValidator(read_sizes),
    WithJsonSchema({"anyOf": [COUNT, {"type": "array", "items": COUNT, "minItems": 1}]}),
]


class InputSettings(Section):
    """Facts about one input that the model file leaves open."""

    shape: Shape | None = None
    """Named dimensions and their bounds: "batch:1..64, seq:1..512, 384"."""
    element_type: ElementType | None = None
    """Element type by OpenVINO's name (f32, i64, boolean, ...). Functions need it; a file's must agree."""
    pad: dict[str, PadValue] = Field(default_factory=dict)
    """Dimensions that may be padded, each with the value to pad with."""
    mask_of: str | None = None
    """Make this input (1 = data, 0 = padding) from the named one where the client sends none."""


class ShapesSettings(Section):
    """Call shapes of a model. Any other key is a dimension, with its allowed size or sizes: seq: [64, 128]."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AllowedSizes] = Field(init=False)

    strategy: Literal["native", "padded", "bucketed", "partitioned"] = "native"
    """`native`: any shape. `padded`: one. `bucketed`: the next of several. `partitioned`: batch divided into sizes."""
    max_prepared: int | None = Field(default=None, ge=1, le=100_000)
    """Prepared shapes that are kept, at most. Default: 64; for `native`, which then rounds later shapes up: no limit."""
    max_prepared_bytes: Bytes | None = None
    """Prepared shapes that are kept, at most, in bytes of weights and inputs."""
    warm_up: bool = False
    """Prepare shapes at the start instead of on first use."""
    static: tuple[dict[str, AllowedSizes], ...] = Field(default=(), strict=False)
    """Call shapes with a static model each, for `native`: [{batch: 1, seq: [8, 16]}]; every dimension is named."""

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The allowed sizes by dimension."""
        return dict(self.model_extra or {})

    def to_strategy(self) -> Strategy:
        """The strategy as the engine takes it; raises `SignatureError` for sizes that it cannot have."""
        if self.strategy == "native":
            return parse_strategy({"max_prepared": self.max_prepared, "static": self.static})
        return parse_strategy({"strategy": self.strategy, **self.sizes})

    def problems(self, inputs: Mapping[str, InputSettings]) -> Iterator[Finding]:
        """Yield the problems beside these inputs of the model: strategies, dimensions, sizes, and padding.

        The engine checks the strategy against the model file.
        """
        dimensions = _Dimensions(inputs)
        if self.strategy == "native":
            yield from self._native_problems()
            for index, shape in enumerate(self.static):
                for name, sizes in shape.items():
                    # A model whose inputs are not described here has its dimensions' names from the file.
                    if name in dimensions.bounds or len(dimensions.bounds) > 1:
                        for words in dimensions.complaints(name, sizes, list(dimensions.bounds)):
                            yield ("static", index, name), words
        else:
            if self.static:
                words = f"static shapes are for the strategy native, and this is {self.strategy} (remove one of them)"
                yield ("static",), words
            for name, sizes in self.sizes.items():
                known = [*dimensions.bounds, *type(self).model_fields]
                for words in dimensions.complaints(name, sizes, known):
                    yield (name,), words
                for port in dimensions.unpaddable.get(name, ()):
                    remedy = f"allow it at inputs.{port}: pad: {{{name}: VALUE}}"
                    yield (name,), f'sizes of "{name}" need padding ({remedy})'
        try:
            self.to_strategy()
        except SignatureError as error:
            yield error.key[1:], str(error)

    def _native_problems(self) -> Iterator[Finding]:
        known = list(type(self).model_fields)
        for name in self.sizes:
            close = closest(name, known)
            remedy = f'did you mean "{close}"?' if close else "remove it, or choose another strategy"
            yield (name,), f"the strategy native runs any size as it comes ({remedy})"
        for key in ("max_prepared_bytes", "warm_up"):
            if getattr(self, key):
                yield (key,), "the strategy native prepares nothing (remove it)"


class _Dimensions:
    """The dimensions that the inputs of a model describe."""

    def __init__(self, inputs: Mapping[str, InputSettings]) -> None:
        self.bounds: dict[str, Dimension] = {BATCH: Dimension()}
        """Bounds that all inputs admit. A file's layout may say which axis is `batch`."""
        self.unpaddable: dict[str, list[str]] = {}
        """The inputs that do not allow a dimension to be padded."""
        for port, settings in inputs.items():
            if settings.shape is None:
                continue
            shape = NamedShape.parse(settings.shape)
            for name, dimension in zip(shape.names, shape.dimensions, strict=True):
                if name is None:
                    continue
                with suppress(ShapeError):  # inputs that contradict each other are the engine's affair
                    self.bounds[name] = self.bounds.get(name, Dimension()).intersection(dimension)
                    if name != BATCH and name not in settings.pad and settings.mask_of is None:
                        self.unpaddable.setdefault(name, []).append(port)

    def complaints(self, name: str, sizes: Sequence[int], known: Sequence[str]) -> Iterator[str]:
        """Yield the problems of these sizes of a dimension; `known` are the keys that may have been meant."""
        if (bounds := self.bounds.get(name)) is None:
            yield f'no input has a dimension "{name}" {did_you_mean(name, known)}'
        elif outside := [size for size in sizes if size not in bounds]:
            yield f'{outside[0]} lies outside of "{name}", {bounds} (change it, or the shape of the input)'
