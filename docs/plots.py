"""The pictures of docs, made anew: `make plots`, or `python docs/plots.py [FOLDER [svg|png]]`.

Nothing is measured here. Two pictures play traffic to the server's own scheduler on virtual time, one asks the planner
for its cuts; the costs are those of docs/data/minilm-costs.json, and of a formula. About 20 s of one core.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from numpy.typing import NDArray

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.planner import BATCH_S, DELAYED
from shapestream.scheduling.scheduler import Scheduler
from shapestream.scheduling.segments import SegmentLimits, Window, cut_window
from shapestream.scheduling.worker_costs import WorkerCosts
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.cost_table import CostTable
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.simulator import Policy, Scenario, simulate
from shapestream_workers.lab.traffic import parse_sizes
from shapestream_workers.lab.true_cost import TableCost, TrueCost, parse_formula

DOCS = Path(__file__).parent
COSTS = DOCS / "data" / "minilm-costs.json"
FORMULA = "fixed_ms=3,ms_per_element=0.13"
LENGTHS = "lognormal:24,0.9,4..256"
NAME = "embeddings"
PROFILE = ModelProfile(
    name=NAME, dimensions=("batch", "seq"), has_batch=True, paddable=(True, True), max_batch=64
)

Floats: TypeAlias = NDArray[np.float64]

GREEN, BLUE, ORANGE, GREY = "#0b6e4f", "#4472c4", "#c55a11", "#777777"
COLOURS = {"shapestream": GREEN, "one at a time": BLUE, "arrival order, 16": ORANGE}
# The same figures give the same file, and text stays text.
SETTINGS = {
    "svg.hashsalt": "shapestream",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "font.size": 10,
}


def main(folder: Path, kind: str) -> None:
    """Draws all of them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        for name, draw in (
            ("scheduling-window", draw_window),
            ("scheduling-load", draw_load),
            ("scheduling-flood", draw_flood),
        ):
            metadata = {"Date": None} if kind == "svg" else None
            draw().savefig(folder / f"{name}.{kind}", dpi=120, metadata=metadata)


# ------------------------------------------------------------ how a queue is cut


def draw_window() -> Figure:
    """64 waiting requests, sorted, with the batches that they are cut into: by two kinds of costs."""
    lengths = np.sort(drawn_lengths(64, seed=1))
    figure = Figure(figsize=(8.6, 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    draw_cuts(upper, lengths, minilm(), "MiniLM on a CPU, measured: a call costs little besides its tokens")
    draw_cuts(lower, lengths, formula(), "3 ms per call and 0.13 ms per token: company is worth more")
    lower.set_xlabel("64 waiting requests, sorted by length")
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_cuts(axes: Any, lengths: NDArray[np.int64], truth: TrueCost, title: str) -> None:
    """One panel: a bar per request, a box per batch, and how many requests each batch has."""
    costs = believed(truth)
    window = Window(rows=np.ones(len(lengths), dtype=np.intp), shapes=lengths[:, None])
    limits = SegmentLimits(max_rows=PROFILE.max_batch)
    ends = cut_window(window, costs, limits, delayed=DELAYED * len(lengths), batch_s=BATCH_S)
    starts = [0, *ends[:-1]]
    places = np.arange(len(lengths))
    axes.bar(places + 0.5, lengths, width=0.8, color=GREEN, label="tokens of a request")
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        longest = lengths[end - 1]
        label = "a batch: as long as its longest request; empty is padding" if number == 0 else None
        axes.bar(
            start + 0.06, longest, end - start - 0.12, align="edge", fill=False, edgecolor=ORANGE, label=label
        )
        if end - start > 1:
            middle = (start + end) / 2
            axes.text(middle, longest + 4, f"{end - start}", ha="center", va="bottom", color=ORANGE)
    together_s = sum(
        costs.call(end - start, (int(lengths[end - 1]),)).seconds
        for start, end in zip(starts, ends, strict=True)
    )
    alone_s = sum(costs.call(1, (int(length),)).seconds for length in lengths)
    one_s = costs.call(len(lengths), (int(lengths[-1]),)).seconds
    axes.set_title(
        f"{title}\n{len(ends)} batches, {ms(together_s)};  one at a time {ms(alone_s)};  all in one batch {ms(one_s)}"
    )
    axes.set(ylabel="tokens", xlim=(0, len(lengths)))
    axes.set_ylim(0, 1.12 * lengths[-1])


def ms(seconds: float) -> str:
    """As a picture says it."""
    return f"{seconds * 1e3:,.0f} ms"


# ------------------------------------------------------------ latency against load


def draw_load() -> Figure:
    """p50 and p99 against the offered rate, as `shapestream simulate` tells them."""
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_swept(
        left,
        ["--costs", str(COSTS), "--slots", "2", "--slots-per-worker", "2"],
        "40,60,80,100,130,160,180,200,220,240",
    )
    left.set_title("MiniLM's measured costs, two slots")
    draw_swept(right, ["--cost", FORMULA], "20,40,60,80,100,115,130,145,160,180,200")
    right.set_title("3 ms per call, 0.13 ms per token, one slot")
    left.set_ylabel("latency, ms")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_swept(axes: Any, options: list[str], rates: str) -> None:
    """One panel: p99 solid, p50 dashed."""
    words = ["simulate", *options, "--sizes", f"seq={LENGTHS}", "--requests", "2500", "--rate", "100"]
    words += ["--sweep", f"rate={rates}", "--compare", "--json"]
    answer = subprocess.run(
        [sys.executable, "-m", "shapestream_workers", *words], check=True, stdout=subprocess.PIPE
    )
    runs = json.loads(answer.stdout)["runs"]
    for policy, colour in COLOURS.items():
        own = [run for run in runs if run["policy"] == policy]
        offered = [run["value"] for run in own]
        for share, style in (("p99", "-"), ("p50", "--")):
            label = policy if share == "p99" else None
            axes.plot(offered, [run[f"{share}_s"] * 1e3 for run in own], style, color=colour, label=label)
    axes.plot([], [], "-", color=GREY, label="p99")
    axes.plot([], [], "--", color=GREY, label="p50")
    axes.set(yscale="log", xlabel="offered requests per second", ylim=(5, 2000))
    axes.set_xlim(left=0)
    axes.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
    axes.xaxis.set_major_locator(MultipleLocator(50))
    axes.minorticks_off()
    axes.grid(alpha=0.25)


# ------------------------------------------------------------ fair shares

FLOOD_AT_S, FLOOD, STEADY_HZ, LASTS_S = 2.0, 1000, 20, 9.0


def draw_flood() -> Figure:
    """What one client's flood does to another client that sends a request every 50 ms."""
    figure = Figure(figsize=(8.6, 3.8), layout="constrained")
    axes = figure.subplots()
    for policy, clients, colour, label in (
        (PlainServer(1, max_queued_requests=8192), 2, BLUE, "one at a time, in order of arrival"),
        (scheduler(), 1, ORANGE, "shapestream, had all come from one client"),
        (scheduler(), 2, GREEN, "shapestream"),
    ):
        sent_s, took_s, drained_s = steady_latencies(policy, clients)
        axes.plot(sent_s, took_s * 1e3, ".", color=colour, markersize=5, label=label)
    axes.axvspan(FLOOD_AT_S, drained_s, color=GREY, alpha=0.12, linewidth=0)
    axes.text(
        FLOOD_AT_S + 0.05, 9000, f"{FLOOD:,} requests of another client wait", va="top", color="#444444"
    )
    axes.set(
        yscale="log",
        ylim=(2.5, 12000),
        xlabel="when the steady client sent a request, s",
        ylabel="latency, ms",
    )
    axes.set_yticks(
        [3, 10, 30, 100, 300, 1000, 3000, 10000], ["3", "10", "30", "100", "300", "1,000", "3,000", "10,000"]
    )
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def scheduler() -> Scheduler:
    """The server's own."""
    return Scheduler(max_queued_requests=8192, max_queued_bytes=1 << 40)


def steady_latencies(policy: Policy, clients: int) -> tuple[Floats, Floats, float]:
    """When the steady client sent, how long its answers took, and when the flood's last answer came."""
    steady = [(number / STEADY_HZ, 0) for number in range(int(STEADY_HZ * LASTS_S))]
    sent = sorted([*steady, *[(FLOOD_AT_S, 1)] * FLOOD])
    lengths = drawn_lengths(len(sent), seed=2).tolist()
    requests = [
        TraceRequest(at_s, 0, min(sender, clients - 1), (1, length))
        for (at_s, sender), length in zip(sent, lengths, strict=True)
    ]
    truth = minilm()
    costs = {NAME: truth}
    scenario = Scenario(
        profiles=[PROFILE], costs=costs, traffic=requests, believed=costs, slots=2, slots_per_worker=2
    )
    simulated = simulate(policy, scenario)
    is_steady = np.array([sender == 0 for _, sender in sent])
    arrived, ended = (
        simulated.requests.column(times) for times in (simulated.requests.arrived, simulated.requests.ended)
    )
    return arrived[is_steady], (ended - arrived)[is_steady], float(ended[~is_steady].max())


# ------------------------------------------------------------ lengths and costs


def drawn_lengths(count: int, seed: int) -> NDArray[np.int64]:
    """Tokens per request."""
    model = parse_sizes(f"seq={LENGTHS}")
    return np.array([length for _, length in model.draw(np.random.default_rng(seed), count)])


def minilm() -> TrueCost:
    """What docs/data says."""
    return TableCost(CostTable.from_dict(json.loads(COSTS.read_text(encoding="utf-8"))[0]))


def formula() -> TrueCost:
    """3 ms per call and 0.13 ms per token."""
    return parse_formula(FORMULA, has_batch=True, largest=(PROFILE.max_batch, 256))


def believed(truth: TrueCost) -> WorkerCosts:
    """What the planner takes calls to cost after a calibration."""
    table = truth.calibration("drawn", PROFILE.dimensions, PROFILE.max_batch)
    model = CostModel()
    model.add_model(PROFILE)
    model.join(0, "w0", {NAME: table}, [NAME])
    return model[NAME].on()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images",
        sys.argv[2] if len(sys.argv) > 2 else "svg",
    )
