"""What a chaos run's ledger writes down, and what follows from it. Nothing but the standard library, no product code.

All times are seconds of CLOCK_MONOTONIC, which every process of one machine reads alike. A *token* is the number that a
client gave a request; it travels in the tensor, so that the model can say which requests it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
    waited_s: float = 0.0
    """How long its process had waited for a CPU since the call before, perhaps just before this run began."""
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
        self._lies: Counter[str] = Counter()
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
                self._lies[fact["what"]] += 1
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
                request.runs.append(Run(fact["pid"], fact["at"], fact.get("waited_s", 0.0)))
            case "ran":
                for run in request.runs:
                    if run.pid == fact["pid"] and run.ended_at is None:
                        run.ended_at = fact["at"]
            case _:
                self._corrupt.add(token)

    # ---------------------------------------------------------------- what follows

    def zeros(self) -> dict[str, int]:
        """The four counts that must be 0, as of now; meant for when everything is over."""
        return {zero: len(cases) for zero, cases in self.violations().items()}

    def violations(self, client: int | None = None) -> dict[str, list[str]]:
        """The cases behind each zero, in words; all, or those of one client."""
        requests = self._requests_of(client)
        return {
            "without_an_end": [
                f"{token:#x}: {request}"
                for token, request in requests.items()
                if not request.ends and request.client not in self._killed
            ],
            "two_ends": [
                f"{token:#x}: {request}" for token, request in requests.items() if len(request.ends) > 1
            ]
            + [
                f"client {number}, sequence {sequence}: {replies} replies"
                for (number, sequence), replies in self._replies.items()
                if replies > 1 and client in (None, number)
            ],
            "wrong_answers": [
                f"{token:#x}: {request}"
                for token, request in requests.items()
                if self._is_wrong(token, request)
            ]
            + [f"{token:#x}: nobody submitted it: {facts}" for token, facts in self._early.items()],
            "started_late": [
                f"{token:#x}: {self.lateness_s(request):.3f} s late: {request}"
                for token, request in requests.items()
                if self.lateness_s(request) > SLACK_S
            ],
        }

    def _requests_of(self, client: int | None) -> dict[int, Request]:
        return {
            token: request for token, request in self.requests.items() if client in (None, request.client)
        }

    def _is_wrong(self, token: int, request: Request) -> bool:
        # No request of a run is one that its model refuses: such an error is another call's.
        wrong = any(
            code == "model_error" or (code == "ok" and answer != request.expected)
            for _, code, answer in request.ends
        )
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

    def late_starts_s(self, client: int | None = None) -> list[float]:
        """By how much each call began after a member's deadline, less what its process had just waited for a CPU.

        Nothing else is excused.
        """
        late = {
            run.at: run.at - request.deadline_at - run.waited_s
            for request in self._requests_of(client).values()
            for run in request.runs
            if request.deadline_at is not None and run.at > request.deadline_at
        }
        return list(late.values())

    def in_flight(self, at: float, client: int | None = None) -> int:
        """Requests that were under way at that time."""
        return sum(request.in_flight(at) for request in self._requests_of(client).values())

    def in_reply(self, at: float, client: int | None = None, pid: int | None = None) -> int:
        """Requests that had run at that time, in that process, and whose client had not been told."""
        return sum(
            request.in_flight(at)
            and any(
                run.ended_at is not None and run.ended_at <= at and pid in (None, run.pid)
                for run in request.runs
            )
            for request in self._requests_of(client).values()
        )

    def _runs(self, pid: int | None, client: int | None = None) -> Iterator[Run]:
        for request in self._requests_of(client).values():
            yield from (run for run in request.runs if pid in (None, run.pid))

    def cut_short(self, pid: int | None = None, client: int | None = None) -> int:
        """Runs, in that process or of that client, that began and never ended."""
        return sum(run.ended_at is None for run in self._runs(pid, client))

    def in_run(self, pid: int, at: float) -> int:
        """Runs that were under way in this process at that time."""
        return sum(run.at <= at and (run.ended_at is None or run.ended_at > at) for run in self._runs(pid))

    def runs_of(self, pid: int | None = None, client: int | None = None, since: float = 0.0) -> int:
        """Runs in this process, or of this client, that began since then."""
        return sum(run.at >= since for run in self._runs(pid, client))

    def withdrawn(self, client: int) -> int:
        """Requests that this client withdrew before they had an end."""
        return sum(
            any(code == "withdrawn" for _, code, _ in r.ends) for r in self._requests_of(client).values()
        )

    def lies(self) -> int:
        """Lies told so far."""
        return self._lies.total()

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

    def summary(self, client: int | None = None) -> dict[str, Any]:
        """What a report shows beside the zeros, of all clients or of one."""
        requests = self._requests_of(client).values()
        ends = Counter(request.ends[0][1] for request in requests if request.ends)
        never = float("-inf")
        last = max(requests, key=self.lateness_s, default=None)
        latest = never if last is None else self.lateness_s(last)
        unexcused = max((self.lateness_s(request, excused=False) for request in requests), default=never)
        misdeeds = [request for request in requests if request.kind in ("poison", "hang")]
        return {
            "requests": len(requests),
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
            "lies": dict(self._lies),
            "violations": {zero: cases[:5] for zero, cases in self.violations(client).items() if cases},
        }
