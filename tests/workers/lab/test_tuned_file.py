"""The tuned file: the user's own with what was tuned changed, and the file that is measured with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream.settings import load_settings
from shapestream_workers.lab.candidates import (
    Candidate,
    Placement,
    Subject,
    apply_candidate,
    edited_text,
    in_flow,
    relocated,
)

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
    properties=st.sampled_from([{}, {"INFERENCE_PRECISION_HINT": "bf16"}]),
)


@pytest.fixture(autouse=True, scope="module")
def four_cpus() -> Iterator[None]:
    """Whatever machine this is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
        yield


def subject_of(folder: Path, tail: str = "", text: str = FILE, model: int = 0) -> Subject:
    """The model of such a file, which is written beside a model and samples."""
    (folder / "model.xml").write_text("<net/>")
    (folder / "real.npz").write_bytes(b"")
    path = folder / "server.yaml"
    path.write_text(text + tail)
    return Subject(loaded=load_settings(path), model=model)


@settings(max_examples=25, deadline=None)
@given(candidate=CANDIDATES, tail=st.sampled_from(TAILS))
def test_the_text_says_what_the_values_do(candidate: Candidate, tail: str) -> None:
    """The file that is written means what was measured."""
    if "in_process" in tail:
        place = candidate.placement
        inside = Placement(processes=None, slots=place.slots, threads=place.threads)
        candidate = replace(candidate, placement=inside)
    values = yaml.safe_load(FILE + tail)
    apply_candidate(values, candidate, model=0, group=0)
    text = edited_text(
        FILE + tail, lambda values: apply_candidate(values, in_flow(candidate), model=0, group=0)
    )
    assert values == yaml.safe_load(text)


@pytest.mark.parametrize("tail", TAILS)
def test_a_written_file_is_the_users_with_what_was_tuned(tmp_path: Path, tail: str) -> None:
    """Comments and all other lines stay; it says why on top, it loads, and the input is as it was."""
    subject = subject_of(tmp_path, tail)
    target = tmp_path / "tuned.yaml"
    place = Placement(processes=None if "in_process" in tail else 1, slots=2, threads=3)
    candidate = Candidate(placement=place, shapes={"static": [{"batch": 1, "seq": 8}]})
    subject.write_tuned(candidate, target, "Made from x.\n\na table")
    lines = target.read_text().splitlines()
    assert ["# Made from x.", "#", "# a table"] == lines[:3]
    assert {line for line in FILE.splitlines() if "shapes:" not in line} <= set(lines)
    assert "    shapes: {static: [{batch: 1, seq: 8}]}" in lines
    for comment in ("# one is enough", "# two"):
        assert (comment in tail) == any(comment in line for line in lines)
    settings = load_settings(target).settings
    tuned: Any = settings.in_process if place.processes is None else settings.worker_groups[0]
    assert (2, 3) == (tuned.slots, tuned.threads)
    assert FILE + tail == subject.loaded.path.read_text()


def test_every_path_that_starts_at_the_folder_of_its_file_is_relocated(tmp_path: Path) -> None:
    """Those of a home, and absolute ones, stay as they are, and so does the same text where it is no path."""
    text = """\
server:
  listen: ["ipc://AT/run/s.sock", "ipc://~/s.sock", "ipc:///run/s.sock", "tcp://127.0.0.1:5555"]
  worker_listen: ipc://AT/w.sock
  model_root: AT/models
  security: {key: AT/keys/s.secret, clients: ~/clients, admins: [KEY, AT/a.pub, /etc/b.pub], workers: AT/keys}
  admin: {address: "127.0.0.1:9090", token_file: AT/token}
models:
  - {name: m.xml, path: AT/models/m.xml, probe: "~/real.npz"}
  - {name: n, path: AT/models/n.xml, probe: AT/real.npz, properties: {CACHE_DIR: real.npz}}
  - {name: o, path: AT/models/o.xml, probe: {x: {samples: AT/real.npz}}}
""".replace("KEY", "A" * 40)
    (tmp_path / "old").mkdir()
    path = tmp_path / "old" / "server.yaml"
    path.write_text(text.replace("AT/", ""))
    loaded = load_settings(path, files_must_exist=False)
    for new, prefix in ((tmp_path / "new", "../old/"), (None, f"{tmp_path}/old/")):
        values = yaml.safe_load(path.read_text())
        relocated(values, loaded, new)
        assert yaml.safe_load(text.replace("AT/", prefix)) == values


def test_a_tuned_file_in_another_folder_serves_the_same_files(tmp_path: Path) -> None:
    """It loads, and its model and samples are the user's."""
    subject = subject_of(tmp_path)
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "tuned.yaml"
    subject.write_tuned(subject.baseline(), target, "moved")
    mine, tuned = (loaded.settings.models[0] for loaded in (subject.loaded, load_settings(target)))
    assert (mine.path, mine.probe) != (None, {})
    assert Path(str(mine.path)).samefile(str(tuned.path))
    assert Path(str(mine.probe["x"].samples)).samefile(str(tuned.probe["x"].samples))


@pytest.mark.parametrize("tail", TAILS)
def test_what_is_measured_is_the_users_file_with_one_model(tmp_path: Path, tail: str) -> None:
    """At a socket of its own, with the candidate's settings; everything else as it was."""
    subject = subject_of(tmp_path, tail)
    baseline = subject.baseline()
    folder = tmp_path / "run"
    folder.mkdir()
    measured = Subject(loaded=load_settings(subject.write(baseline, folder)), model=0)
    assert (f"ipc://{folder}/s.sock",) == measured.loaded.settings.server.listen
    assert subject.settings.shapes == measured.settings.shapes
    assert subject.settings.inputs == measured.settings.inputs
    again = measured.baseline()
    assert (baseline.placement, baseline.shapes) == (again.placement, again.shapes)


def test_what_is_measured_has_no_chains_and_no_ports_of_gateways(tmp_path: Path) -> None:
    """A chain names models that are not there, and the ports are those of the server that users talk to."""
    text = FILE.replace("server:\n", 'server:\n  http: "127.0.0.1:8000"\n  grpc: "127.0.0.1:8001"\n')
    other = "  - {name: other, path: model.xml}\n"
    stages = "[{name: a, model: m, inputs: {x: x}}, {name: b, model: other, inputs: {x: a.y}}]"
    chains = f"chains:\n  - {{name: c, inputs: {{x: a.x}}, stages: {stages}, outputs: {{y: b.y}}}}\n"
    subject = subject_of(tmp_path, other + chains, text)
    folder = tmp_path / "run"
    folder.mkdir()
    measured = load_settings(subject.write(subject.baseline(), folder)).settings
    assert (["m"], ()) == ([model.name for model in measured.models], measured.chains)
    assert (None, None) == (measured.server.http, measured.server.grpc)


@pytest.mark.parametrize(
    ("tail", "placement"),
    [*zip(TAILS, [(1, 2, 4), (None, 2, 4), (None, 1, 4), (2, 1, 2)], strict=True)],
)
def test_the_baseline_is_what_auto_comes_to(
    tmp_path: Path, tail: str, placement: tuple[int | None, int, int]
) -> None:
    """As the server and the workers divide the CPUs."""
    found = subject_of(tmp_path, tail).baseline().placement
    assert placement == (found.processes, found.slots, found.threads)


def test_one_of_several_models_keeps_its_placement(tmp_path: Path) -> None:
    """The CPUs are not its own: only its shapes are tuned, and only its entry is edited."""
    text = FILE.replace("models:\n", "models:\n  - {name: other, path: model.xml}\n")
    subject = subject_of(tmp_path, text=text, model=1)
    assert not subject.is_alone
    target = tmp_path / "tuned.yaml"
    subject.write_tuned(Candidate(placement=subject.baseline().placement, shapes={}), target, "")
    assert [line for line in text.splitlines() if "shapes:" not in line] == target.read_text().splitlines()
