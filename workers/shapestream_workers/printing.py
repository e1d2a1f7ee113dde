"""Answers of commands on stdout, as lines for people or JSON for scripts: tables, stories (`why`), audits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shapestream.errors import Forbidden, InvalidRequest
from shapestream_workers.target import ServerAccess

if TYPE_CHECKING:
    from shapestream.loading.trials import News

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def print_answer(lines: Iterable[str], found: Any, *, as_json: bool) -> None:
    """Print `lines`, or `found` as JSON."""
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in lines:
            typer.echo(line)


def table_of(rows: Sequence[Mapping[str, str]], *, words: Collection[str]) -> str:
    """Return a line per row under the keys of the first row; columns named in `words` are set to the left, figures right."""
    names = list(rows[0])
    cells = [names, *([row.get(name, "") for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, width, cell in zip(names, widths, line, strict=True)
        ).rstrip()
        for line in cells
    )


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


def audits_of(access: ServerAccess, acknowledge: str | None) -> dict[str, dict[str, Any]]:
    """Return the findings of audits, by model. Requests of the model `acknowledge` share calls again from now on.

    Raises the errors of the client; `Forbidden` for a key without the role admin.
    """
    with access.connect() as client:
        told = client.statistics() if acknowledge is None else client.acknowledge_audit(acknowledge)
    if "audit" not in told:
        raise Forbidden(told.get("forbidden", "this server has no audits: it is of an earlier release"))
    found: dict[str, dict[str, Any]] = told["audit"]
    if acknowledge is not None and acknowledge not in found:
        raise InvalidRequest(f"no model is called {acknowledge!r}; audited are: {', '.join(found) or 'none'}")
    return found


def described(audits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines of text about each model."""
    for name, found in audits.items():
        state = "every request runs alone" if found["stopped"] else "varies" if found["varies"] else "ok"
        if state == "ok" and found.get("judges_little"):
            state = "most answers cannot be told from rounding"
        yield (
            f"{name}: {state}; share {found['share']:g}, {found['audited']} audited of {found['sampled']} sampled, "
            f"{found['mismatches']} differed, {found.get('unjudged', 0)} not told from rounding"
        )
        for finding in found["findings"]:
            by = finding["why"]
            if None not in (finding["largest"], finding["allowed"]):
                by = f"by {finding['largest']:.3g} where {finding['allowed']:.3g} is allowed"
            yield (
                f"  output {finding['output']!r} differed ({by}): sizes {finding['sizes']}, in a call of "
                f"{finding['call']} with {finding['requests']} requests on {finding['slot']}; "
                f"request {finding['request_digest']}, model {finding['model_digest'] or 'a function'}"
            )


@contextmanager
def told_news() -> Iterator[Callable[[News], None]]:
    """Yield a function that tells on stderr what trials do: on a terminal in one line for each model, else line by line."""
    if not sys.stderr.isatty():
        yield lambda news: typer.echo(str(news), err=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    latest: dict[str, News] = {}
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def tell(news: News) -> None:
            latest[news.model] = news
            live.update(Text("\n".join(map(str, latest.values()))), refresh=True)

        yield tell
