"""What one setting cannot be judged by alone: names that must agree, and things that exclude each other.

Works on the *raw* values of the file, and takes nothing for granted about their types: a file with a mistyped
number still gets its unknown model name reported in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shapestream.settings_model_checks import model_findings
from shapestream.settings_raw import Finding, mapping, sequence
from shapestream.settings_server_checks import server_findings
from shapestream.settings_words import did_you_mean

__all__ = ["cross_check"]


def cross_check(values: Any) -> Iterator[Finding]:
    """Every disagreement between settings, each with the place of the one to change."""
    top = mapping(values)
    models = sequence(top.get("models"))
    names = [name for model in models if isinstance(name := mapping(model).get("name"), str)]
    yield from _models(models)
    for index, model in enumerate(models):
        yield from model_findings(("models", index), mapping(model))
    yield from _workers(top, names)
    yield from server_findings(mapping(top.get("server")), models)


def _models(models: Sequence[Any]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, model in enumerate(models):
        name = mapping(model).get("name")
        if isinstance(name, str) and first.setdefault(name, index) != index:
            message = f'models[{first[name]}] is called "{name}" too (names are unique)'
            yield ("models", index, "name"), message


def _workers(top: Mapping[str, Any], names: list[str]) -> Iterator[Finding]:
    workers, in_process = top.get("workers"), top.get("in_process")
    runs_in_process = in_process is True or isinstance(in_process, dict)
    dial_in = mapping(top.get("server")).get("worker_listen") is not None
    if runs_in_process and workers:
        yield ("in_process",), 'both "in_process" and "workers" are given (remove one)'
    if (
        mapping(in_process).get("refuse_new_shapes") is True
        and mapping(in_process).get("memory_limit") is None
    ):
        message = '"refuse_new_shapes" says what happens above "memory_limit", which is not set (add it)'
        yield ("in_process", "refuse_new_shapes"), message
    if not sequence(top.get("models")) and (runs_in_process or workers or not dial_in):
        yield ("models",), "no models (add one; only a server with worker_listen can do without)"
    if workers == [] and not runs_in_process and not dial_in:
        yield ("workers",), "no workers, and server.worker_listen is not set (nothing could run a model)"
    served: set[str] = set()
    for index, group in enumerate(sequence(workers)):
        chosen = mapping(group).get("models")
        if not isinstance(chosen, list):
            served.update(names)  # all by default; what is no list is complained about elsewhere
        for position, name in enumerate(sequence(chosen)):
            if isinstance(name, str) and name not in names:
                where = ("workers", index, "models", position)
                yield where, f'there is no model "{name}" {did_you_mean(name, names)}'
            elif isinstance(name, str):
                served.add(name)
    sound = isinstance(workers, list) and all(isinstance(group, dict) for group in workers)
    if workers and sound and not dial_in and not runs_in_process:
        for index, model in enumerate(sequence(top.get("models"))):
            name = mapping(model).get("name")
            if isinstance(name, str) and name not in served:
                yield ("models", index, "name"), f'no worker serves "{name}" (add it to a group of workers)'
