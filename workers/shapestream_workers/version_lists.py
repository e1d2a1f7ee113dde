"""The answer of `shapestream versions`: each version of a server's models, its traffic, and what its shadow found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shapestream.errors import Forbidden
from shapestream.versions import spell_share, versioned
from shapestream_workers.target import ServerAccess


def versions_of_server(access: ServerAccess) -> list[dict[str, Any]]:
    """Return a row for each version, in the order of names and versions.

    Raises the errors of the client; `Forbidden` for a key without the role admin.
    """
    with access.connect() as client:
        told = client.statistics()
    if "totals" not in told or "last_minute" not in told:
        raise Forbidden(told.get("forbidden", "this server has no versions: it is of an earlier release"))
    return list(rows_of(told))


def rows_of(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a server's counters."""
    lately: Mapping[str, Any] = told["last_minute"]["models"]
    shadows: Mapping[str, Any] = told.get("shadows", {})
    for name, shares in told.get("versions", {}).items():
        for version, share in shares.items():
            model = versioned(name, version)
            times = lately.get(model, {}).get("total_us", {})
            yield {
                "name": name,
                "version": version,
                "traffic": share / 1e6,
                "answered": told["totals"].get(model, {}).get("results", 0),
                "p50_us": times.get("p50") if times.get("count") else None,
                "p99_us": times.get("p99") if times.get("count") else None,
                "memory_bytes": told.get("version_bytes", {}).get(model),
                "not_ready": list(told.get("models_not_ready", {}).get(model, ())),
                "digest": told.get("digests", {}).get(model),
                "shadow": shadows.get(model),
            }


def version_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows as text: a table, then what each shadow found."""
    if not rows:
        yield "no model has versions"
        return
    titles = ("model", "version", "traffic", "answered", "p50", "p99", "memory", "equal")
    cells = [titles, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for row in rows:
        for why in row["not_ready"]:
            yield f"{versioned(row['name'], row['version'])}: not ready: {why}"
        if (shadow := row["shadow"]) is not None:
            yield from _shadow_lines(versioned(row["name"], row["version"]), shadow)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shadow = row["shadow"]
    compared = 0 if shadow is None else shadow["compared"]
    return (
        row["name"],
        row["version"],
        spell_share(round(row["traffic"] * 1e6)),
        str(row["answered"]),
        _spell_ms(row["p50_us"]),
        _spell_ms(row["p99_us"]),
        "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**20:.0f} MiB",
        f"{shadow['equal'] / compared:.1%} of {compared}" if compared else "",
    )


def _spell_ms(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds / 1e3:.2f} ms"


def _shadow_lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{name}: shadow of {found['beside']}, share {found['share']:g}: {found['sampled']} sampled, "
        f"{found['compared']} compared, {found['equal']} equal, {found['unjudged']} not told from rounding, "
        f"{found['failed']} failed, {found['dropped']} dropped"
    )
    if found["why"]:
        yield f"  the last failure: {found['why']}"
    if found["lone_us"] is not None:
        yield f"  a lone call: {_spell_ms(found['lone_us'])}, and {_spell_ms(found['lone_us_beside'])} of {found['beside']}"
    for output, counts in found["outputs"].items():
        largest = "of another shape" if counts["largest"] is None else f"{counts['largest']:.3g}"
        decades = ", ".join(f"1e{decade}: {count}" for decade, count in counts["decades"].items())
        yield (
            f"  output {output!r}: {counts['differing']} differed, the largest difference {largest}"
            f"{f' ({decades})' if decades else ''}; the largest value moved in {counts['top_changed']}, "
            f"the shape in {counts['shape_changed']}"
        )
