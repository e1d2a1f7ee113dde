"""What a chaos run's ledger writes down, and what follows from it. Nothing but the standard library, no product code.

All times are seconds of CLOCK_MONOTONIC, which every process of one machine reads alike. A *token* is the number that a
client gave a request; it travels in the tensor, so that the model can say which requests it runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# What a request may start after its deadline, as its caller counts it, before it counts as late: the way from the
# client to the model's first line on a machine that does much else. Time in which some process stood stopped is excused
# beside that: what waits in a socket does not age for whoever reads it later.
SLACK_S = 0.25


@dataclass(slots=True)
class Run:
    """One execution of one request."""

    pid: int
    at: float
    ended_at: float | None = None


@dataclass(slots=True)
class Request:
    """One request, from its client's first word about it."""

    client: int
    kind: str
    submitted_at: float
    deadline_at: float | None
    expected: int
    ends: list[tuple[float, str, int | None]] = field(default_factory=list)
    """When, with which code (`ok` for a result), and the checksum of the answer."""
    runs: list[Run] = field(default_factory=list)

    @property
    def ended_at(self) -> float | None:
        """When it ended first."""
        return self.ends[0][0] if self.ends else None

    def in_flight(self, at: float) -> bool:
        """Whether it was submitted and had not ended at that time."""
        return self.submitted_at <= at and (self.ended_at is None or self.ended_at > at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """The four counts that must be 0."""

    without_an_end: int
    two_ends: int
    wrong_answers: int
    started_late: int


class Book:
    """Takes facts, and answers questions about them. Facts of one process come in its order."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._replies: Counter[tuple[int, int]] = Counter()
        """Terminal replies as they arrived at a client, by client and sequence number."""
        self._pauses: list[tuple[float, float]] = []
        self._killed: dict[int, float] = {}
        """Clients that were killed: whatever they had asked for ended with them."""
        self._corrupt: set[int] = set()
        self.lies: Counter[str] = Counter()
        self._early: dict[int, list[dict[str, Any]]] = {}
        """Facts that were read before the word that their request was submitted, which came another way."""

    # ---------------------------------------------------------------- facts

    def take(self, fact: dict[str, Any]) -> None:
        """Writes one fact down; raises `ValueError` for what is none."""
        match fact["fact"]:
            case "submitted":
                self._submitted(fact)
            case "ended":
                self._of_request(fact["token"], fact)
            case "reply":
                # `draining` is not the last word: the request is sent again under its number.
                self._replies[fact["client"], fact["sequence"]] += fact["code"] != "draining"
            case "run" | "ran" | "corrupt":
                for token in set(fact["tokens"]):
                    self._of_request(token, fact)
            case "lie":
                self.lies[fact["what"]] += 1
            case "paused":
                self._pauses.append((fact["since"], fact["until"]))
            case "killed":
                self._killed[fact["client"]] = fact["at"]
            case other:
                raise ValueError(f"unknown fact {other!r}")

    def _submitted(self, fact: dict[str, Any]) -> None:
        token = fact["token"]
        self.requests[token] = Request(
            fact["client"], fact["kind"], fact["at"], fact["deadline_at"], fact["expected"]
        )
        for early in self._early.pop(token, []):
            self._of_request(token, early)

    def _of_request(self, token: int, fact: dict[str, Any]) -> None:
        request = self.requests.get(token)
        if request is None:
            self._early.setdefault(token, []).append(fact)
            return
        match fact["fact"]:
            case "ended":
                request.ends.append((fact["at"], fact["code"], fact["answer"]))
            case "run":
                request.runs.append(Run(fact["pid"], fact["at"]))
            case "ran":
                for run in request.runs:
                    if run.pid == fact["pid"] and run.ended_at is None:
                        run.ended_at = fact["at"]
            case _:
                self._corrupt.add(token)

    # ---------------------------------------------------------------- what follows

    def zeros(self) -> Zeros:
        """As of now; meant for when everything is over."""
        found = self.violations()
        return Zeros(
            without_an_end=len(found["without_an_end"]),
            two_ends=len(found["two_ends"]),
            wrong_answers=len(found["wrong_answers"]),
            started_late=len(found["started_late"]),
        )

    def violations(self) -> dict[str, list[str]]:
        """The cases behind each zero, in words."""
        requests = self.requests.items()
        return {
            "without_an_end": [
                f"{token:#x}: {request}"
                for token, request in requests
                if not request.ends and request.client not in self._killed
            ],
            "two_ends": [f"{token:#x}: {request}" for token, request in requests if len(request.ends) > 1]
            + [
                f"client {client}, sequence {sequence}: {replies} replies"
                for (client, sequence), replies in self._replies.items()
                if replies > 1
            ],
            "wrong_answers": [
                f"{token:#x}: {request}" for token, request in requests if self._is_wrong(token, request)
            ]
            + [f"{token:#x}: nobody submitted it: {facts}" for token, facts in self._early.items()],
            "started_late": [
                f"{token:#x}: {self.lateness_s(request):.3f} s late: {request}"
                for token, request in requests
                if self.lateness_s(request) > SLACK_S
            ],
        }

    def _is_wrong(self, token: int, request: Request) -> bool:
        wrong = any(code == "ok" and answer != request.expected for _, code, answer in request.ends)
        return wrong or token in self._corrupt

    def lateness_s(self, request: Request, *, excused: bool = True) -> float:
        """By how much its latest start came after its deadline, less the pauses in between; negative: in time."""
        if request.deadline_at is None or not request.runs:
            return float("-inf")
        started_at = max(run.at for run in request.runs)
        paused_s = self._paused_s(request.submitted_at, started_at) if excused else 0.0
        return started_at - request.deadline_at - paused_s

    def _paused_s(self, since: float, until: float) -> float:
        return sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in self._pauses)

    def in_flight(self, at: float, client: int | None = None) -> int:
        """Requests that were under way at that time."""
        return sum(
            1
            for request in self.requests.values()
            if (client is None or request.client == client) and request.in_flight(at)
        )

    def in_reply(self, at: float, client: int | None = None, pid: int | None = None) -> int:
        """Requests that had run at that time, in that process, and whose client had not been told."""
        return sum(
            1
            for request in self.requests.values()
            if (client is None or request.client == client)
            and request.in_flight(at)
            and any(
                run.ended_at is not None and run.ended_at <= at and pid in (None, run.pid)
                for run in request.runs
            )
        )

    def cut_short(self, pid: int | None = None, client: int | None = None) -> int:
        """Runs, in that process or of that client, that began and never ended."""
        return sum(
            1
            for request in self.requests.values()
            if client is None or request.client == client
            for run in request.runs
            if run.ended_at is None and pid in (None, run.pid)
        )

    def in_run(self, pid: int, at: float) -> int:
        """Runs that were under way in this process at that time."""
        return sum(
            1
            for request in self.requests.values()
            for run in request.runs
            if run.pid == pid and run.at <= at and (run.ended_at is None or run.ended_at > at)
        )

    def runs_of(self, pid: int, since: float) -> int:
        """Runs that began in this process since then."""
        return sum(
            1
            for request in self.requests.values()
            for run in request.runs
            if run.pid == pid and run.at >= since
        )

    def runs_of_client(self, client: int) -> int:
        """Runs of this client's requests so far."""
        return sum(len(request.runs) for request in self.requests.values() if request.client == client)

    def recovery(self, since: float) -> dict[str, float | None]:
        """Seconds from then to the first result of a later request, and to the last end of what was under way."""
        first = min(
            (
                at
                for request in self.requests.values()
                if request.submitted_at >= since
                for at, code, _ in request.ends
                if code == "ok"
            ),
            default=None,
        )
        hit = [
            request
            for request in self.requests.values()
            if request.in_flight(since) and (request.ends or request.client not in self._killed)
        ]
        ends = [request.ended_at for request in hit if request.ended_at is not None]
        settled = max(ends, default=since) if len(ends) == len(hit) else None
        return {
            "first_result_s": None if first is None else first - since,
            "settled_s": None if settled is None else settled - since,
        }

    def summary(self) -> dict[str, Any]:
        """What a report shows beside the zeros."""
        requests = self.requests.values()
        ends = Counter(request.ends[0][1] for request in requests if request.ends)
        never = float("-inf")
        last = max(requests, key=self.lateness_s, default=None)
        latest = never if last is None else self.lateness_s(last)
        unexcused = max((self.lateness_s(request, excused=False) for request in requests), default=never)
        misdeeds = [request for request in requests if request.kind in ("poison", "hang")]
        return {
            "requests": len(self.requests),
            "clients": len({request.client for request in requests}),
            "ends": dict(ends.most_common()),
            "gone_with_their_client": sum(1 for r in requests if not r.ends and r.client in self._killed),
            "runs_per_request": dict(sorted(Counter(len(request.runs) for request in requests).items())),
            "misdeeds": [
                f"{request.kind}: {len(request.runs)} runs, then {[code for _, code, _ in request.ends]}"
                for request in misdeeds
            ],
            "once": sum(request.kind == "once" for request in requests),
            "once_run_again": sum(request.kind == "once" and len(request.runs) > 1 for request in requests),
            "latest_start_s": None if latest == never else latest,
            "latest_start_of": str(last),
            "latest_start_with_pauses_s": None if unexcused == never else unexcused,
            "paused_s": sum(until - since for since, until in self._pauses),
            "lies": dict(self.lies),
            "violations": {zero: cases[:5] for zero, cases in self.violations().items() if cases},
        }
