"""A model for Ray Data: `ds.map_batches(shapestream.ray.Model, fn_constructor_args=("server.yaml",), ...)`.

    dataset ── blocks ──▶ actors, each a process: Model ── rows, as a stream ──▶ shapestream.local: a server inside
                                 ▲                                                        │
                prepared folder: proofs, costs, deaths                        rows with their outputs ──▶ blocks

Ray cuts batches in the order of arrival. Here its rows are sent as requests of their own, and the scheduler of the actor's
server cuts calls by their shapes. Several batches share it where the pool has `max_concurrent_calls_per_actor` and
`enable_true_multi_threading`.

The batch axis is added to a row and taken away by the model's signature, never by the values of a block. The signature also
decides the form of an output's column: one array where it fixes the sizes of a row, else an object array with an array for
each row, also where all rows of a block happen to be equal.

docs/hosts.md says what holds in an actor. This module needs Ray (the extra `[ray]`); no other one imports it.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shapestream import local
from shapestream.client.blocking_client import Client
from shapestream.client.opened_models import Failed, Result
from shapestream.deaths import MOST_DEATHS, Deaths, digest_of
from shapestream.errors import ConfigurationError, InvalidRequest, Poisoned, RequestError, did_you_mean
from shapestream.row_values import batch_axis, columns_of, inputs_of_row, outputs_of_row
from shapestream.settings import LoadedSettings, load_settings
from shapestream_engine.calibration import CostCache
from shapestream_engine.element_types import dtype_of
from shapestream_engine.ports import InputPort, OutputPort, shapes_of
from shapestream_engine.probing.cache import ProofCache
from shapestream_engine.signature import ModelSignature

try:
    import ray
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "shapestream.ray needs Ray (pip install 'shapestream[ray]')", name=missing.name
    ) from missing

__all__ = ["Model", "prepare"]

Array = np.ndarray[Any, Any]
Batch = Mapping[str, Array]
"""A batch as Ray gives it with `batch_format="numpy"`, the default: columns of as many rows."""
Inputs = Mapping[str, Array]

ERROR = "error"
"""The column of errors; None for a row with results."""
_DEATHS = "deaths"
"""The folder of `Deaths` in the prepared one."""
_environment = threading.Lock()
"""Held while `prepare` has other folders of results in the environment."""


def prepare(
    config: str | Path, cpus: int, model: str | None = None, *, folder: str | Path | None = None
) -> str:
    """Prove and measure the model or chain as an actor of `cpus` CPUs does, and return the folder with the results.

    Call it once, where the job starts, and give the folder to the actors (`prepared=`): they read it, where each of them
    would do the work again. It also forgets the rows that processes of an earlier job have died of. All actors must be able
    to write to `folder`; by default it is `server.prepared` beside `server.yaml`.

    Raises `ConfigurationError` as `Model` does, and for models that cannot be served.
    """
    config = Path(config).absolute()
    found = Path(folder).absolute() if folder is not None else config.with_suffix(".prepared")
    loaded = load_settings(config, serves=False)
    name = _chosen(loaded, model)
    _refuse_unrepeatable(loaded, name)
    found.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(found / _DEATHS, ignore_errors=True)
    with _environment:
        before = {kept.VARIABLE: os.environ.get(kept.VARIABLE) for kept in (ProofCache, CostCache)}
        try:
            _keep_in(found)
            # In a thread: a notebook has an event loop in its own.
            with ThreadPoolExecutor(1) as threads:
                threads.submit(_start_once, loaded, name, cpus).result()
        finally:
            for variable, value in before.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value
    return str(found)


def _start_once(loaded: LoadedSettings, name: str, cpus: int) -> None:
    with local.connect_to(loaded, _models_of(loaded, name), cpus=cpus):
        pass


def _keep_in(folder: Path) -> None:
    """Let this process keep proofs and costs in a folder: by their own variables, which nothing else reads."""
    for kept in (ProofCache, CostCache):
        os.environ[kept.VARIABLE] = str(folder / kept.BELOW / kept.NAME)


class Model:
    """A model over the batches of a dataset: an actor's server, which starts with the first batch.

    Its answer to a batch has all columns of the batch, and one for each output of the model.
    """

    def __init__(
        self,
        config: str | Path,
        model: str | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        cpus: int | None = None,
        on_error: Literal["raise", "column"] = "raise",
        deadline: float | None = None,
        in_flight: int = 256,
        prepared: str | Path | None = None,
    ) -> None:
        """Read the configuration; nothing is compiled yet.

        config: a YAML as for `shapestream.local`, readable for each actor.
        model: the name of a model or chain; without it the only one of the YAML.
        columns: the column of each input that is called otherwise.
        cpus: CPUs that the models use. Default: those that Ray has assigned to the actor.
        on_error: "raise" ends the job at the first row that fails. "column" adds a column `error` with None, or the reason
            why the row has no results: NaN, 0, None or an empty array stands there.
        deadline: seconds for each row; None: without end.
        in_flight: rows of a batch that are under way at a time.
        prepared: the folder that `prepare` has returned. Without it each actor proves and measures by itself, or reads the
            user's caches, and a row that crashes its model does so as often as Ray starts the actor again.

        Raises `ConfigurationError` for what the YAML has wrong, and for models with `idempotent: false`: Ray runs rows
        again.
        """
        if on_error not in ("raise", "column"):
            raise ValueError(f'on_error is "raise" or "column", not {on_error!r}')
        self._loaded = load_settings(config, serves=False)
        self._name = _chosen(self._loaded, model)
        _refuse_unrepeatable(self._loaded, self._name)
        self._deaths: Deaths | None = None
        if prepared is not None:
            if not Path(prepared).is_dir():
                raise ConfigurationError([f"{prepared}: there is no such prepared folder here"])
            _keep_in(Path(prepared).absolute())
            self._deaths = Deaths(Path(prepared).absolute() / _DEATHS)
        self._cpus = assigned_cpus() if cpus is None else cpus
        self._given = dict(columns or {})
        self._in_column = on_error == "column"
        self._deadline = deadline
        self._in_flight = in_flight
        self._turns = _Turns()
        self._starts = threading.Lock()
        """Held while the server starts: the first batches may come together."""
        self._client: Client | None = None
        self._end: Callable[[], object] = _nothing
        """Ends the server; also where this object goes, and where the program ends. A thread that is in an engine's call
        at the interpreter's end would end the process by SIGABRT."""

    def __call__(self, batch: Batch) -> dict[str, Array]:
        """Run the rows of a batch. For any thread. Raises `ConfigurationError` for missing columns, and a row's error."""
        client = self._connected()
        signature = client.signature(self._name)
        # An input that a row may lack, as a mask, is taken where there is a column of its name.
        there = {port.name: port.name for port in signature.inputs if port.name in batch}
        columns = columns_of(signature, {**there, **self._given}, "columns")
        _check_batch(batch, signature, columns, has_errors=self._in_column)
        count = len(next(iter(batch.values()))) if batch else 0
        answers = self._answers(client, [_inputs(signature, columns, batch, row) for row in range(count)])
        rows: list[dict[str, Any] | None] = []
        errors = np.full(count, None, object)
        for row, answer in enumerate(answers):
            if isinstance(answer, RequestError):
                rows.append(None)
                errors[row] = str(answer)
            else:
                rows.append(outputs_of_row(signature, answer, drops_batch=True))
        found = {
            port.name: _column(port, [None if row is None else row[port.name] for row in rows])
            for port in _told(signature)
        }
        return {**batch, **found, **({ERROR: errors} if self._in_column else {})}

    def close(self) -> None:
        """End the server, and keep what it has learned of costs. Ray does so when it lets go of the object."""
        end, self._end, self._client = self._end, _nothing, None
        end()

    def _connected(self) -> Client:
        with self._starts:
            if self._client is None:
                server = local.connect_to(self._loaded, _models_of(self._loaded, self._name), cpus=self._cpus)
                self._client = server.__enter__()
                self._end = weakref.finalize(self, server.__exit__)
            return self._client

    def _answers(self, client: Client, rows: Sequence[Inputs | RequestError]) -> list[Result | RequestError]:
        """Return the answer of each row, or its error. Rows that may have killed a process run alone, after the others."""
        found: dict[int, Result | RequestError] = {}
        calm: dict[int, Inputs] = {}
        suspects: dict[int, Inputs] = {}
        digests: dict[int, str] = {}
        known: Mapping[str, int] = self._deaths.known() if self._deaths is not None else {}
        for row, inputs in enumerate(rows):
            if isinstance(inputs, RequestError):
                found[row] = self._failed(row, inputs)
                continue
            if self._deaths is not None:
                digests[row] = digest_of(self._name, inputs)
            deaths = known.get(digests.get(row, ""), 0)
            if deaths >= MOST_DEATHS:
                found[row] = self._failed(
                    row, Poisoned("the process ended twice while this row was under way")
                )
            else:
                (suspects if deaths else calm)[row] = inputs
        with self._turns.together():
            self._run(client, calm, [digests[row] for row in calm if row in digests], found)
        for row, inputs in suspects.items():
            with self._turns.alone():
                self._run(client, {row: inputs}, [digests[row]], found)
            if self._deaths is not None:
                self._deaths.clear(digests[row])
        return [found[row] for row in range(len(rows))]

    def _run(
        self,
        client: Client,
        rows: Mapping[int, Inputs],
        digests: Sequence[str],
        found: dict[int, Result | RequestError],
    ) -> None:
        """Run rows as a stream, and put their answers to those that were found."""
        if not rows:
            return
        deaths = self._deaths
        with deaths.under_way(digests) if deaths is not None else nullcontext():
            stream = client.stream(
                self._name,
                rows.values(),
                on_error="yield",
                max_in_flight=self._in_flight,
                deadline=self._deadline,
            )
            with stream as answers:
                for row, answer in zip(rows, answers, strict=True):
                    found[row] = self._failed(row, answer.error) if isinstance(answer, Failed) else answer

    def _failed(self, row: int, error: RequestError) -> RequestError:
        """Return the error of a row, or raise it."""
        if self._in_column:
            return error
        error.add_note(f'row {row} of its batch (on_error="column" keeps the others)')
        raise error


def _nothing() -> None:
    """End no server: none has started."""


class _Turns:
    """The order of batches in one server: any number together, or one row alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        """Batches that run now; -1 while a row runs alone."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait until no row runs alone."""
        with self._changed:
            self._changed.wait_for(lambda: self._running >= 0)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nothing runs, then let nothing else."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)
            self._running = -1
        try:
            yield
        finally:
            with self._changed:
                self._running = 0
                self._changed.notify_all()


def assigned_cpus() -> int | None:
    """Return the whole CPUs that Ray has assigned to this actor, at least 1; None outside of an actor."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    return max(1, int(context.get_assigned_resources().get("CPU", 1)))


# ---------------------------------------------------------------- the configuration


def _names(loaded: LoadedSettings) -> list[str]:
    """Return the names of all models and chains."""
    return loaded.settings.names


def _chosen(loaded: LoadedSettings, name: str | None) -> str:
    """Return the name of the model or chain that is meant. Raises `ConfigurationError`."""
    names = _names(loaded)
    if name is None:
        if len(names) != 1:
            raise ConfigurationError(
                [f"{loaded.path}: model= says which: {', '.join(names) or 'there is none'}"]
            )
        return names[0]
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigurationError([f"{loaded.path}: there is no model or chain {name!r} {hint}"])
    return name


def _models_of(loaded: LoadedSettings, name: str) -> list[str]:
    """Return the name of the model, or those of the chain's models."""
    return [model.name for model in loaded.settings.models_asked_by(name)]


def _refuse_unrepeatable(loaded: LoadedSettings, name: str) -> None:
    """Raise `ConfigurationError` for a model, or a stage of a chain, whose rows must not run twice."""
    settings = loaded.settings
    for model in _models_of(loaded, name):
        if not settings.models_by_name[model].idempotent:
            raise ConfigurationError(
                [
                    f"{loaded.path}: model {model!r} has idempotent: false, and Ray runs rows again when an actor dies "
                    "(shapestream run never does)"
                ]
            )


# ---------------------------------------------------------------- columns


def _told(signature: ModelSignature) -> list[OutputPort]:
    """Return the outputs that have a column: all but the shapes of a list's arrays, which they have themselves."""
    made = {shapes_of(port.name) for port in signature.outputs if port.item is not None}
    return [port for port in signature.outputs if port.name not in made]


def _check_batch(
    batch: Batch, signature: ModelSignature, columns: Mapping[str, str], *, has_errors: bool
) -> None:
    """Raise what concerns all rows: no mapping of arrays, columns that are missing, or would be replaced."""
    if not isinstance(batch, Mapping) or not all(isinstance(column, np.ndarray) for column in batch.values()):
        raise TypeError(
            f'a batch is a dict of NumPy arrays (batch_format="numpy"), not {type(batch).__name__}'
        )
    for port, column in columns.items():
        if column not in batch:
            raise ConfigurationError(
                [
                    f"column {column!r} is missing (columns: {', '.join(batch)}; columns={{{port!r}: COLUMN}} names another)"
                ]
            )
    made = [*[port.name for port in _told(signature)], *([ERROR] if has_errors else [])]
    if taken := [name for name in made if name in batch]:
        raise ConfigurationError(
            [f"column {taken[0]!r} would be replaced by the results (rename_columns or drop_columns before)"]
        )


def _inputs(
    signature: ModelSignature, columns: Mapping[str, str], batch: Batch, row: int
) -> Inputs | RequestError:
    """Return the inputs of a row, or the reason why it has none."""
    try:
        values = {
            port.name: _value(port, batch[columns[port.name]][row])
            for port in signature.inputs
            if port.name in columns
        }
        return inputs_of_row(signature, values, adds_batch=True)
    except InvalidRequest as error:
        return error


def _value(port: InputPort, value: Any) -> Any:
    """Return a value without the objects that Arrow's nested lists and texts become. Raises `InvalidRequest`."""
    if isinstance(value, np.str_ | np.bytes_):
        return value.item()
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "US":
        return value.astype(object)
    if value.dtype != object:
        return value
    if value.size and all(isinstance(each, np.ndarray) for each in value.flat):
        inner = [_value(port, each) for each in value.flat]
        if any(each.shape != inner[0].shape for each in inner):
            raise InvalidRequest(f"{port.name}: the lists differ in length")
        return np.stack(inner).reshape(value.shape + inner[0].shape)
    return value if port.is_string else value.tolist()


def _column(port: OutputPort, values: Sequence[Any]) -> Array:
    """Return the values of an output by row as a column. None: the row failed.

    The signature decides the form. An object array is filled element by element: NumPy would look into equal elements, and
    make an axis of each.
    """
    dimensions = [
        dimension for axis, dimension in enumerate(port.shape.dimensions) if axis != batch_axis(port)
    ]
    if port.is_string or port.item is not None:
        return _objects([None if value is None else _plain(value) for value in values])
    # Arrow has no bf16; f32 holds each of its values.
    dtype = np.dtype(np.float32) if port.element_type == "bf16" else dtype_of(port.element_type)
    if any(dimension.is_dynamic for dimension in dimensions):
        nothing: Array = np.empty((0,) * len(dimensions), dtype)
        return _objects([nothing if value is None else value.astype(dtype, copy=False) for value in values])
    sizes = tuple(dimension.minimum for dimension in dimensions)
    found: Array = np.full((len(values), *sizes), np.nan if dtype.kind == "f" else 0, dtype)
    for row, value in enumerate(values):
        if value is not None:
            found[row] = value
    return found


def _plain(value: Any) -> Any:
    """Return strings, or a list of arrays, as plain lists: an array of objects has no type for Arrow."""
    return [array.tolist() for array in value] if isinstance(value, list) else value.tolist()


def _objects(values: Sequence[Any]) -> Array:
    found = np.empty(len(values), object)
    for row, value in enumerate(values):
        found[row] = value
    return found
