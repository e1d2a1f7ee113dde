"""The beginning of the command `shapestream`, and of `python -m shapestream_workers`.

`health` goes its own way: it is asked every few seconds, and the command line's own imports would be most of what it takes.
"""

from __future__ import annotations

import sys

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
        from shapestream_workers.cli import main as any_command

        any_command()
    except KeyboardInterrupt:
        # While it was still being imported.
        sys.exit(interrupted())


if __name__ == "__main__":
    main()
