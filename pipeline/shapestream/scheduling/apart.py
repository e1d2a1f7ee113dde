"""Clients and shapes whose requests failed lately: they run apart, so that what fails again costs no other client a call.

A batch that fails is run again in halves until the culprit is alone (recovery.py), which costs up to two calls per member
before any other turn. So requests of a culprit's client run one at a time. A client whose request killed a process has no
company but its own, nor has a shape that failed in company: neither costs halves again. It ends when as many of their
requests in a row as a full batch holds have run well: by then they fail so rarely that company is worth its price.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from shapestream.scheduling.records import Request

__all__ = ["Apart"]

Mark: TypeAlias = tuple[int | None, tuple[int, ...] | None]

MAX_APART = 1024
"""Clients and shapes that are remembered; when another comes, the first one is forgotten. It bounds memory."""


class Apart:
    """The clients and shapes of each model that run apart."""

    __slots__ = ("_models",)

    def __init__(self) -> None:
        self._models: dict[str, ModelApart] = {}
        """The models of which a request was ever to blame."""

    def blame(self, request: Request, *, singly: bool) -> None:
        """Let the like of a request that was to blame run apart; `singly`: its client's requests one at a time."""
        profile = request.queue.profile
        model = self._models.get(profile.name)
        if model is None:
            model = self._models[profile.name] = ModelApart(profile.max_batch)
        model.failed(request, singly=singly)

    def ran_well(self, model: str, requests: Iterable[Request]) -> None:
        """Count requests of a model that had their results."""
        if apart := self._models.get(model):
            apart.ran_well(requests)

    def of(self, model: str) -> ModelApart | None:
        """The clients and shapes of a model that run apart; None if there are none."""
        return self._models.get(model) or None


class ModelApart:
    """The clients and shapes of one model that run apart."""

    __slots__ = ("_left", "_needed", "_singly")

    def __init__(self, needed: int) -> None:
        """`needed`: requests in a row that have to run well before there is company again."""
        self._needed = needed
        self._left: dict[int | tuple[int, ...], int] = {}
        """By client, or by shape: how many of those are still to run."""
        self._singly: set[int] = set()
        """Clients, of those, whose requests run one at a time."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def __repr__(self) -> str:
        return f"<apart: {list(self._left)}>"

    def failed(self, request: Request, *, singly: bool) -> None:
        """A request was to blame. The shapes of a client that runs apart already are not: it could mark all of them."""
        alone = request.client in self._left
        self._mark(request.client)
        if singly:
            self._singly.add(request.client)
        if not alone:
            self._mark(request.shape)

    def _mark(self, who: int | tuple[int, ...]) -> None:
        self._left.pop(who, None)
        if len(self._left) >= MAX_APART:
            self._forget(next(iter(self._left)))
        self._left[who] = self._needed

    def ran_well(self, requests: Iterable[Request]) -> None:
        """These had their results."""
        left = self._left
        for request in requests:
            for who in (request.client, request.shape):
                if who in left:
                    left[who] -= 1
                    if not left[who]:
                        self._forget(who)

    def _forget(self, who: int | tuple[int, ...]) -> None:
        del self._left[who]
        if isinstance(who, int):
            self._singly.discard(who)

    def runs_alone(self, request: Request) -> bool:
        """Whether a request of this client failed lately, and killed nothing."""
        return request.client in self._singly

    def mark(self, request: Request) -> Mark:
        """What a request must share with its company."""
        client, shape = request.client, request.shape
        return (client if client in self._left else None, shape if shape in self._left else None)
