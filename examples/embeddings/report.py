"""What the example prints: answers to the queries, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from examples.coverage import workers_of
from examples.embeddings.corpus import Corpus
from examples.embeddings.docstrings import Docstring
from examples.embeddings.similarity import Neighbour
from examples.embeddings.streaming import Embedded

_NAME_WIDTH, _LINE_WIDTH = 38, 52


def neighbours(
    queries: Sequence[str], found: Sequence[Sequence[Neighbour]], docstrings: Sequence[Docstring]
) -> Group:
    """The nearest docstrings of each query, the best first; what is too long for a line is cut off."""
    parts: list[RenderableType] = []
    for query, nearest in zip(queries, found, strict=True):
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True, min_width=6, justify="right")
        lines.add_column(no_wrap=True, overflow="ellipsis", min_width=_NAME_WIDTH, max_width=_NAME_WIDTH)
        lines.add_column(no_wrap=True, overflow="ellipsis", max_width=_LINE_WIDTH)
        for neighbour in nearest:
            docstring = docstrings[neighbour.number]
            first_line = docstring.text.splitlines()[0]
            lines.add_row(f"{neighbour.cosine:.2f}", escape(docstring.name), escape(first_line))
        parts += [Text(), Text(query, style="bold"), lines]
    return Group(*parts)


def summary(
    corpus: Corpus,
    embedded: Sequence[Embedded],
    counters: dict[str, Any],
    cosines: Sequence[float],
    elapsed_s: float,
) -> Table:
    """The run in a few lines; batches and reallocations as the server counted them."""
    lengths = corpus.lengths
    timings = [each.timings for each in embedded]
    total_ms = np.array([each.total_us for each in timings]) / 1000
    workers = workers_of(timings)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    rate = f"{len(embedded) / elapsed_s:.0f} sentences, {lengths.sum() / elapsed_s:,.0f} tokens per second"
    lines.add_row("texts", f"{len(embedded)} in {elapsed_s:.1f} s ({rate})")
    lines.add_row("lengths", f"{lengths.min()} to {lengths.max()} tokens, median {np.median(lengths):.0f}")
    lines.add_row("batches", f"{counters['batches']} on {len(workers)} workers ({', '.join(workers)})")
    lines.add_row("mean batch size", f"{counters['mean_batch_requests']:.2f} requests")
    lines.add_row(
        "distinct shapes",
        f"{len(set(lengths.tolist()))} lengths, {counters['distinct_shapes']} shapes of calls",
    )
    lines.add_row("reallocations", f"{counters['reallocations']} of input tensors")
    lines.add_row(
        "latency", f"p50 {np.percentile(total_ms, 50):.1f} ms, p99 {np.percentile(total_ms, 99):.1f} ms"
    )
    lines.add_row("agreement", f"cosine at least {min(cosines):.7f} over {len(cosines)} rows")
    return lines
