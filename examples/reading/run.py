"""Photographs through a chain: a detector, a crop of each blob, and which way the edges of each crop run.

    python -m examples.reading.run [--quick] [--config FILE] [--out FOLDER]

Starts `shapestream serve configs/reading.yaml` with two workers and streams photographs and parts of them. Each answer is
compared with the three stages run one after the other, one crop at a time. The exit status says whether all was right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import trio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import shapestream
from examples import model_file
from examples.console import make_console, progress_bars
from examples.detector import model as detector
from examples.detector.pictures import Picture, load_photographs, make_workload
from examples.reading import model as recogniser
from examples.reading.crops import crop
from examples.reading.drawing import Read, draw
from examples.server_process import ServerFailed, with_server
from shapestream import ShapestreamError

ROOT = Path(__file__).parents[2]
DETECTOR, RECOGNISER = ROOT / ".cache" / "detector.xml", ROOT / ".cache" / "recogniser.xml"
CHAIN = "reading"
WORKERS = 2
CROPS_PER_SIZE, QUICK_CROPS_PER_SIZE = 30, 5
MAX_IN_FLIGHT = 32
# Sums of whole numbers are exact; their mean is rounded once.
TOLERANCE = 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; 0 if everything was as it should be."""
    options = _parse(arguments)
    console = make_console()
    console.print("[bold]shapestream reading[/bold]: a detector, crops and a recogniser as one request\n")
    model_file.ensure(DETECTOR, detector, detector.build)
    model_file.ensure(RECOGNISER, recogniser, recogniser.build)
    count = QUICK_CROPS_PER_SIZE if options.quick else CROPS_PER_SIZE
    pictures = make_workload(load_photographs(), crops_per_size=count)
    try:
        answers, counters, elapsed_s = _stream(console, pictures, options)
    except (ServerFailed, ShapestreamError) as error:
        console.print(f"[red]failed:[/red] {escape(str(error))}")
        return 1
    wrong = _compare(console, pictures, answers)
    shown = [
        Read(name=picture.name, pixels=picture.image[0, 0], peaks=answer["peaks"], edges=answer["edges"])
        for picture, answer in zip(pictures, answers, strict=True)
        if not picture.is_crop
    ]
    sheet = options.out / "reading.png"
    draw(shown, sheet)
    console.print(_summary(answers, counters, elapsed_s))
    console.print(f"\ndrew {len(shown)} photographs: {sheet}")
    for words in wrong[:10]:
        console.print(f"[red]wrong:[/red] {escape(words)}")
    if wrong:
        console.print(f"[bold red]FAILED[/bold red]: {len(wrong)} answers")
        return 1
    console.print("[bold green]OK[/bold green]: every answer equals its stages run one after the other")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Photographs through a chain; every answer is checked.")
    parser.add_argument("--quick", action="store_true", help="fewer pictures")
    parser.add_argument(
        "--config", type=Path, default=ROOT / "configs" / "reading.yaml", help="what to serve"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".demo", help="folder for reading.png and reading.log"
    )
    return parser.parse_args(arguments)


def _stream(
    console: Console, pictures: Sequence[Picture], options: argparse.Namespace
) -> tuple[list[shapestream.Result], dict[str, Any], float]:
    """All answers, the server's counters, and the seconds that it took."""

    async def use(address: str) -> tuple[list[shapestream.Result], dict[str, Any], float]:
        console.print(f"streaming {len(pictures)} pictures to {WORKERS} workers")
        answers: list[shapestream.Result] = []
        with progress_bars(console) as progress:
            bar = progress.add_task("pictures", total=len(pictures))
            began = time.monotonic()
            async with shapestream.connect(address) as client:
                inputs = ({"image": picture.image} for picture in pictures)
                async with client.stream(CHAIN, inputs, max_in_flight=MAX_IN_FLIGHT) as results:
                    async for result in results:
                        assert isinstance(result, shapestream.Result)  # a failed one was raised
                        answers.append(result)
                        progress.advance(bar)
                return answers, await client.statistics(), time.monotonic() - began

    async def run() -> tuple[list[shapestream.Result], dict[str, Any], float]:
        log = options.out / "reading.log"
        return await with_server(options.config, "recogniser", workers=WORKERS, log=log, use=use)

    console.print("starting the server and its workers")
    return trio.run(run)


def _compare(
    console: Console, pictures: Sequence[Picture], answers: Sequence[shapestream.Result]
) -> list[str]:
    """The differences from the stages run one after the other, in this process, one crop at a time."""
    console.print("running the stages one after the other, one crop at a time")
    core = ov.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    find, read = (core.compile_model(path, "CPU", exact) for path in (DETECTOR, RECOGNISER))
    wrong = []
    with progress_bars(console) as progress:
        pairs = [*zip(pictures, answers, strict=True)]
        for picture, answer in progress.track(pairs, description="one at a time"):
            peaks = _alone(find, picture.image)
            edges = [read(each[None])["edges"][0] for each in crop(picture.image, peaks)["crops"]]
            expected = np.array(edges, np.float32).reshape(len(edges), 4)
            if not np.array_equal(peaks, answer["peaks"]):
                wrong.append(f"picture {picture.number}: the peaks differ")
            elif not np.allclose(expected, answer["edges"], rtol=TOLERANCE, atol=TOLERANCE):
                wrong.append(f"picture {picture.number}: what was read differs")
    return wrong


def _alone(find: Any, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    peaks: npt.NDArray[np.int32] = find(image)["peaks"].copy()
    return peaks


def _summary(answers: Sequence[shapestream.Result], counters: dict[str, Any], elapsed_s: float) -> Table:
    total_ms = np.array([answer.timings.total_us for answer in answers]) / 1000
    counts = [len(answer["peaks"]) for answer in answers]
    ways = Counter(recogniser.DIRECTIONS[row.argmax()] for answer in answers for row in answer["edges"])
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_row(
        "requests", f"{len(answers)} in {elapsed_s:.1f} s, {sum(counts) / elapsed_s:.0f} crops per second"
    )
    lines.add_row("crops", f"{min(counts)} to {max(counts)} per picture, {sum(counts)} in all")
    lines.add_row(
        "batches", f"{counters['batches']}, of {counters['mean_batch_requests']:.2f} requests in the mean"
    )
    lines.add_row(
        "latency", f"p50 {np.percentile(total_ms, 50):.1f} ms, p99 {np.percentile(total_ms, 99):.1f} ms"
    )
    lines.add_row("read", ", ".join(f"{ways[way]} {way}" for way in recogniser.DIRECTIONS))
    return lines


if __name__ == "__main__":
    sys.exit(main())
