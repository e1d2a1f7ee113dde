"""From the YAML to the options of a server: what is said there arrives, and what is not has its default."""

from __future__ import annotations

from pathlib import Path

from shapestream.serving.models import ModelOptions
from shapestream.serving.options import ServerOptions
from shapestream.settings_loader import load_settings
from shapestream_workers.serve import server_options

MODELS = "models: [{name: m, path: m.xml}]\n"


def options_of(folder: Path, text: str) -> ServerOptions:
    """The options of a server with this YAML, for which no model need exist."""
    path = folder / "x.yaml"
    path.write_text(text)
    return server_options(load_settings(path, files_must_exist=False).settings, None)


def test_batches_are_sent_ahead_unless_the_yaml_says_otherwise(tmp_path: Path) -> None:
    """`server.prefetch`."""
    assert options_of(tmp_path, MODELS).prefetch is True
    assert options_of(tmp_path, "server: {prefetch: false}\n" + MODELS).prefetch is False


def test_the_bytes_of_a_batch_can_be_limited(tmp_path: Path) -> None:
    """`batching.max_batch_bytes`, in the units that people write."""
    limited = "models: [{name: m, path: m.xml, batching: {max_batch_bytes: 16 MiB}}]\n"
    assert 16 << 20 == options_of(tmp_path, limited).models["m"].max_batch_bytes
    unlimited = options_of(tmp_path, MODELS).models["m"]
    assert unlimited.max_batch_bytes is ModelOptions().max_batch_bytes is None
