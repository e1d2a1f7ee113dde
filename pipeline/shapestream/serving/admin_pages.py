"""The pages of the admin port: for each path, what is read on the main loop, and the answer that is written of it.

`server_pages` lists them all. `read` runs on the main loop; `write` runs in the thread of the port (admin.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily

from shapestream.errors import ConfigurationError
from shapestream.serving.server import Server
from shapestream.slices import Slices
from shapestream.telemetry.logging import LEVELS, PRESENT
from shapestream.telemetry.metrics import Buckets, Metric, MetricType, Sample, read_metrics
from shapestream.web.messages import HttpResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The answers of one path."""

    read: Callable[..., Any] | None
    """Called on the main loop, so it must be quick, or return `Slices`. None: the answer needs nothing from there."""
    write: Callable[[Any], HttpResponse]
    """Makes the answer from the result of `read`, in the port's thread."""
    hidden: Callable[[Any], HttpResponse] | None = None
    """Makes the answer for a caller without the token. None: such a caller gets 401."""
    takes: tuple[str, ...] = ()
    """Names of parameters of the path or the query that `read` gets, where the caller gave them."""
    change: Callable[[Any], Any] | None = None
    """Called on the main loop with the JSON of a PUT. Returns what `read` does. Raises `ConfigurationError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """A path whose answer is a stream of server-sent events, until its viewer leaves."""

    read: Callable[[int], Slices[dict[str, Any]]]
    """`Readings.live`, called on the main loop."""


def json_answer(content: Any, status: int = 200) -> HttpResponse:
    """Return an answer of plain data."""
    return HttpResponse(
        status=status, body=(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"),)
    )


def server_pages(server: Server) -> dict[str, Page | EventStream]:
    """Return the pages of a server."""

    def standstill() -> list[str]:
        why = server.readings.standstill()
        return [] if why is None else [why]

    def slowest_stories(slowest: str = "10") -> Slices[dict[str, Any]]:
        if not (slowest.isdecimal() and len(slowest) < 5):
            raise ConfigurationError(["slowest is a number of requests"])
        return server.readings.explain("", int(slowest))

    def change_log_level(asked: Any) -> dict[str, str]:
        for level in LEVELS:
            if asked == {"level": level}:
                server.change_logging(level)
                return log_settings()
        raise ConfigurationError([f'expected {{"level": LEVEL}}, with a LEVEL of {", ".join(LEVELS)}'])

    def log_settings() -> dict[str, str]:
        return {"level": PRESENT.level, "format": PRESENT.format}

    return {
        "/": html_page(),
        "/events": EventStream(read=server.readings.live),
        "/health/live": health_page("live", standstill),
        "/health/ready": ready_page(server),
        "/statistics": json_page(server.readings.statistics),
        "/audit": json_page(server.readings.audits.to_dict),
        "/logging": Page(read=log_settings, write=json_answer, change=change_log_level),
        "/metrics": Page(read=lambda: read_metrics(server.readings.snapshot()), write=_exposition),
        "/requests": Page(read=slowest_stories, write=json_answer, takes=("slowest",)),
        "/requests/{request}": Page(
            read=lambda request: server.readings.explain(request, 0),
            write=lambda found: json_answer(found, status=404 if "unknown" in found else 200),
            takes=("request",),
        ),
    }


def health_page(word: str, reasons: Callable[[], list[str]]) -> Page:
    """Return a check that fails while there are `reasons`. Callers without the token do not see the reasons."""

    def answer(why: list[str], more: dict[str, Any]) -> HttpResponse:
        return json_answer({word: not why, **more}, status=503 if why else 200)

    return Page(
        read=reasons,
        write=lambda why: answer(why, {"why": why}),
        hidden=lambda why: answer(why, {}),
    )


def ready_page(server: Server) -> Page:
    """Return the check whether a server may get requests, for all its models or for the `model` of the query.

    The answer to a caller without the token does not say whether such a model exists.
    """

    def look(model: str | None = None) -> dict[str, Any]:
        if model is None:
            why = server.readings.not_ready()
            return {"ready": not why, "why": why}
        known = model in server.readings.models.names
        why = server.readings.not_ready(model) if known else [f"no model {model!r}"]
        return {"ready": not why, "model": model, "why": why, "known": known}

    def write(found: dict[str, Any]) -> HttpResponse:
        known = found.pop("known", True)
        status = 200 if found["ready"] else 503 if known else 404
        return json_answer(found, status=status)

    def hidden(found: dict[str, Any]) -> HttpResponse:
        return json_answer({"ready": found["ready"]}, status=200 if found["ready"] else 503)

    return Page(read=look, write=write, hidden=hidden, takes=("model",))


def json_page(read: Callable[[], dict[str, Any] | Slices[dict[str, Any]]]) -> Page:
    """Return a page of plain data."""
    return Page(read=read, write=json_answer)


def html_page() -> Page:
    """Return the HTML page, without data, which it fetches from `/events`. Only its own styles and script may run."""
    html = files("shapestream.serving").joinpath("page.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        inside = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert inside is not None
        return base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = (
        ("Content-Security-Policy", policy),
        ("Cache-Control", "no-cache"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Content-Type-Options", "nosniff"),
    )

    def write(_: None) -> HttpResponse:
        return HttpResponse(body=(html.encode(),), headers=headers, content_type="text/html; charset=utf-8")

    return Page(read=None, write=write, hidden=write)


def reload_page(
    ask: Callable[[str], dict[str, Any]], find: Callable[[int | None], dict[str, Any] | None]
) -> Page:
    """Return a page that asks for a reload (PUT), and reads the last one, or the one with a `number` (GET).

    PUT of `{}` replaces what changed, of `{"what": "all"}` every process; `{"what": "nothing"}` only tells what would
    happen. Neither waits for the end of the reload. `find` returns None for an unknown one.
    """

    def look(number: str = "") -> dict[str, Any] | None:
        if number and not (number.isdecimal() and len(number) < 10):
            raise ConfigurationError(["number is that of a reload"])
        return find(int(number) if number else None)

    def change(asked: Any) -> dict[str, Any]:
        what = (
            asked.get("what", "changes") if isinstance(asked, dict) and not asked.keys() - {"what"} else None
        )
        if what not in ("changes", "all", "nothing"):
            raise ConfigurationError(['expected {}, or {"what": "changes"}, "all" or "nothing"'])
        return ask(what)

    def write(found: dict[str, Any] | None) -> HttpResponse:
        if found is None:
            return json_answer({"error": "there was no such reload, or it is forgotten"}, status=404)
        return json_answer(found)

    return Page(read=look, write=write, takes=("number",), change=change)


class _Collected:
    """A collector of metrics that were read before, and of those of the process."""

    def __init__(self, found: list[tuple[Metric, list[Sample]]]) -> None:
        self._found = found

    def collect(self) -> Iterator[MetricFamily]:
        """Yield each family."""
        for metric, samples in self._found:
            family = _FAMILIES[metric.type](metric.name, metric.help, labels=metric.labels)
            for labels, value in samples:
                if isinstance(value, Buckets):
                    family.add_metric(labels, value.counts, value.total)
                else:
                    family.add_metric(labels, value)
            yield family
        yield from _PROCESS.collect()


_FAMILIES: dict[MetricType, Callable[..., Any]] = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
    MetricType.HISTOGRAM: HistogramMetricFamily,
}
_PROCESS = ProcessCollector(registry=None)


def _exposition(found: list[tuple[Metric, list[Sample]]]) -> HttpResponse:
    return HttpResponse(
        body=(generate_latest(cast(Any, _Collected(found))),), content_type=CONTENT_TYPE_LATEST
    )
