"""Why a request was slow, as its user asks: with `shapestream why`, on the admin port, and from a log."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.e2e.admin import ADMIN, MODELS, get, port_of
from tests.e2e.conftest import until

from shapestream.errors import DeadlineExceeded, ModelError, Overloaded, Poisoned

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e

ONE = {"x": np.ones((1, 2), np.float32)}


def test_a_queued_request_is_told_of_by_command_port_and_log(workplace: Any) -> None:
    """Two requests behind one that waits for the gate; all say the same."""
    text = MODELS.replace("SERVER", ADMIN) + "    logging: {level: debug, format: json}\n"
    served = workplace.serve(text)
    port = port_of(served)
    with served.client() as client, ThreadPoolExecutor() as beside:
        first = beside.submit(client.infer, "gated", ONE)
        workplace.wait_entered()
        others = [beside.submit(client.infer, "gated", ONE, request_id=f"own {n}") for n in range(2)]
        served.wait_for("request arrived", 3)
        status, waiting = get(port, "/requests/own%201")
        assert (200, ["queued"]) == (status, [story["state"] for story in waiting["stories"]])
        workplace.open_gate()
        slow = first.result().request_id
        assert ["own 0", "own 1"] == [other.result().request_id for other in others]
    by_command = workplace.invoke("why", "own 1", "--connect", served.address)
    head, *events, why = by_command.stdout.splitlines()
    assert head.startswith("own 1: gated, 1 x 2, answered, ")
    assert "0.000 ms  arrived; queued before it for gated: 1 request" in events[0]
    assert "waited" in why
    assert "for a slot, behind 1 queued request" in why
    assert "Meanwhile local/0 ran 1 batch" in why
    told = json.loads(workplace.invoke("why", "own 1", "--connect", served.address, "--json").stdout)
    _, by_port = get(port, "/requests/own%201")
    for stories in (told, by_port["stories"]):
        assert 1 == len(stories)
        del stories[0]["arrived_s_ago"]
    assert told == by_port["stories"]
    assert ["own 0"] == told[0]["with"]
    _, slowest = get(port, "/requests?slowest=2")
    times = {story["request_id"]: story["total_ms"] for story in slowest["stories"]}
    assert slow in times, "of each batch the slowest"
    ids = sorted(times, key=lambda id_: -times[id_])
    assert ids == [*times]
    _, first = get(port, "/requests?slowest=1")
    assert ids[:1] == [story["request_id"] for story in first["stories"]]
    by_rank = workplace.invoke("why", "--slowest", "1", "--connect", str(served.config))
    assert by_rank.stdout.startswith(f"{ids[0]}: gated")
    for request in (slow, "own 1"):
        with served.log.open() as log:
            ran = workplace.invoke_with(log, "logs", "story", request, "--json")
        (story,) = json.loads(ran.stdout)
        texts = [text for _, text in story["events"]]
        assert texts[0].startswith("request arrived")
        assert any(text.startswith("batch ran") for text in texts)
        assert texts[-1].startswith("results delivered")
        times = [time for time, _ in story["events"]]
        assert times[0] == 0.0
        assert times == sorted(times)


def test_what_is_not_known_is_said_so(workplace: Any) -> None:
    """Unknown ids, wrong numbers, a log of another level."""
    workplace.open_gate()
    served = workplace.serve(MODELS.replace("SERVER", ADMIN))
    port = port_of(served)
    status, answer = get(port, "/requests/" + "0" * 32 + "-1")
    assert (404, []) == (status, answer["stories"])
    assert "the last 16,384 answered requests" in answer["unknown"]
    for wrong in ("x", "-1", "1e3", "99999"):
        assert 400 == get(port, f"/requests?slowest={wrong}")[0]
    assert (200, {"stories": []}) == get(port, "/requests")
    unknown = workplace.invoke("why", "nonsense", "--connect", served.address)
    assert 1 == unknown.exit_code
    assert "the last 16,384 answered requests" in unknown.stderr
    none = workplace.invoke("why", "--slowest", "--connect", served.address)
    assert (0, "no request has ended in the last ten minutes\n") == (none.exit_code, none.stdout)
    for arguments in ((), ("--slowest", "many"), ("--slowest", "0")):
        assert 2 == workplace.invoke("why", *arguments, "--connect", served.address).exit_code
    with served.log.open() as log:
        ran = workplace.invoke_with(log, "logs", "story", "nonsense")
    assert 1 == ran.exit_code
    assert "level debug" in ran.stderr


def test_stories_are_told_while_a_server_is_overloaded(workplace: Any) -> None:
    """More than the queue holds, at once and without end; the slowest are told, and each refusal has its story."""
    workplace.open_gate()
    text = MODELS.replace("SERVER", ADMIN.replace("}", ", max_queued_requests: 16}"))
    served = workplace.serve(text)
    port = port_of(served)
    refused: list[str] = []
    stop = time.monotonic() + 3.0

    def flood() -> None:
        with served.client() as client:
            while time.monotonic() < stop:
                with client.stream("gated", [ONE] * 400, max_in_flight=200, on_error="yield") as results:
                    for item in results:
                        if not item.ok and isinstance(item.error, Overloaded):
                            refused.append(str(item.error.request_id))

    asked = 0
    with ThreadPoolExecutor() as beside:
        floods = [beside.submit(flood) for _ in range(2)]
        while time.monotonic() < stop or not asked:
            status, slowest = get(port, "/requests?slowest=10")
            assert 200 == status
            asked += len(slowest["stories"])
            totals = [story["total_ms"] for story in slowest["stories"]]
            assert totals == sorted(totals, reverse=True)
            assert all(story["why"] for story in slowest["stories"])
        for ended in floods:
            ended.result()
    assert asked
    assert refused
    (story,) = get(port, f"/requests/{refused[-1]}")[1]["stories"]
    assert ("overloaded", 0) == (story["code"], story["attempts"])


TWO_MODELS = MODELS.replace(
    "    in_process: true\n",
    """\
      - name: slow
        function: gated:double_slowly
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    in_process: true
""",
).replace("SERVER", ADMIN)


def adds_up(story: dict[str, Any]) -> bool:
    """Whether the parts of a story's time sum to the whole, to a thousandth of a millisecond."""
    return bool(abs(story["total_ms"] - sum(part["ms"] for part in story["phases"])) < 1e-3)


def test_where_the_time_of_requests_without_a_result_went(workplace: Any) -> None:
    """Too late while it ran, too late while it was queued behind another client, and failed by its model."""
    served = workplace.serve(TWO_MODELS)
    port = port_of(served)
    with served.client() as client, served.client() as other:
        with pytest.raises(DeadlineExceeded):
            other.infer("gated", ONE, deadline=0.5, request_id="ran")
        with pytest.raises(DeadlineExceeded):
            client.infer("slow", ONE, deadline=0.5, request_id="queued")
        told = {name: client.stories(name)[0] for name in ("ran", "queued")}
        assert "Its call runs on without it." in told["ran"]["why"]
        workplace.open_gate()
        with pytest.raises(ModelError):
            client.infer("slow", {"x": np.full((1, 2), 14, np.float32)}, request_id="failed")
        told = {name: client.stories(name)[0] for name in ("ran", "queued", "failed")}
    assert [("gated", "local/0", 1), ("slow", None, 0), ("slow", "local/0", 1)] == [
        (story["model"], story["slot"], story["attempts"]) for story in told.values()
    ]
    longest = [max(told[name]["phases"], key=lambda part: part["ms"])["phase"] for name in ("ran", "queued")]
    assert ["running", "queued"] == longest
    assert "Its call ran on without it for" in told["ran"]["why"]
    behind = told["queued"]["waited_behind"]
    assert (["local/0"], 1, ["gated"], 0.0) == (
        list(behind["slots"]),
        behind["batches"],
        list(behind["models"]),
        behind["own_ms"],
    )
    assert told["queued"]["total_ms"] / 2 < behind["others_ms"] <= told["queued"]["total_ms"] + 1
    assert "in a failed attempt (batch 2 on local/0: model_error)" in told["failed"]["why"]
    for name, story in told.items():
        assert adds_up(story)
        _, by_port = get(port, f"/requests/{name}")
        by_command = workplace.invoke("why", name, "--connect", served.address).stdout
        assert by_command.splitlines()[-1] == story["why"] == by_port["stories"][0]["why"]


def test_a_request_withdrawn_while_it_runs_tells_of_its_call(workplace: Any) -> None:
    """A stream is left while its only request runs."""
    served = workplace.serve(TWO_MODELS)
    with served.client() as client:
        with client.stream("gated", [ONE]):
            workplace.wait_entered()
        (story,) = until("the request has ended", lambda: [s for s in client.stories(slowest=1) if s["code"]])
        workplace.open_gate()
    assert ("cancelled", "local/0", 1) == (story["code"], story["slot"], story["attempts"])
    assert adds_up(story)


def test_both_attempts_of_a_request_that_kills_workers_are_told(workplace: Any) -> None:
    """Each names the slot that it took with it."""
    text = MODELS.replace("SERVER", "{listen: [ipc://s.sock]}").replace("double_when_open", "double")
    served = workplace.serve(text.replace("in_process: true", "workers: [{count: 1, slots: 1}]"))
    served.wait_for("workers ready")
    with served.client() as client:
        with pytest.raises(Poisoned):
            client.infer("gated", {"x": np.full((1, 2), 13, np.float32)}, request_id="deadly")
        (story,) = client.stories("deadly")
    assert ("poisoned", 2) == (story["code"], story["attempts"])
    assert adds_up(story)
    failed = [part for part in story["phases"] if part["phase"] == "failed"]
    assert 2 == len({part["batch"] for part in failed})
    assert all(part["slot"] in story["why"] for part in failed)
    assert "in 2 failed attempts" in story["why"]
    assert "to run again" in story["why"]
