"""The chains' desk: requests of chains become requests of their stages, and the results of these the answer.

It decides nothing by itself: `ChainRun` says what follows, `ChainRoom` who may begin. The desk gives each request of a stage
its record, for the scheduler, and keeps what its caller has to do: requests to submit and to withdraw, and chains that are
over. The dispatcher does it at the end of the event, and again until nothing is left (`is_busy`). A stage may have thousands
of requests: `SLICE` of them are made at a time, each chain's request in turn, so that no turn of the event loop is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from shapestream.chains.room import ChainRoom
from shapestream.chains.run import ChainRun, StageRequest
from shapestream.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, TooLarge, Unavailable
from shapestream.scheduling.batches import Batch
from shapestream.serving.announced import Announced, Routed, drawn_by, routed_tensors
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.sessions import RequestRecord
from shapestream.version_fit import Fit
from shapestream.versions import versioned
from shapestream.wire.tensor_frames import check_longest
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Tensors, value

SLICE = 64
"""Requests of stages that are made and submitted in a turn of the event loop. Each takes some 30 us, the scheduler's part
included."""


class Part(NamedTuple):
    """A request of a stage, as stories name it."""

    number: int
    """The scheduler's id."""
    stage: str
    row: int | None
    """None: the stage has one request for each of the chain's."""


@dataclass(slots=True, eq=False)
class ChainRequest:
    """A client's request of a chain, from its arrival to its terminal reply."""

    record: RequestRecord
    run: ChainRun
    ids: dict[StageRequest, int] = field(default_factory=dict)
    """The scheduler's ids of its live requests."""
    began: float = inf
    """When its first call began."""
    label: str = ""
    """The slot that answered last."""
    critical: dict[str, Part] = field(default_factory=dict)
    """By stage, the request that ended last."""
    parts: Mapping[str, ServedModel] = field(default_factory=dict)
    """The models of its chain when it began, by name: it ends with those."""
    drawn: dict[str, str] = field(default_factory=dict)
    """By a name with versions, the model of the one that all its stages' requests get, unless that is given up."""

    @property
    def may_have_run(self) -> bool:
        """Tell whether a stage may have run that must not run twice."""
        return self.began < inf and not self.record.served.profile.idempotent


@value
class Over:
    """Chains that have ended, requests of stages to submit, and those to withdraw."""

    submit: Sequence[RequestRecord]
    withdraw: Sequence[int]
    ended: Sequence[ChainRequest]
    tried: int
    """Requests of stages that were made for this, those included that their models do not take."""


class ChainDesk:
    """All requests of chains, by the ids of their records."""

    def __init__(
        self, models: ServedModels, ids: Iterator[int], *, max_requests: int, max_bytes: int
    ) -> None:
        """`ids` numbers requests. The two limits are those of the queue, of which chains may fill one half."""
        self.models = models
        self._ids = ids
        self.room = ChainRoom(max_requests // 2, max_bytes // 2)
        """The requests that wait for room, of which the scheduler has none, and what is reserved."""
        self.has_chains = False
        """Whether any chain is served."""
        self.requests: dict[int, ChainRequest] = {}
        """The requests of chains that have not ended, by the ids of their records."""
        self._by_run: dict[ChainRun, ChainRequest] = {}
        self._ready: dict[ChainRequest, None] = {}
        """Those with requests of stages to make; the first has the next turn."""
        self._withdraw: list[int] = []
        self._ended: list[ChainRequest] = []

    @property
    def is_busy(self) -> bool:
        """Tell whether the caller has anything to do (`take`)."""
        return bool(self._ready or self._withdraw or self._ended)

    def next_id(self) -> int:
        """Return the number of one more request."""
        return next(self._ids)

    # ---------------------------------------------------------------- events

    def begin(self, record: RequestRecord, now: float) -> None:
        """Take in a client's request."""
        chain = record.served.chain
        assert chain is not None
        run = ChainRun(chain, record.tensors, record.deadline)
        request = self.requests[record.id] = self._by_run[run] = ChainRequest(
            record, run, parts=record.served.parts
        )
        if run.is_over:
            self._carry_out(request, now)
            return
        self.room.wait(run, record.client)
        self._begin_waiting(now)

    def answered(self, record: RequestRecord, outputs: Tensors, batch: Batch, now: float) -> None:
        """Take in the result of a stage's request."""
        request = self._part_of(record)
        if request is None or record.stage is None:
            return
        request.began = min(request.began, batch.began)
        request.label = batch.slot.peer.label
        _note_last(request, record.stage, record.id)
        request.run.answered(record.stage, outputs, now)
        if not record.stage.stage.left:  # or nothing follows yet
            self._follow(request, now)

    def failed(self, record: RequestRecord, code: str, message: str, now: float) -> bool:
        """Take in the failure of a stage's request. Returns False if its chain has ended before."""
        request = self._part_of(record)
        if request is None or record.stage is None:
            return False
        _note_last(request, record.stage, record.id)
        request.run.failed(record.stage, code, message, now)
        self._follow(request, now)
        return True

    def cancel(self, id_: int, now: float) -> bool:
        """End a client's request that it withdrew. Returns False if it is no chain's."""
        request = self.requests.get(id_)
        if request is not None:
            request.run.fail(Cancelled.code, "the client cancelled it")
            self._follow(request, now)
        return request is not None

    def forget(self, record: RequestRecord, now: float) -> list[int]:
        """End a request whose client is gone; no reply follows. Returns the ids of its stages' requests."""
        request = self.requests.get(record.id)
        ids: list[int] = []
        if request is not None:
            ids += request.ids.values()
            request.ids.clear()
            request.run.fail(Cancelled.code, "its client is gone")
            self._follow(request, now)
        self._ended = [ended for ended in self._ended if ended.record is not record]
        return ids

    def time_passed(self, now: float) -> None:
        """End the requests whose deadline has passed while they waited for room."""
        while (run := self.room.late(now)) is not None:
            run.fail(
                DeadlineExceeded.code, "the deadline passed while the request waited for room for its stages"
            )
            self._follow(self._by_run[run], now)

    def hand_back(self, message: str, now: float) -> None:
        """End all requests as `draining`."""
        for request in [*self.requests.values()]:
            request.run.fail(Draining.code, message)
            self._follow(request, now)

    def take(self, now: float) -> Over:
        """Return what the caller has to do, and forget it: of requests to submit the next `SLICE`."""
        made: list[RequestRecord] = []
        left = SLICE
        while left and self._ready:
            request = next(iter(self._ready))
            del self._ready[request]  # or it would keep the turn
            run = request.run
            parts, run.ready = run.ready[:left], run.ready[left:]
            left -= len(parts)
            for part in parts:
                if (record := self._record_of(request, part, now)) is not None:
                    made.append(record)
            self._follow(request, now)
        # A chain may end while its stage's requests are made: those that nobody has seen need no withdrawal.
        submit = [record for record in made if record.stage is not None and not record.stage.run.is_over]
        over = Over(submit=submit, withdraw=self._withdraw, ended=self._ended, tried=SLICE - left)
        self._withdraw, self._ended = [], []
        return over

    # ---------------------------------------------------------------- what follows

    def _part_of(self, record: RequestRecord) -> ChainRequest | None:
        """Return the chain's request that a stage's request is for; None if that has ended."""
        if record.stage is None:
            return None
        request = self._by_run.get(record.stage.run)
        if request is not None:
            request.ids.pop(record.stage, None)
        return request

    def _follow(self, request: ChainRequest, now: float) -> None:
        """Carry out what follows from an event of one request, and begin others if that leaves room for them."""
        self._carry_out(request, now)
        self._begin_waiting(now)

    def _begin_waiting(self, now: float) -> None:
        while (run := self.room.next()) is not None:
            run.begin(now)
            self._carry_out(self._by_run[run], now)

    def _carry_out(self, request: ChainRequest, now: float) -> None:
        run = request.run
        self.room.update(run)
        if not run.is_over:
            if run.ready:
                self._ready[request] = None
        elif run in self._by_run:
            self._ready.pop(request, None)
            self._withdraw += request.ids.values()
            request.ids.clear()
            del self._by_run[run], self.requests[request.record.id]
            self._ended.append(request)

    def _record_of(self, request: ChainRequest, part: StageRequest, now: float) -> RequestRecord | None:
        """Return the record of a stage's request; None if its model does not take it, and it has failed."""
        run = request.run
        if run.is_over:
            return None
        try:
            model, tensors, routed = self._served(request, part)
        except (InvalidRequest, Unavailable) as error:
            run.fail(error.code, error.message)
            return None
        name = model.name
        try:
            shape = model.resolve(tensors.layout)
            group = model.group_of(shape, tensors) if model.has_alike else None
            if model.takes_strings:
                check_longest(model.signature.inputs, tensors)
        except ShapeError as error:
            run.failed(part, "invalid", f"model {name!r}: {error}", now)
            return None
        except TooLarge as error:
            run.failed(part, error.code, f"model {name!r}: {error.message}", now)
            return None
        id_ = request.ids[part] = next(self._ids)
        then = tuple(
            [self._model_of(request, later.model) for later in run.chain.then[part.stage.stage.name]]
        )
        return request.record.of_stage(
            id_, model, shape, part, now, group, tensors=tensors, then=then, routed=routed
        )

    def _served(
        self, request: ChainRequest, part: StageRequest
    ) -> tuple[ServedModel, Tensors, Routed | None]:
        """Return the model that a stage's request goes to, and its tensors in the order of that model's ports.

        A chain ends with the generations that it began with. Where no worker of one is left, its rows go to the present one,
        by the names of the ports. Raises `InvalidRequest` where they do not fit that, and `Unavailable`.
        """
        name, tensors = part.stage.stage.model, part.tensors
        begun = request.parts.get(name)
        if (announced := self._announced(request, name)) is not None:
            name, fit = self._drawn(request, announced)
            begun, routed = None, Routed(announced.number, tensors.layout, fit)
        if (why := self.models.unavailable.get(name)) is not None:
            raise Unavailable(why)
        model = self.models.by_name.get(name) if begun is None else begun.latest()
        if model is None:
            raise Unavailable(f"model {name!r} was removed while this request ran")
        if announced is None:
            if not model.has_left:
                return model, tensors, None
            before = model.number
            model, fit = model.present()
            routed = Routed(before, tensors.layout, fit)
        return model, routed_tensors(tensors, fit), routed

    def redrawn(self, record: RequestRecord, now: float) -> RequestRecord | None:
        """Return a stage's request, whose model was given up before it began, for what takes it now; None: nothing does."""
        request = self._part_of(record)
        if request is None or record.stage is None:
            return None
        again = self._record_of(request, record.stage, now)
        return None if again is None or again.served is record.served else again

    def _announced(self, request: ChainRequest, name: str) -> Announced | None:
        """Return the versions of a stage's model; None if it has none, or if the stage names one.

        The stage's tensors stand in the order of the signature that the chain began with.
        """
        begun, bare = request.parts.get(name), self.models.by_bare_name.get(name)
        if begun is not None and begun.announced is not None:
            return begun.announced
        if bare is None or (begun is not None and begun.description != bare.description):
            return None
        return bare.announced

    def _drawn(self, request: ChainRequest, announced: Announced) -> tuple[str, Fit]:
        """Return the version of a name that this request of a chain has, and draw it where that was not done before.

        It is drawn anew where that version was given up, or takes no such requests any more.
        """
        drawn = request.drawn.get(announced.name)
        fit = None if drawn is None else announced.fit_of(drawn)
        if drawn is None or fit is None or not self.models.is_live(drawn):
            record = request.record
            who = drawn_by(announced.versions, *record.session.client, record.named_caller)
            drawn, fit = announced.route(who, record.sequence, self.models.is_live)
            request.drawn[announced.name] = drawn
        return drawn, fit

    def _model_of(self, request: ChainRequest, name: str) -> str:
        """Return the model whose price a later stage has: the version that is drawn, or the one with the rest."""
        if (announced := self._announced(request, name)) is not None:
            name = request.drawn.get(name) or versioned(name, announced.versions.rest)
        model = request.parts.get(name) or self.models.by_name.get(name)
        return name if model is None else model.latest().key

    def may_ask(self, model: ServedModel) -> bool:
        """Tell whether a request of a chain may still ask this generation of a model."""
        return any(
            part.latest() is model for request in self.requests.values() for part in request.parts.values()
        )


def part_of(part: StageRequest, number: int) -> Part:
    """Return the name of a stage's request, which has this id."""
    stage = part.stage.stage
    return Part(number, stage.name, part.index if stage.fans_out else None)


def _note_last(request: ChainRequest, part: StageRequest, number: int) -> None:
    request.critical[part.stage.stage.name] = part_of(part, number)
