"""The tuned file: the user's own with what was tuned changed, and the file that is measured with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings
from shapestream_workers.lab.bench import subject_of
from shapestream_workers.lab.candidates import Candidate, Placement, edits_of
from shapestream_workers.lab.edited_yaml import apply_edits, edited_text, relocated, write_tuned

FILE = """\
# What it is for.
server:
  listen: ["ipc://run/s.sock"]      # relative to this file
models:
  - name: m                         # its name
    path: model.xml
    inputs:
      # Why padding is allowed.
      x: {shape: "batch:1..8, seq:1..64", pad: {seq: 0}}
    probe: {x: {samples: real.npz}}
    shapes: {strategy: partitioned, batch: [1, 8], warm_up: true}
"""
TAILS = (
    "",
    "in_process: true\n",
    "in_process: {slots: 1}   # one is enough\n",
    "workers:\n  - {count: 2, models: [m], memory_limit: 2 GiB}  # two\n",
)
CANDIDATES = st.builds(
    Candidate,
    placement=st.builds(
        Placement, processes=st.integers(1, 4), slots=st.integers(1, 4), threads=st.integers(1, 4)
    ),
    shapes=st.sampled_from(
        [
            {},
            {"max_prepared": 16, "warm_up": True},
            {"strategy": "bucketed", "seq": [8, 64], "warm_up": True},
            {"static": [{"batch": 1, "seq": 8}, {"batch": 2, "seq": 8}]},
        ]
    ),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file whose model and samples exist."""
    return written(tmp_path, TAILS[0])


def written(folder: Path, tail: str) -> Path:
    """`FILE` with that end."""
    (folder / "model.xml").write_text("<net/>")
    (folder / "real.npz").write_bytes(b"")
    path = folder / "server.yaml"
    path.write_text(FILE + tail)
    return path


@given(candidate=CANDIDATES, tail=st.sampled_from(TAILS))
def test_the_text_says_what_the_values_do(candidate: Candidate, tail: str) -> None:
    """The file that is written means what was measured."""
    if "in_process" in tail:
        place = candidate.placement
        inside = Placement(processes=None, slots=place.slots, threads=place.threads)
        candidate = Candidate(placement=inside, shapes=candidate.shapes)
    edits = edits_of(candidate, model=0, group=0)
    values = yaml.safe_load(FILE + tail)
    apply_edits(values, copy.deepcopy(edits))
    assert values == yaml.safe_load(edited_text(FILE + tail, edits))


@pytest.mark.parametrize("tail", TAILS)
def test_comments_and_what_was_not_tuned_stay(tail: str) -> None:
    """Line by line, but for the lines that were edited."""
    place = Placement(processes=None if "in_process" in tail else 2, slots=1, threads=1)
    candidate = Candidate(placement=place, shapes={"max_prepared": 16})
    text = edited_text(FILE + tail, edits_of(candidate, model=0, group=0))
    kept = [line for line in FILE.splitlines() if "shapes:" not in line]
    assert [line for line in kept if line not in text.splitlines()] == []
    for comment in ("# one is enough", "# two"):
        assert (comment in tail) == (comment in text)


def test_a_written_file_can_be_used_and_says_why(config: Path) -> None:
    """Its comment is on top, and it loads."""
    target = config.with_name("tuned.yaml")
    place = Placement(processes=1, slots=2, threads=2)
    candidate = Candidate(placement=place, shapes={"static": [{"batch": 1, "seq": 8}]})
    edits = edits_of(candidate, model=0, group=None)
    before = config.read_text()
    write_tuned(config, target, edits, "Made from x.\n\na table")
    assert ["# Made from x.", "#", "# a table"] == target.read_text().splitlines()[:3]
    settings = load_settings(target).settings
    assert ({"batch": (1,), "seq": (8,)},) == tuple(settings.models[0].shapes.static)
    assert settings.workers is not None
    assert (1, 2, 2) == (settings.workers[0].count, settings.workers[0].slots, settings.workers[0].threads)
    assert before == config.read_text()


def test_elsewhere_paths_lead_to_the_same_files(config: Path, tmp_path: Path) -> None:
    """Models, samples and sockets, which are relative to the folder of their file."""
    folder = tmp_path / "far" / "away"
    folder.mkdir(parents=True)
    write_tuned(config, folder / "tuned.yaml", {}, "moved")
    before, after = load_settings(config).settings, load_settings(folder / "tuned.yaml").settings
    assert before.models[0].path is not None
    assert after.models[0].path is not None
    assert Path(before.models[0].path).resolve() == Path(after.models[0].path).resolve()
    assert [Path(address.removeprefix("ipc://")).resolve() for address in before.server.listen] == [
        Path(address.removeprefix("ipc://")).resolve() for address in after.server.listen
    ]


def test_every_path_of_a_file_is_relocated_that_starts_at_its_folder(tmp_path: Path) -> None:
    """Those of a home, and absolute ones, stay as they are."""
    values = {
        "server": {
            "listen": ["ipc://run/s.sock", "ipc://~/s.sock", "ipc:///run/s.sock", "tcp://127.0.0.1:5555"],
            "record_trace": "t.jsonl",
            "model_root": "~",
            "security": {"key": "keys/s.secret", "clients": "~/clients"},
            "admin": {"address": "127.0.0.1:9090", "token_file": "token"},
        },
        "models": [{"path": "m.xml", "probe": "~/real.npz"}, {"path": "~/m.xml", "probe": "real.npz"}],
    }
    relocated(values, tmp_path / "old", tmp_path / "new")
    assert {
        "server": {
            "listen": [
                "ipc://../old/run/s.sock",
                "ipc://~/s.sock",
                "ipc:///run/s.sock",
                "tcp://127.0.0.1:5555",
            ],
            "record_trace": "../old/t.jsonl",
            "model_root": "~",
            "security": {"key": "../old/keys/s.secret", "clients": "~/clients"},
            "admin": {"address": "127.0.0.1:9090", "token_file": "../old/token"},
        },
        "models": [
            {"path": "../old/m.xml", "probe": "~/real.npz"},
            {"path": "~/m.xml", "probe": "../old/real.npz"},
        ],
    } == values


def test_the_input_is_never_overwritten(config: Path) -> None:
    """Under no name."""
    alias = config.with_name("alias.yaml")
    alias.symlink_to(config)
    for target in (config, alias):
        with pytest.raises(ConfigurationError, match="never overwritten"):
            write_tuned(config, target, {}, "")
    assert FILE == config.read_text()


@pytest.mark.parametrize("tail", TAILS)
def test_what_is_measured_is_the_users_file_with_one_model(tmp_path: Path, tail: str) -> None:
    """At a socket of its own, with the candidate's settings; everything else as it was."""
    config = written(tmp_path, tail)
    subject = subject_of(load_settings(config), 0, cpus=4)
    baseline = subject.baseline()
    folder = tmp_path / "run"
    folder.mkdir()
    loaded = load_settings(subject.write(baseline, folder))
    assert (f"ipc://{folder}/s.sock",) == loaded.settings.server.listen
    before, after = load_settings(config).settings.models[0], loaded.settings.models[0]
    assert before.shapes == after.shapes
    assert before.inputs == after.inputs
    again = subject_of(loaded, 0, cpus=4).baseline()
    assert (baseline.placement, baseline.shapes) == (again.placement, again.shapes)


def test_the_baseline_is_what_auto_comes_to(tmp_path: Path) -> None:
    """As the server and the workers divide the CPUs."""

    def placement(tail: str) -> Placement:
        subject: Any = subject_of(load_settings(written(tmp_path, tail)), 0, cpus=4)
        found: Placement = subject.baseline().placement
        return found

    assert Placement(processes=1, slots=2, threads=4) == placement(TAILS[0])
    assert Placement(processes=None, slots=2, threads=4) == placement(TAILS[1])
    assert Placement(processes=None, slots=1, threads=4) == placement(TAILS[2])
    assert Placement(processes=2, slots=1, threads=2) == placement(TAILS[3])


def test_one_of_several_models_keeps_its_placement(tmp_path: Path) -> None:
    """The CPUs are not its own: only its shapes are tuned, and only its entry is edited."""
    config = written(tmp_path, "")
    config.write_text(FILE.replace("models:\n", "models:\n  - {name: other, path: model.xml}\n"))
    subject = subject_of(load_settings(config), 1, cpus=4)
    assert not subject.is_alone
    candidate = Candidate(placement=subject.baseline().placement, shapes={})
    assert {("models", 1, "shapes"): None} == subject.edits(candidate)
