"""ONNX Runtime's error texts, less what is of use only to its own developers."""

from __future__ import annotations

import re

__all__ = ["engine_words"]

_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_WHERE = re.compile(r"/\S+:\d+ [^()]*\([^()]*\)(?: const)? ")


def engine_words(error: BaseException) -> str:
    """One line that says what ONNX Runtime said, without codes and places in its source."""
    text = _WHERE.sub("", _CODE.sub("", str(error)))
    return " ".join(text.split()) or type(error).__name__
