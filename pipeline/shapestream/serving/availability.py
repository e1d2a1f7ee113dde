"""Which models nobody can serve any more: their workers were given up, so that waiting for one would never end.

A model without a worker *yet*, or whose worker is being started again, is another matter: its requests wait. Here it is
said that none will come by itself; a worker that comes all the same, by dialling in, ends it.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.models import ServedModels
from shapestream.serving.reception import Reception

__all__ = ["Availability"]

log = structlog.get_logger()


class Availability:
    """Tells dispatcher and reception when a model becomes unavailable, and when it is back."""

    def __init__(
        self,
        models: ServedModels,
        dispatcher: Dispatcher,
        reception: Reception,
        is_served: Callable[[str], bool],
    ) -> None:
        """`is_served`: does any executor that is here have this model?"""
        self._models = models
        self._dispatcher = dispatcher
        self._reception = reception
        self._is_served = is_served
        self._given_up: dict[str, str] = {}
        """Why, by name; at most as many as the configuration has models."""

    def give_up(self, name: str, why: str, now: float) -> None:
        """No process will be started for this model any more."""
        self._given_up[name] = why
        self.workers_changed(now)

    def hope_again(self, name: str) -> None:
        """Its processes are started again: whether they come up is to be seen, and waited for."""
        if self._given_up.pop(name, None) is not None and name in self._models.unavailable:
            self._models.available_again(name)

    def workers_changed(self, now: float) -> None:
        """A worker has come or gone."""
        for name, why in self._given_up.items():
            known = name in self._models.unavailable
            if self._is_served(name):
                if known:
                    log.info("model is available again", model=name)
                    self._models.available_again(name)
            elif not known:
                log.error("model is unavailable", model=name, why=why)
                message = f"model {name!r} is unavailable: {why}"
                self._models.make_unavailable(name, message)
                self._reception.model_unavailable(name, message)
                self._dispatcher.model_given_up(name, message, now)
