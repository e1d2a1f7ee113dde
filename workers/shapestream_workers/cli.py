"""The command line. Each command is a page of words; what it does is in the module that it calls.

Exit status: 0 ok, 1 something went wrong while running, 2 wrong usage, 3 the configuration cannot be used. Answers go
to stdout, everything else to stderr. Engines and servers are imported by the commands that need them, so that
`version` and a mistyped option answer at once.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, load_settings
from shapestream.telemetry.logging import configure
from shapestream_workers.exit_codes import EXIT_OK, EXIT_RUNTIME
from shapestream_workers.exit_status import reported
from shapestream_workers.keys import app as keys_app
from shapestream_workers.lab.options import SimulateOptions, TuneOptions
from shapestream_workers.logs import app as logs_app
from shapestream_workers.process import open_standard_streams
from shapestream_workers.target import server_access

app = typer.Typer(
    help="Serves models whose tensor shapes change with every request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
Target = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS|CONFIG",
        help="A server's address (ipc://..., tcp://...), or the YAML that it serves.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
AnyFunction = Annotated[
    bool,
    typer.Option(
        "--any-function", help="Serve any importable `function`, not only those that packages register."
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        envvar="SHAPESTREAM_KEY",
        help="Our secret key's file, for a server that asks for keys.",
    ),
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        "--server-key", metavar="KEY|FILE", envvar="SHAPESTREAM_SERVER_KEY", help="That server's public key."
    ),
]
Timeout = Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="How long to look for the server.")]


def main() -> None:
    """Run the command that `sys.argv` names."""
    open_standard_streams()
    app()


@app.command()
def serve(
    config: Config,
    record_trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Record when requests come and how large they are; for simulate, tune."
        ),
    ] = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    any_function: AnyFunction = False,
) -> None:
    """Start the server and the workers that CONFIG names; SIGTERM drains, a second one stops at once."""
    _allow(any_function)
    if supervised:
        from shapestream_workers.process import end_with_parent

        end_with_parent()
    with reported():
        loaded = _configured(config)
        if record_trace is not None:
            if not record_trace.absolute().parent.is_dir():
                raise typer.BadParameter(
                    f"no such folder: {record_trace.parent}", param_hint="--record-trace"
                )
            if record_trace.exists():
                message = f"{record_trace} exists already, and no trace is overwritten (name another file, or remove it)"
                raise typer.BadParameter(message, param_hint="--record-trace")
            loaded = loaded.with_server(record_trace=str(record_trace.absolute()))
        from shapestream_workers.serve import run_server

        status = run_server(loaded)
    raise typer.Exit(status)


@app.command()
def worker(
    config: Config,
    connect: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The server; default: server.worker_listen of CONFIG."),
    ] = None,
    group: Annotated[int, typer.Option(min=0, help="Which entry of `workers` to be, counted from 0.")] = 0,
    name: Annotated[str, typer.Option(help="How logs and timings call this worker.")] = "worker",
    admin: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Answer health checks there; needs the extra [admin]."),
    ] = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    key: Key = None,
    server_key: ServerKey = None,
    any_function: AnyFunction = False,
) -> None:
    """Start one worker by itself; it serves the models of CONFIG to a server that runs already, or will."""
    _allow(any_function)
    channel = None
    if supervised:
        from shapestream_workers.process import end_with_parent
        from shapestream_workers.worker_process import claim_stdout

        end_with_parent()
        channel = claim_stdout()
        configure("info", "auto")  # as the server's log is by default, until the YAML says how it is
        structlog.contextvars.bind_contextvars(process=name)
    with reported(in_log=supervised), _told_to_parent(channel):
        loaded = _configured(config, serves=False)
    with reported(in_log=True), _told_to_parent(channel):
        from shapestream_workers.admin import worker_admin
        from shapestream_workers.worker_process import keys_to_show, run_worker, server_address

        groups = loaded.settings.worker_groups
        if group and group >= len(groups):
            raise typer.BadParameter(f"{config} has {len(groups)} groups of workers", param_hint="--group")
        address = server_address(loaded, connect)
        chosen = groups[group] if groups else _only_group(loaded)
        keys = keys_to_show(loaded, address, key, server_key)
        port = None if admin is None else worker_admin(loaded, admin)
        status = run_worker(loaded, chosen, address, name=name, ready_channel=channel, keys=keys, admin=port)
    raise typer.Exit(status)


@contextmanager
def _told_to_parent(channel: int | None) -> Iterator[None]:
    """Tell the parent of a worker, if it has one, the problems of a configuration that it cannot use."""
    try:
        yield
    except ConfigurationError as error:
        if channel is not None:
            from shapestream_workers.process import problem_line

            os.write(channel, problem_line(error.problems))
        raise


@app.command()
def check(
    config: Config,
    show: Annotated[bool, typer.Option("--show", help="Print each setting and where it comes from.")] = False,
    as_json: Json = False,
    any_function: AnyFunction = False,
) -> None:
    """Validate CONFIG, compile its models, prove that batching and padding are safe, run them; nothing is served."""
    _allow(any_function)
    with reported(as_json=as_json):
        configure("warning", "auto")
        from shapestream_workers.check import check_configuration, check_models

        try:
            loaded = load_settings(config)
        except ConfigurationError as error:
            raise ConfigurationError([*error.problems, *check_models(config)]) from error
        report = check_configuration(loaded)
        if as_json:
            typer.echo(json.dumps(report.to_dict(loaded if show else None), indent=2))
        else:
            for line in report.lines(loaded if show else None):
                typer.echo(line)
        for warning in report.warnings:
            typer.echo(f"warning: {warning}", err=True)
        if report.problems:
            raise ConfigurationError([] if as_json else list(report.problems))


@app.command()
def infer(
    target: Target,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.", show_default=False)],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE...", help="VALUE is a .npy file or JSON: ids=[[1, 2, 3]]", show_default=False
        ),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Give up after this.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each output to FOLDER/NAME.npy.")
    ] = None,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Send one request and print the answer."""
    with reported(as_json=as_json):
        import trio

        from shapestream_workers.inference import format_result, read_inputs, run_one, save_outputs

        arrays = read_inputs(inputs or [])
        access = server_access(target, timeout, key, server_key)
        result = trio.run(run_one, access, model, arrays, deadline, partial(typer.echo, err=True))
        if save is not None:
            save_outputs(result, save)
        typer.echo(format_result(result, as_json=as_json))


@app.command()
def models(
    target: Target,
    costs: Annotated[
        bool, typer.Option("--costs", help="What their calls cost, as kept, or measured now; for a CONFIG.")
    ] = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """List the models of a running server, or of CONFIG as it stands: what they take and give, and at which shapes."""
    with reported(as_json=as_json):
        if costs:
            if "://" in target:
                raise typer.BadParameter("costs are measured for a CONFIG", param_hint="--costs")
            from shapestream_workers.costs import costs_of

            configure("warning", "auto")
            typer.echo("\n".join(costs_of(load_settings(target), as_json=as_json)))
            return
        unavailable: dict[str, str] = {}
        warnings: list[str] = []
        if "://" in target:
            from shapestream_workers.inference import signatures_of
            from shapestream_workers.proof import why_alone

            access = server_access(target, timeout, key, server_key)
            signatures, unavailable, digests = signatures_of(access)
            warnings = list(why_alone(signatures))
        else:
            from shapestream_workers.model_trust import digests_of
            from shapestream_workers.models import read_signatures

            loaded = load_settings(target)
            read = read_signatures(loaded)
            signatures, digests = list(read.signatures), digests_of(loaded.settings.models)
            warnings = list(read.warnings)
        if as_json:
            gone = [{"name": name, "unavailable": why} for name, why in unavailable.items()]
            here = [{**own.to_dict(), "digest": digests.get(own.name)} for own in signatures]
            typer.echo(json.dumps([*here, *gone], indent=2))
        else:
            for signature in signatures:
                typer.echo("\n".join(signature.describe()))
                if signature.name in digests:
                    typer.echo(f"  sha256 {digests[signature.name]}")
            for why in unavailable.values():
                typer.echo(why)
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)


@app.command()
def audit(
    connect: Annotated[
        str,
        typer.Option(metavar="ADDRESS|CONFIG", help="A server's address, or the YAML that it serves."),
    ],
    acknowledge: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Let the requests of this model share calls again."),
    ] = None,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """List what a server's audits of answers found, by model, or let a model's requests share calls again."""
    with reported(as_json=as_json):
        from shapestream_workers.audit import audits_of, described

        found = audits_of(server_access(connect, timeout, key, server_key), acknowledge)
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(described(found)))


@app.command()
def why(
    connect: Annotated[
        str, typer.Option(metavar="ADDRESS|CONFIG", help="The server's address, or the YAML that it serves.")
    ],
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID|N", help="The request's id; with --slowest, how many.", show_default=False
        ),
    ] = "",
    slowest: Annotated[bool, typer.Option("--slowest", help="The slowest of the last ten minutes.")] = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Tell why a request took so long: its queue, company, padding, attempts and times."""
    with reported(as_json=as_json):
        from shapestream_workers.why import lines_of, stories_from

        if slowest and request and not (request.isdecimal() and 0 < int(request) < 10_000):
            raise typer.BadParameter(f"{request!r} is not a number of requests", param_hint="--slowest")
        if not slowest and not request:
            raise typer.BadParameter("name a request's id, or give --slowest", param_hint="REQUEST_ID")
        access = server_access(connect, timeout, key, server_key)
        stories = stories_from(access, None if slowest else request, int(request or 10) if slowest else 1)
        if as_json:
            typer.echo(json.dumps(stories, indent=2))
        else:
            told = ["\n".join(lines_of(story)) for story in stories]
            typer.echo("\n\n".join(told) or "no request has ended in the last ten minutes")


@app.command()
def stats(
    target: Target,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Show the last minute of a running server, by model: rates, times, queue, batches, padding, slots."""
    with reported(as_json=as_json):
        from shapestream_workers.stats import show_stats

        show_stats(server_access(target, timeout, key, server_key), as_json=as_json)


@app.command()
def top(
    target: Target,
    once: Annotated[bool, typer.Option("--once", help="Draw once and end, as without a terminal.")] = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once, for scripts.")] = False,
) -> None:
    """Show the same live, each second, until q or Ctrl-C."""
    with reported(as_json=as_json):
        from shapestream_workers.top import show_top

        show_top(server_access(target, timeout, key, server_key), once=once, as_json=as_json)


@app.command()
def reload(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|HOST:PORT",
            help="The YAML that the server serves, or the address of its admin port.",
            show_default=False,
        ),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With the admin port's token; default: server.admin.token_file of CONFIG."
        ),
    ] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Let a running server read its YAML and keys again, replace its workers, and say what changed.

    Waits until that is done. Exit status: 0 done; 1 refused, or not done everywhere; 2 wrong usage.
    """
    with reported(as_json=as_json):
        from shapestream_workers.reload import NoAdminPort, Refused, admin_port_of, lines_of, reload_server

        try:
            found = reload_server(admin_port_of(target, token_file), timeout_s=timeout)
        except NoAdminPort as error:
            raise typer.BadParameter(str(error), param_hint="CONFIG|HOST:PORT") from error
        except Refused as error:
            found = error.to_dict()
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        for line in lines_of(found):
            typer.echo(line, err=found["state"] != "ok" or as_json)
    raise typer.Exit(EXIT_OK if found["state"] == "ok" else EXIT_RUNTIME)


@app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def health(context: typer.Context) -> None:
    """Ask whether a server answers, for health checks; quick, and with a time limit."""
    from shapestream_workers.health import main

    raise typer.Exit(main(context.args))


def tune(**options: Any) -> None:
    """Measure strategies, static shapes, slots, threads and precisions on the model and a trace; write the best YAML."""
    read = TuneOptions(**options)
    with reported(as_json=read.as_json):
        from shapestream_workers.lab.tune import tune_file

        tune_file(read)


def simulate(**options: Any) -> None:
    """Play traffic to the server's own scheduler on virtual time: goodput, latencies, how many slots it takes."""
    read = SimulateOptions(**options)
    with reported(as_json=read.as_json):
        from shapestream_workers.lab.simulate import run_simulate

        run_simulate(read)


# typer reads the options of a command from its signature.
for command, read in ((tune, TuneOptions), (simulate, SimulateOptions)):
    command.__signature__ = inspect.signature(read, eval_str=True)  # type: ignore[attr-defined]
    app.command()(command)

app.add_typer(keys_app, name="keys")
app.add_typer(logs_app, name="logs")


@app.command()
def schema() -> None:
    """Print the JSON Schema of CONFIG, for editors."""
    from shapestream.settings import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def version(as_json: Json = False) -> None:
    """Print the versions of shapestream and of what it runs on."""
    from shapestream_workers.process import versions

    found = versions()
    typer.echo(
        json.dumps(found) if as_json else "\n".join(f"{name} {number}" for name, number in found.items())
    )


def _allow(any_function: bool) -> None:
    if any_function:
        from shapestream_workers.model_trust import allow_any_function

        allow_any_function()


def _configured(config: Path, *, serves: bool = True) -> LoadedSettings:
    """The settings of a command that runs for long."""
    loaded = load_settings(config, serves=serves)
    configure(loaded.settings.logging.level, loaded.settings.logging.format)
    return loaded


def _only_group(loaded: LoadedSettings) -> Any:
    from shapestream.settings import WorkerGroupSettings

    if not loaded.settings.models:
        raise ConfigurationError([loaded.problem(("models",), "no models (a worker needs one)")])
    return WorkerGroupSettings()
