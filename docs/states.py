"""`python docs/states.py`: write the state diagrams of docs/scheduling.md anew, from the scheduler's transition tables.

`tests/pipeline/scheduling/test_states.py` compares the page with the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from shapestream.scheduling.batches import BATCH_TABLE
from shapestream.scheduling.queueing import REQUEST_TABLE
from shapestream.scheduling.slots import SLOT_TABLE, WORKER_TABLE

PAGE = Path(__file__).parent / "scheduling.md"
BEGIN = "<!-- written by docs/states.py -->\n"
END = "<!-- end of what docs/states.py writes -->\n"
NOUNS: Mapping[str, Mapping[str, Mapping[Enum, Enum]]] = {
    "request": REQUEST_TABLE,
    "batch": BATCH_TABLE,
    "slot": SLOT_TABLE,
    "worker": WORKER_TABLE,
}


def diagram(noun: str) -> str:
    """The table of a request, a batch, a slot or a worker as a state diagram of Mermaid; each begins at its first state."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for change, row in NOUNS[noun].items():
        for before, after in row.items():
            if before is not after:
                arrows.setdefault((before, after), []).append(change)
    first = next(iter(type(next(iter(arrows))[0])))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [
        f"    {before.name} --> {after.name}: {', '.join(names)}" for (before, after), names in arrows.items()
    ]
    return "\n".join([*lines, "```"]) + "\n"


def section() -> str:
    """All diagrams, between their markers."""
    parts = [f"\nA {noun}:\n\n{diagram(noun)}" for noun in NOUNS]
    return BEGIN + "".join(parts) + "\n" + END


def updated(page: str) -> str:
    """A page with the diagrams of the present tables."""
    before, _, rest = page.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
