"""Other people's models, each served by its name and path alone: answers are those of the engine alone.

`make zoo` unpacks wheels into build/zoo, and exports models of scikit-learn and LightGBM; `make zoo-made` needs no wheel.
One server has all of them, in real processes. 200 requests of random realistic sizes go to each model through the SDK, HTTP
and gRPC, and each answer is compared with the engine's for that request alone. Then the rate is measured, and printed beside
the engine's. The table of docs/models.md has what came of it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import module_workplace as module_workplace
from tests.zoo.made import WRITERS
from tests.zoo.models import MADE, WHEELS, Array, Inputs
from tests.zoo.ways import WAYS, engine_alone

from shapestream import blocking

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.zoo]

REQUESTS = 200
PATIENCE_S = 3600.0
"""Proofs and calibrations of all models on a busy machine."""
CLOSE = 1e-3
"""Difference of two answers, relative to the largest number of an answer: what docs/safety.md allows, where results spread
as widely as that number. Another row's answer differs by more than a tenth."""
AT_ONCE = 64
"""Requests in flight where the rate is measured."""
ROUNDS = 3
ROUND_S = 0.5
"""Seconds of the engine alone in a round, about."""
ZOO = {**MADE, **WHEELS}


@pytest.fixture(scope="module")
def served(request: Any, module_workplace: Any) -> Iterator[Any]:
    """A server of all models that are asked for, with HTTP and gRPC."""
    names = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    for name, write in WRITERS.items():
        if name in names:
            MADE[name].path.parent.mkdir(parents=True, exist_ok=True)
            write(MADE[name].path)
    lines = [f"- {{name: {name}, path: {ZOO[name].path}}}\n" for name in names if ZOO[name].path.exists()]
    ports = 'server: {listen: [ipc://s.sock], http: "127.0.0.1:0", grpc: "127.0.0.1:0"}\n'
    server = module_workplace.serve(f"{ports}models:\n{''.join(lines)}")
    server.wait_for("workers ready", patience_s=PATIENCE_S)
    server.wait_for("gateways ready")
    yield server
    server.send(signal.SIGTERM)
    assert 0 == server.wait()


def apart(expected: Array, got: Array) -> float:
    """Return the largest difference, relative to the largest number of the expected answer; whole numbers must be equal."""
    assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
    if expected.dtype.kind != "f":
        assert np.array_equal(expected, got)
        return 0.0
    largest = max(float(np.abs(expected).max(initial=0.0)), 1e-3)
    return float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max(initial=0.0)) / largest


@pytest.mark.parametrize("name", ZOO, ids=[f"{'made' if name in MADE else 'wheel'}-{name}" for name in ZOO])
def test_a_model_is_served_by_name_and_path_alone(name: str, served: Any) -> None:
    """Whatever shares a call, and whichever way it comes, each request gets what the engine gives it alone."""
    kept = ZOO[name]
    if not kept.path.exists():
        pytest.skip("make zoo unpacks the wheels, make build/exported exports the others")
    (compiled,) = [event for event in served.events("model compiled") if event["model"] == name]
    alone = engine_alone(compiled["engine"], kept, compiled["properties"])
    random = np.random.default_rng(11)
    requests = [kept.request(random) for _ in range(REQUESTS)]
    expected = [{port: np.array(array) for port, array in alone(request).items()} for request in requests]
    worst = 0.0
    batches = []
    for ask in WAYS.values():
        before = batches_of(served)
        answers = ask(served, name, requests)
        batches.append(batches_of(served) - before)
        assert len(expected) == len(answers)
        for wanted, got in zip(expected, answers, strict=True):
            assert wanted.keys() == got.keys()
            worst = max(worst, *(apart(wanted[port], got[port]) for port in wanted))
    ratio, call_s = rates(served, name, alone, requests)
    print(
        f"\n| {name} | `{compiled['engine']}` | {batches[0]} | {worst:.1e} | {call_s * 1e3:.1f} ms | {ratio:.2f} |",
        flush=True,
    )
    assert worst < CLOSE
    assert kept.shares == (batches[0] < REQUESTS)


def batches_of(served: Any) -> int:
    """Count the batches so far."""
    with blocking.connect(served.address, connect_timeout=60) as client:
        return int(client.statistics()["batches"])


def rates(served: Any, name: str, alone: Any, requests: list[Inputs]) -> tuple[float, float]:
    """Return the server's rate with 64 requests in flight / that of the engine one at a time, and the seconds of a call.

    Both take turns on the same CPUs; the client's share of them counts against the server.
    """
    began = perf_counter()
    for request in requests:
        alone(request)
    call_s = (perf_counter() - began) / len(requests)
    count = max(AT_ONCE, round(ROUND_S / call_s))
    many = [requests[number % len(requests)] for number in range(count)]
    ratios = []
    with blocking.connect(served.address, connect_timeout=60) as client:
        for _ in range(ROUNDS):
            began = perf_counter()
            for request in many:
                alone(request)
            alone_s = perf_counter() - began
            began = perf_counter()
            with client.stream(name, many, max_in_flight=AT_ONCE) as results:
                answered = sum(1 for _ in results)
            ratios.append(alone_s / (perf_counter() - began))
            assert len(many) == answered
    return median(ratios), call_s
