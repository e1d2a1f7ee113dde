"""Cost tables on disk: a restart measures again only if something has changed.

Each combination of model, settings, versions and machine has one file. `kept_files` describes the folder and the variable
`SHAPESTREAM_COST_CACHE`. Processes that need the same table at the same time wait for the first, which holds a lock on the
entry; measuring in parallel would slow both down.

A second file per table has the corrections that traffic made. It is replaced as a whole without a lock, so the last writer
wins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shapestream_engine.cost_table import CostTable, LearnedCosts
from shapestream_engine.errors import EngineError
from shapestream_engine.files import KeptFiles, read_plain, read_regular, write_plain
from shapestream_engine.model import ModelSpec
from shapestream_engine.probing.cache import key_of
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.signature import ModelSignature

ENVIRONMENT = "SHAPESTREAM_COST_CACHE"
MOST_TRIES = 2
LATELY_S = 3600.0
_MOST_TRIES_BYTES = 4096
"""Largest size of a file of attempt times; a longer file is ignored."""
MOST_LEARNED = 256
"""Number of tables whose corrections are kept; the oldest go first. Most take a few KB, the largest about 200 KB."""
_FORMAT = 2
"""Version of the entries and of the measurement; it is raised when either changes, so that old tables become void."""


@dataclass(frozen=True, slots=True)
class CostEntry:
    """The place of one table; with the path None, nothing is kept.

    A failed write (full or read-only disk) only costs time at the next start.
    """

    path: Path | None

    def begin(self) -> bool:
        """Record that measuring begins; False if it began `MOST_TRIES` times within `LATELY_S` seconds and never ended.

        A model may crash on inputs that no client sends. Its process restarts, and must not repeat the crash for ever.
        """
        if self.path is None:
            return True
        tries = self.path.with_suffix(".tries")
        try:
            before = read_regular(tries, _MOST_TRIES_BYTES).decode().split() if tries.exists() else []
            since = time.time() - LATELY_S
            lately = [entry for entry in before if entry.isdigit() and int(entry) >= since]
            if len(lately) >= MOST_TRIES:
                return False
            tries.write_text(" ".join([*lately, str(int(time.time()))]), encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
        return True

    def end(self) -> None:
        """Record that measuring ended."""
        if self.path is not None:
            with suppress(OSError):
                self.path.with_suffix(".tries").unlink(missing_ok=True)

    def read(self) -> CostTable | None:
        """Return the kept table; None if there is no readable one."""
        plain = read_plain(self.path)
        try:
            return None if plain is None else CostTable.from_dict(plain)
        except EngineError:
            return None  # the table is measured again

    def write(self, table: CostTable) -> None:
        """Keep a table."""
        write_plain(self.path, table.to_dict())


class CostCache(KeptFiles):
    """A folder of tables and their corrections; with the folder None, nothing is kept."""

    VARIABLE = ENVIRONMENT
    NAME = "costs"

    @contextmanager
    def entry(self, key: str) -> Iterator[CostEntry]:
        """Yield the entry of a table, locked against other processes inside the block."""
        with self.locked(key) as path:
            yield CostEntry(path)

    def learned(self, table: CostTable) -> LearnedCosts | None:
        """Read the corrections of this table; None if none are kept."""
        return None if self.folder is None else _read_learned(self._learned_path(self.folder, table.digest))

    def all_learned(self) -> dict[str, LearnedCosts]:
        """Read the corrections of all tables, by digest of the table."""
        if self.folder is None:
            return {}
        found = (_read_learned(path) for path in self.folder.glob("*.learned.json"))
        return {learned.table: learned for learned in found if learned is not None}

    def keep_learned(self, learned: LearnedCosts) -> None:
        """Replace the corrections of the table; a failed write is ignored."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_plain(self._learned_path(self.folder, learned.table), learned.to_dict())
            # This includes partial files of killed processes.
            kept = sorted(self.folder.glob("*.learned.*"), key=_written_at, reverse=True)
            for old in kept[MOST_LEARNED:]:
                old.unlink(missing_ok=True)

    @staticmethod
    def _learned_path(folder: Path, digest: str) -> Path:
        return folder / f"{digest}.learned.json"


def _read_learned(path: Path) -> LearnedCosts | None:
    plain = read_plain(path)
    try:
        learned = None if plain is None else LearnedCosts.from_dict(plain)
    except EngineError:
        return None  # the corrections are learned again
    return learned if learned is not None and path.name.startswith(f"{learned.table}.") else None


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # the file is gone


def cost_key(
    spec: ModelSpec,
    signature: ModelSignature,
    options: ProbeOptions,
    *,
    slots: int,
    threads: int | None,
    budget_s: float,
) -> str:
    """Return the key of a table: it changes with everything known to influence costs, and with the budget.

    The machine counts by its CPU model and the number of usable CPUs, so equal machines share a key.
    """
    return key_of(_FORMAT, (spec, options, slots, threads, budget_s), spec, signature)
