"""Every file in configs/ and deploy/ is used here as a user would: read, and where it can be, run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from shapestream.settings_loader import load_settings
from shapestream.settings_messages import json_schema
from shapestream_workers.cli import app

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
    assert {"demo.yaml", "embeddings.yaml", "function.yaml", "minimal.yaml", "workers_dial_in.yaml"} <= {
        path.name for path in CONFIGS
    }


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


def test_the_yaml_of_the_documentation_is_accepted(tmp_path: Path) -> None:
    """Each YAML block of docs/configuration.md and of the README is a file that `check` would read."""
    blocks = [
        block
        for page in ("docs/configuration.md", "docs/security.md", "README.md")
        for block in re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    ]
    assert len(blocks) >= 3
    for block in blocks:
        path = tmp_path / "x.yaml"
        path.write_text(block)
        assert load_settings(path, files_must_exist=False).settings.models


def test_every_setting_is_documented() -> None:
    """docs/configuration.md names every key of the schema."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    schema = json_schema()
    keys = {key for definition in schema["$defs"].values() for key in definition["properties"]} | set(
        schema["properties"]
    )
    missing = sorted(key for key in keys if not re.search(rf"\b{key}\b", page))
    assert [] == missing


def test_every_command_is_documented() -> None:
    """docs/cli.md has a heading with each command."""
    page = (ROOT / "docs" / "cli.md").read_text()
    assert {
        "serve",
        "worker",
        "check",
        "infer",
        "models",
        "tune",
        "simulate",
        "schema",
        "version",
    } == COMMANDS
    assert [] == sorted(
        command for command in COMMANDS if not re.search(rf"^## .*`shapestream {command}\b", page, re.M)
    )


def test_the_systemd_unit_runs_a_command_that_exists() -> None:
    """And its time-out leaves room for the default grace, its restarts respect the exit statuses."""
    unit = dict(
        line.split("=", 1)
        for line in (ROOT / "deploy" / "shapestream.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    program, command, config = shlex.split(unit["ExecStart"])
    assert ("shapestream", True, ".yaml") == (Path(program).name, command in COMMANDS, Path(config).suffix)
    assert "2 3" == unit["RestartPreventExitStatus"]
    assert "mixed" == unit["KillMode"], "workers are stopped by the server, in order"
    settings = load_settings(ROOT / "configs" / "function.yaml").settings
    assert int(unit["TimeoutStopSec"]) > settings.server.grace_s + 5


def test_the_image_runs_a_command_that_exists() -> None:
    """Entry point, default command and health check are this command line, and nothing runs as root."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = {line.split()[0]: line for line in lines if line and not line.startswith("#")}
    assert ["shapestream"] == yaml.safe_load(words["ENTRYPOINT"].removeprefix("ENTRYPOINT"))
    assert yaml.safe_load(words["CMD"].removeprefix("CMD"))[0] in COMMANDS
    health = yaml.safe_load(words["HEALTHCHECK"].split("CMD", 1)[1])
    assert ("shapestream", True) == (health[0], health[1] in COMMANDS)
    assert "USER shapestream" == words["USER"]
    for source in re.findall(r"--from=build,?.*?/source/(\S+)", "\n".join(lines)):
        assert (ROOT / source).exists(), f"{source}, which the image copies, is gone"
