"""`shapestream.ray.Model` without Ray: real models, batches as Ray gives them, and processes that die of rows.

Ray itself is replaced by a module that knows an actor's CPUs; `make ray` runs the same class in its actors.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from tests.e2e.string_models import SERVED

from shapestream.deaths import Deaths, deaths_of, digest_of
from shapestream.errors import ConfigurationError, InvalidRequest
from shapestream.loading.proof import ProofCache
from shapestream_engine.calibration import CostCache

Array = np.ndarray[Any, Any]
IMPORTABLE = Path(__file__).parents[1] / "e2e" / "importable"

CONFIG = """\
models:
  - name: m
    path: m.xml
    calibration_s: 0
    inputs: {x: {shape: "batch:1..64, length:1..100, 8"}, k: {shape: "batch:1..64"}}
"""


class Actor(ModuleType):
    """Ray as an actor sees it."""

    cpus: float | None = None
    """CPUs that are assigned; None outside of an actor."""

    def is_initialized(self) -> bool:
        """Ray runs where there is an actor."""
        return self.cpus is not None

    def get_runtime_context(self) -> Actor:
        """It is its own context."""
        return self

    def get_actor_id(self) -> str:
        """Any."""
        return "a"

    def get_assigned_resources(self) -> dict[str, float]:
        """As Ray states them: fractions are possible, and none means no key."""
        return {"CPU": self.cpus} if self.cpus else {}


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    """The module `ray` of this test."""
    found = Actor("ray")
    monkeypatch.setitem(sys.modules, "ray", found)
    yield found
    sys.modules.pop("shapestream.ray", None)


@pytest.fixture
def face(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`shapestream.ray`; what it puts into the environment goes with the test."""
    for kept in (ProofCache, CostCache):
        monkeypatch.setenv(kept.VARIABLE, os.environ[kept.VARIABLE])
    return importlib.import_module("shapestream.ray")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a row's sum over its length, times `k`; its length doubled; and `k` itself."""
    folder = tmp_path_factory.mktemp("ray")
    x, k = ops.parameter([-1, -1, 8], np.float32), ops.parameter([-1], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    k.output(0).get_tensor().set_names({"k"})
    total = ops.multiply(ops.reduce_sum(x, ops.constant(np.array([1]))), ops.unsqueeze(k, 1))
    twice, same = ops.multiply(x, ops.constant(np.float32(2))), ops.multiply(k, ops.constant(np.float32(1)))
    outputs = []
    for name, node in (("total", total), ("twice", twice), ("same", same)):
        node.output(0).get_tensor().set_names({name})
        outputs.append(ops.result(node))
    ov.save_model(ov.Model(outputs, [x, k]), folder / "m.xml", compress_to_fp16=False)
    (folder / "server.yaml").write_text(CONFIG)
    return folder / "server.yaml"


@pytest.fixture
def model(face: Any, config: Path) -> Iterator[Callable[..., Any]]:
    """Makes models, and closes them."""
    made = []

    def make(**options: Any) -> Any:
        made.append(face.Model(config, **{"cpus": 1, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def objects(values: list[Any]) -> Array:
    """A column as Ray makes it of rows that differ."""
    found = np.empty(len(values), object)
    for row, value in enumerate(values):
        found[row] = value
    return found


def rows_of(lengths: list[int]) -> list[Array]:
    """A row for each length."""
    drawn = np.random.default_rng(3)
    return [drawn.standard_normal((length, 8)).astype(np.float32) for length in lengths]


def check(found: dict[str, Array], rows: list[Array], factors: Array) -> None:
    """Each output is right, in the form that the signature says."""
    assert (len(rows), 8) == found["total"].shape
    assert (object, (len(rows),)) == (found["twice"].dtype, found["twice"].shape)
    for row, (x, k) in enumerate(zip(rows, factors, strict=True)):
        np.testing.assert_allclose(found["total"][row], x.sum(0) * k, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["twice"][row], 2 * x)
    np.testing.assert_array_equal(found["same"], factors)


@pytest.mark.parametrize("lengths", [[5, 1, 77, 5], [4, 4, 4], [1], [8, 8]], ids=str)
def test_rows_have_their_outputs_whatever_a_block_holds(model: Any, lengths: list[int]) -> None:
    """Ragged rows, equal ones, one, and as many as an axis is long: the form never follows the values."""
    rows, factors = rows_of(lengths), np.arange(1, len(lengths) + 1, dtype=np.float32)
    made = model()
    check(made({"x": objects(rows), "k": factors}), rows, factors)
    if len(set(lengths)) == 1:
        check(made({"x": np.stack(rows), "k": factors}), rows, factors)


def test_lists_of_lists_as_arrow_has_them(model: Any) -> None:
    """Nested object arrays are a tensor; f64 becomes f32, integers become floats that are equal."""
    rows = rows_of([2, 3])
    nested = objects([objects(list(row.astype(np.float64))) for row in rows])
    check(model()({"x": nested, "k": np.array([1, 2])}), rows, np.array([1, 2], np.float32))


def test_columns_are_kept_and_may_be_named(model: Any) -> None:
    """Those of the batch stand beside the outputs, and are the same objects."""
    rows, texts = rows_of([3, 4]), objects(["a", "b"])
    batch = {"arrays": objects(rows), "k": np.ones(2, np.float32), "text": texts}
    found = model(columns={"x": "arrays"})(batch)
    check(found, rows, batch["k"])
    assert [*batch, "total", "twice", "same"] == list(found)
    assert all(found[name] is batch[name] for name in batch)


@pytest.mark.parametrize("with_errors", [False, True])
def test_no_rows_have_columns_of_the_same_types(model: Any, with_errors: bool) -> None:
    """Nothing is asked of the model."""
    found = model(on_error="column" if with_errors else "raise")(
        {"x": np.empty(0, object), "k": np.empty(0, np.float32)}
    )
    assert {"total": (0, 8), "twice": (0,), "same": (0,)} == {
        name: found[name].shape for name in ("total", "twice", "same")
    }
    assert np.float32 == found["total"].dtype
    assert with_errors == ("error" in found)


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "x: the value is nothing"),
    "ragged within": (objects([np.ones(8), np.ones(7)]), "x: the lists differ in length"),
    "nothing within": (objects([1.0, None]), "x: there is nothing"),
    "another type": ("text", "x: expected f32"),
    "another shape": (np.ones((3, 7), np.float32), "takes"),
    "too long": (np.ones((101, 8), np.float32), "takes"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_row_that_fails_costs_no_other(model: Any, bad: tuple[Any, str]) -> None:
    """With a column for errors: the others have none, and their results."""
    value, words = bad
    first, last = rows_of([2, 9])
    factors = np.array([3, 4, 5], np.float32)
    found = model(on_error="column")({"x": objects([first, value, last]), "k": factors})
    assert [None, True, None] == [error and words in error for error in found["error"]]
    keep = np.array([0, 2])
    check({name: found[name][keep] for name in ("total", "twice", "same")}, [first, last], factors[keep])
    assert np.isnan(found["total"][1]).all()
    assert np.isnan(found["same"][1])
    assert ((0, 0), np.float32) == (found["twice"][1].shape, found["twice"][1].dtype)


def test_a_row_that_fails_ends_the_batch_unless_asked_otherwise(model: Any) -> None:
    """The error names the row; the model goes on with the next batch."""
    rows, made = rows_of([2, 101]), model()
    for batch in (rows, [rows[0], None]):
        with pytest.raises(InvalidRequest) as raised:
            made({"x": objects(batch), "k": np.ones(2, np.float32)})
        assert "row 1 of its batch" in raised.value.__notes__[0]
    check(made({"x": objects(rows[:1]), "k": np.ones(1, np.float32)}), rows[:1], np.ones(1))


def test_what_concerns_all_rows_is_raised_in_any_case(model: Any) -> None:
    """Columns that are missing, or would be replaced; another form of batches; columns of no input."""
    batch = {"x": objects(rows_of([2])), "k": np.ones(1, np.float32)}
    made = model(on_error="column")
    with pytest.raises(ConfigurationError, match=r"column 'k' is missing \(columns: x; "):
        made({"x": batch["x"]})
    for taken in ("total", "error"):
        with pytest.raises(ConfigurationError, match=f"column '{taken}' would be replaced"):
            made({**batch, taken: np.ones(1)})
    with pytest.raises(TypeError, match="dict of NumPy arrays"):
        made([batch])
    with pytest.raises(TypeError, match="dict of NumPy arrays"):
        made({"x": [1, 2]})
    with pytest.raises(ConfigurationError, match="columns y: the model has no such input"):
        model(columns={"y": "x"})(batch)


def test_what_the_configuration_has_wrong_is_told_before_anything_starts(face: Any, config: Path) -> None:
    """No such model, none chosen of two, one that must not run twice, no prepared folder, a word."""
    other = config.with_name("other.yaml")
    other.write_text(CONFIG + CONFIG.partition("\n")[2].replace("name: m", "name: n\n    idempotent: false"))
    for options, words in (
        ({}, "model= says which: m, n"),
        ({"model": "k"}, "no model or chain 'k'"),
        ({"model": "n"}, "idempotent: false"),
        ({"model": "m", "prepared": config.with_name("absent")}, "no such prepared folder"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            face.Model(other, **options)
    with pytest.raises(ConfigurationError, match="idempotent: false"):
        face.prepare(other, 1, "n")
    with pytest.raises(ValueError, match="on_error is"):
        face.Model(config, on_error="yield")


@pytest.mark.parametrize(("assigned", "cpus"), [(4.0, 4), (0.5, 1), (0, 1)])
def test_an_actors_cpus_are_those_of_its_server(
    face: Any, model: Any, actor: Actor, monkeypatch: pytest.MonkeyPatch, assigned: float, cpus: int
) -> None:
    """Whole ones, at least one; outside of an actor it is the process's own."""
    assert face.assigned_cpus() is None
    given = []

    def connect_to(loaded: Any, only: list[str], *, cpus: int | None) -> Any:
        given.append((only, cpus))
        return real(loaded, only, cpus=cpus)

    real = face.local.connect_to
    monkeypatch.setattr(face.local, "connect_to", connect_to)
    actor.cpus = assigned
    made = model(cpus=None)
    assert [] == given
    for _ in range(2):
        made({"x": objects(rows_of([2])), "k": np.ones(1, np.float32)})
    assert [(["m"], cpus)] == given


def test_batches_of_several_threads_share_one_server(model: Any) -> None:
    """The first ones come together, before there is a server."""
    made, rows = model(), rows_of([4, 90, 2, 7])
    factors = np.arange(4, dtype=np.float32)
    answers: list[Any] = [None] * 6

    def run(number: int) -> None:
        answers[number] = made({"x": objects(rows), "k": factors + number})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in enumerate(answers):
        check(found, rows, factors + number)


def test_prepared_results_are_read_and_the_environment_is_as_before(
    face: Any, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds proofs; another process's caches are left alone, and so is XDG_CACHE_HOME."""
    monkeypatch.delenv(ProofCache.VARIABLE)
    monkeypatch.setenv(CostCache.VARIABLE, "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "prepared"
    assert str(folder) == face.prepare(config, 1, folder=folder)
    assert (None, "off") == (os.environ.get(ProofCache.VARIABLE), os.environ[CostCache.VARIABLE])
    assert not (tmp_path / "cache").exists()
    proofs = set((folder / "shapestream").rglob("*.json"))
    assert proofs
    made = face.Model(config, cpus=1, prepared=folder)
    rows = rows_of([2, 3])
    check(made({"x": objects(rows), "k": np.ones(2, np.float32)}), rows, np.ones(2))
    made.close()
    assert proofs <= set((folder / "shapestream").rglob("*.json"))
    assert str(tmp_path / "cache") == os.environ["XDG_CACHE_HOME"]
    assert [] == list((folder / "deaths").iterdir())


def test_the_default_folder_stands_beside_the_yaml(face: Any, config: Path) -> None:
    """`server.prepared` for `server.yaml`, as a whole path."""
    assert str(config.with_name("server.prepared")) == face.prepare(config, 1)


def test_without_ray_the_error_names_the_extra() -> None:
    """In a process that cannot import it."""
    program = "import sys; sys.modules['ray'] = None\nimport shapestream.ray"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert 1 == ran.returncode
    assert "ModuleNotFoundError: shapestream.ray needs Ray (pip install 'shapestream[ray]')" in ran.stderr


STRINGS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "one for each row": (
        "shout",
        ["aß", "b"],
        {"loud": ["ASS", "B"], "back": ["ßa".encode(), b"b"], "sizes": [[2, 3], [1, 1]]},
    ),
    "some for each row": (
        "reverse",
        [[b"ab", b"\0"], [b"cd"], []],
        {"reversed": [[b"ba", b"\0"], [b"dc"], []]},
    ),
    "a list of arrays": ("words", [["a b", "c"], [""]], {"words": [[["a", "b"], ["c"]], [[]]]}),
    "a text without axes": ("first", ["a b", "c"], {"word": ["a", "c"]}),
    "a chain": ("hyphenate", [["a b", "c"], ["d e"]], {"loud": [["A-B", "C"], ["D-E"]]}),
}


@pytest.mark.parametrize(("name", "values", "expected"), STRINGS.values(), ids=STRINGS)
def test_strings_lists_and_chains(
    face: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    values: list[Any],
    expected: dict[str, Any],
) -> None:
    """As nested lists, which Arrow has types for; a row without a value fails, and has none."""
    monkeypatch.syspath_prepend(str(IMPORTABLE))
    (tmp_path / "server.yaml").write_text(textwrap.dedent(SERVED))
    column = [objects(each) if isinstance(each, list) else each for each in values]
    port = {"reverse": "blob"}.get(name, "text")
    made = face.Model(tmp_path / "server.yaml", name, cpus=1, on_error="column")
    found = made({port: objects([*column, None])})
    if all(isinstance(each, str) for each in values):
        same = made({port: np.array(values)})  # as NumPy has texts of one length
        assert [None] * len(values) == same.pop("error").tolist()
    made.close()
    assert [None] * len(values) == found["error"][:-1].tolist()
    assert f"{port}: the value is nothing" in found["error"][-1]
    for output, wanted in expected.items():
        assert wanted == found[output][:-1].tolist()
        assert found[output][-1] is None or output == "sizes"


# ---------------------------------------------------------------- rows that processes die of


def test_deaths_by_the_lines_that_were_left() -> None:
    """A row that ran alone since has none by that file; a line that was cut off says nothing."""
    a, b, c = (digest_of("m", {"x": np.array(number)}) for number in range(3))
    assert {a: 2, c: 1} == deaths_of([[a, b, f"-{b}"], [a, c, b[:-1]]])


def test_digests_tell_rows_apart() -> None:
    """By model, name, type, shape and contents; equal rows are one."""
    x = np.arange(4, dtype=np.int32)
    texts = objects(["ab", "c"])
    different = [
        digest_of("m", {"x": x}),
        digest_of("n", {"x": x}),
        digest_of("m", {"y": x}),
        digest_of("m", {"x": x.view(np.float32)}),
        digest_of("m", {"x": x.reshape(2, 2)}),
        digest_of("m", {"x": x[::-1]}),
        digest_of("m", {"x": texts}),
        digest_of("m", {"x": objects(["a", "bc"])}),
        digest_of("m", {"x": objects([b"ab", b"c"])[:1]}),
    ]
    assert len(different) == len(set(different))
    assert digest_of("m", {"x": x, "y": texts}) == digest_of("m", {"y": texts.copy(), "x": x.copy()})


KILLED = """
import os, signal, sys
from pathlib import Path
from shapestream.deaths import Deaths
with Deaths(Path(sys.argv[1])).under_way(sys.argv[2:]):
    print("under way", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_a_killed_process_leaves_deaths(tmp_path: Path) -> None:
    """Not one that lives, and not one whose call ended, by an error or not."""
    deaths = Deaths(tmp_path / "deaths")
    rows = [digest_of("m", {"x": np.array(number)}) for number in range(3)]
    with pytest.raises(KeyError), deaths.under_way(rows):
        raise KeyError
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(deaths.folder), *rows],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        assert {} == deaths.known()
        process.stdin.close()
    assert dict.fromkeys(rows, 1) == deaths.known()
    deaths.clear(rows[0])
    deaths.clear(rows[1])
    assert {rows[2]: 1} == deaths.known()
    deaths.clear(rows[2])
    assert [] == list(deaths.folder.iterdir())


ACTOR = """
import sys, types
import numpy as np
stand_in = types.ModuleType("ray")
stand_in.is_initialized = lambda: False
sys.modules["ray"] = stand_in
import shapestream.ray
config, prepared = sys.argv[1:]
model = shapestream.ray.Model(config, cpus=2, prepared=prepared, on_error="column")
found = model({"x": np.array([[1.0], [2.0], [101.0], [4.0]], np.float32)})
print(found["y"].ravel().tolist(), found["error"].tolist(), flush=True)
model.close()
"""
LEFT_OPEN = """
import threading

import __main__

def slow(x):
    __main__.begun.set()
    threading.main_thread().join()  # the program's last line was run
    print("answered", flush=True)
    return x * 2

if __name__ == "__main__":
    import sys, types
    import numpy as np
    stand_in = types.ModuleType("ray")
    stand_in.is_initialized = lambda: False
    sys.modules["ray"] = stand_in
    import shapestream.ray
    model = shapestream.ray.Model(sys.argv[1], cpus=1)
    begun = threading.Event()
    row = {"x": np.ones((1, 1), np.float32)}
    threading.Thread(target=model, args=(row,), daemon=True).start()
    begun.wait()
"""


def test_a_program_may_end_with_its_model_open(tmp_path: Path) -> None:
    """The server ends first, calls that run included: a thread in an engine's call would end the process by SIGABRT."""
    (tmp_path / "left_open.py").write_text(LEFT_OPEN)
    (tmp_path / "server.yaml").write_text(POISONOUS.replace("poisonous:double", "left_open:slow"))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ran = subprocess.run(
        [sys.executable, "left_open.py", "server.yaml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (0, "answered\n") == (ran.returncode, ran.stdout), ran.stderr


POISONOUS = """\
models:
  - name: f
    function: poisonous:double
    inputs: {x: {shape: "batch:1..8, 1", element_type: f32}}
    outputs: {y: {shape: "batch, 1", element_type: f32}}
    calibration_s: 0
    trust: true
"""


def test_a_row_that_kills_its_process_is_a_failed_row_after_two(
    face: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbours run alone after the first death, and are right. A new job forgets, and so does its `prepare`."""
    monkeypatch.syspath_prepend(str(IMPORTABLE))
    (tmp_path / "server.yaml").write_text(POISONOUS)
    prepared = face.prepare(tmp_path / "server.yaml", 2)
    environment = {**os.environ, "PYTHONPATH": f"{IMPORTABLE}{os.pathsep}{os.pathsep.join(sys.path)}"}
    ends = []
    for _ in range(4):
        ran = subprocess.run(
            [sys.executable, "-c", ACTOR, str(tmp_path / "server.yaml"), prepared],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment,
        )
        ends.append((ran.returncode, ran.stdout.strip()))
    error = "'poisoned: the process ended twice while this row was under way'"
    last = (0, f"[2.0, 4.0, nan, 8.0] [None, None, {error}, None]")
    assert [(-11, ""), (-11, ""), last, last] == ends
    face.prepare(tmp_path / "server.yaml", 2)
    assert not (Path(prepared) / "deaths").exists()
