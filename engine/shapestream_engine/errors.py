"""Every error of the engine, split by whose fault it is.

    EngineError
    ├── ShapeError          an invalid shape, or one that does not fit its port
    │   └── ElementTypeError    an invalid element type
    ├── SignatureError      the configuration contradicts the model or itself
    │   └── RuleMissing         an output without a rule that assigns its rows to requests
    ├── ModelLoadError      a model file is missing, unreadable or refused by the engine
    ├── EngineMissing       the engine is not installed; names the extra that installs it
    └── InferenceError      a call failed on the device; has the engine's message
        └── RuleError           the call ran, but an output breaks the rule by which it is divided

The engine knows nothing of wire codes; the executor of the pipeline maps these to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

__all__ = [
    "ElementTypeError",
    "EngineError",
    "EngineMissing",
    "InferenceError",
    "ModelLoadError",
    "RuleError",
    "RuleMissing",
    "ShapeError",
    "SignatureError",
]

Key: TypeAlias = tuple[str | int, ...]
"""Path to a part of a model's description, by fields of `ModelSpec`: `("inputs", "ids")`, `("strategy", "seq")`."""


class EngineError(Exception):
    """Base of every error that the engine raises on purpose.

    `key` is the part of the model's description to change; empty if no single part is wrong.
    """

    def __init__(self, message: str, *, key: Key = ()) -> None:
        self.key = key
        super().__init__(message)

    @staticmethod
    @contextmanager
    def about(*key: str | int) -> Iterator[None]:
        """Add this key to errors without a key that are raised inside the block."""
        try:
            yield
        except EngineError as error:
            error.key = error.key or key
            raise


class ShapeError(EngineError, ValueError):
    """An impossible shape, dimension or layout, or one that its port does not take."""


class ElementTypeError(ShapeError):
    """An element type that is unknown, cannot be sent, or differs from the port's."""


class SignatureError(EngineError):
    """The configuration contradicts the model, or itself, or states a rule that cannot hold."""


class RuleMissing(SignatureError):
    """An output that follows no batch axis, and has no configured rule."""

    def __init__(self, message: str, *, output: str) -> None:
        self.output = output
        super().__init__(message, key=("outputs", output))


class ModelLoadError(EngineError):
    """A model cannot be read or compiled; the message holds the path and the engine's reason."""

    def __init__(self, message: str, *, key: Key = ("path",)) -> None:
        super().__init__(message, key=key)


class EngineMissing(EngineError):
    """None of the engines that could run a model is installed; as a rule the configuration names the only one.

    `extra` is the optional dependency that installs the first of them.
    """

    def __init__(self, engine: str, *others: str, extra: str | None = None) -> None:
        self.engines = (engine, *others)
        self.extra = engine if extra is None else extra
        install = " or ".join(f"pip install 'shapestream[{name}]'" for name in (self.extra, *others))
        are_not = "is not" if not others else "or " + " or ".join(map(repr, others)) + " is not"
        super().__init__(
            f"the engine {engine!r} {are_not} installed; to install it: {install}", key=("engine",)
        )


class InferenceError(EngineError):
    """A call failed; the message holds the engine's message."""


class InvalidInput(InferenceError):
    """The model does not take this input, and would not take it again; the message says why, and what to do.

    Functions raise it for what no signature can say: a text with too many tokens, a number out of range. Its request fails
    as `invalid`. Any other error is `model_error`.
    """


class RuleError(InferenceError):
    """An output breaks its rule: an index outside the batch, wrong counts, another batch size.

    The whole batch is refused, because a division would only guess which rows belong to which request.
    """


def message_of(error: BaseException) -> str:
    """Return the message of an error that a model's code raised; its class may fail to give one."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the model's code runs here, and may raise SystemExit
        return "(its message cannot be read)"
