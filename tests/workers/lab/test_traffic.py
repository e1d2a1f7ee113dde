"""Made-up traffic has the rates and sizes that were asked for, and the same seed gives the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from tests.workers.lab.worlds import write_trace

from shapestream.errors import ConfigurationError
from shapestream.telemetry.trace import TraceRequest, header_line
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_workers.lab.traffic import (
    Recorded,
    Traffic,
    parse_arrivals,
    parse_distribution,
    parse_sizes,
)
from shapestream_workers.lab.true_cost import FormulaCost, TableCost, parse_formula


def made(
    arrivals: str = "poisson", rate: float = 100.0, requests: int = 20_000, seed: int = 0
) -> list[TraceRequest]:
    """Traffic of the usual lengths."""
    models = [parse_sizes("seq=lognormal:24,0.9,4..256")]
    return list(
        Traffic(models=models, rate=rate, burst=parse_arrivals(arrivals), requests=requests, seed=seed)
    )


@pytest.mark.parametrize("kind", ["poisson", "constant", "bursts:7"])
def test_arrivals_have_their_rate(kind: str) -> None:
    """In the long run, whatever their rhythm; in order of time."""
    times = [request.at_s for request in made(kind)]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(100.0, rel=0.05)


def test_bursts_come_together() -> None:
    """Seven at one moment, across the generator's own chunks, too."""
    times = [request.at_s for request in made("bursts:7", requests=7 * 3000)]
    assert {7} == set(np.unique(times, return_counts=True)[1].tolist())


def test_lengths_have_their_median_and_bounds() -> None:
    """And one row each unless something else is said."""
    sizes = np.array([request.sizes for request in made()])
    assert {1} == set(sizes[:, 0].tolist())
    assert (4, 256) == (sizes[:, 1].min(), sizes[:, 1].max())
    assert 24 == pytest.approx(float(np.median(sizes[:, 1])), abs=1)


def test_several_models_get_their_shares() -> None:
    """By weight; every request has its own model's dimensions."""
    models = [parse_sizes("a*3/seq=8"), parse_sizes("b/batch=choice:1,2;height=uniform:2..9;width=5")]
    requests = list(Traffic(models=models, rate=1.0, requests=8000, clients=4))
    of_a = [request for request in requests if request.model == 0]
    assert 6000 == pytest.approx(len(of_a), rel=0.05)
    assert {(1, 8)} == {request.sizes for request in of_a}
    assert {3} == {len(request.sizes) for request in requests if request.model == 1}
    assert {0, 1, 2, 3} == {request.client for request in requests}


def trace(path: Path) -> Path:
    """Three requests of two models within two seconds."""
    requests = [
        TraceRequest(0.0, 0, 0, (1, 9)),
        TraceRequest(1.0, 1, 0, (7,)),
        TraceRequest(2.0, 0, 1, (2, 5)),
    ]
    return write_trace(path, requests, {"m": ("batch", "seq"), "n": ("batch",)})


def test_a_trace_can_be_played_faster(tmp_path: Path) -> None:
    """Stretched to another mean rate; its rhythm stays."""
    path = trace(tmp_path / "t")
    assert [0.0, 1.0, 2.0] == [request.at_s for request in Recorded(path=path)]
    faster = Recorded(path=path, rate=30.0)
    assert [0.0, 0.05, 0.1] == pytest.approx([request.at_s for request in faster])
    assert 1 == len(list(Recorded(path=path, requests=1)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", {8}),
        ("constant:8", {8}),
        ("uniform:2..5", {2, 3, 4, 5}),
        ("choice:1,2,2", {1, 2}),
        ("lognormal:5,0.9,4..6", {4, 5, 6}),
    ],
)
def test_distributions_are_read(text: str, expected: set[int]) -> None:
    """As the command line writes them."""
    assert expected == set(parse_distribution(text)(np.random.default_rng(0), 100).tolist())


def test_what_came_all_at_once_is_not_stretched(tmp_path: Path) -> None:
    """A rate of nearly nothing would make times of it that are no numbers, and a simulation that never ends."""
    path = tmp_path / "t.jsonl"
    header = header_line({"m": ("batch", "seq")})
    path.write_text(f"{header}[0,0,0,[1,2],null,0]\n[1e-320,0,0,[1,2],null,0]\n")
    assert [0, 1e-320] == [request.at_s for request in Recorded(path=path, rate=5.0)]


@pytest.mark.parametrize(
    ("parse", "words", "texts"),
    [
        (
            parse_distribution,
            "expected lognormal",
            ["", "0", "x", "uniform:9..2", "uniform:2", "lognormal:24,0.9", "lognormal:0,1,1..2", "normal:1", "choice:",
             "lognormal:nan,1,1..2", "lognormal:9,nan,1..2", "choice:99999999999999999999",
             "uniform:1..99999999999999999999"],
        ),
        (parse_sizes, "sizes", ["seq", "seq=8;seq=9", "m*0/seq=8", "m*x/seq=8", "/seq=8", "m/"]),
        (parse_arrivals, "poisson, constant or bursts", ["often", "bursts:0", "bursts:", f"bursts:{'9' * 30}"]),
        # A free call is refused, too: virtual time would stand still.
        (parse_formula, "cost", ["", "fixed_ms=0", "fixed_ms", "fixed_ms=-1", "fixed=1", "fixed_ms=nan", "prepare_ms=1",
                                 "fixed_ms=1,fixed_ms=2"]),
    ],
    ids=["distributions", "sizes", "arrivals", "costs"],
)  # fmt: skip
def test_a_wrong_description_is_refused_with_the_forms_there_are(
    parse: Callable[[str], object], words: str, texts: list[str]
) -> None:
    """The error shows how to write one."""
    for text in texts:
        with pytest.raises(typer.BadParameter, match=words):
            parse(text)


def test_a_formula_is_what_it_says_and_so_is_its_calibration() -> None:
    """Fixed, per row, per element."""
    cost = parse_formula("fixed_ms=3,ms_per_row=1,ms_per_element=0.5,prepare_ms=7", largest=(4, 8))
    assert 0.003 + 0.002 + 0.010 == pytest.approx(cost.seconds((2, 10)))
    table = cost.calibration("k", ("batch", "seq"), 4)
    assert (4, 8) in [point.sizes for point in table.points]
    assert all(point.seconds == cost.seconds(point.sizes) for point in table.points)
    assert 0.007 == pytest.approx(cost.prepare_s)


def test_a_table_is_exact_at_its_points_and_sensible_between_and_beyond() -> None:
    """Close to the formula that the table was made from, and never negative."""
    formula = FormulaCost(fixed_s=0.003, per_element_s=0.00013, largest=(64, 256))
    cost = TableCost(formula.calibration("k", ("batch", "seq"), 64))
    for sizes in [(1, 1), (64, 256), (3, 50), (5, 200), (64, 512), (1, 4)]:
        assert formula.seconds(sizes) == pytest.approx(cost.seconds(sizes), rel=0.02)
    odd = TableCost(CostTable(key="", dimensions=("batch",), points=(CostPoint(sizes=(4,), seconds=0.1),)))
    assert (0.1, True) == (odd.seconds((4,)), odd.seconds((1,)) > 0)
    with pytest.raises(ConfigurationError, match="empty"):
        TableCost(CostTable(key="", dimensions=("batch",)))
