"""The forms of files: which source reads an input, and which results are written."""

from __future__ import annotations

from pathlib import Path

from shapestream.errors import ConfigurationError
from shapestream_engine.signature import ModelSignature
from shapestream_workers.offline.pictures import PictureFormat
from shapestream_workers.offline.results import NpzResults, Results
from shapestream_workers.offline.sources import PICTURES, FolderSource, LineSource, RowSource

ARRAYS = frozenset({".npy", ".npz"})
LINES = frozenset({".jsonl", ".ndjson"})
TABLES = frozenset({".parquet", ".arrow", ".feather"})


def open_source(path: Path, pictures: PictureFormat) -> RowSource:
    """Open an input. Raises `ConfigurationError` for one that cannot be read as a whole."""
    if not path.exists():
        raise ConfigurationError([f"{path}: no such file or folder"])
    if not path.is_dir():
        return _table_source(path, [path])
    files = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
    suffixes = {each.suffix.lower() for each in files}
    if not files:
        raise ConfigurationError([f"{path}: the folder holds no file"])
    for known in (LINES, TABLES):
        if suffixes <= known:
            return _table_source(path, files)
    if unknown := sorted(suffixes - ARRAYS - PICTURES):
        one = next(each for each in files if each.suffix.lower() == unknown[0])
        kinds = ".npy, .npz and pictures; or tables of one kind: .parquet, .arrow, .jsonl"
        raise ConfigurationError([f"{one}: a folder holds {kinds} (remove this file)"])
    if suffixes & PICTURES and suffixes & ARRAYS:
        raise ConfigurationError([f"{path}: it holds both pictures and arrays (divide the folder)"])
    return FolderSource(path, files, pictures)


def _table_source(path: Path, files: list[Path]) -> RowSource:
    suffix = files[0].suffix.lower()
    if suffix in LINES:
        return LineSource(files)
    if suffix in TABLES:
        from shapestream_workers.offline.tables import TableSource  # needs pyarrow

        return TableSource(files)
    known = ", ".join(sorted(LINES | TABLES))
    raise ConfigurationError([f"{path}: expected {known}, or a folder of .npy, .npz and pictures"])


def check_output(path: Path) -> None:
    """Raise `ConfigurationError` for a path of results that no form is known for, or in a folder that is not there."""
    if path.suffix.lower() not in (".parquet", ".npz"):
        raise ConfigurationError([f"{path}: results are written as .parquet or .npz (name such a file)"])
    if not path.absolute().parent.is_dir():
        raise ConfigurationError([f"{path}: no such folder: {path.absolute().parent}"])


def results_of(path: Path, signature: ModelSignature, source: RowSource) -> Results:
    """Return the form of the results. Raises `ConfigurationError` where a library is missing, or names collide."""
    if path.suffix.lower() == ".npz":
        return NpzResults()
    from shapestream_workers.offline.tables import ParquetResults  # needs pyarrow

    has_keys = source.total > 0 and source.key(0) is not None
    return ParquetResults(signature, has_keys=has_keys, drops_batch=source.adds_batch)
