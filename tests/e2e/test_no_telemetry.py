"""Engines that report home when they are imported do not, in any process that a command starts.

Two witnesses watch each command: an audit hook, which each Python process installs by `sitecustomize`, and strace, which
also sees what native threads do. Both are shown a look-up first, or their silence would prove nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto, helper
from openvino import opset13 as ops
from tests.e2e.conftest import COMMAND, PATIENCE_S, until

pytestmark = pytest.mark.e2e

HOOK = """\
import os, sys

def write(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        file = os.open(os.environ["LOOKED_UP"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{event} {arguments[0]}\\n".encode())
        os.close(file)

sys.addaudithook(write)
"""
LOOK_UP = [
    sys.executable,
    "-c",
    "import socket, contextlib\nwith contextlib.suppress(OSError): socket.getaddrinfo('shapestream.invalid', 443)",
]
# Engines stay silent where they take the machine for one of a build farm, or a test's.
SILENCING = (
    "CI",
    "TF_BUILD",
    "JENKINS_URL",
    "GITHUB_ACTIONS",
    "ORT_DISABLE_TELEMETRY",
    "ORT_RUNNING_UNIT_TESTS",
)
# strace's line of a call that speaks to an address of the internet; local sockets and netlink are no look-ups.
TO_INTERNET = re.compile(r"sa_family=AF_INET6?, sin6?_port=htons\((?!0\))")

MODELS = """\
    models:
      - {name: ir, path: m.xml, engine: openvino, inputs: {x: {shape: "batch:1..4, 3"}}}
      - {name: onnx, path: m.onnx, engine: onnxruntime, inputs: {x: {shape: "batch:1..4, 3"}}}
"""


def write_models(folder: Path) -> None:
    """The same doubling model for both engines."""
    x = ops.parameter([-1, 3], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    y = ops.add(x, x)
    y.output(0).get_tensor().set_names({"y"})
    ov.save_model(ov.Model([ops.result(y)], [x]), folder / "m.xml", compress_to_fp16=False)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save_model(model, folder / "m.onnx")


class Witnessed:
    """Commands whose look-ups are written down, in a home that nobody has used before."""

    def __init__(self, folder: Path, *, strace: bool) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self._looked_up = folder / "looked-up"
        self._traces = folder / "traces"
        self._traces.mkdir()
        hook = folder / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        kept = {name: value for name, value in os.environ.items() if name not in SILENCING}
        self.environment = {
            **kept,
            "HOME": str(self.home),
            "PYTHONPATH": str(hook),
            "LOOKED_UP": str(self._looked_up),
        }
        self.tracer: list[str] = []
        if strace:
            trace = [
                "-f",
                "-ff",
                "-e",
                "trace=connect,sendto,sendmsg,sendmmsg",
                "-o",
                str(self._traces / "t"),
            ]
            self.tracer = ["strace", "-qq", *trace]

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """One command, with its words in files."""
        with (self.folder / "words").open("wb") as words:
            return subprocess.Popen(
                [*self.tracer, *command],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd=self.folder,
                env=self.environment,
            )

    def words(self) -> str:
        """What the latest command has said so far."""
        return (self.folder / "words").read_text()

    def seen(self) -> tuple[list[str], list[str]]:
        """Every look-up that Python's hook saw, and every word to an address of the internet that strace saw."""
        looked_up = self._looked_up.read_text().splitlines() if self._looked_up.exists() else []
        traces = [line for path in self._traces.iterdir() for line in path.read_text().splitlines()]
        return looked_up, [line for line in traces if TO_INTERNET.search(line)]

    def looked_nothing_up(self) -> None:
        """Neither witness saw anything, and nothing of the engines' is in the home folder."""
        assert ([], []) == self.seen()
        assert [] == list(self.home.iterdir())


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why strace sees nothing here; empty: it has seen a look-up, as the hook has."""
    if shutil.which("strace") is None:
        blind = "it is not installed"
    elif subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], check=False).returncode:
        blind = "it may not trace"
    else:
        blind = ""
    shown = Witnessed(tmp_path_factory.mktemp("sample"), strace=not blind)
    assert 0 == shown.start(LOOK_UP).wait(PATIENCE_S)
    by_hook, by_strace = shown.seen()
    assert [] != by_hook
    return blind if blind or by_strace else "names are looked up without a word to the network"


@pytest.fixture
def witnessed(blind: str, tmp_path: Path) -> Witnessed:
    """Commands under both witnesses, or under the hook alone where strace is blind."""
    write_models(tmp_path)
    return Witnessed(tmp_path, strace=not blind)


def test_what_native_threads_look_up_would_be_seen(blind: str) -> None:
    """Skipped where strace is blind: the tests of this file have one witness then."""
    if blind:
        pytest.skip(f"strace does not see what native threads look up: {blind}")


@pytest.mark.parametrize("how", ["workers: [{count: 1}]", "in_process: true"])
def test_a_server_its_workers_and_their_probes_look_nothing_up(witnessed: Witnessed, how: str) -> None:
    """From an empty cache to the end: no look-up, and nothing of the engines' in the home folder."""
    config = witnessed.folder / "server.yaml"
    config.write_text("    server: {listen: [ipc://s.sock]}\n" + MODELS + f"    {how}\n")
    served = witnessed.start([*COMMAND, "serve", str(config)])
    try:
        ready = '"workers ready"' if how.startswith("workers") else '"server ready"'
        until(
            f"{ready} in {witnessed.words()}", lambda: ready in witnessed.words() or served.poll() is not None
        )
        # To the command itself: strace holds signals back while it traces.
        child = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()
        os.kill(int(child[0]) if witnessed.tracer else served.pid, signal.SIGTERM)
        assert 0 == served.wait(PATIENCE_S), witnessed.words()
    finally:
        served.kill()
        served.wait(PATIENCE_S)
    witnessed.looked_nothing_up()


@pytest.mark.parametrize("command", ["check", "models"])
def test_commands_that_load_models_look_nothing_up(witnessed: Witnessed, command: str) -> None:
    """`check` compiles and proves in this and other processes, `models` reads the files."""
    config = witnessed.folder / "server.yaml"
    config.write_text("    server: {listen: [ipc://s.sock]}\n" + MODELS)
    assert 0 == witnessed.start([*COMMAND, command, str(config)]).wait(PATIENCE_S), witnessed.words()
    witnessed.looked_nothing_up()


ENGINE_ALONE = """\
from pathlib import Path
from shapestream_engine import ModelSpec, compile_model
for path, engine in (("m.xml", "openvino"), ("m.onnx", "onnxruntime")):
    compile_model(ModelSpec(name="m", path=Path(path), engine=engine)).close()
import openvino, onnxruntime
"""


def test_the_engine_by_itself_looks_nothing_up(witnessed: Witnessed) -> None:
    """A program that compiles models with `shapestream_engine`, and then imports the engines, too."""
    ran = witnessed.start([sys.executable, "-c", ENGINE_ALONE])
    assert 0 == ran.wait(PATIENCE_S), witnessed.words()
    witnessed.looked_nothing_up()
