"""The wide forms of models: compiled once more, so that a lone request uses all threads of its process.

A process with several slots divides its threads among them. With `wide`, it compiles a model a second time, for one call on
all threads. These compiled models are those of its wide slot (the scheduler's wide_slots.py). A model has a wide form if all
of these hold:

- its engine computes on the CPU and takes a number of threads for each compilation (OpenVINO, ONNX Runtime);
- it is not `batch_invariant`, since the last bits of a sum depend on how many threads compute it;
- it takes any shape: a model that is prepared for single shapes would be prepared for each of them once more;
- its costs were measured, since the scheduler compares prices;
- it fits beside the others into memory, by the bytes of its files;
- its answers to requests alone equal those of the slots' form: integers, labels and strings exactly, floats within the
  tolerances of the model's proof;
- with `wide: auto`, a lone call of some size is at least `WORTH_IT` times as fast.

A model without one is served as ever. The log says why it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

from shapestream.loading.models import model_spec, require_trusted
from shapestream.loading.proof import probe_options
from shapestream.loading.trials import WITH_NOBODY, Measuring
from shapestream.serving.slot_threads import WideForms
from shapestream.settings import ModelSettings
from shapestream.settings.values import spell_bytes
from shapestream.telemetry.logging import get_logger
from shapestream_engine.calibration import CostCache, calibrate, cost_key
from shapestream_engine.comparison import Variant, compare_speed, differing_output
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError, ModelLoadError
from shapestream_engine.machine import memory_bytes, resident_bytes
from shapestream_engine.model_files import files_of_model
from shapestream_engine.probing.examination import values_of

log = get_logger()

Wish: TypeAlias = Literal["auto"] | bool

WORTH_IT = 1.15
"""How many times as fast a lone call of some size must be for `auto`: a form takes as much memory as one more slot."""
ENGINES = ("openvino", "onnxruntime")
"""Those that take a number of threads for each compilation. PyTorch has one number for the whole process."""
MEMORY_PER_FILE = 3
"""Bytes of memory per byte of a model's files that must be free: an engine holds weights twice while it compiles them."""
PROOF_S = 1.0
"""Seconds for which answers are compared, at most, beyond one request of each shape."""
SPEED_S = 1.0
"""Seconds for which lone calls are compared, at most."""
MOST_SHAPES = 8
"""Shapes whose answers are compared."""


MOST_ROWS = 8
"""Rows of the calls whose costs are measured: lone requests seldom have more, and larger calls take memory that stays."""


class _NoWideForm(EngineError):
    """Raised when a model gets no wide form; the message says why."""


def wide_forms(
    models: Iterable[ModelSettings],
    compiled: Mapping[str, CompiledModel],
    costs: Mapping[str, CostTable],
    *,
    wish: Wish,
    slots: int,
    threads: int,
    memory_limit: int | None,
    measuring: Measuring = WITH_NOBODY,
) -> WideForms | None:
    """Return the wide forms of these models; None where none has one.

    `compiled`, `costs`: as its slots have them. `threads`: of the process. `memory_limit`: bytes that it may take.
    `measuring` keeps the workers of a server from proving and measuring meanwhile.
    """
    if wish is False or slots < 2 or threads < 2:
        return None
    process = _Process(wish, slots, threads, memory_limit, measuring)
    found: dict[str, CompiledModel] = {}
    found_costs: dict[str, CostTable] = {}
    for model in models:
        try:
            wide, table = process.form(model, compiled[model.name], costs.get(model.name))
        except EngineError as error:
            log.info("no wide form", model=model.name, why=str(error))
            continue
        found[model.name], found_costs[model.name] = wide, table
        log.info("wide form", model=model.name, threads=threads, points=len(table.points))
    return WideForms(models=found, costs=found_costs) if found else None


def why_none(model: ModelSettings, narrow: CompiledModel, costs: CostTable | None) -> str | None:
    """Return the reason why a model gets no wide form, before any is compiled; None if it may get one."""
    if model.file is None or narrow.engine not in ENGINES or model.device != "CPU":
        return "only OpenVINO and ONNX Runtime on the CPU have them"
    if model.batching.invariant_rows is not None:
        return "batch_invariant: last bits depend on the threads of a call"
    if narrow.prepared is not None or narrow.compile_again is None:
        return "the model is prepared for single shapes"
    if costs is None or not costs.points:
        return "its costs were not measured"
    return None


@dataclass(frozen=True, slots=True)
class _Process:
    """The process that has the forms."""

    wish: Wish
    slots: int
    threads: int
    memory_limit: int | None
    measuring: Measuring

    def form(
        self, model: ModelSettings, narrow: CompiledModel, costs: CostTable | None
    ) -> tuple[CompiledModel, CostTable]:
        """Return the wide form of a model and its costs. Raises `EngineError` with the reason if it has none."""
        reason = why_none(model, narrow, costs)
        if reason is not None or costs is None:
            raise _NoWideForm(reason or "")
        self._check_memory(model)
        wide = self._compiled(model, narrow)
        try:
            # What was found is kept with the costs: these are measured of a form that passed.
            cache, key = CostCache.of_environment(), self._key(model, narrow)
            with cache.entry(key) as entry:
                known = entry.read()
            if known is None or known.key != key:
                with self.measuring.trials():
                    _prove(model, narrow, wide, costs)
                with self.measuring.alone():
                    gain = _gain(model, narrow, wide)
                if self.wish == "auto" and gain < WORTH_IT:
                    raise _NoWideForm(f"a lone call is at most {gain:.2f} times as fast")
            return wide, self._costs(model, wide, cache, key)
        except EngineError:
            wide.close()
            raise

    def _check_memory(self, model: ModelSettings) -> None:
        assert model.file is not None
        needed = MEMORY_PER_FILE * sum(path.stat().st_size for path in files_of_model(Path(model.file)))
        limit = min(self.memory_limit or memory_bytes(), memory_bytes())
        with suppress(OSError):  # without /proc nothing else watches the limit either
            if (resident := resident_bytes()) + needed > limit:
                raise _NoWideForm(
                    f"it takes about {spell_bytes(needed)} beside {spell_bytes(resident)}; the limit is "
                    f"{spell_bytes(limit)}"
                )

    def _compiled(self, model: ModelSettings, narrow: CompiledModel) -> CompiledModel:
        """Compile the model as the slots have it, but for one call on all threads."""
        assert narrow.compile_again is not None
        wide = narrow.compile_again(1, self.threads)
        if require_trusted(model) != narrow.digest:
            wide.close()
            raise ModelLoadError("its files have changed since the slots read them")
        wide.digest, wide.tolerances = narrow.digest, narrow.tolerances
        return wide

    def _key(self, model: ModelSettings, narrow: CompiledModel) -> str:
        """Return the key of the form's costs, which no costs of slots have: it says how many share the threads."""
        key = cost_key(
            replace(model_spec(model), engine=narrow.engine),
            narrow.signature,
            probe_options(model),
            slots=self.slots,
            threads=self.threads,
            budget_s=model.calibration_s,
        )
        return f"{key}-wide{'-auto' if self.wish == 'auto' else ''}"

    def _costs(self, model: ModelSettings, wide: CompiledModel, cache: CostCache, key: str) -> CostTable:
        """Measure the costs of the wide form, alone in its process, or read an earlier measurement."""
        found = calibrate(
            wide,
            slots=1,
            max_batch=min(MOST_ROWS, model.batching.max_batch or MOST_ROWS),
            budget_s=model.calibration_s,
            values=values_of(wide.signature, probe_options(model)),
            key=key,
            cache=cache,
            alone=self.measuring.alone,
            patience=self.measuring.patience,
        )
        if not found.table.points:
            raise _NoWideForm("its costs could not be measured")
        return found.table


def _prove(model: ModelSettings, narrow: CompiledModel, wide: CompiledModel, costs: CostTable) -> None:
    """Raise `EngineError` unless both forms answer requests alike: of one row mostly, and of several."""
    points = sorted([point.sizes for point in costs.points], key=prod)
    sizes = sorted({_of_one(narrow, own) for own in points})
    shapes = [*sizes[:: -(-len(sizes) // MOST_SHAPES)], points[len(points) // 2]]
    values = values_of(narrow.signature, probe_options(model))
    found = differing_output((narrow, wide), shapes, values=values, budget_s=PROOF_S)
    if found is not None:
        output, difference = found
        raise _NoWideForm(
            f"output {output!r} differs from that of the slots by {difference.amount:g}; {difference.allowed:g} is allowed"
        )


def _of_one(model: CompiledModel, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the smallest request of this shape."""
    signature = model.signature
    return (signature.bounds[0].minimum or 1, *sizes[1:]) if signature.has_batch else sizes


def _gain(model: ModelSettings, narrow: CompiledModel, wide: CompiledModel) -> float:
    """Return how many times as fast a lone call is, at the size at which that is most."""
    speeds = compare_speed(
        [Variant(narrow), Variant(wide)],
        values=values_of(narrow.signature, probe_options(model)),
        max_batch=1,
        budget_s=SPEED_S,
    )
    before, after = speeds.seconds
    gain = max(
        [seconds / after[sizes] for sizes, seconds in before.items() if after[sizes] > 0.0], default=0.0
    )
    log.info("lone calls compared", model=model.name, gain=round(gain, 2), shapes=len(before))
    return gain
