"""What a reload does about each key: the table in the program, the one for people, and the schema agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shapestream.settings.document import InProcessSettings, LoggingSettings, WorkerGroupSettings
from shapestream.settings.model_settings import BatchingSettings, ModelSettings
from shapestream.settings.readers import READERS, Reader, for_a_process
from shapestream.settings.server_settings import GrpcSettings, HttpSettings, SecuritySettings, ServerSettings
from shapestream.settings.values import Section

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
SECTIONS: dict[str, type[Section]] = {
    "models": ModelSettings,
    "models.batching": BatchingSettings,
    "workers": WorkerGroupSettings,
    "in_process": InProcessSettings,
    "logging": LoggingSettings,
    "server.security": SecuritySettings,
    "server.http": HttpSettings,
    "server.grpc": GrpcSettings,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_the_schema_has_a_reader(section: str) -> None:
    """And no other key has."""
    assert sorted(SECTIONS[section].file_keys()) == sorted(READERS[section])


def test_the_keys_of_the_server_are_those_without_a_section_of_their_own() -> None:
    """Ports and keys have one."""
    own = {"http", "grpc", "security"}
    assert sorted({*ServerSettings.file_keys()} - own) == sorted(READERS["server"])


def test_the_page_has_each_key_once_with_what_a_reload_does() -> None:
    """In the words of the program, and perhaps more."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| (`[^|]+`) \| ([^|]+) \|$", PAGE, re.M)
    told = [(section, key, words) for section, keys, words in rows for key in re.findall(r"`(\w+)`", keys)]
    known = {(section, key): reader for section, keys in READERS.items() for key, reader in keys.items()}
    assert sorted(known) == sorted((section, key) for section, key, _ in told)
    for section, key, words in told:
        assert words.startswith(known[section, key].value), (section, key)


def test_a_process_reads_no_key_that_only_the_server_reads() -> None:
    """These have their defaults in what two processes are compared by."""
    batching = BatchingSettings(max_delay_ms=3, max_batch=4, hang_after_s=30)
    model = ModelSettings(name="m", audit=0.5, batching=batching)
    plain = ModelSettings(name="m", batching=BatchingSettings(max_batch=4))
    assert plain == for_a_process(model)
    assert Reader.SERVER is READERS["models"]["audit"]
