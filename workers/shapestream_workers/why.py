"""`shapestream why`: the story of a request, or of the slowest ones, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shapestream_workers.target import ServerAccess


def stories_from(access: ServerAccess, request_id: str | None, slowest: int) -> list[dict[str, Any]]:
    """Return the stories of the requests with this id, else of the `slowest` ones. Raises the errors of the client."""
    with access.connect() as client:
        return client.stories(request_id, slowest=slowest, deadline=access.timeout_s)


def lines_of(story: dict[str, Any]) -> Iterator[str]:
    """Yield a headline, the events by milliseconds since arrival, and the reason for the total time."""
    sizes = " x ".join(map(str, story["sizes"])) or "no dynamic size"
    yield (
        f"{story['request_id']}: {_place(story)}{story['model']}, {sizes}, {story['state']}, {story['total_ms']:g} ms, "
        f"arrived {story['arrived_s_ago']:g} s ago{_of(story)}"
    )
    yield from event_lines(story["events"])
    yield story["why"]


def _place(story: dict[str, Any]) -> str:
    """Return the place in a chain of a stage's request, for its headline."""
    if "stage" not in story:
        return ""
    row = "" if story["row"] is None else f", row {story['row']}"
    return f"stage {story['stage']}{row}: "


def _of(story: dict[str, Any]) -> str:
    """Return the caller and the trace that a story names, for its headline."""
    return "".join(f", {key} {story[key]}" for key in ("caller", "trace") if key in story)


def event_lines(events: list[tuple[float, str]]) -> Iterator[str]:
    """Yield a line for each event: milliseconds since arrival, and its text."""
    for after_ms, text in events:
        yield f"{after_ms:>12.3f} ms  {text}"
