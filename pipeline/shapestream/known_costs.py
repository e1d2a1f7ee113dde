"""Costs that a server knows of its models, for processes that start beside its load: those of a reload.

Costs that are measured beside load are wrong, and measuring takes time from the traffic (docs/experiments.md). So a process
whose own costs were not measured before begins with those of its predecessor, where the signature is the same and a few
calls are alike: as traffic has corrected them, and corrects them further. They are not kept: the next start measures.

The server writes them into the folder that it has for its workers, before a reload starts any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapestream.versions import parted
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.files import read_plain, write_plain
from shapestream_engine.signature import ModelSignature

_FILE = "known-costs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts:
    """The costs of one model."""

    model: str
    ports: str
    """The signature without the name, as text."""
    table: CostTable

    @classmethod
    def of(cls, signature: ModelSignature, table: CostTable) -> KnownCosts:
        """Return the costs of a model with this signature."""
        return cls(model=signature.name, ports=_ports(signature), table=table)


def _ports(signature: ModelSignature) -> str:
    return json.dumps({**signature.to_dict(), "name": ""}, sort_keys=True)


def known_table(known: Iterable[KnownCosts], signature: ModelSignature) -> CostTable | None:
    """Return the costs of a model of this name and signature, else of another version of it; None where none are known."""
    ports, name = _ports(signature), signature.name
    found = {one.model: one.table for one in known if one.ports == ports}
    if name in found:
        return found[name]
    return next((table for model, table in found.items() if parted(model)[0] == parted(name)[0]), None)


def private_folder(address: str) -> Path | None:
    """Return the folder of a server whose workers connect to this address; None if it is not private to them."""
    folder = Path(address.removeprefix("ipc://")).parent
    is_own = address.startswith("ipc://") and folder.name.startswith("shapestream-")
    return folder if is_own else None


def write_known_costs(folder: Path, known: Sequence[KnownCosts]) -> None:
    """Write the costs for processes that start from now on; a failed write only costs them time."""
    write_plain(
        folder / _FILE, [{"model": one.model, "ports": one.ports, **one.table.to_dict()} for one in known]
    )


def read_known_costs(folder: Path) -> Sequence[KnownCosts]:
    """Return the costs that were written, none where no reload was."""
    try:
        return [
            KnownCosts(model=str(one["model"]), ports=str(one["ports"]), table=CostTable.from_dict(one))
            for one in read_plain(folder / _FILE) or ()
        ]
    except (EngineError, TypeError, KeyError):
        return ()
