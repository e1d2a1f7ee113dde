"""`shapestream check`: the start of `serve` with a YAML, tried without opening a port.

Each model is compiled, its batching and padding are put to the proof, and it is run on made-up inputs: a request alone
at the smallest sizes and at middling ones, and, where there is a batch axis, two in one call, divided again by the
rules. That finds a file that does not load, a shape that does not fit, a rule that does not hold, and a model
that does not keep requests apart. Padding that the YAML does not allow is tried, too, and advised where it is proved. So are
bf16 and another number of slots, for their speed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from threading import Thread
from typing import Any

from shapestream.chains.plan import Chain
from shapestream.errors import ConfigurationError
from shapestream.loading.models import (
    model_spec,
    placement_warnings,
    plan_chains,
    problem_of,
    processes_of,
    require_trusted,
    slots_and_threads,
    version_problems,
    with_bare_names,
)
from shapestream.loading.proof import TriedModel, chosen_engine, probe_options, rows_together, try_model
from shapestream.loading.trials import News, side_by_side
from shapestream.settings import LoadedSettings, Location, ModelSettings, TextFolder, load_models
from shapestream.settings.model_sources import AUTO_ENGINE
from shapestream_engine.backends.registry import EngineChoice, check_engine, engines_of_path
from shapestream_engine.batch import BatchReport
from shapestream_engine.batch_axis import inputs_line
from shapestream_engine.compiled_model import CompiledModel, RequestPool
from shapestream_engine.errors import EngineError
from shapestream_engine.layout import Tensors
from shapestream_engine.machine import is_installed
from shapestream_engine.model_files import files_of_model
from shapestream_engine.probe import EnginesReport, ProbeReport, Watch, compare_beside
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.inputs import complete_values, make_request
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Runner, run_batch
from shapestream_workers.access import server_security
from shapestream_workers.advice import PaddingAdvice, SpeedAdvice, advise_padding, advise_speed
from shapestream_workers.chains import service_problems
from shapestream_workers.gateways import missing_library, port_file_problems

# Sizes of open dimensions in the second run: large enough to be different, small enough for any model.
TYPICAL_SIZE = 16
TYPICAL_ROWS = 3
# Largest step of sizes that is looked for where a model takes some sizes only: of strided networks, and of patches.
MOST_STEP = 64
# Sizes that are tried where a model takes none of these: of short signals, patches and images.
OTHER_SIZES = (24, 32, 64, 224, 8, 4, 2)
# A model that takes longer than this over made-up inputs of these sizes is stuck.
RUN_TIMEOUT_S = 120.0
MOST_BESIDE_BYTES = 256 * 1024 * 1024
"""Bytes of a model's files up to which another engine's answers are compared unasked: both engines hold the weights, beside
the model of `check` itself, and a call of a larger one takes longer than anybody waits for."""
_WHO_IS_RIGHT = "(compare with what trained the model; `engine` chooses one, --beside none skips this)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """One model: what it takes and gives, the engine's effective properties, and the calls that were tried."""

    signature: ModelSignature
    engine: EngineChoice
    properties: dict[str, str]
    calls: tuple[str, ...]
    is_partial: bool
    """Whether it refused some of the sizes that were tried."""
    proof: ProbeReport
    engines: EnginesReport | None
    """The comparison with another engine; None if there was none."""
    padding: PaddingAdvice
    speed: SpeedAdvice


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """Findings of a check."""

    folders: tuple[TextFolder, ...] = ()
    """The folders with a text model, and which file says what."""
    models: list[ModelReport] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Lines that start with file:line:column."""
    warnings: list[str] = field(default_factory=list)

    def lines(self, shown: LoadedSettings | None) -> Iterator[str]:
        """Yield the report for a person; `shown` are settings to print too, each with its origin."""
        if shown is not None:
            for value in shown.effective_values():
                yield f"{value.key} = {value.value!r}  ({value.origin})"
            yield ""
        for folder in self.folders:
            yield from folder.lines()
        uneven = sum(model.is_partial for model in self.models)
        for model in self.models:
            yield from model.signature.describe()
            yield f"  engine {model.engine.engine}" + (f" ({model.engine.why})" if model.engine.why else "")
            if shown is not None:
                yield from (
                    f"  {name} = {value}  (engine)" for name, value in sorted(model.properties.items())
                )
            yield from (f"  {line}" for line in model.proof.lines())
            yield from (f"  {line}" for line in (model.engines.lines() if model.engines else ()))
            yield from (f"  ran {call}" for call in model.calls)
            yield from (f"  {line}" for line in model.padding.lines())
            yield from (f"  {line}" for line in model.speed.lines())
        for chain in self.chains:
            yield from chain.lines()
        if not self.problems:
            fits = {0: "", 1: ", 1 chain fits them"}.get(
                len(self.chains), f", {len(self.chains)} chains fit them"
            )
            some = f", {uneven} not at all sizes that were tried (see the warning)" if uneven else ""
            yield f"ok: {len(self.models)} model{'s' if len(self.models) != 1 else ''} compiled and run{some}{fits}"

    def to_dict(self, shown: LoadedSettings | None) -> dict[str, Any]:
        """Return the report for a script."""
        plain: dict[str, Any] = {
            "ok": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "folders": [folder.to_dict() for folder in self.folders],
            "models": [
                {
                    "signature": model.signature.to_dict(),
                    "engine": asdict(model.engine),
                    "properties": model.properties,
                    "calls": list(model.calls),
                    "proof": {
                        key: value
                        for key, value in model.proof.to_dict().items()
                        if key not in ("tolerances", "engine", "passed_over")
                    },
                    "beside": None if model.engines is None else asdict(model.engines),
                    "padding": {**asdict(model.padding), "proved": list(model.padding.proved)},
                    "speed": asdict(model.speed),
                }
                for model in self.models
            ],
            "chains": [
                {"signature": chain.signature.to_dict(), "drawing": [*chain.lines()]} for chain in self.chains
            ],
        }
        if shown is not None:
            plain["settings"] = [
                {"key": value.key, "value": value.value, "origin": value.origin}
                for value in shown.effective_values()
            ]
        return plain


def check_models(config: Path) -> list[str]:
    """Return the problems of a file's models when another section cannot be used; none if the models cannot be read
    either."""
    try:
        loaded = load_models(config)
    except ConfigurationError:
        return []  # what is wrong with it has been said
    return check_configuration(loaded).problems


def check_configuration(
    loaded: LoadedSettings,
    *,
    measure_s: float = 0.0,
    beside: str = "none",
    tell: Callable[[News], None] = lambda news: None,
) -> CheckReport:
    """Compile and try every model, several at a time; problems are in the report, none is raised.

    `measure_s`: seconds for the measurements of each model's speed. `beside`: the engine whose answers are compared; `auto`:
    the other one that reads the file, if it is small; `none`. `tell` gets news of trials that take long.

    Raises `ConfigurationError` for an unknown engine.
    """
    if beside not in (AUTO_ENGINE, "none"):
        try:
            check_engine(beside)
        except EngineError as error:
            raise ConfigurationError([f"--beside: {error}"]) from error
    report = CheckReport(folders=loaded.folders, warnings=[*placement_warnings(loaded)])
    if loaded.settings.in_process is not None:
        report.warnings.append(
            loaded.problem(
                ("in_process",), "a crash of a model ends the server, and memory cannot be given back"
            )
        )
    _check_extras(loaded, report)
    try:
        server_security(loaded)
    except ConfigurationError as error:
        report.problems += error.problems
    report.problems += port_file_problems(loaded)
    _try_models(loaded, report, measure_s, beside, tell)
    signatures = {model.signature.name: model.signature for model in report.models}
    try:
        report.chains = plan_chains(loaded, signatures)
    except ConfigurationError as error:
        report.problems += error.problems
    signatures |= {chain.spec.name: chain.signature for chain in report.chains}
    report.problems += version_problems(loaded, signatures)
    signatures = with_bare_names(loaded, signatures)
    report.problems += service_problems(loaded, signatures)
    return report


def _try_models(
    loaded: LoadedSettings, report: CheckReport, measure_s: float, beside: str, tell: Callable[[News], None]
) -> None:
    """Add what the trials of the models say, and what was measured of those that can be served."""
    models = loaded.settings.first_served()
    trials = {settings.name: _ModelCheck(loaded, settings, beside) for settings in models}
    found = side_by_side(
        models,
        lambda settings, watch: trials[settings.name].try_it(watch),
        threads=max((slots_and_threads(loaded.settings, each.name)[1] for each in models), default=1),
        tell=tell,
    )
    for settings in models:
        trial, failed = trials[settings.name], found[settings.name]
        report.problems += trial.problems
        report.warnings += trial.warnings
        if isinstance(failed, EngineError):
            report.problems.append(problem_of(loaded, settings, failed))
        else:
            # Speed is measured when no other model is tried.
            report.models.append(trial.report(measure_s))


def _check_extras(loaded: LoadedSettings, report: CheckReport) -> None:
    """Add what the ports of the server lack. Without a gateway's library `serve` ends; else it serves without the port."""
    server = loaded.settings.server
    for key, extra, findings, consequence in (
        ("http", "http", report.problems, ""),
        ("grpc", "grpc", report.problems, ""),
        ("admin", "admin", report.warnings, ": served without health checks, page and metrics"),
        ("tracing", "otel", report.warnings, ": served without tracing"),
    ):
        if getattr(server, key) is not None and (missing := missing_library(extra)) is not None:
            findings.append(loaded.problem(("server", key), f"{missing}{consequence}"))


class _ModelCheck:
    """The check of one model: its trial, which others may run beside, and then its report, which measures."""

    def __init__(self, loaded: LoadedSettings, settings: ModelSettings, beside: str) -> None:
        self._loaded = loaded
        self._settings = settings
        self._place: Location = loaded.settings.place_of(settings)
        self._beside = beside
        self.problems: list[str] = []
        """Lines that start with file:line:column, as are the warnings."""
        self.warnings: list[str] = []
        self._found: dict[str, Any] = {}
        """Arguments of the report, so far."""

    def try_it(self, watch: Watch) -> None:
        """Compile and prove the model, and run it as requests would. Raises `EngineError` if it cannot be served."""
        settings = self._settings
        require_trusted(settings)
        # As each process that will serve it: a verdict holds for a number of threads, and a start recalls it.
        (slots, threads), *others = processes_of(self._loaded.settings, settings.name)
        spec = model_spec(settings)
        choice = chosen_engine(spec, watch)
        spec = replace(spec, engine=choice.engine)
        for other_slots, other_threads in others:
            tried = try_model(
                settings, spec, slots=other_slots, threads=other_threads, prove_trusted=True, watch=watch
            )
            tried.compiled.close()
            self._say(
                self.problems,
                [
                    (where, f"with {other_threads} threads, {words}")
                    for where, words in tried.judgement.refused
                ],
            )
        tried = try_model(settings, spec, slots=slots, threads=threads, prove_trusted=True, watch=watch)
        self._tried = tried
        self._say(self.problems, tried.judgement.refused)
        self._say(self.warnings, tried.judgement.warnings)
        try:
            self._found = {
                "engine": choice,
                "engines": self._compared(choice.engine, tried, threads, watch),
                **self._ran(tried),
                "padding": advise_padding(settings, tried, slots=slots, threads=threads, watch=watch),
            }
        except BaseException:
            tried.compiled.close()
            raise

    def report(self, measure_s: float) -> ModelReport:
        """Return the report of a model whose trial has ended; its speed is measured for `measure_s` seconds."""
        tried, settings = self._tried, self._settings
        slots, threads = slots_and_threads(self._loaded.settings, settings.name)
        try:
            speed = advise_speed(
                self._loaded.settings, settings, tried, slots=slots, threads=threads, budget_s=measure_s
            )
            return ModelReport(
                signature=tried.compiled.signature,
                properties=dict(tried.compiled.properties),
                proof=tried.proof,
                speed=speed,
                **self._found,
            )
        finally:
            tried.compiled.close()

    def _say(self, lines: list[str], found: Iterable[tuple[Location, str]]) -> None:
        lines += [self._loaded.problem((*self._place, *where), words) for where, words in found]

    def _compared(self, engine: str, tried: TriedModel, threads: int, watch: Watch) -> EnginesReport | None:
        """Compare the answers with another engine's, or return None; differences are warnings."""
        settings = self._settings
        if (other := _engine_beside(engine, settings, self._beside)) is None:
            return None
        with watch.waiting():
            engines = compare_beside(tried.spec, other, probe_options(settings), threads=threads)
        self._say(
            self.warnings,
            [((), f"{found.words(engine, other)} {_WHO_IS_RIGHT}") for found in engines.differences],
        )
        return engines

    def _ran(self, tried: TriedModel) -> Mapping[str, Any]:
        """Run the model as requests would: the calls, and whether sizes were refused that it need not take."""
        if tried.proof.notes:  # a model that ended its trial's process is not run in this one
            return {"calls": (), "is_partial": False}
        runner = _CheckRunner(self._settings, tried.compiled)
        try:
            _try_sizes(runner)
        except _Hangs as error:
            runner.problems.append(str(error))
        self._say(self.problems, [((), words) for words in runner.problems])
        self._say(self.warnings, [((), words) for words in runner.warnings])
        return {"calls": tuple(runner.calls), "is_partial": bool(runner.warnings)}


def _engine_beside(engine: str, settings: ModelSettings, wanted: str) -> str | None:
    """Return the engine to compare with, or None.

    By default it is another installed one that reads the file, on the CPU, of a file that fits into memory three times.
    """
    if wanted != AUTO_ENGINE:
        return wanted if settings.path is not None and wanted not in ("none", engine) else None
    if settings.path is None or settings.device != "CPU":
        return None
    others = [
        each for each in engines_of_path(PurePath(settings.path)) if each != engine and is_installed(each)
    ]
    if (
        not others
        or sum(file.stat().st_size for file in files_of_model(Path(settings.path))) > MOST_BESIDE_BYTES
    ):
        return None
    return others[0]


class _Hangs(Exception):
    """Raised when a call does not end."""


def _try_sizes(runner: _CheckRunner) -> None:
    """Run the model as requests would; sizes that it refuses while it takes others are warned of, with bounds.

    Raises `_Hangs`.
    """
    signature = runner.signature
    small = tuple(_clamped(1, bounds) for bounds in signature.bounds)
    failed: dict[tuple[int, ...], str] = {}
    ran: list[tuple[int, ...]] = []
    for size, rows in ((1, 1), (TYPICAL_SIZE, runner.rows), *((size, 1) for size in OTHER_SIZES)):
        if size in OTHER_SIZES and (ran or not failed):
            break  # these are only tried to find one that the model takes
        sizes = tuple(
            _clamped(rows if name == BATCH else size, bounds)
            for name, bounds in zip(signature.dimensions, signature.bounds, strict=True)
        )
        if sizes in ran or sizes in failed:
            continue
        words = runner.run([sizes])
        if words is None:
            ran.append(sizes)
        elif size not in OTHER_SIZES:
            failed[sizes] = words
    if failed and ran:
        what = (
            f"failed on made-up inputs, {'; '.join(map(signature.spell, failed))}: {[*failed.values()][-1]}"
        )
        advice = _SizeAdvice(runner, ran[0], [*failed]).words()
        if advice is None:
            runner.problems.append(f"{what}{runner.hint}")
        else:
            runner.warnings.append(f"{what} ({advice})")
    else:
        runner.problems += [
            f"failed on made-up inputs, {signature.spell(sizes)}: {words}{runner.hint}"
            for sizes, words in failed.items()
        ]
    shares = signature.has_batch and not signature.strategy.alone
    most = signature.bounds[0].maximum if shares else 0
    if shares and ran and (most is None or most >= 2 * small[0]):
        pair = (small[0], *ran[0][1:])
        if (words := runner.run([pair, pair])) is not None:
            call = f"{signature.spell(pair)} x 2 requests"
            runner.problems.append(f"failed on made-up inputs, {call}: {words}{runner.hint}")


class _SizeAdvice:
    """The bounds to state, so that requests of sizes which the model refuses are refused before they run.

    Each bound is tried before it is advised: the model runs at it, and not one beyond.
    """

    def __init__(self, runner: _CheckRunner, ran: tuple[int, ...], failed: Sequence[tuple[int, ...]]) -> None:
        self._runner = runner
        self._signature = runner.signature
        self._ran = ran
        self._failed = failed
        self._known: dict[tuple[int, ...], bool] = {}

    def words(self) -> str | None:
        """Return the advice, or why there is none; None if the model refuses the number of rows, which is its fault."""
        first = 1 if self._signature.has_batch else 0
        if any(
            self._runs({**dict(enumerate(sizes)), **dict(enumerate(self._ran[:first]))})
            for sizes in self._failed
        ):
            return None
        names, bounds = self._signature.dimensions, dict[int, Dimension]()
        refused = {
            number: sorted(
                {sizes[number] for sizes in self._failed if not self._runs({number: sizes[number]})}
            )
            for number in range(first, len(names))
        }
        blamed = [number for number, sizes in refused.items() if sizes]
        for number in blamed:
            for other in blamed:
                if number < other and self._runs({each: refused[each][0] for each in (number, other)}):
                    return f"{names[number]} and {names[other]} are one size to the model: give them one name in `inputs`"
        uneven: dict[int, str] = {}
        for number in blamed:
            for size in refused[number]:
                found = self._bound(number, size)
                if isinstance(found, str):
                    uneven[number] = found
                else:
                    bounds[number] = found.intersection(bounds.get(number, Dimension()))
        if uneven:
            return "; ".join(uneven.values())
        if not bounds or not self._runs({number: self._end(bounds[number]) for number in bounds}):
            return f"it ran at {self._signature.spell(self._ran)}, and no bounds are known that keep such requests away"
        return f"if the model takes no such sizes, bound them, such as by {self._line(bounds)}"

    def _bound(self, number: int, refused: int) -> Dimension | str:
        """Return the bound of a dimension between a size that is refused and the one that ran, by bisection; or why none
        can be."""
        fails, runs = refused, self._ran[number]
        while abs(runs - fails) > 1:
            middle = (fails + runs) // 2
            fails, runs = (fails, middle) if self._runs({number: middle}) else (middle, runs)
        step = 1 if runs > refused else -1
        between = [
            size
            for size in (runs + step, (runs + self._ran[number]) // 2, self._ran[number] + step)
            if size > 0
        ]
        further = [size for size in OTHER_SIZES if step < 0 and size > refused]
        uneven = [
            size for size in between if self._is_bounded(number, size) and not self._runs({number: size})
        ]
        beyond = [size for size in further if self._is_bounded(number, size) and self._runs({number: size})]
        name = self._signature.dimensions[number]
        if uneven or beyond:
            if (multiples := self._multiples(number)) is not None:
                return multiples
            taken = sorted({runs, self._ran[number], *beyond})
            return f"it takes some sizes of {name} only: {', '.join(map(str, taken))} ran, {(uneven or [fails])[0]} did not"
        return Dimension(runs, None) if step > 0 else Dimension(0, runs)

    def _multiples(self, number: int) -> str | None:
        """Say of which number the sizes must be multiples; None if the next ones after the size that ran are others."""
        ran, name = self._ran[number], self._signature.dimensions[number]
        steps = [step for step in range(1, MOST_STEP + 1) if self._is_bounded(number, ran + step)]
        step = next((step for step in steps if self._runs({number: ran + step})), None)
        if step is None or ran % step or not self._runs({number: ran + 2 * step}):
            return None
        return (
            f"it takes multiples of {step} only as {name}: {ran}, {ran + step} and {ran + 2 * step} ran, none between "
            f"{ran} and {ran + step}; resize or pad inputs before they are sent"
        )

    def _is_bounded(self, number: int, size: int) -> bool:
        return size in self._signature.bounds[number]

    def _end(self, bounds: Dimension) -> int:
        return bounds.minimum or bounds.maximum or 0

    def _runs(self, other: dict[int, int]) -> bool:
        """Tell whether the model runs at the sizes that ran, but for these, by number of the dimension."""
        sizes = tuple(other.get(number, size) for number, size in enumerate(self._ran))
        if sizes not in self._known:
            self._known[sizes] = self._runner.run([sizes], told=False) is None
        return self._known[sizes]

    def _line(self, bounds: dict[int, Dimension]) -> str:
        shapes = {}
        for port, axes in zip(self._signature.inputs, self._signature.table.axes, strict=True):
            dimensions = tuple(
                own if number is None or number not in bounds else own.intersection(bounds[number])
                for number, own in zip(axes, port.shape.dimensions, strict=True)
            )
            if dimensions != port.shape.dimensions:
                shapes[port.name] = str(NamedShape(port.shape.names, dimensions))
        return inputs_line(shapes)


def _clamped(size: int, bounds: Dimension) -> int:
    size = max(size, bounds.minimum)
    return size if bounds.maximum is None else min(size, bounds.maximum)


class _CheckRunner:
    """Runner of calls on one slot, with inputs as the configuration describes them, and the findings so far."""

    def __init__(self, settings: ModelSettings, compiled: CompiledModel) -> None:
        self.calls: list[str] = []
        """Calls that ran."""
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.signature = compiled.signature
        self.rows = min(TYPICAL_ROWS, rows_together(settings) or TYPICAL_ROWS)
        """Rows of the second run: no more than calls have where requests run alone."""
        self.hint = "" if settings.probe else " (say by `probe` what realistic inputs are, if these are not)"
        given = values_of(compiled.signature, probe_options(settings))
        self._values = complete_values(compiled.signature, given)
        self._slot = Runner("check", {settings.name: RequestPool(compiled, 1)})

    def run(self, rows: list[tuple[int, ...]], *, told: bool = True) -> str | None:
        """Run one call of requests of these sizes; return why it failed. `told`: note one that ran. Raises `_Hangs`."""
        members = [make_request(self.signature, self._values, sizes) for sizes in rows]
        shapes = [self.signature.resolve(member.layout) for member in members]
        call = f"{self.signature.spell(rows[0])}{f' x {len(rows)} requests' if len(rows) > 1 else ''}"
        reports: queue.SimpleQueue[BatchReport] = queue.SimpleQueue()

        def run() -> None:
            reports.put(run_batch(self._slot, self.signature, members, shapes))

        # A call that hangs never ends; its thread ends with the process.
        Thread(target=run, name="slot check", daemon=True).start()
        try:
            report = reports.get(timeout=RUN_TIMEOUT_S)
        except queue.Empty:
            raise _Hangs(f"no answer within {RUN_TIMEOUT_S:g} s for {call}") from None
        if report.code is not None:
            return report.message
        assert report.outputs is not None  # it ran
        if told:
            self.calls.append(f"{call}: {_spell_outputs(self.signature, report.outputs[0])}")
        return None


def _spell_outputs(signature: ModelSignature, outputs: Tensors | None) -> str:
    assert outputs is not None  # without a deadline no request is left out
    said = []
    for number, _, shape in outputs.layout:
        port = signature.outputs[number]
        words = f"{list(shape[:-1])}, {shape[-1]} bytes" if port.is_string else str(list(shape))
        said.append(f"{port.name} {words}")
    return ", ".join(said)
