"""`python -m shapestream_workers` is `shapestream`."""

from __future__ import annotations

from shapestream_workers.cli import main

if __name__ == "__main__":
    main()
