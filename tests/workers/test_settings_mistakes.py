"""Mistakes in a YAML: each is one line with its place, the problem and what to do, and nothing else is raised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings
from shapestream.settings.loader import REMOVED
from shapestream.settings.values import Section

MODEL = b"models: [{name: m, path: m.xml, %b}]"


def problems_of(folder: Path, data: str | bytes) -> list[str]:
    """What is wrong with it, each line without the folder; raises whatever else the loader does."""
    path = folder / "x.yaml"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    (folder / "m.xml").touch()
    try:
        load_settings(path)
    except ConfigurationError as error:
        return [problem.replace(f"{folder}/", "") for problem in error.problems]
    return []


TEXT = {
    "a tag that constructs": (b"!!python/object/apply:os.system [true]", "not allowed"),
    "a tag spelt out": (b"a: !<tag:yaml.org,2002:python/name:os.system> x", "not allowed"),
    "a tag on a key": (b"? !!binary eA==\n: 1", "a key must be plain text"),
    "a merge": (b"models: [{<<: {name: m}}]", "merge keys"),
    "an alias that holds itself": (b"models: &m [*m]", "nested too deeply, or an alias"),
    "a model that is its own input": (b"models: &m [{name: m, path: m.xml, inputs: *m}]", "nested too deeply"),
    "an alias of nobody": (b"models: *nobody", "undefined alias"),
    "an anchor twice": (b"a: &a 1\nb: &a 2\nc: *a", "duplicate anchor"),
    "a billion laughs": (
        b"a0: &a0 [x]\n"
        + b"".join(b"a%d: &a%d [%b]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 12)),
        "more than 100000 values",
    ),
    "50,000 lists": (b"[" * 50_000, "nested too deeply"),
    "65 levels, of which each is right": (b"a: " + b"{a: " * 65 + b"1" + b"}" * 65, "nested too deeply"),
    "a key twice": (b"server: {}\nserver: {}", "duplicate key"),
    "a key twice, by an escape": (b'server: {}\n"s\\u0065rver": {}', "duplicate key"),
    "a key that is a list": (b"? [a]\n: 1", "a key must be plain text"),
    "2,000 keys": (b"{" + b", ".join(b"k%d: 1" % n for n in range(2_000)) + b"}", "unknown key"),
    "UTF-16 with its mark": ("models: []".encode("utf-16"), "not UTF-8"),
    "UTF-16 without": ("models: []".encode("utf-16-be"), "not YAML: the character '\\x00'"),
    "a zero byte": (b"models: []\x00", "the character '\\x00' is not allowed"),
    "half of a character": (b'models: [{name: "\\ud83d", path: m.xml}]', "half of a character"),
    "half of a character as a key": (b'"\\ude00": 1', "half of a character"),
    "a character beyond all": (b'models: "\\UFFFFFFFF"', "not YAML"),
    "a version of 5,000 digits": (b"%YAML " + b"9" * 5_000 + b".1\n--- {}", "not YAML"),
    "two documents": (b"models: []\n---\nmodels: []", "single document"),
    "a tab as indentation": (b"models:\n\t- a", "indent with spaces, not tabs"),
    "a colon in a text": (b"a: b: c", "quote a text that holds a colon"),
    "nothing": (b"", "the file is empty (start with models:)"),
    "a list": (b"- 1", "expected a mapping, got a list (start with models:)"),
    "a megabyte": (b"# " + b"x" * (1 << 20), "larger than 1 MiB"),
    "a quote that never ends": (b'models: "' + b"x" * 100_000, "not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT)
def test_text_that_is_no_plain_yaml_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is constructed and nothing else is raised; the lines can be printed."""
    data, expected = TEXT[name]
    problems = problems_of(tmp_path, data)
    assert any(expected in problem for problem in problems), problems
    assert all(problem.encode().decode().startswith("x.yaml") for problem in problems)


VALUES = {
    "a path that is only a zero byte": (b'models: [{name: m, path: "\\0.xml"}]', "zero byte"),
    "a path of 5,000 characters": (b"models: [{name: m, path: %b.xml}]" % (b"a" * 5_000), "cannot be looked at"),
    "a home that is nobody's": (b"models: [{name: m, path: ~nobody-here/m.xml}]", "is no path"),
    "a device as a model": (b"models: [{name: m, path: /dev/zero}]", "is not a regular file"),
    "an ipc path of 107 characters": (b"server: {listen: [ipc:///%b]}" % (b"a" * 106), "too long"),
    "an ipc path of 104 bytes in 52 characters": (
        b"server: {listen: [ipc:///%b]}" % ("ü" * 52).encode(), "too long"
    ),
    "an abstract ipc name": (b'server: {listen: ["ipc://@x"]}', "needs a path"),
    "a port in other digits": ("server: {listen: [\'tcp://127.0.0.1:\u0665\u0665\']}".encode(), "no port"),
    "a port that is negative": (b"server: {listen: ['tcp://127.0.0.1:-1']}", "no port"),
    "a window of 400 digits": (b"server: {window_bytes: %b}" % (b"9" * 400), "window_bytes"),
    "a window of no 64 bits": (b"server: {window_bytes: 999999999999 GB}", "more than any machine has"),
    "a heartbeat that is infinite": (b"server: {heartbeat_s: .inf}", "heartbeat_s"),
    "a heartbeat that is not a number": (b"server: {heartbeat_s: .nan}", "heartbeat_s"),
    "a name of two lines": (b'models: [{name: "a\\nb", path: m.xml}]', "models[0].name"),
    "a name of 201 characters": (b"models: [{name: %b, path: m.xml}]" % (b"n" * 201), "models[0].name"),
    "a function with a command": (b'models: [{name: m, function: "os:system(1)"}]', "package.module:name"),
    "both a function and its digest": (
        b"models: [{name: m, function: 'numpy:sort', sha256: '%b'}]" % (b"0" * 64), "this is a function (remove it)"
    ),
    "a shape of 20,000 dimensions": (MODEL % b"inputs: {x: {shape: '%b?'}}" % (b"?, " * 20_000), ""),
    "a count in words": (MODEL % b"batching: {max_batch: 0x}", "max_batch"),
    "padding that is not a number": (MODEL % b"inputs: {x: {shape: 'batch, n', pad: {n: .nan}}}", ""),
    "a column of 30 digits": (MODEL % b"outputs: {y: {rule: index_column, column: %b}}" % (b"9" * 30), ""),
    "an engine that is a list": (MODEL % b"engine: [openvino]", "unknown engine a list"),
    "a probe of more than 64 bits": (
        MODEL % b"probe: {x: {integers: [0, 9223372036854775808]}}", "narrow the range"
    ),
    "a probe as wide as all numbers": (
        MODEL % b"probe: {x: {uniform: [-1.0e+308, 1.0e+308]}}", "narrow the range"
    ),
    "a probe without end": (MODEL % b"probe: {x: {uniform: [0.0, .inf]}}", "narrow the range"),
    "a model root that is a file": (b"server: {model_root: m.xml}", "m.xml is a file (name a folder)"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_that_mean_harm_are_refused_in_their_place(name: str, tmp_path: Path) -> None:
    """Or taken as what they are, where nothing can come of it (no words are expected then); never a crash."""
    data, expected = VALUES[name]
    problems = problems_of(tmp_path, data)
    assert not expected or any(expected in problem for problem in problems), problems
    assert all("\n" not in problem and problem.encode() for problem in problems)


def test_a_file_without_end_is_too_large() -> None:
    """It is not read into memory first."""
    with pytest.raises(ConfigurationError, match="/dev/zero: the file is larger than 1 MiB"):
        load_settings(Path("/dev/zero"))


LINES_OF_A_MODEL = [
    ("trust: yes", 'models[0].trust: expected true or false, got "yes" (write true)'),
    ("name: 5", "models[0].name: expected text, got 5 (put it in quotes)"),
    ("device:", "models[0].device: expected text, got nothing (fill it in, or remove the key)"),
    ("inputs: [a]", "models[0].inputs: expected a mapping, got a list"),
    ("batching: {max_batch: 8.0}", "models[0].batching.max_batch: expected an integer, got 8.0 (write 8)"),
    ("batching: {max_batch: true}", "models[0].batching.max_batch: expected an integer, got true"),
    ("batching: {max_batch: 0}", "models[0].batching.max_batch: must be at least 1, got 0"),
    ("batching: {max_delay_ms: '1'}", 'max_delay_ms: expected a number, got "1" (remove the quotes)'),
    ("shapes: {strategy: magic}", 'models[0].shapes.strategy: expected "native", "padded", "bucketed" or'),
    ("inputs: {x: {shape: batch, seq:1..9}}", 'inputs.x["seq:1..9"]: unknown key (put a shape that holds'),
    ("inputs: {x: {shape: batch, mask_of: x}}", "inputs.x.mask_of: an input cannot be the mask of itself"),
    ("outputs: {y: {rule: with}}", 'outputs.y: the rule "with" needs the output that it runs parallel to'),
    ("outputs: {y: {rule: rows, column: 1}}", 'outputs.y.column: only the rule "index_column" has a "column"'),
    ("outputs: {y: {rule: rows, output: z}}",
     'outputs.y.output: only the rules "with", "counts", "padded_counts", "recount" have an "output"'),
    ("outputs: {y: {rule: counts}}",
     'outputs.y: the rule "counts" needs the output that counts its rows (add output: NAME)'),
    ("outputs: {y: {rule: recount}}",
     'outputs.y: the rule "recount" needs the output whose rows it counts (add output: NAME)'),
    ("outputs: {y: {rule: padded_counts, output: y}}", "outputs.y.output: an output cannot follow itself"),
    ("outputs: {y: {rule: with, output: z}, z: {rule: rows}}",
     'y.output: "z" has the rule "rows" ("with" follows one with the rule "index_column" or "counts")'),
    ("outputs: {y: {rule: counts, output: z}, z: {rule: index_column}}",
     'y.output: "z" has the rule "index_column" ("counts" follows one with the rule "rows")'),
    ("outputs: {y: {rule: recount, output: z}, z: {shape: batch}}",
     'y.output: "z" has the rule "rows" ("recount" follows one with the rule "index_column" or "with"'),
    ("outputs: {y: {rule: crop}}",
     'outputs.y: the rule "crop" needs the size of each axis (add to: "batch, 8, height/4, width/4")'),
    ("outputs: {y: {rule: rows, to: batch}}", 'outputs.y.to: only the rule "crop" has a "to" (remove it)'),
    ("outputs: {y: {rule: list}}",
     'outputs.y.rule: only a function returns lists: the rule "list" does not fit a "path" (remove the rule)'),
    ("outputs: {y: {rule: column}}",
     'outputs.y.rule: unknown rule "column" (write one of: rows, index_column, with, counts,'),
    ("probe: {x: {integers: [3, 1]}}", "probe.x.integers: the low end 3 is above the high end 1 (swap them)"),
    ("probe: {x: {}}", "probe.x: write one of integers: [low, high], uniform: [low, high] or samples: FILE.npz"),
    ("probe: {x: {uniform: [0, 1], integers: [0, 1]}}", "probe.x: write one of integers: [low, high]"),
    ("probe: {x: {uniform: [0, -1]}}", "probe.x.uniform: the low end 0 is above the high end -1 (swap them)"),
    ("probe: {x: {integer: [0, 1]}}", 'probe.x.integer: unknown key (did you mean "integers"?)'),
    ("probe: samples.txt", 'expected the path of an .npz of samples, got "samples.txt"'),
    ("function: a.b:c", 'models[0].function: both "path" and "function" are given (remove one)'),
    ("audit: 2", "models[0].audit: must be at most 1.0, got 2"),
    ("idempotent: false\n    audit: 0.5",
     "models[0].audit: an audit runs requests twice, which idempotent: false forbids (remove one of them)"),
    ("trust: true\n    audit: 0.5",
     "models[0].audit: an audit needs the proof of the model, which trust: true skips (remove one of them)"),
    ("engine: function", 'models[0].engine: engine "function" does not take a "path"'),
    ("engine: tensorflow", 'models[0].engine: unknown engine "tensorflow" (write one of: openvino, onnxruntime,'),
    ("engine: torch", 'models[0].path: engine "torch" reads .pt2, not "m.xml"'),
    ("engine: onnxruntime", 'models[0].path: engine "onnxruntime" reads .onnx, not "m.xml"'),
    *[
        (f"batching: {{hang_after_s: {value}}}", "batching.hang_after_s: expected seconds, auto or off, got")
        for value in ("0", "-1", ".inf", "true", '"60"', "never")
    ],
    *[
        (f"inputs: {{x: {{shape: {shape}}}}}", 'unknown key (put a shape that holds commas in quotes: "batch, 4")')
        for shape in ("batch, 4", "batch:1..8, 4", "batch, seq")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES_OF_A_MODEL)
def test_each_mistake_of_a_model_has_its_own_words(tmp_path: Path, line: str, expected: str) -> None:
    """One mistake gives one problem, which says what to do."""
    key = line.split(":")[0]
    lines = {"name": "name: m", "path": "path: m.xml", key: line}
    (problem,) = problems_of(tmp_path, "models:\n  - " + "\n    ".join(lines.values()))
    assert expected in problem


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_says_what_holds_now(tmp_path: Path, key: str) -> None:
    """In one line with its place, whatever its value and the rest of the file are."""
    section, *keys = key.replace("*", "ids").split(".")
    inner: Any = "the value of an earlier release"
    for each in reversed(keys):
        inner = {each: inner}
    lines = problems_of(tmp_path, yaml.safe_dump({section: inner if section == "server" else [{}, inner]}))
    place = ".".join([section if section == "server" else f"{section}[1]", *keys])
    told = [line.split(": ", 1)[1] for line in lines if "removed" in line]
    assert [f"{place}: this key was removed ({REMOVED[key]})"] == told


def test_a_removed_key_is_the_only_problem_of_its_file(tmp_path: Path) -> None:
    """Though the server has the constant, and though another key has a similar name."""
    text = "server: {kept_s: 30}\nmodels: [{name: m, path: m.xml}]\n"
    assert [
        "x.yaml:1:10: server.kept_s: this key was removed (replies are kept for 60 s; remove the key)"
    ] == (problems_of(tmp_path, text))
    (line,) = problems_of(tmp_path, text.replace("kept_s", "hang_mins"))
    assert "unknown key (did you mean" not in line


def _sections(base: type[Section] = Section) -> Iterator[type[Section]]:
    """All sections."""
    for section in base.__subclasses__():
        yield section
        yield from _sections(section)


def test_no_file_can_set_a_constant() -> None:
    """Each field of a section is a key of files, or is refused as a removed key, also by a file that tries it anew."""
    constants = {key for each in _sections() for key in each.model_fields.keys() - set(each.file_keys())}
    assert {"prefetch", "mode"} <= constants
    assert set() == constants - {key.rpartition(".")[2] for key in REMOVED}


SECTIONS = [
    ("server: {listen: [tcp://0.0.0.0:5555]}", "is open to other machines"),
    ("server: {listen: ['tcp://*:5555']}", "is open to other machines"),
    ("server: {listen: [tcp://127.0.0.1]}", "has no port between 0 and 65535"),
    ("server: {listen: [tcp://127.0.0.1:70000]}", "has no port between 0 and 65535"),
    ("server: {listen: [http://127.0.0.1:80]}", "is not an address (write ipc://PATH or tcp://"),
    ("server: {listen: [5555]}", "expected an address, got 5555"),
    ("server: {http: {address: '127.0.0.1:0', texts: n}}",
     'server.http.texts[0]: there is no model or chain "n" (known: m)'),
    ("server: {http: {address: '127.0.0.1:0', texts: [m, other]}}",
     'server.http.texts[1]: there is no model or chain "other" (known: m)'),
    ("server: {http: {address: '127.0.0.1:0', texts: {embedding: m}}}",
     "server.http.texts: expected a list, got a mapping"),
    ("server: {http: {address: '127.0.0.1:0', texts: true}}",
     "server.http.texts: no path of a model is a folder of texts (write the names"),
    ("server: {grpc: {address: '127.0.0.1:0', texts: m}}", "server.grpc.texts: unknown key"),
    ("server: {listen: []}", "at least 1 item"),
    ("server: {window_bytes: 10 parsecs}", 'expected a size, got "10 parsecs" (write bytes, or "256 MiB")'),
    ("server: {worker_silence_s: 1}", "worker_silence_s (1) must be at least twice heartbeat_s (1)"),
    ("in_process: true\nworkers: [{}]", 'both "in_process" and "workers" are given (remove one)'),
    ("server: {window_bytes: -1}", "server.window_bytes: expected a size, got -1"),
    ("workers: []", "no workers, and server.worker_listen is not set"),
    ("workers: [{count: 0}]", "workers[0].count: must be at least 1, got 0"),
    ("workers: [{memory_limit: 2G}]",
     'workers[0].memory_limit: expected a size, got "2G" (write "2 GiB", or remove the key)'),
    ("workers: [{memory_limit: 0}]", 'memory_limit: expected a size, got 0 (write "2 GiB"'),
    ("workers: [{memory_limit: true}]", "memory_limit: expected a size, got true"),
    ("workers: [{memory_limit: 2048}]", '2048 bytes is less than any process takes (name the unit: "2048 MiB"?)'),
    ("workers: [{memory_limit: 1 MiB}]", '"1 MiB" is less than any process takes (at least 64 MiB)'),
    ("workers: [{memory_limt: 2 GiB}]", 'unknown key (did you mean "memory_limit"?)'),
    ("logging: {level: loud}", 'logging.level: expected "debug", "info", "warning" or "error", got "loud"'),
    ("server: {listen: localhost:5601}",
     'server.listen: expected a list, got "localhost:5601" (write ["tcp://localhost:5601"])'),
    ("server: {listen: ['localhost:5601']}",
     'server.listen[0]: "localhost:5601" is not an address (write tcp://localhost:5601)'),
    ("server: {listen: [':5601']}", 'listen[0]: ":5601" is not an address (write tcp://127.0.0.1:5601)'),
    ("server: {listen: [run/s.sock]}", 'listen[0]: "run/s.sock" is not an address (write ipc://run/s.sock)'),
    ("workers: 2", "x.yaml:2:1: workers: expected a list, got 2 (write [{count: 2}])"),
    ("workers: '2'", 'workers: expected a list, got "2" (write [{count: 2}])'),
    ("workers: {count: 2}", "workers: expected a list, got a mapping (a list of groups: write [{count: 1}])"),
    ("workers: two", 'workers: expected a list, got "two" (write [{count: 1}])'),
    ("workers: [2]", "x.yaml:2:11: workers[0]: expected a mapping, got 2 (write {count: 2})"),
    ("workers: [{slots: 257}]", "slots: expected auto or a count, got 257 (write auto, or 1 to 256)"),
    ("in_process: {slots: 257}", "slots: expected auto or a count, got 257 (write auto, or 1 to 256)"),
    ("workers: [{wide: 2}]", "wide: expected auto, true or false, got 2 (write auto, true or false)"),
    ('in_process: {wide: "true"}', 'wide: expected auto, true or false, got "true" (remove the quotes)'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SECTIONS)
def test_each_mistake_of_the_other_sections_has_its_own_words(
    tmp_path: Path, text: str, expected: str
) -> None:
    """It is the only problem of a sound model, whatever cannot be told while it is there."""
    (problem,) = problems_of(tmp_path, "models: [{name: m, path: m.xml}]\n" + text)
    assert expected in problem


SHAPED = """\
models:
  - name: m
    path: m.xml
    inputs:
      ids: {shape: "batch:1..64, seq:1..512, 3", pad: {seq: 0}}
      mask: {shape: "batch, seq", mask_of: ids}
      rest: {shape: "batch, width:1..9"}
      text: {shape: "batch", element_type: str}
    shapes: """
SHAPES = [
    ("{strategy: bucketed, seq: [64, 1024]}",
     '.seq: 1024 is outside the bounds 1..512 of "seq" (change it, or the shape of the input)'),
    ("{strategy: partitioned, batch: [1, 128]}",
     '.batch: 128 is outside the bounds 1..64 of "batch" (change it, or the shape of the input)'),
    ("{strategy: bucketed, width: [3, 9]}",
     '.width: sizes of "width" need padding (allow it in inputs.rest: pad: {width: VALUE})'),
    ("{static: [{batch: 1, seq: [64, 1024]}]}",
     '.static[0].seq: 1024 is outside the bounds 1..512 of "seq" (change it, or the shape of the input)'),
    ("{static: [{batch: 1, sec: 64}]}", '.static[0].sec: no input has a dimension "sec" (did you mean "seq"?)'),
    ("{static: [{batch: 1, seq: [64, 32]}]}",
     ".static[0].seq: sizes must ascend, but 32 comes after 64 (sort them)"),
    ("{strategy: bucketed, seq: [64], static: [{batch: 1}]}",
     ".static: static shapes need the strategy native, but this is bucketed (remove one of them)"),
    ("{strategy: bucketed, sec: [64]}", '.sec: no input has a dimension "sec" (did you mean "seq"?)'),
    ("{strategy: bucketed, seq: 64, max_prepard: 7}",
     '.max_prepard: no input has a dimension "max_prepard" (did you mean "max_prepared"?)'),
    ("{strategy: bucketed, seq: [64, 32]}", ".seq: sizes must ascend, but 32 comes after 64 (sort them)"),
    ("{strategy: bucketed, seq: [32, 32]}", ".seq: 32 is listed twice (list each once)"),
    ("{strategy: bucketed, seq: []}", ".seq: the list of sizes is empty (write [32, 64])"),
    ("{strategy: bucketed, seq: [32, 0]}", ".seq: expected sizes, integers from 1 to 2147483647, got 0"),
    ("{strategy: bucketed, seq: 2147483648}", ".seq: expected sizes, integers from 1 to 2147483647, got 2147483648"),
    ('{strategy: bucketed, seq: "32"}',
     '.seq: expected a size or a list of sizes, got "32" (write [32, 64]; other keys are dimensions)'),
    ("{strategy: bucketed, text.bytes: [64]}",
     '["text.bytes"]: "text.bytes" is the mean bytes of strings, which are never padded (remove it)'),
    ("{strategy: bucketed}", ": strategy bucketed: name the dimensions and their sizes: seq: [32, 64, 128]"),
    ("{strategy: padded}", ": strategy padded: name the dimensions to pad, each with its size: seq: 512"),
    ("{strategy: padded, seq: [64, 128]}",
     ".seq: strategy padded: 'seq' takes one size; several are the strategy bucketed"),
    ("{strategy: partitioned, seq: 64}", ": strategy partitioned: name the sizes of batch: batch: [1, 2, 4, 8]"),
    ("{seq: 64}", ".seq: the strategy native takes any size as it comes (remove it, or choose another strategy)"),
    ("{max_prepard: 64}", '.max_prepard: the strategy native takes any size as it comes (did you mean "max_prepared"?)'),
    ("{warm_up: true}", ".warm_up: the strategy native prepares nothing (remove it)"),
    ("{max_prepared: 1}", ".max_prepared: strategy native: max_prepared is an integer from 2"),
    ("{strategy: bucket}", '.strategy: expected "native", "padded", "bucketed" or "partitioned", got "bucket"'),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "expected"), SHAPES)
def test_each_mistake_of_shapes_has_its_own_words(tmp_path: Path, shapes: str, expected: str) -> None:
    """With its line and column, and what to do; nothing else is complained about."""
    (problem,) = problems_of(tmp_path, SHAPED + shapes)
    place, _, words = problem.partition(" models[0].shapes")
    assert place.startswith("x.yaml:9:")
    assert expected == words


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    """The model files that are in it are named."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "m.onnx").touch()
    expected = "x.yaml:1:20: models[0].path: export is a folder (name the file in it: export/m.onnx)"
    assert [expected] == problems_of(tmp_path, "models: [{name: m, path: export}]")
