"""`shapestream run`: a model over files, as users run it, with kills, full disks and wrong inputs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import ipc, parquet
from tests.e2e.conftest import IMPORTABLE, until

from shapestream import __version__

pytestmark = pytest.mark.e2e

SERVER = """\
models:
  - name: f
    function: gated:double
    inputs: {x: {shape: "batch:1..8, n:0..64", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
    trust: true
    calibration_s: 0
  - name: two
    function: totals:sum_of
    inputs: {x: {shape: "batch, n", element_type: f32}, z: {shape: "batch, n", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
    trust: true
    calibration_s: 0
  - name: once
    function: gated:double
    inputs: {x: {shape: "batch:1..8, n:0..64", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
    idempotent: false
    trust: true
    calibration_s: 0
  - name: grey
    function: totals:brightness
    inputs: {picture: {shape: "batch:1..8, height:1..100, width:1..100, channels:1..3", element_type: u8}}
    outputs: {total: {shape: "batch", element_type: i64}}
    trust: true
    calibration_s: 0
"""
KILLER = 13.0
"""What ends the process that runs the model."""
FAILS = 14.0
SMALL_PARTS = """
from shapestream_workers.offline import job
from shapestream_workers.cli import main
job.PART_ROWS = 20
main()
"""


def rows(count: int, **special: float) -> list[list[float]]:
    """Rows of several lengths; `special`: the first number of a row, by `r5`."""
    found = [[100.0 + row] * (1 + row % 7) for row in range(count)]
    for name, value in special.items():
        found[int(name[1:])][0] = value
    return found


def table(folder: Path, values: list[Any], name: str = "in.parquet") -> Path:
    """The rows as a column `x`."""
    parquet.write_table(
        pa.table({"x": pa.array(values, pa.list_(pa.float32()))}), folder / name, row_group_size=64
    )
    return folder / name


@pytest.fixture
def site(workplace: Any) -> Any:
    """A folder with the YAML."""
    workplace.write(SERVER)
    return workplace


def command(
    site: Any,
    *arguments: str,
    env: dict[str, str] | None = None,
    program: str = SMALL_PARTS,
    **options: Any,
) -> subprocess.Popen[str]:
    """`shapestream run server.yaml`, with parts of 20 rows."""
    path = os.pathsep.join([*filter(None, sys.path), str(IMPORTABLE)])
    return subprocess.Popen(
        [sys.executable, "-c", program, "run", "server.yaml", *arguments],
        cwd=site.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        **options,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its status, and what it said on stderr."""
    _, said = process.communicate(timeout=600)
    return process.returncode, said


def results(path: Path) -> tuple[list[int], list[Any], list[str | None]]:
    """The numbers, outputs and errors of all rows."""
    found = parquet.read_table(path).to_pydict()
    return found["row"], found["y"], found["error"]


def doubled(values: list[list[float]]) -> list[Any]:
    """What the model makes of them."""
    return [[2 * number for number in row] for row in values]


def test_each_form_of_input_gives_the_same_results(site: Any) -> None:
    """Parquet, Arrow, JSON lines, a folder of tables, and one of arrays, whose results have their batch axis."""
    values = rows(40)
    folder = site.folder
    expected = ([*range(40)], doubled(values), [None] * 40)
    source = table(folder, values)
    with ipc.new_file(folder / "in.arrow", parquet.read_schema(source)) as writer:
        writer.write_table(parquet.read_table(source))
    (folder / "in.jsonl").write_text("".join(json.dumps({"x": row, "id": 1}) + "\n" for row in values))
    for name in "tables", "arrays", "named":
        (folder / name).mkdir()
    table(folder / "tables", values[:25], "a.parquet")
    table(folder / "tables", values[25:], "b.parquet")
    for row, value in enumerate(values):
        np.save(folder / "arrays" / f"{row:02}.npy", np.array([value], "f4"))
        np.savez(folder / "named" / f"{row:02}.npz", x=np.array(value, "f4"), other=np.zeros(2))
    for number, name in enumerate(["in.parquet", "in.arrow", "in.jsonl", "tables"]):
        ran = site.invoke("run", "server.yaml", "f", name, f"out{number}.parquet")
        assert (0, f"40 rows in out{number}.parquet, 0 of them failed\n") == (ran.exit_code, ran.stdout)
        assert expected == results(folder / f"out{number}.parquet")
    for name in "arrays", "named":
        assert 0 == site.invoke("run", "server.yaml", "f", name, f"{name}.npz").exit_code
        assert 0 == site.invoke("run", "server.yaml", "f", name, f"{name}.parquet").exit_code
        found = parquet.read_table(folder / f"{name}.parquet").to_pydict()
        assert [[row] for row in doubled(values)] == found["y"]
        keys = [path.name for path in sorted((folder / name).iterdir())]
        assert keys == found["key"]
        with np.load(folder / f"{name}.npz") as arrays:
            assert [[row] for row in doubled(values)] == [arrays[f"{key}/y"].tolist() for key in keys]
    assert [] == [*folder.glob("*.parts"), *folder.glob(".*")]


def test_pictures_are_decoded_in_the_form_that_is_asked_for(site: Any) -> None:
    """Channels and layout are the command's; a picture that is cut off fails alone."""
    folder = site.folder / "pictures"
    folder.mkdir()
    drawn = np.random.default_rng(2).integers(0, 255, (5, 9, 3), np.uint8)
    Image.fromarray(drawn).save(folder / "a.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:60])
    Image.fromarray(drawn[:, :, 0]).save(folder / "c.png")
    ran = site.invoke("run", "server.yaml", "grey", "pictures", "out.parquet", "--picture", "bgr,hwc")
    assert 1 == ran.exit_code
    found = parquet.read_table(site.folder / "out.parquet").to_pydict()
    # `brightness` weighs channels by their place.
    assert [
        int((drawn[:, :, ::-1] * np.array([1, 2, 3])).sum()),
        None,
        6 * int(drawn[:, :, 0].sum()),
    ] == found["total"]
    assert ["a.png", "b.png", "c.png"] == found["key"]
    assert (
        found["error"][1].startswith("invalid: invalid: b.png cannot be read") or "b.png" in found["error"][1]
    )
    assert 2 == site.invoke("run", "server.yaml", "grey", "pictures", "p.npz", "--picture", "cmyk").exit_code


def test_rows_that_fail_are_told_in_a_column_and_by_the_status(site: Any) -> None:
    """Each in its place, with its error; the others have their results."""
    values: list[Any] = rows(30, r7=FAILS)
    values[3], values[5] = None, [1.0, None]
    values[9] = [1.0] * 65
    table(site.folder, values)
    ran = site.invoke("run", "server.yaml", "f", "in.parquet", "out.parquet", "--json")
    said = json.loads(ran.stdout)
    assert (1, 30, 4) == (ran.exit_code, said["rows"], said["failed"])
    numbers, outputs, errors = results(site.folder / "out.parquet")
    assert [*range(30)] == numbers
    bad = {row: error for row, error in enumerate(errors) if error is not None}
    assert {3, 5, 7, 9} == set(bad)
    assert "invalid: x: the value is nothing (null)" == bad[3]
    assert "invalid: x: there is nothing (null) or another type among the numbers" == bad[5]
    assert "fourteen is not to my liking" in bad[7]
    assert bad[9].startswith("invalid: model 'f': input 'x': dimension 'n' is 65")
    assert [None if row in bad else [2 * n for n in values[row]] for row in range(30)] == outputs


def test_lines_that_are_no_json_fail_alone(site: Any) -> None:
    """So does a last line that was cut off, and one without the column."""
    lines = ['{"x": [1, 2]}', "no json", '{"x": "text"}', '{"y": [1]}', "[1]", '{"x": [3', ""]
    (site.folder / "in.jsonl").write_text("\n".join(lines))
    assert 1 == site.invoke("run", "server.yaml", "f", "in.jsonl", "out.parquet").exit_code
    _, outputs, errors = results(site.folder / "out.parquet")
    assert [[2.0, 4.0], None, None, None, None, None] == outputs
    words = "not JSON: ", "x: expected f32", "x: there is no value", "no JSON object", "not JSON: "
    assert errors[0] is None
    for error, part in zip(errors[1:], words, strict=True):
        assert error is not None
        assert error.startswith("invalid: ")
        assert part in error


@pytest.mark.parametrize("form", [".parquet", ".npz"])
def test_no_rows_are_an_ordinary_input(form: str, site: Any) -> None:
    """The results have no rows, either."""
    table(site.folder, [])
    assert 0 == site.invoke("run", "server.yaml", "f", "in.parquet", f"out{form}").exit_code
    if form == ".parquet":
        assert ([], [], []) == results(site.folder / "out.parquet")
    else:
        assert [] == np.load(site.folder / "out.npz").files


@pytest.mark.thorough
def test_a_hundred_thousand_rows_in_parts_that_are_merged(site: Any) -> None:
    """Each once, in order; of their parts none is left."""
    site.write(SERVER.replace("gated:double", "gated:double_in_silence"))
    values = rows(100_000)
    table(site.folder, values)
    ran = site.run("run", "server.yaml", "f", "in.parquet", "out.parquet", "--json")
    assert 0 == ran.returncode, ran.stderr
    said = json.loads(ran.stdout)
    assert (100_000, 0) == (said["rows"], said["failed"])
    assert ([*range(100_000)], doubled(values), [None] * 100_000) == results(site.folder / "out.parquet")
    assert not (site.folder / "out.parquet.parts").exists()


def cut_off(folder: Path) -> None:
    """Half of a table."""
    path = table(folder, rows(100))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_column(folder: Path) -> None:
    """A table with another column."""
    parquet.write_table(pa.table({"ids": [1]}), folder / "in.parquet")


def other_type(folder: Path) -> None:
    """A column of texts."""
    parquet.write_table(pa.table({"x": ["a"]}), folder / "in.parquet")


def good(folder: Path) -> None:
    """A table as it should be."""
    table(folder, rows(3))


def mixed_folder(folder: Path) -> None:
    """A folder with a file that is no input."""
    (folder / "in").mkdir()
    (folder / "in" / "readme.txt").write_text("hello")


def one_array_each(folder: Path) -> None:
    """A folder of .npy files."""
    (folder / "in").mkdir()
    np.save(folder / "in" / "a.npy", np.zeros((1, 2), "f4"))


def finished(folder: Path) -> None:
    """Results of an earlier run."""
    good(folder)
    (folder / "out.parquet").write_text("results")


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "cut off": (cut_off, [], "in.parquet: no .parquet file, or cut off"),
    "missing column": (
        other_column,
        [],
        "column 'x' is missing (columns: ids; --column INPUT=COLUMN names another)",
    ),
    "wrong type": (other_type, [], "column 'x' is string, and the input 'x' takes f32"),
    "no input": (lambda _: None, [], "in.parquet: no such file or folder"),
    "no such model": (good, ["model=ff"], "there is no model or chain 'ff' (did you mean \"f\"?)"),
    "no such port": (good, ["--column", "z=x"], "--column z: the model has no such input"),
    "unknown file": (mixed_folder, ["input=in"], "readme.txt: a folder holds .npy, .npz and pictures"),
    "one array": (
        one_array_each,
        ["input=in", "model=two"],
        "a .npy file is one array, the model has x, z",
    ),
    "finished": (finished, [], "out.parquet exists, and is not overwritten"),
    "unknown output": (good, ["output=out.csv"], "results are written as .parquet or .npz"),
    "no folder": (good, ["output=absent/out.npz"], "no such folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_concerns_all_rows_is_told_at_once(mistake: str, site: Any) -> None:
    """With status 3, and what to do; nothing is left behind that a later run would trip over."""
    make, changes, words = MISTAKES[mistake]
    make(site.folder)
    named = {"model": "f", "input": "in.parquet", "output": "out.parquet"}
    named |= dict(
        change.split("=")
        for change in changes
        if not change.startswith("--") and change.split("=")[0] in named
    )
    options = [change for change in changes if change.split("=")[0] not in named]
    ran = site.invoke("run", "server.yaml", named["model"], named["input"], named["output"], *options)
    assert 3 == ran.exit_code, ran.stderr
    assert words in ran.stderr
    good(site.folder)
    if mistake != "finished":
        assert 0 == site.invoke("run", "server.yaml", "f", "in.parquet", "out.parquet").exit_code


def test_a_killed_run_goes_on_and_neither_loses_nor_doubles_a_row(site: Any) -> None:
    """It is killed whenever two more parts are there, five times; each row is in the results once, and right."""
    values = rows(600)
    table(site.folder, values)
    parts = site.folder / "out.parquet.parts"

    def kept() -> int:
        return len([*parts.glob("0*.parquet")])

    def killed_later(*resume: str) -> None:
        before = kept()
        process = command(site, "f", "in.parquet", "out.parquet", *resume, "--in-flight", "16")
        until("more parts", lambda: kept() >= before + 2 or process.poll() is not None)
        process.kill()
        process.communicate()

    killed_later()
    for _ in range(4):
        killed_later("--resume")
    status, said = ended(command(site, "f", "in.parquet", "out.parquet"))
    assert 3 == status
    assert "an earlier run left it (--resume goes on with it; or remove it)" in said
    assert (0, True) == (
        ended(command(site, "f", "in.parquet", "out.parquet", "--resume"))[0],
        not parts.exists(),
    )
    assert ([*range(600)], doubled(values), [None] * 600) == results(site.folder / "out.parquet")


def test_a_row_that_kills_the_process_fails_at_the_second_time(site: Any) -> None:
    """After the first it runs alone; all other rows have their results, whatever was under way with it."""
    values = rows(100, r50=KILLER)
    table(site.folder, values)
    for attempt in range(2):
        resume = ["--resume"] * (attempt > 0)
        assert -signal.SIGKILL == ended(command(site, "f", "in.parquet", "out.parquet", *resume))[0]
    status, said = ended(command(site, "f", "in.parquet", "out.parquet", "--resume"))
    assert 1 == status, said
    numbers, outputs, errors = results(site.folder / "out.parquet")
    why = "poisoned: the process ended twice while this row was under way"
    assert ([*range(100)], [None] * 50 + [why] + [None] * 49) == (numbers, errors)
    assert [None if row == 50 else each for row, each in enumerate(doubled(values))] == outputs


SLOWLY = """
import time
from shapestream_workers.offline import job, parts
from shapestream_workers.cli import main
done = parts.Parts.done
def slow(self, row):
    time.sleep(0.05)
    done(self, row)
parts.Parts.done = slow
main()
"""


def test_an_answer_that_is_noted_late_accuses_nobody(site: Any) -> None:
    """The row after it runs alone, and kills the process: the one before has its result."""
    values = rows(20, r10=KILLER)
    table(site.folder, values)
    for attempt in range(2):
        resume = ["--resume"] * (attempt > 0)
        ran = command(site, "f", "in.parquet", "out.parquet", *resume, program=SLOWLY)
        assert -signal.SIGKILL == ended(ran)[0]
    assert 1 == ended(command(site, "f", "in.parquet", "out.parquet", "--resume"))[0]
    _, _, errors = results(site.folder / "out.parquet")
    assert [10] == [row for row, error in enumerate(errors) if error is not None]


def test_rows_that_must_not_run_twice_are_lost(site: Any) -> None:
    """A model with `idempotent: false`: what was begun and is in no part fails; no call is made twice."""
    table(site.folder, rows(100, r50=KILLER))
    assert -signal.SIGKILL == ended(command(site, "once", "in.parquet", "out.parquet", "--in-flight", "8"))[0]
    assert 1 == ended(command(site, "once", "in.parquet", "out.parquet", "--resume"))[0]
    numbers, outputs, errors = results(site.folder / "out.parquet")
    assert [*range(100)] == numbers
    lost = [row for row, error in enumerate(errors) if error is not None]
    assert {error.partition(":")[0] for error in errors if error is not None} == {"worker_lost"}
    assert 50 in lost
    # At most a part of 20 rows, and 8 under way.
    assert set(lost) <= set(range(50 - 28, 50 + 9))
    assert [row for row, each in enumerate(outputs) if each is None] == lost


def test_a_full_disk_ends_the_run_which_goes_on_later(site: Any) -> None:
    """No file may be longer than 6 KiB: the journal, or a part, does not fit. The error says so; nothing is lost."""
    values = rows(600)
    table(site.folder, values)

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 10, resource.RLIM_INFINITY))

    status, said = ended(command(site, "f", "in.parquet", "out.parquet", preexec_fn=small))
    assert (1, True) == (status, "File too large (parts that are done are kept: --resume goes on)" in said)
    assert "Traceback" not in said
    assert 0 == ended(command(site, "f", "in.parquet", "out.parquet", "--resume"))[0]
    assert ([*range(600)], doubled(values), [None] * 600) == results(site.folder / "out.parquet")


FULL = """
mount -t tmpfs -o size=$1 none disk || exit 99
shift
"$@" disk/out.parquet && exit 98
mount -o remount,size=64m disk
"$@" disk/out.parquet --resume && cp disk/out.parquet .
"""


@pytest.mark.parametrize(
    "size",
    [pytest.param("100k", marks=pytest.mark.thorough), "200k"],
    ids=["while it runs", "while parts are merged"],
)
def test_a_disk_without_space_loses_nothing(size: str, site: Any) -> None:
    """One of its own, in a mount namespace; it is full while rows are under way, or only at the end."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make namespaces")
    values = [[float(1000 + row * each) for each in range(1, 9)] for row in range(2000)]
    table(site.folder, values)
    (site.folder / "disk").mkdir()
    site.write(SERVER.replace("gated:double", "gated:double_in_silence"))
    program = SMALL_PARTS.replace("20", "400")
    run = [sys.executable, "-c", program, "run", "server.yaml", "f", "in.parquet"]
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL, "sh", size, *run],
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(IMPORTABLE)])},
    )
    assert 0 == ran.returncode, ran.stderr
    assert "No space left on device (parts that are done are kept: --resume goes on)" in ran.stderr
    assert ([*range(2000)], doubled(values), [None] * 2000) == results(site.folder / "out.parquet")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM])
def test_a_run_that_is_told_to_end_has_no_suspects(number: signal.Signals, site: Any) -> None:
    """Ctrl-C, or a scheduler that preempts it: the journal says that it left, and `--resume` goes on."""
    values = rows(50)
    table(site.folder, values)
    site.write(SERVER.replace("gated:double", "gated:double_when_open"))
    process = command(site, "f", "in.parquet", "out.parquet", env={"E2E_FOLDER": str(site.folder)})
    site.wait_entered()
    process.send_signal(number)
    site.open_gate()
    status, said = ended(process)
    assert (1, "interrupted") == (status, said.splitlines()[-1])
    assert "left" == (site.folder / "out.parquet.parts" / "journal").read_text().split()[-1]
    again = command(site, "f", "in.parquet", "out.parquet", "--resume", env={"E2E_FOLDER": str(site.folder)})
    assert 0 == ended(again)[0]
    assert ([*range(50)], doubled(values), [None] * 50) == results(site.folder / "out.parquet")


@pytest.fixture
def unfinished(site: Any) -> Any:
    """A run that a row has killed."""
    table(site.folder, rows(100, r50=KILLER))
    assert -signal.SIGKILL == ended(command(site, "f", "in.parquet", "out.parquet"))[0]
    return site


@pytest.mark.parametrize(
    "changed",
    [
        "input",
        *[pytest.param(one, marks=pytest.mark.thorough) for one in ("model", "columns", "shapestream")],
    ],
)
def test_another_run_does_not_go_on_with_it(changed: str, unfinished: Any) -> None:
    """Another input, model, option or version is refused by name."""
    more = []
    match changed:
        case "input":
            table(unfinished.folder, rows(101))
        case "model":
            unfinished.write(SERVER.replace("batch:1..8", "batch:1..4"))
        case "columns":
            more = ["--column", "x=other"]
        case "shapestream":
            manifest = unfinished.folder / "out.parquet.parts" / "manifest.json"
            manifest.write_text(manifest.read_text().replace(f'"{__version__}"', '"0.0.1"'))
    status, said = ended(command(unfinished, "f", "in.parquet", "out.parquet", "--resume", *more))
    assert (3, True) == (status, f"it belongs to another run: {changed} changed" in said), said


def test_two_processes_never_run_it_at_once(unfinished: Any) -> None:
    """The second one is told."""
    import fcntl

    with open(unfinished.folder / "out.parquet.parts" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, said = ended(command(unfinished, "f", "in.parquet", "out.parquet", "--resume"))
    assert (3, True) == (status, "another process runs it" in said)


def test_a_running_server_may_do_it(workplace: Any) -> None:
    """The same results; a row that kills its workers fails there, and the run goes on."""
    served = workplace.serve(SERVER + "workers: [{count: 2, slots: 1}]\n")
    values = rows(60, r30=KILLER)
    table(workplace.folder, values)
    ran = workplace.run("run", "server.yaml", "f", "in.parquet", "out.parquet", "--server", served.address)
    assert 1 == ran.returncode, ran.stderr
    _, outputs, errors = results(workplace.folder / "out.parquet")
    assert [None if row == 30 else each for row, each in enumerate(doubled(values))] == outputs
    assert [30] == [row for row, error in enumerate(errors) if error is not None]
