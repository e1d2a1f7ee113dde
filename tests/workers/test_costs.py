"""Costs as a process measures them at its start, and as people see them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from shapestream.loading.measured_costs import cost_tables, measure_costs
from shapestream.loading.models import compile_models, slots_and_threads
from shapestream.settings import LoadedSettings, load_settings
from shapestream_engine.calibration import ENVIRONMENT, CostCache
from shapestream_engine.cost_table import CostTable, LearnedCosts
from shapestream_engine.probing.cache import ENVIRONMENT as PROOFS
from shapestream_workers.cli import app
from shapestream_workers.costs import costs_of

CONFIG = """\
models:
  - name: cleaned
    function: numpy:nan_to_num
    trust: true
    inputs: {x: {shape: "batch:1..4, n:1..8", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))


def written(folder: Path, more: str = "") -> Path:
    """The YAML, with `more` at its end."""
    path = folder / "x.yaml"
    path.write_text(CONFIG + more)
    return path


def measured(loaded: LoadedSettings) -> dict[str, CostTable]:
    """As a process with two slots finds out at its start."""
    models = loaded.settings.models
    compiled = compile_models(loaded, models, slots=2, threads=2)
    return cost_tables(models, compiled, slots=2, threads=2)


def test_a_process_measures_its_models_and_says_so(tmp_path):
    """One line per model: how many shapes, how long it took, and that the next start reads it."""
    loaded = load_settings(written(tmp_path))
    with capture_logs() as first:
        table = measured(loaded)["cleaned"]
    with capture_logs() as second:
        again = measured(loaded)["cleaned"]
    assert table == again
    assert (("batch", "n"), True) == (table.dimensions, len(table.points) > 5)
    lines = [[line for line in log if line["event"] == "costs measured"] for log in (first, second)]
    assert [("cleaned", len(table.points), "measured")] == [
        (line["model"], line["points"], line["source"]) for line in lines[0]
    ]
    assert ["cache"] == [line["source"] for line in lines[1]]
    assert lines[0][0]["seconds"] > lines[1][0]["seconds"] == 0.0


def test_nothing_is_measured_where_nobody_wants_it(tmp_path):
    """`calibration_s: 0`: costs are learned from traffic alone."""
    assert {} == measured(load_settings(written(tmp_path, "    calibration_s: 0\n")))
    assert not (tmp_path / "costs").exists()


def test_samples_that_do_not_fit_cost_the_table_and_nothing_else(tmp_path):
    """A model that is served without proof is served without measured costs as well, with a warning."""
    loaded = load_settings(written(tmp_path))
    models = loaded.settings.models
    compiled = compile_models(loaded, models, slots=1, threads=1)
    bad = models[0].model_copy(update={"probe": probe_of_another(tmp_path)})
    with capture_logs() as log:
        assert {} == measure_costs([bad], compiled, slots=1, threads=1)
    assert ["costs not measured"] == [line["event"] for line in log]


def probe_of_another(folder: Path) -> object:
    """A probe for an input that the model does not have."""
    return load_settings(written(folder, "    probe: {other: {integers: [0, 1]}}\n")).settings.models[0].probe


def test_people_see_each_shape_with_its_cost(tmp_path):
    """Rows, size, milliseconds, microseconds per element, and what the first call took; then from what was kept."""
    config = written(tmp_path)
    shown = CliRunner().invoke(app, ["models", "--costs", str(config)])
    assert 0 == shown.exit_code, shown.output
    head, columns, *rows = shown.stdout.splitlines()
    assert head.startswith("costs of cleaned: ")
    assert "call shapes measured, in " in head
    assert ["batch", "n", "ms", "us/element", "first", "ms"] == columns.split()
    sizes = [tuple(map(int, row.split()[:2])) for row in rows]
    assert sizes == sorted(sizes)
    assert {(1, 1), (4, 8)} <= set(sizes)
    again = CliRunner().invoke(app, ["models", "--costs", str(config)])
    assert "kept from an earlier start" in again.stdout
    assert rows == again.stdout.splitlines()[2:]


def shown_as_json(folder: Path) -> dict[str, Any]:
    """The only model in what the command prints for scripts."""
    (shown,) = json.loads(
        CliRunner().invoke(app, ["models", "--costs", "--json", str(written(folder))]).stdout
    )
    return shown


def corrected(folder: Path, **changes: Any) -> LearnedCosts:
    """What a server wrote down about the table that is kept: half a millisecond at one measured shape and one other."""
    shown = costs_of(load_settings(written(folder)))[0].to_dict()
    learned = LearnedCosts(
        table=CostTable.from_dict(shown).digest,
        batches=7,
        saved_at=time.time() - 3 * 3600.0 - 5.0,
        seconds={(4, 8): 0.0005, (3, 7): 0.0005},
    )
    learned = replace(learned, **changes)
    CostCache.of_environment().keep_learned(learned)
    return learned


def test_people_see_what_traffic_has_corrected(tmp_path):
    """How many batches say so, how long ago, and what a call of each measured shape costs by now."""
    corrected(tmp_path, preparation={8.0: 0.25, 32.0: 0.5})
    (report,) = costs_of(load_settings(written(tmp_path)))
    about, *shapes = report.lines()
    assert "kept from an earlier start" in about
    assert [
        "  corrected by 7 batches, written down 3 hours ago",
        "  corrected, too: 1 call shape between or beyond what was measured (--json)",
        "  a new call shape takes longer by 250.000 ms at 8 elements and 500.000 ms at 32 elements",
    ] == shapes[:3]
    assert shapes[3].split()[-1] == "corrected"
    assert [["4", "8", "0.500"]] == [
        [row.split()[0], row.split()[1], row.split()[-1]] for row in shapes[4:] if row.endswith(" 0.500")
    ]


@pytest.mark.parametrize(
    ("age_s", "spelled"),
    [(-50.0, "0 seconds"), (150.0, "2 minutes"), (9_000.0, "2 hours"), (200_000.0, "2 days")],
)
def test_ages_are_told_in_units_that_people_use(tmp_path, age_s, spelled):
    """A clock that was set back makes nothing younger than now. (Each is far from the next, for a slow machine.)"""
    corrected(tmp_path, saved_at=time.time() - age_s)
    (report,) = costs_of(load_settings(written(tmp_path)))
    assert f"  corrected by 7 batches, written down {spelled} ago" in report.lines()


def test_scripts_get_corrections_beside_the_table(tmp_path):
    """All of them, with their age; a table of the same file remains one."""
    assert shown_as_json(tmp_path)["corrected"] is None
    learned = corrected(tmp_path)
    shown = shown_as_json(tmp_path)
    assert learned == LearnedCosts.from_dict(shown["corrected"])
    assert shown["corrected"]["age_s"] >= 3 * 3600
    assert learned.table == CostTable.from_dict(shown).digest


def test_scripts_get_the_table_as_json(tmp_path):
    """What is printed is a cost table, with how it came about."""
    shown = shown_as_json(tmp_path)
    assert ("cleaned", False, []) == (shown["model"], shown["from_cache"], shown["findings"])
    assert CostTable.from_dict(shown).points


def test_costs_of_an_address_are_a_wrong_usage():
    """A server measures nothing on demand."""
    refused = CliRunner().invoke(app, ["models", "--costs", "tcp://127.0.0.1:1"])
    assert 2 == refused.exit_code
    assert "costs are measured for a CONFIG" in refused.output


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("in_process: {slots: 3, threads: 5}\n", (3, 5)),
        ("workers: [{count: 1, slots: 2, threads: 4}]\n", (2, 4)),
    ],
)
def test_costs_are_those_of_the_process_that_will_serve(tmp_path, more, expected):
    """As many calls at a time, on as many threads, as a worker of this configuration has."""
    settings = load_settings(written(tmp_path, more)).settings
    assert expected == slots_and_threads(settings, "cleaned")


def test_what_was_prepared_is_found_by_a_server_that_looks_there(tmp_path, monkeypatch):
    """Proofs and costs, by one variable; where nothing can be written they are read as well."""
    for name in (ENVIRONMENT, PROOFS):
        monkeypatch.setenv(name, "off")  # and back at the end, as the command sets them
    config = tmp_path / "x.yaml"
    config.write_text(CONFIG.replace("    trust: true\n", "") + "in_process: {slots: 2, threads: 1}\n")
    out = tmp_path / "made" / "here"
    shown = CliRunner().invoke(app, ["prepare", str(config), "--out", str(out)])
    assert 0 == shown.exit_code, shown.output
    assert shown.stdout.splitlines()[0].startswith("costs of cleaned: ")
    assert "2 calls at a time on 1 thread" in shown.stdout.splitlines()[0]
    assert f"serve with XDG_CACHE_HOME={out}" == shown.stdout.splitlines()[-1]
    locks = list(out.rglob("*.lock"))
    assert 2 == len(locks), "a proof and a table"
    for path in locks:  # root may write anywhere, but no file where a folder is
        path.unlink()
        path.mkdir()
    for name in (ENVIRONMENT, PROOFS):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(out))
    monkeypatch.setattr("shapestream_engine.probe.run_child", None)  # nothing is proved again
    loaded = load_settings(config)
    compiled = compile_models(loaded, loaded.settings.models, slots=2, threads=1)
    assert measure_costs(loaded.settings.models, compiled, slots=2, threads=1)["cleaned"].from_cache


@pytest.mark.parametrize(("patience", "status"), [(1.0, 1), (1e8, 0)])
def test_prepare_goes_on_until_the_costs_are_measured(tmp_path, monkeypatch, patience, status):
    """Within its patience, on a machine that is too slow for `calibration_s`; what is cut short even so is told."""
    for name in (ENVIRONMENT, PROOFS):
        monkeypatch.setenv(name, "off")
    monkeypatch.setattr("shapestream_workers.costs.PATIENCE", patience)
    config = written(tmp_path, "    calibration_s: 0.000001\nin_process: {slots: 1, threads: 1}\n")
    shown = CliRunner().invoke(app, ["prepare", str(config), "--out", str(tmp_path / "out")])
    assert (status, status == 1) == (shown.exit_code, "cut short" in shown.stdout), shown.output


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    """Before any model is loaded."""
    (tmp_path / "file").write_text("")
    shown = CliRunner().invoke(
        app, ["prepare", str(written(tmp_path)), "--out", str(tmp_path / "file" / "x")]
    )
    assert 2 == shown.exit_code
    assert "cannot make" in shown.output
