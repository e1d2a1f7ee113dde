"""`shapestream run`: the rows of an input through a model, in order, and their results into a file.

    source ─▶ stream of the client, some rows under way ─▶ a part now and then ─▶ at the end one file

The model runs inside this process (`shapestream.local`), or at a server. A model that crashes ends this process when it is
inside; then `--resume` goes on, and `attempts.py` says which rows run alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import shapestream
from shapestream import blocking, local
from shapestream.client.blocking_client import Client, Stream
from shapestream.client.opened_models import Failed, Model, Result
from shapestream.client.streaming import Item, OwnItem, StreamOptions
from shapestream.errors import (
    ConfigurationError,
    Draining,
    InvalidRequest,
    Overloaded,
    RequestError,
    Unavailable,
    did_you_mean,
)
from shapestream.loading.sources import digests_of
from shapestream.row_values import columns_of, inputs_of_row, outputs_of_row
from shapestream.settings import LoadedSettings
from shapestream.settings.version_settings import ROUTING
from shapestream_workers.offline.attempts import Outlook
from shapestream_workers.offline.formats import check_output, open_source, results_of
from shapestream_workers.offline.parts import Parts
from shapestream_workers.offline.pictures import PictureFormat
from shapestream_workers.offline.progress import Progress
from shapestream_workers.offline.results import DoneRow, Results
from shapestream_workers.offline.sources import BadRow, RowSource, Values, identity_of
from shapestream_workers.target import ServerAccess

HELD_BYTES = 1 << 30
"""Bytes of the inputs of rows that are under way, at most; one row alone may be larger."""
PART_ROWS = 4096
PART_BYTES = 64 << 20
PART_S = 10.0
"""A part is written when it has so many rows, or bytes of results, or is so old: a kill costs at most one part."""

TRIES = 8
"""Times that a row is tried again which may succeed later; then the run ends, and `--resume` goes on with that row."""
MOST_WAIT_S = 30.0
"""Seconds between two of them, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, as the command line says it."""

    loaded: LoadedSettings
    model: str
    input: Path
    output: Path
    columns: Mapping[str, str]
    """Columns by input, where they are called otherwise."""
    pictures: PictureFormat
    in_flight: int
    """Rows under way at a time, at most."""
    deadline_s: float | None
    cpus: int | None
    resume: bool
    server: ServerAccess | None
    """None: the model runs in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run."""

    rows: int
    failed: int
    """Of this attempt and of earlier ones."""
    first_error: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return asdict(self)


def run(job: Job) -> Summary:
    """Run all rows that are not done. Raises `ConfigurationError` for what concerns all of them, and OSError."""
    check_output(job.output)
    names = job.loaded.settings.names
    if job.model not in names:
        hint = did_you_mean(job.model, names)
        raise ConfigurationError([f"{job.loaded.path}: there is no model or chain {job.model!r} {hint}"])
    source = open_source(job.input, job.pictures)
    parts = Parts(job.output, resume=job.resume)
    try:
        parts.require(manifest_of(job, source))
        with _connected(job) as client:
            return _Run(job, source, parts, client).run()
    finally:
        parts.close()


def manifest_of(job: Job, source: RowSource) -> dict[str, Any]:
    """Return what all attempts of a run have in common: input, model, and the options that results depend on."""
    settings = job.loaded.settings
    models, chain = settings.models_asked_by(job.model), settings.chain_meant_by(job.model)
    stated = [model.model_dump(mode="json", exclude={*ROUTING}) for model in models]
    if chain is not None:
        stated.append(chain.model_dump(mode="json", exclude={*ROUTING}))
    return {
        "shapestream": shapestream.__version__,
        "input": {"rows": source.total, "identity": identity_of(source)},
        "model": {
            "name": job.model,
            "files": digests_of(models),
            "settings": hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest(),
        },
        "output": job.output.suffix.lower(),
        "columns": dict(job.columns),
        "pictures": str(job.pictures),
    }


def _connected(job: Job) -> AbstractContextManager[Client]:
    if job.server is not None:
        return blocking.connect(job.server.address, **job.server.options)
    models = job.loaded.settings.models_asked_by(job.model)
    return local.connect_to(job.loaded, [model.name for model in models], cpus=job.cpus)


class _Run:
    """One attempt."""

    def __init__(self, job: Job, source: RowSource, parts: Parts, client: Client) -> None:
        self._job = job
        self._source = source
        self._parts = parts
        self._client = client
        self._model: Model = client.opened(job.model)
        self._signature = client.signature(job.model)
        self._results: Results = results_of(job.output, self._signature, source)
        self._columns = columns_of(self._signature, job.columns, "--column")
        source.check(self._signature, self._columns)
        self._pending: list[DoneRow] = []
        self._pending_bytes = 0
        self._kept_at = monotonic()
        self._first_error: str | None = None
        idempotent = all(model.idempotent for model in job.loaded.settings.models_asked_by(job.model))
        # What was refused has not begun; where no server can be reached, nobody knows.
        self._refusals = (Overloaded, Draining, Unavailable) if idempotent else (Overloaded, Draining)

    def run(self) -> Summary:
        """Run the rows that are in no part, write the results, and count."""
        job, total = self._job, self._source.total
        first = self._parts.first
        before = self._parts.begin(
            idempotent=all(model.idempotent for model in job.loaded.settings.models_asked_by(job.model))
        )
        progress = Progress(total, first)
        # A row kills this process only if the model runs in it.
        alone_before = 0 if job.server is not None else before.alone_before
        steps = [
            (first, min(total, alone_before), 1),
            (max(first, min(total, alone_before)), total, job.in_flight),
        ]
        for start, end, in_flight in steps:
            if start < end:
                self._stream(start, end, in_flight, before, progress.row)
        self._keep()
        progress.end()
        failed = self._parts.failed
        self._parts.merge(self._results)
        return Summary(rows=total, failed=failed, first_error=self._first_error)

    def _stream(
        self, start: int, end: int, in_flight: int, before: Outlook, told: Callable[[], None]
    ) -> None:
        options = StreamOptions(
            max_in_flight=in_flight,
            ordered=True,
            on_error="yield",
            deadline=None,
            priority=0,
            caller=None,
        )
        # A row that runs alone begins when the journal has the end of the one before, which it would accuse else.
        row, room = start, _ByteRoom(HELD_BYTES if in_flight > 1 else 0)
        stream: Stream[Item] = Stream(self._client, None, self._items(start, end, before, room), options)
        try:
            with stream as answers:
                for answer in answers:
                    self._parts.done(row)
                    room.leave()
                    self._take(row, answer, before)
                    row += 1
                    told()
        finally:
            room.close()  # else the thread that reads rows would wait for ever

    def _items(self, start: int, end: int, before: Outlook, room: _ByteRoom) -> Iterator[OwnItem]:
        """Yield the rows as items of a stream, in another thread; one that cannot be sent carries its error."""
        rows = self._source.rows(start)
        for row in range(start, end):
            inputs: Mapping[str, Any] = {}
            values = next(rows)
            if (error := before.lost.get(row)) is None:
                try:
                    inputs = self._inputs(values)
                except InvalidRequest as raised:
                    error = raised
            room.enter(sum(array.nbytes for array in inputs.values()))
            if error is None:
                self._parts.begun(row)
            yield OwnItem(
                key=row, model=self._model, inputs=inputs, deadline=self._job.deadline_s, error=error
            )

    def _inputs(self, values: Values) -> Mapping[str, Any]:
        if isinstance(values, BadRow):
            raise InvalidRequest(values.why)
        if "" in values:  # a file with one array, for the only input
            named = dict.fromkeys(self._columns, values[""])
        else:
            named = {port: values[column] for port, column in self._columns.items() if column in values}
        return inputs_of_row(self._signature, named, adds_batch=self._source.adds_batch)

    def _take(self, row: int, answer: Item, before: Outlook) -> None:
        """Put an answer into the next part, and write that if it is due."""
        outputs, error = None, None
        if isinstance(answer, Failed) and row not in before.lost and isinstance(answer.error, self._refusals):
            answer = self._again(row, answer)
        if isinstance(answer, Result):
            outputs = outputs_of_row(self._signature, answer, drops_batch=self._source.adds_batch)
        else:
            error = str(answer.error)
            self._first_error = self._first_error or f"row {row}: {error}"
        done = DoneRow(number=row, key=self._source.key(row), outputs=outputs, error=error)
        self._pending.append(done)
        self._pending_bytes += done.nbytes
        old = monotonic() - self._kept_at >= PART_S
        if old or len(self._pending) >= PART_ROWS or self._pending_bytes >= PART_BYTES:
            self._keep()

    def _again(self, row: int, failed: Failed) -> Item:
        """Try a row again that may succeed later, as at a server whose queue is full. Raises the last error."""
        inputs = self._inputs(next(self._source.rows(row)))
        error = failed.error
        for attempt in range(TRIES):
            sleep(min(error.retry_after_s or 2.0**attempt, MOST_WAIT_S))
            try:
                return self._client.infer(self._job.model, inputs, deadline=self._job.deadline_s)
            except RequestError as raised:
                if not isinstance(raised, self._refusals):
                    return Failed(row, raised, 0)
                error = raised
        raise error

    def _keep(self) -> None:
        if self._pending:
            self._parts.keep(self._pending, self._results)
            self._pending, self._pending_bytes = [], 0
        self._kept_at = monotonic()


class _ByteRoom:
    """A bound for the bytes of rows between the thread that reads them and the one that takes their answers.

    `enter` waits for room, `leave` gives back what entered first.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = 0
        self._sizes: deque[int] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def enter(self, nbytes: int) -> None:
        """Wait until so many bytes fit, or nothing else is inside, or the room is closed; then take them."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._sizes or self._held + nbytes <= self._most_bytes
            )
            self._sizes.append(nbytes)
            self._held += nbytes

    def leave(self) -> None:
        """Give back the bytes that entered first."""
        with self._changed:
            self._held -= self._sizes.popleft()
            self._changed.notify()

    def close(self) -> None:
        """Let everything enter from now on: nobody gives anything back any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
