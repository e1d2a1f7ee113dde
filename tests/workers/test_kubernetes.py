"""deploy/kubernetes: each container runs our own command line, on files that it has, with times that leave room for an end.

The objects' fields are compared with the schemas of their makers by `make kubernetes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from shapestream.settings import load_settings
from shapestream.settings.server_settings import LAME_DUCK_S
from shapestream_workers.cli import app
from shapestream_workers.gateways import STOP_GRACE_S

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
RENDERED = sorted((FOLDER / "rendered").glob("*.yaml"))
METRICS = set(re.findall(r"^\| `(shapestream_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def things(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """The objects of these kinds in a rendered file."""
    return [thing for thing in yaml.safe_load_all(path.read_text()) if thing["kind"] in kinds]


def pods(path: Path) -> Iterator[dict[str, Any]]:
    """The specs of all pods in a rendered file."""
    for thing in things(path, "Deployment", "StatefulSet"):
        yield thing["spec"]["template"]["spec"]
    for thing in things(path, "ServingRuntime"):
        yield thing["spec"]


def containers(path: Path) -> Iterator[dict[str, Any]]:
    """All containers of a rendered file, the first ones, which prepare, too."""
    for pod in pods(path):
        yield from (*pod.get("initContainers", ()), *pod["containers"])


def rendered(test: Any) -> Any:
    """For each rendered file."""
    return pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)(test)


def test_every_folder_is_rendered() -> None:
    """A folder that is not would be compared with nothing."""
    folders = {path.parent.name for path in FOLDER.glob("*/kustomization.yaml")}
    assert folders == {path.stem for path in RENDERED}


@rendered
def test_every_container_runs_a_command_that_exists(path: Path) -> None:
    """With options that it takes: the command line itself reads them."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    found = list(containers(path))
    assert found
    for container in found:
        command, *arguments = container["args"]
        group.commands[command].make_context(command, arguments)  # type: ignore[attr-defined] # raises UsageError


@rendered
def test_the_server_s_file_is_one_that_check_reads(path: Path, tmp_path: Path) -> None:
    """And every file that it names lies in a volume of the pod that serves."""
    for config in things(path, "ConfigMap"):
        file = tmp_path / "server.yaml"
        file.write_text(config["data"]["server.yaml"])
        settings = load_settings(file, files_must_exist=False, serves=False).settings
        server = next(container for container in containers(path) if container["args"][0] == "serve")
        mounted = [mount["mountPath"] for mount in server["volumeMounts"]]
        named = re.findall(r"(?<=[ /])/[a-z][\w/.-]+", config["data"]["server.yaml"])
        assert named
        assert [] == [name for name in named if not any(name.startswith(place) for place in mounted)]
        assert not settings.server.listen[0].startswith("tcp")


@rendered
def test_a_pod_has_the_time_to_end(path: Path) -> None:
    """The lame duck, the grace of what was accepted, and the end of workers and gateways."""
    settings = load_settings(ROOT / "configs" / "function.yaml").settings.server
    longest_s = LAME_DUCK_S + settings.grace_s + STOP_GRACE_S + 5
    for pod in pods(path):
        if "terminationGracePeriodSeconds" in pod:
            assert longest_s < pod["terminationGracePeriodSeconds"]
            assert (
                f"terminationGracePeriodSeconds: {pod['terminationGracePeriodSeconds']}"
                in (ROOT / "docs" / "reliability.md").read_text()
            )
        else:  # KServe's own object has it, which the runtime's file says
            said = re.search(
                r"terminationGracePeriodSeconds: (\d+)",
                (FOLDER / "kserve" / "serving-runtime.yaml").read_text(),
            )
            assert said is not None
            assert longest_s < int(said[1])


@rendered
def test_readiness_is_noticed_within_half_of_the_lame_duck(path: Path) -> None:
    """Later, callers would still be sent to a server that leaves; over gRPC half of the time counts."""
    for container in containers(path):
        if (probe := container.get("readinessProbe")) is not None:
            assert probe["periodSeconds"] * probe["failureThreshold"] < LAME_DUCK_S / 2


@rendered
def test_probes_and_services_name_ports_that_are_there(path: Path) -> None:
    """Of the pods that they are for; and an address of the server has each port."""
    served = [container for container in containers(path) if container["args"][0] != "prepare"]
    ports = {port["name"]: port["containerPort"] for container in served for port in container["ports"]}
    for service in things(path, "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
    for monitor in things(path, "PodMonitor"):
        assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} <= set(ports)
    texts = " ".join(
        [config["data"]["server.yaml"] for config in things(path, "ConfigMap")]
        + [argument for container in served for argument in container["args"]]
    )
    listened = {int(port) for port in re.findall(r"0\.0\.0\.0:(\d+)", texts)}
    assert set(ports.values()) <= listened
    for container in served:
        for name, probe in container.items():
            if name.endswith("Probe"):
                assert probe["httpGet"]["path"] in ("/health/ready", "/health/live")
                assert probe["httpGet"]["port"] in (*ports, *listened)


@rendered
def test_no_container_has_more_rights_than_it_needs(path: Path) -> None:
    """No root, no writing outside volumes, no capabilities; keys are read by the group of the pod."""
    for pod in pods(path):
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            context = container["securityContext"]
            assert (False, True) == (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"])
            assert ["ALL"] == context["capabilities"]["drop"]
            assert (pod.get("securityContext") or context)["runAsNonRoot"] is True
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= {
                volume["name"] for volume in pod["volumes"]
            }
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert 0o440 == volume["secret"]["defaultMode"]
                assert pod["securityContext"]["fsGroup"]


@rendered
def test_the_queries_ask_for_metrics_that_exist(path: Path) -> None:
    """A renamed metric would let an autoscaler sleep."""
    for scaled in things(path, "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            names = set(re.findall(r"shapestream_\w+", trigger["metadata"]["query"]))
            assert names
            assert names <= METRICS
        (target,) = [
            thing
            for thing in things(path, "Deployment")
            if thing["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]
        ]
        assert target


@rendered
def test_a_pod_prepares_with_what_it_serves_with(path: Path) -> None:
    """Verdicts and costs count for the same number of threads, which follows from the limit."""
    for pod in pods(path):
        for prepares in pod.get("initContainers", ()):
            (serves,) = pod["containers"]
            assert prepares["resources"] == serves["resources"]
            assert prepares["image"] == serves["image"]
            assert prepares["volumeMounts"] == serves["volumeMounts"]
