"""What an object holds, counted from outside: a bound on memory is shown without the names of what keeps it."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

NOT_DATA = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType)
"""Code belongs to the program, and leads to all of it."""


def held(*things: object) -> list[object]:
    """All objects that can be reached from these, each once; code is left out, and what is reached by code alone."""
    found: dict[int, object] = {}
    left = [*things]
    while left:
        thing = left.pop()
        if id(thing) not in found and not isinstance(thing, NOT_DATA):
            found[id(thing)] = thing
            left += gc.get_referents(thing)
    return [*found.values()]


def held_nbytes(*things: object) -> int:
    """Bytes of all that can be reached from these, as Python counts them."""
    return sum(map(sys.getsizeof, held(*things)))
