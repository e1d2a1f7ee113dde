"""The command line: the options of each command and their help. The modules that they call do the work.

The first sentence of a command's docstring is its line in `shapestream --help`; it has at most 60 characters. Answers go
to stdout, everything else to stderr. Each command imports the engines and servers that it needs, so that `version` and a
mistyped option answer at once.
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

from shapestream import __version__
from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, load_settings
from shapestream.telemetry.logging import configure
from shapestream_workers import EXIT_OK, EXIT_RUNTIME
from shapestream_workers.exit_status import reported
from shapestream_workers.gateway_options import GatewayCommand
from shapestream_workers.keys import app as keys_app
from shapestream_workers.lab.options import SimulateOptions, TuneOptions
from shapestream_workers.logs import app as logs_app
from shapestream_workers.printing import Json, print_answer
from shapestream_workers.process import ended_by_sigterm, open_standard_streams, printing_to_stderr
from shapestream_workers.target import Key, ServerKey, Timeout, server_access

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_SERVER = {
    "metavar": "ADDRESS|CONFIG",
    "help": "The server's address (ipc://..., tcp://...), or its YAML file.",
}
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
Target = Annotated[str, typer.Argument(**_SERVER, show_default=False)]
Connect = Annotated[str, typer.Option(**_SERVER)]
AnyFunction = Annotated[
    bool, typer.Option("--any-function", help="Allow functions that no installed package registers.")
]


def main() -> None:
    """Run the command that `sys.argv` names."""
    open_standard_streams()
    app()


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shapestream {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and end."),
    ] = False,
) -> None:
    """Serve models whose tensor shapes change with every request."""


@app.command()
def serve(
    config: Config,
    record_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record the times and sizes of requests, for simulate and tune."),
    ] = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    any_function: AnyFunction = False,
) -> None:
    """Start the server and its workers.

    The first SIGTERM ends both after all accepted requests are answered. The second one ends them at once.
    """
    _allow(any_function)
    if supervised:
        from shapestream_engine.machine import end_with_parent

        end_with_parent()
    with reported():
        loaded = _configured(config)
        if record_trace is not None:
            if not record_trace.absolute().parent.is_dir():
                raise typer.BadParameter(
                    f"no such folder: {record_trace.parent}", param_hint="--record-trace"
                )
            if record_trace.exists():
                message = f"{record_trace} exists, and is not overwritten (name another file, or remove it)"
                raise typer.BadParameter(message, param_hint="--record-trace")
            loaded = loaded.with_server(record_trace=str(record_trace.absolute()))
        from shapestream_workers.serve import run_server

        status = run_server(loaded)
    raise typer.Exit(status)


@app.command("serve-folder")
def serve_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The model's.", show_default=False)],
    name: Annotated[str, typer.Option(help="The model's name for callers.")] = "model",
    http: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Speak HTTP there.")] = None,
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Speak gRPC there.")] = None,
    admin: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Health checks, metrics and the page.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The callers: a line NAME TOKEN for each.")
    ] = None,
    security: Annotated[
        str | None,
        typer.Option(metavar="network", help="No tokens beyond loopback: the network keeps strangers away."),
    ] = None,
) -> None:
    """Serve the one model in FOLDER over HTTP and gRPC.

    For platforms that mount a model and have no YAML, such as KServe. The model has a worker process, as by default.
    """
    with reported():
        if security not in (None, "network"):
            raise typer.BadParameter("it is network, or left out", param_hint="--security")
        from shapestream_workers.model_folder import FolderServer, written
        from shapestream_workers.serve import run_server

        asked = FolderServer(
            folder=folder,
            name=name,
            http=http,
            grpc=grpc,
            admin=admin,
            token_file=token_file,
            is_open=security is not None,
        )
        with written(asked) as path:
            status = run_server(_configured(path))
    raise typer.Exit(status)


@app.command()
def worker(
    config: Config,
    connect: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The server. Default: server.worker_listen of CONFIG."),
    ] = None,
    group: Annotated[
        int, typer.Option(min=0, help="Number of the entry of `workers` to follow, from 0.")
    ] = 0,
    index: Annotated[
        int, typer.Option(min=0, help="Number of this worker in that entry, from 0: {index} in its device.")
    ] = 0,
    name: Annotated[str, typer.Option(help="Name of this worker in logs and timings.")] = "worker",
    admin: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Port for health checks; needs the extra [admin]."),
    ] = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    key: Key = None,
    server_key: ServerKey = None,
    any_function: AnyFunction = False,
) -> None:
    """Start one worker for a server that is started elsewhere.

    It serves the models of CONFIG. It waits for the server, and connects again after that has restarted.
    """
    _allow(any_function)
    channel = _channel_to_parent(supervised)
    if supervised:
        configure("info", "auto")  # as the server's log is by default, until the YAML says how it is
        structlog.contextvars.bind_contextvars(process=name)
    with reported(in_log=supervised), _told_to_parent(channel):
        loaded = _configured(config, serves=False)
    with reported(in_log=True), _told_to_parent(channel):
        from shapestream_workers.access import worker_admin
        from shapestream_workers.worker_process import keys_to_show, run_worker, server_address

        groups = loaded.settings.worker_groups
        if group and group >= len(groups):
            raise typer.BadParameter(f"{config} has {len(groups)} groups of workers", param_hint="--group")
        address = server_address(loaded, connect)
        chosen = groups[group] if groups else _only_group(loaded)
        keys = keys_to_show(loaded, address, key, server_key)
        port = None if admin is None else worker_admin(loaded, admin)
        status = run_worker(
            loaded, chosen, address, name=name, index=index, ready_channel=channel, keys=keys, admin=port
        )
    raise typer.Exit(status)


def _channel_to_parent(supervised: bool) -> int | None:
    """Let a process that a server started end with it. Return the descriptor for messages to it; None for others.

    All else that is printed goes to stderr from then on.
    """
    if not supervised:
        return None
    from shapestream_engine.machine import end_with_parent

    end_with_parent()
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


@contextmanager
def _told_to_parent(channel: int | None) -> Iterator[None]:
    """Report the problems of an unusable configuration to the worker's parent, if it has one."""
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
    show: Annotated[bool, typer.Option("--show", help="Print each setting with its origin.")] = False,
    measure: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Time per model to measure bf16 and another number of slots, besides compilations; 0: neither.",
        ),
    ] = 4.0,
    beside: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="Compare answers with this engine's; auto: with the other one that reads a small file; none: not.",
        ),
    ] = "auto",
    as_json: Json = False,
    any_function: AnyFunction = False,
) -> None:
    """Check that CONFIG can be served.

    Reads the file, compiles its models, proves that batching and padding are safe, and runs the models. It serves nothing.
    """
    _allow(any_function)
    with reported(as_json=as_json):
        configure("warning", "auto")
        from shapestream_workers.check import check_configuration, check_models

        try:
            loaded = load_settings(config)
        except ConfigurationError as error:
            raise ConfigurationError([*error.problems, *check_models(config)]) from error
        from shapestream_workers.printing import told_news

        with told_news() as tell:
            report = check_configuration(loaded, measure_s=measure, beside=beside, tell=tell)
        shown = loaded if show else None
        print_answer(report.lines(shown), report.to_dict(shown), as_json=as_json)
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
            metavar="NAME=VALUE...",
            help="An input. VALUE is a .npy file or JSON: ids=[[1, 2, 3]]; for strings also text, or @FILE.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Time for the answer.")
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

        from shapestream_workers.inference import format_result, read_arguments, run_one, save_outputs

        given = read_arguments(inputs or [])
        access = server_access(target, timeout, key, server_key)
        result = trio.run(run_one, access, model, given, deadline, partial(typer.echo, err=True))
        if save is not None:
            save_outputs(result, save)
        typer.echo(format_result(result, as_json=as_json))


@app.command()
def run(
    config: Config,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model or a chain of it.", show_default=False)
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A folder of .npy, .npz or pictures; .parquet, .arrow, .jsonl, or a folder of them.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="The results: a .parquet or .npz file.", show_default=False),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=COLUMN", help="The column of an input. Default: the input's name. Repeatable."
        ),
    ] = None,
    picture: Annotated[
        str, typer.Option(metavar="MODE,LAYOUT", help="Pictures as u8: rgb, bgr or l (grey), and hwc or chw.")
    ] = "rgb,hwc",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that ended early (OUTPUT.parts).")
    ] = False,
    cpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="CPUs that the model uses. Default: all.")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, max=65536, metavar="N", help="Rows under way at a time.")
    ] = 256,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Time for each row, from when it is sent."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Use a running server, in place of the model in this process."),
    ] = None,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    any_function: AnyFunction = False,
    as_json: Json = False,
) -> None:
    """Run a model of CONFIG over files, in order.

    What is done is kept in OUTPUT.parts until the end. Rows that fail have their error in the results, and the status is 1.
    """
    _allow(any_function)
    with reported(as_json=as_json):
        configure("warning", "auto")
        from shapestream_workers.offline.job import Job
        from shapestream_workers.offline.job import run as run_job
        from shapestream_workers.offline.pictures import PictureFormat

        try:
            pictures = PictureFormat.parse(picture)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--picture") from None
        job = Job(
            loaded=load_settings(config, serves=False, files_must_exist=server is None),
            model=model,
            input=source,
            output=output,
            columns=_named("--column", column),
            pictures=pictures,
            in_flight=in_flight,
            deadline_s=deadline,
            cpus=cpus,
            resume=resume,
            server=None if server is None else server_access(server, timeout, key, server_key),
        )
        with printing_to_stderr(), ended_by_sigterm():
            done = run_job(job)
        print_answer(
            [f"{done.rows} rows in {output}, {done.failed} of them failed"], done.to_dict(), as_json=as_json
        )
        if done.failed:
            first = "" if done.first_error is None else f"; {done.first_error}"
            typer.echo(f"{done.failed} of {done.rows} rows failed{first}", err=True)
    raise typer.Exit(EXIT_RUNTIME if done.failed else EXIT_OK)


def _named(option: str, texts: list[str] | None) -> dict[str, str]:
    """Read NAME=VALUE."""
    named = [text.partition("=") for text in texts or ()]
    if not all(name and value for name, _, value in named):
        raise typer.BadParameter(f"{option} is INPUT=COLUMN")
    return {name: value for name, _, value in named}


@app.command()
def models(
    target: Target,
    costs: Annotated[
        bool, typer.Option("--costs", help="Print the kept or measured costs of calls, for a CONFIG.")
    ] = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """List the models and chains of a running server, or of CONFIG.

    Prints the inputs, outputs, rules and allowed shapes of each model, and the stages of a CONFIG's chains.
    """
    with reported(as_json=as_json):
        if costs:
            if "://" in target:
                raise typer.BadParameter("costs are measured for a CONFIG", param_hint="--costs")
            from shapestream_workers.costs import costs_of

            configure("warning", "auto")
            reports = costs_of(load_settings(target))
            lines = [line for report in reports for line in report.lines()]
            print_answer(lines, [report.to_dict() for report in reports], as_json=as_json)
            return
        from shapestream_workers.model_lists import list_of_configuration, list_of_server

        if "://" in target:
            found = list_of_server(server_access(target, timeout, key, server_key))
        else:
            found = list_of_configuration(load_settings(target))
        print_answer(found.lines, found.plain, as_json=as_json)
        for warning in found.warnings:
            typer.echo(f"warning: {warning}", err=True)


@app.command()
def prepare(
    config: Config,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="The folder of the results, made if it is missing."),
    ],
    any_function: AnyFunction = False,
    as_json: Json = False,
) -> None:
    """Prove and measure the models of CONFIG once, for images, volumes and fleets.

    A server that starts with XDG_CACHE_HOME=FOLDER finds the proofs and costs there, also where the folder is read-only. Its
    models, settings, versions and kind of processor must be the same.
    """
    _allow(any_function)
    with reported(as_json=as_json):
        from shapestream_workers.costs import prepare as prepare_models

        configure("warning", "auto")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot make {out}: {error.strerror}", param_hint="--out") from None
        reports = prepare_models(load_settings(config), out)
        lines = [line for report in reports for line in report.lines()]
        lines.append(f"serve with XDG_CACHE_HOME={out.absolute()}")
        print_answer(lines, [report.to_dict() for report in reports], as_json=as_json)
    if any(not report.calibration.is_complete for report in reports):
        raise typer.Exit(EXIT_RUNTIME)


@app.command()
def versions(
    target: Target,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """List the versions of a running server's models: traffic, answers, times, and what shadows found."""
    with reported(as_json=as_json):
        from shapestream_workers.version_lists import version_lines, versions_of_server

        found = versions_of_server(server_access(target, timeout, key, server_key))
        print_answer(version_lines(found), found, as_json=as_json)


@app.command()
def audit(
    connect: Connect,
    acknowledge: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Let the requests of this model share calls again."),
    ] = None,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """List the findings of a server's audits, by model.

    With --acknowledge, requests of a model that an audit stopped share calls again.
    """
    with reported(as_json=as_json):
        from shapestream_workers.printing import audits_of, described

        found = audits_of(server_access(connect, timeout, key, server_key), acknowledge)
        print_answer(described(found), found, as_json=as_json)


@app.command()
def why(
    connect: Connect,
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID|N",
            help="The request's id; with --slowest, the number of requests.",
            show_default=False,
        ),
    ] = "",
    slowest: Annotated[
        bool, typer.Option("--slowest", help="Show the slowest of the last ten minutes.")
    ] = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Tell why a request was slow.

    Prints its queue, its batch, padding, attempts and times.
    """
    with reported(as_json=as_json):
        from shapestream_workers.printing import lines_of, stories_from

        if slowest and request and not (request.isdecimal() and 0 < int(request) < 10_000):
            raise typer.BadParameter(f"{request!r} is not a number of requests", param_hint="--slowest")
        if not slowest and not request:
            raise typer.BadParameter("name a request's id, or add --slowest", param_hint="REQUEST_ID")
        access = server_access(connect, timeout, key, server_key)
        stories = stories_from(access, None if slowest else request, int(request or 10) if slowest else 1)
        told = "\n\n".join("\n".join(lines_of(story)) for story in stories)
        lines = [told or "no request has ended in the last ten minutes"]
        print_answer(lines, stories, as_json=as_json)


@app.command()
def stats(
    target: Target,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Show the last minute of a running server, by model.

    Prints rates, times, queues, batches, padding, slots and failures.
    """
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
    as_json: Json = False,
) -> None:
    """Show the tables of `stats` live, until q or Ctrl-C."""
    with reported(as_json=as_json):
        from shapestream_workers.stats import show_top

        show_top(server_access(target, timeout, key, server_key), once=once, as_json=as_json)


@app.command()
def reload(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|HOST:PORT",
            help="The server's YAML file, or the address of its admin port.",
            show_default=False,
        ),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the admin port's token. Default: server.admin.token_file of CONFIG.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Replace every process, as SIGHUP does, also those that would be the same."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Tell what would be replaced, and the memory and time that it needs."),
    ] = False,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Reload the configuration of a running server.

    The server reads its YAML and keys again, and replaces the workers that would be made of something else. The command
    waits for the end, and prints what changed. Exit status: 0 done; 1 refused, or not done everywhere; 2 wrong usage.
    """
    if everything and dry_run:
        raise typer.BadParameter("--all and --dry-run exclude each other")
    what = "all" if everything else "nothing" if dry_run else "changes"
    with reported(as_json=as_json):
        from shapestream_workers.reload import NoAdminPort, Refused, admin_port_of, lines_of, reload_server

        try:
            found = reload_server(admin_port_of(target, token_file), what, timeout_s=timeout)
        except NoAdminPort as error:
            raise typer.BadParameter(str(error), param_hint="CONFIG|HOST:PORT") from error
        except Refused as error:
            found = {"state": "refused", "why": error.problems}
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        for line in lines_of(found):
            typer.echo(line, err=found["state"] != "ok" or as_json)
    raise typer.Exit(EXIT_OK if found["state"] == "ok" else EXIT_RUNTIME)


@app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def health(context: typer.Context) -> None:
    """Tell by the exit status whether a server answers."""
    from shapestream_workers.health import main

    raise typer.Exit(main(context.args))


def gateway(**options: Any) -> None:
    """Serve HTTP, or gRPC, for a server that runs elsewhere.

    Clients of the Open Inference Protocol, version 2, reach the server's models. SIGTERM ends it once all requests that it
    has are answered.
    """
    read = GatewayCommand(**options)
    channel = _channel_to_parent(read.supervised)
    configure("info", "auto")
    with reported(in_log=read.supervised), _told_to_parent(channel):
        from shapestream_workers.gateways import missing_library

        if (missing := missing_library("http" if read.grpc is None else "grpc")) is not None:
            raise ConfigurationError([missing])
        from shapestream_workers.gateway_process import GatewayProcess

        status = GatewayProcess(read, channel).run()
    raise typer.Exit(status)


def tune(**options: Any) -> None:
    """Find the fastest settings of a model for recorded traffic.

    Measures strategies, static shapes, slots, threads and precisions on the model and a trace, and writes the best YAML.
    """
    read = TuneOptions(**options)
    with reported(as_json=read.as_json):
        from shapestream_workers.lab.tune import tune_file

        tune_file(read)


def simulate(**options: Any) -> None:
    """Simulate traffic on the server's own scheduler.

    Time is virtual. Prints goodput, latencies, padding, and how many slots are enough.
    """
    read = SimulateOptions(**options)
    with reported(as_json=read.as_json):
        from shapestream_workers.lab.simulate import run_simulate

        run_simulate(read)


# typer reads the options of a command from its signature.
for command, read in ((gateway, GatewayCommand), (tune, TuneOptions), (simulate, SimulateOptions)):
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
    """Print the versions of shapestream and its libraries."""
    from shapestream_workers.process import versions

    found = versions()
    print_answer((f"{name} {number}" for name, number in found.items()), found, as_json=as_json)


def _allow(any_function: bool) -> None:
    if any_function:
        from shapestream.loading.models import allow_any_function

        allow_any_function()


def _configured(config: Path, *, serves: bool = True) -> LoadedSettings:
    """Load the settings of a command that serves, and set up its log."""
    loaded = load_settings(config, serves=serves)
    configure(loaded.settings.logging.level, loaded.settings.logging.format)
    return loaded


def _only_group(loaded: LoadedSettings) -> Any:
    from shapestream.settings import WorkerGroupSettings

    if not loaded.settings.models:
        raise ConfigurationError([loaded.problem(("models",), "no models (add one; a worker needs it)")])
    return WorkerGroupSettings()
