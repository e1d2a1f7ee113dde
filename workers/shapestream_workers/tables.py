"""Tables of text, for a terminal, a log or a comment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def table_of(rows: Sequence[Mapping[str, str]], *, words: Collection[str]) -> str:
    """Return a line per row under the keys of the first row; columns named in `words` are set to the left, figures right."""
    names = list(rows[0])
    cells = [names, *([row.get(name, "") for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, width, cell in zip(names, widths, line, strict=True)
        ).rstrip()
        for line in cells
    )
