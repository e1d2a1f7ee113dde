"""What is public of the engine: a change here is a change for its users, and belongs into the changelog."""

from __future__ import annotations

import shapestream_engine
from shapestream_engine import batching


def test_the_public_names_of_the_engine() -> None:
    """Exactly these names are exported, and all of them exist."""
    expected = [
        "ELEMENT_TYPES",
        "ArrayTensor",
        "Buffer",
        "CompiledModel",
        "Counts",
        "Dimension",
        "ElementTypeError",
        "EngineError",
        "EngineMissing",
        "IndexColumn",
        "InferRequest",
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
        "Preparations",
        "ReadModel",
        "Recount",
        "Report",
        "RequestPool",
        "RequestShape",
        "Rows",
        "Rule",
        "RuleError",
        "ShapeError",
        "Shared",
        "SignatureError",
        "Slot",
        "Tensor",
        "TensorLike",
        "Tensors",
        "Whole",
        "With",
        "Work",
        "compile_model",
        "dtype_of",
        "element_type_of",
        "parse_rule",
        "read_model",
    ]
    assert sorted(expected) == sorted(shapestream_engine.__all__)
    assert [] == [name for name in expected if not hasattr(shapestream_engine, name)]


def test_the_public_names_of_batching() -> None:
    """Calls are planned by these and assembled by that."""
    assert ["Assembly", "Call", "merge_sizes", "padding_ratio"] == sorted(batching.__all__)
    assert [] == [name for name in batching.__all__ if not hasattr(batching, name)]
