"""shapestream's engine: runs one batch of requests with variable shapes on one device.

The engine has no event loop, no socket and no wire format; the pipeline has those.
"""

from shapestream_engine.backends.registry import EngineChoice
from shapestream_engine.batch import BatchInputs, BatchReport, ErrorCode
from shapestream_engine.compiled_model import CompiledModel, Preparations, PreparedLimits, RequestPool
from shapestream_engine.element_types import ELEMENT_TYPES, dtype_of, element_type_of
from shapestream_engine.errors import (
    ElementTypeError,
    EngineError,
    EngineMissing,
    InferenceError,
    InvalidInput,
    ModelLoadError,
    RuleError,
    RuleMissing,
    ShapeError,
    SignatureError,
)
from shapestream_engine.infer_request import InferRequest, InferResults, OutputTensor
from shapestream_engine.layout import Buffer, Layout, RequestShape, Tensors
from shapestream_engine.model import (
    InputSpec,
    ModelSpec,
    OutputSpec,
    ReadModel,
    compile_model,
    engine_of,
    read_model,
)
from shapestream_engine.output_rules import (
    Counts,
    Crop,
    IndexColumn,
    PaddedCounts,
    Recount,
    Rows,
    Rule,
    Shared,
    Whole,
    With,
    parse_rule,
)
from shapestream_engine.pooling import Pooling
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.postprocess import Postprocess, Steps
from shapestream_engine.shapes import Dimension, NamedShape, PartialShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner
from shapestream_engine.strategy import Strategy, parse_strategy
from shapestream_engine.tensor import ArrayTensor, StringTensor, Tensor, TensorLike

__all__ = [
    "ELEMENT_TYPES",
    "ArrayTensor",
    "BatchInputs",
    "BatchReport",
    "Buffer",
    "CompiledModel",
    "Counts",
    "Crop",
    "Dimension",
    "ElementTypeError",
    "EngineChoice",
    "EngineError",
    "EngineMissing",
    "ErrorCode",
    "IndexColumn",
    "InferRequest",
    "InferResults",
    "InferenceError",
    "InputPort",
    "InputSpec",
    "InvalidInput",
    "Layout",
    "ModelLoadError",
    "ModelSignature",
    "ModelSpec",
    "NamedShape",
    "OutputPort",
    "OutputSpec",
    "OutputTensor",
    "PaddedCounts",
    "PartialShape",
    "Pooling",
    "Postprocess",
    "Preparations",
    "PreparedLimits",
    "ReadModel",
    "Recount",
    "RequestPool",
    "RequestShape",
    "Rows",
    "Rule",
    "RuleError",
    "RuleMissing",
    "Runner",
    "ShapeError",
    "Shared",
    "SignatureError",
    "Steps",
    "Strategy",
    "StringTensor",
    "Tensor",
    "TensorLike",
    "Tensors",
    "Whole",
    "With",
    "compile_model",
    "dtype_of",
    "element_type_of",
    "engine_of",
    "parse_rule",
    "parse_strategy",
    "read_model",
]
