"""From the YAML to the options of a server: what is said there arrives, and what is not has its default."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from shapestream.errors import ConfigurationError
from shapestream.serving.models import ModelOptions
from shapestream.serving.options import ServerOptions
from shapestream.settings import load_settings
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


def test_when_a_batch_hangs_can_be_said_per_model(tmp_path: Path) -> None:
    """`batching.hang_after_s`: seconds, `off`, or by what batches usually take."""
    for text, expected in (("60", 60.0), ("off", inf), ("auto", None)):
        said = f"models: [{{name: m, path: m.xml, batching: {{hang_after_s: {text}}}}}]\n"
        assert expected == options_of(tmp_path, said).models["m"].hang_after_s


@pytest.mark.parametrize("text", ["0", "-1", ".inf", "true", '"60"', "never"])
def test_a_limit_for_hangs_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    """With the words to write instead."""
    with pytest.raises(ConfigurationError, match="write auto, off, or a number"):
        options_of(tmp_path, f"models: [{{name: m, path: m.xml, batching: {{hang_after_s: {text}}}}}]\n")


@pytest.mark.parametrize(("server", "batching"), [("hang_min_s: 3", "{}"), ("", "{hang_after_s: 2}")])
def test_where_workers_dial_in_they_are_lost_before_they_hang(
    tmp_path: Path, server: str, batching: str
) -> None:
    """Their connection may break; over the private socket of the server's own workers it does not."""
    models = f"models: [{{name: m, path: m.xml, batching: {batching}}}]\n"
    options_of(tmp_path, f"server: {{{server}}}\n" + models)
    with pytest.raises(ConfigurationError, match="else a broken connection passes for a request that hangs"):
        options_of(tmp_path, f"server: {{worker_listen: tcp://127.0.0.1:0, {server}}}\n" + models)


def test_the_default_for_hangs_leaves_room_for_silence(tmp_path: Path) -> None:
    """Ten seconds, or twice the silence after which a worker counts as lost."""
    assert 10.0 == options_of(tmp_path, MODELS).hang_min_s
    assert 40.0 == options_of(tmp_path, "server: {worker_silence_s: 20}\n" + MODELS).hang_min_s


def test_hangs_and_quarantine_arrive_at_the_server(tmp_path: Path) -> None:
    """`server.hang_*` and `server.quarantine_*`."""
    said = "{hang_min_s: 20, hang_grace_s: 2, quarantine_requests: 3, quarantine_s: 4}"
    options = options_of(tmp_path, f"server: {said}\n" + MODELS)
    found = (options.hang_min_s, options.hang_grace_s, options.quarantine_requests, options.quarantine_s)
    assert (20, 2, 3, 4) == found


def test_the_bytes_that_slow_readers_hold_can_be_limited(tmp_path: Path) -> None:
    """`server.max_outbox_bytes`, in the units that people write; nonsense is refused with its place."""
    assert 512 << 20 == options_of(tmp_path, MODELS).max_outbox_bytes
    assert 64 << 20 == options_of(tmp_path, "server: {max_outbox_bytes: 64 MiB}\n" + MODELS).max_outbox_bytes
    with pytest.raises(ConfigurationError, match="max_outbox_bytes"):
        options_of(tmp_path, "server: {max_outbox_bytes: -1}\n" + MODELS)
