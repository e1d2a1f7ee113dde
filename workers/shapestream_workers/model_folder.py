"""`shapestream serve-folder`: the configuration of a server for the one model in a folder, as KServe mounts it.

The folder is a text model (sentence-transformers, optimum), or holds one model file, at its top or one level below: a
Triton repository's `1/model.onnx`, or `openvino/openvino_model.xml`. Of one model in two formats the OpenVINO IR is taken.
All else is as in a YAML with that model's name and path alone; a text model is also there for clients of OpenAI and others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from shapestream.errors import ConfigurationError
from shapestream.settings.folders import has_text_model
from shapestream_engine.backends.registry import ENGINES_OF_SUFFIX

_MOST_NAMED = 5
"""Files that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderServer:
    """What `serve-folder` was asked for: addresses are `HOST:PORT`, or None for no such port."""

    folder: Path
    name: str
    http: str | None = None
    grpc: str | None = None
    admin: str | None = None
    token_file: Path | None = None
    """The callers of both gateways; needed beyond loopback, unless the network keeps strangers away."""
    is_open: bool = False
    """True where the network keeps strangers away."""

    def configuration(self, socket: Path) -> dict[str, Any]:
        """Return the values of a YAML. `socket`: where the server listens for its gateways."""
        tokens = {} if self.token_file is None else {"token_file": str(self.token_file.absolute())}
        server: dict[str, Any] = {"listen": [f"ipc://{socket}"]}
        for face, address in (("http", self.http), ("grpc", self.grpc)):
            if address is not None:
                server[face] = {"address": address, **tokens}
        model = model_in(self.folder)
        if self.http is not None and model.is_dir():
            server["http"]["texts"] = True
        if self.admin is not None:
            server["admin"] = self.admin
        if self.is_open:
            server["security"] = "network"
        return {"server": server, "models": [{"name": self.name, "path": str(model)}]}


@contextmanager
def written(asked: FolderServer) -> Iterator[Path]:
    """Write the YAML, which workers and reloads read too, into a private folder that goes at the end."""
    if asked.http is None and asked.grpc is None:
        raise ConfigurationError(["no port for requests: give --http or --grpc, HOST:PORT"])
    with TemporaryDirectory(prefix="shapestream-") as private:
        path = Path(private, "server.yaml")
        path.write_text(yaml.safe_dump(asked.configuration(Path(private, "server.sock")), sort_keys=False))
        yield path


def model_in(folder: Path) -> Path:
    """Return the path of the model in a folder: the folder itself for a text model, else its model file.

    Raises `ConfigurationError` where there is none, or several.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise ConfigurationError([f"{folder}: no such folder"])
    if has_text_model(folder):
        return folder
    files = sorted(
        path for depth in ("*", "*/*") for path in folder.glob(depth) if path.suffix in ENGINES_OF_SUFFIX
    )
    if not files:
        raise ConfigurationError(
            [f"{folder}: no model in it ({', '.join(ENGINES_OF_SUFFIX)}, or the files of a text model)"]
        )
    for suffix in ENGINES_OF_SUFFIX:  # of one model in several formats, the first
        chosen = [path for path in files if path.suffix == suffix]
        if len(chosen) == 1:
            return chosen[0]
    named = ", ".join(str(path.relative_to(folder)) for path in files[:_MOST_NAMED])
    raise ConfigurationError([f"{folder}: {len(files)} models ({named}): name one folder for each"])
