"""The entry point of the command `shapestream`, and of `python -m shapestream_workers`.

`health` does not import the command line: it runs every few seconds, and the imports would take most of its time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from shapestream_workers.interruption import interrupted, obey
from shapestream_workers.process import open_standard_streams


def main() -> None:
    """Run the command that `sys.argv` names."""
    if sys.argv[1:2] == ["health"]:
        from shapestream_workers.health import main as health

        open_standard_streams()
        sys.exit(health(sys.argv[2:]))
    try:
        obey(next(iter(sys.argv[1:]), ""))
        _command_line()()
    except KeyboardInterrupt:
        # The command line was still being imported.
        sys.exit(interrupted())


def _command_line() -> Callable[[], None]:
    """Import the command line, without two things that take a third of the time.

    The garbage collector finds nothing in modules, and looks at all of them again at the end. structlog imports rich, if it
    is installed, for tracebacks that our logs do not use.
    """
    gc.disable()
    sys.modules["rich"] = None  # type: ignore[assignment] # Python's way to say that there is none
    from shapestream_workers.cli import main as any_command

    del sys.modules["rich"]
    gc.freeze()
    gc.enable()
    return any_command


if __name__ == "__main__":
    main()
