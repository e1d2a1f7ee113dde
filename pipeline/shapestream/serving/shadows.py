"""Shadows: versions that answer nobody, and are compared with the version that does, on real requests.

Of the answers of a name's version with the rest, a share is sampled. Each sampled request runs again twice, alone: on the
worker that answered, and on the shadow, at one shape. So company, padding and another machine explain no difference. Both
runs are batches without members, as those of audits are: they begin while their slots idle and no request waits, leave
when one comes, charge nobody, and make no request a suspect, whatever the shadow does. One runs at a time, beside an audit.
So a shadow that hangs holds up other shadows, for `hang_after_s`, and no audit.

    sampled ──▶ compared: equal, or differing     by output: how far, and whether the largest value moved
        ├─────▶ unjudged: rounding explains it, or the old version alone gives two answers
        ├─────▶ failed: the shadow refused it, or ended
        └─────▶ dropped: newer ones came, or other work interrupted each run

Tolerances are those of the proof of the version that answers; without a proof only equal bits count as equal. A difference
is judged as audits judge one, by how far rounding moves the same request (`Alone.is_rounding`).

What this does not do: it decides nothing, and a shadow gets no traffic by itself.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from math import floor, inf, log1p, log10
from random import Random
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from shapestream.scheduling.events import AuditKind
from shapestream.serving.announced import routed_tensors
from shapestream.serving.auditor import TRIES, Alone
from shapestream.serving.audits import AuditRun, AuditSample
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.ends import BatchEnded, End, Ends
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.sessions import RequestRecord, queued_sizes
from shapestream.telemetry.logging import get_logger
from shapestream.version_fit import Fit, misfit, rearranged
from shapestream.versions import WHOLE, versioned
from shapestream_engine.arrays import arrays_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.probing.probe_requests import same_bits
from shapestream_engine.probing.tolerances import OutputTolerance, compare, without_ties

log = get_logger()

MOST_SAMPLES = 16
"""Samples of one shadow that wait. Beyond it the oldest is dropped, so a busy server compares what it answered lately."""
MOST_BYTES = 32 << 20
"""Bytes of all samples that wait. A larger request is not taken."""
LEAST_S = 1e-6
"""Seconds of other slots beside a run from which on its own do not count: less is rounding of the clock's sums."""
MOST_TIMES = 256
"""Pairs of seconds of lone calls that are kept: the medians are of the last ones."""
LARGE_BYTES = 64 * 1024
"""Bytes of a sample from which on it is compared in a thread: comparing 64 KiB takes a millisecond."""
_NO_ANSWER = Tensors(layout=(), buffers=())
LEAST_DECADE, MOST_DECADE = -12, 12
"""Decades of differences that are told apart; smaller and larger ones count in the first and the last."""

Array = npt.NDArray[Any]


@dataclass(slots=True)
class OutputCounts:
    """The differences of one output."""

    differing: int = 0
    """Compared requests in which it differed by more than its tolerance."""
    largest: float = 0.0
    """Largest distance of two elements; infinite where shapes or kinds differ."""
    decades: Counter[int] = field(default_factory=Counter)
    """Requests by the decade of their largest distance: -3 is from 0.001 to 0.01. Equal ones are left out."""
    top_changed: int = 0
    """Requests in which the largest value along the last axis has another place."""
    shape_changed: int = 0
    """Requests in which it had another shape, such as another number of rows."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "differing": self.differing,
            "largest": self.largest if self.largest < inf else None,
            "decades": {str(decade): self.decades[decade] for decade in sorted(self.decades)},
            "top_changed": self.top_changed,
            "shape_changed": self.shape_changed,
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Shadow:
    """One shadow, and what was found so far. It begins anew when its files, or those that it is compared with, change."""

    name: str
    """Its model, such as `embeddings@5`."""
    beside: str
    """The model that answers."""
    share: float
    digests: tuple[str | None, str | None] = (None, None)
    after: int = 0
    """Answers that are passed over before the next is taken."""
    seen: int = 0
    sampled: int = 0
    compared: int = 0
    equal: int = 0
    unjudged: int = 0
    failed: int = 0
    dropped: int = 0
    why: str = ""
    """The last reason of a failure."""
    outputs: dict[str, OutputCounts] = field(default_factory=dict)
    times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    """Microseconds of lone calls at equal shapes, beside which no other slot worked: of the version that answers, and of the
    shadow."""
    waiting: deque[AuditSample] = field(default_factory=deque)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for people and scripts."""
        counts = ("share", "seen", "sampled", "compared", "equal", "unjudged", "failed", "dropped", "why")
        old, new = zip(*self.times, strict=True) if self.times else ((), ())
        return {
            "beside": self.beside,
            **{name: getattr(self, name) for name in counts},
            "waiting": len(self.waiting),
            "lone_us": median(new) if new else None,
            "lone_us_beside": median(old) if old else None,
            "outputs": {name: counted.to_dict() for name, counted in self.outputs.items()},
        }


class Shadows:
    """All shadows of a server: an observer that samples answers, and a task that compares them."""

    def __init__(self, models: ServedModels, dispatcher: Dispatcher, ends: Ends) -> None:
        self._models = models
        self._ends = ends
        self._hears = False
        """Whether it is an observer: it becomes one with the first shadow, so that a server without any has no work."""
        self._dispatcher = dispatcher
        self._alone = Alone(dispatcher, AuditKind.SHADOW)
        self._random = Random()
        self.by_name: dict[str, Shadow] = {}
        self._watched: dict[str, list[Shadow]] = {}
        """By the model whose answers are sampled."""
        self._nbytes = 0
        self._more = trio.Event()
        self.renew()

    def renew(self) -> None:
        """Take the shadows that the configuration has now. Those that stay keep what was found, with the same files."""
        before, self.by_name, self._watched = self.by_name, {}, {}
        for versions in self._models.versions.values():
            beside = versioned(versions.name, versions.rest)
            for version, share in versions.shadows.items():
                name = versioned(versions.name, version)
                digests = self._models.digests.get(name), self._models.digests.get(beside)
                shadow = before.get(name)
                if shadow is None or shadow.beside != beside or _others(shadow.digests, digests):
                    shadow = Shadow(name=name, beside=beside, share=0.0)
                shadow.digests = digests
                shadow.share = share / WHOLE
                shadow.after = self._gap(shadow.share)
                self.by_name[name] = shadow
                if share:
                    self._watched.setdefault(beside, []).append(shadow)
        self._nbytes = sum(sample.nbytes for shadow in self.by_name.values() for sample in shadow.waiting)
        if self._watched and not self._hears:
            self._hears = True
            self._ends.watch(self)

    def _gap(self, share: float) -> int:
        """Draw the number of answers to pass over: geometric, as if each were drawn for with its own random number."""
        return 0 if share >= 1.0 or share <= 0.0 else int(log1p(-self._random.random()) / log1p(-share))

    # ---------------------------------------------------------------- sampling

    def ended(self, end: End) -> None:
        """Sample the answers of a batch."""
        if type(end) is not BatchEnded or not end.answered:
            return
        for shadow in self._watched.get(end.batch.model, ()):
            count = len(end.answered)
            shadow.seen += count
            while shadow.after < count:
                self._take(shadow, end, end.answered[shadow.after], end.outputs[shadow.after])
                shadow.after += 1 + self._gap(shadow.share)
            shadow.after -= count

    def _take(self, shadow: Shadow, end: BatchEnded, record: RequestRecord, answer: Tensors | None) -> None:
        nbytes = record.nbytes
        if answer is None or record.shape.answer is not None or not self._models.is_live(shadow.name):
            return
        if end.slot.wide or nbytes > MOST_BYTES:
            return
        shadow.sampled += 1
        sample = AuditSample(
            record=replace(record, deadline=None),
            answer=_NO_ANSWER,  # both are made anew
            slot=end.slot,
            call=record.shape.rounded,
            requests=1,
            nbytes=nbytes,
        )
        shadow.waiting.append(sample)
        self._nbytes += nbytes
        while len(shadow.waiting) > MOST_SAMPLES or self._nbytes > MOST_BYTES:
            fullest = max(self.by_name.values(), key=lambda one: len(one.waiting))
            fullest = shadow if len(shadow.waiting) > MOST_SAMPLES else fullest
            self._nbytes -= fullest.waiting.popleft().nbytes
            fullest.dropped += 1
        self._more.set()

    # ---------------------------------------------------------------- comparing

    async def run(self) -> None:
        """Compare until cancelled: a sample of each shadow in turn."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while any(shadow.waiting for shadow in self.by_name.values()):
                for shadow in list(self.by_name.values()):
                    if shadow.waiting:
                        sample = shadow.waiting.popleft()
                        self._nbytes -= sample.nbytes
                        try:
                            await self._compare(shadow, sample)
                        except Exception:  # a defect of an observer must not end the server
                            log.exception("shadow failed", model=shadow.name)

    async def _compare(self, shadow: Shadow, sample: AuditSample) -> None:
        known, model = sample.record.served, self._models.by_name.get(shadow.name)
        if model is None or known.name != shadow.beside:
            shadow.dropped += 1
            return
        if (why := misfit(known.signature, model.signature)) is not None:
            shadow.failed, shadow.why = shadow.failed + 1, why
            return
        fit = Fit.of(known.signature, model.signature)
        copy = _copy(sample.record, model, fit)
        if copy is None:
            shadow.failed, shadow.why = shadow.failed + 1, "it does not take the request"
            return
        here = frozenset(slot.number for slot in sample.slot.worker.slots if not slot.wide)
        slots = self._dispatcher.slots.values()
        there = frozenset(
            slot.number for slot in slots if shadow.name in slot.worker.models and not slot.wide
        )
        old = await self._again(here, sample.record)
        if old is None or old.outputs is None:
            shadow.dropped += 1
            return
        new = await self._again(there, copy)
        if new is None or new.outputs is None:
            if new is None or new.is_broken:
                shadow.failed, shadow.why = shadow.failed + 1, "it failed, or its worker left"
            else:
                shadow.dropped += 1
            return
        outputs = new.outputs if fit.outputs is None else rearranged(new.outputs, fit.outputs)
        await self._judge(shadow, sample, old, new, outputs, here)

    async def _again(self, slots: frozenset[int], record: RequestRecord) -> AuditRun | None:
        """Run a request until a run ends or fails. Returns None where the slots have left."""
        run = None
        for _ in range(TRIES):
            run = await self._alone.run_on(slots, record)
            if run is None or run.outputs is not None or run.is_broken:
                break
        return run

    async def _judge(
        self,
        shadow: Shadow,
        sample: AuditSample,
        old: AuditRun,
        new: AuditRun,
        outputs: Tensors,
        here: frozenset[int],
    ) -> None:
        """Count one pair of answers."""
        assert old.outputs is not None
        tolerances = sample.slot.worker.tolerances.get(shadow.beside) or {}
        names = [port.name for port in sample.record.served.signature.outputs]
        arguments = names, tolerances, old.outputs, outputs
        found = (
            differences(*arguments)
            if sample.nbytes < LARGE_BYTES
            else await trio.to_thread.run_sync(differences, *arguments)
        )
        if any(one.beyond for one in found):
            again = await self._again(here, sample.record)
            if again is None or again.outputs is None:
                shadow.dropped += 1
                return
            if any(one.beyond for one in differences(names, tolerances, old.outputs, again.outputs)):
                shadow.unjudged += 1
                return
            if all(name in tolerances for name in names):
                is_rounding = await self._alone.is_rounding(replace(sample, answer=outputs), old.outputs)
                if is_rounding is None:
                    shadow.dropped += 1
                    return
                if is_rounding:
                    shadow.unjudged += 1
                    return
        shadow.compared += 1
        shadow.equal += not any(one.beyond for one in found)
        for one in found:
            one.count(shadow.outputs.setdefault(one.name, OutputCounts()))
        idle_besides = max(old.others_s, new.others_s) < LEAST_S
        if old.batch is not None and new.batch is not None and idle_besides:
            shadow.times.append((old.batch.run_us, new.batch.run_us))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return what was found of each shadow, by its model."""
        return {name: shadow.to_dict() for name, shadow in self.by_name.items()}


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """How one output of two answers differs."""

    name: str
    amount: float
    beyond: bool
    """Whether it is more than the tolerance."""
    top_changed: bool
    shape_changed: bool

    def count(self, counts: OutputCounts) -> None:
        """Add it to the counts of its output."""
        counts.differing += self.beyond
        counts.top_changed += self.top_changed
        counts.shape_changed += self.shape_changed
        counts.largest = max(counts.largest, self.amount)
        if self.amount > 0.0:
            decade = MOST_DECADE if self.amount == inf else floor(log10(self.amount))
            counts.decades[min(MOST_DECADE, max(LEAST_DECADE, decade))] += 1


def _others(before: tuple[str | None, str | None], now: tuple[str | None, str | None]) -> bool:
    """Tell whether a digest has changed. One that was not known yet, or of a function, tells nothing."""
    return any(None not in pair and pair[0] != pair[1] for pair in zip(before, now, strict=True))


def differences(names: list[str], tolerances: Any, old: Tensors, new: Tensors) -> list[OutputDifference]:
    """Return how the outputs of two answers differ, in the order of the first. Without a tolerance bits are compared."""
    before, after = arrays_of(old), arrays_of(new)
    after = without_ties(names, tolerances, before, after)
    return [_difference(*one, tolerances) for one in zip(names, before, after, strict=True)]


def _difference(name: str, one: Array, two: Array, tolerances: Any) -> OutputDifference:
    tolerance: OutputTolerance | None = tolerances.get(name)
    if one.shape != two.shape or one.dtype != two.dtype:
        moved = one.shape != two.shape
        return OutputDifference(name, inf, beyond=True, top_changed=False, shape_changed=moved)
    if same_bits(one, two):
        return OutputDifference(name, 0.0, beyond=False, top_changed=False, shape_changed=False)
    if one.dtype == object:
        return OutputDifference(name, inf, beyond=True, top_changed=False, shape_changed=False)
    first, second = one.astype(np.float64), two.astype(np.float64)
    if tolerance is None:
        with np.errstate(invalid="ignore"):
            amount, beyond = float(np.nanmax(np.abs(first - second), initial=0.0)), True
    else:
        difference = compare(one, two, tolerance)
        amount, beyond = difference.amount, not difference.within
    wide = one.ndim > 0 and one.shape[-1] > 1 and one.size > 0
    moved = wide and bool(np.any(first.argmax(axis=-1) != second.argmax(axis=-1)))
    return OutputDifference(name, amount, beyond=beyond, top_changed=moved, shape_changed=False)


def _copy(record: RequestRecord, model: ServedModel, fit: Fit) -> RequestRecord | None:
    """Return the request as the shadow gets it; None where that does not take it."""
    tensors = routed_tensors(record.tensors, fit)
    try:
        shape = model.resolve(tensors.layout)
        group = model.group_of(shape, tensors) if model.has_alike else None
    except ShapeError:
        return None
    return replace(
        record,
        model=model.key,
        sizes=queued_sizes(shape),
        group=group,
        served=model,
        shape=shape,
        tensors=tensors,
        routed=None,
    )
