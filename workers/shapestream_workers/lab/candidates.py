"""Candidates of `shapestream tune`: placements and choices of shapes.

Padding is proposed only where the file allows it. The start of each candidate proves it, as serving would.

A `Subject` is the model to tune in its YAML file. Two files are made from it by `apply_candidate`: one to be measured, and
the tuned one, which so says what was measured.
"""

from __future__ import annotations

import copy
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shapestream.errors import ConfigurationError
from shapestream.loading.models import slots_and_threads
from shapestream.scheduling.boundaries import BoundaryChoices, columns_of
from shapestream.settings.loader import LoadedSettings, leaves, load_settings
from shapestream.settings.model_settings import ModelSettings
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.signature import ModelSignature

MOST_PLACEMENTS = 12
"""Placements tried on machines with many CPUs: those nearest to one slot for two CPUs."""
CAPS = (64, 16)
"""Values that `max_prepared` is tried with."""
BUCKETS = (4, 8)
"""Numbers of sizes per dimension that buckets are tried with."""
MOST_STATIC = 8
"""Shapes that get a static model."""
HOT_SHARE = 0.02
"""Least share of the requests that a shape with a static model has; that of a rarer one would stand idle."""
PRECISIONS = {"openvino": "INFERENCE_PRECISION_HINT", "torch": "float32_matmul_precision"}
"""Engine -> the property that says in which precision it computes."""
MAX_DISTINCT = 512
"""Sizes that boundaries are chosen among, to bound the memory of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Number of inference calls that run at a time, and of CPU threads for them."""

    processes: int | None
    """Worker processes; None: slots in the server itself."""
    slots: int
    """Slots of each process."""
    threads: int
    """Threads of each process, divided among its slots."""

    @property
    def all_slots(self) -> int:
        """Slots of all processes."""
        return self.slots * (self.processes or 1)

    def __str__(self) -> str:
        inside = f"{self.slots} x {self.threads}"
        return f"in process, {inside}" if self.processes is None else f"{self.processes} x ({inside})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration that may turn out best."""

    placement: Placement
    shapes: Mapping[str, Any]
    """`shapes` of the YAML."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """`properties` of the YAML that differ from the file's: the precision."""
    is_baseline: bool = False
    """True for the user's file without edits."""

    @property
    def shapes_label(self) -> str:
        """The shapes and the precision in a few words, for tables."""
        words = [str(self.shapes.get("strategy", "native"))]
        for key, said in self.shapes.items():
            if key == "static":
                words.append(f"{len(said)} static")
            elif key != "strategy":
                words.append(f"{key} {said}")
        words += self.properties.values()
        return ", ".join(words) + (" (as it is)" if self.is_baseline else "")

    @property
    def label(self) -> str:
        """Placement and shapes, for lines of progress."""
        return f"{self.placement}; {self.shapes_label}"


# ---------------------------------------------------------------- placements


def placements(cpus: int, *, workers: bool) -> list[Placement]:
    """Return the divisions of the CPUs: all of them, and one less, which is left to the server.

    With 2 CPUs in process: 1 x 1, 1 x 2 and 2 x 2 (slots x threads); with worker processes 2 x (1 x 1) too.
    """
    found: list[Placement] = []
    for processes in powers_of_two(cpus) if workers else [None]:
        share = max(1, cpus // (processes or 1))
        found += [
            Placement(processes=processes, slots=slots, threads=share) for slots in powers_of_two(share)
        ]
    if cpus > 1:
        least = 1 if workers else None
        found += [Placement(processes=least, slots=slots, threads=cpus - 1) for slots in {1, cpus - 1}]
    usual = max(1.0, cpus / 2)

    def distance(place: Placement) -> tuple[float, int]:
        return max(place.all_slots / usual, usual / place.all_slots), place.processes or 0

    return sorted(found, key=distance)[:MOST_PLACEMENTS]


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to `most`, which ends them."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


# ---------------------------------------------------------------- choices of shapes


def propose(
    requests: Sequence[TraceRequest],
    signature: ModelSignature,
    baseline: Mapping[str, Any],
    *,
    max_batch: int,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the values of `shapes` to try besides the baseline's, and the reasons for what is not tried.

    Keys of the baseline that are not tuned, such as `warm_up`, are kept.
    """
    counts = Counter(request.sizes for request in requests)
    tuned = {"strategy", "max_prepared", "static", *signature.dimensions}
    others = {key: said for key, said in baseline.items() if key not in tuned}
    left_out: list[str] = []
    choices: list[dict[str, Any]] = [{}]
    if _takes_strings(signature):
        left_out.append("static shapes: strings may have any length")
    elif signature.dimensions and (hot := hot_shapes(counts)):
        choices.append({"static": [dict(zip(signature.dimensions, sizes, strict=True)) for sizes in hot]})
    else:
        left_out.append(f"static shapes: none has {HOT_SHARE:.0%} of the requests")
    choices += [{"max_prepared": cap} for cap in _caps(len(counts), signature, left_out)]
    buckets = _buckets(requests, signature, left_out)
    choices += [{"strategy": "bucketed", **sizes} for sizes in buckets]
    if signature.has_batch and max_batch > 1:
        rows = {"strategy": "partitioned", "batch": list(powers_of_two(max_batch))}
        choices += [rows, *({**rows, **sizes} for sizes in buckets[-1:])]
    mine = {key: said for key, said in baseline.items() if (key, said) != ("strategy", "native")}
    return [choice for shapes in choices if (choice := {**shapes, **others}) != mine], left_out


def hot_shapes(counts: Counter[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the `MOST_STATIC` most frequent sizes, each of at least `HOT_SHARE`; small ones first among equals."""
    least = HOT_SHARE * counts.total()
    hot = sorted((-count, sizes) for sizes, count in counts.items() if count >= least)
    return [sizes for _, sizes in hot[:MOST_STATIC]]


def _takes_strings(signature: ModelSignature) -> bool:
    return any(port.is_string for port in signature.inputs)


def _caps(shapes: int, signature: ModelSignature, left_out: list[str]) -> list[int]:
    rounded = [
        bounds.maximum is None
        for number, bounds in enumerate(signature.bounds)
        if signature.paddable[number]
        or (signature.has_batch and number == 0 and not signature.strategy.alone)
    ]
    if _takes_strings(signature):
        left_out.append("max_prepared: strings may have any length")
        return []
    if not rounded or any(rounded):
        why = "nothing may be padded" if not rounded else "a dimension to round has no upper bound"
        left_out.append(f"max_prepared: {why}")
        return []
    # Calls have more shapes than requests: each length times each number of rows.
    return [cap for cap in CAPS if shapes * 2 >= cap]


def _buckets(
    requests: Sequence[TraceRequest], signature: ModelSignature, left_out: list[str]
) -> list[dict[str, list[int]]]:
    """Return the sizes for each dimension that may be padded, learned from the trace, up to the model's bound.

    A dimension without a bound has no last bucket, so that requests that are served today would be refused.
    """
    names = {
        number: name
        for number, name in enumerate(signature.dimensions)
        if signature.paddable[number]
        and number not in signature.table.strings
        and not (signature.has_batch and number == 0)
    }
    if not names:
        left_out.append("bucketed: `pad` allows no dimension to be padded")
        return []
    tried: list[dict[str, list[int]]] = []
    for most in BUCKETS:
        sizes: dict[str, list[int]] = {}
        for number, name in names.items():
            largest = signature.bounds[number].maximum
            if largest is None:
                left_out.append(f"bucketed: {name} has no upper bound (state it in the input's shape)")
                return []
            counts = Counter(request.sizes[number] for request in requests)
            sizes[name] = list(best_boundaries(counts, most, largest))
        if sizes not in tried:
            tried.append(sizes)
    return tried


def best_boundaries(counts: Mapping[int, int], most: int, largest: int) -> tuple[int, ...]:
    """Return at most `most` sizes, ascending and ending with `largest`, that pad these observed sizes least.

    `counts` maps each size to its number of requests; padding is counted in elements of this dimension. Boundaries are
    observed sizes, or `largest`: another one would only pad more. Fewer are returned where fewer are as good.
    """
    seen = {size: count for size, count in counts.items() if count > 0 and size > 0}
    sizes, weights = columns_of(seen, MAX_DISTINCT, (largest,))
    # A request costs its padded size.
    most_new = min(most, len(sizes)) - 1
    choices = BoundaryChoices.of(sizes, weights, sizes.astype(np.float64), [largest], most_new)
    return choices.boundaries[int(np.argmin(choices.costs))]


# ---------------------------------------------------------------- the files of a candidate

MOST_CALIBRATION_S = 1.0
"""Calibration of each server, which would take most of the budget otherwise; the warm-up replaces the rest."""
_IPC = "ipc://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to tune, in its file."""

    loaded: LoadedSettings
    model: int
    """Index of the model in `models`."""

    @property
    def settings(self) -> ModelSettings:
        """Settings of the model."""
        return self.loaded.settings.models[self.model]

    @property
    def group(self) -> int:
        """The entry of `workers` that serves the model; 0 also for the one worker that there is by default."""
        groups = enumerate(self.loaded.settings.workers or ())
        serving = (n for n, group in groups if group.models is None or self.settings.name in group.models)
        return next(serving, 0)

    @property
    def in_process(self) -> bool:
        """True if the model runs in the server."""
        return self.loaded.settings.in_process is not None

    @property
    def is_alone(self) -> bool:
        """True if no other model or worker shares the CPUs, so that tuning may divide them."""
        return len(self.loaded.settings.models) == 1 and len(self.loaded.settings.worker_groups) <= 1

    def baseline(self) -> Candidate:
        """Return the file as it is."""
        settings = self.loaded.settings
        slots, threads = slots_and_threads(settings, self.settings.name)
        processes = None if self.in_process else settings.worker_groups[self.group].count
        place = Placement(processes=processes, slots=slots, threads=threads)
        shapes = self.loaded.source.values["models"][self.model].get("shapes") or {}
        return Candidate(placement=place, shapes=shapes, is_baseline=True)

    def write(self, candidate: Candidate, folder: Path) -> Path:
        """Write a file in `folder` that serves this model alone, at `s.sock` there, as this candidate.

        All other settings stay (queue bounds, batching, probe, device properties).
        """
        values: dict[str, Any] = copy.deepcopy(self.loaded.source.values)
        relocated(values, self.loaded, None)
        model = values["models"][self.model]
        calibration_s = min(self.settings.calibration_s, MOST_CALIBRATION_S)
        values["models"] = [{**model, "calibration_s": calibration_s}]
        values.pop("chains", None)  # a chain has other models
        # Other addresses and their keys belong to the server that users talk to.
        unwanted = ("worker_listen", "security", "admin", "tracing", "http", "grpc")
        server = {key: said for key, said in (values.get("server") or {}).items() if key not in unwanted}
        values["server"] = {**server, "listen": [f"ipc://{folder}/s.sock"], "grace_s": 1.0}
        values["logging"] = {"level": "info", "format": "json"}
        if not self.in_process:
            group = dict((values.get("workers") or [{}])[self.group])
            group.pop("models", None)
            values["workers"] = [group]
        # Counts are written even where they are the user's: `auto` could mean another number in a file cut down.
        apply_candidate(values, candidate, model=0, group=0)
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return path

    def write_tuned(self, candidate: Candidate, target: Path, header: str) -> None:
        """Write `target`: a comment of `header`, then the user's file as this candidate; then load it.

        Raises `ConfigurationError` if the written file cannot be used.
        """
        source = self.loaded.path

        def change(values: Any) -> None:
            if not candidate.is_baseline:
                apply_candidate(
                    values, in_flow(candidate), model=self.model, group=self.group, placed=self.is_alone
                )
            if source.parent.resolve() != target.parent.resolve():
                relocated(values, self.loaded, target.parent)

        body = edited_text(source.read_text(), change)
        comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
        # Editors look for the schema in the first line.
        first, separator, rest = body.partition("\n")
        has_schema = first.startswith("# yaml-language-server:")
        target.write_text(first + separator + comment + rest if has_schema else comment + body)
        load_settings(target)


def apply_candidate(
    values: Any, candidate: Candidate, *, model: int, group: int, placed: bool = True
) -> None:
    """Change the values of a file to this candidate, in place; without `placed`, not to its slots and threads."""
    if candidate.shapes:
        values["models"][model]["shapes"] = candidate.shapes
    else:
        values["models"][model].pop("shapes", None)
    if candidate.properties:
        values["models"][model].setdefault("properties", {}).update(candidate.properties)
    if not placed:
        return
    place = candidate.placement
    counts = {"slots": place.slots, "threads": place.threads}
    if place.processes is None:
        if not isinstance(values.get("in_process"), MutableMapping):
            values["in_process"] = {}
        values["in_process"].update(counts)
    else:
        if not values.get("workers"):
            values["workers"] = [{}]
        values["workers"][group].update({"count": place.processes, **counts})


def relocated(values: Any, loaded: LoadedSettings, new: Path | None) -> None:
    """Rewrite paths that start at the folder of `loaded`, whose values these are: relative to `new`, or absolute.

    A path is a text that the settings made absolute.
    """
    folder = loaded.path.parent.absolute()
    for location, meant in leaves(loaded.settings.model_dump()):
        written = loaded.source.written(location)
        said = reduce(getitem, written, loaded.source.values)
        if not isinstance(said, str) or not isinstance(meant, str) or said == meant:
            continue
        path = folder / said.removeprefix(_IPC)
        if meant.removeprefix(_IPC) in (str(path), str(path.resolve())):
            moved = str(path.resolve()) if new is None else relpath(path.resolve(), new.resolve())
            prefix = _IPC if said.startswith(_IPC) else ""
            reduce(getitem, written[:-1], values)[written[-1]] = prefix + moved


def edited_text(text: str, change: Callable[[Any], object]) -> str:
    """Return the YAML `text` after `change` of its values, in place; comments and the order of keys stay."""
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 1 << 16  # lines stay as long as they were
    _, sequence, offset = load_yaml_guess_indent(text)
    editor.indent(mapping=2, sequence=sequence or 4, offset=2 if offset is None else offset)
    values = editor.load(text)
    change(values)
    written = io.StringIO()
    editor.dump(values, written)
    return written.getvalue()


def in_flow(candidate: Candidate) -> Candidate:
    """Return the candidate with shapes that are written in flow style, `{strategy: native, max_prepared: 16}`."""
    from ruamel.yaml import YAML

    return replace(candidate, shapes=YAML().load(json.dumps(candidate.shapes)))


def require_editor() -> None:
    """Raise `ConfigurationError` unless files can be edited; called before anything is measured."""
    try:
        import ruamel.yaml  # noqa: F401 - whether it is there
    except ImportError as error:
        message = (
            "tune writes YAML with ruamel.yaml, which is not installed (pip install 'shapestream[tune]')"
        )
        raise ConfigurationError([message]) from error
