"""The book of audits: which answers are looked at again, what is kept of them, and how each model stands.

An answer is worth a look if its call held more than its request: rows of others, or padding that the request alone would
not have. Of those, each is taken with the model's share (`models[].audit`) as its probability, by random numbers that no
client can foresee. Its tensors stay here as they came, after the answer has left. `auditor.py` runs them again.
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
from shapestream.serving.ends import BatchEnded, End
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.workers import SlotRecord
from shapestream_engine.layout import Tensors

MOST_SAMPLES = 64
"""Requests that wait to run again, at most; the oldest go."""
MOST_BYTES = 32 << 20
"""Bytes of their tensors and answers, the one that runs included; a larger request is not taken."""
SEVERAL = 10
"""Answers that could not be judged before it is said of a model: fewer tell little of their share."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditSample:
    """An answered request that is to run again."""

    record: RequestRecord
    """As it was, without its deadline."""
    answer: Tensors
    slot: SlotRecord
    """The slot that it ran on. Only its worker can tell what the same call gives alone."""
    call: tuple[int, ...]
    """Sizes of its batch."""
    requests: int
    """Requests of its batch."""
    nbytes: int


@dataclass(slots=True, kw_only=True)
class ModelAudit:
    """The audits of one model. `share` 0: there are none."""

    model: ServedModel
    key: str
    """Names the model's files, signature and settings; see `key_of`."""
    share: float
    after: int = 0
    """Requests worth a look that are passed over before the next is taken."""
    seen: int = 0
    """Answers that were worth a look."""
    sampled: int = 0
    audited: int = 0
    """Answers that were compared."""
    unjudged: int = 0
    """Answers besides whose difference rounding explains: whatever company did to them, it cannot be told."""
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
        """Whether most answers cannot be judged, as far as several show."""
        return self.unjudged >= SEVERAL and self.unjudged > self.audited


class AuditRun:
    """One run of a sample, alone: from when it is wanted to its end."""

    __slots__ = ("batch", "done", "is_broken", "outputs", "record", "slots")

    def __init__(self, record: RequestRecord, slots: frozenset[int]) -> None:
        self.record = record
        self.slots = slots
        """The slots that may run it."""
        self.batch: Batch | None = None
        """Once it has started."""
        self.done = trio.Event()
        self.outputs: Tensors | None = None
        """Its results, when it is done; None where it was interrupted, failed or lost."""
        self.is_broken = False
        """Whether it failed, so that it would again."""


class AuditBook:
    """The answers that wait to be audited, and the findings about each model."""

    def __init__(self, models: ServedModels, kept: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """`kept`: findings because of which an earlier server stopped to share calls, by `ModelAudit.key`."""
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
        """Begin with a model, or anew with one whose files are others now."""
        share = model.settings.effective_audit if model.profile.idempotent else 0.0
        key = key_of(model, self._models.digests.get(model.name))
        state = self.states[model.name] = ModelAudit(model=model, key=key, share=share)
        if key in self.kept:
            state.stopped = True
            state.findings.extend(self.kept[key])
        if share:
            state.after = self._gap(share)
        return state

    def renewed(self, state: ModelAudit) -> ModelAudit:
        """Return the state of a model; a new one where its files are known to be others now."""
        digest = self._models.digests.get(state.model.name)
        same = digest is None or state.key == key_of(state.model, digest)
        return state if same else self.add(state.model)

    def _gap(self, share: float) -> int:
        """Return how many are passed over before the next is taken: geometric, as if each were drawn for."""
        return 0 if share >= 1.0 else int(log(1.0 - self._random.random()) / log1p(-share))

    # ---------------------------------------------------------------- sampling

    def ended(self, end: End) -> None:
        """Take some of a batch's requests, which were answered."""
        if not isinstance(end, BatchEnded) or not end.answered:
            return
        batch, records = end.batch, end.answered
        state = self.states[records[0].model]
        if not state.share or (len(batch.arrivals) == 1 and batch.sizes == records[0].shape.rounded):
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
        served = self._models.digests.get(record.model)
        if not worker.tolerances.get(record.model) or served not in (None, worker.digests.get(record.model)):
            return  # nothing can be compared, or it serves files that are no longer served
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
        """Return the sample that waits longest. Its bytes count until the next is asked for."""
        if self._running is not None:
            self._nbytes -= self._running.nbytes
            self._running = None
        while not self._samples:
            self._more = trio.Event()
            await self._more.wait()
        self._running = self._samples.popleft()
        return self._running

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return how each model stands, as plain data, with the samples that are kept of it."""
        kept = Counter(
            sample.record.model for sample in (*self._samples, self._running) if sample is not None
        )
        return {name: state.to_dict() | {"waiting": kept[name]} for name, state in self.states.items()}


def key_of(model: ServedModel, digest: str | None) -> str:
    """Name a model by its files, its signature and its settings. Where these are others, its audits begin anew."""
    settings = model.settings.model_dump(mode="json", exclude={"audit", "path"})
    plain = {"digest": digest, "signature": model.description, "settings": settings}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:40]
