"""A server inside the program: `shapestream.local.connect`, beside a real one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
from openvino import opset13 as ops
from tests.e2e.conftest import IMPORTABLE

import shapestream
from shapestream import local
from shapestream.errors import ConfigurationError, DeadlineExceeded

pytestmark = pytest.mark.e2e

Inputs = dict[str, np.ndarray[Any, Any]]

SERVER = """\
server:
  listen: [ipc://s.sock]
  admin: 127.0.0.1:0
  client_silence_s: 5
models:
  - name: m
    path: m.xml
    inputs: {x: {shape: "batch:1..64, length:1..100, 8"}}
workers: [{count: 1}]
"""


def mixing_model(path: Path) -> None:
    """An IR that mixes the last axis of `x` [batch, length, 8], and sums over the length."""
    x = ops.parameter([-1, -1, 8], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    weights = np.random.default_rng(5).standard_normal((8, 8)).astype(np.float32)
    mixed = ops.tanh(ops.matmul(x, ops.constant(weights), False, False))
    y = ops.reduce_sum(mixed, ops.constant(np.array([1])))
    y.output(0).get_tensor().set_names({"y"})
    ov.save_model(ov.Model([ops.result(y)], [x]), path, compress_to_fp16=False)


def items(count: int) -> list[Inputs]:
    """Requests of all lengths."""
    drawn = np.random.default_rng(7)
    return [
        {"x": drawn.standard_normal((1 + number % 3, length, 8)).astype(np.float32)}
        for number, length in enumerate(drawn.integers(1, 100, count))
    ]


def by_trio(config: Path, wanted: list[Inputs]) -> list[Any]:
    """One answer by `infer`, all by `stream`."""

    async def run() -> list[Any]:
        async with local.connect(config, cpus=2) as client:
            first = await client.infer("m", wanted[0])
            async with client.stream("m", wanted) as results:
                return [first["y"]] + [result["y"] async for result in results]

    return trio.run(run)


def by_asyncio(config: Path, wanted: list[Inputs]) -> list[Any]:
    """The same under asyncio."""

    async def run() -> list[Any]:
        async with local.connect(config, cpus=2) as client:
            first = await client.infer("m", wanted[0])
            async with client.stream("m", wanted) as results:
                return [first["y"]] + [result["y"] async for result in results]

    return asyncio.run(run())


def blocking(config: Path, wanted: list[Inputs]) -> list[Any]:
    """The same without an event loop."""
    with local.connect(config, cpus=2) as client:
        first = client.infer("m", wanted[0])
        with client.stream("m", wanted) as results:
            return [first["y"]] + [result["y"] for result in results]


def test_300_answers_are_those_of_a_real_server(workplace: Any) -> None:
    """By each of the three ways in, in order, from the same YAML; bits may differ with the company of a call."""
    mixing_model(workplace.folder / "m.xml")
    served = workplace.serve(SERVER)
    wanted = items(300)
    with served.client() as client, client.stream("m", wanted) as results:
        real = [result["y"] for result in results]
    for way in by_trio, by_asyncio, blocking:
        first, *found = way(served.config, wanted)
        assert [each.shape for each in real] == [each.shape for each in found]
        for one, other in zip([real[0], *real], [first, *found], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


PROGRAM = """
import asyncio, gc, json, logging, os, resource, signal, sys, threading
import psutil, structlog, trio
from shapestream import local

def state():
    return [
        {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        gc.get_freeze_count(), gc.isenabled(), structlog.is_configured(), sorted(os.listdir()),
        [handler for handler in logging.getLogger().handlers], logging.getLogger("shapestream").level,
    ]

before = state()
with local.connect("server.yaml") as client:
    within = state()
    addresses = [link.laddr for link in psutil.Process().net_connections("all") if link.laddr]
    import numpy
    answer = client.infer("m", {"x": numpy.ones((1, 3, 8), "f4")})["y"].shape
named = [one.name for one in threading.enumerate() if one.name.startswith(("slot", "shapestream"))]
print(json.dumps([before == within, before == state(), addresses, answer, named]))
"""


def test_the_program_keeps_what_is_its_own(workplace: Any) -> None:
    """Signals, limits, the collector and the logs stay; no address is listened at; two lines of warnings, and no others."""
    mixing_model(workplace.folder / "m.xml")
    workplace.write(SERVER)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=workplace.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (0, [True, True, [], [1, 8], []]) == (ran.returncode, json.loads(ran.stdout or "0")), ran.stderr
    first, second = ran.stderr.splitlines()
    assert first.startswith("models run in this process  why=a crash of a model ends it")
    ignored = "workers, server.listen, server.admin, server.client_silence_s"
    assert f"keys without a meaning here  keys={ignored}  path=server.yaml" == second


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch, workplace: Any) -> Any:
    """The functions of the tests can be imported here; those with a gate find its folder."""
    monkeypatch.syspath_prepend(str(IMPORTABLE))
    monkeypatch.setenv("E2E_FOLDER", str(workplace.folder))
    monkeypatch.delenv("SHAPESTREAM_ANY_FUNCTION")
    return workplace


def function_model(function: Callable[..., Any] | str, **more: Any) -> dict[str, Any]:
    """A model that is a function of `x`."""
    port = {"shape": "batch:1..8, 4", "element_type": "f32"}
    return {"name": "f", "function": function, "inputs": {"x": port}, "outputs": {"y": port}, **more}


X = np.arange(4, dtype=np.float32).reshape(1, 4)


def test_models_are_given_in_python(importable: Any) -> None:
    """As mappings or as settings; a function that is given as an object needs no registration, its name does."""
    import gated

    stated = function_model(gated.double)
    for model in stated, local.ModelSettings(**stated):
        with local.connect(models=[model]) as client:
            np.testing.assert_array_equal(2 * X, client.infer("f", {"x": X})["y"])
    with pytest.raises(ConfigurationError, match="no installed package registers 'gated:double'"):
        with local.connect(models=[function_model("gated:double")]):
            pass


@pytest.mark.parametrize(
    "nobodys", [lambda x: x, Path.cwd, np.float32(3).item], ids=["lambda", "method", "bound"]
)
def test_a_function_that_no_other_process_finds_is_refused(nobodys: Any) -> None:
    """The error says where to define it."""
    with pytest.raises(
        ConfigurationError, match=r"models\[0\]\.function: .* \(define it at the top of a module"
    ):
        local.connect(models=[function_model(nobodys)])


def test_mistakes_of_the_call(tmp_path: Path) -> None:
    """Each has an error of its own, before anything starts."""
    with pytest.raises(TypeError, match="one of them"):
        local.connect()
    with pytest.raises(TypeError, match="one of them"):
        local.connect("server.yaml", models=[])
    with pytest.raises(TypeError, match="goes with models"):
        local.connect("server.yaml", chains=[{}])
    with pytest.raises(ValueError, match="cpus is a count from 1, not 0"):
        local.connect("server.yaml", cpus=0)
    with pytest.raises(ConfigurationError, match="no such file"):
        local.connect(tmp_path / "absent.yaml")
    with pytest.raises(ConfigurationError, match="no models"):
        local.connect(models=[])


def test_the_wrong_keyword_is_named(importable: Any) -> None:
    """`with` under an event loop."""

    async def run() -> None:
        with (
            pytest.raises(TypeError, match="write async with"),
            local.connect(models=[function_model(sorted)]),
        ):
            pass

    trio.run(run)


def test_a_model_that_cannot_be_served_is_told_where_the_block_is_entered(tmp_path: Path) -> None:
    """As by `serve`, with the file and the line; each face raises it, and the program goes on."""
    (tmp_path / "m.xml").write_text("no model")
    config = tmp_path / "server.yaml"
    config.write_text("models:\n  - name: m\n    path: m.xml\n")

    async def enter() -> None:
        async with local.connect(config):
            raise AssertionError("it cannot be entered")

    for way in lambda: trio.run(enter), lambda: asyncio.run(enter()), local.connect(config).__enter__:
        with pytest.raises(ConfigurationError, match=r"server\.yaml:3:"):
            way()


def test_a_call_that_hangs_ends_by_its_deadline_and_is_named(
    importable: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The block is left in bounded time; the log names the slot and the model."""
    import gated

    model = function_model(gated.double_when_open, trust=True, calibration_s=0)
    with caplog.at_level(logging.WARNING, logger="shapestream"):
        with local.connect(models=[model], cpus=1, close_timeout=0.5) as client:
            with pytest.raises(DeadlineExceeded):
                client.infer("f", {"x": X}, deadline=1.0)
            importable.wait_entered()
    importable.open_gate()
    assert ["slot left behind  slot=0  model=f"] == [
        line.partition("  what=")[0] for line in caplog.messages if "slot" in line and "crash" not in line
    ]


def test_a_program_may_have_several_servers(importable: Any) -> None:
    """They start one after the other, and serve side by side; `import shapestream` is enough."""
    import gated

    found: list[Any] = []

    async def ask(factor: float) -> None:
        async with shapestream.local.connect(models=[function_model(gated.double)], cpus=1) as client:
            both.append(factor)
            if len(both) == 2:
                are_two.set()
            await are_two.wait()
            found.append((await client.infer("f", {"x": factor * X}))["y"].tolist())

    both: list[float] = []
    are_two = trio.Event()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1.0)
            nursery.start_soon(ask, 3.0)

    trio.run(run)
    assert sorted([(2 * X).tolist(), (6 * X).tolist()]) == sorted(found)


def test_cpus_decide_the_slots(importable: Any) -> None:
    """Half as many slots as CPUs, whatever the machine has."""
    import gated

    for cpus, slots in ((1, 1), (6, 3)):
        with local.connect(models=[function_model(gated.double)], cpus=cpus) as client:
            assert slots == len(client.statistics()["slots"])


def test_leaving_while_models_are_proved_does_not_wait_for_them(importable: Any) -> None:
    """A task that is cancelled while it enters is cancelled at once; the server ends when it would have begun."""
    import gated

    async def run() -> None:
        with trio.move_on_after(0.01) as scope:
            async with local.connect(models=[function_model(gated.double_when_open, calibration_s=0)]):
                pass
        assert scope.cancelled_caught

    trio.run(run)
    importable.open_gate()


def test_structlog_of_the_program_gets_no_line(importable: Any) -> None:
    """However it is configured, and however much the server would tell; `logging` decides."""
    program = textwrap.dedent("""
        import gated, logging, structlog
        from shapestream import local
        structlog.configure(processors=[lambda *_: print("structlog!")])
        logging.basicConfig(level="DEBUG", format="%(name)s %(levelname)s %(message)s", filename="log")
        port = {"shape": "batch:1..8, 4", "element_type": "f32"}
        model = {"name": "f", "function": gated.double, "inputs": {"x": port}, "outputs": {"y": port}}
        with local.connect(models=[model]) as client:
            client.infer("f", {"x": [[1, 2, 3, 4]]})
    """)
    (importable.folder / "program.py").write_text(program)
    ran = subprocess.run(
        [sys.executable, "program.py"],
        cwd=importable.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(IMPORTABLE), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert (0, "") == (ran.returncode, ran.stderr)
    assert "structlog!" not in ran.stdout
    log = (importable.folder / "log").read_text().splitlines()
    assert {"shapestream"} == {line.split()[0] for line in log if "  " in line}
    assert any(line.startswith("shapestream DEBUG results delivered") for line in log)
