"""The last errors that clients were told, for the page of the admin port. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shapestream.serving.ends import BatchEnded, End, RequestEnded
from shapestream.wire.tags import REQUEST_ID

ERRORS_PER_CODE = 10
"""Errors that are kept of each code, so that a flood of one code leaves the others in sight."""
MOST_MESSAGE = 200
"""Characters of an error's message that are kept."""


class RecentError(NamedTuple):
    """One request that ended without a result."""

    time: float
    model: str | None
    """None for a request that was refused before its model was looked up."""
    code: str
    message: str
    request_id: str
    """The id that its user knows the request by."""


class RecentErrors:
    """The last errors of each code."""

    def __init__(self) -> None:
        self._errors: dict[str, deque[RecentError]] = {}

    def ended(self, end: End) -> None:
        """Keep an error that a client was told; the oldest one of its code goes."""
        if isinstance(end, BatchEnded):
            return
        model, own_id = None, None
        if isinstance(end, RequestEnded):
            if end.action is None:
                return
            record = end.record
            session, sequence, model = record.session, record.sequence, record.model
            own_id = None if record.tags is None else record.tags.get(REQUEST_ID)
        else:
            session, sequence = end.session, end.sequence
        request_id = own_id or f"{session.client[0].hex()}-{sequence}"
        errors = self._errors.get(end.code)
        if errors is None:
            errors = self._errors[end.code] = deque(maxlen=ERRORS_PER_CODE)
        errors.append(RecentError(end.at, model, end.code, end.message[:MOST_MESSAGE], request_id))

    @property
    def newest_first(self) -> list[RecentError]:
        """All errors that are kept."""
        errors = [error for of_code in self._errors.values() for error in of_code]
        return sorted(errors, key=lambda error: error.time, reverse=True)
