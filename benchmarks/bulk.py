"""`python -m benchmarks.bulk`: a caller's single texts beside its own bulk call, over HTTP.

A web application has one address. It sends a call of 64 docstrings, the next one when that is answered, and single texts
at random times meanwhile. Its singles are measured without a bulk call, beside its own, and beside that of another
address; the bulk calls also without singles. The ways take turns, round by round. Every vector is compared with the
model's alone.
"""

from __future__ import annotations

import base64
import json
import select
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.http_client import HOST, HttpClient
from benchmarks.limit.figures import quantile_ms
from benchmarks.report import Figure, Report, print_reports
from benchmarks.text import CLOSE, HEADERS, PATH, TEXTS, Alone, Prepared, prepare, serve
from benchmarks.versus import interval

SINGLES_PER_S = 20.0
OTHER_HOST = "127.0.0.2"
"""Another address of the loopback interface: another caller."""
AIM_ALL = 0.9
"""Least rate of all texts, singles and bulk / that of bulk calls alone."""
PATIENCE_S = 60.0


@dataclass(slots=True, kw_only=True)
class Way:
    """A way to send singles and bulk calls, and its figures by round."""

    name: str
    singles: bool = True
    bulk_from: str | None = HOST
    """The address of who sends the bulk calls; None: nobody does."""
    latency_s: list[list[float]] = field(default_factory=list)
    bulks_per_s: list[float] = field(default_factory=list)

    def quantiles_ms(self, quantile: float) -> list[float]:
        """Return a quantile of the singles' latencies for each round."""
        return [quantile_ms(latencies, quantile) for latencies in self.latency_s]

    def play(self, port: int, texts: Texts, seconds: float, seed: int) -> None:
        """Play one round."""
        draw = np.random.default_rng(seed)
        due_s: list[float] = []
        if self.singles:
            gaps = draw.exponential(1.0 / SINGLES_PER_S, round(SINGLES_PER_S * seconds))
            due_s = np.cumsum(gaps).tolist()
        chosen = draw.integers(len(texts.texts), size=len(due_s)).tolist()
        latency_s = [0.0] * len(due_s)
        with ExitStack() as stack:
            one = stack.enter_context(HttpClient(port, PATH, HEADERS))
            many = stack.enter_context(HttpClient(port, PATH, HEADERS, source=self.bulk_from or HOST))
            began = time.perf_counter()
            sent = received = bulks = 0
            bulk_texts: list[int] = []
            last_bulk_s = 0.0
            while True:
                now_s = time.perf_counter() - began
                if self.bulk_from is not None and not bulk_texts and now_s < seconds:
                    bulk_texts = draw.integers(len(texts.texts), size=texts.each).tolist()
                    many.ask(texts.body(bulk_texts))
                if received == len(due_s) and not bulk_texts and now_s >= seconds:
                    break
                if now_s > seconds + PATIENCE_S:
                    raise AssertionError(f"{self.name}: no answer within {PATIENCE_S:g} s")
                if sent < len(due_s) and due_s[sent] <= now_s:
                    one.ask(texts.body([chosen[sent]]))
                    sent += 1
                next_s = due_s[sent] if sent < len(due_s) else seconds + PATIENCE_S
                select.select([one, many], [], [], max(0.0, min(next_s, now_s + 1.0) - now_s))
                for number, body in one.take():
                    latency_s[number] = time.perf_counter() - began - due_s[number]
                    texts.check(self.name, [chosen[number]], body)
                    received += 1
                for _, body in many.take():
                    last_bulk_s = time.perf_counter() - began
                    texts.check(self.name, bulk_texts, body)
                    bulks, bulk_texts = bulks + 1, []
        if latency_s:
            self.latency_s.append(latency_s)
        if bulks:
            self.bulks_per_s.append(bulks / last_bulk_s)


class Texts:
    """Docstrings, the bodies of calls, and what their answers must be."""

    def __init__(self, prepared: Prepared, count: int, each: int) -> None:
        chosen = np.random.default_rng(0).choice(len(prepared.texts), count, replace=False)
        self.texts = [prepared.texts[number] for number in chosen.tolist()]
        self.each = each
        """Texts of a bulk call."""
        (self._right,) = Alone(prepared).vectors([self.texts])

    def body(self, numbers: Sequence[int]) -> bytes:
        """Return the body of a call with these texts."""
        inputs = [self.texts[number] for number in numbers]
        return json.dumps({"model": "minilm", "input": inputs, "encoding_format": "base64"}).encode()

    def check(self, name: str, numbers: Sequence[int], body: bytes) -> None:
        """Compare an answer with the model's vectors of each text alone."""
        rows: list[NDArray[np.float32]] = [
            np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in json.loads(body)["data"]
        ]
        if len(rows) != len(numbers):
            raise AssertionError(f"{name}: {len(rows)} vectors of {len(numbers)} texts")
        cosines = np.einsum("ij,ij->i", np.array(rows), self._right[list(numbers)])
        if cosines.min() < CLOSE:
            raise AssertionError(f"{name}: a vector differs: {cosines.min()}")


def measure(folder: Path, *, rounds: int, seconds: float, each: int) -> list[Report]:
    """`seconds` of arrivals per way and round; `each`: texts of a bulk call."""
    ways = [
        Way(name="singles alone", bulk_from=None),
        Way(name="beside a bulk of their own address"),
        Way(name="beside a bulk of another address", bulk_from=OTHER_HOST),
        Way(name="bulk alone", singles=False),
    ]
    prepared = prepare(folder)
    texts = Texts(prepared, 4 * each, each)
    with ExitStack() as stack:
        _, _, port = serve(stack, folder, prepared.folder)
        ways[-1].play(port, texts, min(seconds, 2.0), 0)
        ways[-1].bulks_per_s.clear()
        turns = list(ways)
        for seed in range(rounds):
            for way in turns:
                way.play(port, texts, seconds, seed)
            turns = turns[1:] + turns[:1]
    return [_report(ways, each)]


def _report(ways: Sequence[Way], each: int) -> Report:
    report = Report(
        title=f"{SINGLES_PER_S:g} single texts a second; bulk calls of {each} texts, one after the other"
    )
    report.columns = (
        "singles",
        "p50, ms",
        "p95, ms",
        "p99, ms",
        "bulk texts per s",
        "all texts / bulk alone",
    )
    alone = ways[-1]
    for way in ways:
        quantiles: list[Figure | str] = ["", "", ""]
        if way.latency_s:
            quantiles = [
                Figure(statistics.median(way.quantiles_ms(quantile)), "ms") for quantile in (50, 95, 99)
            ]
        rate: Figure | str = ""
        ratio: Figure | str = ""
        if way.bulks_per_s:
            rate = Figure(statistics.median(way.bulks_per_s) * each, "/s")
        if way.bulks_per_s and way is not alone:
            ratios = [
                (one * each + SINGLES_PER_S) / (bulk * each)
                for one, bulk in zip(way.bulks_per_s, alone.bulks_per_s, strict=True)
            ]
            ratio = Figure(statistics.median(ratios), "x", at_least=AIM_ALL)
        report.rows.append((way.name, *quantiles, rate, ratio))
    own, other = ways[1], ways[2]
    ratios = [one / two for one, two in zip(own.quantiles_ms(50), other.quantiles_ms(50), strict=True)]
    low, high = interval(ratios)
    report.rows.append(
        ("own address / another", f"{statistics.median(ratios):.2f}, {low:.2f}..{high:.2f}", "", "", "", "")
    )
    return report


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of arrivals, per way and round.")] = 10.0,
) -> None:
    """Measure single texts beside bulk calls of the same and of another caller."""
    if smoke:
        rounds, seconds = 1, 0.5
    print_reports(
        lambda folder: measure(folder, rounds=rounds, seconds=seconds, each=4 if smoke else TEXTS),
        as_json=as_json,
    )


if __name__ == "__main__":
    typer.run(main)
