"""Detectors with every kind of output, served by a YAML alone, under names that stand nowhere in the source.

All that the server has is the IR and the YAML. Pictures of several sizes, in requests of one or more, travel at the
same time; every answer is compared with that of the same model outside of any server, run on the request alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import pytest
from tests.engine.detectors import PORTS, multiclass, padded, pictures, ssd

import shapestream
from shapestream import blocking
from shapestream_engine.backends.openvino.runtime import core

pytestmark = pytest.mark.e2e

Array = np.ndarray[Any, Any]

INPUT = '{{image}: {shape: "batch:1..32, 1, height:8..64, width:8..64"}}'
CASES: dict[str, tuple[Callable[[Mapping[str, str]], ov.Model], str]] = {
    "ssd": (
        ssd,
        """
      {selected}: {rule: index_column, column: 0}
      {confidence}: {rule: index_column}
      {total}: {rule: recount, output: {selected}}
      {anchors}: {rule: shared}
    trust: true""",
    ),
    "multiclass": (
        multiclass,
        # Other values give close scores, which MulticlassNms sorts beyond its memory (docs/backends.md).
        """
      {found}: {rule: counts, output: {count}}
    probe: {{image}: {uniform: [-1, 1]}}""",
    ),
    "padded": (
        padded,
        """
      {boxes}: {rule: padded_counts, output: {count}}
      {scores}: {rule: padded_counts, output: {count}}
      {count}: {rule: rows}""",
    ),
}


@dataclass(frozen=True)
class Detectors:
    """A running server with every detector under a random name, its ports too, and the same models at hand."""

    client: blocking.Client
    names: dict[str, str]
    ports: dict[str, dict[str, str]]
    direct: dict[str, Any]


@pytest.fixture(scope="module")
def served(module_workplace: Any) -> Iterator[Detectors]:
    """One `shapestream serve`, one YAML, two worker processes, all detectors."""
    names, ports, direct = {}, {}, {}
    text = "models:\n"
    for case, (build, outputs) in CASES.items():
        names[case] = f"m{uuid.uuid4().hex}"
        ports[case] = {port: f"p{uuid.uuid4().hex}" for port in PORTS}
        path = module_workplace.folder / f"{names[case]}.xml"
        ov.save_model(build(ports[case]), path, compress_to_fp16=False)
        direct[case] = core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        entry = f"    inputs: {INPUT}\n    outputs:{outputs}\n"
        for port, name in ports[case].items():
            entry = entry.replace(f"{{{port}}}", name)
        text += f"  - name: {names[case]}\n    path: {path.name}\n{entry}"
    text += "workers: [{count: 2, slots: 1, threads: 1}]\n"
    server = module_workplace.serve(text)
    with server.client() as client:
        yield Detectors(client, names, ports, direct)


def requests_of(case: str) -> list[Array]:
    """Pictures of three sizes, mostly one at a time, in an order that mixes them."""
    random = np.random.default_rng(len(case))
    sizes = [(16, 24), (24, 16), (32, 32)]
    return [pictures(random, 1 + number % 7 // 5, *sizes[random.integers(3)]) for number in range(60)]


def expected(case: str, image: Array, served: Detectors) -> dict[str, Array]:
    """What the model says of the request alone; tables are trimmed by hand."""
    own = served.ports[case]
    result = served.direct[case].create_infer_request().infer([image], share_outputs=False)
    arrays = {output.any_name: np.array(array) for output, array in result.items()}
    if case == "padded":
        counts = arrays[own["count"]]
        for name in (own["boxes"], own["scores"]):
            table = arrays[name][:, : counts.max()]
            for row, count in enumerate(counts):
                table[row, count:] = 0
            arrays[name] = table
    return arrays


@pytest.mark.parametrize("case", CASES)
def test_every_request_gets_its_own_detections(served: Detectors, case: str) -> None:
    """Under load, from shared calls: the same names, types, shapes and numbers as alone, down to none at all."""
    images = requests_of(case)
    requests = [{served.ports[case]["image"]: image} for image in images]
    shared, lengths = 0, set()
    with served.client.stream(served.names[case], requests, max_in_flight=60, deadline=60) as results:
        for image, result in zip(images, results, strict=True):
            assert isinstance(result, shapestream.Result)
            shared = max(shared, result.timings.batch_requests)
            alone = expected(case, image, served)
            assert alone.keys() == result.keys()
            for name, array in alone.items():
                assert (array.dtype, array.shape) == (result[name].dtype, result[name].shape)
                if array.dtype.kind == "i":
                    np.testing.assert_array_equal(result[name], array)
                else:
                    np.testing.assert_allclose(result[name], array, rtol=1e-5, atol=1e-6)
            lengths.add(tuple(array.shape for array in alone.values()))
    assert shared > 1, "no request shared a call"
    assert len(lengths) > 3, "what was found hardly differed"


def test_rules_are_part_of_what_a_client_may_ask_for(served: Detectors) -> None:
    """The signature that clients see says by which rule each output is theirs."""
    own = served.ports["ssd"]
    rules = {port.name: port.rule.NAME for port in served.client.signature(served.names["ssd"]).outputs}
    assert {
        own["selected"]: "index_column",
        own["confidence"]: "index_column",
        own["total"]: "recount",
        own["boxes"]: "rows",
        own["scores"]: "rows",
        own["anchors"]: "shared",
    } == rules


BAD = """\
models:
  - name: liar
    function: lying:counted
    inputs: {x: {shape: "batch:1..16, 2", element_type: i64}}
    outputs:
      number: {shape: batch, element_type: i64, rule: rows}
      found: {shape: "?", element_type: i64, rule: counts, output: number}
    batching: {max_delay_ms: 300}
workers: [{count: 1, slots: 1}]
"""


def test_a_request_whose_counts_do_not_sum_up_fails_alone(workplace: Any) -> None:
    """It is found among its batch-mates by halving, which get their answers; then the model goes on as before."""
    requests = [{"x": np.array([[number % 4, 0]])} for number in range(12)]
    requests[5]["x"][0, 1] = 1
    with workplace.serve(BAD).client() as client:
        for _ in range(2):
            with client.stream("liar", requests, max_in_flight=12, deadline=60, on_error="yield") as results:
                answers = list(results)
            for number, answer in enumerate(answers):
                if number == 5:
                    assert isinstance(answer.error, shapestream.ModelError)
                    assert "'found' has 1 rows, and 'number'" in str(answer.error)
                else:
                    assert [number % 4] * (number % 4) == answer["found"].tolist()
