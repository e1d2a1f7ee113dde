"""Log lines and counters of the server. Telemetry decides nothing and holds no tensor data."""

from __future__ import annotations

from shapestream.telemetry.logging import configure, debug_enabled
from shapestream.telemetry.statistics import ServerStatistics

__all__ = ["ServerStatistics", "configure", "debug_enabled"]
