"""Chains of a recorded trace, as the simulator plays them: the server's `ChainRun` and `ChainRoom`, with sizes for tensors.

What follows from each end is theirs: which stage begins when, by which deadline, and which request waits for room. A stage
has the requests that it had when the trace was recorded. Bytes are not simulated, so the room is bounded by requests alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapestream.chains.plan import Chain, Stage, followers
from shapestream.chains.room import ChainRoom
from shapestream.chains.run import ChainRun, StageRequest
from shapestream.chains.spec import ChainSpec
from shapestream.errors import DeadlineExceeded
from shapestream.telemetry.trace import TraceChain, TraceStage
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

_NOTHING = Tensors(layout=(), buffers=[])
_OUTPUT = OutputPort("done", "boolean", NamedShape((), ()), Whole())


def chain_of(name: str, stages: Mapping[str, TraceStage]) -> Chain:
    """Return a chain of these stages, without edges: nothing flows along them."""
    played = tuple(
        Stage(
            name=stage,
            model="",
            feeds=(),
            needs=frozenset(recorded.needs),
            fans_out=recorded.at_most is not None,
            at_most=recorded.at_most or 1,
            at_most_bytes=0,
            outputs={},
        )
        for stage, recorded in stages.items()
    )
    return Chain(
        spec=ChainSpec(name=name, inputs={}, stages=(), outputs={}),
        stages=played,
        inputs=(),
        outputs={},
        signature=ModelSignature(name, (), (_OUTPUT,)),
        users={},
        then=followers(played),
    )


class PlayedRun(ChainRun):
    """One request of a chain, with the requests that its stages had."""

    __slots__ = ("id", "played", "since")

    def __init__(
        self,
        chain: Chain,
        played: TraceChain,
        id_: int,
        since: float,
        deadline: float | None,
    ) -> None:
        super().__init__(chain, _NOTHING, deadline)
        self.played = played
        self.id = id_
        """The simulator's id of the chain's request."""
        self.since = since

    def rows_of(self, stage: Stage) -> Sequence[tuple[Tensors, int]]:
        """Return as many requests as were recorded."""
        return [(_NOTHING, 0)] * len(self.played.rows[self.chain.stages.index(stage)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A request of a stage that is to be submitted."""

    run: PlayedRun
    request: StageRequest
    model: int
    sizes: tuple[int, ...]

    @property
    def since(self) -> float | None:
        """When the chain's request arrived; None in the first stages, which are admitted as any request."""
        return self.run.since if self.request.stage.stage.needs else None

    @property
    def then(self) -> list[int]:
        """The models of the stages that follow, as far as they had a request."""
        chain, rows = self.run.chain, self.run.played.rows
        after = [rows[chain.stages.index(stage)] for stage in chain.then[self.request.stage.stage.name]]
        return [parts[0][0] for parts in after if parts]


class PlayedChains:
    """All requests of chains that have not ended. The simulator submits and withdraws what `take` returns."""

    def __init__(self, chains: Sequence[Chain], max_queued_requests: int) -> None:
        self._chains = chains
        self._room = ChainRoom(max_queued_requests // 2, 0)
        self._parts: dict[int, StageRequest] = {}
        """Live requests of stages, by the simulator's ids."""
        self._ids: dict[StageRequest, int] = {}
        self._submit: list[StagePart] = []
        self._withdraw: list[int] = []
        self._ended: list[PlayedRun] = []

    @property
    def is_busy(self) -> bool:
        """Tell whether the caller has anything to do (`take`)."""
        return bool(self._submit or self._withdraw or self._ended)

    @property
    def next_deadline(self) -> float:
        """The first deadline of a request that waits for room; infinity for none."""
        return self._room.next_deadline()

    def begin(self, played: TraceChain, id_: int, deadline: float | None, now: float) -> None:
        """Take in a client's request."""
        chain = self._chains[played.chain]
        run = PlayedRun(chain, played, id_, now, deadline)
        self._room.wait(run, played.client)
        self._begin_waiting(now)

    def submitted(self, part: StagePart, id_: int) -> None:
        """Note the id of a stage's request."""
        self._parts[id_] = part.request
        self._ids[part.request] = id_

    def ended(self, id_: int, code: str | None, now: float) -> None:
        """Take in the end of a stage's request: None for a result, else the code of its failure."""
        part = self._parts.pop(id_, None)
        if part is None:
            return  # it was withdrawn
        del self._ids[part]
        if code is None:
            part.run.answered(part, _NOTHING, now)
        else:
            part.run.failed(part, code, code, now)
        self._follow(part.run, now)

    def time_passed(self, now: float) -> None:
        """End the requests whose deadline has passed while they waited for room."""
        while (run := self._room.late(now)) is not None:
            run.fail(DeadlineExceeded.code, "it waited for room")
            self._follow(run, now)

    def take(self) -> tuple[list[StagePart], list[int], list[PlayedRun]]:
        """Return requests to submit, ids to withdraw, and chains' requests that have ended; forget them."""
        submit = [part for part in self._submit if not part.run.is_over]
        taken = submit, self._withdraw, self._ended
        self._submit, self._withdraw, self._ended = [], [], []
        return taken

    def _follow(self, run: ChainRun, now: float) -> None:
        self._carry_out(run, now)
        self._begin_waiting(now)

    def _begin_waiting(self, now: float) -> None:
        while (run := self._room.next()) is not None:
            run.begin(now)
            self._carry_out(run, now)

    def _carry_out(self, run: ChainRun, now: float) -> None:
        assert isinstance(run, PlayedRun)
        ready, run.ready = run.ready, []
        for request in ready:
            stage = run.chain.stages.index(request.stage.stage)
            model, sizes = run.played.rows[stage][request.index]
            self._submit.append(StagePart(run=run, request=request, model=model, sizes=sizes))
        self._room.update(run)
        if run.is_over:
            for request in run.live:
                if (id_ := self._ids.pop(request, None)) is not None:
                    del self._parts[id_]
                    self._withdraw.append(id_)
            self._ended.append(run)
