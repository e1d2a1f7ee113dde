"""`shapestream reload` while clients go on: workers come, go and are replaced only where they would be something else."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from benchmarks.raw_client import RawClient
from tests.e2e.admin import port_of
from tests.e2e.conftest import PATIENCE_S, until
from tests.e2e.sorter import ask, model
from tests.entries import Failure

import shapestream
from shapestream_engine.layout import Tensors

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e

SERVER = "    server: {listen: [ipc://s.sock], admin: 127.0.0.1:0}\n"


def yaml(*models: str, workers: str, server: str = SERVER) -> str:
    """A server with these models, and an admin port."""
    return server + "    models:\n" + "".join(models) + f"    workers: [{workers}]\n"


def group(*models: str, count: int = 1) -> str:
    """An entry of `workers`."""
    return f"{{count: {count}, slots: 1, threads: 1, models: [{', '.join(models)}]}}"


class Asking:
    """A client that asks a model without a pause, each answer checked, until the block ends."""

    def __init__(self, served: Any, name: str) -> None:
        self._client = served.client()
        self._name = name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.problems: list[str] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        self._client.close()
        assert [] == self.problems
        assert self.answered

    def _run(self) -> None:
        while not self._over.is_set() and not self.problems:
            asked = self.answered % 50
            try:
                inputs = {"a": np.array([[asked + 1, asked]], np.float32)}
                answer = self._client.infer(self._name, inputs, deadline=PATIENCE_S)["y"].tolist()
            except Exception as error:  # noqa: BLE001 - told by the test
                self.problems.append(repr(error))
                return
            if answer != [[asked, asked + 1.0]]:
                self.problems.append(f"{answer} for {asked}")
            self.answered += 1


def reload(workplace: Any, served: Any, *options: str, status: int = 0) -> list[str]:
    """The lines of `shapestream reload`, without the last one."""
    ran = workplace.invoke("reload", f"127.0.0.1:{port_of(served)}", *options)
    assert status == ran.exit_code, (ran.stdout, ran.stderr)
    lines: list[str] = (ran.stdout if status == 0 else ran.stderr).splitlines()
    return lines[:-1]


def test_groups_and_counts_change_and_other_workers_are_left_alone(workplace: Any) -> None:
    """A model comes with a group, a group grows and shrinks, a model goes with its group: the others notice nothing."""
    served = workplace.serve(yaml(model("kept"), workers=group("kept")))
    served.wait_for("workers ready")
    first = served.workers()["w0"]
    with Asking(served, "kept"), served.client() as client:
        workplace.write(
            yaml(model("new"), model("kept"), workers=f"{group('new', count=2)}, {group('kept')}")
        )
        assert ["models added: new", "workers added: w1, w2", "workers left alone: w0"] == reload(
            workplace, served
        )
        assert [1.0, 2.0] == ask(client, "new")
        workplace.write(yaml(model("new"), model("kept"), workers=f"{group('new')}, {group('kept')}"))
        assert ["no model changed", "workers removed: w2", "workers left alone: w0, w1"] == reload(
            workplace, served
        )
        assert [1.0, 2.0] == ask(client, "new")
        workplace.write(yaml(model("kept"), workers=group("kept")))
        assert ["models removed: new", "workers removed: w1", "workers left alone: w0"] == reload(
            workplace, served
        )
        assert {"w0": first} == served.workers()
        assert ["no model changed", "workers left alone: w0"] == reload(workplace, served)
        assert ["no model changed", "workers replaced: w0"] == reload(workplace, served, "--all")
        assert {"w0": first} != served.workers()


def test_batching_changes_at_once_and_replaces_nothing(workplace: Any) -> None:
    """Delays and limits of batches are the server's: no process starts, and requests go on."""
    served = workplace.serve(yaml(model("m"), workers=group("m")))
    served.wait_for("workers ready")
    workers = served.workers()
    with Asking(served, "m"), served.client() as client:
        for delay_ms in (3, 5):
            slower = model("m").replace("trust: true", f"batching: {{max_delay_ms: {delay_ms}}}, trust: true")
            workplace.write(yaml(slower, workers=group("m")))
            assert ["model changed: m (batching)", "workers left alone: w0"] == reload(workplace, served)
            assert [1.0, 2.0] == ask(client, "m")
    assert workers == served.workers()
    assert 2 == len(served.events("model changes"))


def test_another_signature_is_served_to_those_who_fit_and_told_to_the_others(workplace: Any) -> None:
    """Wider bounds: clients that know the old ones go on. Another type: they are told, and open the model again."""
    workers = f"{group('m', count=2)}, {group('kept')}"
    server = SERVER.replace("}", ", client_silence_s: 600}")  # a raw client sends no heartbeats
    served = workplace.serve(yaml(model("m"), model("kept"), workers=workers, server=server))
    served.wait_for("workers ready")
    with Asking(served, "kept"), served.client() as old:
        with Asking(served, "m"):
            workplace.write(
                yaml(
                    model("m", n="0..128"),
                    model("kept"),
                    workers=workers,
                    server=server,
                )
            )
            assert [
                "model changed: m (inputs)",
                "workers replaced: w0, w1",
                "workers left alone: w2",
            ] == reload(workplace, served)
        assert [1.0, 2.0] == ask(old, "kept")
        with served.client() as client:
            wide = np.arange(100, dtype=np.float32)[None, ::-1]
            assert np.array_equal(wide[:, ::-1], client.infer("m", {"a": wide}, deadline=PATIENCE_S)["y"])
            doubles = model("m").replace("f32", "f64")
            workplace.write(yaml(doubles, model("kept"), workers=workers, server=server))
            with RawClient(served.address, "m") as deaf:
                reload(workplace, served)
                two = np.array([[2, 1]], np.float32)
                deaf.ask(Tensors(layout=((0, "f32", (1, 2)),), buffers=(two.tobytes(),)))
                (refused,) = until(
                    "an answer", lambda: [one for one in deaf.take() if isinstance(one, Failure)]
                )
                assert "invalid" == refused.code
                assert (
                    "model 'm' has changed: input 'a': its type is f64, and clients know f32; open it again"
                    == refused.message
                )
            # The server has told it, so it sends as f64 what it sent as f32.
            changed = client.infer("m", {"a": two}, deadline=PATIENCE_S)["y"]
            assert ([[1.0, 2.0]], np.float64) == (changed.tolist(), changed.dtype)


def test_models_of_the_servers_own_process_are_loaded_beside_the_old_ones(workplace: Any) -> None:
    """One comes, one goes, one changes; what cannot be loaded leaves all as it was, and nobody is refused meanwhile."""
    own = "    in_process: {slots: 1}\n"

    def file(*models: str) -> str:
        return SERVER + "    models:\n" + "".join(models) + own

    served = workplace.serve(file(model("kept"), model("gone")))
    served.wait_for("server ready")
    with Asking(served, "kept"), served.client() as client:
        assert [1.0, 2.0] == ask(client, "gone")
        workplace.write(file(model("kept", n="0..128"), model("new")))
        changes = ["models added: new", "models removed: gone", "model changed: kept (inputs)"]
        assert [*changes, "workers would be replaced: local"] == reload(workplace, served, "--dry-run")
        assert [*changes, "workers replaced: local"] == reload(workplace, served)
        assert [1.0, 2.0] == ask(client, "new")
        with pytest.raises(shapestream.Unavailable, match="the reloaded configuration has it no more"):
            ask(client, "gone")
        assert ["no model changed", "workers left alone: local"] == reload(workplace, served)
        workplace.write(file(model("kept", n="0..128"), model("new", function="gated:nothing")))
        changed, kept = reload(workplace, served, status=1)
        assert "model changed: new (function)" == changed
        assert "worker local goes on unchanged: " in kept
        assert "gated" in kept
        assert [1.0, 2.0] == ask(client, "new")


def test_a_version_that_gets_no_traffic_makes_a_reload_incomplete(workplace: Any) -> None:
    """It does not take what clients may send; the rest serves on."""
    rest, narrow = model("m, version: 1"), model("m, version: 2, traffic: 50%", n="0..32")
    served = workplace.serve(yaml(rest, workers=group("m")))
    served.wait_for("workers ready")
    with Asking(served, "m"):
        workplace.write(yaml(rest, narrow, workers=group("m")))
        lines = reload(workplace, served, status=1)
        assert "version m@2 gets no traffic: input 'a': axis 1 takes ..32, and clients may send ..64" in lines
        workplace.write(yaml(rest, workers=group("m")))
        reload(workplace, served)


def test_a_plan_changes_nothing(workplace: Any) -> None:
    """It names what would be replaced, with memory and time; a YAML that cannot be used is refused as ever."""
    served = workplace.serve(yaml(model("m"), workers=group("m")))
    served.wait_for("workers ready")
    workers = served.workers()
    workplace.write(
        yaml(model("m").replace("calibration_s: 0", "calibration_s: 1"), model("n"), workers=group("m", "n"))
    )
    lines = reload(workplace, served, "--dry-run")
    *told, need = lines
    assert ["models added: n", "model changed: m (calibration_s)", "workers would be replaced: w0"] == told
    assert need.startswith("it would take about ")
    assert re.search(r" MiB of memory in addition meanwhile; [0-9.]+ [MG]iB are free$", need)
    assert workers == served.workers()
    assert [] == served.events("reload ended")
    workplace.write("    models: [\n")
    assert "not YAML" in reload(workplace, served, "--dry-run", status=1)[0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("path: missing.onnx", r"models\[0\]\.path: .*no such file"),
        (
            "path: damaged.onnx",
            r"worker w0 goes on unchanged: its configuration cannot be used: .*damaged\.onnx",
        ),
        ("proof", r"worker w0 goes on unchanged: its configuration cannot be used: .*server\.yaml:3"),
        (
            "function: 'dying_import:f'",
            r"worker w0 goes on unchanged: it ended 6 times within",
        ),
    ],
)
def test_a_reload_that_breaks_changes_nothing_and_says_why(workplace: Any, changed: str, words: str) -> None:
    """Files that are missing or damaged, a proof that fails, a process that dies at its start: the old one serves on."""
    served = workplace.serve(yaml(model("m"), workers=group("m")))
    served.wait_for("workers ready")
    (workplace.folder / "damaged.onnx").write_bytes(bytes(100))
    good = model("m")
    if changed == "proof":
        bad = good.replace("numpy:sort", "gated:centred").replace("trust: true, ", "").replace("{a:", "{x:")
    elif changed.startswith("path"):
        bad = f"      - {{name: m, {changed}}}\n"
    else:
        bad = good.replace("function: 'numpy:sort'", changed)
    workers = served.workers()
    with Asking(served, "m"):
        workplace.write(yaml(bad, workers=group("m")))
        lines = reload(workplace, served, status=1)
        assert re.search(words, "\n".join(lines)), lines
        assert workers == served.workers()
        workplace.write(yaml(good, workers=group("m")))
        reload(workplace, served)


def test_a_newer_reload_ends_what_an_older_one_still_prepares(workplace: Any) -> None:
    """Its process would come up with what was read before, or never; both reloads end with the newer one's."""
    served = workplace.serve(yaml(model("m"), workers=group("m")))
    served.wait_for("workers ready")
    with Asking(served, "m"):
        workplace.write(yaml(model("m", function="waiting_import:sort"), workers=group("m")))
        served.send(signal.SIGHUP)
        served.wait_for("worker started", 2)
        workplace.write(yaml(model("m"), workers=group("m")))
        assert ["model changed: m (function)", "workers replaced: w0"] == reload(workplace, served)
        killed = served.events("worker killed")
        assert ["a newer reload replaces it"] == [event["why"] for event in killed]
        assert ["ok", "ok"] == [event["result"] for event in served.wait_for("reload ended", 2)]


def test_a_worker_that_does_not_come_up_in_time_is_ended_and_the_old_one_stays(workplace: Any) -> None:
    """`server.reload_s` bounds it, whatever the new process waits for."""
    served = workplace.serve(yaml(model("m"), workers=group("m")))
    served.wait_for("workers ready")
    workers = served.workers()
    limited = SERVER.replace("}", ", reload_s: 1}")
    slow = model("m", function="waiting_import:sort")
    workplace.write(yaml(slow, workers=group("m"), server=limited))
    with Asking(served, "m"):
        *_, why = reload(workplace, served, status=1)
        assert "worker w0 goes on unchanged: it was not ready within 1 s (server.reload_s)" == why
        assert workers == served.workers()


ALL = SERVER.replace("}", ", surge: all}")
TICKS = count()
"""The order of what the clients see."""


class Watching:
    """A client that asks `m` without a pause, and notes when each request was sent and answered, and by which version."""

    def __init__(self, served: Any) -> None:
        self._served = served
        self.answers: list[tuple[int, int, str]] = []
        self.problem = ""

    def run(self, over: threading.Event) -> None:
        """Until it is over, or something fails."""
        versions = {(1.0, 2.0): "old", (-1.0, -2.0): "new"}
        with self._served.client() as client:
            while not over.is_set():
                sent_at = next(TICKS)
                try:
                    version = versions[tuple(ask(client, "m"))]
                    self.answers.append((sent_at, next(TICKS), version))
                except Exception as error:  # noqa: BLE001 - told by the test
                    self.problem = repr(error)
                    return


@contextmanager
def watched(served: Any) -> Iterator[Sequence[Watching]]:
    """Three clients; nothing may fail."""
    over = threading.Event()
    clients = [Watching(served) for _ in range(3)]
    threads = [threading.Thread(target=client.run, args=(over,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert [""] * 3 == [client.problem for client in clients]


def answered(clients: Sequence[Watching], count: int = 30) -> None:
    """Wait until each client has so many more answers."""
    before = [len(client.answers) for client in clients]
    until(
        "more answers",
        lambda: all(
            client.problem or len(client.answers) > had + count
            for client, had in zip(clients, before, strict=True)
        ),
    )


def of_three(function: str = "numpy:sort", n: str = "0..64", server: str = ALL) -> str:
    """A server with three workers of one model."""
    return yaml(model("m", function=function, n=n), workers=group("m", count=3), server=server)


@pytest.mark.parametrize("n", ["0..64", pytest.param("0..128", marks=pytest.mark.thorough)])
def test_the_traffic_moves_to_all_new_workers_at_once(workplace: Any, n: str) -> None:
    """With an equal signature, and with another one: the old version answers all until the last new worker is ready.

    After the first answer of the new one, no request that is sent is answered by the old one.
    """
    served = workplace.serve(of_three())
    served.wait_for("workers ready")
    workplace.write(of_three("moving:negated", n))
    with watched(served) as clients:
        served.send(signal.SIGHUP)
        held = {one["worker"] for one in served.wait_for("worker joined", 5)[3:]}
        assert {"w0", "w1"} == {name.partition("+")[0] for name in held}
        answered(clients)
        before = next(TICKS)
        (workplace.folder / "go").touch()
        assert ["ok"] == [event["result"] for event in served.wait_for("reload ended")]
        answered(clients)
    every = [answer for client in clients for answer in client.answers]
    assert {"old"} == {version for _, came_at, version in every if came_at < before}
    moved_at = min(came_at for _, came_at, version in every if version == "new")
    assert {"new"} == {version for sent_at, _, version in every if sent_at > moved_at}
    (moved,) = served.events("traffic moves")
    assert ["w0", "w1", "w2"] == [name.partition("+")[0] for name in moved["to"]]
    (told,) = served.events("workers are restarted")
    assert "all at once" == told["how"]


def test_nothing_moves_where_one_of_three_new_workers_dies(workplace: Any) -> None:
    """The old version answers everything; the result names the worker and why. A reload that is whole moves all."""
    (workplace.folder / "go").touch()
    (workplace.folder / "broken").touch()
    served = workplace.serve(of_three())
    served.wait_for("workers ready")
    workers = served.workers()
    workplace.write(of_three("moving:negated", "0..128"))
    with watched(served) as clients:
        _, *lines = reload(workplace, served, status=1)
        why = "cannot be replaced: it ended 6 times within 120 s, at last with status 9"
        assert 3 == len(lines)
        assert 1 == sum(line.startswith("worker w1 goes on unchanged: it ended 6 times") for line in lines)
        assert 2 == sum(f"goes on unchanged: nothing moves, since w1 {why}" in line for line in lines)
        assert workers == served.workers()
        answered(clients)
        assert {"old"} == {version for client in clients for _, _, version in client.answers}
        (workplace.folder / "broken").unlink()
        assert ["no model changed", "workers replaced: w0, w1, w2"] == reload(workplace, served)
        answered(clients)
        assert {"new"} == {client.answers[-1][2] for client in clients}
