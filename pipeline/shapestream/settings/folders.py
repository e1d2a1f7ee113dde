"""Models whose path is a folder, in the values of a YAML: each becomes what `text_folder.expand` makes of it.

The tokenizer takes the place of the model, and the encoder comes after all models, so that no index changes. The source
keeps the entry from which each was made, so that errors point to it. A group of workers that names the folder serves both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from shapestream.settings.text_folder import (
    CONFIG,
    DOCUMENTS,
    MODEL_FILES,
    MODULES,
    TOKENIZER,
    FolderContents,
    TextFolder,
    expand,
    unread,
)
from shapestream.settings.yaml_source import Location, SourceProblem, YamlSource
from shapestream.versions import ONLY, versioned
from shapestream_engine.backends.registry import ENGINES_OF_SUFFIX, engines_of_path
from shapestream_engine.errors import ModelLoadError
from shapestream_engine.files import read_regular
from shapestream_engine.machine import is_installed
from shapestream_engine.model_files import MOST_TOKENIZER_BYTES
from shapestream_engine.port_names import PortNames, port_names

_MOST_BYTES = 4 << 20
"""Largest document beside the tokenizer that is read."""


def expand_folders(source: YamlSource, base: Path, *, files_must_exist: bool) -> tuple[TextFolder, ...]:
    """Replace the models of `source.values` whose path is a folder with a text model; problems go to the source.

    `base`: the folder at which relative paths start. Folders without the files of a text model are left as they are.
    Unless files must exist, a path that is not there and has no suffix of a model file is taken for such a folder.
    """
    values = source.values
    models = values.get("models") if isinstance(values, dict) else None
    if not isinstance(models, list):
        return ()
    found, served = [], []
    names = Counter(
        [model["name"] for model in models if isinstance(model, dict) and isinstance(model.get("name"), str)]
    )
    for index, model in enumerate(models.copy()):
        folder = _folder_of(model, base)
        if folder is None:
            continue
        if names[model["name"]] > 1:
            model = {"version": ONLY, **model}  # its tokenizer and its encoder are those of one version
        if not folder.exists():
            if not files_must_exist and folder.suffix not in ENGINES_OF_SUFFIX:
                _put(source, ("models", index), unread(model["name"], model, str(folder)))
                served.append(model["name"])
            continue
        if not has_text_model(folder):
            continue
        made = expand(model["name"], model, read_contents(folder))
        found.append(made)
        place: Location = ("models", index)
        for key, words in made.problems:
            location = (*place, *key)
            source.problems.append(
                SourceProblem(message=words, location=location, place=source.place_of(location))
            )
        if made.problems:
            source.refused.add(place)
        else:
            _put(source, place, made)
            served.append(made.name)
    match values:
        case {"server": {"http": {"texts": True} as http}} if found or served:
            http["texts"] = [*dict.fromkeys(served)]
    return tuple(found)


def _folder_of(model: Any, base: Path) -> Path | None:
    """Return the path of a model, which may be a folder; None for a model without one."""
    match model:
        case {"name": str(), "path": str(path)} if path and "\0" not in path:
            pass
        case _:
            return None
    try:
        folder = (base / Path(path).expanduser()).absolute()
        return folder if folder.is_dir() or not folder.exists() else None
    except (OSError, RuntimeError):
        return None  # the path is checked with the other values


def has_text_model(folder: Path) -> bool:
    """Tell whether a folder has files of a text model."""
    return any((folder / name).exists() for name in (TOKENIZER, CONFIG, MODULES))


def _put(source: YamlSource, place: Location, made: TextFolder) -> None:
    """Put the models and the chain of a folder in the place of its model."""
    values = source.values
    values["models"][place[1]] = made.tokens
    added: tuple[tuple[str, dict[str, Any]], ...] = (("models", made.encoder), ("chains", made.chain))
    for section, value in added:
        entries = values.setdefault(section, [])
        if isinstance(entries, list):  # anything else is refused with the other values
            source.origins[section, len(entries)] = place
            entries.append(value)
    workers = values.get("workers")
    for group in workers if isinstance(workers, list) else []:
        names = group.get("models") if isinstance(group, dict) else None
        of_version = "" if (version := made.chain.get("version")) is None else versioned("", str(version))
        for end in dict.fromkeys(("", of_version)):
            if isinstance(names, list) and f"{made.name}{end}" in names:
                names[names.index(f"{made.name}{end}")] = f"{made.tokens['name']}{end}"
                names.append(f"{made.encoder['name']}{end}")


def read_contents(folder: Path) -> FolderContents:
    """Read the documents of a folder and the ports of its model files; what cannot be read is in `unreadable`."""
    documents: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    ports: dict[str, PortNames] = {}
    for name in DOCUMENTS:
        _read(folder, name, documents, unreadable)
    for name in _named_by(documents.get(MODULES)):
        _read(folder, name, documents, unreadable)
    for name in MODEL_FILES:
        if (folder / name).exists():
            try:
                ports[name] = port_names(folder / name)
            except ModelLoadError as error:
                unreadable[name] = str(error)
    return FolderContents(
        folder=str(folder),
        documents=documents,
        ports=ports,
        unreadable=unreadable,
        installed=frozenset(
            filter(is_installed, {each for file in ports for each in engines_of_path(Path(file))})
        ),
    )


def _named_by(modules: Any) -> Iterator[str]:
    """Yield the documents in the folders of a modules.json that lie within the folder."""
    for module in modules if isinstance(modules, list) else []:
        match module:
            case {"path": str(path)} if path and "\0" not in path:
                place = PurePosixPath(path)
                if not place.is_absolute() and ".." not in place.parts:
                    yield from (f"{place}/{name}" for name in DOCUMENTS if name not in (TOKENIZER, MODULES))


def _read(folder: Path, name: str, documents: dict[str, Any], unreadable: dict[str, str]) -> None:
    try:
        data = read_regular(folder / name, MOST_TOKENIZER_BYTES if name == TOKENIZER else _MOST_BYTES)
        documents[name] = json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        unreadable[name] = error.strerror or str(error)
    except RecursionError:
        unreadable[name] = "it is nested too deeply"
    except ValueError as error:  # UTF-8 as well
        unreadable[name] = f"it is no JSON: {error}"
