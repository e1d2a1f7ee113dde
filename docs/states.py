"""`python docs/states.py`: write the state diagrams of the pages anew, from the transition tables.

`tests/pipeline/scheduling/test_states.py` compares the pages with the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from shapestream.scheduling.batches import BATCH_TABLE
from shapestream.scheduling.queueing import REQUEST_TABLE
from shapestream.scheduling.slots import SLOT_TABLE, WORKER_TABLE
from shapestream.serving.workers import CONNECTED_WORKER_TABLE

DOCS = Path(__file__).parent
BEGIN = "<!-- written by docs/states.py -->\n"
END = "<!-- end of what docs/states.py writes -->\n"
Table: TypeAlias = Mapping[str, Mapping[Enum, Enum]]
PAGES: Mapping[str, Mapping[str, Table]] = {
    "scheduling.md": {
        "request": REQUEST_TABLE,
        "batch": BATCH_TABLE,
        "slot": SLOT_TABLE,
        "worker": WORKER_TABLE,
    },
    "reliability.md": {"connected worker": CONNECTED_WORKER_TABLE},
}


def diagram(table: Table) -> str:
    """The table as a state diagram of Mermaid, which begins at the first state."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for change, row in table.items():
        for before, after in row.items():
            if before is not after:
                arrows.setdefault((before, after), []).append(change)
    first = next(iter(type(next(iter(arrows))[0])))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [
        f"    {before.name} --> {after.name}: {', '.join(names)}" for (before, after), names in arrows.items()
    ]
    return "\n".join([*lines, "```"]) + "\n"


def section(name: str) -> str:
    """All diagrams of a page, between their markers."""
    parts = [f"\nA {noun}:\n\n{diagram(table)}" for noun, table in PAGES[name].items()]
    return BEGIN + "".join(parts) + "\n" + END


def updated(name: str, page: str) -> str:
    """A page with the diagrams of the present tables."""
    before, _, rest = page.partition(BEGIN)
    return before + section(name) + rest.partition(END)[2]


if __name__ == "__main__":
    for name in PAGES:
        path = DOCS / name
        path.write_text(updated(name, path.read_text(encoding="utf-8")), encoding="utf-8")
