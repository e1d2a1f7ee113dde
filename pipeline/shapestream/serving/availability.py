"""The availability of models: whether clients may ask for them, as workers come and go.

A model without a worker *yet*, or whose worker is being started again, stays available: its requests wait. A model is
unavailable when its workers were given up, since its requests would wait for ever. A worker that dials in with it makes it
available again.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from shapestream.serving.client_port import ClientPort
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.served_models import ServedModel, ServedModels

log = structlog.get_logger()


class Availability:
    """Tells the dispatcher and the clients' port when a model comes, becomes unavailable, and is available again."""

    def __init__(
        self, models: ServedModels, dispatcher: Dispatcher, clients: ClientPort, *, workers_may_come: bool
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._clients = clients
        self._workers_may_come = workers_may_come
        self._given_up: dict[str, str] = {}
        """Reasons by name of model; at most one for each model of the configuration."""

    def models_added(self, models: Iterable[ServedModel], now: float) -> None:
        """Admit requests for these models, which no worker has brought before."""
        for model in models:
            self._dispatcher.model_added(model, now)
            self._clients.model_added(model)
        for name, why in self._models.unavailable.items():  # a chain may not fit them
            self._clients.model_unavailable(name, why)

    def is_served(self, name: str) -> bool:
        """Tell whether any worker that is here has this model."""
        return any(name in slot.worker.models for slot in self._dispatcher.slots.values())

    def give_up(self, name: str, why: str, now: float) -> None:
        """Expect no process for this model any more."""
        self._given_up[name] = why
        self.workers_changed(now)

    def own_slots_ended(self, now: float) -> None:
        """Give up the models that only slots of this process had, if no worker can connect: they cannot come back."""
        if self._workers_may_come:
            return
        for name in self._models.names:
            if name not in self._models.chains and not self.is_served(name):
                why = "the threads of all slots in the server's process have ended; restart the server"
                self.give_up(name, why, now)

    def hope_again(self, name: str) -> None:
        """Let requests wait for a model whose processes are started again."""
        if self._given_up.pop(name, None) is not None:
            self._models.unavailable.pop(name, None)

    def workers_changed(self, now: float) -> None:
        """Update the models that are new or were given up: a worker may serve them now."""
        self._models.new -= {name for name in self._models.new if self.is_served(name)}
        for name, why in self._given_up.items():
            known = name in self._models.unavailable
            if self.is_served(name):
                if known:
                    log.info("model is available again", model=name)
                    del self._models.unavailable[name]
            elif not known:
                log.error("model is unavailable", model=name, why=why)
                message = f"model {name!r} is unavailable: {why}"
                self._models.unavailable[name] = message
                self._clients.model_unavailable(name, message)
                self._dispatcher.model_given_up(name, message, now)
