"""The book of audits: it samples answers, holds the samples until they run again, and keeps the state of each model.

Only answers are sampled whose call held more than their request: rows of others, or padding that the request alone would
not have. Each of these is taken with the model's share (`models[].audit`) as its probability, by random numbers that no
client can foresee. Its tensors are kept as they came, after the answer has left. `auditor.py` runs them again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log, log1p
from random import Random
from typing import Any

import trio

from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import AuditKind
from shapestream.serving.ends import BatchEnded
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.workers import SlotRecord
from shapestream.settings.version_settings import ROUTING
from shapestream_engine.layout import Tensors

MOST_SAMPLES = 64
"""Most samples that wait to run again. Beyond it the oldest is dropped."""
MOST_BYTES = 32 << 20
"""Most bytes of their tensors and answers, including the sample that runs. A larger request is not taken."""
SEVERAL = 10
"""Answers that could not be judged before a warning: fewer say little about their share."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditSample:
    """An answered request that is to run again."""

    record: RequestRecord
    """As it was, without its deadline."""
    answer: Tensors
    slot: SlotRecord
    """The slot that it ran on. It runs again in the same worker: others may compute other digits."""
    call: tuple[int, ...]
    """Sizes of its batch."""
    requests: int
    """Requests of its batch."""
    nbytes: int


@dataclass(slots=True, kw_only=True)
class ModelAudit:
    """The audits of one model. With a `share` of 0 there are none."""

    model: ServedModel
    key: str
    """The model's name with its files, signature and settings; see `key_of`."""
    share: float
    after: int = 0
    """Answers that could be sampled and are passed over before the next is taken."""
    seen: int = 0
    """Answers that could be sampled."""
    sampled: int = 0
    audited: int = 0
    """Answers that were compared."""
    unjudged: int = 0
    """Answers that could not be judged, because rounding explains their difference."""
    mismatches: int = 0
    mismatched_at: int | None = None
    """`audited` when the last mismatch was found; None: there was none, or it was acknowledged."""
    varies: bool = False
    """The same request alone gave two different answers: nothing can be compared."""
    stopped: bool = False
    """Its requests run alone until that is acknowledged."""
    findings: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=2))
    """The last mismatches, as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for people and scripts."""
        counts = ("share", "seen", "sampled", "audited", "unjudged", "mismatches")
        names = (*counts, "judges_little", "varies", "stopped")
        return {**{name: getattr(self, name) for name in names}, "findings": list(self.findings)}

    @property
    def judges_little(self) -> bool:
        """Tell whether most answers cannot be judged, once there are several of these."""
        return self.unjudged >= SEVERAL and self.unjudged > self.audited


class AuditRun:
    """One run of a sample, alone, from the request for it to its end."""

    __slots__ = ("batch", "began", "done", "is_broken", "kind", "others_s", "outputs", "record", "slots")

    def __init__(self, record: RequestRecord, slots: frozenset[int], kind: AuditKind) -> None:
        self.record = record
        self.kind = kind
        self.slots = slots
        """The slots that may run it."""
        self.batch: Batch | None = None
        """Set when it starts."""
        self.began = 0.0
        self.others_s = 0.0
        """Seconds that other slots had batches while it ran; before its end, less those of all slots before it."""
        self.done = trio.Event()
        self.outputs: Tensors | None = None
        """Its results, once it is done; None if it was interrupted, failed or was lost."""
        self.is_broken = False
        """Whether it failed in a way that would happen again."""


class AuditBook:
    """The samples that wait to be audited, and the state of each model's audits."""

    def __init__(self, models: ServedModels, kept: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """`kept`: findings for which an earlier server stopped batching, by `ModelAudit.key`."""
        self._models = models
        self.kept = dict(kept)
        self.states: dict[str, ModelAudit] = {}
        """By model."""
        self._samples: deque[AuditSample] = deque()
        self._running: AuditSample | None = None
        self._nbytes = 0
        self._random = Random()
        self._more = trio.Event()

    def __repr__(self) -> str:
        return f"<audits: {len(self._samples)} wait, {self._nbytes} bytes>"

    def add(self, model: ServedModel) -> ModelAudit:
        """Start the audits of a model; start again if its files have changed."""
        share = model.settings.effective_audit if model.profile.idempotent else 0.0
        key = key_of(model, self._models.digests.get(model.name))
        state = self.states[model.key] = ModelAudit(model=model, key=key, share=share)
        if key in self.kept:
            state.stopped = True
            state.findings.extend(self.kept[key])
        if share:
            state.after = self._gap(share)
        return state

    def forget(self, model: ServedModel) -> None:
        """Forget the audits of a model that is gone, and the samples that wait."""
        self.states.pop(model.key, None)
        for sample in [sample for sample in self._samples if sample.record.model == model.key]:
            self._samples.remove(sample)
            self._nbytes -= sample.nbytes

    def renewed(self, state: ModelAudit) -> ModelAudit:
        """Return the state of a model; a new one if its files have changed."""
        digest = self._models.digests.get(state.model.name)
        same = digest is None or state.key == key_of(state.model, digest)
        return state if same else self.add(state.model)

    def _gap(self, share: float) -> int:
        """Draw the number of answers to pass over: geometric, as if each were drawn for with its own random number."""
        return 0 if share >= 1.0 else int(log(1.0 - self._random.random()) / log1p(-share))

    # ---------------------------------------------------------------- sampling

    def sample(self, end: BatchEnded) -> None:
        """Sample the answered requests of a batch."""
        records = end.answered
        state = self.states[records[0].model]
        if not state.share:
            return
        count = len(records)
        state.seen += count
        while state.after < count:
            self._take(state, end, records[state.after], end.outputs[state.after])
            state.after += 1 + self._gap(state.share)
        state.after -= count

    def _take(
        self, state: ModelAudit, end: BatchEnded, record: RequestRecord, answer: Tensors | None
    ) -> None:
        worker = end.slot.worker
        if answer is None or record.shape.answer is not None or state.varies or state.stopped:
            return
        name = record.served.name
        served = self._models.digests.get(name)
        if not worker.tolerances.get(name) or served not in (None, worker.digests.get(name)):
            return  # nothing can be compared, or the worker's files are no longer served
        nbytes = record.nbytes + sum([memoryview(buffer).nbytes for buffer in answer.buffers])
        if nbytes > MOST_BYTES:
            return
        state.sampled += 1
        while self._samples and (len(self._samples) >= MOST_SAMPLES or self._nbytes + nbytes > MOST_BYTES):
            self._nbytes -= self._samples.popleft().nbytes
        if self._nbytes + nbytes > MOST_BYTES:
            return  # the one that runs leaves no room
        sample = AuditSample(
            record=replace(record, deadline=None),
            answer=answer,
            slot=end.slot,
            call=end.batch.sizes,
            requests=len(end.batch.arrivals),
            nbytes=nbytes,
        )
        self._nbytes += nbytes
        self._samples.append(sample)
        self._more.set()

    # ---------------------------------------------------------------- for the auditor

    async def next(self) -> AuditSample:
        """Wait for a sample, and return the oldest. Its bytes count until the next call."""
        if self._running is not None:
            self._nbytes -= self._running.nbytes
            self._running = None
        while not self._samples:
            self._more = trio.Event()
            await self._more.wait()
        self._running = self._samples.popleft()
        return self._running

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each model's audits as plain data, with the number of its waiting samples."""
        kept = Counter(
            sample.record.model for sample in (*self._samples, self._running) if sample is not None
        )
        return {
            state.model.name: state.to_dict() | {"waiting": kept[key]}
            for key, state in self.states.items()
            if state.model.successor is None
        }


def key_of(model: ServedModel, digest: str | None) -> str:
    """Return a name for a model's files, signature and settings. If one of these changes, its audits start again."""
    settings = model.settings.model_dump(mode="json", exclude={"audit", "path", *ROUTING})
    plain = {"digest": digest, "signature": model.description, "settings": settings}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:40]
