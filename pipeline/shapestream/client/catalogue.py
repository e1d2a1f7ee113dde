"""The models that a session has opened: asked for once per connection, numbered anew by each server. Pure."""

from __future__ import annotations

from shapestream.client.tickets import ModelHandle
from shapestream.wire.messages import ModelOpened, OpenModel

__all__ = ["Catalogue"]


class Catalogue:
    """Models by name. A handle lives for as long as the server keeps the model's signature."""

    def __init__(self) -> None:
        self._handles: dict[str, ModelHandle] = {}
        self._asked: set[str] = set()

    def known(self, name: str) -> ModelHandle | None:
        """The model, where the present server has opened it."""
        handle = self._handles.get(name)
        return handle if handle is not None and handle.number is not None else None

    def is_asked(self, name: str) -> bool:
        """Whether the question is out."""
        return name in self._asked

    def ask(self, name: str) -> list[OpenModel]:
        """What to send to learn of this model: nothing where the question is out already."""
        if name in self._asked:
            return []
        self._asked.add(name)
        return [OpenModel(name=name)]

    def lose(self) -> None:
        """Questions on the old connection will not be answered any more, and its numbers are void."""
        self._asked.clear()
        for handle in self._handles.values():
            handle.number = None

    def names(self) -> list[str]:
        """Every model opened so far."""
        return list(self._handles)

    def opened(self, entry: ModelOpened) -> tuple[ModelHandle, ModelHandle | None]:
        """The model's handle, and the one that it replaces where the signature is another now."""
        self._asked.discard(entry.name)
        handle = self._handles.get(entry.name)
        if handle is not None and handle.signature == entry.signature:
            handle.number = entry.number
            return handle, None
        fresh = ModelHandle(entry.name, entry.signature, entry.number)
        self._handles[entry.name] = fresh
        if handle is not None:
            handle.stale = True
        return fresh, handle

    def refused(self, name: str) -> ModelHandle | None:
        """There is no such model, or no longer; the handle that it had is void."""
        self._asked.discard(name)
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.stale = True
        return handle

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; for tests."""
        assert not any(handle.stale for handle in self._handles.values())
        assert all(name == handle.name for name, handle in self._handles.items())
