"""A protected server, its workers and its callers as processes: who is let in, who is not, and what they are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import PATIENCE_S, Served, Workplace, until

from shapestream import DeadlineExceeded, Unavailable, blocking
from shapestream.transport.curve_keys import KeyPair, new_key_pair, write_key_pair

pytestmark = pytest.mark.e2e

# How long a client that is refused may try, before it says why. It waits a second for a server's greeting, and asks then
# what became of its connection; if it had no time to learn that, it gets more.
REFUSED_S = (1.5, 4.0, 20.0)
ROLES = ("clients", "admins", "workers")
MODEL = """\
models:
  - name: double
    function: gated:double
    inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
    trust: true
    calibration_s: 0
"""
ONE: dict[str, Any] = {"x": np.ones((1, 3), np.float32)}


def doubled(client: blocking.Client) -> Any:
    """The answer to ONE."""
    return client.infer("double", ONE, deadline=PATIENCE_S)["y"].tolist()


def refused(connect: Callable[[float], object], words: str) -> None:
    """`connect`, given some seconds for it, fails, and says so."""
    for timeout_s in REFUSED_S:
        with pytest.raises(Unavailable) as caught:
            connect(timeout_s)
        if words in str(caught.value):
            return
    pytest.fail(f"{words!r} was to be said: {caught.value}")


class Protected:
    """A server that asks for keys at two tcp ports, with one worker of its own, and somebody in each role."""

    def __init__(self, place: Workplace) -> None:
        self.place = place
        self.keys = place.folder / "keys"
        self.pairs: dict[str, KeyPair] = {}
        for name, folder in (
            ("server", "."),
            ("alice", "clients"),
            ("root", "admins"),
            ("box", "workers"),
            ("stranger", "."),
        ):
            self.pairs[name] = new_key_pair()
            _, public = write_key_pair(self.keys / "all", name, self.pairs[name])
            (self.keys / folder).mkdir(exist_ok=True)
            (self.keys / folder / public.name).write_bytes(public.read_bytes())
        roles = ", ".join(f"{role}: keys/{role}" for role in ROLES)
        self.text = (
            "server:\n  listen: ['tcp://127.0.0.1:*', ipc://s.sock]\n  worker_listen: 'tcp://127.0.0.1:*'\n"
            f"  heartbeat_s: 0.2\n  security: {{key: keys/all/server.secret, {roles}}}\n"
            f"{MODEL}workers: [{{count: 1, slots: 1, threads: 1}}]\nlogging: {{level: debug, format: json}}\n"
        )
        self.served: Served = place.serve(self.text)
        (ready,) = self.served.events("server ready")
        (self.clients,) = (address for address in ready["listen"] if address.startswith("tcp:"))
        (self.workers,) = (address for address in ready["workers"] if address.startswith("tcp:"))

    def secret(self, name: str) -> Path:
        """The file."""
        return self.keys / "all" / f"{name}.secret"

    def client(self, name: str, server: str = "server", timeout_s: float = PATIENCE_S) -> blocking.Client:
        """A client with this key that expects that server."""
        return blocking.connect(
            self.clients,
            connect_timeout=timeout_s,
            key=self.secret(name),
            server_key=self.pairs[server].public,
        )

    def own_text(self, *sections: str) -> str:
        """The file of a worker elsewhere: it knows nothing of the server's keys."""
        return MODEL + "\n".join(sections) + "\nlogging: {format: json}\n"


@pytest.fixture(scope="module")
def protected(module_workplace: Workplace) -> Protected:
    """One server for the tests of this file."""
    return Protected(module_workplace)


def test_a_listed_client_is_served_and_sees_no_counters(protected: Protected) -> None:
    """The counters tell of other clients; which models there are it must know."""
    with protected.client("alice") as client:
        assert [[2.0, 2.0, 2.0]] == doubled(client)
        seen = client.statistics()
        assert ("double",) == seen["models"]
        assert {
            "models",
            "chains",
            "unavailable",
            "digests",
            "versions",
            "not_ready",
            "models_not_ready",
            "forbidden",
        } == set(seen)


def test_an_admin_sees_the_counters(protected: Protected) -> None:
    """An admin may send requests as well."""
    with protected.client("root") as client:
        assert [[2.0, 2.0, 2.0]] == doubled(client)
        assert client.statistics()["results"] >= 1


@pytest.mark.parametrize(
    ("name", "server", "words"),
    [
        ("stranger", "server", "it refuses this key"),
        ("box", "server", "it refuses this key"),
        ("alice", "stranger", "does not prove the server key"),
    ],
    ids=["a key that nobody listed", "a worker's key", "another server was expected"],
)
def test_others_are_told_why(protected: Protected, name: str, server: str, words: str) -> None:
    """`connect` fails as for a server that is away, with the reason; a client beside it is served on."""
    with protected.client("alice") as honest:
        refused(lambda timeout_s: protected.client(name, server, timeout_s), words)
        assert [[2.0, 2.0, 2.0]] == doubled(honest)


def test_a_client_without_a_key_is_told_that_it_needs_one(protected: Protected) -> None:
    """Nothing that it sends is read."""
    refused(
        lambda timeout_s: blocking.connect(protected.clients, connect_timeout=timeout_s),
        "asks for a key: give key and server_key",
    )


def test_refusals_are_counted_and_logged(protected: Protected) -> None:
    """By kind, in the statistics; a log line a second at most, however often a stranger comes."""

    def logged() -> bool:
        with pytest.raises(Unavailable):
            protected.client("stranger", "server", REFUSED_S[0])
        lines = protected.served.events("peer refused")
        unlisted = [event["why"] for event in lines if event["reason"] == "key not listed"]
        return any(protected.pairs["stranger"].public in why for why in unlisted)

    until("a line about the stranger", logged)
    with protected.client("root") as client:
        assert client.statistics()["peers_refused"]["clients"]["key not listed"] >= 1


def test_over_ipc_no_key_is_asked_for(protected: Protected) -> None:
    """Whoever may use the folder is at home, and may see everything."""
    with protected.served.client() as client:
        assert [[2.0, 2.0, 2.0]] == doubled(client)
        assert "peers_refused" in client.statistics()


def test_commands_take_keys(protected: Protected) -> None:
    """From options or from the environment; without them the error says which."""
    keys = [
        "--key",
        str(protected.secret("alice")),
        "--server-key",
        str(protected.keys / "all" / "server.pub"),
    ]
    done = protected.place.run("infer", protected.clients, "double", "x=[[1, 2]]", "--json", *keys)
    assert (0, [[2.0, 4.0]]) == (done.returncode, json.loads(done.stdout)["outputs"]["y"]["data"])
    assert "model double" in protected.place.invoke("models", protected.clients, *keys).stdout
    half = protected.place.invoke("models", protected.clients, *keys[:2])
    assert (3, True) == (half.exit_code, "server_key is missing" in half.stderr)

    for timeout_s in REFUSED_S:
        none = protected.place.invoke("models", protected.clients, "--timeout", str(timeout_s))
        assert 1 == none.exit_code
        if "it asks for a key" in none.stderr:
            break
    assert "it asks for a key" in none.stderr


def test_a_worker_dials_in_with_its_key_and_a_clients_key_does_not_let_it(protected: Protected) -> None:
    """The one is welcomed and serves; the other is told why not, and goes on trying."""
    config = protected.place.write("server: {listen: [ipc://o.sock]}\n" + protected.own_text(), "box.yaml")
    options = ["--connect", protected.workers, "--server-key", str(protected.keys / "all" / "server.pub")]
    box = protected.place.start(
        "worker", str(config), "--name", "box", "--key", str(protected.secret("box")), *options
    )
    box.wait_for("worker ready")
    until(
        "its welcome in the server's log",
        lambda: any("box" in event["worker"] for event in protected.served.events("worker joined")),
    )
    liar = protected.place.start(
        "worker", str(config), "--name", "liar", "--key", str(protected.secret("alice")), *options
    )
    refused = liar.wait_for("the server does not let this worker in")
    assert "it refuses this key" in refused[0]["why"]
    assert not any("liar" in event["worker"] for event in protected.served.events("worker joined"))
    for command in (box, liar):
        command.kill()


def test_keys_are_given_and_taken_back_while_it_serves(protected: Protected) -> None:
    """SIGHUP reads the lists again: a new key is let in, one that is gone is cut off, the others notice nothing."""
    listed = protected.keys / "clients" / "stranger.pub"
    with protected.client("alice") as alice:
        listed.write_bytes((protected.keys / "all" / "stranger.pub").read_bytes())
        protected.served.send(signal.SIGHUP)
        assert 2 == protected.served.wait_for("keys are read again")[0]["clients"]
        with protected.client("stranger") as friend:
            assert [[2.0, 2.0, 2.0]] == doubled(friend)
            listed.unlink()
            protected.served.send(signal.SIGHUP)
            protected.served.wait_for("keys are read again", 2)
            with pytest.raises(DeadlineExceeded):
                friend.infer("double", ONE, deadline=1.0)
        refused(lambda timeout_s: protected.client("stranger", "server", timeout_s), "it refuses this key")
        assert [[2.0, 2.0, 2.0]] == doubled(alice)


def test_no_secret_is_in_any_log(protected: Protected) -> None:
    """At the level `debug`, after all of the above, nor in what `check --show` prints."""
    shown = protected.place.invoke("check", str(protected.served.config), "--show")
    assert "keys/all/server.secret" in shown.stdout
    texts = [shown.stdout, shown.stderr, *(command.log.read_text() for command in protected.place.commands)]
    for pair in protected.pairs.values():
        assert not any(pair.secret in text for text in texts)


# ---------------------------------------------------------------- what is refused before a port is open


def refused_settings(place: Workplace, server: str) -> str:
    """What `serve` says before it ends with status 3."""
    done: subprocess.CompletedProcess[str] = place.run(
        "serve", str(place.write(f"server: {server}\n{MODEL}"))
    )
    assert 3 == done.returncode
    return done.stderr


def test_an_open_address_needs_a_decision(workplace: Workplace) -> None:
    """The error names both ways out."""
    said = refused_settings(workplace, "{listen: ['tcp://0.0.0.0:5555']}")
    assert "is open to other machines" in said
    assert "security: network" in said


def test_a_secret_that_others_can_read_is_refused(workplace: Workplace) -> None:
    """With the file, its mode, and what to do; also by `check`."""
    secret, _ = write_key_pair(workplace.folder / "keys", "server", new_key_pair())
    os.chmod(secret, 0o644)
    keys = "{key: keys/server.secret, clients: [keys/server.pub]}"
    server = f"{{listen: ['tcp://127.0.0.1:*'], security: {keys}}}"
    said = refused_settings(workplace, server)
    assert f"{secret}: mode 0644 lets others at a secret key (chmod 600" in said
    assert "fsGroup" in said
    checked = workplace.invoke("check", str(workplace.folder / "server.yaml"))
    assert (3, True) == (checked.exit_code, "chmod 600" in checked.stderr)
