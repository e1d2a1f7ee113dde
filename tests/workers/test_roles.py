"""Which worker processes a reload replaces, by two YAMLs and what is known of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapestream.loading.sources import sources_of
from shapestream.settings import Settings, load_settings
from shapestream_workers.roles import Roles, roles_of

MODEL = """\
  - name: {name}
    function: numpy:sort
    inputs: {{a: {{shape: "batch:1..8, n:0..64", element_type: f32}}}}
    outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
"""


def settings(folder: Path, workers: str, *models: str) -> Settings:
    """A YAML with these models, `a` by default."""
    path = folder / "x.yaml"
    path.write_text("models:\n" + "".join(models or [MODEL.format(name="a")]) + f"workers: {workers}\n")
    return load_settings(path).settings


def follow(roles: Roles, now: Settings, known: str = "same", cpus: int = 8) -> list[str]:
    """The names of those that are new or replaced; `known`: of each model."""
    sources = {model.name: (known,) if known else None for model in now.models}
    return sorted(roles.follow([*roles_of(now, cpus, sources)]))


def test_equal_roles_keep_their_names_wherever_they_stand(tmp_path: Path) -> None:
    """Their command lines follow; the others have new names, and one at the same place keeps its own."""
    roles = Roles()
    assert ["w0", "w1"] == follow(
        roles, settings(tmp_path, "[{slots: 1, threads: 4}, {slots: 2, threads: 4}]")
    )
    assert ["w2"] == follow(
        roles, settings(tmp_path, "[{slots: 2, threads: 4}, {slots: 1, threads: 4}, {slots: 3, threads: 4}]")
    )
    assert {"w1": 0, "w0": 1, "w2": 2} == roles.groups
    assert ["w1"] == follow(roles, settings(tmp_path, "[{slots: 4, threads: 4}, {slots: 1, threads: 4}]"))
    assert {"w1": 0, "w0": 1} == roles.groups
    assert [] == follow(roles, settings(tmp_path, "[{slots: 4, threads: 4}, {slots: 1, threads: 4}]"))
    assert 2 == roles.group_of("w2")


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ("    batching: {max_delay_ms: 3, hang_after_s: 30}\n", []),
        ("    audit: 0.5\n", []),
        ("    batching: {max_batch: 4}\n", ["w0"]),
        ("    calibration_s: 1\n", ["w0"]),
    ],
)
def test_keys_that_only_the_server_reads_replace_no_process(
    tmp_path: Path, more: str, changed: list[str]
) -> None:
    """Others do, in each worker that has the model."""
    both = MODEL.format(name="a") + more, MODEL.format(name="b")
    workers = "[{models: [a]}, {models: [b]}]"
    roles = Roles()
    follow(roles, settings(tmp_path, workers, MODEL.format(name="a"), both[1]))
    assert changed == follow(roles, settings(tmp_path, workers, *both))


def test_what_is_not_known_is_replaced(tmp_path: Path) -> None:
    """Other sources, too, and other threads, which follow from the number of processes."""
    roles, same = Roles(), settings(tmp_path, "[{}]")
    follow(roles, same)
    assert [] == follow(roles, same)
    assert ["w0"] == follow(roles, same, known="other")
    assert ["w0"] == follow(roles, same, known="")
    assert ["w0"] == follow(roles, same, known="")
    assert ["w0"] == follow(roles, same)
    assert ["w0", "w1"] == follow(roles, settings(tmp_path, "[{}, {}]"))
    assert frozenset({"w0"}) == roles.follow([*roles.by_name.values()], doubtful={"w0"})


def test_the_sources_of_a_function_are_the_files_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any file below it counts; a package that cannot be found is not known."""
    package = tmp_path / "sources_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for function in ("sources_of_a_test:f", "sources_of_a_test:f", "sources_of_no_test:f"):
        (model,) = settings(tmp_path, "[{}]", MODEL.format(name="a").replace("numpy:sort", function)).models
        found.append(sources_of([model], {})["a"])
        if len(found) == 1:
            (package / "other.py").write_text("x = 22\n")
    first, second, missing = found
    assert first != second
    assert None not in (first, second)
    assert missing is None
