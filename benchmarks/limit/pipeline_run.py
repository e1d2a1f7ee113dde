"""The whole pipeline: this process is the client, with the real SDK; a server from the real command line, over ipc."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trio

import shapestream
from benchmarks.limit.answers import Answers, no_answers
from benchmarks.limit.engine import MODEL_FILE
from benchmarks.limit.traces import Trace
from benchmarks.processes import Child, child_process, wait_for_slots
from shapestream import blocking

MODEL = "minilm"
SLOTS = 2
"""Of one thread each, in one process or two: on two cores they beat one slot of two threads."""
IN_PROCESS = "in_process: {slots: 2, threads: 2}"
TWO_WORKERS = "workers: [{count: 2, slots: 1, threads: 1}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetting:
    """What a YAML says beside the model's inputs."""

    label: str
    placement: str = IN_PROCESS
    batching: str = "{max_batch: 32}"
    shapes: str = ""
    calibration_s: float = 5.0
    """The default."""

    def yaml(self, address: str) -> str:
        """The whole file."""
        shapes = f", shapes: {self.shapes}" if self.shapes else ""
        return (
            f"server: {{listen: ['{address}']}}\n"
            f"models:\n  - {{name: {MODEL}, path: '{MODEL_FILE}', batching: {self.batching}{shapes},\n"
            f"     calibration_s: {self.calibration_s},\n"
            "     inputs: {input_ids: {shape: 'batch:1..64, seq:1..256', pad: {seq: 0}},\n"
            "              attention_mask: {shape: 'batch, seq', pad: {seq: 0}, mask_of: input_ids}},\n"
            "     outputs: {embedding: {rule: rows}},\n"
            "     probe: {input_ids: {integers: [0, 30521]}}}\n"
            f"{self.placement}\nlogging: {{level: warning}}\n"
        )

    def __str__(self) -> str:
        parts = [self.placement, f"batching: {self.batching}"]
        return "; ".join(parts + ([f"shapes: {self.shapes}"] if self.shapes else []))


@dataclass(slots=True, kw_only=True)
class Served:
    """A running server, and how many elements its requests had so far."""

    setting: ServerSetting
    address: str
    child: Child
    elements: int = 0

    def stream(self, trace: Trace, in_flight: int) -> Run:
        """Streams the trace through it and takes the time from the first request to the last answer."""
        before = self._counters()
        cpu_before, client_before = self.child.cpu_s() + self.child.children_cpu_s(), time.process_time()
        loop_before = self.child.loop_cpu_s()
        answers, seconds, received = trio.run(_stream, self.address, trace, in_flight)
        loop_s = self.child.loop_cpu_s() - loop_before
        client_s = time.process_time() - client_before
        cpu_s = self.child.cpu_s() + self.child.children_cpu_s() - cpu_before
        after = self._counters()
        computed_before = _computed(before, self.elements)
        self.elements += trace.tokens
        padding = 1.0 - trace.tokens / (_computed(after, self.elements) - computed_before)
        batches = after["batches"] - before["batches"]
        return Run(
            answers=answers,
            seconds=seconds,
            padding_ratio=padding,
            mean_batch=len(trace) / batches,
            slots_busy=(_busy_s(after) - _busy_s(before)) / (len(after["slots"]) * seconds),
            server_cpu_s=cpu_s,
            loop_cpu_s=loop_s,
            client_cpu_s=client_s,
            received={result.request_id: (result.key, at_s) for result, at_s in received},
        )

    def forget(self, trace: Trace, requests: int) -> None:
        """Counts requests that went another way."""
        lengths = trace.lengths
        self.elements += int(lengths[np.arange(requests) % len(lengths)].sum())

    def _counters(self) -> dict[str, Any]:
        with blocking.connect(self.address, connect_timeout=60) as client:
            return client.statistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trace through one server."""

    answers: Answers
    seconds: float
    padding_ratio: float
    mean_batch: float
    slots_busy: float
    """Share of the time that the slots were running calls."""
    server_cpu_s: float
    """Of the server and its workers, the calls included."""
    loop_cpu_s: float
    """Of the server's main thread, which has the event loop, and ZeroMQ's."""
    client_cpu_s: float
    received: Mapping[str, tuple[int, float]]
    """By the request's id: its place in the trace, and when its answer came, in seconds from the first request."""


@contextmanager
def serving(setting: ServerSetting, folder: Path, slots: int = SLOTS) -> Iterator[Served]:
    """The server, ready to answer."""
    address = f"ipc://{folder}/{setting.label}.sock"
    config, log = folder / f"{setting.label}.yaml", folder / f"{setting.label}.log"
    config.write_text(setting.yaml(address))
    # What was proved of the model is kept beside it; what calls cost is measured anew, for today's machine.
    environment = {
        "SHAPESTREAM_PROBE_CACHE": str(MODEL_FILE.parent / "proofs"),
        "SHAPESTREAM_COST_CACHE": str(folder / "costs"),
    }
    command = ["-m", "shapestream_workers", "serve", str(config)]
    with child_process(command, log=log, environment=environment) as child:
        wait_for_slots(child, address, slots, log)
        yield Served(setting=setting, address=address, child=child)


def _computed(counters: dict[str, Any], elements: int) -> float:
    """Elements that a server has computed, from its share of padding and the elements of the requests themselves."""
    return elements / (1.0 - float(counters["padding_ratio"]))


def _busy_s(counters: dict[str, Any]) -> float:
    return sum(float(slot["busy_s"]) for slot in counters["slots"].values())


async def _stream(
    address: str, trace: Trace, in_flight: int
) -> tuple[Answers, float, list[tuple[shapestream.Result, float]]]:
    answers = no_answers(trace)
    received: list[tuple[shapestream.Result, float]] = []
    async with shapestream.connect(address) as client:
        await client.signature(MODEL)
        started = time.perf_counter()
        # In order of completion: a long sentence at the head would hold the window's other places.
        async with client.stream(MODEL, trace.inputs(), max_in_flight=in_flight, ordered=False) as results:
            async for result in results:
                assert isinstance(result, shapestream.Result)  # a failed one was raised
                answers[result.key] = result["embedding"][0]
                received.append((result, time.perf_counter() - started))
        return answers, time.perf_counter() - started, received
