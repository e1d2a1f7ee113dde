"""The end of a command: errors become messages on stderr and an exit status."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import typer

from shapestream.errors import ConfigurationError, ShapestreamError
from shapestream.telemetry.logging import PRESENT
from shapestream_workers import EXIT_CONFIGURATION, EXIT_RUNTIME
from shapestream_workers.interruption import interrupted

log = structlog.get_logger()


@contextmanager
def reported(*, as_json: bool = False, in_log: bool = False) -> Iterator[None]:
    """Turn errors into messages and exit statuses. If stdout has no reader, typer ends the command without a message.

    A defect of the program keeps its traceback. `in_log` is for a worker, which shares the server's log: if that is JSON,
    messages and tracebacks are lines of it.
    """
    try:
        yield
    except BrokenPipeError as error:
        if _stdout_is_read():
            _fail([str(error)], EXIT_RUNTIME, as_json, in_log)
        raise  # the reader, such as `| head`, has closed the pipe: typer ends with status 1
    except typer.BadParameter:
        raise  # typer reports wrong usage
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        leaves = list(_leaves(error))
        if all(isinstance(leaf, ConfigurationError) for leaf in leaves):
            problems = [problem for leaf in leaves for problem in leaf.problems]
            _fail(problems, EXIT_CONFIGURATION, as_json, in_log)
        elif all(isinstance(leaf, (ShapestreamError, OSError)) for leaf in leaves):
            _fail([str(leaf) for leaf in leaves], EXIT_RUNTIME, as_json, in_log)
        elif all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            sys.exit(interrupted())
        elif in_log and PRESENT.json:
            log.exception("process ends", why="a defect of the program", status=EXIT_RUNTIME)
            sys.exit(EXIT_RUNTIME)
        else:
            raise


def _stdout_is_read() -> bool:
    """Tell whether the other end of stdout, if it is a pipe, is open."""
    watched = select.poll()
    watched.register(1, 0)
    return not any(events & select.POLLERR for _, events in watched.poll(0))


def _leaves(error: BaseException) -> Iterator[Any]:
    """Yield the errors in a group of a nursery's, and in its groups; an error that is no group is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _fail(messages: list[str], status: int, as_json: bool, in_log: bool) -> None:
    if as_json and messages:
        typer.echo(json.dumps({"errors": messages}, indent=2))
    for message in messages:
        if in_log and PRESENT.json:
            log.error("process ends", why=message, status=status)
        else:
            typer.echo(message, err=True)
    sys.exit(status)
