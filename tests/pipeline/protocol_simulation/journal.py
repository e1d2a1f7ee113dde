"""What happened in the simulated world, told by the world itself, and held against the promises of docs/reliability.md.

It shares no state with what it judges: it knows what callers asked and got, and what slots began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import trio
from tests.pipeline.protocol_simulation.plan import DEADLY, Ask, Kind

from shapestream.errors import RequestError

# How late a client may notice that a deadline has passed: a float's rounding.
EXPIRY_S = 0.001
# remaining_ms is a whole number of milliseconds, on both ways.
ROUNDING_S = 0.002
MAX_ATTEMPTS = 3
# What a process said so long before it died may not have been heard: messages take so long at most, where nothing is wrong.
UNHEARD_S = 0.5


@dataclass(slots=True, eq=False)
class Run:
    """One request in one inference call that has begun."""

    uid: int
    worker: str
    epoch: int
    began: float
    company: tuple[int, ...]
    ended: float | None = None
    code: str | None = None
    troubles: int = 0
    """How often anything had gone wrong before this run began."""
    amid_trouble: bool = False
    """Whether something that lasts was going on."""


@dataclass(slots=True, eq=False)
class Question:
    """One request, as its caller knows it."""

    uid: int
    ask: Ask
    client: str
    wanted: bool = False
    """Whether the caller has begun: at first it may wait for the model to be opened."""
    asked: float | None = None
    """When it was submitted; None before that."""
    deadline: float | None = None
    withdrawn: float | None = None
    ends: list[str] = field(default_factory=list)
    ended: float | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether somebody waits for it."""
        return self.wanted and not self.ends and self.withdrawn is None


class Journal:
    """Books of everything, and `faults`: what was promised otherwise."""

    def __init__(self) -> None:
        self.questions: dict[int, Question] = {}
        self.story: list[str] = []
        self.broken: list[str] = []
        """Promises that were not kept."""
        self.epoch = 0
        """Which server process runs, or ran last."""
        self.troubles = 0
        self.lasting = 0
        """Troubles that are not over."""
        self.deaths: Counter[tuple[int, int]] = Counter()
        """Worker processes that died while they ran a request that does harm, by server and request."""
        self._gone: dict[str, float] = {}
        self._client_troubles: Counter[str] = Counter()
        self.error_of_clock_s: Callable[[str], float] = lambda process: 0.0
        """How far off the deadlines may be that came to, or from, this process."""

    def note(self, text: str) -> None:
        """Tells what happens."""
        self.story.append(f"{trio.current_time():10.4f} {text}")

    @property
    def told(self) -> list[str]:
        """The story without the processes' own logs, in which there are random ids."""
        return [line for line in self.story if not line[10:].startswith("     ")]

    def trouble(self, text: str, *, excuses: bool = True) -> None:
        """Something goes wrong, by plan. `excuses`: it may make requests run once more."""
        self.troubles += excuses
        self.note(f"*** {text}")

    def client_troubled(self, client: str) -> None:
        """What goes wrong may end this client's session; what it asks again then is new to the server."""
        self._client_troubles[client] += 1

    def accuse(self, text: str) -> None:
        """A promise was not kept."""
        self.broken.append(text)
        self.note(f"!!! {text}")

    def kind_of(self, uid: int) -> Kind:
        """What this request does to whoever runs it."""
        return self.questions[uid].ask.kind

    # ------------------------------------------------------------ callers

    def asked(self, question: Question) -> None:
        """A caller submits."""
        now = question.asked = trio.current_time()
        timeout_s = question.ask.timeout_s
        question.deadline = None if timeout_s is None else now + timeout_s
        self.note(f"{question.client} asks {question.uid} ({question.ask.kind.value}, within {timeout_s})")

    def unopened(self, question: Question, why: object) -> None:
        """Its model could not be opened, so it was never submitted."""
        if question.open:
            question.ends.append("unopened")
            self.note(f"{question.client} cannot ask {question.uid}: {why}")

    def withdrawn(self, question: Question) -> None:
        """A caller gives up, or dies."""
        if question.open:
            question.withdrawn = trio.current_time()
            self.note(f"{question.client} withdraws {question.uid}")

    def ended(
        self,
        question: Question,
        outcome: Any,
        answer: np.ndarray[Any, Any] | None,
        right: np.ndarray[Any, Any],
    ) -> None:
        """A caller gets a result (`answer`), or an error."""
        code = outcome.code if isinstance(outcome, RequestError) else "result"
        self.note(f"{question.client} gets {code} for {question.uid} ({outcome if code != 'result' else ''})")
        question.ends.append(code)
        question.ended = trio.current_time()
        if len(question.ends) > 1:
            self.accuse(f"request {question.uid} ended more than once: {question.ends}")
        if question.withdrawn is not None:
            self.accuse(f"request {question.uid} was withdrawn, and then handed back")
        if answer is not None:
            if not np.array_equal(answer, right):
                self.accuse(
                    f"request {question.uid} got another's answer: {answer.tolist()}, not {right.tolist()}"
                )
            if not any(run.code is None and run.ended is not None for run in question.runs):
                self.accuse(f"request {question.uid} got a result, and never ran to its end")
        if question.deadline is not None and question.ended > question.deadline + EXPIRY_S:
            self.accuse(
                f"request {question.uid} was answered {question.ended - question.deadline:.3f} s after its deadline"
            )

    # ------------------------------------------------------------ slots

    def run_began(self, uid: int, worker: str, company: tuple[int, ...]) -> Run:
        """A call begins that this request is in."""
        question = self.questions[uid]
        now = trio.current_time()
        run = Run(
            uid, worker, self.epoch, now, company, troubles=self.troubles, amid_trouble=self.lasting > 0
        )
        question.runs.append(run)
        self.note(f"{worker} begins {uid} in company of {len(company)}: {company}")
        if question.deadline is not None:
            allowed = self.error_of_clock_s(question.client) + self.error_of_clock_s(worker) + ROUNDING_S
            if now > question.deadline + allowed:
                late = now - question.deadline
                self.accuse(
                    f"request {uid} began {late:.4f} s after its deadline; {allowed:.4f} s may be unknown"
                )
        return run

    def run_ended(self, run: Run, code: str | None) -> None:
        """The call ends."""
        run.ended, run.code = trio.current_time(), code or None
        self.note(f"{run.worker} ends {run.uid}: {code or 'done'}")

    def process_gone(self, worker: str) -> None:
        """A worker's process is there no longer, and what it ran is lost."""
        for question in self.questions.values():
            for run in question.runs:
                if run.worker == worker and run.ended is None:
                    run.code = "lost"
        self._gone[worker] = trio.current_time()

    def died_of(self, worker: str) -> None:
        """A worker's process dies while it runs what kills it."""
        for question in self.questions.values():
            for run in question.runs:
                if run.worker == worker and run.ended is None and question.ask.kind in DEADLY:
                    self.deaths[self.epoch, run.uid] += 1

    # ------------------------------------------------------------ the verdict

    def judge(self) -> None:
        """Looks at what can only be seen at the end."""
        for question in self.questions.values():
            if question.open:
                self.accuse(f"request {question.uid} never ended")
            self._judge_end(question)
            self._judge_runs(question)
        for (epoch, uid), times in self.deaths.items():
            if times > MAX_ATTEMPTS * (1 + self._client_troubles[self.questions[uid].client]):
                self.accuse(f"{times} workers of server {epoch} died of request {uid}")

    def _judge_end(self, question: Question) -> None:
        uid, kind = question.uid, question.ask.kind
        for code in question.ends:
            if code in ("internal", "invalid", "too_large", "conflict", "forbidden", "answered"):
                self.accuse(f"request {uid} ended as {code}")
            if code == "poisoned" and kind not in DEADLY:
                self.accuse(f"request {uid} is innocent, and was called poisoned")
            if code == "model_error" and kind is not Kind.BAD:
                self.accuse(f"request {uid} is {kind.value}, and was blamed for a model_error")
            if code == "deadline_exceeded" and question.deadline is None:
                self.accuse(f"request {uid} has no deadline, and ended by it")
            if code == "worker_lost" and not question.runs:
                self.accuse(f"request {uid} never began, and ended as worker_lost")

    def _judge_runs(self, question: Question) -> None:
        by_epoch: dict[int, list[Run]] = {}
        for run in question.runs:
            by_epoch.setdefault(run.epoch, []).append(run)
        for epoch, runs in by_epoch.items():
            halved = [run for run in runs if run.code == "model_error"]
            if len(halved) > 5:  # of at most 8 rows: 8, 4, 2, 1, and one that is lost
                self.accuse(f"request {question.uid} failed {len(halved)} times with its company")
            others = len(runs) - len(halved)
            if others > MAX_ATTEMPTS * (1 + self._client_troubles[question.client]):
                self.accuse(f"request {question.uid} ran {others} times at server {epoch}")
            for run, next_run in pairwise(runs):
                troubled = next_run.troubles > run.troubles or next_run.amid_trouble
                untroubled = run.code is None and not troubled
                if untroubled and not self._lost_with_its_process(run) and not self._beside_harm(run):
                    self.accuse(
                        f"request {question.uid} ran again at server {epoch}, and nothing had gone wrong"
                    )

    def _lost_with_its_process(self, run: Run) -> bool:
        """Whether its process died before anybody could hear how it ended."""
        gone = self._gone.get(run.worker)
        return gone is not None and (run.ended is None or gone - run.ended < UNHEARD_S)

    def _beside_harm(self, run: Run) -> bool:
        """Whether it did not end, and its process ran what may have been why: one that hangs is cut off, or killed."""
        others = (other for question in self.questions.values() for other in question.runs)
        return run.ended is None and any(
            other.worker == run.worker and self.kind_of(other.uid) in DEADLY for other in others
        )
