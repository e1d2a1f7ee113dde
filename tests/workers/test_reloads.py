"""What a reload says of two YAMLs, without a server."""

from __future__ import annotations

from pathlib import Path

from shapestream.settings import Settings, load_settings
from shapestream_workers.reload import lines_of
from shapestream_workers.reloads import Changes, Reload, ReloadState, changes_between
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
        more="in_process: {slots: 2, memory_limit: 4GiB}\nserver: {heartbeat_s: 0.5, grace_s: 3, reload_s: 9}\n"
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
