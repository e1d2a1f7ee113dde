"""An answer run: a server with two worker processes, and clients that ask, withdraw, hurry, are killed and replaced.

Which clients run, what they ask and after how many requests they are killed follows from the seed. What is queued or
running at that moment does not: the processes run freely.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.answers.models import Model, models_of
from tests.e2e.answers.tally import DEFECTS, ENDS, NOTES, Count, Tally
from tests.e2e.chaos.defective_server import mark
from tests.e2e.conftest import PATIENCE_S, PYTHONPATH, Served, Workplace, until

from shapestream_engine.probe import ProbeOptions
from shapestream_engine.probing.model_calls import WALL

FILES = {"openvino": "onnx_files", "onnxruntime": "onnx_files", "torch": "torch_files"}
"""The module that writes the models of each engine."""
FILE_DEFECTS = ("weight", "size")
SERVER_DEFECTS = ("send-one-twice", "drop-a-reply")
PLACES = ("raw", "asking", "streaming", "alone")
"""Clients at a time."""
LIVES = 24
"""The requests are divided among so many clients, more or less."""
SHORTEST_LIFE = 100
KILLED_SHARE = 0.4
MOST_PROOF_S = WALL * ProbeOptions().budget_s
"""Seconds that the proof of a model takes at most, beside other load."""
SHOWN_NOTES = 3
"""Of each kind of defect."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run does."""

    engine: str
    requests: int
    seed: int
    patience_s: float = 120.0
    """What did not end within this time, counts as lost."""
    most_s: float = 3600.0
    trust: bool = False
    """Serve without proof, for a quick start."""
    defect: str | None = None
    """One of `FILE_DEFECTS` or `SERVER_DEFECTS`: the run must find it."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run has shown."""

    engine: str
    counts: Counter[Count] = field(default_factory=Counter)
    killed: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gone(self) -> int:
        """Requests that had no end when their client was killed."""
        return self.counts[Count.ASKED] - sum(self.counts[end] for end in ENDS)

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.problems) or any(self.counts[defect] for defect in DEFECTS)

    def row(self) -> list[str]:
        """Of the table."""
        return [
            self.engine,
            *(f"{self.counts[count]:,}" for count in Count),
            f"{self.gone:,}",
            f"{self.killed}",
        ]

    def shown_notes(self) -> list[str]:
        """Some of each kind."""
        kinds: dict[str, list[str]] = {}
        for note in self.notes:
            kinds.setdefault(note.split(" ")[1], []).append(note)
        return [note for notes in kinds.values() for note in notes[:SHOWN_NOTES]]


HEAD = ["engine", *(count.name.lower() for count in Count), "gone", "killed"]


def table(outcomes: list[Outcome]) -> str:
    """For people: one row per engine."""
    rows = [HEAD, *(outcome.row() for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


class Defective(Served):
    """A server that harms replies while a file says so."""

    MODULE = "tests.e2e.chaos.defective_server"


@contextmanager
def served(settings: Settings) -> Iterator[Served]:
    """A server with the engine's models, and its end."""
    # A short name: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        place = Workplace(Path(folder))
        defect = settings.defect if settings.defect in FILE_DEFECTS else None
        importlib.import_module(f"tests.e2e.answers.{FILES[settings.engine]}").write(
            place.folder, defect=defect
        )
        config = place.write(yaml(settings))
        kind = Served
        if settings.defect in SERVER_DEFECTS:
            mark(place.folder, settings.defect).touch()
            kind = Defective
        prefetch = random.Random(f"prefetch {settings.seed}").random() < 0.7
        constants = {"prefetch": prefetch} if kind is Served else {}
        server = kind(place.folder, config, "serve", constants)
        try:
            proofs_s = len(models_of(settings.engine)) * MOST_PROOF_S
            server.wait_for("workers ready", patience_s=PATIENCE_S + proofs_s)
            yield server
        finally:
            server.kill()
            until("the end of all workers", server.family_is_gone)


def yaml(settings: Settings) -> str:
    """The configuration. Slots, and which models share calls, follow from the seed.

    A call with one request is the one that a withdrawal hits; in shared calls answers meet those of others.
    """
    chance = random.Random(f"configuration {settings.seed}")
    suffix = "pt2" if settings.engine == "torch" else "onnx"
    lines = [
        "server:",
        "  listen: [ipc://s.sock]",
        # Out of reach: a process that waits for a CPU is no fault of a run.
        "  client_silence_s: 120",
        "  worker_silence_s: 300",
        "models:",
    ]
    for model in models_of(settings.engine):
        lines += [
            f"  - name: {model.name}",
            f"    path: {model.name}.{suffix}",
            f"    engine: {settings.engine}",
            f"    batching: {{max_batch: {_most_rows(model, settings, chance)}}}",
            *(f"    {key}: {{{text}}}" for key, text in model.settings.items() if text),
            *(["    trust: true", "    calibration_s: 0"] if settings.trust else []),
        ]
    lines.append(f"workers: [{{count: 2, slots: {chance.choice((1, 1, 2))}, threads: 1}}]")
    return "\n".join(lines)


def _most_rows(model: Model, settings: Settings, chance: random.Random) -> int:
    """Rows of a shared call. Of a model that is not right, the proof must find that requests run alone."""
    if not model.is_right:
        return 1 if settings.trust else 16
    return chance.choice((1, 16)) if model.shares else 1


class Client:
    """A client process, from its start to its end."""

    def __init__(
        self, folder: Path, number: int, kind: str, address: str, settings: Settings, budget: int
    ) -> None:
        chance = random.Random(f"{settings.seed} {number}")
        self.budget = budget
        self.kill_after = (
            chance.randrange(budget // 2) if budget > 1 and chance.random() < KILLED_SHARE else None
        )
        """It is killed once it has asked more than so many; early enough that it cannot end before."""
        path = folder / f"client{number}"
        self.tally = Tally(path, mode="w+")
        self.log = path.with_suffix(".log")
        module = "raw_client" if kind == "raw" else "client"
        command = [sys.executable, "-P", "-m", f"tests.e2e.answers.{module}", kind, settings.engine, address]
        command += [str(path), str(chance.randrange(1 << 31)), str(budget), str(settings.patience_s)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Its formulas are small: threads of a matrix product would only wait for each other.
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )

    @property
    def asked(self) -> int:
        """Requests so far."""
        return int(self.tally.counts[Count.ASKED])

    def to_be_killed(self) -> bool:
        """Whether its time has come."""
        return self.kill_after is not None and self.asked > self.kill_after


def run(settings: Settings) -> Outcome:
    """One engine."""
    with served(settings) as server:
        clients = Clients(server, settings)
        try:
            clients.run()
        finally:
            clients.end()
        return clients.outcome


class Clients:
    """The clients of a run: as many at a time as there are places."""

    def __init__(self, server: Served, settings: Settings) -> None:
        self._server = server
        self._settings = settings
        self._running: dict[int, Client] = {}
        self._number = 0
        self.outcome = Outcome(engine=settings.engine)

    def run(self) -> None:
        """Until all requests were asked, or the time is over."""
        give_up_at = time.monotonic() + self._settings.most_s
        while self._fill() or self._running:
            if time.monotonic() > give_up_at:
                self.outcome.problems.append(
                    f"not all requests were asked within {self._settings.most_s:g} s"
                )
                return
            if self._server.process.poll() is not None:
                self.outcome.problems.append("the server ended")
                return
            for place, client in list(self._running.items()):
                if client.to_be_killed() and client.process.poll() is None:
                    client.process.kill()
                    client.process.wait()
                    self.outcome.killed += 1
                    self._gone(place)
                elif client.process.poll() is not None:
                    if client.process.returncode:
                        last = client.log.read_text().strip().splitlines()[-1:]
                        self.outcome.problems.append(
                            f"a client ended with {client.process.returncode}: {last}"
                        )
                    self._gone(place)
            time.sleep(0.01)

    def _fill(self) -> bool:
        """Starts clients where places and requests are left; whether any are."""
        missing = self._settings.requests - self.outcome.counts[Count.ASKED]
        missing -= sum(client.budget for client in self._running.values())
        for place, kind in enumerate(PLACES):
            if missing > 0 and place not in self._running:
                budget = min(missing, max(SHORTEST_LIFE, self._settings.requests // LIVES))
                missing -= budget
                self._number += 1
                self._running[place] = Client(
                    self._server.folder, self._number, kind, self._server.address, self._settings, budget
                )
        return missing > 0

    def _gone(self, place: int) -> None:
        client = self._running.pop(place)
        for count in Count:
            self.outcome.counts[count] += int(client.tally.counts[count])

    def end(self) -> None:
        """Ends what still runs, and looks at the server's own words."""
        for place, client in list(self._running.items()):
            client.process.kill()
            client.process.wait()
            self._gone(place)
        for event, times in self._complaints().items():
            self.outcome.problems.append(f"the server's log: {times} x {event}")
        notes = self._server.folder / NOTES
        self.outcome.notes = notes.read_text().splitlines() if notes.exists() else []

    def _complaints(self) -> Counter[str]:
        """Nothing was done to the server, so that it has no reason for an error or for another worker."""
        lines = self._server.log.read_bytes().split(b"\n")[:-1]
        events = [json.loads(line) for line in lines if line.startswith(b"{")]
        return Counter(
            " ".join(str(event[key]) for key in ("event", "why", "error") if key in event)
            for event in events
            if event["level"] == "error" or event["event"] in ("worker left", "audit mismatch")
        )
