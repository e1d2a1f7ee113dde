"""Files that hold a secret are read where nobody else has rights to them: keys, tokens, the key of TLS; one rule for all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.secret_files import write_secret

from shapestream.errors import ConfigurationError
from shapestream.transport.curve_keys import new_key_pair, read_key_pair, write_key_pair
from shapestream.web.tokens import read_tokens
from shapestream_workers.gateways import read_tls
from shapestream_workers.reload import admin_port_of

STRANGER = 54321
"""The number of no user of the machine."""


def curve_key(folder: Path) -> tuple[Path, Callable[[Path], object]]:
    """`server.security.key`, and `--key` of clients and workers."""
    return write_key_pair(folder, "server", new_key_pair())[0], read_key_pair


def tokens(folder: Path) -> tuple[Path, Callable[[Path], object]]:
    """`token_file` of `http` and `grpc`."""
    return write_secret(folder / "tokens", "shop secret-word\n"), read_tokens


def admin_token(folder: Path) -> tuple[Path, Callable[[Path], object]]:
    """`server.admin.token_file`."""
    return write_secret(folder / "token", "secret-word\n"), lambda path: read_tokens(path, only="admin")


def token_of_a_command(folder: Path) -> tuple[Path, Callable[[Path], object]]:
    """`shapestream reload --token-file`."""
    return write_secret(folder / "token", "secret-word\n"), lambda path: admin_port_of("127.0.0.1:1", path)


def tls_key(folder: Path) -> tuple[Path, Callable[[Path], object]]:
    """`tls.key` of `http` and `grpc`."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command = ["openssl", "req", *options, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, lambda path: read_tls(certificate, path)


KINDS = [curve_key, tokens, admin_token, token_of_a_command, tls_key]
Kind = Callable[[Path], tuple[Path, Callable[[Path], object]]]


@pytest.mark.parametrize(
    ("mode", "is_read"),
    [
        (0o400, True),
        (0o600, True),
        (0o440, True),
        (0o640, True),
        (0o444, False),
        (0o441, False),
        (0o420, False),
        (0o460, False),
        (0o450, False),
        (0o602, False),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_the_process_may_read_a_file_of_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, mode: int, is_read: bool
) -> None:
    """And nothing more: so fsGroup of a pod mounts a Secret, by a supplementary group."""
    path, read = kind(tmp_path)
    os.chmod(path, mode)
    status = os.stat(path)
    if status.st_uid != 0:
        pytest.skip("only root can make a file of root's")
    monkeypatch.setattr(os, "getegid", lambda: status.st_gid + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [status.st_gid + 2, status.st_gid])
    if is_read:
        assert read(path)
        return
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o} lets others at a .*fsGroup") as caught:
        read(path)
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(("mode", "is_read"), [(0o400, True), (0o600, True), (0o440, False), (0o640, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_not_the_process_s_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, mode: int, is_read: bool
) -> None:
    """A file without rights of a group is read; the message names the mode that it needs."""
    path, read = kind(tmp_path)
    os.chmod(path, mode)
    gid = os.stat(path).st_gid
    monkeypatch.setattr(os, "getegid", lambda: gid + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [gid + 2])
    if is_read:
        assert read(path)
        return
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o} lets others at a .*chmod 600"):
        read(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, mode: int
) -> None:
    """Whatever its mode, also where root reads it: its owner could replace the secret."""
    path, read = kind(tmp_path)
    os.chmod(path, mode)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, os.getegid())
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_holds_no_secret(tmp_path: Path, kind: Kind) -> None:
    """Nothing, a folder, a named pipe: an error at once; a link to a file is followed, as a Secret's are."""
    path, read = kind(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to(path)
    assert read(tmp_path / "link")
    for other in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigurationError, match=f"^{other}: "):
            read(other)
