"""Versions in a YAML: mistakes with the words that a user reads, the groups of workers, and what `check` compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.text_folders import write_folder

from shapestream.errors import ConfigurationError
from shapestream.loading.models import placement_warnings, plan_chains, version_problems
from shapestream.serving.audits import key_of
from shapestream.serving.served_models import ServedModel
from shapestream.settings import LoadedSettings, ModelSettings, load_settings
from shapestream.versions import Versions
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

TEXT = """\
models:
  - {name: m, version: 3, path: m.onnx}
  - {name: m, version: 4, path: m.onnx, traffic: 5%}
  - {name: other, path: m.onnx}
workers:
  - {count: 2}
"""


def load(folder: Path, text: str = TEXT) -> LoadedSettings:
    """What the loader makes of it."""
    path = folder / "x.yaml"
    path.write_text(text)
    (folder / "m.onnx").touch()
    return load_settings(path)


def problems_of(folder: Path, text: str) -> list[str]:
    """The problems, without the folder."""
    try:
        load(folder, text)
    except ConfigurationError as error:
        return [problem.replace(f"{folder}/", "") for problem in error.problems]
    return []


FORM = "(a letter or digit, then up to 31 of these, dots, dashes and underscores)"
V = "x.yaml:2:15: models[0].version: "
T = "x.yaml:3:41: models[1].traffic: "
MISTAKES = {
    "an octal": (
        "version: 3",
        "version: 010",
        V + '010 is a number in YAML (put the version in quotes: "010")',
    ),
    "a float": ("version: 3", "version: 1.0", V + 'expected a version, got 1.0 (put it in quotes: "1.0")'),
    "a float that loses a zero": (
        "version: 3",
        "version: 1.10",
        V + '1.10 is a number in YAML (put the version in quotes: "1.10")',
    ),
    "hexadecimal": (
        "version: 3",
        "version: 0x1F",
        V + '0x1F is a number in YAML (put the version in quotes: "0x1F")',
    ),
    "two dots": ("version: 3", "version: ..", V + f'".." is no version {FORM}'),
    "a path": ("version: 3", "version: a/b", V + f'"a/b" is no version {FORM}'),
    "33 characters": ("version: 3", f"version: {'v' * 33}", V + f'"{"v" * 33}" is no version {FORM}'),
    "a negative one": ("version: 3", "version: -3", V + f"expected a version, got -3 {FORM}"),
    "a truth": ("version: 3", "version: true", V + f"expected a version, got true {FORM}"),
    "one twice": (
        "version: 3",
        "version: 4",
        'x.yaml:3:15: models[1].version: models[0] is version 4 of "m" too (write another version)',
    ),
    "the first one twice": (
        "version: 3, path: m.onnx}\n  - {name: m, version: 4",
        "path: m.onnx}\n  - {name: m, version: 1",
        'x.yaml:3:15: models[1].version: models[0] is version 1 of "m" too (write another version)',
    ),
    "two defaults": (
        ", traffic: 5%",
        "",
        'x.yaml:3:6: models[1].name: "m" has two versions without traffic, of which models[0] is one'
        " (write traffic: 0%)",
    ),
    "more than all": ("5%", "101%", T + '"101%" is more than all requests (write at most 100%)'),
    "more than all together": (
        "version: 3",
        "version: 3, traffic: 96%",
        T + 'the shares of "m" make 101% (at most 100%)',
    ),
    "less than all together": (
        "version: 3",
        "version: 3, traffic: 5%",
        T + 'the shares of "m" make 10% (leave traffic out at one version, which gets the rest)',
    ),
    "a number": ("5%", "5", T + "expected a share of the requests, got 5 (write 5%)"),
    "a fraction": ("5%", "0.05", T + "expected a share of the requests, got 0.05 (write 0.05%, or 5%?)"),
    "a word": ("5%", "some", T + 'expected a share of the requests, got "some" (write 5%)'),
    "a name with the mark": ("name: other", "name: m@5", None),
    "another draw": (
        "traffic: 5%",
        "traffic: 5%, traffic_by: client",
        'x.yaml:3:54: models[1].traffic_by: expected "request" or "caller", got "client"',
    ),
    "two draws": (
        "traffic: 5%}",
        "traffic: 5%, traffic_by: caller}\n  - {name: m, version: 5, path: m.onnx, traffic: 1%, traffic_by: request}",
        "x.yaml:4:54: models[2].traffic_by: models[1] has another one for this name (write it once)",
    ),
    "a version without a worker": (
        "{count: 2}",
        "{models: [m, other]}\n  - {models: [m@5]}",
        'x.yaml:7:15: workers[1].models[0]: there is no model "m@5" (did you mean "m@4"?)',
    ),
    "a rest without a worker": (
        "{count: 2}",
        "{models: [m@4, other]}",
        'x.yaml:2:6: models[0].name: no worker serves "m@3" (add it to a group of workers)',
    ),
    "a shadow with traffic": (
        "traffic: 5%",
        "traffic: 5%, shadow: 2%",
        "x.yaml:3:54: models[1].shadow: a shadow gets no traffic (write traffic: 0%, or remove the shadow)",
    ),
    "a shadow with the rest": (
        "version: 3",
        "version: 3, shadow: 2%",
        "x.yaml:2:27: models[0].shadow: a shadow gets no traffic (write traffic: 0%, or remove the shadow)",
    ),
    "a shadow that must not run twice": (
        "traffic: 5%",
        "traffic: 0%, shadow: 2%, idempotent: false",
        "x.yaml:3:54: models[1].shadow: a shadow runs requests twice, which idempotent: false forbids (remove one of them)",
    ),
    "a shadow of what must not run twice": (
        "path: m.onnx}\n  - {name: m, version: 4, path: m.onnx, traffic: 5%",
        "path: m.onnx, idempotent: false}\n  - {name: m, version: 4, path: m.onnx, traffic: 0%, shadow: 2%",
        "x.yaml:3:54: models[1].shadow: a shadow runs requests twice, which idempotent: false forbids (remove one of them)",
    ),
    "a shadow that shares a process": (
        "traffic: 5%}\n  - {name: other, path: m.onnx}\nworkers:\n  - {count: 2}",
        "traffic: 0%, shadow: 2%}\n  - {name: other, path: m.onnx}\nworkers:\n  - {models: [m, other, m@4]}",
        'x.yaml:6:25: workers[0].models[2]: "m@4" is a shadow, which shares no process with traffic'
        " (leave it out of this group)",
    ),
    "a shadow in the server's process": (
        "traffic: 5%}\n  - {name: other, path: m.onnx}\nworkers:\n  - {count: 2}",
        "traffic: 0%, shadow: 2%}\n  - {name: other, path: m.onnx}\nin_process: true",
        "x.yaml:3:54: models[1].shadow: a shadow needs a process of its own, and in_process has one for all"
        " (remove one of them)",
    ),
    "17": (
        "  - {name: other",
        "".join(f"  - {{name: m, version: {number}, path: m.onnx, traffic: 0%}}\n" for number in range(5, 20))
        + "  - {name: other",
        'x.yaml:18:6: models[16].name: "m" has 17 versions (at most 16 at a time: remove old ones)',
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_its_place_and_what_to_do(name: str, tmp_path: Path) -> None:
    """As the user reads it."""
    right, wrong, words = MISTAKES[name]
    assert right in TEXT
    found = problems_of(tmp_path, TEXT.replace(right, wrong))
    assert 1 == len(found)
    if words is not None:
        assert [words] == found


def test_each_version_is_a_model_and_a_canary_has_a_process_of_its_own(tmp_path: Path) -> None:
    """With the settings of the group that serves the rest."""
    settings = load(tmp_path, TEXT.replace("{count: 2}", "{count: 2, slots: 3, threads: 4}")).settings
    assert ["m@3", "m@4", "other"] == [model.name for model in settings.models]
    assert [(2, ("m@3", "other"), 3, 4), (1, ("m@4",), 3, 4)] == [
        (group.count, group.models, group.slots, group.threads) for group in settings.worker_groups
    ]
    assert {"m": Versions("m", {"4": 50_000, "3": 950_000}, "3")} == settings.versions
    assert settings == settings.named()


@pytest.mark.parametrize(
    ("workers", "groups"),
    [
        ("[{models: [m, m@4, other]}]", [("m@3", "m@4", "other")]),
        ("[{models: [other]}, {models: [m]}]", [("other",), ("m@3",), ("m@4",)]),
        ("[{count: 1}, {models: [m@4], count: 2}]", [("m@3", "other"), ("m@4",)]),
        ("[]", []),
    ],
)
def test_a_group_serves_what_it_names(workers: str, groups: list[tuple[str, ...]], tmp_path: Path) -> None:
    """A bare name is the version with the rest."""
    text = (
        TEXT[: TEXT.index("workers:")]
        + f"workers: {workers}\nserver: {{worker_listen: 'tcp://127.0.0.1:0'}}\n"
    )
    assert groups == [group.models for group in load(tmp_path, text).settings.worker_groups]


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ("workers: [{count: 2}]", None),
        ("workers: [{models: [m, other]}, {models: [m@4]}]", None),
        ("workers: [{models: [m, m@4, other]}]", "x.yaml:5:11: workers[0]"),
        ("in_process: true", "x.yaml:5:1: in_process"),
    ],
)
def test_a_canary_that_shares_a_process_is_a_warning(
    processes: str, words: str | None, tmp_path: Path
) -> None:
    """Where the file says so; by itself it gets one of its own."""
    found = [*placement_warnings(load(tmp_path, TEXT[: TEXT.index("workers:")] + processes))]
    assert (words is not None) == (len(found) == 1)
    if words is not None:
        assert words in found[0]
        assert "m@4 shares its process with other models, which a crash of it ends too" in found[0]


def test_shares_are_no_part_of_what_audits_compare() -> None:
    """5 % -> 10 % must not lift "batching stopped"."""
    keys = {
        key_of(
            ServedModel(
                0, "m@4", replace(KNOWN, name="m@4"), ModelSettings(name="m", version=4, traffic=share)
            ),
            "d",
        )
        for share in ("5%", "10%")
    }
    assert 1 == len(keys)


def test_folders_of_one_name_are_versions_of_a_chain(tmp_path: Path) -> None:
    """Each with its own tokenizer and encoder; the canary's share a process."""
    for name in ("one", "two"):
        write_folder(tmp_path / name)
    text = "models:\n  - {name: t, path: one}\n  - {name: t, version: 2, path: two, traffic: 5%}\nworkers: [{models: [t]}]"
    settings = load(tmp_path, text).settings
    assert {"t.tokens@1", "t.tokens@2", "t.encoder@1", "t.encoder@2"} == {
        model.name for model in settings.models
    }
    assert {"t.tokens", "t.encoder", "t"} == settings.versions.keys()
    assert [("t@1", ["t.tokens@1", "t.encoder@1"]), ("t@2", ["t.tokens@2", "t.encoder@2"])] == [
        (chain.name, [stage.model for stage in chain.stages]) for chain in settings.chains
    ]
    assert [{"t.tokens@1", "t.encoder@1"}, {"t.tokens@2", "t.encoder@2"}] == [
        set(group.models or ()) for group in settings.worker_groups
    ]
    named = load(tmp_path, text.replace("[t]}", "[t, t@2]}")).settings
    assert [4] == [len(group.models or ()) for group in named.worker_groups]
    shadows = load(tmp_path, text.replace("traffic: 5%", "traffic: 0%, shadow: 2%")).settings.versions
    assert {"t": {}, "t.tokens": {"2": 20_000}, "t.encoder": {"2": 20_000}} == {
        name: versions.shadows for name, versions in shadows.items()
    }
    (problem,) = problems_of(tmp_path, text.replace("version: 2", "version: 1.0"))
    assert 'models[1].version: expected a version, got 1.0 (put it in quotes: "1.0")' in problem


def test_a_file_without_versions_is_as_it_was(tmp_path: Path) -> None:
    """Names, groups, and nothing to draw."""
    settings = load(tmp_path, "models: [{name: m, path: m.onnx}]").settings
    assert (["m"], [None], {}) == (
        [model.name for model in settings.models],
        [group.models for group in settings.worker_groups],
        settings.versions,
    )


def test_the_settings_are_shown_as_they_are_written(tmp_path: Path) -> None:
    """Name, version and share; the groups as they are started."""
    shown = {value.key: value.value for value in load(tmp_path).effective_values()}
    assert ("m", "4", "5%") == tuple(shown[f"models[1].{key}"] for key in ("name", "version", "traffic"))
    assert "m@4" == shown["workers[1].models[0]"]


KNOWN = ModelSignature(
    "m@3",
    tuple(InputPort(name, "f32", NamedShape.parse("batch:1..8, n:1..9")) for name in "ab"),
    (OutputPort("y", "f32", NamedShape.parse("batch, n"), Rows()),),
)


def test_check_compares_the_signatures_of_versions_that_share_traffic(tmp_path: Path) -> None:
    """The order of ports may differ. A version without traffic may have any."""
    loaded = load(tmp_path)
    swapped = replace(KNOWN, name="m@4", inputs=KNOWN.inputs[::-1])
    assert [] == [*version_problems(loaded, {"m@3": KNOWN, "m@4": swapped})]
    assert [] == [*version_problems(loaded, {"m@3": KNOWN})]
    narrow = InputPort("b", "f32", NamedShape.parse("batch:1..8, n:1..5"))
    other = replace(KNOWN, name="m@4", inputs=(KNOWN.inputs[0], narrow))
    (problem,) = version_problems(loaded, {"m@3": KNOWN, "m@4": other})
    assert problem.endswith(
        "x.yaml:3:41: models[1].traffic: requests of version 3 do not all fit: input 'b': axis 1 takes 1..5, and clients "
        "may send 1..9 (write traffic: 0%, and ask for it by its version; or make the two alike)"
    )
    silent = load(tmp_path, TEXT.replace("5%", "0%"))
    assert [] == [*version_problems(silent, {"m@3": KNOWN, "m@4": other})]
    once = load(tmp_path, TEXT.replace("traffic: 5%", "traffic: 5%, idempotent: false"))
    (problem,) = version_problems(once, {"m@3": KNOWN, "m@4": swapped})
    assert "idempotent is false here, and not there" in problem


def test_a_chain_names_a_model_or_one_of_its_versions(tmp_path: Path) -> None:
    """Without a version it has the signature of the one with the rest."""
    chain = """\
chains:
  - name: c
    inputs: {a: s.a, b: s.b}
    stages: [{name: s, model: MODEL, inputs: {a: a, b: b}}]
    outputs: {y: s.y}
"""
    for model in ("m", "m@3", "m@4"):
        loaded = load(tmp_path, TEXT + chain.replace("MODEL", model))
        signatures = {"m@3": KNOWN, "m@4": replace(KNOWN, name="m@4")}
        assert ["c"] == [one.spec.name for one in plan_chains(loaded, signatures)]
    (problem,) = problems_of(tmp_path, TEXT + chain.replace("MODEL", "m@5"))
    assert 'chains[0].stages[0].model: there is no model "m@5" (did you mean "m@4"?)' in problem
