"""A server that can be given a defect: `python -m tests.e2e.chaos.defective_server [serve] CONFIG`. For the mutation check.

A check that never failed may be one that cannot fail. While a file `defect-NAME` lies in the run's folder this server has
the defect of that name, and what the ledger counts must say so.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import trio
from tests.e2e.changed_server import change
from tests.e2e.chaos.model import FOLDER_VARIABLE
from tests.entries import Entry, Execute, ResultEntry

from shapestream.serving.port_traffic import Outgoing, PeerLink
from shapestream_workers import cli

EVERY = 10
"""Of so many results one is harmed."""
HELD_BACK_S = 1.2
"""Longer than some deadlines and the ledger's slack, shorter than anybody's patience with the server."""

CONSTANTS = {"hang_grace_s": 0.5}
"""Of each server under chaos: a worker is killed soon after its batch was cancelled."""
DEFECTS = {
    "send-one-twice": "two_ends",
    "swap-two-rows": "wrong_answers",
    "start-one-late": "started_late",
    "drop-a-reply": "without_an_end",
}
"""By name: which zero each must turn into a number."""


def mark(folder: Path, defect: str) -> Path:
    """The file that switches a defect on."""
    return folder / f"defect-{defect}"


class Defective:
    """Stands between the server's parts and what they call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turns = count(1)
        self._held: tuple[Outgoing, PeerLink, ResultEntry] | None = None
        self._say = Outgoing.say

    def spread(self) -> None:
        """From now on this process's server is defective, while it is told to be."""
        defective = self

        def say(outgoing: Outgoing, link: PeerLink, entry: Entry) -> None:
            defective.say(outgoing, link, entry)

        Outgoing.say = say  # type: ignore[method-assign, assignment]

    def say(self, outgoing: Outgoing, link: PeerLink, entry: Entry) -> None:
        """One entry on its way to a client or a worker."""
        if isinstance(entry, ResultEntry):
            self._answer(outgoing, link, entry)
            return
        if isinstance(entry, Execute) and _is_urgent(entry) and mark(self._folder, "start-one-late").exists():
            time.sleep(HELD_BACK_S)
            entry = replace(entry, start_before=None)
        self._say(outgoing, link, entry)

    def _answer(self, outgoing: Outgoing, link: PeerLink, result: ResultEntry) -> None:
        if self._is_due("drop-a-reply"):
            return
        if self._is_due("send-one-twice"):
            self._say(outgoing, link, result)
        if self._held is not None and self._held[2].tensors.layout == result.tensors.layout:
            other_outgoing, other_link, other = self._held
            self._held = None
            self._say(other_outgoing, other_link, replace(other, tensors=result.tensors))
            result = replace(result, tensors=other.tensors)
        elif self._held is None and self._is_due("swap-two-rows"):
            self._held = (outgoing, link, result)
            return
        self._say(outgoing, link, result)

    def _is_due(self, defect: str) -> bool:
        return mark(self._folder, defect).exists() and next(self._turns) % EVERY == 0


def _is_urgent(batch: Execute) -> bool:
    """Whether holding it back makes a member start so late that the ledger's slack does not excuse it."""
    soon = trio.current_time() + HELD_BACK_S / 2
    return any(start_before is not None and start_before < soon for start_before in batch.start_before or ())


if __name__ == "__main__":
    Defective(Path(os.environ[FOLDER_VARIABLE])).spread()
    change(**CONSTANTS)
    sys.argv = ["shapestream", "serve", sys.argv[-1]]
    cli.main()
