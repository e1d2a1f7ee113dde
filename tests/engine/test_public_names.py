"""What is public of the engine: a change here is a change for its users, and belongs into the changelog."""

from __future__ import annotations

import shapestream_engine


def test_the_public_names_of_the_engine() -> None:
    """Exactly these names are exported, and all of them exist."""
    expected = [
        "ELEMENT_TYPES",
        "ArrayTensor",
        "Buffer",
        "CompiledModel",
        "Counts",
        "Crop",
        "Dimension",
        "ElementTypeError",
        "EngineError",
        "EngineMissing",
        "IndexColumn",
        "InferRequest",
        "InferResults",
        "InferenceError",
        "InputPort",
        "InputSpec",
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
        "PreparedLimits",
        "Preparations",
        "ReadModel",
        "Recount",
        "BatchInputs",
        "BatchReport",
        "ErrorCode",
        "RequestPool",
        "RequestShape",
        "Rows",
        "Rule",
        "Runner",
        "RuleError",
        "RuleMissing",
        "ShapeError",
        "Shared",
        "SignatureError",
        "Strategy",
        "Tensor",
        "TensorLike",
        "Tensors",
        "Whole",
        "With",
        "compile_model",
        "dtype_of",
        "element_type_of",
        "parse_rule",
        "parse_strategy",
        "read_model",
    ]
    assert sorted(expected) == sorted(shapestream_engine.__all__)
    assert [] == [name for name in expected if not hasattr(shapestream_engine, name)]
