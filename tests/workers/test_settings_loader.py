"""The YAML: what it may say, and how everything that is wrong with it is reported at once."""

from __future__ import annotations

import textwrap
from math import inf
from pathlib import Path

import pytest

from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, OutputSettings, json_schema, load_settings
from shapestream_engine.output_rules import RULES, parse_rule


def write(folder: Path, text: str) -> Path:
    """The text as a file."""
    path = folder / "x.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def load(folder: Path, text: str) -> LoadedSettings:
    """The settings of the text; model files need not exist."""
    return load_settings(write(folder, text), files_must_exist=False)


def problems_of(folder: Path, text: str | bytes) -> list[str]:
    """The problems found, without the folder in front."""
    path = folder / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, files_must_exist=False)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


ONE_MODEL = """\
models:
  - name: m
    path: m.xml
"""


def test_the_smallest_file_gets_every_default(tmp_path: Path) -> None:
    """A name and a path suffice: one worker, ipc beside the file, OpenVINO on the CPU."""
    settings = load(tmp_path, ONE_MODEL).settings
    assert (f"ipc://{tmp_path}/run/shapestream.sock",) == settings.server.listen
    (model,) = settings.models
    assert ("openvino", "CPU", str(tmp_path / "m.xml")) == (model.only_engine, model.device, model.path)
    (group,) = settings.worker_groups
    assert (1, "auto", "auto", (model,)) == (
        group.count,
        group.slots,
        group.threads,
        settings.models_of(group),
    )


def test_a_file_with_most_settings_is_read(tmp_path: Path) -> None:
    """Server, model, probe and worker group have the values that the YAML gives them."""
    loaded = load(
        tmp_path,
        """\
        server:
          listen: [ipc://run/shapestream.sock, tcp://127.0.0.1:5555]   # beyond loopback: security is required
        models:
          - name: embeddings
            path: ../models/minilm.xml
            engine: openvino
            device: CPU
            inputs:
              input_ids:      {shape: "batch:1..64, seq:1..512", pad: {seq: 0}}
              attention_mask: {shape: "batch, seq", pad: {seq: 0}}
            outputs:
              embedding: {rule: rows}
            probe:
              input_ids: {integers: [0, 30521]}
              attention_mask: {integers: [1, 1]}
            shapes: {strategy: native}
            batching: {max_batch: 64, max_delay_ms: 0}
        workers:
          - {count: 2, models: [embeddings], slots: auto, threads: auto}
        logging: {level: info, format: auto}
        """,
    )
    (model,) = loaded.settings.models
    assert "batch:1..64, seq:1..512" == model.inputs["input_ids"].shape
    assert {"seq": 0} == model.inputs["attention_mask"].pad
    assert {"rule": "rows"} == model.outputs["embedding"].rule_arguments()
    assert (0, 30521) == model.probe["input_ids"].integers
    assert 2 == loaded.settings.worker_groups[0].count


def test_a_type_error_names_the_line_the_key_and_the_remedy(tmp_path: Path) -> None:
    """The message that the style guide asks for, to the letter."""
    text = """\
        models:
          - name: m
            path: m.xml
            device: CPU
            trust: true
            shapes: {strategy: native}
            batching:
              max_batch: "8"
        """
    expected = 'x.yaml:8:7: models[0].batching.max_batch: expected an integer, got "8" (remove the quotes)'
    assert [expected] == problems_of(tmp_path, text)


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Problems of the text and of single values come out of one run."""
    text = """\
        server: {heartbeat_s: -1, listn: []}
        models:
          - name: m
            path: m.xml
            trust: yes
            trust: true
          - name: m
            function: no sense
            inputs: {x: {shape: "5..1", element_type: f32}}
            outputs: {y: {shape: "1", element_type: float32}}
        workers: [{models: [n, m], slots: "3"}]
        """
    assert [
        "x.yaml:1:10: server.heartbeat_s: must be more than 0.0, got -1",
        'x.yaml:1:27: server.listn: unknown key (did you mean "listen"?)',
        "x.yaml:6:5: models[0].trust: duplicate key (it is on line 5 already; remove one)",
        'x.yaml:8:5: models[1].function: expected package.module:name, got "no sense" '
        "(the module must be installed)",
        'x.yaml:9:18: models[1].inputs.x.shape: "5..1" is not a shape: no size is at least 5 and at most 1',
    ] == [line for line in problems_of(tmp_path, text) if int(line.split(":")[1]) < 10]
    assert ["models[1].outputs.y.element_type", "workers[0].slots"] == [
        line.split(": ")[1] for line in problems_of(tmp_path, text) if int(line.split(":")[1]) >= 10
    ]


def test_all_contradictions_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Settings that are right one by one are compared, of all sections in one run, beside problems of the text."""
    text = """\
        server: {worker_silence_s: 1, listen: [tcp://0.0.0.0:5555]}
        models:
          - name: m
            path: m.xml
            trust: true
            trust: true
          - name: m
            path: m.xml
            function: a.b:c
            shapes: {strategy: partitioned, seq: 4}
        workers: [{models: [n, m]}]
        """
    assert [
        "x.yaml:1:10: server.worker_silence_s",
        "x.yaml:1:40: server.listen[0]",
        "x.yaml:6:5: models[0].trust",
        "x.yaml:7:5: models[1].name",
        "x.yaml:9:5: models[1].function",
        "x.yaml:10:5: models[1].shapes",
        "x.yaml:10:37: models[1].shapes.seq",
        "x.yaml:11:21: workers[0].models[0]",
    ] == [": ".join(line.split(": ")[:2]) for line in problems_of(tmp_path, text)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_batch", "8"), ("max_delay_ms", "2.5"), ("max_padding_ratio", "0.5"), ("max_batch_bytes", "1 MiB")],
)
def test_what_may_not_run_twice_has_no_company_to_set(tmp_path: Path, key: str, value: str) -> None:
    """Its requests run alone, so settings about sharing a call would do nothing; those that say the same may stay."""
    text = f"models: [{{name: m, path: m.xml, idempotent: false, batching: {{{key}: {value}}}}}]\n"
    (problem,) = problems_of(tmp_path, text)
    assert f'models[0].batching.{key}: requests of a model with "idempotent: false" run alone' in problem
    fine = "models: [{name: m, path: m.xml, idempotent: false, batching: {max_batch: 1, max_delay_ms: 0}}]\n"
    assert load(tmp_path, fine).settings.models[0].idempotent is False


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("shapes: {strategy: bucketed, batch: [1, 4]}", "shapes.batch"),
        ("shapes: {strategy: padded, batch: 4}", "shapes.batch"),
        ("shapes: {strategy: partitioned, batch: [2, 4]}", "shapes.batch"),
        ("shapes: {max_prepared: 16}", None),
        ("batching: {batch_invariant: true}", "batching.batch_invariant"),
        ("shapes: {strategy: partitioned, batch: [1, 4]}", None),
        ("shapes: {strategy: padded, batch: 1}", None),
        ("batching: {batch_invariant: 1}", None),
    ],
)
def test_what_may_not_run_twice_is_not_copied_to_fill_calls_up(
    tmp_path: Path, setting: str, place: str | None
) -> None:
    """Calls of more rows than the request has repeat one of its rows."""
    text = f"models: [{{name: m, path: m.xml, idempotent: false, {setting}}}]\n"
    if place is None:
        assert load(tmp_path, text).settings.models
        return
    (problem,) = problems_of(tmp_path, text)
    assert f"models[0].{place}: this fills up calls with copies of rows" in problem


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("workers: [{memory_limit: 2GiB}]", "workers[0].memory_limit", 2 << 30),
        ("workers: [{memory_limit: 512 MB}]", "workers[0].memory_limit", 512 * 10**6),
        ("workers: [{memory_limit: 3221225472}]", "workers[0].memory_limit", 3 << 30),
        ("workers: [{}]", "workers[0].memory_limit", None),
        ("    batching: {max_batch_bytes: 16 MiB}", "models[0].batching.max_batch_bytes", 16 << 20),
        ("", "models[0].batching.max_batch_bytes", None),
        ("server: {window_bytes: 64 MiB}", "server.window_bytes", 64 << 20),
    ],
)
def test_sizes_may_have_units(tmp_path: Path, line: str, key: str, expected: int | None) -> None:
    """Bytes, or a number with its unit; without the key there is no limit."""
    values = {value.key: value.value for value in load(tmp_path, ONE_MODEL + line).effective_values()}
    assert expected == values[key]


@pytest.mark.parametrize(
    ("line", "share", "origin"),
    [
        ("", 0.001, "default"),
        ("    audit: 0.25", 0.25, ".yaml:"),
        ("    idempotent: false", 0.0, "default"),
        ("    trust: true", 0.0, "default"),
        ("    audit: 0\n    trust: true", 0.0, ".yaml:"),
    ],
)
def test_the_share_of_audited_answers_is_shown_as_it_holds(
    tmp_path: Path, line: str, share: float, origin: str
) -> None:
    """None where a request may not run twice, or nothing is proved."""
    (shown,) = [
        value
        for value in load(tmp_path, ONE_MODEL + line).effective_values()
        if value.key == "models[0].audit"
    ]
    assert (share, True) == (shown.value, origin in shown.origin)


def test_when_a_batch_hangs_can_be_said_per_model(tmp_path: Path) -> None:
    """`batching.hang_after_s`: seconds, `off`, or by what batches usually take."""
    for text, expected in (("60", 60.0), ("off", inf), ("auto", None)):
        said = f"models: [{{name: m, path: m.xml, batching: {{hang_after_s: {text}}}}}]\n"
        assert expected == load(tmp_path, said).settings.models_by_name["m"].batching.hang_limit_s


def test_where_workers_dial_in_they_are_lost_before_they_hang(tmp_path: Path) -> None:
    """Their connection may break; over the private socket of the server's own workers it does not."""
    models = "models: [{name: m, path: m.xml, batching: {hang_after_s: 2}}]\n"
    assert load(tmp_path, models).settings.models
    with pytest.raises(ConfigurationError, match="else a broken connection counts as a request that hangs"):
        load(tmp_path, "server: {worker_listen: tcp://127.0.0.1:0}\n" + models)


def test_the_default_for_hangs_leaves_room_for_silence(tmp_path: Path) -> None:
    """Ten seconds, or twice the silence after which a worker counts as lost."""
    assert 10.0 == load(tmp_path, ONE_MODEL).settings.server.effective_hang_min_s
    silent = load(tmp_path, "server: {worker_silence_s: 20}\n" + ONE_MODEL).settings.server
    assert 40.0 == silent.effective_hang_min_s


@pytest.mark.parametrize(
    ("server", "lame_duck_s"),
    [
        ("", 0.0),
        ("http: '127.0.0.1:0', grpc: '127.0.0.1:0'", 0.0),
        ("http: '127.0.0.1:0', grpc: '0.0.0.0:0', security: network", 10.0),
        ("http: '0.0.0.0:0', security: network, lame_duck_s: 3", 3.0),
        ("http: '127.0.0.1:0', lame_duck_s: 0", 0.0),
    ],
)
def test_the_default_of_the_lame_duck_follows_from_the_addresses_of_gateways(
    tmp_path: Path, server: str, lame_duck_s: float
) -> None:
    """Balancers are on other machines."""
    loaded = load(tmp_path, f"server: {{{server}}}\n" + ONE_MODEL)
    assert lame_duck_s == loaded.settings.server.effective_lame_duck_s


def test_a_model_that_no_worker_serves_is_a_mistake_unless_workers_dial_in(tmp_path: Path) -> None:
    """Forgetting a model in `workers` would leave its clients waiting for ever."""
    text = "models: [{name: a, path: a.xml}, {name: b, path: b.xml}]\nworkers: [{models: [a]}]\n"
    (problem,) = problems_of(tmp_path, text)
    assert 'models[1].name: no worker serves "b" (add it to a group of workers)' in problem
    assert load(tmp_path, text + "server: {worker_listen: 'tcp://127.0.0.1:5556'}").settings.models


def test_a_missing_model_file_is_named_with_its_full_path(tmp_path: Path) -> None:
    """The relative path is shown resolved, since that is what went wrong."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(write(tmp_path, ONE_MODEL))
    (problem,) = caught.value.problems
    assert f"x.yaml:3:5: models[0].path: no such file: {tmp_path}/m.xml" in problem


def test_a_missing_configuration_is_one_clear_line(tmp_path: Path) -> None:
    """No traceback for a mistyped file name."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(tmp_path / "gone.yaml")
    assert [f"{tmp_path}/gone.yaml: no such file"] == caught.value.problems


def test_shapes_may_be_lists_and_properties_plain_values(tmp_path: Path) -> None:
    """Spellings that people try first are understood."""
    loaded = load(
        tmp_path,
        """\
        models:
          - name: m
            path: m.onnx
            inputs: {x: {shape: [batch, "1..8", 3, -1]}}
            properties: {CACHE_DIR: "", ENABLE_CPU_PINNING: false, INFERENCE_NUM_THREADS: 2}
        in_process: {slots: 2}
        """,
    )
    settings = loaded.settings
    assert "batch, 1..8, 3, -1" == settings.models[0].inputs["x"].shape
    assert {"CACHE_DIR": "", "ENABLE_CPU_PINNING": "NO", "INFERENCE_NUM_THREADS": "2"} == settings.models[
        0
    ].properties
    assert settings.in_process is not None
    assert (2, "auto", ()) == (settings.in_process.slots, settings.in_process.threads, settings.worker_groups)


def test_effective_values_say_where_they_come_from(tmp_path: Path) -> None:
    """`check --show` tells a line of the file from a default."""
    loaded = load(tmp_path, ONE_MODEL + "    batching: {max_batch: 8}\n")
    origins = {
        value.key: (value.value, value.origin.removeprefix(f"{tmp_path}/"))
        for value in loaded.effective_values()
    }
    assert (8, "x.yaml:4") == origins["models[0].batching.max_batch"]
    assert (0.0, "default") == origins["models[0].batching.max_delay_ms"]
    assert ("m", "x.yaml:2") == origins["models[0].name"]
    assert ("openvino", "default") == origins["models[0].engine"]
    assert (1, "default") == origins["workers[0].count"]


def test_samples_may_be_named_for_all_inputs_at_once(tmp_path: Path) -> None:
    """`probe: FILE` is short for the file under "*", and is found beside the YAML."""
    (tmp_path / "real.npz").write_bytes(b"")
    (model,) = load(tmp_path, ONE_MODEL + "    probe: real.npz\n").settings.models
    assert {"*": str(tmp_path / "real.npz")} == {name: probe.samples for name, probe in model.probe.items()}


def test_a_functions_rule_follows_an_output_that_there_is(tmp_path: Path) -> None:
    """A function has the outputs that are declared, so a name that is not among them is a mistake."""
    text = """\
models:
  - name: m
    function: a.b:c
    inputs: {x: {shape: batch, element_type: f32}}
    outputs:
      found: {shape: batch, element_type: i64}
      peaks: {shape: "?, 2", element_type: f32, rule: counts, output: fond}
"""
    (problem,) = problems_of(tmp_path, text)
    assert 'outputs.peaks.output: there is no output "fond" (did you mean "found"?)' in problem


@pytest.mark.parametrize(
    ("shape", "more", "where", "words"),
    [
        ("batch, n", "", "7:10: models[0].outputs.images.rule", "does not fit a model whose inputs all have a batch axis"),
        (
            "n",
            '\n      images.shapes: {shape: "", element_type: i64}',
            "6:7: models[0].outputs.images",
            'the list\'s shapes are an output "images.shapes" already (rename one of them)',
        ),
    ],
    ids=["batch axis", "name"],
)  # fmt: skip
def test_a_list_where_none_can_be_is_a_mistake_in_its_place(
    shape: str, more: str, where: str, words: str, tmp_path: Path
) -> None:
    """Line and column are those of the output that is declared as a list."""
    text = f"""\
models:
  - name: m
    function: a.b:c
    inputs: {{x: {{shape: "{shape}", element_type: f32}}}}
    outputs:
      images:
        {{rule: list, shape: "height, width, 3", element_type: u8}}{more}
"""
    (problem,) = problems_of(tmp_path, text)
    assert (True, True) == (where in problem, words in problem), problem


def test_a_files_rule_may_follow_an_output_that_the_yaml_does_not_name(tmp_path: Path) -> None:
    """The model file knows the names of its outputs, several for some."""
    text = ONE_MODEL + "    outputs: {peaks: {rule: counts, output: found}}\n"
    (model,) = load(tmp_path, text).settings.models
    assert {"rule": "counts", "output": "found"} == model.outputs["peaks"].rule_arguments()


def test_the_rules_of_the_schema_are_those_of_the_engine() -> None:
    """A rule that the schema lets through is one that the engine can read, and none is missing."""
    names = json_schema()["$defs"]["OutputSettings"]["properties"]["rule"]["anyOf"][0]["enum"]
    assert set(RULES) == set(names)
    for name in names:
        output = "peaks" if name in ("with", "counts", "padded_counts", "recount") else None
        to = "batch" if name == "crop" else None
        shape = "n" if name == "list" else None
        arguments = OutputSettings(rule=name, output=output, to=to, shape=shape).rule_arguments()
        assert arguments is not None
        assert name == parse_rule(arguments).NAME


def test_the_json_schema_knows_every_key() -> None:
    """Editors complete keys from it, and underline unknown ones."""
    schema = json_schema()
    assert {"server", "models", "chains", "workers", "in_process", "logging"} == set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert (
        "The name that clients use." == schema["$defs"]["ModelSettings"]["properties"]["name"]["description"]
    )
