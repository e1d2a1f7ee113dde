"""The choice of an engine for a file that several read: the first in a fixed order that is installed and takes it.

An engine takes a file that it can read, and whose element types it computes as they are (`openvino/narrowing.py`). The
file is read and nothing is compiled, so a choice costs the time of reading. An engine that the configuration names is
never replaced by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from shapestream_engine.errors import EngineError, EngineMissing

ENGINES_OF_SUFFIX = {".xml": ("openvino",), ".onnx": ("openvino", "onnxruntime"), ".pt2": ("torch",)}
"""Suffix of a model file -> the engines that read it, in the order in which they are tried."""


def engines_of_path(path: PurePath) -> tuple[str, ...]:
    """Return the engines that may run this file, in their order; OpenVINO's readers ask files of any other suffix."""
    return ENGINES_OF_SUFFIX.get(path.suffix.lower(), ("openvino",))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine of a model, and the engines before it that were passed over."""

    engine: str
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why it does not run the model: "not installed", or its own message."""

    @property
    def why(self) -> str:
        """The reason of the choice, in words; "" where the first engine took the model, or the configuration names it."""
        return "; ".join(f"{engine}: {reason}" for engine, reason in self.passed_over.items())


def choose_engine(engines: Sequence[str], check: Callable[[str], None]) -> EngineChoice:
    """Return the first of these engines that takes the model.

    `check` raises `EngineError` for an engine that does not. If none takes it, the error of the first installed one is
    raised, with what the others said and the extras of those that are missing; `EngineMissing` if none is installed.
    """
    passed_over: dict[str, str] = {}
    missing: list[EngineMissing] = []
    first: EngineError | None = None
    others: list[str] = []
    for engine in engines:
        try:
            check(engine)
        except EngineMissing as error:
            missing.append(error)
            passed_over[engine] = "not installed"
        except EngineError as error:
            passed_over[engine] = str(error)
            if first is None:
                first = error
            else:
                others.append(f"{engine} does not take it, either: {error}")
        else:
            return EngineChoice(engine=engine, passed_over=passed_over)
    if first is None:
        raise EngineMissing(*engines)
    others += [
        f"{error.engines[0]} is not installed: pip install 'shapestream[{error.extra}]'" for error in missing
    ]
    first.args = ("; ".join((str(first), *others)),)
    raise first
