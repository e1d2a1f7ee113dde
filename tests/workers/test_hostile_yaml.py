"""YAML that means harm: every file ends in lines that can be printed and say what to do, or is read as what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings

MODEL = b"models: [{name: m, path: m.xml, %b}]"


def problems_of(folder: Path, data: bytes) -> list[str]:
    """What is wrong with it, each line without the folder; raises whatever else the loader does."""
    path = folder / "x.yaml"
    path.write_bytes(data)
    (folder / "m.xml").touch()
    try:
        load_settings(path)
    except ConfigurationError as error:
        return [problem.replace(f"{folder}/", "") for problem in error.problems]
    return []


TEXT = {
    # what constructs, includes, or refers
    "a tag that constructs": (b"!!python/object/apply:os.system [true]", "not allowed"),
    "a tag spelt out": (b"a: !<tag:yaml.org,2002:python/name:os.system> x", "not allowed"),
    "a tag by another prefix": (b"%TAG ! tag:yaml.org,2002:python/\n--- !name:os.system x", "not allowed"),
    "a tag on a key": (b"? !!binary eA==\n: 1", "a key must be plain text"),
    "binary": (b"models: !!binary eA==", "not allowed"),
    "a set": (b"!!set {models}", "not allowed"),
    "ordered pairs": (b"!!omap [models: []]", "not allowed"),
    "a merge": (b"models: [{<<: {name: m}}]", "merge keys"),
    "an include": (b"models: !include /etc/passwd", "not allowed"),
    # aliases
    "an alias that holds itself": (b"models: &m [*m]", "nested too deeply, or an alias"),
    "a model that is its own input": (
        b"models: &m [{name: m, path: m.xml, inputs: *m}]",
        "nested too deeply",
    ),
    "an alias of nobody": (b"models: *nobody", "undefined alias"),
    "an alias that comes too early": (b"a: *b\nb: &b 1", "undefined alias"),
    "an anchor twice": (b"a: &a 1\nb: &a 2\nc: *a", "duplicate anchor"),
    "a billion laughs": (
        b"a0: &a0 [x]\n"
        + b"".join(b"a%d: &a%d [%b]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 12)),
        "more than 100000 values",
    ),
    # depth
    "500 lists": (b"[" * 500, "nested too deeply"),
    "500 lists that end": (b"[" * 500 + b"]" * 500, "nested too deeply"),
    "500 mappings": (b"{a: " * 500, "nested too deeply"),
    "1,000 dashes": (b"- " * 1_000, "nested too deeply"),
    "65 levels, of which each is right": (b"a: " + b"{a: " * 65 + b"1" + b"}" * 65, "nested too deeply"),
    # keys
    "a key twice": (b"server: {}\nserver: {}", "duplicate key"),
    "a key twice, in quotes": (b"server: {}\n'server': {}", "duplicate key"),
    "a key twice, by an escape": (b'server: {}\n"s\\u0065rver": {}', "duplicate key"),
    "a key that is a list": (b"? [a]\n: 1", "a key must be plain text"),
    "a key that is a mapping": (b"{a: 1}: 1", "a key must be plain text"),
    "a key that is nothing": (b"{: 1}", "not YAML"),
    "2,000 keys": (b"{" + b", ".join(b"k%d: 1" % n for n in range(2_000)) + b"}", "unknown key"),
    # encodings and characters
    "UTF-16 with its mark": ("models: []".encode("utf-16"), "not UTF-8"),
    "UTF-16 without": ("models: []".encode("utf-16-be"), "not YAML: the character '\\x00'"),
    "UTF-32": ("models: []".encode("utf-32"), "not UTF-8"),
    "Latin-1": ("models: [{name: ü}]".encode("latin-1"), "not UTF-8"),
    "UTF-7 is letters": (b"models: +AFs-", "expected a list"),
    "a zero byte": (b"models: []\x00", "the character '\\x00' is not allowed"),
    "half of a character": (b'models: [{name: "\\ud83d", path: m.xml}]', "half of a character"),
    "half of a character as a key": (b'"\\ude00": 1', "half of a character"),
    "an overlong encoding": (b"models: \xc0\xaf", "not UTF-8"),
    "a character beyond all": (b'models: "\\UFFFFFFFF"', "not YAML"),
    "the first beyond all": (b'models: "\\U00110000"', "not YAML"),
    "an escape that ends too early": (b'models: "\\u00"', "not YAML"),
    "a version of 5,000 digits": (b"%YAML " + b"9" * 5_000 + b".1\n--- {}", "not YAML"),
    "a version of the next century": (b"%YAML 9.9\n--- {}", "not YAML"),
    "two documents": (b"models: []\n---\nmodels: []", "single document"),
    "a tab as indentation": (b"models:\n\t- a", "tabs"),
    "a megabyte": (b"# " + b"x" * (1 << 20), "larger than 1 MiB"),
    "a quote that never ends": (b'models: "' + b"x" * 100_000, "not YAML"),
}


@pytest.mark.parametrize("name", TEXT)
def test_text_that_means_harm_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is constructed and nothing else is raised; the lines can be printed."""
    data, expected = TEXT[name]
    problems = problems_of(tmp_path, data)
    assert any(expected in problem for problem in problems), problems
    assert all(problem.encode().decode().startswith("x.yaml") for problem in problems)


VALUES = {
    "a path that is only a zero byte": (b'models: [{name: m, path: "\\0.xml"}]', "zero byte"),
    "a path of 5,000 characters": (b"models: [{name: m, path: %b.xml}]" % (b"a" * 5_000), "cannot be looked at"),
    "a home that is nobody's": (b"models: [{name: m, path: ~nobody-here/m.xml}]", "is no path"),
    "a device as a model": (b"models: [{name: m, path: /dev/zero}]", "no such file"),
    "a folder as a model": (b"models: [{name: m, path: .}]", "is a folder (name the file in it: "),
    "an ipc path of 107 characters": (b"server: {listen: [ipc:///%b]}" % (b"a" * 106), "too long"),
    "an ipc path of 104 bytes in 52 characters": (
        b"server: {listen: [ipc:///%b]}" % ("ü" * 52).encode(), "too long"
    ),
    "an ipc path with a zero byte": (b'server: {listen: ["ipc:///run/a\\0b"]}', "zero byte"),
    "an abstract ipc name": (b'server: {listen: ["ipc://@x"]}', "needs a path"),
    "an inproc address": (b"server: {listen: [inproc://x]}", "not an address"),
    "a port in other digits": ("server: {listen: [\'tcp://127.0.0.1:\u0665\u0665\']}".encode(), "no port"),
    "a port beyond 65535": (b"server: {listen: ['tcp://127.0.0.1:65536']}", "no port"),
    "a port that is negative": (b"server: {listen: ['tcp://127.0.0.1:-1']}", "no port"),
    "a window of 400 digits": (b"server: {window_bytes: %b}" % (b"9" * 400), "window_bytes"),
    "a window of no 64 bits": (b"server: {window_bytes: 999999999999 GB}", "more than any machine has"),
    "a heartbeat of 400 digits": (b"server: {heartbeat_s: %b}" % (b"9" * 400), "heartbeat_s"),
    "a heartbeat that is infinite": (b"server: {heartbeat_s: .inf}", "heartbeat_s"),
    "a heartbeat that is not a number": (b"server: {heartbeat_s: .nan}", "heartbeat_s"),
    "a name of two lines": (b'models: [{name: "a\\nb", path: m.xml}]', "models[0].name"),
    "a name of 201 characters": (b"models: [{name: %b, path: m.xml}]" % (b"n" * 201), "models[0].name"),
    "a function with a command": (b'models: [{name: m, function: "os:system(1)"}]', "package.module:name"),
    "a function with a line break": (b'models: [{name: m, function: "numpy:sort\\n"}]', "package.module:name"),
    "a function of a path": (b"models: [{name: m, function: ../evil:run}]", "package.module:name"),
    "both a function and its digest": (
        b"models: [{name: m, function: 'numpy:sort', sha256: '%b'}]" % (b"0" * 64), "a function is no file"
    ),
    "a shape of 20,000 dimensions": (MODEL % b"inputs: {x: {shape: '%b?'}}" % (b"?, " * 20_000), ""),
    "a count in words": (MODEL % b"batching: {max_batch: 0x}", "max_batch"),
    "a count of 300 digits": (MODEL % b"batching: {max_batch: %b}" % (b"9" * 300), "max_batch"),
    "padding that is not a number": (MODEL % b"inputs: {x: {shape: 'batch, n', pad: {n: .nan}}}", ""),
    "a column of 30 digits": (MODEL % b"outputs: {y: {rule: index_column, column: %b}}" % (b"9" * 30), ""),
    "an engine that is a list": (MODEL % b"engine: [openvino]", "unknown engine a list"),
    "an engine that is a mapping": (MODEL % b"engine: {openvino: x}", "unknown engine a mapping"),
    "a probe of more than 64 bits": (
        MODEL % b"probe: {x: {integers: [0, 9223372036854775808]}}", "narrow the range"
    ),
    "a probe as wide as all numbers": (
        MODEL % b"probe: {x: {uniform: [-1.0e+308, 1.0e+308]}}", "narrow the range"
    ),
    "a probe without end": (MODEL % b"probe: {x: {uniform: [0.0, .inf]}}", "narrow the range"),
    "a trace in a folder that is not there": (b"server: {record_trace: /nowhere/at/all}", "no such folder"),
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
