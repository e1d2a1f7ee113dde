"""Records of batches that ran, for tests of what counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shapestream.scheduling.batches import CutFacts
from shapestream.telemetry.runs import Run, RunMember


def ran(model: str, sizes: tuple[int, ...], *, arrived: Sequence[float] = (), **facts: Any) -> Run:
    """A batch of one request, unless `facts` say otherwise; it answered a request for each time of `arrived`."""
    members = [
        RunMember(at, number, (b"c" * 16, None), number, sizes, None, None, None)
        for number, at in enumerate(arrived)
    ]
    times = dict.fromkeys(("sent", "began", "ended"), 0.0)
    counted = dict.fromkeys(("gather_us", "run_us", "busy_us", "reallocations", "preparations"), 0)
    usual: dict[str, Any] = {
        "batch": 1,
        "requests": (1,),
        "behind": None,
        "facts": CutFacts(),
        "slot": "w/0",
        "calls": (),
    }
    usual |= {"code": None, "owners": {}, "ran": 1, "rows": 1, "useful": 0, **times, **counted}
    return Run(**{**usual, "model": model, "sizes": sizes, "members": members, **facts})
