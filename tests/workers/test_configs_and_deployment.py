"""Every file in configs/ and deploy/ is used here as a user would: read, and where it can be, run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.image_source import copy_source, instructions
from typer.testing import CliRunner

from shapestream.settings import json_schema, load_settings
from shapestream.settings.loader import REMOVED
from shapestream.settings.server_settings import LAME_DUCK_S
from shapestream_workers.cli import app
from shapestream_workers.gateways import STOP_GRACE_S

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
COMMANDS = {
    command.name or command.callback.__name__ for command in app.registered_commands if command.callback
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_is_accepted(path: Path) -> None:
    """Model files are made when they are needed, so they alone may be missing."""
    assert path == load_settings(path, files_must_exist=False).path


def test_the_examples_of_this_project_are_among_them() -> None:
    """A renamed file would otherwise leave these tests in silence."""
    assert {
        "demo.yaml",
        "embeddings.yaml",
        "function.yaml",
        "minimal.yaml",
        "ocr.yaml",
        "reading.yaml",
        "text.yaml",
        "workers_dial_in.yaml",
    } <= {path.name for path in CONFIGS}


def test_the_configuration_that_needs_no_model_file_runs() -> None:
    """`check` compiles and runs the function of configs/function.yaml."""
    ran = CliRunner().invoke(app, ["check", str(ROOT / "configs" / "function.yaml"), "--json"])
    assert 0 == ran.exit_code, ran.output
    report = json.loads(ran.stdout)
    assert ("sort", []) == (report["models"][0]["signature"]["name"], report["problems"])
    assert "batch 1, length 1: sorted [1, 1]" in report["models"][0]["calls"]


def test_the_schema_beside_the_configurations_is_up_to_date() -> None:
    """`shapestream schema > configs/shapestream.schema.json` after a change of the settings."""
    assert json_schema() == json.loads((ROOT / "configs" / "shapestream.schema.json").read_text())


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_KEYS, MOST_NAMES = 110, 98
ANOTHER_S = {"apiVersion", "readinessProbe"}
"""First keys of YAML that Kubernetes reads."""


def _file_with(block: str) -> str | None:
    """A whole configuration with a block of a page, which may be a part of one; None for what another program reads."""
    first, *_ = found = yaml.safe_load(block)
    if first in ANOTHER_S:
        return None
    if first not in json_schema()["properties"]:  # the keys of a model
        return yaml.safe_dump({"models": [{"name": "m", "path": "m.onnx"} | found]})
    if {"models", "chains"}.isdisjoint(found):
        return block + "models: [{name: sentences, path: m.onnx}, {name: question, path: m.onnx}]\n"
    return block


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
    ],
)
def test_the_yaml_of_the_documentation_is_accepted(block: str, tmp_path: Path) -> None:
    """Each YAML block of a page is a file that `check` would read, or a part of one."""
    text = _file_with(block)
    if text is None:
        return
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert load_settings(path, files_must_exist=False).settings.models


@pytest.mark.parametrize(
    "rule", sorted({rule for page in PAGES for rule in re.findall(r"`(\{rule:[^`]*\})`", page.read_text())})
)
def test_the_rules_of_the_documentation_are_accepted(rule: str, tmp_path: Path) -> None:
    """Each rule that a page names stands in a file that `check` would read."""
    output = yaml.safe_load(rule.replace(", …", ""))
    led = {"rule": "index_column" if output["rule"] in ("with", "recount") else "rows"}
    whole = {"shape": "n, 4", "element_type": "i64"}
    function = output["rule"] in ("list", "whole")
    model = {
        "name": "m",
        **(
            {"function": "a:b", "inputs": {"x": {"shape": "boxes, 4", "element_type": "f32"}}}
            if function
            else {}
        ),
        **({} if function else {"path": "m.onnx"}),
        "outputs": {"y": output | (whole if function else {})}
        | ({output["output"]: led} if "output" in output else {}),
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"models": [model]}))
    (loaded,) = load_settings(path, files_must_exist=False).settings.models
    arguments = loaded.outputs["y"].rule_arguments()
    assert arguments is not None
    assert output == {key: value for key, value in arguments.items() if key != "of"}


def _keys() -> set[tuple[str, str]]:
    """Each key of the schema with its description. One that several sections have with one meaning is there once."""
    schema = json_schema()
    return {
        (key, value.get("description", ""))
        for section in [schema, *schema["$defs"].values()]
        for key, value in section["properties"].items()
    }


def test_every_setting_is_documented() -> None:
    """docs/configuration.md names every key of the schema."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    missing = sorted(key for key, _ in _keys() if not re.search(rf"\b{key}\b", page))
    assert [] == missing


def test_there_are_few_settings() -> None:
    """A key counts once for each of its meanings (108), and a name once for all sections (96). A new one needs a reason."""
    assert MOST_KEYS >= len(_keys())
    assert MOST_NAMES >= len({key for key, _ in _keys()})


def test_every_removed_setting_is_documented() -> None:
    """docs/decisions.md has each in its table, with its sections."""
    table = (ROOT / "docs" / "decisions.md").read_text().partition("## Settings that were removed")[2]
    assert [] == [key for key in REMOVED if not re.search(rf"`([a-z.*]+\.)?{key.rpartition('.')[2]}`", table)]


def test_every_command_is_documented() -> None:
    """docs/cli.md has a heading with each command."""
    page = (ROOT / "docs" / "cli.md").read_text()
    assert {
        "serve",
        "serve-folder",
        "worker",
        "check",
        "audit",
        "gateway",
        "health",
        "reload",
        "infer",
        "models",
        "prepare",
        "run",
        "stats",
        "top",
        "tune",
        "simulate",
        "schema",
        "version",
        "versions",
        "why",
    } == COMMANDS
    assert [] == sorted(
        command for command in COMMANDS if not re.search(rf"^## .*`shapestream {command}\b", page, re.M)
    )


def unit() -> dict[str, str]:
    """The settings of the systemd unit."""
    lines = (ROOT / "deploy" / "shapestream.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def image() -> dict[str, str]:
    """The last line of the Dockerfile with each instruction."""
    return dict(instructions())


def test_the_systemd_unit_runs_a_command_that_exists() -> None:
    """And its time-out, and those that a page names, leave room for an end; its restarts respect the exit statuses."""
    settings_of_unit = unit()
    program, command, config = shlex.split(settings_of_unit["ExecStart"])
    assert ("shapestream", True, ".yaml") == (Path(program).name, command in COMMANDS, Path(config).suffix)
    assert [program, "reload", config] == shlex.split(settings_of_unit["ExecReload"])
    assert "2 3" == settings_of_unit["RestartPreventExitStatus"]
    assert "mixed" == settings_of_unit["KillMode"], "workers are stopped by the server, in order"
    assert ("notify", True) == (settings_of_unit["Type"], int(settings_of_unit["WatchdogSec"]) > 0)
    settings = load_settings(ROOT / "configs" / "function.yaml").settings
    longest_s = int(settings_of_unit["TimeoutStopSec"])
    assert LAME_DUCK_S + settings.server.grace_s + STOP_GRACE_S + 5 < longest_s
    page = (ROOT / "docs" / "reliability.md").read_text()
    for line in ("TimeoutStopSec={}", "terminationGracePeriodSeconds: {}", "stop_grace_period: {}s"):
        assert line.format(longest_s) in page


def test_the_systemd_unit_keeps_the_caches() -> None:
    """The service has no home: its cache folder is systemd's, and it is the one that the programs look for."""
    settings = unit()
    assert ("shapestream", "XDG_CACHE_HOME=/var/cache") == (
        settings["CacheDirectory"],
        settings["Environment"],
    )
    assert "yes" == settings["ProtectHome"]


def test_the_image_runs_a_command_that_exists() -> None:
    """Entry point, default command and health check are this command line; nothing runs as root, by a number."""
    words = image()
    assert ["shapestream"] == yaml.safe_load(words["ENTRYPOINT"])
    assert yaml.safe_load(words["CMD"])[0] in COMMANDS
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", words["USER"]), "Kubernetes tells root by the number"
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for source in re.findall(r"--from=build,?.*?/source/(\S+)", text):
        assert (ROOT / source).exists(), f"{source}, which the image copies, is gone"


def test_the_image_keeps_the_caches() -> None:
    """They are in a volume, below the folder that the programs look for."""
    words = image()
    assert "XDG_CACHE_HOME=/var/cache" == words["ENV"]
    assert {"/run/shapestream", "/var/cache/shapestream"} == set(words["VOLUME"].split())


def test_the_health_check_of_the_image_fails_without_a_server() -> None:
    """Run as it stands, where no server is: status 1. It has a limit of its own, within that of the image."""
    options, command = image()["HEALTHCHECK"].split("CMD", 1)
    program, *arguments = yaml.safe_load(command)
    assert "shapestream" == program
    # The address is that of the image; nobody listens at it here.
    ran = subprocess.run(
        [sys.executable, "-m", "shapestream_workers", *arguments], capture_output=True, check=False
    )
    assert 1 == ran.returncode
    limit_s = float(arguments[arguments.index("--timeout") + 1])
    assert limit_s < float(re.search(r"--timeout=(\d+)s", options)[1])  # type: ignore[index] # it is there


def test_the_image_is_built_from_what_the_ignore_file_lets_through(tmp_path: Path) -> None:
    """The files that it admits are enough for the wheel; keys, models and caches beside them are not among them."""
    copy_source(tmp_path)
    assert not {"keys", "tests", ".git", ".venv"} & {path.name for path in tmp_path.iterdir()}
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package `build` is not installed")
    ran = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    assert 1 == len(list((tmp_path / "dist").glob("shapestream-*.whl")))


def test_the_composition_fits_together() -> None:
    """As text, since no test starts containers: files that are mounted are there, ports differ, and its server has time."""
    deploy = ROOT / "deploy"
    text = (deploy / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    of_the_user = {"./models", "./server.yaml"}
    assert [] == [name for name in mounted if name not in of_the_user and not (deploy / name).exists()]
    assert (deploy / "compose.yaml").parent / services["server"]["build"]["context"] == deploy / ".."
    scraped = yaml.safe_load((deploy / "prometheus" / "compose.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert f"admin: {target}" in text
    listens = services["prometheus"]["command"][1].partition("=")[2]
    assert listens != target
    (source,) = yaml.safe_load(
        (deploy / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    assert source["url"] == f"http://{listens}"
    example = "\n".join(
        line[4:] for line in text.splitlines() if line.startswith(("#   server:", "#   models:"))
    )
    assert {"server", "models"} == set(yaml.safe_load(example))
    assert (
        f"stop_grace_period: {services['server']['stop_grace_period']}"
        in (ROOT / "docs" / "reliability.md").read_text()
    )
