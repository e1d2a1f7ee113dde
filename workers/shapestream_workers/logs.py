"""`shapestream logs`: read logs that were written as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from shapestream.errors import InvalidRequest
from shapestream_workers.exit_status import reported
from shapestream_workers.printing import Json, print_answer

app = typer.Typer(help="Read logs that were written as JSON.", no_args_is_help=True)

_TOLD_ALREADY = {"timestamp", "event", "level", "request", "requests", "client", "sequence"}


@app.command()
def story(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The request's id.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Follow one request through a log of level debug, from stdin."""
    with reported(as_json=as_json):
        from shapestream_workers.printing import event_lines

        told = list(stories_in(sys.stdin, request))
        if not told:
            raise InvalidRequest(
                f"no line tells of the arrival of request {request!r} (the log must be JSON, of level debug)"
            )
        found = [{"request_id": request, "events": events} for events in told]
        print_answer(["\n\n".join("\n".join(event_lines(events)) for events in told)], found, as_json=as_json)


def stories_in(lines: Iterable[str], request_id: str) -> Iterator[list[tuple[float, str]]]:
    """Yield the events of each arrival of this request: milliseconds since then, and the words of the line."""
    number: int | None = None
    batches: set[int] = set()
    events: list[tuple[float, str]] = []
    began = datetime.min
    for line in _parsed(lines):
        if number is None and _is_arrival(line, request_id):
            number, began = line["request"], datetime.fromisoformat(line["timestamp"])
        concerns = number is not None and (line.get("request") == number or number in _requests_of(line))
        if concerns and "batch" in line:
            batches.add(line["batch"])
        if not concerns and line.get("batch") not in batches:
            continue
        since = datetime.fromisoformat(line["timestamp"]) - began
        events.append((round(since.total_seconds() * 1e3, 3), _words(line)))
        if concerns and line["event"] in ("results delivered", "request failed"):
            yield events
            number, batches, events = None, set(), []
    if events:
        yield events


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            parsed = json.loads(line)
        except ValueError:
            continue  # a line of another program, or one that was cut off
        if isinstance(parsed, dict) and {"event", "timestamp"} <= parsed.keys():
            yield parsed


def _is_arrival(line: dict[str, Any], request_id: str) -> bool:
    client, _, sequence = request_id.rpartition("-")
    if line["event"] != "request arrived":
        return False
    by_number = str(line.get("sequence")) == sequence and line.get("client") == client[:12] != ""
    return by_number or request_id in (line.get("request_id"), line.get("trace"))


def _requests_of(line: dict[str, Any]) -> list[int]:
    """Return the requests in the line of a batch; none for other lines, where `requests` is a number."""
    requests = line.get("requests")
    return requests if isinstance(requests, list) else []


def _words(line: dict[str, Any]) -> str:
    """Return the event and its facts, without the request's own numbers."""
    facts = [f"{name}={value}" for name, value in line.items() if name not in _TOLD_ALREADY]
    if len(_requests_of(line)) > 1:
        facts.append(f"in a batch of {len(_requests_of(line))} requests")
    return "  ".join([line["event"], *facts])
