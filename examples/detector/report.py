"""What the demo prints: a table of pictures, one of crop sizes, and a summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from examples.coverage import worker_of, workers_of
from examples.detector.answers import Answer
from examples.detector.pictures import CROP_SIZES


def tables(answers: Sequence[Answer]) -> Group:
    """The photographs one by one, the crops by size; times in milliseconds."""
    photographs = Table(title="photographs (shape: height x width)", title_justify="left")
    for heading in ("picture", "worker"):
        photographs.add_column(heading)
    for heading in ("shape", "detections", "shared with", "queue ms", "inference ms"):
        photographs.add_column(heading, justify="right")
    for answer in sorted((a for a in answers if not a.picture.is_crop), key=lambda a: a.picture.name):
        photographs.add_row(
            answer.picture.name.replace("_", " "),
            worker_of(answer.timings.worker),
            _by(answer.picture.size),
            str(len(answer.peaks)),
            _others(answer.timings.batch_requests - 1),
            _ms([answer.timings.queue_us]),
            _ms([answer.timings.run_us]),
        )
    return Group(photographs, Text(), _crop_table(answers))


def _crop_table(answers: Sequence[Answer]) -> Table:
    crops = Table(title="crops by shape (times: median)", title_justify="left")
    for heading in (
        "shape",
        "requests",
        "rows",
        "detections",
        "none in",
        "mean batch",
        "queue ms",
        "inference ms",
    ):
        crops.add_column(heading, justify="right")
    by_size: dict[tuple[int, int], list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.picture.is_crop:
            by_size[answer.picture.size].append(answer)
    for size in CROP_SIZES:
        group = by_size[size]
        crops.add_row(
            _by(size),
            str(len(group)),
            str(sum(len(answer.picture.image) for answer in group)),
            str(sum(len(answer.peaks) for answer in group)),
            str(sum(not len(answer.peaks) for answer in group)),
            f"{np.mean([answer.timings.batch_requests for answer in group]):.1f}" if group else "",
            _ms([answer.timings.queue_us for answer in group]),
            _ms([answer.timings.run_us for answer in group]),
        )
    return crops


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
        f"p50 {np.percentile(total_ms, 50):.1f} ms, p99 {np.percentile(total_ms, 99):.1f} ms, "
        "in the queue included",
    )
    return lines


def _by(shape: Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape)


def _others(count: int) -> str:
    return f"{count} other{'s' if count > 1 else ''}" if count else "alone"


def _ms(times_us: Sequence[int]) -> str:
    return f"{np.median(times_us) / 1000:.1f}" if times_us else ""
