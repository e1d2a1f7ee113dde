"""Photographs of many sizes stream through two worker processes, and every answer is checked.

    python -m examples.detector.demo [--quick] [--config FILE] [--out FOLDER]

Starts `shapestream serve configs/demo.yaml`, streams from two producers, compares each answer to the bit with the
same model run directly on that picture alone, and draws what was found. The exit status says whether all was right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import trio
from rich.console import Console
from rich.markup import escape

from examples import model_file
from examples.console import make_console, progress_bars
from examples.detector import model, reference
from examples.detector.answers import Answer, Detector, Peaks, Scores, mismatches, shortcomings
from examples.detector.overview import Found, draw
from examples.detector.pictures import Picture, Pixels, load_photographs, make_workload
from examples.detector.producing import PRODUCERS, stream_pictures
from examples.detector.report import summary, tables
from examples.server_process import ServerFailed, page_of, with_server
from shapestream import ShapestreamError

ROOT = Path(__file__).parents[2]
CROPS_PER_SIZE, QUICK_CROPS_PER_SIZE = 30, 10
MODEL = ROOT / ".cache" / "detector.xml"
WORKERS = 2
PROBLEMS_SHOWN = 10
# Compared with NumPy too: many detections of all sizes, few, and none.
CHECKED_BY_REFERENCE = ("coins", "page", "text")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; 0 if everything was as it should be."""
    options = _parse(arguments)
    console = make_console()
    console.print("[bold]shapestream demo[/bold]: a blob detector over photographs of many sizes\n")
    model_file.ensure(MODEL, model, model.build)
    photographs = load_photographs()
    pictures = make_workload(
        photographs, crops_per_size=QUICK_CROPS_PER_SIZE if options.quick else CROPS_PER_SIZE
    )
    try:
        answers, counters, elapsed_s = _stream(console, pictures, options)
    except (ServerFailed, ShapestreamError) as error:
        console.print(f"[red]failed:[/red] {escape(str(error))}")
        return 1

    problems = _check(console, answers) + shortcomings(answers, requests=len(pictures))
    console.print()
    console.print(tables(answers))
    console.print()
    console.print(summary(answers, counters, elapsed_s))
    overview = options.out / "overview.png"
    _draw_overview(answers, photographs, overview)
    return _conclude(console, problems, overview)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Photographs stream through two workers; every answer is checked."
    )
    parser.add_argument("--quick", action="store_true", help="fewer crops")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.yaml", help="what to serve")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".demo", help="folder for overview.png and server.log"
    )
    return parser.parse_args(arguments)


def _stream(
    console: Console, pictures: Sequence[Picture], options: argparse.Namespace
) -> tuple[list[Answer], dict[str, Any], float]:
    """All answers, the server's counters, and how long the producers took, in seconds."""

    async def run() -> tuple[list[Answer], dict[str, Any], float]:
        return await with_server(
            options.config, "detector", workers=WORKERS, log=options.out / "server.log", use=use
        )

    async def use(address: str) -> tuple[list[Answer], dict[str, Any], float]:
        page = page_of(options.out / "server.log")
        console.print(f"streaming {len(pictures)} requests from {PRODUCERS} producers to {WORKERS} workers")
        if page is not None:
            console.print(f"look at [bold]{page}[/bold] while it runs")
        with progress_bars(console) as progress:
            bars = [
                progress.add_task(f"producer {number + 1}", total=len(pictures[number::PRODUCERS]))
                for number in range(PRODUCERS)
            ]
            start = time.monotonic()
            answers, counters = await stream_pictures(
                address, pictures, lambda number: progress.advance(bars[number])
            )
            elapsed_s = time.monotonic() - start
        if page is not None and sys.stdin.isatty():
            await _stream_on(console, address, pictures, page)
        return answers, counters, elapsed_s

    console.print("starting the server and its workers")
    return trio.run(run)


async def _stream_on(console: Console, address: str, pictures: Sequence[Picture], page: str) -> None:
    """Stream the pictures again and again, until Enter is pressed: time to look at the page."""
    console.print(f"streaming on for {page}; press Enter to check the answers")

    async def again_and_again() -> None:
        while True:
            await stream_pictures(address, pictures, lambda _: None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(again_and_again)
        await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def _check(console: Console, answers: Sequence[Answer]) -> list[str]:
    """What is wrong with single answers: against the model itself, and for some against NumPy."""
    console.print("checking every answer, to the bit")
    direct = _direct_detector()
    chosen = [answer for answer in answers if answer.picture.name in CHECKED_BY_REFERENCE]
    with progress_bars(console) as progress:
        found = mismatches(progress.track(answers, description="the model alone"), direct, "the model alone")
        return found + mismatches(progress.track(chosen, description="NumPy"), reference.detect, "NumPy")


def _direct_detector() -> Detector:
    """The same model without any server: one request at a time, in this process."""
    compiled = ov.Core().compile_model(MODEL, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def detect(image: Pixels) -> tuple[Peaks, Scores]:
        result = compiled([np.ascontiguousarray(image)])
        return result["peaks"].copy(), result["scores"].copy()

    return detect


def _draw_overview(answers: Sequence[Answer], photographs: dict[str, Pixels], path: Path) -> None:
    peaks = {answer.picture.name: answer.peaks for answer in answers if not answer.picture.is_crop}
    shown = [
        Found(name=name.replace("_", " "), pixels=pixels, peaks=peaks[name])
        for name, pixels in photographs.items()
        if name in peaks
    ]
    draw(shown, path)


def _conclude(console: Console, problems: Sequence[str], overview: Path) -> int:
    console.print(f"\n[bold]overview[/bold]  {overview}", soft_wrap=True)
    for problem in problems[:PROBLEMS_SHOWN]:
        console.print(f"[red]wrong:[/red] {escape(problem)}")
    if len(problems) > PROBLEMS_SHOWN:
        console.print(f"... and {len(problems) - PROBLEMS_SHOWN} more")
    if problems:
        console.print(f"[bold red]FAILED[/bold red]: {len(problems)} problems")
        return 1
    console.print(
        "[bold green]OK[/bold green]: every answer equals, to the bit, that of the model run alone on the picture; "
        f"{len(CHECKED_BY_REFERENCE)} equal NumPy's"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
