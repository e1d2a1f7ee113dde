"""From a spec to an exported program, with errors that name the path and the reason."""

from __future__ import annotations

import warnings

import torch

from shapestream_engine.errors import ModelLoadError, SignatureError
from shapestream_engine.model import ModelSpec

__all__ = ["read_program"]


def read_program(spec: ModelSpec) -> torch.export.ExportedProgram:
    """The program in the file, or the one in memory. Raises `ModelLoadError`, or `SignatureError` if it keeps a state."""
    program = spec.model if spec.path is None else _load(spec)
    if not isinstance(program, torch.export.ExportedProgram):
        what = "a function" if spec.function is not None else type(program).__name__
        raise SignatureError(
            f"model {spec.name!r}: the engine torch takes a path or an exported program, not {what}"
        )
    if changed := _changed(program):
        # Requests would find what other requests left there.
        raise SignatureError(
            f"model {spec.name!r}: the program changes {', '.join(changed)} in each call; export it without"
        )
    return program


def _changed(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers and inputs that a call of the program leaves with other contents."""
    operations = (node.target for node in program.graph.nodes if node.op == "call_function")
    if any(operation._schema.is_mutable for operation in operations if hasattr(operation, "_schema")):
        # Only in its functional form does a program say which of its operations in place can be seen from outside.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's of its own affairs
            program = program.run_decompositions({})
    signature = program.graph_signature
    return sorted({*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()})


def _load(spec: ModelSpec) -> torch.export.ExportedProgram:
    path = spec.path
    assert path is not None
    if not path.is_file():
        reason = "is a directory" if path.is_dir() else "no such file"
        raise ModelLoadError(f"cannot read the model {path}: {reason}")
    try:
        with warnings.catch_warnings():
            # PyTorch 2.9 warns of its own reading buffers that are not writable.
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:  # its errors have no common class but this
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(
            f"cannot read the model {path} as a program of torch.export: {reason}"
        ) from error
