"""`make ray`: `shapestream.ray.Model` over datasets of a real, local Ray, in an environment of its own.

    rows        2,000 rows of many lengths through two actors; each is there once, and right
    deaths      an actor is killed once, and a row crashes its process whenever it runs: that row fails, no other does
    texts       strings and lists of arrays out, with rows that have none
    raising     without a column for errors, the job ends with the words of the row's error
    sharing     with --measure: rows of a call where one batch at a time is in an actor, and where four share its server
    costs       with --measure: CPU seconds of an actor for each row, beside an actor that streams the same rows by
                `shapestream.local`, and beside batches of 32 rows, padded to the longest, in their order and by length

Ray listens at 127.0.0.1 alone. It may take minutes to start on a busy machine: after 120 s this gives up, with status 1.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any, NoReturn

os.environ.update(  # before Ray is imported
    RAY_USAGE_STATS_ENABLED="0",  # it reports nothing of this run
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # as on machines without clusters, it listens at the loopback alone
)

import numpy as np
import openvino as ov
import ray
from openvino import opset13 as ops
from ray.data import ActorPoolStrategy

import shapestream.local
import shapestream.ray
from shapestream_engine.calibration import CostCache
from shapestream_engine.probing.cache import ProofCache

START_S = 120
ROWS = 2000
BAD = 7
"""One row in so many hundred is longer than the model takes."""
WIDTH = 8
COST_ROWS = 3000
ROUNDS = 3

TABLE = """\
models:
  - name: sums
    path: sums.xml
    inputs: {x: {shape: "batch:1..64, length:1..100, 8"}}
"""
FUNCTION = """\
models:
  - name: f
    function: ray_tool:run
    inputs: {x: {shape: "batch:1..64, 1", element_type: f32}}
    outputs: {y: {shape: "batch, 1", element_type: f32}}
    trust: true
  - name: words
    function: ray_tool:words
    inputs: {text: {shape: "", element_type: str}}
    outputs:
      loud: {shape: "", element_type: str}
      words: {rule: list, shape: "n", element_type: str}
    trust: true
"""
MODULE = """\
import ctypes, os, signal, time
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
CRASH, KILL = -1, -2

def words(text):
    one = text.item()
    words = np.empty(len(one.split()), object)
    words[:] = one.split()
    return {"loud": np.array(one.upper(), object), "words": [words, words[:1]]}

def run(x):
    if (x == CRASH).any():
        ctypes.string_at(0)  # a fault of this thread: a signal to the process would let it go on while Ray writes stacks
    if (x == KILL).any():
        try:
            (FOLDER / "killed").touch(exist_ok=False)
        except FileExistsError:
            return x * 2
        os.kill(os.getpid(), signal.SIGKILL)
    with open(FOLDER / "calls", "a") as calls:
        calls.write(f"{len(x)}\\n")
    time.sleep(0.002 + 0.0001 * len(x))
    return x * 2
"""


def main(arguments: list[str]) -> int:
    """Run all parts; the status is 0 if each row is there once, and right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ray_tool.py").write_text(MODULE)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(SHAPESTREAM_ANY_FUNCTION="1", PYTHONPATH=os.pathsep.join(paths))
        sys.path.insert(0, str(folder))
        start_ray(folder)
        try:
            problems = [*rows_of_many_lengths(folder), *deaths(folder), *texts(folder), *raising(folder)]
            if "--measure" in arguments:
                problems += sharing(folder)
                costs(folder)
        finally:
            ray.shutdown()
    for problem in problems:
        print(f"ray: {problem}")
    print(f"ray: {len(problems)} problems with Ray {ray.__version__}")
    return bool(problems)


def start_ray(folder: Path) -> None:
    """Start Ray with as many CPUs as the parts need, whatever there are; its token and its logs go with the folder."""
    began = monotonic()
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def give_up(*_: object) -> NoReturn:
        print(f"ray: not run: Ray did not start within {START_S} s", flush=True)
        os._exit(1)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(START_S)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "r"),
        object_store_memory=128 << 20,
        log_to_driver="-v" in sys.argv,
    )
    signal.alarm(0)
    ray.data.DataContext.get_current().enable_progress_bars = False
    print(f"ray: started in {monotonic() - began:.1f} s")


def pool(
    dataset: Any,
    config: Path,
    actors: int,
    batch_size: int,
    concurrent: int = 1,
    kind: type = shapestream.ray.Model,
    **more: Any,
) -> Any:
    """The dataset with the model's outputs."""
    return dataset.map_batches(
        kind,
        fn_constructor_args=(str(config),),
        fn_constructor_kwargs=more,
        batch_size=batch_size,
        num_cpus=1,
        compute=ActorPoolStrategy(
            size=actors,
            max_concurrent_calls_per_actor=concurrent,
            enable_true_multi_threading=concurrent > 1,
        ),
    )


def save_sums(path: Path) -> None:
    """A model: `total`, the sum over the length, and `twice`, as long as the input."""
    x = ops.parameter([-1, -1, WIDTH], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    total = ops.reduce_sum(x, ops.constant(np.array([1])))
    total.output(0).get_tensor().set_names({"total"})
    twice = ops.multiply(x, ops.constant(np.float32(2)))
    twice.output(0).get_tensor().set_names({"twice"})
    ov.save_model(ov.Model([ops.result(total), ops.result(twice)], [x]), path, compress_to_fp16=False)


def once_each(part: str, rows: list[dict[str, Any]], count: int) -> list[str]:
    """The problem of rows that are lost, or there twice."""
    counts = Counter(int(row["number"]) for row in rows)
    if counts == Counter(range(count)):
        return []
    lost, twice = set(range(count)) - counts.keys(), [row for row, times in counts.items() if times > 1]
    return [f"{part}: {len(lost)} rows are lost, {len(twice)} are there twice"]


def rows_of_many_lengths(folder: Path) -> list[str]:
    """Blocks of equal rows, of ragged ones, and of some that the model refuses, written as Parquet and read again."""
    save_sums(folder / "sums.xml")
    config = folder / "sums.yaml"
    config.write_text(TABLE)
    drawn = random.Random(5)
    lengths = [5 if number < 300 else drawn.randrange(1, 101) for number in range(ROWS)]
    for number in range(600, ROWS, BAD * 100):
        lengths[number] = 101
    arrays = [
        np.random.default_rng(number).standard_normal((length, WIDTH), np.float32)
        for number, length in enumerate(lengths)
    ]
    items = [{"number": number, "x": array, "text": f"row {number}"} for number, array in enumerate(arrays)]
    dataset = ray.data.from_items(items, override_num_blocks=16)
    began = monotonic()
    prepared = shapestream.ray.prepare(config, 1)
    print(f"ray: prepared in {monotonic() - began:.1f} s")
    began = monotonic()
    found = pool(dataset, config, 2, 256, on_error="column", prepared=prepared).materialize()
    rows = found.take_all()
    print(f"ray: {len(rows)} rows through two actors in {monotonic() - began:.1f} s")
    print(textwrap.indent(str(found.schema()), "    "))
    problems = once_each("rows", rows, ROWS)
    wrong = [row["number"] for row in rows if not is_right(row, arrays[row["number"]])]
    if wrong:
        problems.append(f"rows: {len(wrong)} are wrong, as {wrong[:5]}")
    found.drop_columns(["x"]).write_parquet(str(folder / "out"))
    read = ray.data.read_parquet(str(folder / "out")).take_all()
    wrong = [row["number"] for row in read if not is_right(row, arrays[row["number"]])]
    if len(read) != ROWS or wrong:
        problems.append(f"rows: of {len(read)} rows read from Parquet {len(wrong)} are wrong")
    return problems


def is_right(row: dict[str, Any], x: np.ndarray[Any, Any]) -> bool:
    """Tell whether a row has its outputs, or the reason why it has none."""
    if len(x) > 100:
        return "takes" in row["error"] and bool(np.isnan(row["total"]).all()) and not np.size(row["twice"])
    total, twice = np.asarray(row["total"]), np.asarray(row["twice"])
    return (
        row["error"] is None
        and total.shape == (WIDTH,)
        and np.allclose(total, x.sum(0), rtol=1e-3, atol=1e-4)
        and np.array_equal(twice, 2 * x)
    )


def deaths(folder: Path) -> list[str]:
    """One actor of two is killed once, by a row that runs the second time; one row crashes always."""
    config = folder / "f.yaml"
    config.write_text(FUNCTION)
    prepared = shapestream.ray.prepare(config, 1, "f")
    count, crash, kill = 400, 123, 301
    values = [float(number) for number in range(count)]
    values[crash], values[kill] = -1.0, -2.0
    items = [{"number": number, "x": np.array([value], np.float32)} for number, value in enumerate(values)]
    dataset = ray.data.from_items(items, override_num_blocks=8)
    began = monotonic()
    rows = pool(dataset, config, 2, 64, model="f", on_error="column", prepared=prepared).take_all()
    print(f"ray: {len(rows)} rows with three deaths in {monotonic() - began:.1f} s")
    problems = once_each("deaths", rows, count)
    for row in rows:
        number = row["number"]
        if number == crash:
            if row["error"] is None or not row["error"].startswith("poisoned"):
                problems.append(f"deaths: the row that crashes has the error {row['error']!r}")
        elif row["error"] is not None or row["y"][0] != 2 * values[number]:
            problems.append(f"deaths: row {number}: {row['y']}, {row['error']}")
    if not (folder / "killed").exists():
        problems.append("deaths: no actor was killed")
    return problems


def sharing(folder: Path) -> list[str]:
    """Small batches in one actor: one at a time, and four that share the server. Figures, and no judgement."""
    config, calls = folder / "f.yaml", folder / "calls"
    items = [{"number": number, "x": np.array([number], np.float32)} for number in range(ROWS)]
    dataset = ray.data.from_items(items, override_num_blocks=64).materialize()
    prepared = shapestream.ray.prepare(config, 1, "f")
    problems = []
    measured: dict[int, list[tuple[float, float]]] = {1: [], 4: []}
    for _ in range(3):
        for concurrent, figures in measured.items():
            calls.unlink(missing_ok=True)
            began = monotonic()
            rows = pool(dataset, config, 1, 16, concurrent, model="f", prepared=prepared).take_all()
            took = monotonic() - began
            problems += once_each("sharing", rows, ROWS)
            sizes = [int(line) for line in calls.read_text().split()]
            figures.append((took, sum(sizes) / len(sizes)))
    for concurrent, figures in measured.items():
        took, rows_of_a_call = (median(each) for each in zip(*figures, strict=True))
        print(
            f"ray: batches of 16, {concurrent} at a time: {rows_of_a_call:.1f} rows a call, "
            f"{ROWS} rows in {took:.2f} s with the actor's start"
        )
    return problems


def texts(folder: Path) -> list[str]:
    """Blocks without failed rows, and with some, which have to become one dataset."""
    items = [
        {"number": number, "text": None if number % 7 == 6 and number > 20 else "a " * number + "end"}
        for number in range(40)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=4)
    found = pool(dataset, folder / "f.yaml", 1, 10, model="words", on_error="column").materialize()
    print(textwrap.indent(str(found.schema()), "    "))
    rows = found.take_all()
    problems = once_each("texts", rows, len(items))
    for row, item in zip(sorted(rows, key=lambda row: row["number"]), items, strict=True):
        plain = None if row["words"] is None else [list(each) for each in row["words"]]
        wanted = None if item["text"] is None else [item["text"].split(), item["text"].split()[:1]]
        loud = None if item["text"] is None else item["text"].upper()
        if (wanted, loud, wanted is None) != (plain, row["loud"], row["error"] is not None):
            problems.append(f"texts: {row}")
    return problems


def raising(folder: Path) -> list[str]:
    """A row that the model refuses ends the job, with its number in the batch."""
    items = [{"x": np.zeros((length, WIDTH), np.float32)} for length in (5, 101, 7)]
    try:
        pool(ray.data.from_items(items), folder / "sums.yaml", 1, 3).take_all()
    except Exception as error:  # noqa: BLE001 - of whatever class Ray makes it
        missing = [
            words
            for words in ("is 101, the model takes 1..100", "row 1 of its batch")
            if words not in str(error)
        ]
        return [f"raising: {words!r} is not in the error: {error}" for words in missing]
    return ["raising: nothing was raised"]


class Timed(shapestream.ray.Model):
    """The model, with the CPU seconds that its process has spent since the server was there, whatever its threads."""

    began: float | None = None

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Add a column with them."""
        self._connected()
        if self.began is None:
            self.began = process_time()
        found = super().__call__(batch)
        return spent(found, self.began)


def spent(outputs: dict[str, Any], began: float) -> dict[str, Any]:
    """The outputs that are compared, and the CPU seconds of this process so far."""
    count = len(outputs["number"])
    cpu_s = np.full(count, process_time() - began)
    return {"number": outputs["number"], "total": outputs["total"], "cpu_s": cpu_s}


class Embedded:
    """All rows of a dataset as one stream of `shapestream.local`, in a new process as the others.

    By the costs that the actors read: those of another measurement cut other batches.
    """

    def __init__(self, config: str, *, prepared: str) -> None:
        self._config = config
        for kept in (ProofCache, CostCache):
            os.environ[kept.VARIABLE] = str(Path(prepared) / kept.BELOW / kept.NAME)

    def __call__(self, batch: Any) -> dict[str, Any]:
        """The outputs, and CPU seconds, as `Timed`."""
        with shapestream.local.connect(self._config, cpus=1) as client:
            began = process_time()
            inputs = ({"x": row[None]} for row in batch["x"])
            with client.stream("deep", inputs, max_in_flight=256) as results:
                totals = np.stack([result["total"][0] for result in results])
            return spent({"number": batch["number"], "total": totals}, began)


class Padded:
    """A batch in the order of its rows, padded to its longest, as one call. In f32, as the others."""

    def __init__(self, config: str) -> None:
        self._model = ov.Core().compile_model(
            Path(config).with_suffix(".xml"),
            "CPU",
            {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"},
        )
        self._began = process_time()

    def __call__(self, batch: Any) -> dict[str, Any]:
        """The outputs, and CPU seconds, as `Timed`."""
        rows = list(batch["x"])
        x = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[-1]), np.float32)
        for place, row in enumerate(rows):
            x[place, : len(row)] = row
        total = self._model(x)["total"].copy()
        return spent({"number": batch["number"], "total": total}, self._began)


def by_length(items: list[dict[str, Any]]) -> Any:
    """The dataset whose batches of 32 rows are of one length, nearly; the batches in any order."""
    order = sorted(items, key=lambda item: len(item["x"]))
    batches = [order[start : start + 32] for start in range(0, len(order) - len(order) % 32, 32)]
    random.Random(3).shuffle(batches)
    rest = order[len(batches) * 32 :]
    ordered = [item for batch in batches for item in batch]
    return ray.data.from_items([*ordered, *rest], override_num_blocks=4).materialize()


def costs(folder: Path) -> None:
    """CPU milliseconds of a row in five ways, from the start of the server on. Figures, and no judgement."""
    width, layers = 512, 16
    x = ops.parameter([-1, -1, width], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    drawn = np.random.default_rng(1)
    node: Any = x
    for _ in range(layers):
        weights = (drawn.standard_normal((width, width)) / width**0.5).astype(np.float32)
        node = ops.tanh(ops.matmul(node, ops.constant(weights), False, False))
    total = ops.reduce_sum(node, ops.constant(np.array([1])))
    total.output(0).get_tensor().set_names({"total"})
    ov.save_model(ov.Model([ops.result(total)], [x]), folder / "deep.xml", compress_to_fp16=False)
    config = folder / "deep.yaml"
    table = TABLE.replace("sums", "deep").replace(', 8"', f', {width}", pad: {{length: 0}}')
    config.write_text(table)
    lengths = np.clip(drawn.lognormal(2.8, 0.8, COST_ROWS).astype(int), 1, 100)
    arrays = [drawn.standard_normal((length, width), np.float32) for length in lengths]
    items = [{"number": number, "x": array} for number, array in enumerate(arrays)]
    dataset = ray.data.from_items(items, override_num_blocks=4).materialize()
    prepared = shapestream.ray.prepare(config, 1)
    # One batch of one block for the stream. What a new process compiles for its shapes is in all figures alike.
    whole = ray.data.from_items(items, override_num_blocks=1).materialize()
    apart = 0.0
    sums: dict[int, Any] = {}
    ways = {
        "embedded": (whole, COST_ROWS, 1, Embedded),
        "ray.Model": (dataset, 256, 1, Timed),
        "ray.Model, four batches at a time": (dataset, 256, 4, Timed),
        "padded": (dataset, 32, 1, Padded),
        "padded, sorted": (by_length(items), 32, 1, Padded),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name, (given, batch_size, concurrent, kind) in ways.items():
            # What one run learns of costs is not the next one's: equal costs at the start, equal batches.
            own = shutil.copytree(prepared, folder / f"{name} {turn}")
            more = {"prepared": str(own)} if kind in (Embedded, Timed) else {}
            rows = pool(given, config, 1, batch_size, concurrent, kind=kind, **more).take_all()
            assert len(rows) == COST_ROWS
            for row in rows:
                other = sums.setdefault(row["number"], row["total"])
                apart = max(apart, float(np.abs(row["total"] - other).max()))
            found[name].append(max(row["cpu_s"] for row in rows) / COST_ROWS)
    largest = max(float(np.abs(each).max()) for each in sums.values())
    print(f"ray: answers are at most {apart:.2g} apart, and as large as {largest:.2g}")
    for ours in [name for name in ways if name.startswith("ray.Model")]:
        for name in ("embedded", "padded", "padded, sorted"):
            ratios = [other / own for other, own in zip(found[name], found[ours], strict=True)]
            print(
                f"ray: rows per CPU second, {ours} / {name}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    print(
        "ray: CPU ms of a row: "
        + ", ".join(
            f"{name} {median(each) * 1e3:.3f} {[round(one * 1e3, 3) for one in each]}"
            for name, each in found.items()
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
