"""`python -m benchmarks.versus COMMIT`: this checkout against another commit, in turns.

Each benchmark runs in both checkouts, round by round, the one that goes first by turns; every figure is compared within
its round. Simulated figures have a seed for a round, so they depend on the decisions alone.

`python -m benchmarks.versus pure`: this checkout with the compiled scheduler against the same in Python.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.checkouts import ROOT, Checkout, checked_out, stolen_s

MOST_STOLEN = 0.02
"""Share of the CPUs' time; a round from which more was stolen is thrown away."""
WITHIN = 0.015
"""Rounds end when the intervals of all figures reach no further than this from their medians."""
FEWEST = 3
"""Rounds, before that."""

PURE = "pure"

Figures = dict[str, float]
DOCSTRINGS = "5,6,8,10,12,14,15,17,20,23,27,32,38,46,56,68,83,103,133,190,256"
"""Lengths, each as likely as the others: the docstrings of Python's library, as in `benchmarks.limit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A command, and the figures in the JSON that it prints."""

    arguments: Sequence[str]
    read: Callable[[Any], Figures]
    simulated: bool = False
    """Takes `--seed`, and does not depend on the machine."""


def main(
    commit: Annotated[str, typer.Argument(help="The commit that this checkout is compared with, or `pure`.")],
    figures: Annotated[
        str, typer.Option(help="Benchmarks by name, with commas; all, simulated or real.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="At most; fewer where the intervals are narrow.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Prints for each figure the median of the rounds' ratios, this checkout / COMMIT, with its 95 % interval."""
    console = Console(stderr=as_json)
    names = chosen(figures)
    found = {}
    with _sides(commit) as (old, new), tempfile.TemporaryDirectory(prefix="ss-versus-") as folder:
        _write_trace(Path(folder) / "modest.jsonl")
        for name in names:
            with console.status(f"measuring {name}"):
                ratios, thrown_away = compare(old, new, BENCHMARKS[name], rounds=rounds, folder=Path(folder))
            found[name] = {"thrown_away": thrown_away, "ratios": ratios}
            console.print(table(f"{name}: this / {commit}", ratios, thrown_away))
    if as_json:
        print(json.dumps(found, indent=2))


@contextmanager
def _sides(commit: str) -> Iterator[tuple[Checkout, Checkout]]:
    """What is compared: another commit and this checkout, or both forms of this one."""
    if commit == PURE:
        subprocess.run(["make", "-C", str(ROOT), "compiled"], check=True, stdout=sys.stderr)
        environment = {"PYTHONPATH": str(ROOT / "build" / "compiled")}
        yield Checkout(name=PURE, root=ROOT), Checkout(name="this", root=ROOT, environment=environment)
    else:
        with checked_out(commit) as old:
            yield old, Checkout(name="this", root=ROOT)


def compare(
    old: Checkout, new: Checkout, benchmark: Benchmark, *, rounds: int, folder: Path
) -> tuple[dict[str, list[float]], int]:
    """By figure, each round's ratio new / old; and how many rounds were thrown away for stolen CPU."""
    ratios: dict[str, list[float]] = defaultdict(list)
    thrown_away = 0
    for number in range(rounds):
        arguments = [word.format(folder=folder) for word in benchmark.arguments]
        if benchmark.simulated:
            arguments += ["--seed", str(number)]
        total_s, stolen_before_s = stolen_s()
        sides = (old, new) if number % 2 == 0 else (new, old)
        figures = {side.name: benchmark.read(side.run(arguments)) for side in sides}
        now_s, stolen_now_s = stolen_s()
        if not benchmark.simulated and stolen_now_s - stolen_before_s > MOST_STOLEN * (now_s - total_s):
            thrown_away += 1
            continue
        for name in figures[old.name].keys() & figures[new.name].keys():
            if figures[old.name][name]:
                ratios[name].append(figures[new.name][name] / figures[old.name][name])
        if number + 1 - thrown_away >= FEWEST and all(_is_narrow(each) for each in ratios.values()):
            break
    return dict(sorted(ratios.items())), thrown_away


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of their median, by the bootstrap."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def _is_narrow(values: Sequence[float]) -> bool:
    low, high = interval(values)
    middle = statistics.median(values)
    return max(high - middle, middle - low) <= WITHIN


def table(title: str, ratios: Mapping[str, Sequence[float]], thrown_away: int) -> Table:
    """A row per figure: the median of its ratios, and the 95 % interval of that."""
    found = Table(
        title=title, title_justify="left", caption=f"rounds thrown away for stolen CPU: {thrown_away}"
    )
    for column in ("figure", "median", "95 %", "rounds"):
        found.add_column(column, justify="left" if column == "figure" else "right")
    for name, values in ratios.items():
        low, high = interval(values)
        found.add_row(name, f"{statistics.median(values):.3f}", f"{low:.3f}..{high:.3f}", str(len(values)))
    return found


# ------------------------------------------------------------ what is compared


def _cells(report: Any) -> Figures:
    """Every number of a `Report`, by its row and column."""
    found: Figures = {}
    for row in report["rows"]:
        title, *cells = row.items()
        found |= {f"{title[1]}: {name}": value for name, value in cells if isinstance(value, (int, float))}
    return found


def _limit(figures: Any) -> Figures:
    """Efficiencies and latencies of each trace of `benchmarks.limit`."""
    found: Figures = {}
    for trace, plain in figures.items():
        for name, value in plain.items():
            if name.startswith("efficiency") and isinstance(value, float):
                found[f"{trace}: {name}"] = value
            elif name == "p99_ratio_vs_single":
                found |= {f"{trace}: p99 / single, {load} %": ratio for load, ratio in value.items()}
    return found


def _simulated(plain: Any) -> Figures:
    """Read rates and latencies from `shapestream simulate`; `in time` is a share of all requests."""
    run = plain["runs"][0]
    found = {name: run[name] for name in ("elements_per_s", "mean_s", "p99_s") if run[name]}
    return {**found, "in time": run["done"] / run["requests"]}


def _measured(module: str, **arguments: int) -> list[str]:
    """Measures one of the tables of `python -m benchmarks` alone."""
    words = "".join([f", {name}={value}" for name, value in arguments.items()])
    return [
        "-c",
        "import json, pathlib, tempfile; "
        f"from benchmarks import {module}; "
        f"folder = tempfile.mkdtemp(prefix='ss-bench-'); "
        f"print(json.dumps({module}.measure(pathlib.Path(folder){words}).plain()))",
    ]


def _simulation(*words: str) -> Benchmark:
    arguments = ["-m", "shapestream_workers", "simulate", "--json", "--requests", "3000", *words]
    return Benchmark(arguments=arguments, read=_simulated, simulated=True)


_MINILM = (
    "--cost", "fixed_ms=2.5,ms_per_element=0.25", "--max-batch", "32", "--slots", "2", "--slots-per-worker", "2",
    "--way-ms", "0.25", "--noise", "0.1",
)  # fmt: skip
_LOGNORMAL = ("--sizes", "seq=lognormal:24,0.9,4..256")
_SLEEPING = ("--cost", "fixed_ms=8,ms_per_row=4", "--max-batch", "8", "--way-ms", "1", "--noise", "0.05")
BENCHMARKS = {
    "lognormal-64": _simulation(*_MINILM, *_LOGNORMAL, "--in-flight", "64"),
    "lognormal-256": _simulation(*_MINILM, *_LOGNORMAL, "--in-flight", "256"),
    "lognormal-poisson": _simulation(*_MINILM, *_LOGNORMAL, "--rate", "160"),
    "docstrings-64": _simulation(*_MINILM, "--sizes", f"seq=choice:{DOCSTRINGS}", "--in-flight", "64"),
    "docstrings-poisson": _simulation(*_MINILM, "--sizes", f"seq=choice:{DOCSTRINGS}", "--rate", "105"),
    "endless": _simulation(
        "--cost", "fixed_ms=0.2,ms_per_element=0.0001,prepare_ms=2", "--max-batch", "16", "--in-flight", "64",
        "--sizes", "height=uniform:32..96;width=uniform:32..96", "--way-ms", "0.25",
    ),
    "flood": _simulation(
        *_SLEEPING, "--sizes", "x=16", "--rate", "2000", "--clients", "4", "--deadline-ms", "500",
    ),
    "modest": _simulation(*_SLEEPING, "--trace", "{folder}/modest.jsonl"),
    "scheduler": Benchmark(arguments=["-m", "benchmarks.scheduler", "--json"], read=_cells),
    "limit": Benchmark(
        arguments=["-m", "benchmarks.limit", "--json", "--seconds", "1", "--rounds", "1"], read=_limit
    ),
    "overload": Benchmark(arguments=["-m", "benchmarks.overload", "--json", "--rounds", "1"], read=_cells),
    "tiny": Benchmark(arguments=_measured("tiny_tensors", requests=4000, rounds=1), read=_cells),
    "large": Benchmark(arguments=_measured("large_tensors", requests=150, rounds=1), read=_cells),
}  # fmt: skip
"""The simulated ones first. `modest`: clients with deadlines beside one that floods the queue without."""


def chosen(figures: str) -> list[str]:
    """Names of benchmarks; raises `BadParameter` for what is none."""
    groups = {
        "all": list(BENCHMARKS),
        "simulated": [name for name, each in BENCHMARKS.items() if each.simulated],
        "real": [name for name, each in BENCHMARKS.items() if not each.simulated],
    }
    names = [name for part in figures.split(",") for name in groups.get(part, [part])]
    if unknown := set(names) - BENCHMARKS.keys():
        raise typer.BadParameter(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    return names


def _write_trace(path: Path) -> None:
    """Three clients that ask for an eighth of the sleeping model's capacity each, beside one that floods."""
    rng = np.random.default_rng(0)
    requests = []
    for client, (rate, count, deadline) in enumerate([(1000, 2400, "null"), *[(25, 300, "0.5")] * 3]):
        times = np.cumsum(rng.exponential(1 / rate, count))
        requests += [(at_s, f"[{at_s:.6f},0,{client},[1,16],{deadline},0]\n") for at_s in times.tolist()]
    lines = ['{"shapestream_trace": 1, "models": {"model": ["batch", "x"]}}\n']
    path.write_text("".join(lines + [line for _, line in sorted(requests)]))


if __name__ == "__main__":
    typer.run(main)
