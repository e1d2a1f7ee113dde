"""A server with other constants: `python -m tests.e2e.changed_server '{"hang_grace_s": 0.5}' serve CONFIG`.

The constants are fields of `ServerSettings` that no file can set. The worker processes are those of the product.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shapestream.serving import server
from shapestream.settings import LoadedSettings, ServerSettings, load_settings
from shapestream_workers import cli


def change(**constants: Any) -> None:
    """Let the commands of this process serve with these constants. `memory_bytes`: as if it might use so much memory."""
    if (memory := constants.pop("memory_bytes", None)) is not None:
        server.memory_bytes = lambda: memory
    unknown = constants.keys() - ServerSettings.model_fields.keys()
    if unknown:
        raise AssertionError(f"the server has no {unknown}")

    def load(path: Path, **options: Any) -> LoadedSettings:
        return load_settings(path, **options).with_server(**constants)

    cli.load_settings = load


if __name__ == "__main__":
    change(**json.loads(sys.argv.pop(1)))
    cli.main()
