"""Slots of this process, with compiled, proved and measured models: for `in_process`, and for a server in another program.

What worker processes are for is not kept here. A crash of a model ends the process, a call that hangs keeps its slot until
it ends, and memory that the engine has taken is not given back.
"""

from __future__ import annotations

from collections.abc import Sequence

from shapestream.errors import ConfigurationError
from shapestream.loading.measured_costs import cost_tables
from shapestream.loading.models import compile_models, plan_chains, version_problems
from shapestream.loading.wide_forms import wide_forms
from shapestream.serving.slot_threads import CLOSE_GRACE_S, SlotThreads
from shapestream.settings import InProcessSettings, LoadedSettings, ModelSettings
from shapestream.telemetry.logging import get_logger
from shapestream_engine.machine import Allowance, divide_cpus

log = get_logger()


def own_slots(
    loaded: LoadedSettings,
    models: Sequence[ModelSettings],
    wanted: InProcessSettings,
    cpus: Allowance,
    *,
    close_s: float = CLOSE_GRACE_S,
) -> SlotThreads:
    """Compile these models of the configuration, prove and measure them, and return slots that can run them.

    `wanted`: the counts of slots and threads; those that are `auto` follow from `cpus`. Costs and verdicts are kept by these
    counts. `close_s`: seconds for running calls to end when the slots are closed.

    Raises `ConfigurationError` with a line for each model or chain that cannot be served.
    """
    slots, threads = divide_cpus(cpus.amount, 1, wanted.slots, wanted.threads)
    log.info("slots in process", slots=slots, threads=threads, cpus=cpus.amount, cpus_by=cpus.by)
    compiled = compile_models(loaded, models, slots=slots, threads=threads)
    signatures = {name: model.signature for name, model in compiled.items()}
    try:
        chains = plan_chains(loaded, signatures)
        signatures |= {chain.spec.name: chain.signature for chain in chains}
        if problems := [*version_problems(loaded, signatures)]:
            raise ConfigurationError(problems)
    except ConfigurationError:
        for unused in compiled.values():
            unused.close()
        raise
    costs = cost_tables(models, compiled, slots=slots, threads=threads)
    wide = wide_forms(
        models,
        compiled,
        costs,
        wish=wanted.wide,
        slots=slots,
        threads=threads,
        memory_limit=wanted.memory_limit,
    )
    return SlotThreads(models=compiled, slots=slots, costs=costs, wide=wide, close_s=close_s)
