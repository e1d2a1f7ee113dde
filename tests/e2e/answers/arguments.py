"""What each client process of an answer run is told."""

from __future__ import annotations

import argparse
from pathlib import Path

CONNECT_S = 120.0
"""Within this time a client reaches its server."""


def arguments() -> argparse.ArgumentParser:
    """The parser of a client's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help="which load; the raw client has one")
    parser.add_argument("address")
    parser.add_argument("tally", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("requests", type=int)
    parser.add_argument("patience_s", type=float)
    return parser
