"""`shapestream audit`: the findings of a server's audits, and the command that ends what they stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shapestream.errors import Forbidden, InvalidRequest
from shapestream_workers.target import ServerAccess


def audits_of(access: ServerAccess, acknowledge: str | None) -> dict[str, dict[str, Any]]:
    """Return the findings of audits, by model. Requests of the model `acknowledge` share calls again from now on.

    Raises the errors of the client; `Forbidden` for a key without the role admin.
    """
    with access.connect() as client:
        told = client.statistics() if acknowledge is None else client.acknowledge_audit(acknowledge)
    if "audit" not in told:
        raise Forbidden(told.get("forbidden", "this server has no audits: it is of an earlier release"))
    found: dict[str, dict[str, Any]] = told["audit"]
    if acknowledge is not None and acknowledge not in found:
        raise InvalidRequest(f"no model is called {acknowledge!r}; audited are: {', '.join(found) or 'none'}")
    return found


def described(audits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines of text about each model."""
    for name, found in audits.items():
        state = "every request runs alone" if found["stopped"] else "varies" if found["varies"] else "ok"
        if state == "ok" and found.get("judges_little"):
            state = "most answers cannot be told from rounding"
        yield (
            f"{name}: {state}; share {found['share']:g}, {found['audited']} audited of {found['sampled']} sampled, "
            f"{found['mismatches']} differed, {found.get('unjudged', 0)} not told from rounding"
        )
        for finding in found["findings"]:
            by = finding["why"]
            if None not in (finding["largest"], finding["allowed"]):
                by = f"by {finding['largest']:.3g} where {finding['allowed']:.3g} is allowed"
            yield (
                f"  output {finding['output']!r} differed ({by}): sizes {finding['sizes']}, in a call of "
                f"{finding['call']} with {finding['requests']} requests on {finding['slot']}; "
                f"request {finding['request_digest']}, model {finding['model_digest'] or 'a function'}"
            )
