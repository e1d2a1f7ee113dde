"""Rules seen on the live model: found where there is no doubt, left to the user where there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tests.engine.detectors import PORTS, multiclass, padded, ssd

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, RuleMissing, compile_model
from shapestream_engine.probe import ProbeOptions, ProofCache, complete_rules, prove
from shapestream_engine.probing.inputs import Normal, Uniform

IMAGE = InputSpec(shape="batch:1..8, 1, height:16..64, width:16..64")
GENTLE = ProbeOptions(values={"image": Uniform(-1.0, 1.0)})
"""Scores that are far apart: MulticlassNms of OpenVINO 2026.4.1 sorts close ones beyond its memory (docs/backends.md)."""


def detector(folder: Path, build: object, **outputs: OutputSpec) -> ModelSpec:
    """A detector as a file, of which nobody says whose rows are whose."""
    path = folder / "detector.xml"
    ov.save_model(build({name: name for name in PORTS}), path)  # type: ignore[operator]  # one of the three above
    return ModelSpec(name="detector", path=path, inputs={"image": IMAGE}, outputs=outputs)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            ssd,
            {
                "selected": {"rule": "index_column", "column": 0},
                "confidence": {"rule": "index_column", "column": 0},
                "total": {"rule": "recount", "output": "selected"},
                "anchors": {"rule": "shared"},
            },
        ),
        (multiclass, {"found": {"rule": "counts", "output": "count"}}),
    ],
)
def test_the_rules_of_a_detector_are_seen(
    tmp_path: Path, build: object, expected: dict[str, dict[str, object]]
) -> None:
    """Interleaved rows by their index, a total by its recount, what is shared by not changing; and all of it is proved."""
    spec = detector(tmp_path, build)
    with pytest.raises(RuleMissing):
        compile_model(spec)
    complete, rules, _ = complete_rules(spec, GENTLE)
    assert expected == {name: dict(rule) for name, rule in rules.items()}
    report = prove(complete, compile_model(complete), GENTLE)
    assert {"proved"} == {finding.verdict for finding in report.findings}, "\n".join(report.lines())


def test_rules_that_are_stated_are_left_alone(tmp_path: Path) -> None:
    """Only what is missing is looked for."""
    spec = detector(tmp_path, padded)
    complete, rules, _ = complete_rules(spec, ProbeOptions())
    assert (spec, {}) == (complete, rules)


def test_what_finds_nothing_shows_no_rule(tmp_path: Path) -> None:
    """Where all is empty, every rule would do: the user is asked."""
    spec = detector(tmp_path, ssd)
    options = ProbeOptions(values={"image": Uniform(0.0, 0.0)})
    complete, rules, _ = complete_rules(spec, options)
    assert {} == rules, "neither the total nor the anchors changed, but they had no occasion to"
    with pytest.raises(RuleMissing, match="state the rule that divides it"):
        compile_model(complete)


def test_rows_that_are_nobodys_show_no_rule(tmp_path: Path) -> None:
    """Values found in the whole batch, without an index: nothing in them says whose they are."""
    x = op.parameter([-1, -1], np.float32, name="x")
    x.output(0).set_names({"x"})
    found = op.gather_nd(x, op.transpose(op.non_zero(op.greater(x, np.float32(0)), "i32"), [1, 0]))
    found.output(0).set_names({"found"})
    ov.save_model(ov.Model([op.result(found)], [x], "nobodys"), tmp_path / "nobodys.xml")
    spec = ModelSpec(
        name="nobodys", path=tmp_path / "nobodys.xml", inputs={"x": InputSpec(shape="batch:1..8, n:1..64")}
    )
    _, rules, why = complete_rules(spec, ProbeOptions(values={"x": Normal(0, 1)}))
    assert {} == rules
    assert why["found"].startswith(
        "tried on 24 calls of several requests: shared, index_column; with none does each request"
    )


def test_a_guess_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts read it."""
    spec = detector(tmp_path, multiclass)
    cache = ProofCache(tmp_path / "proofs")
    first = complete_rules(spec, GENTLE, cache=cache)
    monkeypatch.setattr("shapestream_engine.probe.run_child", None)
    assert first == complete_rules(spec, GENTLE, cache=cache)
