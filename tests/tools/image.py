"""The image of deploy/Dockerfile, built and run: `make image`.

Where docker or podman can build, they do, and its container has a read-only root file system. Elsewhere the Dockerfile's
instructions are carried out one after the other in a copy of this machine's files: an overlay in a mount namespace of its
own, with this Python in place of the base image's, which then becomes read-only. That needs root. Either way in_image.py
runs inside, as the image's user, without HOME, with a token of root's that a supplementary group may read (`fsGroup`).

It prints `image: N passed, 0 failed`, or `not run: ` and the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.image_source import ROOT, copy_source, instructions
from tests.onnx_files import write_scaling
from tests.text_folders import write_folder

GROUP = 20001
"""Of the token's file: `fsGroup` of a pod."""
TAG = "shapestream-image-test"
CONFIG = """\
server:
  listen: [ipc:///run/shapestream/server.sock]
  http: {address: "127.0.0.1:0", token_file: secrets/tokens, texts: sentences}
  grpc: {address: "127.0.0.1:0", token_file: secrets/tokens}
models:
  - {name: scaling, path: models/scaling.onnx}
  - {name: sentences, path: models/sentences}
workers: [{count: 1, slots: 1}]
"""


def write_site(folder: Path) -> None:
    """Writes what a user mounts: the YAML, the models, the token; and the program that runs inside."""
    (folder / "models").mkdir(parents=True)
    write_scaling(folder / "models" / "scaling.onnx", 3.0)
    write_folder(folder / "models" / "sentences")
    (folder / "server.yaml").write_text(CONFIG)
    shutil.copy(Path(__file__).with_name("in_image.py"), folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "secrets").mkdir()
    token = folder / "secrets" / "tokens"
    token.write_text("shop secret-word\n")
    os.chown(token, 0, GROUP)
    token.chmod(0o440)


def arguments() -> list[str]:
    """Of in_image.py: what the image runs, its health check, and its user."""
    words = dict(instructions())
    command = yaml.safe_load(words["ENTRYPOINT"]) + yaml.safe_load(words["CMD"])
    health = yaml.safe_load(words["HEALTHCHECK"].partition("CMD")[2])
    return [shlex.join(command), shlex.join(health), words["USER"].partition(":")[0]]


def builder() -> str | None:
    """A program that can build images here."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "info"], capture_output=True, check=False).returncode
        ):
            return name
    return None


def run_container(program: str, site: Path) -> int:
    """Builds the image, and runs it as a cluster would: read-only, with volumes and /tmp."""
    subprocess.run([program, "build", "-f", "deploy/Dockerfile", "-t", TAG, "."], cwd=ROOT, check=True)
    options = ["--rm", "--init", "--read-only", "--tmpfs", "/tmp", "--group-add", str(GROUP)]
    options += ["--volume", f"{site}:/etc/shapestream:ro", "--entrypoint", "env"]
    inside = ["-u", "HOME", "python", "/etc/shapestream/in_image.py", *arguments()]
    return subprocess.run([program, "run", *options, TAG, *inside], check=False).returncode


class Steps:
    """The Dockerfile's instructions, as lines of a shell that has a mount namespace of its own."""

    def __init__(self, root: Path, source: Path) -> None:
        self._root = root
        self._source = source
        self._path = "/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._folder = "/"
        self._variables: dict[str, str] = {}
        self._volumes: list[str] = []
        self._user = "0:0"
        self.lines: list[str] = []

    def add(self, name: str, words: str) -> None:
        """Add an instruction. Those that only describe the image are left to in_image.py."""
        match name:
            case "WORKDIR":
                self._folder = words
                self.lines.append(f"mkdir -p {self._at(words)}")
            case "COPY" if words.startswith("--from=build "):
                _, origin, target = words.split()
                self.lines.append(f"cp {self._at(origin)} {self._at(target)}")
            case "COPY":
                assert words == ". .", words
                self.lines.append(f"cp -r {self._source}/. {self._at(self._folder)}")
            case "RUN":
                # What a mount would show stands in the one root anyway: both stages have it.
                command = re.sub(r"^(--mount=\S+\s+)+", "", words)
                self.lines.append(self._inside("0:0", "", f"cd {self._folder} && {command}"))
            case "ENV":
                self._variables |= dict([words.split("=", 1)])
            case "VOLUME":
                self._volumes += words.split()
            case "USER":
                self._user = words
            case "FROM" | "STOPSIGNAL" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
                pass
            case _:
                raise AssertionError(f"{name} of the Dockerfile is not carried out here")

    def begin(self) -> None:
        """Make the copy of the machine's files, with an environment of Python's as the base image has one."""
        root, python = self._root, Path(sys.executable).resolve()
        layers = root.parent / "layers"
        self.lines += [
            "set -e",
            f"mkdir -p {root} {layers}",
            # A file system of its own: an overlay's upper layer may not lie in its lower one.
            f"mount -t tmpfs none {layers}",
            f"mkdir {layers}/upper {layers}/work",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={layers}/upper,workdir={layers}/work {root}",
            *(f"mount --rbind /{name} {root}/{name}" for name in ("proc", "sys", "dev")),
            f"mount -t tmpfs -o mode=1777 none {root}/tmp",
            # Files of the network's may be mounts over those of the root file system.
            f"for file in resolv.conf hosts; do cp --remove-destination /etc/$file {root}/etc/; done",
            # Python may be in a folder of root's own.
            *(f"chmod o+x {root}{folder}" for folder in python.parents if folder != Path("/")),
            self._inside("0:0", "", f"{python} -m venv /venv"),
        ]

    def end(self, site: Path) -> None:
        """Take away what only the build had, and run in_image.py where nothing but volumes and /tmp can be written."""
        root = self._root
        owner = f"uid={self._user.partition(':')[0]},gid={self._user.partition(':')[2]}"
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self._variables.items())
        command = shlex.join(["python", "/etc/shapestream/in_image.py", *arguments()])
        self.lines += [
            f"rm -r {root}/wheels {root}/source",
            f"cp -a {site}/. {root}/etc/shapestream",
            f"umount {root}/tmp",
            f"mount -o remount,ro {root}",
            f"mount -t tmpfs -o mode=1777 none {root}/tmp",
            *(f"mount -t tmpfs -o mode=0750,{owner} none {root}{volume}" for volume in self._volumes),
            self._inside(self._user, variables, f"cd {self._folder} && exec {command}"),
        ]

    def _at(self, path: str) -> str:
        return f"{self._root}{path}"

    def _inside(self, user: str, variables: str, command: str) -> str:
        """The line that runs a command in the root: as root with what pip reads, else without a variable but PATH."""
        as_user = f"--userspec={user} --groups={GROUP if user != '0:0' else 0}"
        environment = "env -i" if user != "0:0" else "env"
        return (
            f"chroot {as_user} {self._root} {environment} PATH={self._path} {variables} "
            f"bash -ec {shlex.quote(command)}"
        )


def why_not() -> str | None:
    """Return why the steps cannot be carried out on this machine, if so."""
    if os.geteuid() != 0:
        return "no docker or podman can build here, and only root can make an overlay"
    with tempfile.TemporaryDirectory() as name:
        layers = f"mount -t tmpfs none {name} && cd {name} && mkdir u w r"
        mount = f"{layers} && mount -t overlay overlay -o lowerdir=/,upperdir=u,workdir=w r"
        check = f"{mount} && test -x r{Path(sys.executable).resolve()}"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", check], capture_output=True, text=True, check=False
        )
    return f"no overlay of this machine's files: {done.stderr.strip()}" if done.returncode else None


def carry_out(folder: Path, site: Path) -> int:
    """Carries the steps out, and returns the exit status of in_image.py."""
    copy_source(folder / "source")
    steps = Steps(folder / "root", folder / "source")
    steps.begin()
    for name, words in instructions():
        steps.add(name, words)
    steps.end(site)
    environment: dict[str, Any] = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "2"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
        environment.pop(name, None)
    script = folder / "steps.sh"
    script.write_text("\n".join(steps.lines) + "\n")
    return subprocess.run(["unshare", "-m", "bash", str(script)], env=environment, check=False).returncode


def main() -> int:
    """Builds and runs the image, by a builder or step by step."""
    program = builder()
    if program is None and (reason := why_not()) is not None:
        print(f"not run: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_site(folder / "site")
        if program is not None:
            return run_container(program, folder / "site")
        return carry_out(folder, folder / "site")


if __name__ == "__main__":
    sys.exit(main())
