"""The same requests to Triton 2.51 and to a server of ours that serve the same models. Needs `make test-clients`.

Answers are the same, or stand in `triton/deviations.py` and docs/http.md. So does each deviation that is no more.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import until
from tests.e2e.triton.cases import BAD, GOOD, KILLING, PAGES, get, infer, tensor
from tests.e2e.triton.deviations import DEVIATIONS, EXPECTED
from tests.e2e.triton.exchange import Answer, exchange
from tests.e2e.triton.models import our_models
from tests.e2e.triton.server import triton_server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-client-pytriton"
CASES = {**GOOD, **BAD, **PAGES}
SERVED = 'server: {listen: [ipc://s.sock], http: "127.0.0.1:0"}\nmodels:\nMODELSin_process: true\n'
OWN_WORDS = {"platform", "backend", "runtime"}
"""Members in which each server names itself."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Of the two servers."""

    triton: int
    ours: int


@pytest.fixture(scope="module")
def ours(module_workplace: Any) -> int:
    """The port of our server."""
    if not ENVIRONMENT.exists():
        pytest.skip("needs `make test-clients`")
    served = module_workplace.serve(module_workplace.write(SERVED.replace("MODELS", our_models())))
    served.wait_for("gateways ready")
    (line,) = served.events("http ready")
    return int(line["address"].rpartition(":")[2])


@pytest.fixture(scope="module")
def ports(ours: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """Both servers."""
    with triton_server(ENVIRONMENT, tmp_path_factory.mktemp("triton")) as triton:
        yield Ports(triton, ours)


def asked(port: int, request: bytes) -> Answer:
    """The answer; status 0 where the connection ends without one."""
    try:
        return exchange(port, request)
    except (http.client.RemoteDisconnected, ConnectionResetError):
        return Answer(0, {}, b"")


def comparable(answer: Answer) -> Any:
    """What must be the same of an answer of status 200: all that a client sees, but the order of outputs and members."""
    content = answer.content
    headers = {name: answer.headers.get(name) for name in ("content-type", "content-encoding")}
    if isinstance(content, dict) and "outputs" in content and "model_version" in content:
        # As text, so that NaN is NaN, and -0.0 is not 0.0.
        outputs = sorted(map(repr, answer.outputs))
        return {**content, "outputs": outputs}, headers
    return content, headers


def without_own_words(content: Any) -> Any:
    """A page without the names of products."""
    if isinstance(content, dict):
        return {key: without_own_words(value) for key, value in content.items() if key not in OWN_WORDS}
    return [without_own_words(one) for one in content] if isinstance(content, list) else content


@pytest.mark.parametrize("case", [*GOOD, *BAD])
def test_an_inference_is_that_of_triton(ports: Ports, case: str) -> None:
    """Status, names, numbers, how they are sent, and the id; or the deviation that is listed."""
    triton, ours = (asked(port, CASES[case]) for port in (ports.triton, ports.ours))
    if ours.status != 200:
        assert ["error"] == [*ours.content]
    if case in EXPECTED:
        assert EXPECTED[case] == (triton.status, ours.status)
        assert ours.status != 200 or triton.status != 200 or comparable(triton) != comparable(ours)
        return
    assert triton.status == ours.status, (triton.body, ours.body)
    assert triton.status != 200 or comparable(triton) == comparable(ours)


SAME_PAGES = [case for case in PAGES if not case.startswith(("server", "configuration"))]


@pytest.mark.parametrize("case", SAME_PAGES)
def test_a_page_is_that_of_triton(ports: Ports, case: str) -> None:
    """Models, ports and states; or the deviation that is listed."""
    triton, ours = (asked(port, CASES[case]) for port in (ports.triton, ports.ours))
    pages = [without_own_words(answer.content) for answer in (triton, ours)]
    if case in EXPECTED:
        assert EXPECTED[case] == (triton.status, ours.status)
        assert ours.status != 200 or triton.status != 200 or pages[0] != pages[1]
        return
    assert triton.status == ours.status, (triton.body, ours.body)
    assert triton.status != 200 or pages[0] == pages[1]


@pytest.mark.parametrize("case", [case for case in PAGES if case.startswith("configuration")])
def test_a_configuration_has_what_triton_says(ports: Ports, case: str) -> None:
    """The name, the most rows, and the ports; not what is about Triton's own scheduler and backends."""
    triton, ours = (asked(port, CASES[case]) for port in (ports.triton, ports.ours))
    assert triton.status == ours.status
    if triton.status == 200:
        for key in ("name", "max_batch_size", "version_policy"):
            assert triton.content[key] == ours.content[key]
        for key in ("input", "output"):
            told = ours.content[key]
            assert told == [
                {name: theirs[name] for name in own}
                for theirs, own in zip(triton.content[key], told, strict=True)
            ]
        assert ("dynamic_batching" in triton.content) == ("dynamic_batching" in ours.content)


def test_extensions_are_some_of_tritons(ports: Ports) -> None:
    """So each has Triton's meaning."""
    triton, ours = (asked(port, PAGES["server"]).content for port in (ports.triton, ports.ours))
    assert triton.keys() == ours.keys()
    assert set(ours["extensions"]) <= set(triton["extensions"])


def test_statistics_count_as_those_of_triton(ports: Ports) -> None:
    """Requests of several rows, one after the other, and one that is refused for its shape."""

    def counts(port: int) -> Any:
        for shape in ([1, 1], [2, 1], [2, 1]):
            content = {"inputs": [tensor("x", "FP32", shape, [1.0] * shape[0])]}
            assert 200 == asked(port, infer("counted", content)).status
        assert (
            400 == asked(port, infer("counted", {"inputs": [tensor("x", "FP32", [9, 1], [1.0] * 9)]})).status
        )

        def told() -> Any:
            (found,) = asked(port, get("/v2/models/counted/stats")).content["model_stats"]
            return found

        # Triton may count a request after it has answered it.
        until("the counts", lambda: told()["inference_stats"]["success"]["count"] == 3)
        found = told()
        stats = {name: value["count"] for name, value in found["inference_stats"].items()}
        return set(found), found["inference_count"], found["execution_count"], stats

    assert counts(ports.triton) == counts(ports.ours)


@pytest.mark.parametrize("case", KILLING)
def test_what_ends_triton_is_refused(ours: int, tmp_path: Path, case: str) -> None:
    """Each time by a Triton of its own."""
    with triton_server(ENVIRONMENT, tmp_path) as triton:
        assert EXPECTED[case] == (asked(triton, KILLING[case]).status, asked(ours, KILLING[case]).status)


def test_the_docs_list_each_deviation() -> None:
    """Word for word; and each is about requests that are sent here."""
    text = " ".join((ROOT / "docs" / "http.md").read_text().split())
    assert [] == [words for words in DEVIATIONS if f"- {words}" not in text]
    assert [] == [case for case in EXPECTED if case not in {**CASES, **KILLING}]
