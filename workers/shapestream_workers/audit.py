"""`shapestream audit`: what a server's audits found, and the word that lets a model's requests share calls again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shapestream import blocking
from shapestream.errors import Forbidden, InvalidRequest


def audits_of(
    address: str,
    *,
    acknowledge: str | None,
    timeout_s: float,
    key: Path | None = None,
    server_key: str | None = None,
) -> dict[str, dict[str, Any]]:
    """What audits found, by model, once `acknowledge` may share calls again. The keys are for a server that asks for them.

    Raises the errors of the client; `Forbidden` for a key without the role admin.
    """
    with blocking.connect(address, connect_timeout=timeout_s, key=key, server_key=server_key) as client:
        told = client.statistics() if acknowledge is None else client.acknowledge_audit(acknowledge)
    if "audit" not in told:
        raise Forbidden(told.get("forbidden", "this server has no audits: it is of an earlier release"))
    found: dict[str, dict[str, Any]] = told["audit"]
    if acknowledge is not None and acknowledge not in found:
        raise InvalidRequest(f"no model is called {acknowledge!r}; audited are: {', '.join(found) or 'none'}")
    return found


def described(audits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines about each model, for people."""
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
