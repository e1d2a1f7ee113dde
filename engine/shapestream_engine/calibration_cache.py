"""Cost tables on disk, so that a restart need not measure again what has not changed.

A file per model, settings, versions and machine, in the folder that `SHAPESTREAM_COST_CACHE` names, else in
`$XDG_CACHE_HOME/shapestream/costs` (`~/.cache/shapestream/costs`); `SHAPESTREAM_COST_CACHE=off` switches it off.
Processes that want the same table at the same time wait for the first, which holds a lock on the entry: measured
together they would slow each other down.

Beside the tables lies what servers' traffic made of them, a file per table. Each is replaced as a whole, so of two servers
the last writer wins, without a lock.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shapestream_engine.cost_table import CostTable, LearnedCosts
from shapestream_engine.errors import EngineError
from shapestream_engine.kept_files import KeptFiles, read_plain, write_plain
from shapestream_engine.model import ModelSpec
from shapestream_engine.probing.cache import identity
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.regular_files import read_regular
from shapestream_engine.signature import ModelSignature

ENVIRONMENT = "SHAPESTREAM_COST_CACHE"
MOST_TRIES = 2
LATELY_S = 3600.0
_MOST_TRIES_BYTES = 4096
"""Bytes of the times of tries: a few numbers. A longer file is not ours, and tells nothing."""
MOST_LEARNED = 256
"""Tables whose corrections are kept; those written longest ago go first. Most take a few KB, none more than some 200."""
_FORMAT = 2
"""Version of the entries and of the measurement. A change of either raises it, so that old tables are not read."""


@dataclass(frozen=True, slots=True)
class CostEntry:
    """The place of one table; None: there is no cache.

    What cannot be written (a full or read-only disk) costs time at the next start, and nothing else.
    """

    path: Path | None

    def begin(self) -> bool:
        """Notes that measuring begins. False if it began `MOST_TRIES` times lately and never ended.

        A model may crash on inputs that no client sends. Its process is started anew, and must not do the same for ever.
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
        """Notes that the process has survived."""
        if self.path is not None:
            with suppress(OSError):
                self.path.with_suffix(".tries").unlink(missing_ok=True)

    def read(self) -> CostTable | None:
        """The table, if there is one that can be read."""
        plain = read_plain(self.path)
        try:
            return None if plain is None else CostTable.from_dict(plain)
        except EngineError:
            return None  # it is measured again, and written anew

    def write(self, table: CostTable) -> None:
        """Keeps a table."""
        write_plain(self.path, table.to_dict())


class CostCache(KeptFiles):
    """A folder of tables, and of what traffic made of them; None: nothing is kept."""

    VARIABLE = ENVIRONMENT
    NAME = "costs"

    @contextmanager
    def entry(self, key: str) -> Iterator[CostEntry]:
        """The entry for this table, locked against other processes meanwhile."""
        with self.locked(key) as path:
            yield CostEntry(path)

    def learned(self, table: CostTable) -> LearnedCosts | None:
        """Read the corrections of this table by traffic; None where none were kept."""
        return None if self.folder is None else _read_learned(self._learned_path(self.folder, table.digest))

    def all_learned(self) -> dict[str, LearnedCosts]:
        """Read the corrections of all tables, by the tables' digests."""
        if self.folder is None:
            return {}
        found = (_read_learned(path) for path in self.folder.glob("*.learned.json"))
        return {learned.table: learned for learned in found if learned is not None}

    def keep_learned(self, learned: LearnedCosts) -> None:
        """Replaces what was kept for the same table. What cannot be written is lost, and nothing else."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_plain(self._learned_path(self.folder, learned.table), learned.to_dict())
            # Also what killed processes left half written.
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
        return None  # it is learned again
    return learned if learned is not None and path.name.startswith(f"{learned.table}.") else None


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # it is gone


def cost_key(
    spec: ModelSpec,
    signature: ModelSignature,
    options: ProbeOptions,
    *,
    slots: int,
    threads: int | None,
    budget_s: float,
) -> str:
    """Names a table: changes with all that seconds depend on, as far as can be known, and with how long was measured.

    Of the machine that is its kind of CPU and how many of them this process may use: alike machines share a key.
    """
    plain = {"format": _FORMAT, **identity((spec, options, slots, threads, budget_s), spec, signature)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:40]
