"""`server.security`: what it may say, what is missing, and that no secret is read from, or shown in, a YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapestream.addresses import is_beyond_loopback, reached_from_here
from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, load_settings
from shapestream.transport.curve_keys import KeyPair, new_key_pair, write_key_pair
from shapestream_workers.access import caller_keys, server_security

MODEL = "models: [{name: m, path: m.xml}]\n"
SERVER, ALICE, BOB = (new_key_pair() for _ in range(3))


def load(folder: Path, server: str) -> LoadedSettings:
    """Settings with this `server`; model files need not exist."""
    path = folder / "x.yaml"
    path.write_text(f"server: {server}\n{MODEL}")
    return load_settings(path, files_must_exist=False)


def problem(folder: Path, server: str) -> str:
    """The one problem of such a file."""
    with pytest.raises(ConfigurationError) as caught:
        load(folder, server)
    (found,) = caught.value.problems
    return found


def listed(*pairs: KeyPair) -> str:
    """Public keys as a YAML has them. The alphabet of Z85 has no single quote."""
    return "[" + ", ".join(f"'{pair.public}'" for pair in pairs) + "]"


@pytest.mark.parametrize(
    "server",
    [
        "{listen: ['tcp://0.0.0.0:5555'], security: network}",
        # The keys are new in each process, and a test's name is not.
        pytest.param(
            f"{{listen: ['tcp://*:5555'], security: {{key: k.secret, clients: {listed(ALICE)}}}}}",
            id="a list",
        ),
        "{listen: ['tcp://eth0:5555'], security: {key: k.secret, admins: keys/admins}}",
        "{listen: [ipc://s], worker_listen: 'tcp://[::]:5556', security: {key: k.secret, workers: keys/workers}}",
        "{listen: ['tcp://127.0.0.1:5555', 'tcp://[::1]:5555', 'tcp://localhost:5555']}",
    ],
)
def test_what_may_listen(tmp_path: Path, server: str) -> None:
    """Beyond loopback with keys, or with the word that the network is safe; on this machine with neither."""
    assert load(tmp_path, server).settings.models


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("{listen: ['tcp://10.0.0.1:5555']}", 'server.listen[0]: "tcp://10.0.0.1:5555" is open to other machines'),
        ("{listen: [ipc://s, 'tcp://eth0:5555']}", "server.listen[1]: "),
        ("{worker_listen: 'tcp://[::]:5556'}", 'server.worker_listen: "tcp://[::]:5556" is open'),
        ("{security: {}}", 'missing "key"'),
        pytest.param(f"{{security: {{clients: {listed(ALICE)}}}}}", 'missing "key"', id="a list without a key"),
        ("{listen: ['tcp://127.0.0.1:1'], security: {key: k}}", 'no client could use "tcp://127.0.0.1:1"'),
        ("{worker_listen: 'tcp://127.0.0.1:1', security: {key: k}}", 'no worker could use "tcp://127.0.0.1:1"'),
        ("{security: networks}", "expected keys, or the word network"),
        ("{security: {mode: network}}", "this key was removed (write security: network, or keys without a mode)"),
        ("{security: {key: k, clients: 7}}", "expected a folder of .pub files, or a list of public keys"),
        ("{security: {key: k, clients: [7]}}", "expected a folder of .pub files, or a list of public keys"),
        ("{security: {key: 7}}", "expected the path of a secret key's file"),
        ("{security: {key: k, client: k}}", 'unknown key (did you mean "clients"?)'),
        ("{listen: ['tcp://:5555']}", "has no host"),
    ],
)  # fmt: skip
def test_each_mistake_is_said_once(tmp_path: Path, server: str, words: str) -> None:
    """With its place, and what to do."""
    assert words in problem(tmp_path, server)


def test_a_secret_in_the_file_is_refused_and_not_repeated(tmp_path: Path) -> None:
    """A YAML is no place for it; nor is the error, which ends in a terminal or a log."""
    said = problem(tmp_path, f"{{security: {{key: '{SERVER.secret}'}}}}")
    assert "a key itself does not belong into this file" in said
    assert SERVER.secret not in said


def test_the_keys_are_read(tmp_path: Path) -> None:
    """From a folder, from .pub files and from the text itself, each in its role."""
    secret, _ = write_key_pair(tmp_path / "keys", "server", SERVER)
    write_key_pair(tmp_path / "clients", "alice", ALICE)
    _, bob = write_key_pair(tmp_path / "bobs", "bob", BOB)
    keys = f"key: {secret.relative_to(tmp_path)}, clients: clients, admins: [{bob}], workers: {listed(BOB)}"
    security = server_security(load(tmp_path, f"{{security: {{{keys}}}}}"))
    assert security is not None
    assert SERVER == security.key
    ring = security.ring
    assert ({ALICE.public: "alice"}, {BOB.public}, {BOB.public}) == (
        ring.clients,
        set(ring.admins),
        set(ring.workers),
    )
    assert SERVER.secret not in repr(security)


def test_every_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """All at once, with their places in the YAML."""
    loaded = load(tmp_path, "{security: {key: none.secret, clients: none, admins: [none.pub]}}")
    with pytest.raises(ConfigurationError) as caught:
        server_security(loaded)
    assert 3 == len(caught.value.problems)
    for found, key in zip(caught.value.problems, ("clients", "admins", "key"), strict=True):
        assert "x.yaml:1:" in found
        assert f"server.security.{key}: " in found


@pytest.mark.parametrize("server", ["{}", "{security: network}"])
def test_without_keys_nobody_is_asked(tmp_path: Path, server: str) -> None:
    """None is what the server takes for it."""
    assert server_security(load(tmp_path, server)) is None


def test_keys_of_callers_come_in_pairs(tmp_path: Path) -> None:
    """Half of them is a mistake; none is none."""
    secret, public = write_key_pair(tmp_path, "alice", ALICE)
    assert caller_keys(None, None) is None
    with pytest.raises(ConfigurationError, match="--key without --server-key"):
        caller_keys(secret, None)
    with pytest.raises(ConfigurationError, match="--server-key without --key"):
        caller_keys(None, SERVER.public)
    keys = caller_keys(secret, str(public))
    assert keys is not None
    assert (ALICE, ALICE.public) == (keys.key, keys.server_key)


@pytest.mark.parametrize(
    ("address", "beyond", "reached"),
    [
        ("ipc:///run/s", False, "ipc:///run/s"),
        ("tcp://127.0.0.1:1", False, "tcp://127.0.0.1:1"),
        ("tcp://127.9.9.9:1", False, "tcp://127.9.9.9:1"),
        ("tcp://localhost:1", False, "tcp://localhost:1"),
        ("tcp://[::1]:1", False, "tcp://[::1]:1"),
        ("tcp://0.0.0.0:1", True, "tcp://127.0.0.1:1"),
        ("tcp://*:1", True, "tcp://127.0.0.1:1"),
        ("tcp://[::]:1", True, "tcp://[::1]:1"),
        ("tcp://10.0.0.1:1", True, "tcp://10.0.0.1:1"),
        ("tcp://lo:1", True, "tcp://lo:1"),
        ("tcp://localhost.example:1", True, "tcp://localhost.example:1"),
    ],
)
def test_who_can_get_there(address: str, beyond: bool, reached: str) -> None:
    """A name that we do not know may be any of our interfaces; all interfaces are reached at loopback from here."""
    assert (beyond, reached) == (is_beyond_loopback(address), reached_from_here(address))
