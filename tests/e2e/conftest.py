"""Real processes for the tests of this folder: started from a YAML as users do, and never left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from shapestream import blocking
from shapestream_workers.cli import app

# Nothing here takes long; a machine that is busy with other things may. No test waits so long to see that nothing comes.
PATIENCE_S = 120.0
IMPORTABLE = Path(__file__).parent / "importable"
ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(IMPORTABLE), str(ROOT), os.environ.get("PYTHONPATH")]))
COMMAND = [sys.executable, "-P", "-m", "shapestream_workers"]

# Under `nohup` SIGHUP is ignored, here and in all children. A server rightly leaves it so until it serves; tests send it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Broken(AssertionError):
    """Something ended, or did not begin, that nobody had meant to."""


def until(what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Polls real processes; returns what `condition` does once it is true, and raises `Broken` when it takes too long."""
    give_up_at = time.monotonic() + patience_s
    while time.monotonic() < give_up_at:
        if value := condition():
            return value
        time.sleep(0.02)
    raise Broken(f"not within {patience_s:g} s: {what}")


class Command:
    """One running `shapestream` command, its log, and its end."""

    MODULE = "shapestream_workers"

    def __init__(self, folder: Path, arguments: list[str], label: str) -> None:
        self.folder = folder
        self.log = folder / f"{label}.log"
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "E2E_FOLDER": str(folder)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND[:-1], self.MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.family: set[int] = {self.process.pid}

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self.process.pid

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's JSON lines about one kind of event so far."""
        # The last piece is empty, or a line that is being written.
        mark = json.dumps(name).encode()
        lines = self.log.read_bytes().split(b"\n")[:-1]
        events = (json.loads(line) for line in lines if line.startswith(b"{") and mark in line)
        return [event for event in events if event.get("event") == name]

    def wait_for(self, name: str, count: int = 1, patience_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        """The events of that name, once there are so many."""

        def enough() -> list[dict[str, Any]] | None:
            if self.process.poll() is not None and len(self.events(name)) < count:
                pytest.fail(f"ended with {self.process.returncode} before {name!r}:\n{self.log.read_text()}")
            found = self.events(name)
            return found if len(found) >= count else None

        found: list[dict[str, Any]] = until(f"{count} x {name!r} in {self.log}", enough, patience_s)
        self.workers()
        return found

    def workers(self) -> dict[str, int]:
        """The pids of the worker processes that run now, by name."""
        running: dict[str, int] = {}
        for event in self.events("worker started"):
            running[event["worker"]] = event["pid"]
        self.family.update(running.values())
        return {name: pid for name, pid in running.items() if alive(pid)}

    def send(self, number: int) -> None:
        """A signal to the command itself, as a shell or systemd would send it."""
        self.process.send_signal(number)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit status."""
        self.workers()
        return self.process.wait(patience_s)

    def family_is_gone(self) -> bool:
        """Whether neither the command nor any worker that it ever started is alive."""
        self.workers()
        return not any(map(alive, self.family))

    def kill(self) -> None:
        """The end of the test, however it went."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        for event in self.events("server ready"):
            for address in event["workers"]:
                # The private folder of a server that had no time to remove it.
                folder = Path(address.removeprefix("ipc://")).parent
                if folder.name.startswith("shapestream-"):
                    shutil.rmtree(folder, ignore_errors=True)


class Served(Command):
    """A running `shapestream serve`."""

    def __init__(self, folder: Path, config: Path, label: str, constants: Mapping[str, Any] = {}) -> None:
        """`constants`: fields of `ServerSettings` with other values, which no YAML can give them."""
        arguments = ["serve", str(config)]
        if constants:
            self.MODULE, arguments = "tests.e2e.changed_server", [json.dumps(constants), *arguments]
        super().__init__(folder, arguments, label)
        self.config = config
        self.address = f"ipc://{folder}/s.sock"

    def client(self) -> blocking.Client:
        """A connected client."""
        return blocking.connect(self.address, connect_timeout=PATIENCE_S)


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and waits for its parent does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Workplace:
    """A folder with a YAML, and the commands that were started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[Command] = []

    def write(self, text: str, name: str = "server.yaml") -> Path:
        """A YAML that listens at `s.sock` in this folder and logs JSON, unless it says otherwise."""
        text = textwrap.dedent(text)
        if "server:" not in text:
            text = "server: {listen: [ipc://s.sock]}\n" + text
        config = self.folder / name
        config.write_text(text)
        return config

    def serve(self, text: str | Path, **constants: Any) -> Served:
        """Starts `shapestream serve`, with changed constants of the server; it listens when this returns."""
        served = self.try_serve(text, **constants)
        served.wait_for("server ready")
        return served

    def try_serve(self, text: str | Path, **constants: Any) -> Served:
        """Starts `shapestream serve`, which may not succeed."""
        config = text if isinstance(text, Path) else self.write(text)
        served = Served(self.folder, config, f"serve{len(self.commands)}", constants)
        self.commands.append(served)
        return served

    def start(self, *arguments: str) -> Command:
        """Starts any command."""
        command = Command(self.folder, list(arguments), f"{arguments[0]}{len(self.commands)}")
        self.commands.append(command)
        return command

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "E2E_FOLDER": str(self.folder)},
            check=False,
        )

    def invoke(self, *arguments: str) -> Result:
        """The same in this process, of which it needs no other: only `health` and signals go another way."""
        return self.invoke_with(None, *arguments)

    def invoke_with(self, stdin: IO[str] | None, *arguments: str) -> Result:
        """The same, with this to read."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("E2E_FOLDER", str(self.folder))
            patch.syspath_prepend(IMPORTABLE)
            ran = CliRunner().invoke(app, arguments, input=None if stdin is None else stdin.read())
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            raise ran.exception
        return ran

    # ---------------------------------------------------------------- the gate: `gated.py` waits for it

    def entered(self) -> list[int]:
        """The pids of the workers that are in the middle of a gated batch."""
        return [int(path.name.removeprefix("entered-")) for path in self.folder.glob("entered-*")]

    def wait_entered(self, count: int = 1) -> list[int]:
        """The same, once there are so many."""
        found: list[int] = until(
            f"{count} gated batches", lambda: len(self.entered()) >= count and self.entered()
        )
        return found

    def open_gate(self) -> None:
        """Lets gated batches go on, now and from now on."""
        (self.folder / "open").touch()


@pytest.fixture
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder to serve from, and the end of whatever was started there."""
    yield from temporary_workplace(tmp_path_factory)


@pytest.fixture(scope="module")
def module_workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """The same for all tests of a file together."""
    yield from temporary_workplace(tmp_path_factory)


def temporary_workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Afterwards every process is gone by itself once its server is killed, or the test fails."""
    # A short name: the path of a socket holds 107 bytes.
    place = Workplace(tmp_path_factory.mktemp("e2e"))
    yield place
    for command in place.commands:
        command.kill()
    for command in place.commands:
        try:
            until(f"the end of all processes of {command.log}", command.family_is_gone)
        finally:
            for pid in command.family:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
