"""A rolling restart in a network of its own, as a Deployment makes one: each new pod has an address that none had before.

    unshare -n -m python -m tests.e2e.network.rollout FOLDER

A pod is a real `shapestream serve` with workers and gateways in a network namespace of its own, at the end of a pair of
virtual cards. Its address goes with it: nothing there refuses a connection any more. What a cluster does besides is done
here:

- *probes*: the admin port's readiness, twice, as deploy/kubernetes/base has it, but more often;
- a *headless service*: the addresses of the ready pods in /etc/hosts of this mount namespace, for the SDK with its keys;
- a *service* for HTTP and gRPC: haproxy, whose servers are set over its runtime API, as a controller does. It tries nothing
  again. Where there is no haproxy, that part is left out.

The last line of the output is JSON: answers, failures and the longest wait by kind of caller, and which pods the SDK knows.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.e2e.balancing import BODY, PATH
from tests.e2e.conftest import COMMAND, PYTHONPATH, until
from tests.e2e.grpc_calls import TIMEOUT_S, Caller, request

from shapestream import blocking

PODS = 2
STEP = 300
"""Answers of each kind between two steps, at least."""
NAME = "servers.test"
SDK, HTTP, GRPC, ADMIN = 5555, 8000, 8001, 9090
TOKEN = "t" * 40
PROBE_S = 0.25
FAILURES = 2
"""Probes in a row that fail before a pod counts as not ready: those of deploy/kubernetes/base."""
PAUSE_S = 0.01
"""Between two requests of one caller."""
YAML = """\
server:
  listen: ["ipc://{folder}/server.sock", "tcp://0.0.0.0:{sdk}"]
  security: {{key: {keys}/server.secret, clients: [{keys}/client.pub]}}
  http: {{address: "0.0.0.0:{http}", token_file: {keys}/callers}}
  grpc: {{address: "0.0.0.0:{grpc}", token_file: {keys}/callers}}
  admin: {{address: "0.0.0.0:{admin}", token_file: {keys}/admin}}
  lame_duck_s: {lame_duck_s}
models:
  - name: gated
    function: gated:double_in_silence
    trust: true
    calibration_s: 0
    inputs: {{x: {{shape: "batch:1..8, n:1..64", element_type: f32}}}}
    outputs: {{y: {{shape: "batch, n", element_type: f32}}}}
    batching: {{max_batch: 4, hang_after_s: off}}
workers: [{{count: 1, slots: 1, threads: 1}}]
logging: {{format: json}}
"""
LAME_DUCK_S = 10
"""The default of servers that other machines reach."""
HAPROXY = """\
global
  stats socket {folder}/haproxy.sock mode 600 level admin
  nbthread 1
defaults
  mode http
  retries 0
  timeout connect 10s
  timeout client 100s
  timeout server 100s
frontend web
  bind 127.0.0.1:{http}
  default_backend web
backend web
  balance roundrobin
  server-template pod 8 10.77.0.254:{http} disabled
frontend rpc
  bind 127.0.0.1:{grpc} proto h2
  default_backend rpc
backend rpc
  balance roundrobin
  server-template pod 8 10.77.0.254:{grpc} proto h2 disabled
"""


def ip(*arguments: str, inside: int | None = None) -> None:
    """Run `ip`, in the namespace of a process or in ours."""
    within = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    subprocess.run([*within, "ip", *arguments], check=True)


class Pod:
    """A server in a namespace of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.address = f"10.77.0.{10 + number}"
        self.ready = False
        self.failed = FAILURES
        own = folder / f"pod{number}"
        own.mkdir()
        config = own / "server.yaml"
        ports = {"sdk": SDK, "http": HTTP, "grpc": GRPC, "admin": ADMIN}
        config.write_text(YAML.format(folder=own, keys=folder / "keys", lame_duck_s=LAME_DUCK_S, **ports))
        # The shell waits in the new namespace until it has a card.
        wait = ["unshare", "-n", "sh", "-c", 'echo here; read _; exec "$@" 1>&2', "sh"]
        self.log = own / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*wait, *COMMAND, "serve", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=own,
                env={**os.environ, "PYTHONPATH": PYTHONPATH, "SHAPESTREAM_ANY_FUNCTION": "1"},
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert b"here\n" == self.process.stdout.readline()
        pid = self.process.pid
        ip("link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", f"pod{number}", "master", "br0", "up")
        ip("addr", "add", f"{self.address}/24", "dev", "eth0", inside=pid)
        for card in ("lo", "eth0"):
            ip("link", "set", card, "up", inside=pid)
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def probe(self) -> None:
        """Ask for its readiness once."""
        try:
            with closing(http.client.HTTPConnection(self.address, ADMIN, timeout=2)) as asked:
                asked.request("GET", "/health/ready")
                works = asked.getresponse().status == 200
        except OSError:
            works = False
        self.failed = 0 if works else self.failed + 1
        self.ready = works if works or self.failed >= FAILURES else self.ready

    def kill(self) -> None:
        """End it, however it went."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.process.kill()
        self.process.wait()


@dataclass
class Cluster:
    """The pods, and what follows from their readiness."""

    folder: Path
    has_haproxy: bool
    pods: list[Pod] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    shown: list[Pod] = field(default_factory=list)
    """The pods that the services have."""
    over: threading.Event = field(default_factory=threading.Event)

    def add(self) -> Pod:
        """Start a pod, and wait until the services have it."""
        pod = Pod(self.folder, next(self.numbers))
        self.pods.append(pod)
        until(f"pod {pod.number}", lambda: pod in self.shown or pod.process.poll() is not None)
        if pod.process.poll() is not None:
            raise SystemExit(f"pod {pod.number} ended:\n{pod.log.read_text()}")
        return pod

    def remove(self, pod: Pod) -> None:
        """Ask it to end, as a kubelet does, and wait for that."""
        pod.process.send_signal(signal.SIGTERM)
        if status := pod.process.wait(TIMEOUT_S):
            raise SystemExit(f"pod {pod.number} ended with {status}:\n{pod.log.read_text()}")
        self.pods.remove(pod)

    def watch(self) -> None:
        """Probe the pods, and tell the services."""
        while not self.over.wait(PROBE_S):
            for pod in [*self.pods]:
                pod.probe()
            ready = [pod for pod in self.pods if pod.ready]
            if ready != self.shown:
                self._tell_names(ready)
                self._tell_haproxy(ready)
                self.shown = ready

    def _tell_names(self, ready: Sequence[Pod]) -> None:
        lines = ["127.0.0.1 localhost", *(f"{pod.address} {NAME}" for pod in ready)]
        # It is mounted over /etc/hosts: the file must stay the same one.
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _tell_haproxy(self, ready: Sequence[Pod]) -> None:
        if not self.has_haproxy:
            return
        for pod in ready:
            if pod not in self.shown:
                for backend, port in (("web", HTTP), ("rpc", GRPC)):
                    server = f"{backend}/pod{pod.number}"
                    self._set(f"set server {server} addr {pod.address} port {port}")
                    self._set(f"set server {server} state ready")
        for pod in self.shown:
            if pod not in ready:
                for backend in ("web", "rpc"):
                    self._set(f"set server {backend}/pod{pod.number} state maint")

    def _set(self, command: str) -> None:
        with socket.socket(socket.AF_UNIX) as runtime:
            runtime.connect(str(self.folder / "haproxy.sock"))
            runtime.sendall(command.encode() + b"\n")
            answer = runtime.recv(65536).decode().strip()
        if answer and "changed" not in answer and "no need to change" not in answer:
            raise SystemExit(f"haproxy: {command}: {answer}")


@dataclass
class Callers:
    """Callers of several kinds, each one after the other; nothing is tried again here."""

    folder: Path
    has_haproxy: bool
    over: threading.Event = field(default_factory=threading.Event)
    answered: dict[str, int] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    client: blocking.Client | None = None

    @property
    def kinds(self) -> dict[str, Callable[[], None]]:
        """What each kind does until it is over."""
        kinds: dict[str, Callable[[], None]] = {"SDK": self._sdk, "SDK, a stream": self._stream}
        if self.has_haproxy:
            kinds |= {"HTTP, kept": self._kept, "HTTP, fresh": self._fresh, "gRPC": self._grpc}
        return kinds

    def more(self, count: int) -> None:
        """Wait for so many answers of each kind."""
        wanted = {kind: self.answered.get(kind, 0) + count for kind in self.kinds}
        until("answers", lambda: all(self.answered.get(kind, 0) >= wanted[kind] for kind in wanted))

    def _repeat(self, kind: str, ask: Callable[[], bool]) -> None:
        while not self.over.wait(PAUSE_S):
            began = time.monotonic()
            try:
                self._note(kind, began, is_right=ask())
            except Exception as error:  # noqa: BLE001 - whatever a caller may see is told
                self.failures.append(f"{kind}: {error!r}")

    def _note(self, kind: str, began: float, *, is_right: bool) -> None:
        if not is_right:
            self.failures.append(f"{kind}: a wrong answer")
            return
        self.answered[kind] = self.answered.get(kind, 0) + 1
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), time.monotonic() - began)

    def _sdk(self) -> None:
        assert self.client is not None
        client, numbers = self.client, itertools.count()

        def ask() -> bool:
            x = np.full((1, 1 + next(numbers) % 5), 3, np.float32)
            return bool((client.infer("gated", {"x": x})["y"] == 2 * x).all())

        self._repeat("SDK", ask)

    def _stream(self) -> None:
        assert self.client is not None
        began = time.monotonic()

        def inputs() -> Iterator[tuple[int, dict[str, Any]]]:
            for number in itertools.count(20):
                if self.over.wait(PAUSE_S):
                    return
                yield number, {"x": np.full((1, 1 + number % 5), number, np.float32)}

        with self.client.stream("gated", inputs(), max_in_flight=16, on_error="yield") as results:
            for result in results:
                if getattr(result, "error", None) is not None:
                    self.failures.append(f"SDK, a stream: {result.error!r}")
                    continue
                self._note("SDK, a stream", began, is_right=bool((result["y"] == 2 * result.key).all()))
                began = time.monotonic()

    def _kept(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", HTTP, timeout=TIMEOUT_S)) as connection:
            self._repeat("HTTP, kept", lambda: answers(connection))

    def _fresh(self) -> None:
        def ask() -> bool:
            with closing(http.client.HTTPConnection("127.0.0.1", HTTP, timeout=TIMEOUT_S)) as connection:
                return answers(connection)

        self._repeat("HTTP, fresh", ask)

    def _grpc(self) -> None:
        with Caller(f"127.0.0.1:{GRPC}", token=TOKEN) as caller:
            self._repeat("gRPC", lambda: caller.infer(request(), wait_for_ready=False) == [2.0, 4.0])


def answers(connection: http.client.HTTPConnection) -> bool:
    """Tell whether the answer of one inference is right; raises OSError for another status."""
    connection.request("POST", PATH, BODY, {"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise OSError(f"{answer.status}: {text[:200]!r}")
    return bool(json.loads(text)["outputs"][0]["data"] == [2, 4])


@contextmanager
def network(folder: Path) -> Iterator[None]:
    """A bridge for the pods, and names of our own."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "br0", "type", "bridge")
    ip("addr", "add", "10.77.0.1/24", "dev", "br0")
    ip("link", "set", "br0", "up")
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    yield  # both end with their namespaces


def make_secrets(folder: Path) -> Path:
    """Write keys of a server and a client, and tokens; returns their folder."""
    keys = folder / "keys"
    for owner in ("server", "client"):
        subprocess.run(
            [*COMMAND, "keys", "new", owner, "--folder", str(keys)], check=True, capture_output=True
        )
    for name, text in (("callers", f"web {TOKEN}\n"), ("admin", f"{'a' * 40}\n")):
        (keys / name).touch(0o600)
        (keys / name).write_text(text)
    return keys


@contextmanager
def haproxy(folder: Path, command: str | None) -> Iterator[None]:
    """Run it, if it is there."""
    if command is None:
        yield
        return
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(folder=folder, http=HTTP, grpc=GRPC))
    process = subprocess.Popen([command, "-db", "-f", str(config)], stdout=subprocess.DEVNULL)
    try:
        until("haproxy", lambda: (folder / "haproxy.sock").exists())
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Replace each pod by a new one at another address, under load."""
    folder = Path(sys.argv[1])
    command = shutil.which("haproxy")
    keys = make_secrets(folder)
    cluster = Cluster(folder, command is not None)
    callers = Callers(folder, command is not None)
    with ExitStack() as stack:
        stack.enter_context(network(folder))
        stack.enter_context(haproxy(folder, command))
        pool = stack.enter_context(ThreadPoolExecutor())
        stack.callback(lambda: [pod.kill() for pod in cluster.pods])
        stack.callback(cluster.over.set)
        watch = pool.submit(cluster.watch)
        for _ in range(PODS):
            cluster.add()
        client = stack.enter_context(
            blocking.connect(
                f"tcp://{NAME}:{SDK}",
                spread=True,
                key=keys / "client.secret",
                server_key=keys / "server.pub",
                connect_timeout=TIMEOUT_S,
            )
        )
        callers.client = client
        stack.callback(callers.over.set)
        running = [pool.submit(work) for work in callers.kinds.values()]
        callers.more(STEP)
        for old in [*cluster.pods]:
            cluster.add()
            callers.more(STEP)
            cluster.remove(old)
            callers.more(STEP)
        known = until(
            "the SDK to know the new pods alone",
            lambda: sorted(client.statistics()["servers"]) if is_new(client, cluster) else None,
        )
        callers.over.set()
        for each in running:
            each.result(TIMEOUT_S)
        cluster.over.set()
        watch.result(TIMEOUT_S)
    print(
        json.dumps(
            {
                "answered": callers.answered,
                "failures": callers.failures[:20],
                "longest_s": {kind: round(value, 2) for kind, value in callers.longest_s.items()},
                "known": known,
                "haproxy": command is not None,
            }
        )
    )


def is_new(client: blocking.Client, cluster: Cluster) -> bool:
    """Tell whether the client has a link to each pod, and to nothing else."""
    return sorted(client.statistics()["servers"]) == sorted(
        f"tcp://{pod.address}:{SDK}" for pod in cluster.pods
    )


if __name__ == "__main__":
    main()
