"""Compile models by their settings, and hold chains against them, with errors that point into the YAML.

Trust in models: files whose digest the configuration states, and functions that an installed package registers.

A configuration names the code that a process loads and runs. So a `function:` needs more than a line of YAML: a package
that registers it,

    [project.entry-points."shapestream.functions"]
    rank = "acme_ranking.serving:rank"

or the function itself, given as an object by the program (`shapestream.local`), or the option `--any-function` of the user
who starts the process. The setting `server.model_root` limits where files may be. None of this makes a hostile model
harmless: an engine runs the files that it loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shapestream.chains.plan import Chain, ChainRefused, plan_chain
from shapestream.errors import ConfigurationError
from shapestream.loading.proof import (
    Judgement,
    chosen_engine,
    may_share,
    rows_together,
    try_model,
    without_padding,
)
from shapestream.loading.trials import News, side_by_side
from shapestream.settings import (
    InProcessSettings,
    LoadedSettings,
    Location,
    ModelSettings,
    Settings,
    ShapesSettings,
    WorkerGroupSettings,
    registered_functions,
)
from shapestream.settings.model_sources import GivenFunction
from shapestream.telemetry.logging import get_logger
from shapestream.version_fit import misfit
from shapestream.versions import canaries, versioned
from shapestream_engine.batch_axis import states_batch
from shapestream_engine.compiled_model import CompiledModel, PreparedLimits
from shapestream_engine.errors import EngineError, ModelLoadError, RuleMissing
from shapestream_engine.machine import available_cpus, divide_cpus
from shapestream_engine.model import (
    InputSpec,
    ModelSpec,
    OutputSpec,
    compile_model,
    read_model,
)
from shapestream_engine.model_files import digest_of_model
from shapestream_engine.pooling import Pooling
from shapestream_engine.postprocess import Postprocess, Steps
from shapestream_engine.probe import Watch
from shapestream_engine.shapes import BATCH
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Strategy

log = get_logger()


def slots_and_threads(settings: Settings, model: str) -> tuple[int, int]:
    """Return the slots and threads of the first configured process that serves this model."""
    return next(iter(processes_of(settings, model)))


def processes_of(settings: Settings, model: str) -> dict[tuple[int, int], None]:
    """Return the different (slots, threads) of the configured processes that serve this model, in order.

    A model that no configured process serves counts as served by one process with default settings.
    """
    groups = settings.worker_groups
    processes = max(1, sum(group.count for group in groups))
    found = [
        divide_cpus(available_cpus(), processes, group.slots, group.threads)
        for group in groups
        if group.models is None or model in group.models
    ]
    if (own := settings.in_process) is not None:
        found.append(divide_cpus(available_cpus(), 1, own.slots, own.threads))
    return dict.fromkeys(found or [divide_cpus(available_cpus(), 1)])


def wishes_of(settings: Settings, model: str) -> list[Literal["auto"] | bool]:
    """Return the different `wide` of the configured processes that serve this model, but for `false`."""
    places: list[WorkerGroupSettings | InProcessSettings] = [
        group for group in settings.worker_groups if group.models is None or model in group.models
    ]
    if settings.in_process is not None:
        places.append(settings.in_process)
    return list(dict.fromkeys(place.wide for place in places if place.wide is not False))


def placement_warnings(loaded: LoadedSettings) -> Iterator[str]:
    """Yield a line for each group of processes, or `in_process`, whose slots outnumber its threads, and for each canary
    that shares a process with what is no canary."""
    yield from _shared_canaries(loaded)
    settings = loaded.settings
    places: list[tuple[Location, WorkerGroupSettings | InProcessSettings]] = [
        (("workers", number), group) for number, group in enumerate(settings.workers or ())
    ]
    if settings.in_process is not None:
        places.append((("in_process",), settings.in_process))
    for place, group in places:
        if group.slots != "auto" and group.threads != "auto" and group.threads < group.slots:
            yield loaded.problem(
                (*place, "threads"),
                f"fewer than the {group.slots} slots: `threads` counts for the process, not for each slot. Static models of "
                f"OpenVINO share {group.threads}; others take one per slot all the same (raise it to {group.slots} or more, "
                "or leave it out)",
            )


def _shared_canaries(loaded: LoadedSettings) -> Iterator[str]:
    settings = loaded.settings
    rests = canaries(settings.versions)
    places: list[tuple[Location, set[str]]] = [
        (("workers", number), {model.name for model in settings.models_of(group)})
        for number, group in enumerate(settings.worker_groups)
    ]
    if settings.in_process is not None:
        places.append((("in_process",), {model.name for model in settings.models}))
    for place, names in places:
        for canary in sorted(names & rests.keys()):
            if names - rests.keys():
                words = f"{canary} shares its process with other models, which a crash of it ends too"
                yield loaded.problem(place, words)


def model_spec(model: ModelSettings) -> ModelSpec:
    """Return the specification of the model, with all the padding that the configuration allows.

    Its engine is open where the file decides (`chosen_engine`).

    With `batch_invariant`, every call has the same number of rows and nothing is padded.
    """
    rows = model.batching.invariant_rows
    spec = ModelSpec(
        name=model.name,
        path=None if model.file is None else Path(model.file),
        function=None if model.function is None else str(model.function),
        engine=model.only_engine,
        device=model.device,
        inputs={name: InputSpec(**dict(port)) for name, port in model.inputs.items()},
        outputs={
            name: OutputSpec(rule=port.rule_arguments(), shape=port.shape, element_type=port.element_type)
            for name, port in model.outputs.items()
        },
        properties=model.properties
        if model.tokenizer is None
        else model.tokenizer.model_dump(exclude={"path"}),
        strategy=_strategy(model),
        prepared=_limits(model.shapes),
        pooling=None if model.pooling is None else Pooling.parse(model.pooling),
        postprocess=Postprocess({name: Steps.parse(text) for name, text in model.postprocess.items()})
        if model.postprocess
        else None,
    )
    if rows is None:
        return spec
    padded = frozenset(name for port in model.inputs.values() for name in port.pad)
    return replace(without_padding(spec, padded), strategy=Strategy({BATCH: (rows,)}))


def _strategy(model: ModelSettings) -> Strategy:
    """Return the strategy. Requests share calls, and calls are filled up, only in ways that the proof tests."""
    strategy = model.shapes.to_strategy()
    if BATCH in strategy.sizes:
        return strategy
    most = rows_together(model)
    if strategy.max_prepared is not None and most != 1:
        return replace(strategy, fill_rows=True)
    return replace(strategy, most_rows=most)


def _limits(shapes: ShapesSettings) -> PreparedLimits:
    limits = PreparedLimits(warm_up=shapes.warm_up)
    return limits if shapes.max_prepared is None else replace(limits, max_prepared=shapes.max_prepared)


def compile_models(
    loaded: LoadedSettings, models: Iterable[ModelSettings], *, slots: int, threads: int | None
) -> dict[str, CompiledModel]:
    """Compile and test the models, several at a time. Raises `ConfigurationError` with a line for each that cannot be
    served."""

    def trial(model: ModelSettings, watch: Watch) -> tuple[CompiledModel, Judgement]:
        ready, judgement = _compile_unchanged(model, slots, threads, watch)
        for warning in _lines_of(loaded, model, judgement)[1]:
            log.warning("configuration", what=warning)
        log.info(
            "model compiled",
            model=model.name,
            engine=ready.engine,
            device=model.device,
            digest=ready.digest,
            properties=dict(ready.properties),
            signature=ready.signature.describe()[1:],
        )
        return ready, judgement

    wanted = list(models)
    found = side_by_side(wanted, trial, threads=threads, tell=_log_news)
    compiled: dict[str, CompiledModel] = {}
    problems: list[str] = []
    for model in wanted:
        result = found[model.name]
        if isinstance(result, EngineError):
            problems.append(problem_of(loaded, model, result))
            continue
        compiled[model.name], judgement = result
        problems += _lines_of(loaded, model, judgement)[0]
    if problems:
        for unused in compiled.values():
            unused.close()
        raise ConfigurationError(problems)
    return compiled


def _log_news(news: News) -> None:
    log.info(
        "model is tried",
        model=news.model,
        doing=news.doing,
        case=news.case,
        seconds=round(news.seconds, 1),
        most_s=news.most_s,
    )


def _lines_of(
    loaded: LoadedSettings, model: ModelSettings, judgement: Judgement
) -> tuple[list[str], list[str]]:
    """Return the refusals and the warnings, as lines that start with file:line:column."""
    place = loaded.settings.place_of(model)
    refused = [loaded.problem((*place, *where), words) for where, words in judgement.refused]
    warnings = [loaded.problem((*place, *where), words) for where, words in judgement.warnings]
    return refused, warnings


@dataclass(frozen=True, slots=True)
class ReadModels:
    """Signatures of models as they are served, with warnings about them."""

    signatures: tuple[ModelSignature, ...]
    warnings: tuple[str, ...]
    """Lines that start with file:line:column."""


def read_signatures(loaded: LoadedSettings, models: Iterable[ModelSettings] | None = None) -> ReadModels:
    """Read the signatures of the models (all by default) as they are served, for commands that serve nothing.

    If file and configuration leave rules or the batch axis open, the model is tested as a server would test it, or an
    earlier result is read. Raises `ConfigurationError` with a line for each model that cannot be served.
    """
    signatures: list[ModelSignature] = []
    warnings: list[str] = []
    problems: list[str] = []
    for model in loaded.settings.models if models is None else models:
        try:
            require_trusted(model)
            signature, judgement = _signature(loaded.settings, model)
        except EngineError as error:
            problems.append(problem_of(loaded, model, error))
            continue
        signatures.append(signature)
        refused, doubts = _lines_of(loaded, model, judgement)
        problems += refused
        warnings += doubts
    if problems:
        raise ConfigurationError(problems)
    return ReadModels(tuple(signatures), tuple(warnings))


def _signature(settings: Settings, model: ModelSettings) -> tuple[ModelSignature, Judgement]:
    """Return the signature and the judgement; the model is tested only if that can change them."""
    spec = model_spec(model)
    spec = replace(spec, engine=chosen_engine(spec).engine)
    if not may_share(model) or states_batch(spec):
        with suppress(RuleMissing):
            signature = read_model(spec).signature
            if not may_share(model) or signature.has_batch:
                return signature, Judgement()
    slots, threads = slots_and_threads(settings, model.name)
    tried = try_model(model, spec, slots=slots, threads=threads)
    tried.compiled.close()
    return tried.compiled.signature, tried.judgement


def _compile_unchanged(
    model: ModelSettings, slots: int, threads: int | None, watch: Watch
) -> tuple[CompiledModel, Judgement]:
    """Return the model as it may be served, with the digest of its files, and the judgement.

    Files that were replaced meanwhile are read once more: the engine may have read the old or the new ones.
    """
    for _ in range(2):
        digest = require_trusted(model)
        ready, judgement = _compile(model, slots, threads, watch)
        ready.digest = require_trusted(model)
        if ready.digest == digest:
            return ready, judgement
        ready.close()
    raise ModelLoadError(
        f"{model.file} changes while it is read (replace a model's files by renaming others)"
    )


def _compile(
    model: ModelSettings, slots: int, threads: int | None, watch: Watch
) -> tuple[CompiledModel, Judgement]:
    """Return the model as it may be served, and the consequences of its proof."""
    spec = model_spec(model)
    choice = chosen_engine(spec, watch)
    if choice.why:
        log.info("engine chosen", model=model.name, engine=choice.engine, why=choice.why)
    tried = try_model(model, replace(spec, engine=choice.engine), slots=slots, threads=threads, watch=watch)
    spec, ready, judgement = tried.spec, tried.compiled, tried.judgement
    for output, rule in tried.rules.items():
        log.info("rule seen on the model", model=model.name, output=output, rule=dict(rule))
    if model.trust:
        log.warning("model is served without proof", model=model.name, why="trust: true")
        return ready, judgement
    log.info(
        "model tried",
        model=model.name,
        seconds=tried.proof.seconds,
        source="cache" if tried.proof.from_cache else "measured",
        findings=list(map(str, tried.proof.findings)),
    )
    proved = without_padding(spec, judgement.padding_off)
    is_limited = judgement.exact_rows or judgement.most_rows is not None
    if is_limited and BATCH not in proved.strategy.sizes:
        limits = [rows for rows in (rows_together(model), judgement.most_rows) if rows is not None]
        strategy = replace(proved.strategy, fill_rows=False, most_rows=min(limits, default=None))
        proved = replace(proved, strategy=strategy)
    if proved != spec and not judgement.refused:
        ready.close()
        ready = compile_model(proved, slots=slots, threads=threads)
    tolerances = tried.proof.tolerances
    ready.tolerances = tolerances if spec.postprocess is None else spec.postprocess.tolerances(tolerances)
    return ready, judgement


def problem_of(loaded: LoadedSettings, model: ModelSettings, error: EngineError) -> str:
    """Return the line about an error of the engine, with the place of its setting."""
    key: Location = error.key
    match key:
        case ("strategy", *_) if model.batching.invariant_rows is not None:
            key = ("batching", "batch_invariant")
        case ("strategy", *rest):
            key = ("shapes", *rest)
        case ("path",) if model.function is not None:
            key = ("function",)
        case ("path",) if model.tokenizer is not None:
            key = ("tokenizer",)
        case ("properties", *rest) if model.tokenizer is not None:
            key = ("tokenizer", *rest)
    location = (*loaded.settings.place_of(model), *key)
    return loaded.problem(loaded.source.written(location), str(error))


def with_bare_names(
    loaded: LoadedSettings, signatures: Mapping[str, ModelSignature]
) -> dict[str, ModelSignature]:
    """Return the signatures with those of names with versions, which the version with the rest announces."""
    found = dict(signatures)
    for name, versions in loaded.settings.versions.items():
        if (rest := signatures.get(versioned(name, versions.rest))) is not None:
            found[name] = replace(rest, name=name)
    return found


def version_problems(loaded: LoadedSettings, signatures: Mapping[str, ModelSignature]) -> Iterator[str]:
    """Yield a line for each version that gets traffic and does not take all that the version with the rest announces.

    Versions without a signature are left out: what is wrong with them has been said.
    """
    models = loaded.settings.models_by_name
    chains = [chain.name for chain in loaded.settings.chains]
    for versions in loaded.settings.versions.values():
        first = versioned(versions.name, versions.rest)
        for name, version in versions.models.items():
            if name == first or not versions.shares[version] or not {name, first} <= signatures.keys():
                continue
            why = misfit(signatures[first], signatures[name])
            if why is None and name in models and models[name].idempotent != models[first].idempotent:
                why = f"idempotent is {str(models[name].idempotent).lower()} here, and not there"
            if why is not None:
                place = (
                    loaded.settings.place_of(models[name])
                    if name in models
                    else ("chains", chains.index(name))
                )
                remedy = "write traffic: 0%, and ask for it by its version; or make the two alike"
                words = f"requests of version {versions.rest} do not all fit: {why} ({remedy})"
                yield loaded.problem((*place, "traffic"), words)


def plan_chains(loaded: LoadedSettings, signatures: Mapping[str, ModelSignature]) -> list[Chain]:
    """Return the chains. Raises `ConfigurationError` with a line for each mistake.

    A chain whose models are not all here is left out: what is wrong with them has been said.
    """
    chains: list[Chain] = []
    problems: list[str] = []
    signatures = with_bare_names(loaded, signatures)
    for index, settings in enumerate(loaded.settings.chains):
        if any(stage.model not in signatures for stage in settings.stages):
            continue
        try:
            chains.append(plan_chain(settings.spec(), signatures))
        except ChainRefused as error:
            problems += [loaded.problem(("chains", index, *key), words) for key, words in error.problems]
    if problems:
        raise ConfigurationError(problems)
    return chains


# ---------------------------------------------------------------- trust

ENVIRONMENT = "SHAPESTREAM_ANY_FUNCTION"
"""1: any importable function may be served. A server's workers inherit it."""


class Distrusted(ModelLoadError):
    """The configuration does not allow this model to be loaded."""


def allow_any_function() -> None:
    """Allow any importable function in this process and those that it starts."""
    os.environ[ENVIRONMENT] = "1"


def require_trusted(model: ModelSettings) -> str | None:
    """Return the sha256 of the model's files; None for a function.

    Raises `Distrusted` for a function that is neither registered nor allowed, and for files of other bytes than the
    configuration says, `ModelLoadError` for files that cannot be read.
    """
    if model.function is not None and not isinstance(model.function, GivenFunction):
        _require_registered(model.function)
    if model.file is None:
        return None
    digest = _digest(Path(model.file))
    if model.sha256 is not None and digest != model.sha256:
        raise Distrusted(
            f"{model.file} has another sha256, {digest} (restore the file, or write this digest)",
            key=("sha256",),
        )
    return digest


def _require_registered(function: str) -> None:
    registered = registered_functions()
    if os.environ.get(ENVIRONMENT) == "1" or function in registered.values():
        return
    known = f"registered are {', '.join(sorted(registered))}" if registered else "none is registered"
    raise Distrusted(
        f"no installed package registers {function!r} as an entry point of shapestream.functions, {known} "
        f"(to serve any function that can be imported, start with --any-function, or set {ENVIRONMENT}=1)",
        key=("function",),
    )


def _digest(path: Path) -> str:
    try:
        return digest_of_model(path)
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror}") from error
