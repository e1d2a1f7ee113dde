"""`shapestream simulate`: tables, JSON, and what it says to mistakes."""

from __future__ import annotations

import json
import re
from contextlib import chdir
from pathlib import Path

import pytest
import typer
from tests.workers.lab.worlds import write_trace
from typer.testing import CliRunner, Result

from shapestream.errors import ConfigurationError
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.cli import app
from shapestream_workers.lab.options import SimulateOptions
from shapestream_workers.lab.simulate import (
    PLANNED,
    POLICIES,
    Sweep,
    fewest_slots,
    make_scenario,
    parse_sweep,
    run_all,
)
from shapestream_workers.lab.true_cost import FormulaCost

COST = "fixed_ms=3,ms_per_element=0.13"
SIZES = "seq=lognormal:24,0.9,4..256"
SORT = """\
models:
  - name: sort
    function: numpy:sort
    inputs: {a: {shape: "batch:1..8, n:1..64", element_type: f32, pad: {n: 0}}}
    outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
    shapes: {strategy: bucketed, n: [16, 64]}
"""


def simulate(*arguments: str, folder: Path | None = None) -> Result:
    """Run the command in this process; tests/e2e/test_record_trace.py has it in one of its own."""
    with chdir(folder or "."):
        return CliRunner().invoke(app, ["simulate", *arguments])


def hundred(path: Path, model: str = "m", dimensions: tuple[str, ...] = ("batch", "seq")) -> Path:
    """A trace of a hundred requests, ten per second."""
    requests = [TraceRequest(number / 10, 0, 0, (1, 4 + number % 20)) for number in range(100)]
    return write_trace(path, requests, {model: dimensions})


def test_one_run_is_a_table_for_people_and_json_for_scripts() -> None:
    """The same figures."""
    arguments = ["--cost", COST, "--sizes", SIZES, "--rate", "50", "--requests", "500", "--compare"]
    table = simulate(*arguments)
    assert (0, "") == (table.exit_code, table.stderr)
    assert all(policy in table.stdout for policy in POLICIES)
    assert 1 == len({len(line) for line in table.stdout.splitlines()})
    runs = json.loads(simulate(*arguments, "--json").stdout)["runs"]
    assert list(POLICIES) == [run["policy"] for run in runs]
    assert {500} == {run["done"] for run in runs}


def test_a_sweep_over_slots_finds_the_fewest() -> None:
    """In words, and for scripts."""
    arguments = ["--cost", COST, "--sizes", SIZES, "--rate", "300", "--requests", "1000", "--p99-ms", "100"]
    arguments += ["--sweep", "slots=1..4"]
    said = simulate(*arguments)
    assert 0 == said.exit_code, said.stderr
    assert re.search(r"p99 <= 100 ms and at most 0.1% lost: \d slots are enough", said.stdout)
    plain = json.loads(simulate(*arguments, "--json").stdout)
    assert plain["fewest_slots"] in (2, 3)
    assert [1.0, 2.0, 3.0, 4.0] == [run["value"] for run in plain["runs"]]


def test_a_trace_is_played_with_measured_costs(tmp_path: Path) -> None:
    """At its own times, or at another rate; one table may be for the only model, whatever it is called."""
    trace = str(hundred(tmp_path / "t.jsonl"))
    table = FormulaCost(fixed_s=0.003, per_element_s=0.00013).calibration("k", ("batch", "seq"), 16)
    for model in ("m", "other"):
        (tmp_path / "costs.json").write_text(json.dumps([{"model": model, **table.to_dict()}]))
        ran = simulate("--trace", trace, "--costs", "costs.json", "--json", folder=tmp_path)
        (run,) = json.loads(ran.stdout)["runs"]
        assert (100, pytest.approx(10.0, rel=0.1)) == (run["done"], run["offered"])
    faster = simulate("--trace", trace, "--costs", "costs.json", "--rate", "100", "--json", folder=tmp_path)
    assert json.loads(faster.stdout)["runs"][0]["offered"] == pytest.approx(100, rel=0.1)


def test_the_models_of_a_file_are_simulated_as_it_says(tmp_path: Path) -> None:
    """Its allowed shapes: 4..23 elements are padded to 16 or 64."""
    (tmp_path / "server.yaml").write_text(SORT)
    trace = str(hundred(tmp_path / "t.jsonl", "sort", ("batch", "n")))
    ran = simulate("server.yaml", "--trace", trace, "--cost", COST, "--json", folder=tmp_path)
    assert 0 == ran.exit_code, ran.stderr
    (run,) = json.loads(ran.stdout)["runs"]
    assert run["padding_ratio"] > 0.2
    made_up = ["--sizes", "n=8", "--rate", "9", "--requests", "3"]  # of the only model, without its name
    ran = simulate("server.yaml", *made_up, "--cost", COST, "--json", folder=tmp_path)
    assert 3 == json.loads(ran.stdout)["runs"][0]["done"]
    other = str(hundred(tmp_path / "o.jsonl", "other", ("batch", "n")))
    ran = simulate("server.yaml", "--trace", other, "--cost", COST, folder=tmp_path)
    assert (3, True) == (ran.exit_code, "no model 'other'" in ran.stderr)
    wrong = str(hundred(tmp_path / "w.jsonl", "sort", ("batch", "seq")))
    ran = simulate("server.yaml", "--trace", wrong, "--cost", COST, folder=tmp_path)
    assert (3, True) == (ran.exit_code, "has the dimensions batch, n" in ran.stderr)


MADE = ["--sizes", "seq=8", "--rate", "1"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--cost", COST], 2, "no traffic: --trace FILE"),
        (["--sizes", "seq=8", "--cost", COST], 2, "no rate: --rate"),
        (["--sizes", "seq=8", "--rate", "0", "--cost", COST], 2, "--rate"),
        (MADE, 2, "no costs of model 'model'"),
        ([*MADE, "--cost", "x=1"], 2, "none of fixed_ms=MS"),
        ([*MADE, "--cost", "fixed_ms=1e308"], 3, "cost too much"),
        ([*MADE, "--cost", COST, "--clients", "9" * 30], 2, "--clients"),
        (["--sizes", "seq=0", "--rate", "1", "--cost", COST], 2, "expected lognormal"),
        (["--trace", "gone", "--cost", COST], 3, "gone: no such file"),
        (["gone.yaml", *MADE, "--cost", COST], 3, "gone.yaml: no such file"),
        ([*MADE, "--costs", "gone.json"], 3, "gone.json: no such file"),
        (["--trace", "t.jsonl", "--sizes", "seq=8", "--cost", COST], 2, "--trace and --sizes exclude"),
        ([*MADE, "--in-flight", "3", "--cost", COST], 2, "exclude each other"),
        ([*MADE, "--sizes", "seq=9", "--cost", COST], 2, "two models of one name"),
        ([*MADE, "--speeds", "1,2", "--cost", COST], 2, "No such option"),
        (["--sizes", "m/trace:t.jsonl", "--rate", "1", "--cost", COST], 2, "expected DIMENSION=DISTRIBUTION"),
        (["--sizes", f"seq={2**52};x=4", "--rate", "1", "--cost", COST], 3, "more than anything computes"),
        ([*MADE, "--arrivals", "often", "--cost", COST], 2, "poisson, constant or bursts"),
        ([*MADE, "--cost", COST, "--sweep", "colour=1"], 2, "slots=1..16"),
        (["--sizes", "seq=8", "--in-flight", "1", "--cost", COST, "--sweep", "rate=1,2"], 2, "a sweep of the rate exclude"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_do(tmp_path: Path, arguments: list[str], status: int, words: str) -> None:
    """2 for the command line, 3 for files; nothing on stdout, no traceback, and nothing has run."""
    hundred(tmp_path / "t.jsonl")
    ran = simulate(*arguments, folder=tmp_path)
    assert (status, "") == (ran.exit_code, ran.stdout)
    # The frame of a usage error is folded at the terminal's width.
    assert "".join(words.split()) in "".join(ran.stderr.split()).replace("│", "")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("fixed", "option", "value"),
    [
        ("--rate=150", "--slots", "2"),
        ("--rate=150", "--rate", "75"),
        ("--in-flight=20", "--in-flight", "5"),
        ("--rate=150", "--max-batch", "2"),
        ("--rate=150", "--deadline-ms", "40"),
    ],
)
def test_a_value_of_a_sweep_is_that_of_the_option(fixed: str, option: str, value: str) -> None:
    """Every figure is the same, and another one without it."""
    common = ["--cost", COST, "--sizes", SIZES, "--requests", "200", fixed, "--json"]
    given = common if fixed.partition("=")[0] != option else [word for word in common if word != fixed]
    figures = []
    for arguments in ([*given, option, value], [*common, "--sweep", f"{option[2:]}={value}"], common):
        (run,) = json.loads(simulate(*arguments).stdout)["runs"]
        figures.append({name: figure for name, figure in run.items() if name not in ("value", "decide_us")})
    assert figures[0] == figures[1] != figures[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slots=1..4", Sweep("slots", (1.0, 2.0, 3.0, 4.0))),
        ("slots=1,2,8", Sweep("slots", (1.0, 2.0, 8.0))),
        ("rate=10..12", Sweep("rate", (10.0, 11.0, 12.0))),
        ("in-flight=4", Sweep("in_flight", (4.0,))),
        ("deadline_ms=0.5,1", Sweep("deadline_ms", (0.5, 1.0))),
    ],
)
def test_sweeps_are_read(text: str, expected: Sweep) -> None:
    """One by one, or all whole numbers from the first to the last."""
    assert expected == parse_sweep(text)


@pytest.mark.parametrize(
    "text",
    ["", "slots", "slots=", "slots=0", "slots=1..9999", "rate=3..1", "colour=1", "rate=nan", f"slots={'9' * 400}",
     "slots=1000000000", "rate=1..2:8"],
)  # fmt: skip
def test_what_is_no_sweep_is_refused(text: str) -> None:
    """With examples of what is."""
    with pytest.raises(typer.BadParameter, match=r"slots=1\.\.16"):
        parse_sweep(text)


def test_each_model_has_costs_and_dimensions_of_its_own() -> None:
    """By its name, else those without one."""
    scenario = make_scenario(
        SimulateOptions(
            cost=["a/fixed_ms=5", "fixed_ms=7"],
            sizes=["a/seq=8", "b/height=4;width=5"],
            rate=1.0,
        )
    )
    assert (0.005, 0.007) == (scenario.costs["a"].seconds((1, 8)), scenario.costs["b"].seconds((1, 4, 5)))
    assert [(True, True), (True, True, True)] == [profile.paddable for profile in scenario.profiles]


def test_tables_are_read_as_models_costs_prints_them(tmp_path: Path) -> None:
    """A list of tables with names; what is none is refused."""
    table = FormulaCost(fixed_s=0.003, per_element_s=0.00013).calibration("k", ("batch", "seq"), 16).to_dict()
    path = tmp_path / "costs.json"
    options = SimulateOptions(costs=path, sizes=["m/seq=8"], rate=1.0)
    for models in (["m"], ["x", "m"]):
        path.write_text(json.dumps([{"model": model, **table} for model in models]))
        assert make_scenario(options).costs["m"].seconds((1, 8)) == pytest.approx(0.003 + 8 * 0.00013)
    for wrong in ([1], [table], table, {"m": 3}, "m", 3, []):
        path.write_text(json.dumps(wrong))
        with pytest.raises((ConfigurationError, typer.BadParameter), match="cost"):
            make_scenario(options)
    path.write_text(json.dumps([{"model": "m", **table, "dimensions": ["batch", "width"]}]))
    with pytest.raises(ConfigurationError, match="costs of batch, width"):
        make_scenario(options)


def test_the_goal_wants_every_larger_number_of_slots_to_do() -> None:
    """One lucky run between two failures is no answer."""
    options = SimulateOptions(cost=[COST], sizes=[SIZES], rate=250.0, requests=400)
    runs = run_all(make_scenario(options), parse_sweep("slots=1..3"), compare=False)
    assert {PLANNED} == {run["policy"] for run in runs}
    best = fewest_slots(runs, 0.2)
    assert best is not None
    assert best >= 2
    assert fewest_slots(runs, 1e-6) is None
    # The goal of the largest is not reached: whatever the others did, it is no answer.
    assert fewest_slots(runs, runs[-1]["p99_s"] * 0.999) is None
