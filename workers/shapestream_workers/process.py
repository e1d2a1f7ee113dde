"""This process: its standard streams, its versions, its messages to its parent, and ends that nothing can delay.

`shapestream health` imports this module, so what takes long to import is imported by the functions that need it.
"""

from __future__ import annotations

import atexit
import gc
import os
import platform
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from shapestream_workers import EXIT_RUNTIME

READY_LINE = b"ready\n"
"""Line that a worker writes to stdout each time that the server has welcomed it."""
REPLACE_LINE = b"replace\n"
"""Line that a worker writes to stdout when it has passed its memory limit; it goes on serving."""

PROBLEM_LINE = b"problem "
"""Beginning of the line that a worker writes to stdout when it cannot use its configuration."""
MAX_LINE_BYTES = 4096
"""Bytes of a line that a worker writes to stdout, at most: enough for a problem with its file, place and remedy."""
NAME_VARIABLE = "SHAPESTREAM_WORKER_NAME"
"""Variable by which a parent tells a worker the name to register with at the server."""

_LIBRARIES = ("trio", "pyzmq", "msgpack", "numpy", "openvino", "onnxruntime", "torch", "torch_xla")


def open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr on nothing that the parent has closed, as some daemons do.

    Otherwise the next socket would get their number, and engines would print into it. Python would have None for the stream,
    and could not log.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    atexit.register(_drop_unwritten_log)


def keep_what_is_loaded() -> None:
    """Exclude all present objects from garbage collection, and put them in huge pages: they live as long as the process.

    With 80,000 of them, most of them parts of modules, a full collection stopped a server under load for 145 ms, once in
    some 20,000 requests.
    """
    from shapestream.serving.allocator import join_pages

    gc.collect()
    join_pages(map(id, gc.get_objects()))
    gc.freeze()


def drop_what_is_gone() -> None:
    """Collect garbage among all objects, those of `keep_what_is_loaded` too, and return freed memory to the system.

    For a process that has replaced its models: an engine's requests form reference cycles with their tensors, which hold the
    memory of the model. It stops the event loop: for 70 ms of a server with 76,000 objects, 0.1 s with 200,000 more (one
    core, 2026-11-29). Kept replies are none of them: the collector does not track their tuples.
    """
    from shapestream.serving.allocator import give_back_freed_memory

    gc.unfreeze()
    gc.collect()
    gc.freeze()
    give_back_freed_memory(above_bytes=0)


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Let whatever a model prints go to stderr, by Python or by C: stdout is for the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, in the main thread: a job that is preempted ends in order."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _drop_unwritten_log() -> None:
    """Drop lines that cannot be written to stderr, because its terminal was closed or the disk is full.

    Python writes its buffer once more at its end. If that fails, it turns any exit status into 120.
    """
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)


def exit_after(seconds: float) -> None:
    """End the process after `seconds` if it has not ended by itself; a thread inside an engine cannot hold it back."""
    timer = threading.Timer(seconds, os._exit, (EXIT_RUNTIME,))
    timer.daemon = True
    timer.start()


def problem_line(problems: Sequence[str]) -> bytes:
    """Return the line that tells a worker's parent these problems."""
    text = " ".join("; ".join(problems).split()).encode(errors="replace")
    return PROBLEM_LINE + text[: MAX_LINE_BYTES - len(PROBLEM_LINE) - 1] + b"\n"


def name_of_start(worker: str) -> str:
    """Return a new name for one start of a worker, by which the server knows the process.

    The end is random: containers share pids and may share a host's name, and a pid comes again. The name is neither
    secret nor a proof of identity. It has 32 random bits: with one other process of the same worker, as in a rolling
    restart, two names are equal once in 4 billion times.
    """
    return f"{worker}-{secrets.token_hex(4)}"


def versions() -> dict[str, str]:
    """Return the versions, by name, of this program and of the libraries that decide how it behaves.

    An optional library that is absent is `not installed`.
    """
    found = {"shapestream": _version("shapestream"), "protocol": "1", "python": platform.python_version()}
    return found | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
