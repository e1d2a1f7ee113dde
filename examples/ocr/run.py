"""Pages through a chain of three models with real weights, beside the package that these come from.

    python -m examples.ocr.run [--quick] [--rounds N] [--pages N] [--config FILE] [--out FOLDER] [--json FILE]

Starts `shapestream serve configs/ocr.yaml` and streams pages that are drawn here. Each answer is compared with the stages
run alone; boxes and texts are compared with the package's, and with what was drawn. Then all ways to read the pages are
measured in turn. The exit status says whether all was right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import trio
from rich.console import Console
from rich.markup import escape

import shapestream
from examples.console import make_console
from examples.ocr import models, samples, stages
from examples.ocr.alone import Cut, Plain, Reading
from examples.ocr.beside import Package, Texts, agreement, certain, mistakes
from examples.ocr.contest import CHAIN, PADDED_CHAIN, THREADS, measure, stream
from examples.ocr.drawing import draw
from examples.ocr.pages import Page, draw_pages
from examples.server_process import ServerFailed, with_server
from shapestream import ShapestreamError

ROOT = Path(__file__).parents[2]
PAGES, QUICK_PAGES, ROUNDS = 16, 4, 3
MOST_DRAWN = 6
# docs/safety.md, of results that are computed in f32: of the standard deviation, and of the largest value.
OF_SPREAD, OF_LARGEST = 1e-3, 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 0 if everything was as it should be."""
    options = _parse(arguments)
    console = make_console()
    console.print("[bold]shapestream ocr[/bold]: a detector, a classifier and a recogniser as one request\n")
    cv2.setNumThreads(THREADS)
    models.write()
    samples.write()
    pages = draw_pages(options.pages or (QUICK_PAGES if options.quick else PAGES))

    async def use(address: str) -> bool:
        async with shapestream.connect(address) as client:
            return await _use(console, client, pages, options)

    async def run() -> bool:
        log = options.out / "ocr.log"
        return await with_server(options.config, "recogniser", workers=1, log=log, use=use)

    console.print(
        "starting the server and its worker; the first time, its models are proved (a minute or two)"
    )
    try:
        right = trio.run(run)
    except (ServerFailed, ShapestreamError) as error:
        console.print(f"[red]failed:[/red] {escape(str(error))}")
        return 1
    if not right:
        console.print("[bold red]FAILED[/bold red]")
        return 1
    console.print("[bold green]OK[/bold green]: every answer equals its stages run alone")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pages through a chain, beside the package of its models.")
    parser.add_argument("--quick", action="store_true", help="fewer pages, and nothing is measured")
    parser.add_argument("--pages", type=int, help=f"how many pages ({PAGES})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of measuring ({ROUNDS})")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "ocr.yaml", help="what to serve")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", help="folder for ocr.png and ocr.log")
    parser.add_argument("--json", type=Path, help="write what was measured here, too")
    return parser.parse_args(arguments)


async def _use(
    console: Console, client: shapestream.Client, pages: Sequence[Page], options: argparse.Namespace
) -> bool:
    lines = [len(page.lines) for page in pages]
    console.print(f"{len(pages)} pages of {min(lines)} to {max(lines)} lines, {sum(lines)} in all")
    answers, padded = [await stream(client, chain, pages) for chain in (CHAIN, PADDED_CHAIN)]
    plain, package = Plain(THREADS), Package(THREADS)
    right = True
    for name, cut, found in (
        ("as wide as they are", stages.cut_lines, answers),
        ("filled up as the package does", stages.cut_padded_lines, padded),
    ):
        expected = await trio.to_thread.run_sync(_read_all, plain, pages, cut)
        wrong = _differences(expected, found)
        console.print(f"lines {name}: {len(pages) - len(wrong)} of {len(pages)} pages equal the stages alone")
        for words in wrong[:10]:
            console.print(f"[red]wrong:[/red] {escape(words)}")
        right = right and not wrong
    theirs = await trio.to_thread.run_sync(lambda: [package.read(page.pixels) for page in pages])
    ours, ours_padded = ([_certain(answer) for answer in found] for found in (answers, padded))
    _tell_agreement(console, ours_padded, theirs)
    _tell_mistakes(
        console, pages, {"as wide as they are": ours, "filled up": ours_padded, "the package": theirs}
    )
    sheet = options.out / "ocr.png"
    draw(pages[:MOST_DRAWN], ours[:MOST_DRAWN], sheet)
    console.print(f"drew {min(MOST_DRAWN, len(pages))} pages: {sheet}")
    if not options.quick:
        rows = await measure(console, client, pages, plain, package, options.rounds)
        if options.json is not None:
            options.json.write_text(json.dumps(rows))
    return right


def _read_all(plain: Plain, pages: Sequence[Page], cut: Cut) -> list[Reading]:
    return [plain.read(page.pixels, cut) for page in pages]


def _certain(answer: shapestream.Result) -> Texts:
    return certain(answer["boxes"], [str(text) for text in answer["text"]], answer["score"])


def _differences(expected: Sequence[Reading], answers: Sequence[shapestream.Result]) -> list[str]:
    """What differs from the stages alone: integers and texts at all, floats beyond the tolerance."""
    wrong = []
    bounds = {
        name: _bound(np.concatenate([np.ravel(value) for each in expected for value in getattr(each, name)]))
        for name in ("turned", "likely", "scores")
    }
    for number, (alone, answer) in enumerate(zip(expected, answers, strict=True)):
        if not np.array_equal(alone.boxes, answer["boxes"]):
            wrong.append(f"page {number}: the boxes differ")
        elif not all(map(np.array_equal, alone.labels, answer["label"])):
            wrong.append(f"page {number}: labels differ")
        elif list(alone.texts) != [str(text) for text in answer["text"]]:
            wrong.append(f"page {number}: texts differ")
        else:
            pairs = [("turned", alone.turned, answer["turned"]), ("scores", alone.scores, answer["score"])]
            pairs += [("likely", *pair) for pair in zip(alone.likely, answer["likely"], strict=True)]
            far = {name for name, one, other in pairs if np.abs(one - other).max(initial=0) > bounds[name]}
            wrong += [f"page {number}: {', '.join(sorted(far))} beyond the tolerance"] if far else []
    return wrong


def _bound(values: Any) -> float:
    return float(OF_SPREAD * values.std() + OF_LARGEST * np.abs(values).max()) if len(values) else 0.0


def _tell_agreement(console: Console, ours: Sequence[Texts], theirs: Sequence[Texts]) -> None:
    pairs = [agreement(one, other) for one, other in zip(ours, theirs, strict=True)]
    boxes, texts = (sum(counts) for counts in zip(*pairs, strict=True))
    console.print(
        f"beside the package, lines filled up: of its {sum(len(each.texts) for each in theirs)} boxes {boxes} are ours "
        f"within 2 pixels, and {texts} of these have the same text"
    )


def _tell_mistakes(console: Console, pages: Sequence[Page], ways: dict[str, Sequence[Texts]]) -> None:
    lines = sum(len(page.lines) for page in pages)
    characters = sum(len(line.text) for page in pages for line in page.lines)
    console.print(f"against what was drawn, {lines} lines of {characters} characters:")
    for name, read in ways.items():
        counts = [mistakes(page, texts) for page, texts in zip(pages, read, strict=True)]
        wrong_lines, wrong = (sum(each) for each in zip(*counts, strict=True))
        console.print(f"  {name}: {wrong_lines} lines differ, {wrong} characters ({wrong / characters:.2%})")


if __name__ == "__main__":
    sys.exit(main())
