"""What a reload says of two YAMLs, without a server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio

from shapestream.settings import Settings, load_settings
from shapestream_workers.reload import AdminAddress, lines_of, reload_server
from shapestream_workers.reloads import Changes, Reload, ReloadRequest, Reloads, ReloadState, changes_between
from shapestream_workers.roles import Roles, roles_of
from shapestream_workers.supervisor.core import Restarted

MODEL = """\
  - name: {name}
    function: numpy:sort
    inputs: {{a: {{shape: "batch:1..8, n:0..64", element_type: f32}}}}
    outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
"""
WORKERS = "workers: [{count: 2}]\n"


def settings(folder: Path, *models: str, more: str = WORKERS) -> Settings:
    """A YAML with these models."""
    path = folder / "x.yaml"
    path.write_text("models:\n" + "".join(models) + more)
    return load_settings(path).settings


def model(name: str, more: str = "") -> str:
    """One entry."""
    return MODEL.format(name=name) + more


def compare(
    before: Settings,
    now: Settings,
    *,
    files: set[str] | None = None,
) -> Changes:
    """Of a server that was started with the first one."""
    return changes_between(before, now, files=files or set(), started=before)


def test_the_same_yaml_changes_nothing(tmp_path: Path) -> None:
    """Also where a command line said what the YAML does not."""
    before = settings(tmp_path, model("a"))
    traced = before.model_copy(update={"server": before.server.model_copy(update={"record_trace": "/x"})})
    expected = Changes(added=[], removed=[], changed={}, need_restart=[])
    assert expected == compare(before, settings(tmp_path, model("a"))) == compare(traced, before)


def test_models_are_named_with_the_keys_that_changed(tmp_path: Path) -> None:
    """And with their files."""
    before = settings(tmp_path, model("a"), model("b"), model("gone"))
    now = settings(tmp_path, model("a"), model("b", "    batching: {max_delay_ms: 3}\n"), model("new"))
    changed = {"a": ["files"], "b": ["batching"]}
    expected = Changes(added=["new"], removed=["gone"], changed=changed, need_restart=[])
    assert expected == compare(before, now, files={"a", "new"})


def test_what_the_server_reads_at_its_start_needs_a_restart(tmp_path: Path) -> None:
    """Most of `server`, the limit of its own memory, and whether models run in its process; the models do not."""
    before = settings(tmp_path, model("a"), model("gone"), more="in_process: {slots: 1}\n")
    now = settings(
        tmp_path, model("a", "    trust: true\n"), model("new"),
        more="in_process: {slots: 2, memory_limit: 4GiB}\nserver: {heartbeat_s: 0.5, grace_s: 3, reload_s: 9, surge: all}\n"
        "logging: {level: debug}\n",
    )  # fmt: skip
    needed = ["server.heartbeat_s", "server.grace_s", "in_process.memory_limit"]
    expected = Changes(added=["new"], removed=["gone"], changed={"a": ["trust"]}, need_restart=needed)
    assert expected == compare(before, now)
    workers = compare(before, settings(tmp_path, model("a"), model("gone")))
    assert ["in_process", "workers"] == workers.need_restart


def test_the_lines_of_a_reload_name_a_worker_that_does_not_come_up() -> None:
    """With the reason, and that not everything is done."""
    reload = Reload(number=1, began=0.0, state=ReloadState.INCOMPLETE, seconds=120.04)
    starting = {"w0": "w0+1 is not ready after 120 s; end it to try again"}
    reload.restarted = Restarted(replaced=(), kept={}, given_up={}, starting=starting)
    assert [
        "no model changed",
        "worker w0 is not replaced yet: w0+1 is not ready after 120 s; end it to try again",
        "not done everywhere after 120.0 s",
    ] == list(lines_of(reload.to_dict()))


class _Server:
    """What a reload that is refused tells its server."""

    def __init__(self) -> None:
        self.ended = trio.Event()

    def count_reloads(self, results: Any) -> None:
        """None has ended."""

    def reload_ended(self, *_: Any, **__: Any) -> None:
        """One has."""
        self.ended.set()


class _Huge:
    """Workers that no machine has memory for another time."""

    def __init__(self) -> None:
        self.presences: dict[str, Any] = {}

    def private_bytes(self) -> tuple[dict[str, int], int]:
        """By role, and of processes that are about to end."""
        return {"w0": 1 << 50, "w1": 3 << 50}, 1 << 49

    def start_seconds(self) -> dict[str, float]:
        """By role."""
        return {"w0": 4.0, "w1": 2.0}


def test_a_reload_of_all_at_once_that_does_not_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    """It says what it needs, what is free, and what it would need one after the other."""
    path = tmp_path / "x.yaml"
    path.write_text("server: {surge: all}\nmodels:\n" + model("a") + WORKERS)
    loaded, roles = load_settings(path), Roles()
    roles.follow([*roles_of(loaded.settings, 2, {})])

    async def main() -> Reload:
        server: Any = _Server()
        reloads = Reloads(
            loaded, server, digests={}, own=None, roles=roles, workers=lambda: _Huge(),  # type: ignore[arg-type, return-value]  # enough
            gateways=None, gateway_ports=None, expect=pytest.fail, settled=pytest.fail,
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reloads.run)
            reload = reloads.ask(ReloadRequest.ALL)
            await server.ended.wait()
            nursery.cancel_scope.cancel()
        return reload

    reload = trio.run(main)
    assert reload.needs is not None
    assert reload.needs.free_bytes > 1 << 49
    assert (ReloadState.REFUSED, 4 << 50, 4.0) == (
        reload.state,
        reload.needs.memory_bytes,
        reload.needs.seconds,
    )
    why, needs, end = lines_of(reload.to_dict())
    assert "x.yaml:1:" in why
    assert "the new processes need about 4194304.0 GiB of memory beside the old ones, and " in why
    assert "one after the other they need 3145728.0 GiB (surge: rolling)" in why
    assert needs.startswith("it would take about 4 s, and 4194304.0 GiB of memory in addition meanwhile; ")
    assert "refused: the server goes on unchanged" == end


def test_a_server_that_is_busy_is_asked_again_for_the_same() -> None:
    """The second question has the body of the first, and not that of the answer."""
    bodies: list[Any] = []

    class Busy(BaseHTTPRequestHandler):
        """Refuses the first request."""

        def do_PUT(self) -> None:
            """Notes what it is asked."""
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            told = {"ended": True} if len(bodies) > 1 else {"error": "busy"}
            self.send_response(200 if len(bodies) > 1 else 503)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        admin = AdminAddress(host="127.0.0.1", port=server.server_address[1], token=None)
        assert {"ended": True} == reload_server(admin, "nothing", timeout_s=60.0)
        server.shutdown()
    assert [{"what": "nothing"}] * 2 == bodies
