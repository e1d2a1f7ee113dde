"""`make kubernetes`: deploy/kubernetes against the schemas of Kubernetes, the Prometheus operator and KEDA. No cluster.

It runs in an environment of its own, which has the schemas. The rendered files are compared with what `kubectl kustomize`
makes of the others; where there is no kubectl, it says so. The last line tells what was done; status 1: something differs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
RENDERED = FOLDER / "rendered"
VERSION = "1.32"
OPERATORS: Mapping[str, Any] = {"PodMonitor": PodMonitor, "ScaledObject": ScaledObject}

# The fields that serve here, with their types, of ServingRuntimeSpec and SupportedModelFormat in KServe,
# pkg/apis/serving/v1alpha1/servingruntime_types.go at 0217bdab (2026). Containers and volumes are checked as a pod's.
RUNTIME = {
    "annotations": dict,
    "labels": dict,
    "supportedModelFormats": list,
    "protocolVersions": list,
    "multiModel": bool,
    "containers": list,
    "volumes": list,
}
MODEL_FORMAT = {"name": str, "version": str, "autoSelect": bool, "priority": int}


def problems_of(thing: dict[str, Any]) -> Iterator[str]:
    """Whatever a cluster would refuse, or drop in silence."""
    kind = thing["kind"]
    if kind in OPERATORS:
        read = OPERATORS[kind].model_validate(thing).model_dump(by_alias=True, exclude_none=True, mode="json")
        if read != thing:  # an unknown field is not read back
            yield f"{kind}: reads back as {read}"
    elif kind == "ServingRuntime":
        yield from problems_of_runtime(thing)
    else:
        try:
            kubernetes_validate.validate(thing, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{kind}: {error.message}"


def problems_of_runtime(thing: dict[str, Any]) -> Iterator[str]:
    """Those of KServe's kind, for which no package has a schema."""
    spec = thing["spec"]
    for fields, known in (
        (spec, RUNTIME),
        *((entry, MODEL_FORMAT) for entry in spec["supportedModelFormats"]),
    ):
        for name, value in fields.items():
            if not isinstance(value, known.get(name, ())):
                yield f"ServingRuntime: {name}: unknown, or of a wrong type"
    pod = {key: spec[key] for key in ("containers", "volumes") if key in spec}
    yield from problems_of({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": pod})


def things() -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects of the rendered files, each with the file's name."""
    for path in sorted(RENDERED.glob("*.yaml")):
        for thing in yaml.safe_load_all(path.read_text()):
            yield path.stem, thing


def is_caught(thing: dict[str, Any]) -> bool:
    """Whether a field that nobody knows is found in it."""
    place = "data" if thing["kind"] == "ConfigMap" else "spec"
    wrong = {**thing, place: {**thing[place], "notAField": {}}}
    return any(True for _ in problems_of(wrong))


def main() -> int:
    """Print what differs, and a last line with the sums."""
    found = [f"{name}: {problem}" for name, thing in things() for problem in problems_of(thing)]
    found += [
        f"{name}: {thing['kind']} with a wrong field passes"
        for name, thing in things()
        if not is_caught(thing)
    ]
    kubectl = shutil.which("kubectl")
    for path in sorted(RENDERED.glob("*.yaml")) if kubectl else ():
        made = subprocess.run(
            [kubectl, "kustomize", FOLDER / path.stem], capture_output=True, text=True, check=False
        )
        if made.stdout != path.read_text():
            found.append(f"{path.stem}: kubectl kustomize gives another file {made.stderr.strip()}".rstrip())
    print("\n".join(found), end="\n" if found else "")
    rendering = "as kubectl kustomize renders them" if kubectl else "rendering not run: no kubectl"
    number = sum(1 for _ in things())
    print(f"kubernetes: {number} objects, {len(found)} problems; {rendering}")
    return 1 if found or not number else 0


if __name__ == "__main__":
    sys.exit(main())
