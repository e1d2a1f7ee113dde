"""The pods of deploy/kubernetes as processes: arguments, files and probes of the rendered objects; paths and ports moved.

Secrets and ConfigMaps are laid out as a kubelet does: files are links into a hidden folder, keys have the mode 0440. The
model is one of PyTorch's exports.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.e2e.conftest import PATIENCE_S, ROOT, Command, Workplace, until

from shapestream import blocking

pytestmark = pytest.mark.e2e

RENDERED = ROOT / "deploy" / "kubernetes" / "rendered"
MODEL = ROOT / "tests" / "zoo" / "torch" / "encoder.onnx"
CALLER, ADMIN = "a" * 40, "b" * 40
IDS = [[5, 6, 7]]
BODY = {
    "inputs": [
        {"name": name, "datatype": "INT64", "shape": [1, 3], "data": data}
        for name, data in (("input_ids", IDS[0]), ("attention_mask", [1, 1, 1]))
    ]
}


def projected(folder: Path, files: dict[str, str | bytes], mode: int = 0o440) -> None:
    """The files of a Secret or ConfigMap, as a kubelet mounts them."""
    hidden = folder / "..2026_01_01"
    hidden.mkdir(parents=True)
    (folder / "..data").symlink_to(hidden.name)
    for name, content in files.items():
        file = hidden / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)
        (folder / name).symlink_to(f"..data/{name}")


def status(port: int, path: str, body: Any = None, token: str = "") -> int:
    """The status of one answer, over a connection of its own."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        if body is not None and answer.status == 200:
            assert [1, 48] == json.loads(text)["outputs"][0]["shape"]
        return answer.status


def free_ports(count: int) -> list[int]:
    """Ports at loopback that nobody has."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Cluster:
    """The objects of a rendered file, and a folder in the place of `/`."""

    def __init__(self, place: Workplace, name: str) -> None:
        self.place = place
        self.root = place.folder
        self.things = list(yaml.safe_load_all((RENDERED / f"{name}.yaml").read_text()))
        numbers = (8000, 8001, 8080, 9000, 5555, 5556, 9090)
        self.ports = dict(zip(numbers, free_ports(len(numbers)), strict=True))
        self.worker_admin = free_ports(1)[0]
        etc = self.root / "etc" / "shapestream"
        for owner in ("server", "worker", "client"):
            assert 0 == place.run("keys", "new", owner, "--folder", str(self.root / "made")).returncode
        made = {path.name: path.read_bytes() for path in (self.root / "made").iterdir()}
        projected(etc / "keys", {"server.secret": made["server.secret"]})
        projected(etc / "clients", {"client.pub": made["client.pub"]}, 0o644)
        projected(etc / "workers", {"worker.pub": made["worker.pub"]}, 0o644)
        projected(etc / "key", {name: made[name] for name in ("worker.secret", "server.pub")})
        projected(etc / "tokens", {"callers": f"web {CALLER}\n", "admin": f"{ADMIN}\n"})
        for config in self.of("ConfigMap"):
            (etc / "server.yaml").write_text(self.moved(config["data"]["server.yaml"]))
        (self.root / "models").mkdir()
        shutil.copy(MODEL, self.root / "models" / "model.onnx")

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The objects of these kinds."""
        return [thing for thing in self.things if thing["kind"] in kinds]

    def moved(self, text: str) -> str:
        """The same text with paths below our folder, and loopback's ports of ours."""
        text = re.sub(
            r"(?<!\w)/(?=(etc/shapestream|models|run/shapestream|var/cache|mnt/models)\b)",
            f"{self.root}/",
            text,
        )
        for old, new in self.ports.items():
            for host in ("0.0.0.0", "shapestream-server"):
                text = text.replace(f"{host}:{old}", f"127.0.0.1:{new}")
        return text.replace("{{.Name}}", "embeddings")

    def container(self, command: str) -> dict[str, Any]:
        """The container that runs a command."""
        specs = [
            *(thing["spec"]["template"]["spec"] for thing in self.of("Deployment", "StatefulSet")),
            *(thing["spec"] for thing in self.of("ServingRuntime")),
        ]
        found: list[dict[str, Any]] = [
            container
            for spec in specs
            for container in (*spec.get("initContainers", ()), *spec["containers"])
            if container["args"][0] == command
        ]
        return found[0]

    def arguments(self, command: str) -> list[str]:
        """Its arguments, moved."""
        return [self.moved(argument) for argument in self.container(command)["args"]]

    def asked(self, command: str, probe: str, port: int) -> int:
        """The status that a kubelet sees: it has no token."""
        try:
            return status(port, self.container(command)[probe]["httpGet"]["path"])
        except OSError:
            return 0


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, workplace: Workplace) -> None:
    """The pod's cache, as the image has it, below our folder; other tests share one."""
    for variable in ("SHAPESTREAM_PROBE_CACHE", "SHAPESTREAM_COST_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace.folder / "var" / "cache"))


def answers(port: int, token: str = "") -> int:
    """The status of one request for the model."""
    return status(port, "/v2/models/embeddings/infer", BODY, token)


def ended(command: Command) -> int:
    """Its status after the SIGTERM of a kubelet."""
    command.send(signal.SIGTERM)
    return command.wait()


def test_a_pod_with_its_own_workers(workplace: Workplace, cache: None) -> None:
    """It prepares, serves with keys and tokens, is ready when probed, measured with a token, and ends."""
    cluster = Cluster(workplace, "base")
    prepared = workplace.run(*cluster.arguments("prepare"))
    assert 0 == prepared.returncode, prepared.stderr
    served = workplace.start(*cluster.arguments("serve"))
    admin = cluster.ports[9090]
    until("ready", lambda: 200 == cluster.asked("serve", "startupProbe", admin))
    assert "cache" == served.wait_for("model tried")[0]["source"], "what was prepared counts"
    assert [200, 200] == [
        cluster.asked("serve", probe, admin) for probe in ("readinessProbe", "livenessProbe")
    ]
    assert [401, 200] == [status(admin, "/metrics", token=token) for token in ("", ADMIN)]
    assert [401, 200] == [answers(cluster.ports[8000], token) for token in ("", CALLER)]
    keys = {
        "key": cluster.root / "made" / "client.secret",
        "server_key": cluster.root / "made" / "server.pub",
    }
    with blocking.connect(f"tcp://127.0.0.1:{cluster.ports[5555]}", **keys) as client:
        result = client.infer("embeddings", {"input_ids": IDS, "attention_mask": [[1, 1, 1]]})
        assert np.isfinite(result["sentence_embedding"]).all()
    assert 0o700 == os.stat(cluster.root / "run" / "shapestream").st_mode & 0o777
    assert 0 == ended(served)


def test_workers_in_pods_of_their_own(workplace: Workplace, cache: None) -> None:
    """They find the server before it is ready, and make it so."""
    cluster = Cluster(workplace, "dial-in")
    served = workplace.start(*cluster.arguments("serve"))
    served.wait_for("server ready")
    admin = cluster.ports[9090]
    assert [503, 200] == [
        cluster.asked("serve", probe, admin) for probe in ("readinessProbe", "livenessProbe")
    ]
    # Two pods have an address each; here both processes have the same one.
    arguments = [
        argument.replace(f":{admin}", f":{cluster.worker_admin}") for argument in cluster.arguments("worker")
    ]
    worker = workplace.start(*arguments)
    until("worker ready", lambda: 200 == cluster.asked("worker", "startupProbe", cluster.worker_admin))
    until("server ready", lambda: 200 == cluster.asked("serve", "readinessProbe", admin))
    assert [401, 200] == [answers(cluster.ports[8000], token) for token in ("", CALLER)]
    assert 0 == ended(worker)
    assert 0 == ended(served)


def test_a_pod_of_kserve(workplace: Workplace, cache: None) -> None:
    """A mounted model and a name are enough; no ZeroMQ port is open."""
    cluster = Cluster(workplace, "kserve")
    (cluster.root / "mnt").mkdir()
    (cluster.root / "models").rename(cluster.root / "mnt" / "models")
    served = workplace.start(*cluster.arguments("serve-folder"))
    admin = cluster.ports[9090]
    until("ready", lambda: 200 == cluster.asked("serve-folder", "startupProbe", admin))
    assert 200 == answers(cluster.ports[8080])
    assert 200 == status(cluster.ports[8080], "/v2/models/embeddings/ready")
    assert 0 == ended(served)
