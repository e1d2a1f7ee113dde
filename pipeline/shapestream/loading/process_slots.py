"""Slots of a process, with compiled, proved and measured models: of a worker, and of a process that serves by itself.

What worker processes are for is not kept where a process serves by itself. A crash of a model ends the process, a call that
hangs keeps its slot until it ends, and memory that the engine has taken is not given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shapestream.errors import ConfigurationError
from shapestream.known_costs import KnownCosts
from shapestream.loading.measured_costs import cost_tables
from shapestream.loading.models import compile_models, plan_chains, version_problems
from shapestream.loading.trials import WITH_NOBODY, Measuring
from shapestream.loading.wide_forms import wide_forms
from shapestream.serving.slot_threads import CLOSE_GRACE_S, SlotThreads
from shapestream.settings import InProcessSettings, LoadedSettings, ModelSettings
from shapestream.settings.document import ProcessSettings
from shapestream.telemetry.logging import get_logger
from shapestream.transport.interface import BlockingConnection, Wake
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.machine import Allowance, divide_cpus

log = get_logger()


def own_slots(
    loaded: LoadedSettings,
    models: Sequence[ModelSettings],
    wanted: InProcessSettings,
    cpus: Allowance,
    known: Sequence[KnownCosts] = (),
    *,
    close_s: float = CLOSE_GRACE_S,
) -> SlotThreads:
    """Return the slots of a process that serves these models of the configuration by itself.

    `wanted`: the counts of slots and threads; those that are `auto` follow from `cpus`. Costs and verdicts are kept by these
    counts. `known`: costs of the models that this process serves already. `close_s`: seconds for running calls to end when
    the slots are closed.

    Raises `ConfigurationError` with a line for each model or chain that cannot be served.
    """
    slots, threads = divide_cpus(cpus.amount, 1, wanted.slots, wanted.threads)
    log.info("slots in process", slots=slots, threads=threads, cpus=cpus.amount, cpus_by=cpus.by)

    def check(compiled: Mapping[str, CompiledModel]) -> None:
        signatures = {name: model.signature for name, model in compiled.items()}
        chains = plan_chains(loaded, signatures)
        signatures |= {chain.spec.name: chain.signature for chain in chains}
        if problems := [*version_problems(loaded, signatures)]:
            raise ConfigurationError(problems)

    return process_slots(
        loaded,
        models,
        wanted,
        slots=slots,
        threads=threads,
        check=check,
        measuring=Measuring(None, lambda: known),
        close_s=close_s,
    )


def process_slots(
    loaded: LoadedSettings,
    models: Sequence[ModelSettings],
    process: ProcessSettings,
    *,
    slots: int,
    threads: int,
    check: Callable[[Mapping[str, CompiledModel]], None],
    measuring: Measuring = WITH_NOBODY,
    dial: Callable[[Wake], BlockingConnection] | None = None,
    close_s: float = CLOSE_GRACE_S,
) -> SlotThreads:
    """Compile these models of the configuration, prove and measure them, and return the slots of a process with them.

    `check` gets the compiled models before their costs are measured, and raises `ConfigurationError` where they cannot be
    served. `measuring` keeps the workers of a server from proving and measuring at a time. `dial` and `close_s` are those of
    `SlotThreads`. Raises `ConfigurationError` for unusable models.
    """
    with measuring.trials():
        compiled = compile_models(loaded, models, slots=slots, threads=threads)
    try:
        check(compiled)
    except ConfigurationError:
        for unused in compiled.values():
            unused.close()
        raise
    costs = cost_tables(models, compiled, slots=slots, threads=threads, measuring=measuring)
    wide = wide_forms(
        models,
        compiled,
        costs,
        wish=process.wide,
        slots=slots,
        threads=threads,
        memory_limit=process.memory_limit,
        measuring=measuring,
    )
    return SlotThreads(models=compiled, slots=slots, costs=costs, wide=wide, dial=dial, close_s=close_s)
