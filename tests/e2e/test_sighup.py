"""What SIGHUP does with the YAML as it is then: docs/reliability.md, "Rolling restart"."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import until
from tests.e2e.importable.poisonous import CRASH
from tests.e2e.reloads import soak
from tests.e2e.sorter import ask, model

import shapestream

pytestmark = pytest.mark.e2e


def yaml(*models: str, processes: int = 1) -> str:
    """A server with these models."""
    return "    models:\n" + "".join(models) + f"    workers: [{{count: {processes}, slots: 1}}]\n"


def replaced(served: Any, *workers: str) -> None:
    """Waits until each of these processes has handed over to the next."""
    for worker in workers:
        until(
            f"the end of {worker}",
            lambda worker=worker: any(event["worker"] == worker for event in served.events("worker ended")),
        )


def test_a_model_that_was_removed_is_unavailable_and_says_why(workplace: Any) -> None:
    """Its requests do not wait for ever, `models` gives the reason; it comes back with the YAML."""
    served = workplace.serve(yaml(model("kept"), model("gone")))
    with served.client() as client, served.client() as late:
        assert [[1.0, 2.0]] * 2 == [ask(client, "kept"), ask(client, "gone")]
        workplace.write(yaml(model("kept")))
        served.send(signal.SIGHUP)
        served.wait_for("model is unavailable")
        for asking in (client, late):
            with pytest.raises(shapestream.Unavailable, match="reloaded configuration"):
                ask(asking, "gone")
        assert [1.0, 2.0] == ask(client, "kept")
        listed = workplace.invoke("models", served.address)
        assert "model 'gone' is unavailable: " in listed.stdout
        assert "reloaded configuration" in listed.stdout
        workplace.write(yaml(model("kept"), model("gone")))
        served.send(signal.SIGHUP)
        served.wait_for("configuration is read again", 2)
        assert [1.0, 2.0] == ask(client, "gone")
        assert {} == client.statistics()["unavailable"]


def test_a_model_that_was_removed_before_it_was_there_is_unavailable_at_once(workplace: Any) -> None:
    """Its worker still starts, which may take for ever."""
    slow = model("slow", function="waiting_import:sort")
    served = workplace.serve(yaml(slow))
    with served.client() as client:
        with pytest.raises(shapestream.DeadlineExceeded):
            client.infer("slow", {"a": np.zeros((1, 1), np.float32)}, deadline=0.2)
        workplace.write(yaml(model("other")))
        served.send(signal.SIGHUP)
        served.wait_for("configuration is read again")
        with pytest.raises(shapestream.Unavailable, match="reloaded configuration"):
            ask(client, "slow")


def test_a_model_that_was_added_is_served_as_the_yaml_says(workplace: Any) -> None:
    """Also what the server itself has to know of it: a model that is not idempotent runs each request alone."""
    served = workplace.serve(yaml(model("old")))
    with served.client() as client:
        ask(client, "old")
        once = model("new").replace("trust: true", "idempotent: false, trust: true")
        workplace.write(yaml(model("old"), once))
        served.send(signal.SIGHUP)
        replaced(served, "w0")
        assert [1.0, 2.0] == ask(client, "new")
        before = client.statistics()["batches"]
        inputs = [{"a": np.array([[i, 0]], np.float32)} for i in range(20)]
        with client.stream("new", inputs) as results:
            assert [[0.0, float(i)] for i in range(20)] == [result["y"][0].tolist() for result in results]
        assert 20 == client.statistics()["batches"] - before


def test_a_yaml_that_cannot_be_used_changes_nothing(workplace: Any) -> None:
    """Its problems are in one line of the log, every process stays; the next SIGHUP finds it mended."""
    useless = {
        "    models: [\n": "not YAML",
        yaml(model("m").replace("trust:", "tust:")): 'did you mean "trust"?',
    }
    served = workplace.serve(yaml(model("m")))
    with served.client() as client:
        for number, (text, words) in enumerate(useless.items(), 1):
            ask(client, "m")
            workplace.write(text)
            served.send(signal.SIGHUP)
            refused = served.wait_for("configuration is not changed", number)[-1]
            assert words in " ".join(refused["why"])
            assert "error" == refused["level"]
        assert [1.0, 2.0] == ask(client, "m")
        assert 1 == len(served.events("worker started"))
        workplace.write(yaml(model("m")))
        served.send(signal.SIGHUP)
        replaced(served, "w0")
        assert [1.0, 2.0] == ask(client, "m")
    assert 2 == len(served.events("worker started"))


def test_a_signature_that_no_reload_has_read_is_refused(workplace: Any) -> None:
    """A worker that is started again after a death reads the YAML by itself; what it brings is not served before SIGHUP."""
    served = workplace.serve(yaml(model("m"), processes=2))
    with served.client() as client:
        served.wait_for("workers ready")
        workplace.write(yaml(model("m", n="0..32"), processes=2))
        os.kill(served.workers()["w0"], signal.SIGKILL)
        refused = served.wait_for("worker refused")[0]
        for words in ("model 'm'", "n:..64", "n:..32", "reload the server"):
            assert words in refused["why"]
        assert [1.0, 2.0] == ask(client, "m")
        served.send(signal.SIGHUP)
        assert "ok" == served.wait_for("reload ended")[0]["result"]
        assert [1.0, 2.0] == ask(client, "m")
        with pytest.raises(shapestream.InvalidRequest, match="n"):
            client.infer("m", {"a": np.zeros((1, 40), np.float32)})


@pytest.mark.thorough
def test_five_reloads_and_two_poisons_are_not_noticed(workplace: Any) -> None:
    """`make soak-reloads` has a hundred; here two crashes end two workers each."""
    report = soak(workplace, 5, every=2, kinds=[CRASH])
    assert [] == report.problems
    assert (["ok"] * 5, [2] * 5) == (report.results, report.processes)
    assert report.descriptors[0] >= report.descriptors[-1]
