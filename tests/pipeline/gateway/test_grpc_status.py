"""The errors of the SDK as gRPC's statuses, and who asks."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc", reason="the extra [grpc] is not installed")

from shapestream.errors import RequestError, error_from_code
from shapestream.gateway.errors import UnknownModel, Unsupported
from shapestream.gateway.grpc_service import peer_of, pushback_of, status_of

STATUSES = {
    "invalid": "INVALID_ARGUMENT",
    "forbidden": "PERMISSION_DENIED",
    "too_large": "RESOURCE_EXHAUSTED",
    "model_error": "INTERNAL",
    "poisoned": "INTERNAL",
    "internal": "INTERNAL",
    "conflict": "INTERNAL",
    "answered": "INTERNAL",
    "cancelled": "CANCELLED",
    "overloaded": "UNAVAILABLE",
    "draining": "UNAVAILABLE",
    "unavailable": "UNAVAILABLE",
    "worker_lost": "UNAVAILABLE",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
}


def test_each_code_has_a_status() -> None:
    """A new code needs a line in this table, and perhaps in that of the gateway."""
    assert {kind.code for kind in RequestError.__subclasses__()} == set(STATUSES)
    assert "NOT_FOUND" == status_of(UnknownModel("why")).name
    assert "UNIMPLEMENTED" == status_of(Unsupported("why")).name


@pytest.mark.parametrize("code", STATUSES)
def test_the_status_of_a_code(code: str) -> None:
    """Clients that retry by themselves are told after how many milliseconds, or never."""
    for retry_after_s, told in ((None, "1000"), (0.0, "1"), (2.0001, "2001")):
        error = error_from_code(code, "why", retry_after_s=retry_after_s)
        assert STATUSES[code] == status_of(error).name
        assert ("grpc-retry-pushback-ms", told if error.retryable else "-1") == pushback_of(error)
        assert error.retryable == ("UNAVAILABLE" == status_of(error).name)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:[::1]:4711", "::1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("unix:", "unix"),
    ],
)
def test_a_peer_is_its_address(peer: str, address: str) -> None:
    """Without the port, which is another one for each connection."""
    assert address == peer_of(peer)
