"""The docstrings of Python's standard library, embedded by MiniLM in batches of mixed lengths, and searched.

    python -m examples.embeddings.run [--quick] [--count N] [--config FILE] [--out FOLDER]

Starts `shapestream serve configs/text.yaml` and streams texts of 4 to 256 tokens. The server tokenises them, and
embeds them in batches padded under the attention mask; rows are compared with the model run directly, one text at a
time, with the pooling in its graph. The queries are one request. The exit status says whether all was right.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import trio
from rich.console import Console
from rich.markup import escape

from examples import coverage
from examples.console import make_console, progress_bars
from examples.embeddings import folder, model
from examples.embeddings.corpus import Ids, make_corpus
from examples.embeddings.docstrings import SEED, collect
from examples.embeddings.report import neighbours, summary
from examples.embeddings.similarity import Vector, cosine, nearest
from examples.embeddings.streaming import MODEL, Embedded, embed_stream, embed_texts
from examples.embeddings.tokens import SentenceTokenizer
from examples.embeddings.weights import load_weights, model_folder
from examples.server_process import ServerFailed, with_server
from shapestream import ShapestreamError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "all-MiniLM-L6-v2"
COUNT, QUICK_COUNT = 1200, 300
CHECKED, QUICK_CHECKED = 200, 100
WORKERS = 2
# Float32 summed in another order differs in the seventh digit; a row that saw padding or a neighbour, far more.
MIN_COSINE = 0.999
NEIGHBOURS = 3
QUERIES = (
    "compress a file",
    "parse a date and time from text",
    "run a command in another process",
    "send an email message",
    "remove a directory and everything in it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came back from the server."""

    embedded: list[Embedded]
    queries: list[Vector]
    counters: dict[str, Any]
    elapsed_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; 0 if everything was as it should be."""
    options = _parse(arguments)
    console = make_console()
    console.print(
        "[bold]shapestream embeddings[/bold]: MiniLM over the docstrings of Python's standard library\n"
    )
    folder.ensure(FOLDER)
    tokenizer = SentenceTokenizer(FOLDER)
    console.print("reading docstrings")
    corpus = make_corpus(collect(), tokenizer, options.count or (QUICK_COUNT if options.quick else COUNT))
    try:
        run = _stream(console, [docstring.text for docstring in corpus.docstrings], options)
    except (ServerFailed, ShapestreamError) as error:
        console.print(f"[red]failed:[/red] {escape(str(error))}")
        return 1

    alone = _alone()
    cosines = [
        cosine(vector, alone(ids)) for vector, ids in zip(run.queries, tokenizer.encode(QUERIES), strict=True)
    ]
    cosines += _compare(console, alone, corpus.ids, run.embedded, QUICK_CHECKED if options.quick else CHECKED)
    problems = _shortcomings(run, corpus.lengths.tolist())
    wrong = sum(not value > MIN_COSINE for value in cosines)
    if wrong:
        problems.append(f"{wrong} rows differ from the model run alone: cosine {min(cosines):.6f} or more")
    found = [nearest(query, [each.vector for each in run.embedded], NEIGHBOURS) for query in run.queries]
    console.print(neighbours(QUERIES, found, corpus.docstrings))
    console.print()
    console.print(summary(corpus, run.embedded, run.counters, cosines, run.elapsed_s))
    return _conclude(console, problems)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MiniLM over the docstrings of Python's standard library.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_COUNT} docstrings instead of {COUNT}")
    parser.add_argument("--count", type=int, help="so many docstrings (there are about 6000)")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "text.yaml", help="what to serve")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", help="folder for embeddings.log")
    return parser.parse_args(arguments)


def _shortcomings(run: Run, lengths: list[int]) -> list[str]:
    """Return what is missing: answers, the right number of tokens, a batch of several requests, a second worker."""
    problems = []
    if [each.tokens for each in run.embedded] != lengths:
        problems.append("the server counted other tokens than the tokenizer alone")
    if run.counters["mean_batch_requests"] <= 1:  # a tokenizer's batch has one request
        problems.append("no batch of several requests ran")
    workers = coverage.workers_of([each.timings for each in run.embedded])
    if len(workers) < WORKERS:
        problems.append(f"fewer than {WORKERS} workers took part: {', '.join(workers)}")
    return problems


def _stream(console: Console, texts: list[str], options: argparse.Namespace) -> Run:
    """Everything that is asked of the server."""

    async def run() -> Run:
        return await with_server(
            options.config, MODEL, workers=WORKERS, log=options.out / "embeddings.log", use=use
        )

    async def use(address: str) -> Run:
        console.print(f"streaming {len(texts)} docstrings to {WORKERS} workers")
        with progress_bars(console) as progress:
            bar = progress.add_task("docstrings", total=len(texts))
            start = time.monotonic()
            embedded, counters = await embed_stream(address, texts, lambda: progress.advance(bar))
            elapsed_s = time.monotonic() - start
        return Run(
            embedded=embedded,
            queries=await embed_texts(address, QUERIES),
            counters=counters,
            elapsed_s=elapsed_s,
        )

    console.print("starting the server and its workers")
    return trio.run(run)


def _alone() -> Callable[[Ids], Vector]:
    """The model run directly on the tokens of one text; it pools in its graph."""
    core, built = ov.Core(), model.build(load_weights(model_folder()))
    compiled = core.compile_model(built, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(ids: Ids) -> Vector:
        found: Vector = compiled({"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None]})[0][0]
        return found

    return run


def _compare(
    console: Console,
    alone: Callable[[Ids], Vector],
    sentences: list[Ids],
    embedded: list[Embedded],
    count: int,
) -> list[float]:
    """The cosine between the server's row and the model run directly on that text alone, for some of them."""
    chosen = random.Random(SEED).sample(range(len(embedded)), min(len(embedded), count))
    console.print(f"comparing {len(chosen)} rows with the model run directly, one text at a time")
    with progress_bars(console) as progress:
        return [
            cosine(embedded[number].vector, alone(sentences[number]))
            for number in progress.track(chosen, description="one at a time")
        ]


def _conclude(console: Console, problems: Sequence[str]) -> int:
    console.print()
    for problem in problems:
        console.print(f"[red]wrong:[/red] {escape(problem)}")
    if problems:
        console.print(f"[bold red]FAILED[/bold red]: {len(problems)} problems")
        return 1
    console.print(f"[bold green]OK[/bold green]: cosine above {MIN_COSINE} for every row that was compared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
