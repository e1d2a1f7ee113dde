"""`shapestream stats`: the last minute of a running server, by model, as tables or JSON.

`shapestream top` draws the same tables again each second in a terminal, over one connection.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shapestream import blocking
from shapestream.errors import Forbidden, RequestError, Unavailable
from shapestream_workers.target import ServerAccess

SHOWN_ROWS = 20
"""Largest number of rows of the tables of workers and failures, for a terminal; --json has all of them."""
REFRESH_S = 1.0
PATIENCE_S = 2.0
"""Seconds to wait for an answer; after that the last tables stay, with a warning. Keys are read between two requests."""
LOOKS = 10
"""Refreshes over which the rates of workers are taken."""


def show_stats(access: ServerAccess, *, as_json: bool) -> None:
    """Ask the server once, and print its statistics."""
    with access.connect() as client:
        show(access.address, counters_of(client, access.address), as_json=as_json)


def show_top(access: ServerAccess, *, once: bool, as_json: bool) -> None:
    """Draw until `q` or Ctrl-C; once for scripts, and where stdout is no terminal."""
    console = Console()
    with access.connect() as client:
        told = counters_of(client, access.address)
        if once or as_json or not console.is_terminal:
            show(access.address, told, as_json=as_json)
            return
        with suppress(KeyboardInterrupt), _keyboard() as pressed:
            _watch(client, access.address, told, console, pressed)


def _watch(
    client: blocking.Client,
    address: str,
    told: dict[str, Any],
    console: Console,
    pressed: Callable[[float], bytes],
) -> None:
    looks, answered_at, trouble = deque([told], maxlen=LOOKS), time.monotonic(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            before = looks[0] if len(looks) > 1 else None
            status = Text(trouble or "q ends", style="bold red" if trouble else "dim")
            live.update(Group(status, drawing(address, looks[-1], before)), refresh=True)
            if b"q" in pressed(REFRESH_S):
                return
            try:
                told = counters_of(client, address, PATIENCE_S)
            except RequestError as error:
                lost_s = time.monotonic() - answered_at
                trouble = f"no answer for {lost_s:.0f} s, trying on; this is what was last seen ({error.code}); q ends"
                continue
            if told["pid"] != looks[-1]["pid"]:
                looks.clear()
            looks.append(told)
            answered_at, trouble = time.monotonic(), ""


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that waits for pressed keys, at most so many seconds, and returns them. Keys are not echoed.

    The function returns `q` when the terminal has closed. Where stdin is no terminal, it only waits.
    """
    stdin = sys.stdin.fileno()
    watched = [stdin] if sys.stdin.isatty() else []

    def pressed(seconds: float) -> bytes:
        ready, _, _ = select.select(watched, [], [], seconds)
        return os.read(stdin, 64) or b"q" if ready else b""

    before = termios.tcgetattr(stdin) if watched else []
    if watched:
        tty.setcbreak(stdin)
    try:
        yield pressed
    finally:
        if watched:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def counters_of(client: blocking.Client, address: str, deadline_s: float | None = 10.0) -> dict[str, Any]:
    """Return the server's statistics; raises `Forbidden` and `Unavailable` where they lack the last minute."""
    told = client.statistics(deadline=deadline_s)
    if "forbidden" in told:
        raise Forbidden(told["forbidden"])
    if "last_minute" not in told:
        raise Unavailable(f"the server at {address} tells no last minute: it is older than this command")
    return told


def show(address: str, told: Mapping[str, Any], *, as_json: bool) -> None:
    """Print statistics: all of them as JSON, or tables."""
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        Console().print(drawing(address, told))


def drawing(address: str, told: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Group:
    """Return tables of statistics, at least 80 columns wide.

    The table of workers counts from `before`, earlier statistics of the same server; None: from its start.
    """
    minute = told["last_minute"]
    parts: list[RenderableType] = [_headline(address, told), Text(), _requests(told), Text(), _batches(told)]
    if left_out := minute["models_left_out"]:
        parts.append(Text(f"and {left_out} models that did less"))
    parts += [_shown(why) for why in told["unavailable"].values()]
    parts += [Text(), _workers(told, before)]
    failures = _failures(minute)
    if failures.row_count:
        parts += [Text(), failures]
    return Group(*parts, *_failed_batches(minute))


def _headline(address: str, told: Mapping[str, Any]) -> Text:
    scheduler, minute = told["scheduler"], told["last_minute"]
    arrived, results = (
        sum(row[name] for row in minute["models"].values()) for name in ("arrived", "results")
    )
    busy = scheduler["slots"] - scheduler["free_slots"]
    return Text(
        f"{address}{', draining' if told['draining'] else ''}, up for {_spell_s(told['uptime_s'])}\n"
        f"now: clients {told['clients']}, requests unanswered {told['unfinished']:,}, queued {scheduler['queued']:,}, "
        f"slots busy {busy}/{scheduler['slots']}\n"
        f"last {minute['seconds']:.0f} s: requests {arrived:,}, results {results:,}"
    )


def _requests(told: Mapping[str, Any]) -> Table:
    table = _table("Requests", "model", "in/s", "out/s", "failed", "queued", "waited", "p50", "p95", "p99")
    minute, queues = told["last_minute"], told["scheduler"]["models"]
    for name, row in minute["models"].items():
        table.add_row(
            _shown(name),
            _rate(row["arrived"], minute["seconds"]),
            _rate(row["results"], minute["seconds"]),
            _spell(sum(row["failures"].values())),
            _spell(queues.get(name, {}).get("queued", 0)),
            _spell_us(row["queue_us"], "p95"),
            *[_spell_us(row["total_us"], quantile) for quantile in ("p50", "p95", "p99")],
        )
    return table


def _batches(told: Mapping[str, Any]) -> Table:
    times = {"gather": "gather_us", "infer": "run_us", "split": "split_us"}
    table = _table("Batches", "model", "per s", "size", "p95", "rows/s", "padded", "new", *times, "slots")
    minute, queues = told["last_minute"], told["scheduler"]["models"]
    for name, row in minute["models"].items():
        sizes, queue = row["batch_requests"], queues.get(name, {"slots": 0, "free_slots": 0})
        computed = row["elements_computed"]
        table.add_row(
            _shown(name),
            _rate(row["batches"], minute["seconds"]),
            _spell(sizes["mean"]) if sizes["count"] else "",
            _spell(sizes["p95"]) if sizes["count"] else "",
            _rate(row["rows"], minute["seconds"]),
            f"{row['elements_padding'] / computed:.1%}" if computed else "",
            _spell(row["new_shapes"]),
            *[_spell_us(row[name], "p50") for name in times.values()],
            f"{queue['slots'] - queue['free_slots']}/{queue['slots']}",
        )
    return table


def _workers(told: Mapping[str, Any], before: Mapping[str, Any] | None) -> Table:
    seconds = told["uptime_s"] - (before["uptime_s"] if before else 0.0)
    earlier = before["slots"] if before else {}
    slots: Counter[str] = Counter()
    batches: Counter[str] = Counter()
    busy_s: defaultdict[str, float] = defaultdict(float)
    for label, slot in told["slots"].items():
        worker = label.rpartition("/")[0]
        then = earlier.get(label, {"batches": 0, "busy_s": 0.0})
        slots[worker] += 1
        batches[worker] += slot["batches"] - then["batches"]
        busy_s[worker] += slot["busy_s"] - then["busy_s"]
    table = _table(
        f"Workers, last {seconds:.0f} s" if before else "Workers, since the start",
        "worker",
        "slots",
        "batches/s",
        "busy",
    )
    for worker, count in list(slots.items())[:SHOWN_ROWS]:
        share = min(1.0, busy_s[worker] / seconds / count) if seconds else 0.0
        table.add_row(_shown(worker), str(count), _rate(batches[worker], seconds), f"{share:.0%}")
    return table


def _failures(minute: Mapping[str, Any]) -> Table:
    """Return the failed requests by model and code, and those that were refused before the scheduler got them."""
    table = _table("Failures", "model", "code", "count")
    found = [(name, *one) for name, row in minute["models"].items() for one in row["failures"].items()]
    found += [("(refused at the port)", *one) for one in minute["refused"].items()]
    for name, code, count in sorted(found, key=lambda one: -one[2])[:SHOWN_ROWS]:
        table.add_row(_shown(name), _shown(code), _spell(count))
    return table


def _failed_batches(minute: Mapping[str, Any]) -> list[Text]:
    """Return the lines about the models whose failed batches held slots for the longest time."""
    held_us = {name: row["failed_us"] for name, row in minute["models"].items() if row["failed_us"]}
    return [
        _shown(f"failed batches held slots of {name} for {_spell_time(held_us[name])}")
        for name in sorted(held_us, key=lambda name: -held_us[name])[:SHOWN_ROWS]
    ]


def _table(title: str, name: str, *headings: str) -> Table:
    """Return a table. Where there is no room, its first column is cut short."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(name, overflow="ellipsis")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _shown(text: str) -> Text:
    """Return the text that a server sent, without control characters, which must not reach the terminal."""
    return Text("".join(character if character.isprintable() else "?" for character in text))


def _rate(count: float, seconds: float) -> str:
    """Return a count per second, in six characters."""
    return _spell(count / seconds if seconds else 0.0)


def _spell(number: float) -> str:
    """Return a number in six characters."""
    if number < 99_999.5:
        return f"{number:,.{0 if number >= 99.95 or number == int(number) else 1 if number >= 0.95 else 2}f}"
    unit = iter("kMGTPE")
    while number >= 999.5 and (letter := next(unit, "")):
        number /= 1000
    return f"{number:.0f}{letter}"


def _spell_us(histogram: Mapping[str, Any], quantile: str) -> str:
    """Return a quantile of microseconds, in six characters; empty without measurements."""
    if not histogram["count"]:
        return ""
    return _spell_time(histogram[quantile])


def _spell_time(us: int) -> str:
    """Return the microseconds, in six characters up to 11 days."""
    if us < 1000:
        return f"{us}us"
    return f"{us / 1e3:.{int(us < 1e4)}f}ms" if us < 1e6 else f"{us / 1e6:.{int(us < 1e7)}f}s"


def _spell_s(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
