"""The new generation of `staged.py`, in a module whose import the test holds."""

from staged import hold, triple

__all__ = ["triple"]
hold("importing")
