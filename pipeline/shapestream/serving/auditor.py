"""The auditor runs sampled requests again, alone, and stops batching for a model whose answers differ.

The proof of a model ends when serving begins; audits go on. The result of the request alone is the reference, and the
tolerances are those of the proof. Two kinds of answers cannot be judged. A model may give two answers to one request
alone: it varies. Or rounding explains the difference, as changes of the same request show (`probing/tolerances.py`). Two
mismatches within `WITHIN` answers stop batching and padding for their model, until an operator acknowledges that
(`shapestream audit`).

Where a strategy names the sizes of calls, alone means in the smallest allowed call. Then only other requests are judged,
and not padding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import trio

from shapestream.quarantine import digest_of
from shapestream.scheduling.events import AuditKind
from shapestream.serving.audits import AuditBook, AuditRun, AuditSample, ModelAudit
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.sessions import RequestRecord
from shapestream.telemetry.logging import get_logger
from shapestream_engine.arrays import arrays_of
from shapestream_engine.files import read_plain, write_plain
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.tolerances import (
    RUNS,
    Difference,
    Movements,
    change_of,
    changed,
    without_ties,
    worst_difference,
)

log = get_logger()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WITHIN = 1000
"""Audited answers of a model within which two mismatches count as one defect.

A rounding error may flip a threshold, or the first of two equal scores, once in ten thousand answers. A defect that mixes
rows does so again and again.
"""
LARGE_BYTES = 64 * 1024
"""Bytes of a sample from which on it is compared in a thread: comparing 64 KiB takes a millisecond."""
TRIES = 10
"""Most runs that are begun to confirm a mismatch: other work may interrupt each."""
SUFFIX = ".audit.json"
"""Ending of the names of files with the findings of stopped models."""


class Alone:
    """Runs answered requests again, alone, one of its kind at a time."""

    def __init__(self, dispatcher: Dispatcher, kind: AuditKind) -> None:
        self._dispatcher = dispatcher
        self._kind = kind

    async def run(self, sample: AuditSample, record: RequestRecord, copies: int = 1) -> AuditRun | None:
        """Run the request, or one like it, to its end. Returns None where the worker has left."""
        slots = frozenset(slot.number for slot in sample.slot.worker.slots if not slot.wide)
        return await self.run_on(slots, record, copies)

    async def run_on(self, slots: frozenset[int], record: RequestRecord, copies: int = 1) -> AuditRun | None:
        """Run a request on one of these slots to its end. Returns None where they have left."""
        dispatcher = self._dispatcher
        slots = slots.intersection(dispatcher.slots)
        if not slots:
            return None
        run = dispatcher.audit(record, slots, trio.current_time(), kind=self._kind, copies=copies)
        await run.done.wait()
        return run

    async def again(self, sample: AuditSample, record: RequestRecord, copies: int = 1) -> AuditRun | None:
        """Run it until a run ends or fails. Returns None if each was interrupted, or the worker has left."""
        for _ in range(TRIES):
            run = await self.run(sample, record, copies)
            if run is None or run.outputs is not None or run.is_broken:
                return run
        return None

    async def is_rounding(self, sample: AuditSample, alone: Tensors) -> bool | None:
        """Tell whether rounding explains a difference; None where other work interrupts each run."""
        record, signature = sample.record, sample.record.served.signature
        tolerances = sample.slot.worker.tolerances[record.served.name]
        names = [port.name for port in signature.outputs]
        known = [tolerances.get(name) for name in names]
        before = arrays_of(alone)
        answer = without_ties(names, tolerances, before, arrays_of(sample.answer))
        movements = await _computed(sample, Movements, before, answer, known)
        by = change_of(tolerances)
        for number, copies in [*enumerate([1] * RUNS), *enumerate(_copies(sample))]:
            tensors: Tensors | None = record.tensors
            if copies == 1:
                tensors = await _computed(sample, changed, record.tensors, signature, by, number)
            if tensors is None:
                continue
            run = await self.again(sample, replace(record, tensors=tensors), copies)
            if run is None:
                return None
            moved = movements.changed if copies == 1 else movements.beside_copies
            if run.outputs is not None and await _computed(sample, moved, arrays_of(run.outputs)):
                return True
        return False


class Auditor:
    """Audits the samples of the book, one after another."""

    def __init__(self, book: AuditBook, dispatcher: Dispatcher, folder: Path | None) -> None:
        """`folder`: keeps the findings of stopped models for the next server; None: nothing is kept."""
        self._book = book
        self._dispatcher = dispatcher
        self._alone = Alone(dispatcher, AuditKind.AUDIT)
        self._folder = folder

    async def run(self) -> None:
        """Audit until cancelled."""
        while True:
            sample = await self._book.next()
            try:
                await self._audit(sample)
            except Exception:  # a defect of an observer must not end the server
                log.exception("audit failed", model=sample.record.served.name)

    async def _audit(self, sample: AuditSample) -> None:
        state = self._book.states.get(sample.record.model)
        if state is None:
            return  # its model is gone
        if state.varies or state.stopped:
            return
        run = await self._alone.run(sample, sample.record)
        if run is None or run.outputs is None:
            return
        alone = run.outputs
        output, difference = await _compare(sample, alone, sample.answer)
        is_rounding = None
        if not difference.within:
            again = await self._alone.again(sample, sample.record)
            if again is None or again.outputs is None:
                return
            varying, unlike = await _compare(sample, alone, again.outputs)
            if not unlike.within:
                state.varies = True
                why = f"alone, the same request gave two answers that differ in output {varying!r}"
                log.warning("audit ends", model=sample.record.served.name, why=why)
                return
            is_rounding = await self._alone.is_rounding(sample, alone)
            if is_rounding is None:
                return
        if self._book.states.get(sample.record.model) is not state:
            return  # the model's files have changed meanwhile
        if is_rounding:
            self._unjudged(state, output)
            return
        state.audited += 1
        if not difference.within:
            await self._mismatch(state, sample, output, difference)

    def _unjudged(self, state: ModelAudit, output: str) -> None:
        """Count an answer that cannot be judged. Warn once if most answers of its model cannot."""
        warned = state.judges_little
        state.unjudged += 1
        if state.judges_little and not warned:
            why = f"alone, rounding moves most results by as much as they differ in company, the last in output {output!r}"
            log.warning("audits judge little", model=state.model.name, why=why)

    async def _mismatch(
        self, state: ModelAudit, sample: AuditSample, output: str, difference: Difference
    ) -> None:
        record = sample.record
        finding = {
            "output": output,
            "largest": _finite(difference.amount),
            "allowed": _finite(difference.allowed),
            "why": difference.words,
            "sizes": list(record.shape.sizes),
            "call": list(sample.call),
            "requests": sample.requests,
            "request_digest": digest_of(record.served.name, record.tensors).hex(),
            "model_digest": sample.slot.worker.digests.get(record.served.name),
            "slot": sample.slot.label,
        }
        before, state.mismatched_at = state.mismatched_at, state.audited
        state.mismatches += 1
        state.findings.append({"at": round(time.time(), 3), **finding})
        if before is None or state.audited - before >= WITHIN:
            log.warning("audit mismatch", model=record.served.name, **finding)
            return
        advice = "each request runs alone now; see docs/safety.md, then shapestream audit --acknowledge"
        log.error("batching stopped", model=record.served.name, advice=advice, **finding)
        state.stopped = True
        self._dispatcher.run_alone(record.model, True, trio.current_time())
        if self._folder is not None:
            self._book.kept[state.key] = list(state.findings)
            await trio.to_thread.run_sync(
                _keep, self._folder, state.key, list(state.findings), abandon_on_cancel=True
            )

    # ---------------------------------------------------------------- for the server

    def acknowledge(self, name: str) -> None:
        """Let the requests of a stopped model share calls again. Does nothing for other models."""
        state = next(
            (one for one in self._book.states.values() if one.model.name == name and one.stopped), None
        )
        if state is None:
            return
        log.warning("batching goes on", model=name, why="acknowledged")
        state.stopped, state.mismatched_at = False, None
        state.findings.clear()
        self._dispatcher.run_alone(state.model.key, False, trio.current_time())
        if self._book.kept.pop(state.key, None) is not None and self._folder is not None:
            with suppress(OSError):  # on a disk that is read-only now, the next server stops it again
                (self._folder / f"{state.key}{SUFFIX}").unlink(missing_ok=True)

    def files_changed(self) -> None:
        """Start the audits again for the models whose files have changed."""
        for name, before in list(self._book.states.items()):
            state = self._book.renewed(before)
            if state is not before and (before.stopped or state.stopped):
                self._dispatcher.run_alone(name, state.stopped, trio.current_time())


async def _compare(sample: AuditSample, alone: Tensors, other: Tensors) -> tuple[str, Difference]:
    """Return the `worst_difference` of a sample's model."""
    model = sample.record.served
    tolerances = sample.slot.worker.tolerances[model.name]
    names = [port.name for port in model.signature.outputs]
    return await _computed(sample, worst_difference, names, tolerances, alone, other)


async def _computed(sample: AuditSample, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Return `function(*arguments)`, which runs in a thread if the sample is large."""
    if sample.nbytes < LARGE_BYTES:
        return function(*arguments)
    return await trio.to_thread.run_sync(function, *arguments)


def _copies(sample: AuditSample) -> list[int]:
    """Return the numbers of copies of the request to run in one call: first as many as its own call had room for."""
    record, profile = sample.record, sample.record.served.profile
    if not profile.has_batch or not record.shape.rows:
        return []
    most = profile.max_batch // record.shape.rows
    return [
        copies for copies in dict.fromkeys((sample.call[0] // record.shape.rows, 2, 3)) if 1 < copies <= most
    ]


def kept_in(folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Return the findings of models that were stopped, by `ModelAudit.key`."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder is not None else ():
        plain = read_plain(path)
        if isinstance(plain, dict) and isinstance(plain.get("findings"), list):
            found[path.name.removesuffix(SUFFIX)] = [
                one for one in plain["findings"] if isinstance(one, dict)
            ]
    return found


def _keep(folder: Path, key: str, findings: list[dict[str, Any]]) -> None:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_plain(folder / f"{key}{SUFFIX}", {"findings": findings})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
