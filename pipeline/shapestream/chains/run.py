"""One request of a chain: which requests of its stages follow from each answer, and how it ends.

A stage begins when all stages that it needs are done, and is done when its last request has ended. Its values are dropped
when every stage that takes them has begun, unless the chain gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import Final

from shapestream.chains.plan import OF_NO_MODEL, Chain, Gathering, Stage, StageOutput
from shapestream.chains.spec import Source, Spread
from shapestream.chains.values import Items, Tensor, Value, blank, listed, stacked
from shapestream_engine.layout import Tensors

ROW_FAULTS: Final = frozenset({"model_error", "poisoned", "invalid", "too_large", "worker_lost"})
"""Codes of failures of a row alone, which a chain may skip. Any other failure concerns the whole request."""


class RunState(Enum):
    """The state of a request of a chain."""

    WAITING = "waiting"
    """It has not begun: no room is left for what it may fan out to."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


RUN_TABLE: Final[dict[str, dict[RunState, RunState]]] = {
    "begin": {RunState.WAITING: RunState.RUNNING},
    "done": {RunState.RUNNING: RunState.DONE},
    "fail": {RunState.WAITING: RunState.FAILED, RunState.RUNNING: RunState.FAILED},
}


class StageRequest:
    """A request that a chain makes for one of its stages."""

    __slots__ = ("index", "nbytes", "run", "stage", "tensors")

    def __init__(self, run: ChainRun, stage: StageRun, index: int, tensors: Tensors, nbytes: int) -> None:
        self.run = run
        self.stage = stage
        self.index = index
        """Its place among the requests of its stage: the row of its result."""
        self.tensors = tensors
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"<{self.run.chain.name}.{self.stage.stage.name}[{self.index}]>"


class StageRun:
    """One stage of one request."""

    __slots__ = ("began", "ended", "failed", "last", "left", "nbytes", "results", "stage")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.results: list[Tensors | None] = []
        """By index; None: not there yet, or it failed."""
        self.left = 0
        """Requests that have not ended."""
        self.nbytes = 0
        """Bytes of its requests' inputs."""
        self.failed = 0
        self.began = inf
        self.ended = inf
        self.last: StageRequest | None = None
        """The request that ended last: the one on the critical path."""

    @property
    def requests(self) -> int:
        """The requests that it had."""
        return len(self.results)


class ChainFailure(Exception):
    """A request of a chain cannot go on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ChainRun:
    """One request of a chain. Each method takes the time of the event; none asks for it."""

    __slots__ = (
        "_left",
        "_users",
        "_values",
        "chain",
        "deadline",
        "failure",
        "live",
        "most",
        "outputs",
        "ready",
        "stages",
        "state",
    )

    def __init__(self, chain: Chain, inputs: Tensors, deadline: float | None) -> None:
        """Take the inputs, which fit the chain's signature. It has failed if a stage would have more rows than it may."""
        self.chain = chain
        self.deadline = deadline
        self.state = RunState.WAITING
        self.stages = [StageRun(stage) for stage in chain.stages]
        self.ready: list[StageRequest] = []
        """Requests to submit; the caller empties it."""
        self.live: dict[StageRequest, None] = {}
        """Requests that were made and have not ended."""
        self.failure: ChainFailure | None = None
        self.outputs: Tensors | None = None
        """The result, once it is done."""
        self._left = {stage.stage.name for stage in self.stages}
        """Stages that are not done."""
        self._users = dict(chain.users)
        self._values: dict[Source, Value] = {}
        for (port, element_type, shape), buffer in zip(inputs.layout, inputs.buffers, strict=True):
            self._values[Source(None, chain.inputs[port])] = Tensor(element_type, shape, buffer)
        shapes = {chain.inputs[port]: shape for port, _, shape in inputs.layout}
        self.most = {stage.name: stage.most(shapes) for stage in chain.stages if stage.is_counted}
        """The requests and bytes that each counted stage may hold, by its name."""
        for stage in chain.stages:
            if (rows := stage.rows(shapes)) is not None and rows > stage.at_most:
                self.fail("too_large", _too_many(stage, rows))

    @property
    def is_over(self) -> bool:
        """Tell whether it has ended."""
        state = self.state
        return state is RunState.DONE or state is RunState.FAILED

    def begin(self, now: float) -> None:
        """Make the requests of the first stages."""
        self.state = RUN_TABLE["begin"][self.state]
        self._go_on(now)

    def answered(self, request: StageRequest, outputs: Tensors, now: float) -> None:
        """Take in the result of a request. What follows from it is in `ready`, `outputs` and `failure`."""
        stage = self._ended(request)
        if stage is None:
            return
        stage.results[request.index] = outputs
        self._count(stage, request, now)

    def failed(self, request: StageRequest, code: str, message: str, now: float) -> None:
        """Take in the failure of a request: its row is marked, or the whole chain fails."""
        stage = self._ended(request)
        if stage is None:
            return
        stage.failed += 1
        if self.chain.skips and stage.stage.fans_out and code in ROW_FAULTS:
            self._count(stage, request, now)
            return
        stage.last, stage.ended = request, now
        where = f"stage {stage.stage.name!r}"
        if stage.stage.fans_out:
            where = f"{where}, row {request.index}"
        self.fail(code, f"{where}: {message}")

    def fail(self, code: str, message: str) -> None:
        """End without a result. Its `live` requests are of no use any more; the caller withdraws them."""
        if self.is_over:
            return
        self.state = RUN_TABLE["fail"][self.state]
        self.failure = ChainFailure(code, message)
        for request in self.ready:
            self.live.pop(request, None)
        self.ready = []
        self._values.clear()

    # ---------------------------------------------------------------- stages

    def _ended(self, request: StageRequest) -> StageRun | None:
        """Forget a request; return its stage, or None if the chain is over, and nothing follows."""
        self.live.pop(request, None)
        return None if self.is_over else request.stage

    def _count(self, stage: StageRun, request: StageRequest, now: float) -> None:
        stage.left -= 1
        stage.last = request
        if not stage.left:
            self._go_on(now, done=stage)

    def _go_on(self, now: float, done: StageRun | None = None) -> None:
        """Finish a stage that is `done`, begin each stage that has all that it needs, and end after the last one."""
        try:
            if done is not None:
                self._finish(done, now)
            begun = True
            while begun:
                begun = False
                for stage in self.stages:
                    if stage.began == inf and not stage.stage.needs & self._left:
                        begun = True
                        self._begin(stage, now)
            if not self._left:
                self._give()
        except ChainFailure as failure:
            self.fail(failure.code, failure.message)

    def _begin(self, run: StageRun, now: float) -> None:
        stage = run.stage
        run.began = now
        try:
            rows = self.rows_of(stage)
        except ValueError as error:
            raise ChainFailure("invalid", f"stage {stage.name!r}: {error}") from None
        if not rows and (never_empty := stage.never_empty):
            raise ChainFailure("invalid", _cannot_be_empty(stage, never_empty[0], self._values))
        run.nbytes = sum(nbytes for _, nbytes in rows)
        if stage.is_counted:
            self._hold_to_limits(run, rows)
        run.results, run.left = [None] * len(rows), len(rows)
        for index, (tensors, nbytes) in enumerate(rows):
            request = StageRequest(self, run, index, tensors, nbytes)
            self.live[request] = None
            self.ready.append(request)
        for feed in stage.feeds:
            self._release(feed.source)
        if not rows:
            self._finish(run, now)

    def rows_of(self, stage: Stage) -> Sequence[tuple[Tensors, int]]:
        """Return the tensors of each request of a stage that begins, and their bytes. The simulator has other rows.

        Raises ValueError if counts or shapes differ.
        """
        return _requests_of(stage, self._values)

    def _hold_to_limits(self, run: StageRun, rows: Sequence[tuple[Tensors, int]]) -> None:
        stage = run.stage
        count = len(rows)
        if not stage.fans_out and rows:  # a batch
            port = next(feed.port for feed in stage.feeds if feed.spread is Spread.BATCH)
            count = next(shape[0] for number, _, shape in rows[0][0].layout if number == port)
        if count > stage.at_most:
            raise ChainFailure("too_large", _too_many(stage, count))
        if run.nbytes > stage.at_most_bytes:
            raise ChainFailure(
                "too_large",
                f"stage {stage.name!r} has {run.nbytes} bytes to run; its at_most_bytes is {stage.at_most_bytes}",
            )

    def _finish(self, run: StageRun, now: float) -> None:
        """Put the outputs of a stage together from the results of its requests."""
        stage = run.stage
        run.ended = now
        for name, output in stage.outputs.items():
            source = Source(stage.name, name)
            if not self._users.get(source):
                continue
            # Before an object is made for each of them.
            counted = self.chain.counted.get(source)
            if counted is not None and (rows := _rows_in(output, run.results)) > counted.at_most:
                raise ChainFailure("too_large", _too_many(counted, rows))
            try:
                self._values[source] = _gathered(output, run.results, is_empty=not run.results)
            except ValueError as error:
                raise ChainFailure("internal", f"stage {stage.name!r}, output {name!r}: {error}") from None
        run.results = [None] * len(run.results)  # their bytes are needed no longer, except along the edges
        self._left.discard(stage.name)

    def _release(self, source: Source) -> None:
        """Drop a value that no stage and no output needs any more."""
        self._users[source] -= 1
        if not self._users[source]:
            self._values.pop(source, None)

    def _give(self) -> None:
        """Make the result of the chain's outputs."""
        tensors: list[Tensor] = []
        for source in self.chain.outputs.values():
            value = self._values[source]
            tensors.extend(value.write() if isinstance(value, Items) else (value,))
        self.outputs = Tensors(
            layout=tuple(
                (number, tensor.element_type, tensor.shape) for number, tensor in enumerate(tensors)
            ),
            buffers=[tensor.buffer for tensor in tensors],
        )
        self._values.clear()
        self.state = RUN_TABLE["done"][self.state]


def _requests_of(stage: Stage, values: dict[Source, Value]) -> list[tuple[Tensors, int]]:
    """Return the tensors of each request of a stage, and their bytes. Raises ValueError if counts or shapes differ."""
    columns: list[tuple[int, list[Tensor]]] = []
    whole: list[tuple[int, Tensor]] = []
    for feed in stage.feeds:
        value = values[feed.source]
        if isinstance(value, Items):
            if feed.spread is Spread.BATCH:
                whole.append((feed.port, value.as_batch()))
                continue
            rows = [*value.tensors]
            if feed.adds_row:
                rows = [tensor._replace(shape=(1, *tensor.shape)) for tensor in rows]
            columns.append((feed.port, rows))
        elif feed.spread is Spread.ROW:
            columns.append((feed.port, value.rows(keep_axis=feed.adds_row)))
        else:
            whole.append((feed.port, value))
    if not columns:
        batches = [feed.port for feed in stage.feeds if feed.spread is Spread.BATCH]
        counts = {tensor.shape[0] for port, tensor in whole if port in batches}
        return [] if batches and _one_count(counts) == 0 else [_tensors_of(whole)]
    return [
        _tensors_of([*whole, *((port, rows[index]) for port, rows in columns)])
        for index in range(_one_count({len(rows) for _, rows in columns}))
    ]


def _one_count(counts: set[int]) -> int:
    """Return the number of rows that all sources have. Raises ValueError if they differ."""
    if len(counts) > 1:
        raise ValueError(f"its sources have different numbers of rows: {', '.join(map(str, sorted(counts)))}")
    return counts.pop()


def _tensors_of(ports: Sequence[tuple[int, Tensor]]) -> tuple[Tensors, int]:
    tensors = Tensors(
        layout=tuple([(port, tensor.element_type, tensor.shape) for port, tensor in ports]),
        buffers=[tensor.buffer for _, tensor in ports],
    )
    return tensors, sum([tensor.nbytes for _, tensor in ports])


def _too_many(stage: Stage, rows: int) -> str:
    return f"stage {stage.name!r} has {rows} rows to run; its at_most is {stage.at_most}"


def _rows_in(output: StageOutput, results: Sequence[Tensors | None]) -> int:
    """Return how many items or rows an output has, by its shape."""
    if output.gathering is not Gathering.ONLY or output.number == OF_NO_MODEL:
        return len(results)
    number = output.number if output.shapes is None else output.shapes
    return sum([_tensor(result, number).sizes[0] for result in results if result is not None])


def _gathered(output: StageOutput, results: Sequence[Tensors | None], *, is_empty: bool) -> Value:
    """Put one output together. A stage without requests gives empty outputs of their types."""
    if output.number == OF_NO_MODEL:
        return Tensor("boolean", (len(results),), bytes(result is not None for result in results))
    element_type = output.type.element_type
    if output.gathering is Gathering.ONLY:
        if is_empty:
            return _nothing(output)
        (result,) = results
        assert result is not None
        tensor = _tensor(result, output.number)
        return tensor if output.shapes is None else Items.read(tensor, _tensor(result, output.shapes))
    rows = [None if result is None else _tensor(result, output.number) for result in results]
    if output.gathering is Gathering.STACKED:
        return stacked(rows, element_type, output.type.smallest[1:])
    return listed(rows, element_type, output.type.smallest, drop_row=output.drop_row)


def _nothing(output: StageOutput) -> Value:
    """Return the output of a stage whose batch had no rows."""
    element_type = output.type.element_type
    if output.type.is_list:
        return Items(element_type, output.type.shape.rank, ())
    assert output.empty is not None  # the stage would not have begun
    return blank(element_type, output.empty)


def _cannot_be_empty(stage: Stage, name: str, values: dict[Source, Value]) -> str:
    """Say why a batch without rows ends the request, and what to do."""
    source = next(feed.source for feed in stage.feeds if feed.spread is Spread.BATCH)
    spread = Spread.ITEM if isinstance(values[source], Items) else Spread.ROW
    return (
        f"stage {stage.name!r}: {source} has no rows, and the output {name!r}, {stage.outputs[name].type}, cannot be "
        f"empty (write each: {spread.value} of {source} in the chain, or give the output an axis for rows)"
    )


def _tensor(result: Tensors, number: int) -> Tensor:
    """Return an output of a result."""
    for (port, element_type, shape), buffer in zip(result.layout, result.buffers, strict=True):
        if port == number:
            return Tensor(element_type, shape, buffer)
    raise ChainFailure("internal", f"a result lacks output {number}")
