"""What the demo prints: a table of pictures, one of crop sizes, and a summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table

from examples.coverage import worker_of, workers_of
from examples.detector.answers import Answer
from examples.detector.pictures import CROP_SIZES


def tables(answers: Sequence[Answer]) -> Group:
    """The photographs one by one, the crops by shape. `batch` is how many requests shared the inference call."""
    photographs = _table(
        "photographs, times in ms", "picture", "shape", "detections", "batch", "queue", "inference", "worker"
    )
    for answer in sorted((a for a in answers if not a.picture.is_crop), key=lambda a: a.picture.name):
        photographs.add_row(
            answer.picture.name.replace("_", " "),
            _by(answer.picture.size),
            str(len(answer.peaks)),
            str(answer.timings.batch_requests),
            _ms([answer.timings.queue_us]),
            _ms([answer.timings.run_us]),
            worker_of(answer.timings.worker),
        )
    return Group(photographs, _crop_table(answers))


def _crop_table(answers: Sequence[Answer]) -> Table:
    by_size: dict[tuple[int, int], list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.picture.is_crop:
            by_size[answer.picture.size].append(answer)
    crops = _table(
        "crops, mean batch and median times in ms", "shape", "requests", "rows", "detections",
        "empty", "batch", "queue", "inference",
    )  # fmt: skip
    for size in CROP_SIZES:
        group = by_size[size]
        timings = [answer.timings for answer in group]
        crops.add_row(
            _by(size),
            str(len(group)),
            str(sum(len(answer.picture.image) for answer in group)),
            str(sum(len(answer.peaks) for answer in group)),
            str(sum(not len(answer.peaks) for answer in group)),
            f"{np.mean([each.batch_requests for each in timings]):.1f}" if group else "",
            _ms([each.queue_us for each in timings]),
            _ms([each.run_us for each in timings]),
        )
    return crops


def _table(title: str, first: str, *headings: str) -> Table:
    """Fits into 80 columns; numbers stand to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def summary(answers: Sequence[Answer], counters: dict[str, Any], elapsed_s: float) -> Table:
    """The run in a few lines; batches and reallocations as the server counted them."""
    total_ms = np.array([answer.timings.total_us for answer in answers]) / 1000
    detections = sum(len(answer.peaks) for answer in answers)
    none = sum(not len(answer.peaks) for answer in answers)
    workers = workers_of([answer.timings for answer in answers])
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_row(
        "requests", f"{len(answers)} in {elapsed_s:.1f} s ({len(answers) / elapsed_s:.0f} per second)"
    )
    lines.add_row("detections", f"{detections}; {none} requests had none")
    lines.add_row("batches", f"{counters['batches']} on {len(workers)} workers ({', '.join(workers)})")
    lines.add_row("mean batch size", f"{counters['mean_batch_requests']:.2f} requests")
    lines.add_row(
        "distinct shapes",
        f"{len({a.picture.size for a in answers})} sizes of pictures, "
        f"{counters['distinct_shapes']} shapes of calls",
    )
    lines.add_row("reallocations", f"{counters['reallocations']} of input tensors")
    lines.add_row(
        "latency",
        f"p50 {np.percentile(total_ms, 50):.1f} ms, p99 {np.percentile(total_ms, 99):.1f} ms",
    )
    return lines


def _by(shape: Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape)


def _ms(times_us: Sequence[int]) -> str:
    if not times_us:
        return ""
    time_ms = float(np.median(times_us)) / 1000
    return f"{time_ms:.0f}" if time_ms >= 100 else f"{time_ms:.1f}"
