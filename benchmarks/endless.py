"""`python -m benchmarks.endless`: pictures of 4,225 sizes to a small detector, against what the model's own CPU leaves.

A ceiling is what all cores would do with the CPU of the model alone, plus that of a floor (`floors.py`) and its client. The
model alone has two streams of one thread and meets the same sizes in the same order, so it is as cold as the servers.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import psutil
import typer
from numpy.typing import NDArray

from benchmarks import floors, peer
from benchmarks.processes import child_process, cpu_s, wait_for_slots
from benchmarks.raw_client import RawClient, connect_dealer
from benchmarks.report import Figure, Report, median_ratio, median_us, print_reports
from shapestream_engine.layout import Buffer, Tensors

DETECTOR = "detector"
IN_FLIGHT = 64
SMALLEST, LARGEST = 32, 96
CHANNELS, CLASSES, WIDTH, STRIDE = 3, 8, 12, 4
MAX_BATCH = 16
CORES = 2
"""Slots of a server, of one thread each; streams of the model alone."""
AIM_CEILING = 0.9
AIM_BY_ORDER = 1.3
AIM_PEER = 1.0
_WARM_UP = 32
_ORACLE_ROWS = (4, 8, 16, 32)
_ORACLE_STEPS = (1, 8, 16, 32)
"""Multiples that an oracle may round heights and widths up to."""
_RTOL, _ATOL = 1e-3, 1e-5

Array: TypeAlias = NDArray[np.float32]
Batch: TypeAlias = list[int]


# ------------------------------------------------------------ the model


def write_detector(path: Path) -> None:
    """Write the detector: `image` [batch, 3, height, width] -> `scores` [batch, 8], the best of each class anywhere.

    Cells of 4 x 4 pixels, five convolutions, a head. A cell of zeros is outside of the picture, and is kept at zero: the
    model works out the mask itself, so scores do not depend on padding.
    """
    import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry

    # isort: split
    import openvino as ov
    from openvino import opset15 as ops

    random = np.random.default_rng(0)

    def convolution(data: Any, channels: tuple[int, int], size: int, stride: int = 1) -> Any:
        weights = random.normal(size=(channels[1], channels[0], size, size)) / size / channels[0] ** 0.5
        # The stem reaches beyond the end alone, so that a last cell that is not whole counts.
        begin, end = ((0, 0), (STRIDE - 1,) * 2) if stride > 1 else ((size // 2,) * 2, (size // 2,) * 2)
        kernel = ops.constant(weights.astype(np.float32))
        return ops.convolution(data, kernel, [stride] * 2, list(begin), list(end), [1, 1])

    image = ops.parameter([-1, CHANNELS, -1, -1], np.float32, name="image")
    image.output(0).set_names({"image"})
    brightest = ops.reduce_max(image, ops.constant(np.array([1])), keep_dims=True)
    cells = ops.max_pool(brightest, [STRIDE] * 2, [1, 1], [0, 0], [STRIDE - 1] * 2, [STRIDE] * 2)
    inside = ops.convert(ops.greater(cells.output(0), ops.constant(np.float32(0))), "f32")
    features = ops.relu(convolution(image, (CHANNELS, WIDTH), STRIDE, STRIDE))
    for _ in range(5):
        features = ops.multiply(ops.relu(convolution(features, (WIDTH, WIDTH), 3)), inside)
    scores = ops.reduce_max(
        ops.relu(convolution(features, (WIDTH, CLASSES), 1)), ops.constant(np.array([2, 3]))
    )
    scores.output(0).set_names({"scores"})
    ov.save_model(ov.Model([scores], [image], DETECTOR), path, compress_to_fp16=False)


class Model:
    """The detector without a server: an AsyncInferQueue, and the sizes that it has met."""

    def __init__(self, path: Path) -> None:
        import openvino as ov

        # As the server computes: of itself OpenVINO takes bf16 where the processor has it.
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": CORES,
            "NUM_STREAMS": CORES,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self._queue = ov.AsyncInferQueue(ov.Core().compile_model(path, "CPU", properties), CORES)
        self._answers: list[Array] = []
        self._queue.set_callback(self._done)

    def _done(self, request: Any, batch: Batch) -> None:
        for number, row in zip(batch, request.get_output_tensor(0).data, strict=True):
            self._answers[number] = row.copy()

    def run(self, pictures: Sequence[Array], batches: Sequence[tuple[Batch, tuple[int, int]]]) -> list[Array]:
        """Answers to all pictures, each padded to the size of its batch."""
        self._answers = [np.empty(0, np.float32)] * len(pictures)
        for batch, size in batches:
            self._queue.start_async({0: _padded([pictures[number] for number in batch], size)}, batch)
        self._queue.wait_all()
        return self._answers

    def cpu_us(self, pictures: Sequence[Array], batches: Sequence[tuple[Batch, tuple[int, int]]]) -> float:
        """CPU per picture, with all threads."""
        before = time.process_time()
        self.run(pictures, batches)
        return (time.process_time() - before) / len(pictures) * 1e6


def _padded(pictures: Sequence[Array], size: tuple[int, int]) -> Array:
    if len(pictures) == 1 and pictures[0].shape[1:] == size:
        return pictures[0][None]
    batch = np.zeros((len(pictures), CHANNELS, *size), np.float32)
    for row, picture in zip(batch, pictures, strict=True):
        row[:, : picture.shape[1], : picture.shape[2]] = picture
    return batch


# ------------------------------------------------------------ pictures, and their division into batches


def pictures_of(seed: int, count: int) -> list[Array]:
    """Pictures of noise, heights and widths uniform; no pixel is 0."""
    random = np.random.default_rng(seed)
    noise = random.uniform(0.1, 1.0, (CHANNELS, 2 * LARGEST, 2 * LARGEST)).astype(np.float32)
    found = []
    for height, width, top, left in random.integers(
        [SMALLEST] * 2 + [0] * 2, [LARGEST + 1] * 4, (count, 4)
    ).tolist():
        found.append(np.ascontiguousarray(noise[:, top : top + height, left : left + width]))
    return found


def _common(pictures: Sequence[Array], batch: Batch, step: int) -> tuple[int, int]:
    height, width = (
        -(-max(pictures[number].shape[axis] for number in batch) // step) * step for axis in (1, 2)
    )
    return height, width


def one_by_one(pictures: Sequence[Array]) -> list[tuple[Batch, tuple[int, int]]]:
    """Each picture in its own size."""
    return in_order(pictures, 1)


def in_order(pictures: Sequence[Array], rows: int) -> list[tuple[Batch, tuple[int, int]]]:
    """Batches of so many, as they arrive."""
    return _cut(pictures, list(range(len(pictures))), rows, 1)


def by_size(pictures: Sequence[Array], rows: int, step: int) -> list[tuple[Batch, tuple[int, int]]]:
    """Batches of so many, sorted by height, and by width within strips of pictures about as high."""
    by_height = sorted(range(len(pictures)), key=lambda number: pictures[number].shape[1])
    strips = max(1, round((len(pictures) / rows) ** 0.5))
    strip = -(-len(pictures) // (strips * rows)) * rows
    order: Batch = []
    for at in range(0, len(by_height), strip):
        order += sorted(by_height[at : at + strip], key=lambda number: pictures[number].shape[2])
    return _cut(pictures, order, rows, step)


def _cut(
    pictures: Sequence[Array], order: Batch, rows: int, step: int
) -> list[tuple[Batch, tuple[int, int]]]:
    batches = [order[at : at + rows] for at in range(0, len(order), rows)]
    return [(batch, _common(pictures, batch, step)) for batch in batches]


# ------------------------------------------------------------ the regimes


@dataclass(slots=True, kw_only=True)
class Regime:
    """One way to answer all pictures of a round, and what each round measured of it."""

    name: str
    cpu_us: list[float] = field(default_factory=list)
    """CPU per picture of all processes but the client."""
    client_us: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)

    def measured(self, server: Sequence[int], count: int, run: Callable[[], None]) -> None:
        """Read the clocks of this process and of `server` before and after `run`."""
        before = time.process_time(), sum(cpu_s(pid) for pid in server), time.perf_counter()
        run()
        after = time.process_time(), sum(cpu_s(pid) for pid in server), time.perf_counter()
        client_s, server_s, elapsed_s = (late - early for late, early in zip(after, before, strict=True))
        self.client_us.append(client_s / count * 1e6)
        self.cpu_us.append(server_s / count * 1e6)
        self.rate.append(count / elapsed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A server of one placement, with and without padding, and its floor; each with its address and processes."""

    label: str
    floor: Regime
    floor_address: str
    floor_processes: tuple[int, ...]
    plain: Regime
    plain_server: tuple[str, tuple[int, ...]]
    padded: Regime
    padded_server: tuple[str, tuple[int, ...]]


def _write_configuration(folder: Path, label: str, *, workers: int, pad: bool) -> tuple[Path, str]:
    address = f"ipc://{folder}/{label}.sock"
    sizes = f"height:{SMALLEST}..{LARGEST}, width:{SMALLEST}..{LARGEST}"
    padding = ", pad: {height: 0, width: 0}" if pad else ""
    placement = (
        f"workers:\n  - {{count: {workers}, models: [{DETECTOR}], slots: 1, threads: {CORES // workers}}}\n"
        if workers
        else f"in_process: {{slots: {CORES}, threads: 1}}\n"
    )
    path = folder / f"{label}.yaml"
    path.write_text(
        f'server: {{listen: ["{address}"]}}\nmodels:\n'
        f"  - {{name: {DETECTOR}, path: detector.xml, trust: true, batching: {{max_batch: {MAX_BATCH}}},\n"
        f"     inputs: {{image: {{shape: 'batch:1..{MAX_BATCH}, {CHANNELS}, {sizes}', element_type: f32{padding}}}}},\n"
        f"     outputs: {{scores: {{shape: 'batch:1..{MAX_BATCH}, {CLASSES}', element_type: f32, rule: rows}}}}}}\n"
        f"{placement}logging: {{level: warning}}\n"
    )
    return path, address


def _serve(
    stack: ExitStack, folder: Path, label: str, *, workers: int, pad: bool
) -> tuple[str, tuple[int, ...]]:
    path, address = _write_configuration(folder, label, workers=workers, pad=pad)
    log = folder / f"{label}.log"
    child = stack.enter_context(child_process(["-m", "shapestream_workers", "serve", str(path)], log=log))
    wait_for_slots(child, address, CORES, log)
    children = psutil.Process(child.pid).children(recursive=True)
    return address, (child.pid, *[process.pid for process in children])


def _floor(stack: ExitStack, folder: Path, label: str, *, workers: int) -> tuple[str, tuple[int, ...]]:
    address = f"ipc://{folder}/{label}.sock"
    back = [f"ipc://{folder}/{label}-back.sock"] if workers else []
    kind = "relay" if workers else "inproc"
    processes = [["-m", "benchmarks.floors", kind, address, *back]]
    if workers:
        processes.append(["-m", "benchmarks.floors", "slot", *back])
    children = [
        stack.enter_context(child_process(arguments, log=folder / f"{label}-{number}.log"))
        for number, arguments in enumerate(processes)
    ]
    return address, tuple(child.pid for child in children)


def _ask_floor(address: str, entries: Sequence[bytes]) -> None:
    with connect_dealer(address) as socket:
        floors.ask_in_stream(socket, entries, per_message=1, outstanding=IN_FLIGHT)


def _ask(address: str, pictures: Sequence[Array], expected: Sequence[Array]) -> None:
    requests = [
        Tensors(layout=((0, "f32", (1, *picture.shape)),), buffers=(picture.tobytes(),))
        for picture in pictures
    ]
    with RawClient(address, DETECTOR) as client:
        for number, tensors in client.stream(requests, IN_FLIGHT):
            _check(number, tensors.buffers[0], pictures, expected)


def _check(number: int, answer: Buffer, pictures: Sequence[Array], expected: Sequence[Array]) -> None:
    if not np.allclose(np.frombuffer(answer, np.float32), expected[number], _RTOL, _ATOL):
        raise AssertionError(f"the answer to picture {number} of {pictures[number].shape} differs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeerForm:
    """The peer with batches of at most so many, and its server."""

    regime: Regime
    server: peer.Peer


def _serve_peer(stack: ExitStack, folder: Path, model: Path, *, rows: int) -> _PeerForm:
    example = peer.picture_body(pictures_of(0, 1)[0])
    server = stack.enter_context(
        peer.serving(folder, model, "pictures", workers=CORES, rows=rows, example=example)
    )
    words = f"by {rows}, padded" if rows > 1 else "each alone, no padding"
    return _PeerForm(regime=Regime(name=f"{peer.NAME}, {words}"), server=server)


def _ask_peer(server: peer.Peer, pictures: Sequence[Array], expected: Sequence[Array]) -> None:
    bodies = [peer.picture_body(picture) for picture in pictures]
    with server.connect() as client:
        for number, body in client.stream(bodies, IN_FLIGHT):
            _check(number, body, pictures, expected)


class _Measurement:
    """The processes under measurement, the model alone, and the regimes of each."""

    def __init__(self, stack: ExitStack, folder: Path, *, with_peer: bool) -> None:
        folder = folder / "endless"
        folder.mkdir()
        write_detector(folder / "detector.xml")
        self._path = folder / "detector.xml"
        self.alone = Regime(name="model, each alone")
        self.ordered = Regime(name=f"model, by {MAX_BATCH} in order")
        self.sorted = Regime(name="model, oracle")
        self._models = {id(regime): Model(self._path) for regime in (self.alone, self.ordered, self.sorted)}
        self._best: tuple[int, int] | None = None
        self.ways: list[_Way] = []
        for label, workers in (("in process", 0), ("two workers", CORES)):
            name = label.replace(" ", "-")
            floor, floor_processes = _floor(stack, folder, f"{name}-floor", workers=workers)
            plain = _serve(stack, folder, f"{name}-plain", workers=workers, pad=False)
            padded = _serve(stack, folder, f"{name}-padded", workers=workers, pad=True)
            way = _Way(
                label=label,
                floor=Regime(name=f"floor, {label}"),
                floor_address=floor,
                floor_processes=floor_processes,
                plain=Regime(name=f"{label}, no padding"),
                plain_server=plain,
                padded=Regime(name=f"{label}, padded"),
                padded_server=padded,
            )
            self.ways.append(way)
        forms = (1, MAX_BATCH) if with_peer else ()
        self.peers = [_serve_peer(stack, folder, self._path, rows=rows) for rows in forms]

    @property
    def regimes(self) -> list[Regime]:
        """All regimes, in the order of their turns."""
        found = [self.alone, self.ordered, self.sorted]
        for way in self.ways:
            found += [way.floor, way.plain, way.padded]
        return found + [form.regime for form in self.peers]

    def search(self, pictures: Sequence[Array]) -> None:
        """Choose what an oracle does: rows of a batch, and the step that sizes are rounded up to."""
        model = Model(self._path)
        found = {
            (rows, step): model.cpu_us(pictures, by_size(pictures, rows, step))
            for rows in _ORACLE_ROWS
            for step in _ORACLE_STEPS
        }
        self._best = min(found, key=lambda each: found[each])
        rows, step = self._best
        self.sorted.name = f"model, sorted: {rows} rows, by {step}"

    def round(self, pictures: Sequence[Array]) -> None:
        """Ask everything once."""
        assert self._best is not None

        def alone(regime: Regime, batches: Sequence[tuple[Batch, tuple[int, int]]]) -> list[Array]:
            answers: list[Array] = []

            def run() -> None:
                answers.extend(self._models[id(regime)].run(pictures, batches))

            regime.measured((), len(pictures), run)
            return answers

        expected = alone(self.alone, one_by_one(pictures))
        others = [
            (self.ordered, in_order(pictures, MAX_BATCH)),
            (self.sorted, by_size(pictures, *self._best)),
        ]
        for regime, batches in others:
            for answer, right in zip(alone(regime, batches), expected, strict=True):
                if not np.allclose(answer, right, _RTOL, _ATOL):
                    raise AssertionError("padding changes an answer of the model alone")
        entries = [picture.tobytes() for picture in pictures]
        for way in self.ways:
            ask_floor = partial(_ask_floor, way.floor_address, entries)
            way.floor.measured(way.floor_processes, len(pictures), ask_floor)
            for regime, (address, processes) in (
                (way.plain, way.plain_server),
                (way.padded, way.padded_server),
            ):
                regime.measured(processes, len(pictures), partial(_ask, address, pictures, expected))
        for form in self.peers:
            ask_peer = partial(_ask_peer, form.server, pictures, expected)
            form.regime.measured(form.server.processes, len(pictures), ask_peer)


def measure(folder: Path, *, requests: int, rounds: int, with_peer: bool = False) -> list[Report]:
    """Run everything in interleaved rounds, and report on rates and CPU; `requests` per regime and round."""
    with ExitStack() as stack:
        measurement = _Measurement(stack, folder, with_peer=with_peer)
        measurement.search(pictures_of(0, requests))
        measurement.round(pictures_of(1, _WARM_UP))
        for regime in measurement.regimes:
            for figures in (regime.cpu_us, regime.client_us, regime.rate):
                figures.clear()
        for number in range(rounds):
            measurement.round(pictures_of(2 + number, requests))
    return [_report(measurement)]


def _report(measurement: _Measurement) -> Report:
    sizes = f"{SMALLEST}..{LARGEST}"
    report = Report(title=f"Pictures of {sizes} x {sizes}, {IN_FLIGHT} in flight; us of CPU per picture")
    report.columns = ("way", "CPU", "client", "/ least", "per s", "ceiling", "/ it", "/ by order")
    if measurement.peers:
        report.columns += (f"/ {peer.NAME}",)
    blanks = ("",) * (len(report.columns) - 5)
    models = (measurement.alone, measurement.ordered, measurement.sorted)
    for regime in models:
        report.rows.append((regime.name, median_us(regime.client_us), "", "", _rate(regime), *blanks))
    peer_rates = [form.regime.rate for form in measurement.peers]
    for way in measurement.ways:
        floor = way.floor
        report.rows.append((*_costs(floor), *blanks))
        alone_us, ordered_us, sorted_us = (_least_us(model, floor) for model in models)
        for number, (regime, least_us) in enumerate(((way.plain, alone_us), (way.padded, sorted_us))):
            used_us = [sum(each) for each in zip(regime.cpu_us, regime.client_us, strict=True)]
            ceiling = _ceiling(least_us)
            to_order: Figure | str = ""
            if regime is way.padded:
                to_order = Figure(median_ratio(regime.rate, _ceiling(ordered_us)), "x", at_least=AIM_BY_ORDER)
            to_peer = [
                Figure(median_ratio(regime.rate, rate), "x", at_least=AIM_PEER)
                for rate in peer_rates[number : number + 1]
            ]
            report.rows.append(
                (
                    regime.name,
                    median_us(regime.cpu_us),
                    median_us(regime.client_us),
                    Figure(median_ratio(used_us, least_us), "x"),
                    _rate(regime),
                    Figure(statistics.median(ceiling), "/s"),
                    Figure(median_ratio(regime.rate, ceiling), "x", at_least=AIM_CEILING),
                    to_order,
                    *to_peer,
                )
            )
    report.rows += [(*_costs(form.regime), *blanks) for form in measurement.peers]
    return report


def _costs(regime: Regime) -> tuple[str | Figure, ...]:
    """The first five cells of a row."""
    return (regime.name, median_us(regime.cpu_us), median_us(regime.client_us), "", _rate(regime))


def _least_us(model: Regime, floor: Regime) -> list[float]:
    """CPU per picture, round by round, of the model, the floor and its client."""
    # A model alone runs in this process, so its CPU is the client's.
    used_us = zip(model.client_us, floor.cpu_us, floor.client_us, strict=True)
    return [sum(each) for each in used_us]


def _ceiling(least_us: Sequence[float]) -> list[float]:
    """Rates of all cores with that CPU per picture."""
    return [len(os.sched_getaffinity(0)) * 1e6 / each for each in least_us]


def _rate(regime: Regime) -> Figure:
    return Figure(statistics.median(regime.rate), "/s")


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    requests: Annotated[int, typer.Option(min=64, help="Per regime and round.")] = 1000,
    with_peer: Annotated[bool, typer.Option("--peer", help=peer.OPTION_HELP)] = False,
) -> None:
    """Measure a small detector, whose pictures have sizes without end, against the model's own CPU."""
    if with_peer:
        peer.demand_environment()
    requests, rounds = (64, 1) if smoke else (requests, rounds)
    print_reports(
        lambda folder: measure(folder, requests=requests, rounds=rounds, with_peer=with_peer),
        as_json=as_json,
    )


if __name__ == "__main__":
    typer.run(main)
