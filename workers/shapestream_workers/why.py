"""`shapestream why`: the story of a request, or of the slowest ones, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shapestream import blocking


def stories_from(
    address: str,
    request_id: str | None,
    slowest: int,
    *,
    timeout_s: float,
    key: Path | None,
    server_key: str | None,
) -> list[dict[str, Any]]:
    """The stories that a server tells; raises the errors of the client. The keys are for a server that asks for them."""
    with blocking.connect(address, connect_timeout=timeout_s, key=key, server_key=server_key) as client:
        return client.stories(request_id, slowest=slowest, deadline=timeout_s)


def lines_of(story: dict[str, Any]) -> Iterator[str]:
    """A headline, the events by milliseconds since arrival, and the reason for the time that it took."""
    sizes = " x ".join(map(str, story["sizes"])) or "no dynamic size"
    yield (
        f"{story['request_id']}: {story['model']}, {sizes}, {story['state']}, {story['total_ms']:g} ms, "
        f"arrived {story['arrived_s_ago']:g} s ago"
    )
    yield from event_lines(story["events"])
    yield story["why"]


def event_lines(events: list[tuple[float, str]]) -> Iterator[str]:
    """Events, each with its milliseconds."""
    for after_ms, text in events:
        yield f"{after_ms:>12.3f} ms  {text}"
