"""`python -m benchmarks.accelerator`: what a card gives to calls whose shapes change. Needs PyTorch and NumPy alone.

The model is an encoder of MiniLM's size with random weights, an exported program that the engine runs as it runs a user's:
inputs in page-locked memory, a stream for each slot, outputs back in host memory. Five questions, each with a time:

1. *Costs*: seconds of a call of 1 to 64 rows of 8 to 256 tokens. Where they do not grow with the rows, company is free.
2. *Traffic*: 5,000 requests of lognormal lengths by 1, 2 and 4 slots. In arrival order, 32 at a time and padded to the
   longest, against windows of 256 waiting requests that are sorted and cut at the least cost by the table of 1. Answers
   of both ways are compared.
3. *New shapes*: first against second call of 200 shapes that were not seen before.
4. *Graphs*: 16 prepared shapes, each recorded as a CUDA graph, against the same call without.
5. *Outputs*: 64 MiB from the card to host memory, page-locked and not.

It was never run on a card. What is cut off for lack of time is told as not measured, and so is what needs CUDA.

    python3 -m benchmarks.accelerator --device cuda --out figures        # at most 8 minutes
    python -m benchmarks.accelerator --device cpu --dry-run              # seconds: a tiny model, a tenth of everything
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from shapestream_engine import CompiledModel, InferRequest, InputSpec, ModelSpec, compile_model

Array: TypeAlias = np.ndarray[Any, Any]
Figures: TypeAlias = dict[str, Any]

WORDS = 30_522
SEED = 5
MEDIAN_TOKENS, SIGMA = 24, 0.9
"""Parameters of the lognormal lengths, as in benchmarks.limit: sentences of queries and titles, with a long tail."""
PADDED_ROWS = 32
WINDOW = 256
"""Requests that wait at a time where they are cut by shape: the default credit of a client."""
TOLERANCE = 2e-3
"""Largest difference of an answer in company from that in other company, for outputs of about 1: kernels add in another
order, in f32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    layers: int
    width: int
    heads: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    repeats: int
    """Timed calls of each shape."""
    requests: int
    slots: tuple[int, ...]
    rounds: int
    new_shapes: int
    graphs: int
    output_bytes: int


FULL = Size(
    layers=6,
    width=384,
    heads=12,
    rows=(1, 2, 4, 8, 16, 32, 64),
    lengths=(8, 16, 32, 64, 128, 256),
    repeats=9,
    requests=5000,
    slots=(1, 2, 4),
    rounds=3,
    new_shapes=200,
    graphs=16,
    output_bytes=64 << 20,
)
DRY = Size(
    layers=1,
    width=32,
    heads=4,
    rows=(1, 4, 16, 64),
    lengths=(8, 64, 256),
    repeats=1,
    requests=300,
    slots=(1, 2),
    rounds=1,
    new_shapes=20,
    graphs=2,
    output_bytes=1 << 20,
)


# ---------------------------------------------------------------- the model


class Layer(torch.nn.Module):  # type: ignore[misc] # PyTorch is not there when types are checked
    """Self-attention under a mask, and two products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Any, allowed: Any) -> Any:
        """The call: x [batch, seq, width], allowed [batch, 1, 1, seq]."""
        batch, seq, width = x.shape
        parts = self.qkv(x).reshape(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], attn_mask=allowed
        )
        x = self.norms[0](x + self.out(attended.transpose(1, 2).reshape(batch, seq, width)))
        return self.norms[1](x + self.down(torch.nn.functional.gelu(self.up(x))))


class Encoder(torch.nn.Module):  # type: ignore[misc] # as above
    """Token ids to the mean of their vectors under the mask."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, size.width)
        self.places = torch.nn.Embedding(size.lengths[-1], size.width)
        self.layers = torch.nn.ModuleList([Layer(size.width, size.heads) for _ in range(size.layers)])

    def forward(self, ids: Any, mask: Any) -> Any:
        """The call: ids and mask [batch, seq], both i64; a mask of 1 stands for a token."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        allowed = (mask > 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        weights = mask[:, :, None].to(x.dtype)
        return {"embedding": (x * weights).sum(1) / weights.sum(1).clamp(min=1)}


def spec_of(size: Size, device: str) -> ModelSpec:
    """Export the encoder with random weights."""
    torch.manual_seed(SEED)
    batch = torch.export.Dim("batch", min=1, max=size.rows[-1])
    seq = torch.export.Dim("seq", min=1, max=size.lengths[-1])
    example = torch.ones(2, 16, dtype=torch.int64)
    program = torch.export.export(
        Encoder(size).eval(), (example, example), dynamic_shapes=({0: batch, 1: seq}, {0: batch, 1: seq})
    )
    shape = f"batch:1..{size.rows[-1]}, seq:1..{size.lengths[-1]}"
    return ModelSpec(
        name="encoder",
        model=program,
        engine="torch",
        device=device,
        inputs={"ids": InputSpec(shape=shape, pad={"seq": 0}), "mask": InputSpec(shape="batch, seq")},
    )


def compiled_of(spec: ModelSpec, slots: int) -> CompiledModel:
    """Compile for so many slots, with all threads of this machine where the device is the CPU."""
    return compile_model(spec, slots=slots, threads=torch.get_num_threads())


# ---------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one call, by their places in the trace, and the length that they are padded to."""

    places: Array
    length: int


def run(request: InferRequest, trace: Sequence[Array], batch: Batch) -> Array:
    """Assemble a batch in the request's own tensors, and run it; returns its rows until the next call."""
    ids, mask = request.input_tensors
    ids.shape = mask.shape = (len(batch.places), batch.length)
    ids.data[...] = 0
    mask.data[...] = 0
    for row, place in enumerate(batch.places):
        own = trace[place]
        ids.data[row, : len(own)] = own
        mask.data[row, : len(own)] = 1
    request.infer()
    rows: Array = request.outputs()[0]
    return rows


def call_s(request: InferRequest, rows: int, length: int) -> float:
    """Seconds of one call from host memory to host memory."""
    batch = Batch(np.zeros(rows, np.intp), length)
    started = time.perf_counter()
    run(request, [np.ones(length, np.int64)], batch)
    return time.perf_counter() - started


def run_all(
    requests: Sequence[InferRequest], trace: Sequence[Array], batches: Sequence[Batch], answers: Array
) -> float:
    """Run the batches, in order, each by the next free request on a thread of its own; returns the seconds."""
    waiting = iter(batches)
    lock = threading.Lock()

    def work(request: InferRequest) -> None:
        while True:
            with lock:
                batch = next(waiting, None)
            if batch is None:
                return
            answers[batch.places] = run(request, trace, batch)

    started = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as pool:
        for slot in [pool.submit(work, request) for request in requests]:
            slot.result()
    return time.perf_counter() - started


# ---------------------------------------------------------------- cuts


class Costs:
    """Seconds of calls by rows and length, interpolated in logarithms."""

    def __init__(self, size: Size, measured: dict[tuple[int, int], float]) -> None:
        self._rows, self._lengths = np.log(size.rows), np.log(size.lengths)
        self._table = np.log([[measured[rows, length] for length in size.lengths] for rows in size.rows])
        self.most_rows = size.rows[-1]

    def seconds(self, lengths: Array) -> Array:
        """Return [rows, length]: the seconds of 1, 2, … rows padded to each of these lengths."""
        by_length = np.stack([np.interp(np.log(lengths), self._lengths, row) for row in self._table])
        counts = np.log(np.arange(1, self.most_rows + 1))
        seconds: Array = np.exp(
            np.stack([np.interp(counts, self._rows, each) for each in by_length.T], axis=1)
        )
        return seconds


def in_order(lengths: Array, rows: int) -> Iterator[Batch]:
    """So many at a time in the order of arrival, padded to the longest."""
    for start in range(0, len(lengths), rows):
        places = np.arange(start, min(start + rows, len(lengths)))
        yield Batch(places, int(lengths[places].max()))


def by_shape(lengths: Array, costs: Costs, window: int) -> Iterator[Batch]:
    """Windows in the order of arrival, each sorted and cut where the sum of predicted seconds is least."""
    for start in range(0, len(lengths), window):
        order = start + np.argsort(lengths[start : start + window], kind="stable")
        table = costs.seconds(lengths[order])
        best, taken = np.zeros(len(order) + 1), np.zeros(len(order) + 1, np.intp)
        for end in range(1, len(order) + 1):
            most = min(end, costs.most_rows)
            totals = best[end - np.arange(1, most + 1)] + table[:most, end - 1]
            taken[end] = 1 + int(np.argmin(totals))
            best[end] = totals[taken[end] - 1]
        end = len(order)
        while end:
            first = end - int(taken[end])
            yield Batch(order[first:end], int(lengths[order[end - 1]]))
            end = first


def trace_of(size: Size) -> list[Array]:
    """Draw requests: token ids of lognormal lengths."""
    draw = np.random.default_rng(SEED)
    drawn = MEDIAN_TOKENS * np.exp(SIGMA * draw.standard_normal(size.requests))
    lengths = np.clip(np.rint(drawn), size.lengths[0], size.lengths[-1]).astype(int)
    return [draw.integers(1, WORDS, length, dtype=np.int64) for length in lengths]


# ---------------------------------------------------------------- parts


@dataclass(slots=True)
class Bench:
    """One run: the model, and what earlier parts have measured for later ones."""

    size: Size
    device: str
    spec: ModelSpec
    until_s: float
    """The end of the time for all parts, of `time.perf_counter`."""
    costs: Costs | None = None
    compared: int = 0
    """Answers that were compared."""

    @property
    def is_cuda(self) -> bool:
        """Tell whether CUDA's own functions are there."""
        return self.device.startswith("cuda")

    def check_time(self) -> None:
        """Raise `TimeoutError` if the time is over; between calls and rounds, which take seconds at most."""
        if time.perf_counter() > self.until_s:
            raise TimeoutError("no time was left")

    def cost_table(self) -> Figures:
        """Milliseconds of a call of a known shape, a median each, by one slot."""
        request = compiled_of(self.spec, 1).create_infer_request()
        measured = {}
        for rows, length in product(self.size.rows, self.size.lengths):
            self.check_time()
            call_s(request, rows, length)
            call_s(request, rows, length)
            measured[rows, length] = statistics.median(
                call_s(request, rows, length) for _ in range(self.size.repeats)
            )
        self.costs = Costs(self.size, measured)
        return {
            f"{rows} rows": {
                str(length): round(measured[rows, length] * 1e3, 3) for length in self.size.lengths
            }
            for rows in self.size.rows
        }

    def traffic(self) -> Figures:
        """Requests per second of both ways, by slots, in interleaved rounds; medians, and the ratio of each round's."""
        assert self.costs is not None
        trace = trace_of(self.size)
        lengths = np.array([len(ids) for ids in trace])
        ways = {
            "padded": list(in_order(lengths, PADDED_ROWS)),
            "by shape": list(by_shape(lengths, self.costs, WINDOW)),
        }
        figures: Figures = {
            "calls": {way: len(batches) for way, batches in ways.items()},
            "padding": {
                way: round(
                    1 - int(lengths.sum()) / sum(len(each.places) * each.length for each in batches), 3
                )
                for way, batches in ways.items()
            },
        }
        for slots in self.size.slots:
            model = compiled_of(self.spec, slots)
            requests = [model.create_infer_request() for _ in range(slots)]
            answers = {way: np.empty((len(trace), self.size.width), np.float32) for way in ways}
            for way, batches in ways.items():  # shapes are new only once
                run_all(requests, trace, batches, answers[way])
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(self.size.rounds):
                for way, batches in ways.items():
                    self.check_time()
                    seconds[way].append(run_all(requests, trace, batches, answers[way]))
            self._compare(answers["padded"], answers["by shape"])
            ratios = [
                padded / cut for padded, cut in zip(seconds["padded"], seconds["by shape"], strict=True)
            ]
            figures[f"{slots} slots"] = {
                **{f"{way}, per s": round(len(trace) / statistics.median(s)) for way, s in seconds.items()},
                "by shape / padded": round(statistics.median(ratios), 2),
            }
        return figures

    def _compare(self, ours: Array, theirs: Array) -> None:
        apart = float(np.abs(ours - theirs).max())
        if not apart <= TOLERANCE:
            raise SystemExit(f"accelerator: answers differ by {apart:.2e}, more than {TOLERANCE:.0e}")
        self.compared += len(ours)

    def new_shapes(self) -> Figures:
        """Milliseconds of the first and the second call of each shape, in a model that has seen none."""
        request = compiled_of(self.spec, 1).create_infer_request()
        draw = np.random.default_rng(SEED)
        every = [*product(range(1, self.size.rows[-1] + 1), range(8, self.size.lengths[-1] + 1))]
        shapes = [every[number] for number in draw.permutation(len(every))[: self.size.new_shapes]]
        call_s(request, 1, 8)  # what the first call of all costs is not a shape's
        calls = []
        for shape in shapes:
            self.check_time()
            calls.append((call_s(request, *shape), call_s(request, *shape)))
        first, second = (sorted(each) for each in zip(*calls, strict=True))
        return {
            **{
                f"{name}, median, ms": round(statistics.median(each) * 1e3, 3)
                for name, each in (("first", first), ("second", second))
            },
            "first, worst of 100, ms": round(first[int(0.99 * (len(first) - 1))] * 1e3, 3),
            "first / second": round(statistics.median(one / two for one, two in calls), 2),
        }

    def graphs(self) -> Figures:
        """Milliseconds of a call by a recorded graph, and without, both from host memory to host memory."""
        if not self.is_cuda:
            return {"not run": "CUDA graphs need CUDA"}
        module = Encoder(self.size).eval().to(self.device)
        shapes = [*product(self.size.rows, self.size.lengths)][::2][: self.size.graphs]
        figures = {f"{rows} x {length}": self._graph(module, rows, length) for rows, length in shapes}
        ratios = [each["without, ms"] / each["graph, ms"] for each in figures.values()]
        return {**figures, "without / graph": round(statistics.median(ratios), 2)}

    def _graph(self, module: torch.nn.Module, rows: int, length: int) -> Figures:
        self.check_time()
        host = torch.ones(rows, length, dtype=torch.int64).pin_memory()
        there = host.to(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(side):  # kernels are chosen before the recording
            for _ in range(3):
                module(there, there)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            recorded = module(there, there)["embedding"]

        def replayed() -> torch.Tensor:
            there.copy_(host, non_blocking=True)
            graph.replay()
            return recorded.cpu()

        def called() -> torch.Tensor:
            own = host.to(self.device, non_blocking=True)
            return module(own, own)["embedding"].cpu()

        with torch.inference_mode():
            self._compare(replayed().numpy(), called().numpy())
            return {
                "graph, ms": round(median_s(replayed, self.size.repeats) * 1e3, 4),
                "without, ms": round(median_s(called, self.size.repeats) * 1e3, 4),
            }

    def outputs(self) -> Figures:
        """GiB per second of a large output on its way to host memory: a fresh array, one array again, a page-locked one."""
        there = torch.ones(self.size.output_bytes // 4, device=self.device)
        kept = torch.empty_like(there, device="cpu")
        ways: dict[str, Callable[[], object]] = {
            "fresh": lambda: there.clone().cpu(),
            "kept": lambda: kept.copy_(there),
        }
        if self.is_cuda:
            locked = torch.empty(there.shape, pin_memory=True)

            def into_locked() -> None:
                locked.copy_(there, non_blocking=True)
                torch.cuda.synchronize(self.device)

            ways["page-locked"] = into_locked
        gib = self.size.output_bytes / 2**30
        return {
            f"{way}, GiB/s": round(gib / median_s(copy, self.size.repeats), 2) for way, copy in ways.items()
        }


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of a call that ends with its result in host memory, a median after one to warm up."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# ---------------------------------------------------------------- the program


def measure(bench: Bench) -> Figures:
    """Run the parts in their order; once the time is over, a part is cut off, and those after it are not run."""
    figures: Figures = {}
    for part in (bench.cost_table, bench.traffic, bench.new_shapes, bench.graphs, bench.outputs):
        name = part.__name__.replace("_", " ")
        began = time.perf_counter()
        try:
            bench.check_time()
            figures[name] = part()
        except TimeoutError as error:
            figures[name] = {"not measured": str(error)}
        print(f"{name} ({time.perf_counter() - began:.1f} s)")
        for key, value in figures[name].items():
            print(f"    {key}: {value}")
        sys.stdout.flush()
    return figures


def machine(device: str) -> Figures:
    """Return what the figures depend on."""
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else "none"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "card": card,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure, print, and write `accelerator.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator", description="Calls of changing shapes on a card."
    )
    parser.add_argument("--device", default="cuda", help="PyTorch's name: cuda, cuda:1, cpu")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model: figures mean nothing")
    parser.add_argument("--seconds", type=float, default=450.0, help="what runs then is cut off (450)")
    parser.add_argument("--out", type=Path, help="a folder for accelerator.json")
    given = parser.parse_args()
    size = DRY if given.dry_run else FULL
    until_s = time.perf_counter() + given.seconds
    bench = Bench(size, given.device, spec_of(size, given.device), until_s)
    figures = {"machine": machine(given.device), **measure(bench)}
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "accelerator.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"accelerator: {bench.compared} answers compared")


if __name__ == "__main__":
    main()
