"""`shapestream reload`, and the admin port's `/reload`: what a reload did, and the status that it ends with."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
from tests.e2e.admin import get, port_of
from tests.e2e.conftest import until
from tests.e2e.sorter import ask, model
from tests.secret_files import write_secret

import shapestream

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e

SERVER = "    server: {listen: [ipc://s.sock], admin: 127.0.0.1:0}\n"
WORKERS = "    workers: [{count: 2, slots: 1}]\n"


def yaml(*models: str, server: str = SERVER, workers: str = WORKERS) -> str:
    """A server with these models, and an admin port."""
    return server + "    models:\n" + "".join(models) + workers


def metrics(port: int) -> dict[str, float]:
    """The metrics of reloads."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in re.findall(r"^shapestream_(reload\S+) (\S+)$", text, re.M)}


def test_a_reload_says_what_changed_and_ends_with_0(workplace: Any) -> None:
    """Models, workers, and settings that need a restart; it waits until the last worker was replaced."""
    served = workplace.serve(yaml(model("kept"), model("gone"), model("other")))
    served.wait_for("workers ready")
    port = port_of(served)
    first = set(served.workers().values())
    assert {
        'reloads_total{result="incomplete"}': 0.0,
        'reloads_total{result="ok"}': 0.0,
        'reloads_total{result="refused"}': 0.0,
        "reload_success_timestamp_seconds": 0.0,
        "reload_success_seconds": 0.0,
    } == metrics(port)
    with served.client() as client:
        ask(client, "other")
    workplace.write(
        yaml(
            model("kept"),
            model("new"),
            model("other").replace("trust: true", "batching: {max_delay_ms: 7}, trust: true"),
            server=SERVER.replace("}", ", grace_s: 30}"),
        )
    )
    ran = workplace.invoke("reload", f"127.0.0.1:{port}")
    assert 0 == ran.exit_code, ran.stderr
    *lines, last = ran.stdout.splitlines()
    assert [
        "models added: new",
        "models removed: gone",
        "model changed: other (batching)",
        "workers replaced: w0, w1",
        "changed only by a restart of the server: server.grace_s",
    ] == lines
    assert re.fullmatch(r"done after \d+\.\d s", last)
    assert not first & set(served.workers().values())
    with served.client() as client:
        assert [1.0, 2.0] == ask(client, "new")
    told = metrics(port)
    assert (1.0, True) == (told['reloads_total{result="ok"}'], told["reload_success_seconds"] > 0.0)
    assert told["reload_success_timestamp_seconds"] > 1.7e9
    as_json = workplace.invoke("reload", f"127.0.0.1:{port}", "--json")
    assert (0, "ok", 2) == (
        as_json.exit_code,
        *(json.loads(as_json.stdout)[key] for key in ("state", "number")),
    )
    assert "no model changed" in as_json.stderr


def test_a_yaml_that_cannot_be_used_is_refused_by_its_lines(workplace: Any) -> None:
    """With status 1, by the server, or by the command where it was given the file; everything stays."""
    served = workplace.serve(yaml(model("m")))
    served.wait_for("workers ready")
    port = port_of(served)
    before = served.workers()
    config = workplace.write(yaml(model("m").replace("trust:", "tust:")))
    for target in (f"127.0.0.1:{port}", str(config)):
        ran = workplace.invoke("reload", target)
        assert (1, "") == (ran.exit_code, ran.stdout)
        first, last = ran.stderr.splitlines()
        assert re.match(rf"{config}:3:\d+: models\[0\].tust: unknown key", first)
        assert "refused: the server goes on unchanged" == last
    assert before == served.workers()
    assert 1.0 == metrics(port)['reloads_total{result="refused"}']
    assert "refused" == get(port, "/reload")[1]["state"]


def test_a_worker_that_cannot_use_it_is_named_with_its_reason(workplace: Any) -> None:
    """Status 1; the old process goes on, and requests for the model that nobody could bring end at once."""
    served = workplace.serve(yaml(model("m"), workers="    workers: [{count: 1, slots: 1}]\n"))
    served.wait_for("workers ready")
    port = port_of(served)
    workplace.write(
        yaml(
            model("m"),
            model("bad", function="gated:nothing"),
            workers="    workers: [{count: 1, slots: 1}]\n",
        )
    )
    ran = workplace.invoke("reload", f"127.0.0.1:{port}")
    assert 1 == ran.exit_code
    assert "models added: bad" == ran.stderr.splitlines()[0]
    (kept,) = re.findall(r"^worker w0 goes on unchanged: (.*)$", ran.stderr, re.M)
    assert "server.yaml:4:" in kept
    assert "gated" in kept
    with served.client() as client:
        assert [1.0, 2.0] == ask(client, "m")
        with pytest.raises(shapestream.Unavailable, match="no worker could be started with it"):
            ask(client, "bad")
    assert 1.0 == metrics(port)['reloads_total{result="incomplete"}']
    workplace.write(yaml(model("m"), model("bad"), workers="    workers: [{count: 1, slots: 1}]\n"))
    assert 0 == workplace.invoke("reload", f"127.0.0.1:{port}").exit_code
    with served.client() as client:
        assert [1.0, 2.0] == ask(client, "bad")


def test_without_a_server_or_an_admin_port_it_says_so(workplace: Any) -> None:
    """Status 1 where nobody answers; 2 where the YAML names no port, or an unknown option is given."""
    config = workplace.write(yaml(model("m"), server="    server: {listen: [ipc://s.sock]}\n"))
    ran = workplace.invoke("reload", str(config))
    assert 2 == ran.exit_code
    assert "has no server.admin" in " ".join(ran.stderr.split())
    assert 2 == workplace.invoke("reload", "--now").exit_code
    config = workplace.write(yaml(model("m"), server=SERVER.replace(":0}", ":9}")))
    ran = workplace.invoke("reload", str(config), "--timeout", "0")
    assert 1 == ran.exit_code
    assert "no admin port of a server answers at http://127.0.0.1:9" in ran.stderr


def test_the_token_of_the_admin_port_is_needed(workplace: Any) -> None:
    """As for other changes through the port; SIGHUP needs none, and its result is told as well."""
    write_secret(workplace.folder / "token", "secret-word\n")
    server = SERVER.replace("127.0.0.1:0", "{address: 0.0.0.0:0, token_file: token}")
    served = workplace.serve(yaml(model("m"), server=server, workers="    in_process: {slots: 1}\n"))
    port = port_of(served)
    ran = workplace.invoke("reload", f"127.0.0.1:{port}")
    assert 1 == ran.exit_code
    assert "the token is missing or wrong (add --token-file FILE)" in ran.stderr
    json_type, bearer = {"Content-Type": "application/json"}, {"Authorization": "Bearer secret-word"}
    assert 401 == get(port, "/reload", "PUT", b"{}", **json_type)[0]
    assert 404 == get(port, "/reload", **bearer)[0]
    for body in (b"", b"[]", b'{"all": true}'):
        assert 400 == get(port, "/reload", "PUT", body, **json_type, **bearer)[0]
    assert 400 == get(port, "/reload?number=x", **bearer)[0]
    served.send(signal.SIGHUP)
    until("a reload", lambda: get(port, "/reload", **bearer)[1].get("ended"))
    workplace.write(yaml(model("m"), model("new"), server=server, workers="    in_process: {slots: 1}\n"))
    token = str(workplace.folder / "token")
    ran = workplace.invoke("reload", f"127.0.0.1:{port}", "--token-file", token)
    assert 0 == ran.exit_code, ran.stderr
    assert ["models added: new", "workers replaced: local"] == ran.stdout.splitlines()[:2]
    assert (404, 2) == (
        get(port, "/reload?number=7", **bearer)[0],
        get(port, "/reload?number=2", **bearer)[1]["number"],
    )
