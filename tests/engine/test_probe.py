"""The proof on models that keep requests apart, and on models that break in every way that is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, SignatureError, compile_model
from shapestream_engine.probe import Finding, ProbeOptions, ProbeReport, ProofCache, Watch, prove
from shapestream_engine.probing import examination, model_calls
from shapestream_engine.probing.evidence import LEAST_REQUESTS
from shapestream_engine.probing.inputs import Integers, Normal, Uniform
from shapestream_engine.probing.model_calls import seconds_of_work
from shapestream_engine.strategy import parse_strategy

IMPORTABLE = Path(__file__).parent / "importable"
ROWS = {"x": InputSpec(shape="batch:1..8, n:1..64", element_type="f32")}
SAME = OutputSpec(shape="batch, n", element_type="f32")
MASKED = {
    "ids": InputSpec(shape="batch:1..8, seq:1..64", element_type="i64", pad={"seq": 0}),
    "mask": InputSpec(shape="batch, seq", element_type="i64", mask_of="ids"),
}
PEAKS = {
    "peaks": OutputSpec(shape="?, 3", element_type="i64", rule={"rule": "index_column", "column": 0}),
    "values": OutputSpec(shape="?", element_type="f32", rule={"rule": "with", "output": "peaks"}),
}
IMAGE = {"image": InputSpec(shape="batch:1..8, h:4..64, w:4..64", element_type="f32")}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(IMPORTABLE))


def spec_of(function: str, inputs: dict[str, InputSpec] = ROWS, **outputs: OutputSpec) -> ModelSpec:
    """One of the functions of `breakable`."""
    return ModelSpec(
        name=function, function=f"breakable:{function}", inputs=inputs, outputs=outputs or {"y": SAME}
    )


def prove_spec(spec: ModelSpec, cache: ProofCache | None = None, **options: Any) -> ProbeReport:
    """The report of a proof."""
    return prove(spec, compile_model(spec), ProbeOptions(**options), cache=cache)


def masked(function: str, columns: int = 1, **options: Any) -> ProbeReport:
    """The report of a function over `ids` and a mask."""
    output = OutputSpec(shape=f"batch, {columns}", element_type="f32")
    return prove_spec(spec_of(function, MASKED, y=output), values={"ids": Integers(0, 99)}, **options)


def verdicts(report: ProbeReport) -> dict[str, str]:
    """Per treatment and output the verdict."""
    return {f"{each.treatment}: {each.output}": each.verdict for each in report.findings}


def refuted(report: ProbeReport) -> Finding:
    """The only finding that is refuted."""
    (finding,) = report.of("refuted")
    return finding


def test_a_model_of_one_fixed_shape_has_nothing_to_prove() -> None:
    """It has no dynamic dimension, so no request shares a call."""
    fixed = {"x": InputSpec(shape="2, 3", element_type="f32")}
    assert (
        ()
        == prove_spec(spec_of("batch_norm", fixed, y=OutputSpec(shape="2, 3", element_type="f32"))).findings
    )


def test_attention_that_heeds_its_mask_is_proved() -> None:
    """Batching and padding, both on many cases, and with rounding errors that are far below what is allowed."""
    report = masked("attend", columns=4)
    assert {"batching: y": "proved", "padding of seq: y": "proved"} == verdicts(report)
    assert all(finding.cases >= 20 for finding in report.findings)
    assert {"y": "batch, 4"} == report.follows
    assert "checked on" in str(report.findings[0])


@pytest.mark.parametrize(
    ("function", "finding", "words"),
    [
        ("partly_banned", "batching: y proved", "checked on"),
        ("batch_norm", "batching: y refuted", "batch 2"),
        ("slightly", "batching: y refuted", "batch"),
        ("whispering", "batching: y refuted", "batch"),
        ("spoilt_by_nan", "batching: y refuted", "nan where it was .* not a number values"),
        ("fail_in_company", "batching: None refuted", "one at a time, please"),
        ("abort_in_company", "batching: None refuted", "the process was ended with status 7"),
        ("abort_always", "batching: None unjudged", "SIGABRT"),
        ("fail_always", "batching: None unjudged", "none of these is an image"),
        ("at_random", "batching: None unjudged", "output 'y' differs when the same request is repeated"),
        ("constant", "batching: y unproved", "never changed"),
        ("not_finite", "batching: y unproved", "not finite"),
        ("time_stamped", "batching: y unjudged", "less than rounding is allowed to change them"),
    ],
    ids=[
        "scores of minus infinity hide no others",
        "normalising over the batch",
        "a hundredth of a neighbour is too much",
        "masked positions of an endless axis allow nothing at others",
        "a neighbour's NaN must not spread, which only a hostile one shows",
        "failing in company only",
        "ending the process in company, without a signal",
        "a model that dies of everything may be given wrong inputs",
        "made-up inputs may be none for this model",
        "results that do not repeat",
        "what is the same for every input would hide any mixing",
        "so would what is no number",
        "equality within more than results differ would hold between any two requests",
    ],
)
def test_what_a_model_does_along_its_batch_is_found(function: str, finding: str, words: str) -> None:
    """One finding, with the reason or the case in words; what ended a process may not happen again."""
    report = prove_spec(spec_of(function))
    (found,) = report.findings
    assert finding == f"{found.treatment}: {found.output} {found.verdict}"
    assert re.search(words, str(found))
    assert not (report.conclusive and "the process was" in str(found))


def test_a_proof_tells_how_far_results_may_lie_apart(tmp_path: Path) -> None:
    """Also when it is recalled; not of an output that told nothing, nor of a model that does not repeat its results."""
    cache = ProofCache(tmp_path)
    made, recalled = (prove_spec(spec_of("partly_banned"), cache) for _ in range(2))
    assert made.tolerances == recalled.tolerances
    assert 1e-3 == made.tolerances["y"]["of_spread"]
    assert {} == prove_spec(spec_of("at_random")).tolerances
    assert {} == prove_spec(spec_of("constant")).tolerances


def test_ties_refute_nothing() -> None:
    """Where all values are equal, rounding decides which is the largest; padding that changes it is left off."""
    x = InputSpec(shape="batch:1..16, n:1..64", element_type="f32", pad={"n": -100.0})
    spec = spec_of("best_position", {"x": x}, y=OutputSpec(shape="batch", element_type="i64"))
    report = prove_spec(spec, values={"x": Normal(0, 1)})
    assert {"batching: y": "proved", "padding of n: y": "unjudged"} == verdicts(report)
    assert "where rounding decides" in report.of("unjudged")[0].why


def test_a_constant_column_hides_no_others() -> None:
    """Also where the mean of equal numbers is not the same number to the bit."""
    x = InputSpec(shape="batch:1..8, 12", element_type="f64")
    y = OutputSpec(shape="batch, 12", element_type="f64")
    report = prove_spec(spec_of("beside_a_constant", {"x": x}, y=y))
    assert {"batching: y": "proved"} == verdicts(report)


def test_a_detector_whose_rows_carry_their_index_is_proved() -> None:
    """Outputs in a number that depends on the data are compared request by request, indices rewritten."""
    report = prove_spec(spec_of("detect", IMAGE, **PEAKS))
    assert {"batching: peaks": "proved", "batching: values": "proved"} == verdicts(report)
    assert {"peaks": "?, 3", "values": "?"} == report.follows


def test_pooling_that_ignores_the_mask_is_refuted_under_padding_only() -> None:
    """Batches of one length are right, and stay allowed."""
    report = masked("mean_of_all")
    assert {"batching: y": "proved", "padding of seq: y": "refuted"} == verdicts(report)
    assert "seq" in refuted(report).case


def test_aborting_on_padding_is_a_verdict() -> None:
    """The process that dies is not ours; what was proved before it died stays proved."""
    report = masked("abort_on_padding")
    assert {"batching: y": "proved", "padding of seq: None": "refuted"} == verdicts(report)
    finding = refuted(report)
    assert "SIGABRT" in finding.why
    assert "seq" in finding.case
    assert not report.conclusive


def test_hanging_on_padding_is_a_verdict() -> None:
    """After the time that one call may take, the process is ended."""
    report = masked("hang_on_padding", hang_s=0.8)
    assert {"batching: y": "proved", "padding of seq: None": "refuted"} == verdicts(report)
    assert "no answer within 0.8 s" == refuted(report).why


def test_detecting_nothing_on_the_probes_inputs_is_unproved() -> None:
    """An empty result is an ordinary one, and no evidence."""
    report = prove_spec(spec_of("detect", IMAGE, **PEAKS), values={"image": Uniform(0.0, 0.5)})
    assert {"batching: peaks": "unproved", "batching: values": "unproved"} == verdicts(report)
    assert "empty in all of" in report.findings[0].why


def test_rows_ascribed_to_the_wrong_request_are_refuted() -> None:
    """A rule that follows the wrong column hands one caller's detections to another."""
    assert {"peaks", "values"} == {
        each.output for each in prove_spec(spec_of("detect_mixed_up", IMAGE, **PEAKS)).of("refuted")
    }


@pytest.mark.parametrize(("function", "verdict"), [("anchored", "proved"), ("falsely_anchored", "refuted")])
def test_what_is_shared_must_not_change_with_the_company(function: str, verdict: str) -> None:
    """A shared output may be constant, and no more."""
    anchors = OutputSpec(shape="3", element_type="f32", rule={"rule": "shared"})
    report = prove_spec(spec_of(function, y=SAME, anchors=anchors))
    assert verdict == verdicts(report)["batching: anchors"]
    assert "proved" == verdicts(report)["batching: y"]


def test_inputs_and_sizes_are_looked_for() -> None:
    """Multiples of 8 and numbers in 0..1 are found among the defaults."""
    report = prove_spec(spec_of("limited"))
    assert {"batching: y": "proved"} == verdicts(report)
    assert {"x": "uniform 0..1"} == report.inputs
    assert all(int(words.rpartition(" ")[2]) % 8 == 0 for words in report.sizes)


@pytest.mark.parametrize(
    ("function", "inputs", "output", "tried"),
    [
        ("mean_of_all", MASKED, "f32", "integers 0..1, contents 0..999"),
        ("largest_of_small_ids", MASKED, "i64", "integers 0..1"),
        ("partly_banned", ROWS, "f32", "normal 0 +- 1, contents -1000..1000"),
    ],
)
def test_the_report_says_what_range_of_values_was_tried(
    function: str, inputs: dict[str, InputSpec], output: str, tried: str
) -> None:
    """Where nothing is declared: negative ids, and those beyond 999, are never tried."""
    shape = "batch, n" if inputs is ROWS else "batch, 1"
    report = prove_spec(spec_of(function, inputs, y=OutputSpec(shape=shape, element_type=output)))
    assert tried == report.inputs[next(iter(inputs))]


def test_an_id_that_ends_the_process_leaves_the_others_tried(tmp_path: Path) -> None:
    """The largest id is looked for before all contents, and an engine may crash on one that is in no table. What is proved
    all the same is kept."""
    output = OutputSpec(shape="batch, 1", element_type="i64")
    cache = ProofCache(tmp_path)
    made, recalled = (prove_spec(spec_of("largest_of_small_ids", MASKED, y=output), cache) for _ in range(2))
    assert {"batching: y": "proved", "padding of seq: y": "proved"} == verdicts(made)
    assert any("ended with status 7" in note for note in made.notes)
    assert recalled.from_cache
    assert made == recalled


def test_samples_are_cut_and_repeated_to_size(tmp_path: Path) -> None:
    """A single real picture is enough where noise is not."""
    pictures = np.tile(np.linspace(0, 1, 100, dtype=np.float32).reshape(10, 10), (6, 1, 1))
    np.savez(tmp_path / "real.npz", image=pictures * np.arange(1, 7).reshape(-1, 1, 1))
    report = prove_spec(
        spec_of("detect", IMAGE, **PEAKS),
        samples={"*": tmp_path / "real.npz"},
        values={"image": Normal(0, 0.01)},
    )
    assert {"image": "normal 0 +- 0.01"} == report.inputs, "what is said of one input goes before all"
    report = prove_spec(spec_of("detect", IMAGE, **PEAKS), samples={"image": tmp_path / "real.npz"})
    assert ({"image": "6 samples"}, ("batch 1, h 10, w 10",)) == (report.inputs, report.sizes)
    assert {"proved"} == set(verdicts(report).values())


def test_nothing_is_tried_where_nothing_is_put_together() -> None:
    """With one row per call there is neither a neighbour nor padding."""
    assert () == prove_spec(spec_of("abort_always"), max_batch=1).findings


def test_a_strategy_is_proved_as_it_serves() -> None:
    """Filling up, dividing and rejoining: through a slot, against the requests alone in their own shapes."""
    strategy = parse_strategy({"strategy": "partitioned", "batch": [2, 4], "seq": [16, 64]})
    output = OutputSpec(shape="batch, 4", element_type="f32")
    good = spec_of("attend", MASKED, y=output)
    report = prove_spec(
        ModelSpec(name="m", function=good.function, inputs=MASKED, outputs=good.outputs, strategy=strategy),
        values={"ids": Integers(0, 99)},
    )
    assert {
        "batching: y": "proved",
        "padding of seq: y": "proved",
        "strategy partitioned: y": "proved",
    } == verdicts(report)


def test_a_strategy_that_pads_what_must_not_be_padded_is_refuted() -> None:
    """Also where requests never meet one that is longer: they are padded all the same."""
    strategy = parse_strategy({"strategy": "padded", "batch": 4, "seq": 64})
    output = OutputSpec(shape="batch, 1", element_type="f32")
    report = prove_spec(
        ModelSpec(
            name="m",
            function="breakable:mean_of_all",
            inputs=MASKED,
            outputs={"y": output},
            strategy=strategy,
        ),
        values={"ids": Integers(0, 99)},
    )
    assert "refuted" == verdicts(report)["strategy padded: y"]


def test_openvino_on_a_file(tmp_path: Path) -> None:
    """A real engine in the child: masked and unmasked mean pooling of one graph."""
    x = op.parameter([-1, -1, 4], np.float32, name="x")
    x.output(0).set_names({"x"})
    mask = op.parameter([-1, -1], np.float32, name="mask")
    mask.output(0).set_names({"mask"})
    column = op.unsqueeze(mask, [2])
    heeding = op.divide(op.reduce_sum(op.multiply(x, column), [1]), op.reduce_sum(column, [1]))
    ignoring = op.reduce_mean(x, [1])
    for node, name in ((heeding, "heeding"), (ignoring, "ignoring")):
        node.output(0).set_names({name})
    path = tmp_path / "pool.xml"
    ov.save_model(ov.Model([op.result(heeding), op.result(ignoring)], [x, mask], "pool"), path)
    spec = ModelSpec(
        name="pool",
        path=path,
        inputs={
            "x": InputSpec(shape="batch, seq, 4", pad={"seq": 0}),
            "mask": InputSpec(shape="batch, seq", mask_of="x"),
        },
    )
    report = prove_spec(spec)
    assert {
        "batching: heeding": "proved",
        "batching: ignoring": "proved",
        "padding of seq: heeding": "proved",
        "padding of seq: ignoring": "refuted",
    } == verdicts(report)
    assert {"heeding": "batch, 4", "ignoring": "batch, 4"} == report.follows


def test_a_model_in_memory_cannot_be_tried_elsewhere() -> None:
    """It would have to be handed to another process."""
    spec = ModelSpec(name="m", model=np.sort, inputs={"a": ROWS["x"]}, outputs={"y": SAME})
    with pytest.raises(SignatureError, match="in memory"):
        prove(spec, compile_model(spec), ProbeOptions())


def test_an_input_that_there_is_not_is_an_error() -> None:
    """A mistyped name in `probe` would otherwise be of no effect."""
    with pytest.raises(SignatureError, match="no input z; the model has x"):
        prove_spec(spec_of("constant"), values={"z": Integers(0, 1)})


@pytest.mark.parametrize(
    ("function", "columns"),
    [("banned_class_mixed", "4"), ("time_stamped_mixed", "2"), ("blanked_mixed", "n")],
)
def test_a_large_value_beside_them_hides_no_mixed_scores(function: str, columns: str) -> None:
    """A banned class, a time stamp, or a blanked position: what is allowed belongs to each by itself."""
    output = OutputSpec(shape=f"batch, {columns}", element_type="f32")
    finding = refuted(prove_spec(spec_of(function, y=output)))
    assert finding.allowed is not None
    assert finding.allowed < 1


def test_a_banned_class_is_no_obstacle() -> None:
    """A model that keeps rows apart is proved, with what is allowed in proportion to its scores."""
    report = prove_spec(spec_of("banned_class", y=OutputSpec(shape="batch, 4", element_type="f32")))
    assert {"batching: y": "proved"} == verdicts(report)


LARGE = {"x": InputSpec(shape="batch:1..64, n:1..64", element_type="f32")}


@pytest.mark.parametrize("rows", [9, 31, 64, None])
def test_the_largest_batch_is_tried(rows: int | None) -> None:
    """A model may keep 8 rows apart and mix 9; `max_batch` says how many may come, or the bound of `batch`."""
    report = prove_spec(spec_of("mixes_from_nine", LARGE), max_batch=rows)
    assert {"batching: y": "refuted"} == verdicts(report)
    assert "9 requests, batch 9" in refuted(report).case


def test_more_rows_than_are_ever_served_are_not_tried() -> None:
    """With 8 rows at most the same model is right, and the report says how far it was checked."""
    report = prove_spec(spec_of("mixes_from_nine", LARGE), max_batch=8)
    assert {"batching: y": "proved"} == verdicts(report)
    assert 8 == report.findings[0].rows
    assert "cases of up to 8 rows, none against, 0 not judged" in str(report.findings[0])


def test_the_sizes_that_a_calibration_runs_are_tried() -> None:
    """A model may keep short rows apart and mix long ones."""
    report = prove_spec(spec_of("mixes_long_ones", LARGE), max_batch=8, budget_s=600.0)
    assert {"batching: y": "refuted"} == verdicts(report)


def test_the_largest_batch_of_a_strategy_is_tried() -> None:
    """Calls are filled up to sizes of batch that no request asked for."""
    spec = spec_of("mixes_from_nine", LARGE)
    strategy = parse_strategy({"strategy": "bucketed", "batch": [8, 16]})
    report = prove_spec(replace(spec, strategy=strategy), max_batch=2)
    assert "refuted" == verdicts(report)["strategy bucketed: y"]


def test_the_largest_padded_batch_is_tried() -> None:
    """Requests of two lengths in one call, as many as there may be."""
    inputs = {
        "ids": InputSpec(shape="batch:1..64, seq:1..64", element_type="i64", pad={"seq": 0}),
        "mask": InputSpec(shape="batch, seq", element_type="i64", mask_of="ids"),
    }
    output = OutputSpec(shape="batch, 1", element_type="f32")
    report = prove_spec(spec_of("mean_of_all_from_nine", inputs, y=output), values={"ids": Integers(0, 99)})
    assert {"batching: y": "proved", "padding of seq: y": "refuted"} == verdicts(report)
    assert "batch 16" in refuted(report).case


def test_calls_that_take_too_long_are_not_tried_and_that_is_told() -> None:
    """What was tried is proved, every number of rows up to the one that is named; larger calls must not be served."""
    report = prove_spec(spec_of("slow", LARGE), budget_s=5.0, max_batch=64)
    finding = report.findings[0]
    assert ("proved", True) == (finding.verdict, finding.is_short), str(finding)
    assert 1 < finding.rows < 64
    assert "their share of the time is over" == finding.why
    assert f"; not tried beyond {finding.rows} rows: their share" in str(finding)
    assert (False, True) == (report.conclusive, report.ran_short)


@pytest.mark.parametrize("rows", [51, 71, 72, 73])
def test_rows_at_which_kernels_change_are_tried(rows: int) -> None:
    """Engines divide rows among threads, here 72; ONNX Runtime's trees change at 51."""

    def wrong_at_one_number(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x[::-1] if len(x) == rows else x

    x = InputSpec(shape="batch:1..256, 4", element_type="f32")
    y = OutputSpec(shape="batch, 4", element_type="f32")
    spec = ModelSpec(name="m", model=wrong_at_one_number, inputs={"x": x}, outputs={"y": y})
    findings: list[Finding] = []
    examination.examine(compile_model(spec), ProbeOptions(), findings.extend, threads=72)
    (finding,) = findings
    assert "refuted" == finding.verdict
    assert f"batch {rows})" in str(finding)


class Clock:
    """A clock for the budget: it stands unless a model moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_s = self.wall_s = 0.0
        monkeypatch.setattr(model_calls, "process_time", lambda: self.cpu_s)
        monkeypatch.setattr(model_calls, "monotonic", lambda: self.wall_s)
        monkeypatch.setattr(model_calls, "thread_times", lambda: (0, 0))  # as where the system does not tell

    def prove(self, *, cpu_s: float, wall_s: float, threads: int) -> Finding:
        """Prove a model of which each call takes so long."""

        def slow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            self.cpu_s += cpu_s
            self.wall_s += wall_s
            return x

        spec = ModelSpec(name="slow", model=slow, inputs={"x": ROWS["x"]}, outputs={"y": SAME})
        findings: list[Finding] = []
        options = ProbeOptions(budget_s=30.0)
        examination.examine(compile_model(spec), options, findings.extend, threads=threads)
        return findings[0]


@pytest.mark.parametrize(
    ("cpu_s", "wall_s", "threads", "ends_at"),
    [(0.25, 0.0, 1, (30.0, 0.0)), (0.25, 0.5, 2, (60.0, 120.0)), (0.0, 1.0, 1, (0.0, 120.0))],
    ids=["CPU seconds of one thread", "divided by the threads", "a sleeping model ends at the wall"],
)
def test_the_budget_is_seconds_of_computation(
    monkeypatch: pytest.MonkeyPatch, cpu_s: float, wall_s: float, threads: int, ends_at: tuple[float, float]
) -> None:
    """They begin with the first request, and other load on the machine is none of them. One call may begin late."""
    clock = Clock(monkeypatch)
    assert "proved" == clock.prove(cpu_s=cpu_s, wall_s=wall_s, threads=threads).verdict
    assert ends_at[0] <= clock.cpu_s <= ends_at[0] + cpu_s
    assert ends_at[1] <= clock.wall_s <= ends_at[1] + wall_s


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "expected"),
    [
        (10.0, 0.0, 10.0),
        (40.0, 0.0, 10.0),
        (5.0, 5.0, 5.0),
        (10.0, 30.0, 2.5),
        (0.4, 0.0, 2.5),
        (0.0, 0.0, 2.5),
    ],
    ids=["one thread", "four threads", "half the time taken", "a third taken of four", "asleep", "unknown"],
)
def test_a_second_of_work_is_one_without_other_programs(
    ran_s: float, waited_s: float, expected: float
) -> None:
    """Of ten seconds: however many threads there are, waiting for a CPU is no work, and a quarter always counts."""
    assert expected == seconds_of_work(cpu_s=0.0, wall_s=10.0, ran_s=ran_s, waited_s=waited_s)
    assert 9.0 == seconds_of_work(cpu_s=9.0, wall_s=10.0, ran_s=ran_s, waited_s=9 * ran_s)


def test_a_watch_hears_of_each_part_of_a_proof_and_of_its_waiting() -> None:
    """What the children say reaches whoever waits, inside the context that it gave."""
    inside, heard = [0], set()

    @contextmanager
    def waiting() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def told(phase: str, case: str) -> None:
        heard.add((phase, inside[0]))

    spec = spec_of("beside_a_constant", ROWS)
    report = prove(
        spec, compile_model(spec), ProbeOptions(budget_s=2.0), watch=Watch(told=told, waiting=waiting)
    )
    assert {"proved"} == {finding.verdict for finding in report.findings}
    assert {("compile", 1), ("alone/0", 1), ("batching", 1)} <= heard
    assert [0] == inside


def test_too_few_requests_prove_nothing_and_the_budget_waits_for_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of 1 s: enough requests take longer than the budget. At 10 s the wall ends it, and nothing is proved."""
    clock = Clock(monkeypatch)
    slow = clock.prove(cpu_s=1.0, wall_s=1.0, threads=1)
    assert ("proved", True) == (slow.verdict, slow.requests >= LEAST_REQUESTS)
    assert 30.0 < clock.cpu_s <= 121.0
    slower = clock.prove(cpu_s=10.0, wall_s=10.0, threads=1)
    assert "unjudged" == slower.verdict
    assert "different requests would have shown anything, of 32" in slower.why
    assert slower.why.endswith("a call takes 10 s, and the time was over")
    assert 10.0 == slower.call_s


def test_slow_calls_leave_time_for_enough_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1.5 s there are 80 calls: fewer numbers of rows are tried, and calls are limited to those."""
    found = Clock(monkeypatch).prove(cpu_s=0.0, wall_s=1.5, threads=1)
    assert ("proved", None) == (found.verdict, found.call_s)
    assert found.requests >= LEAST_REQUESTS
    assert found.rows >= 4


def test_calls_that_take_much_memory_are_not_tried_and_that_is_told() -> None:
    """A million rows of a kilobyte fit no bound."""
    inputs = {"x": InputSpec(shape="batch, 262144", element_type="f32")}
    output = OutputSpec(shape="batch, 1", element_type="f32")
    report = prove_spec(spec_of("first_column", inputs, y=output), max_batch=4096)
    finding = report.findings[0]
    assert ("proved", True, 256) == (finding.verdict, finding.is_short, finding.rows)
    assert "their inputs take more than 256 MiB" in finding.why


@pytest.mark.thorough
def test_any_number_of_padded_dimensions_is_tried() -> None:
    """Each by itself and all at once, in calls as large as are served."""
    inputs = {
        f"x{number}": InputSpec(
            shape=f"batch:1..16, n{number}:1..64", element_type="f32", pad={f"n{number}": 0}
        )
        for number in range(12)
    }
    report = prove_spec(spec_of("sums", inputs, y=OutputSpec(shape="batch", element_type="f32")))
    assert {"proved"} == set(verdicts(report).values())
    assert [16] * 14 == [finding.rows for finding in report.findings]
