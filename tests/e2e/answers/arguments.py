"""What each client process of an answer run is told, and how often it changes its mind."""

from __future__ import annotations

import argparse
from pathlib import Path

CONNECT_S = 120.0
"""Within this time a client reaches its server."""
HURRIED = 0.2
"""Share of the requests that get a deadline."""
WITHDRAWN = (0.1, 0.4, 0.9)
"""Shares of a client's requests that are withdrawn if they are still there; a client has one of them."""
STRAYING = 1.5
"""Deadlines and withdrawals come after 0 to so many times what an answer took of late."""
FIRST_GUESS_S = 0.3
"""What an answer takes before one came: long enough that some come."""
RAISED = 1.02
"""A withdrawn request raises what an answer took, since those that are withdrawn would have taken longer."""


def arguments() -> argparse.ArgumentParser:
    """The parser of a client's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help="which load; the raw client has one")
    parser.add_argument("engine")
    parser.add_argument("address")
    parser.add_argument("tally", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("requests", type=int)
    parser.add_argument("patience_s", type=float)
    return parser
