"""A server whose model changes, breaks connections and restarts, played for a pure session: it computes `y = a - b`.

A number on the wire stands for one ordered signature for the life of the server's process. The model has one of `FORMS`:
two inputs and two outputs of one type and shape, which stand in another order in the next form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from tests.entries import (
    Entry,
    Failure,
    Hello,
    ModelOpened,
    OpenModel,
    RequestEntry,
    ResultEntry,
    Unknown,
    Welcome,
    failure_of,
    result_of,
)
from tests.pipeline.client.bench import SETTINGS, Caller

from shapestream.client.opened_models import Model
from shapestream.client.session import Session
from shapestream.client.tickets import AnyTicket, OpenTicket, RequestTicket
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SHAPE = NamedShape.parse("batch:1..64")
NUMPY = {"f32": np.float32, "f64": np.float64}


def form(inputs: str, outputs: str, kind: str = "f32") -> ModelSignature:
    """The model `m` with these ports, a letter each."""
    takes = tuple(InputPort(name, kind, SHAPE) for name in inputs)
    return ModelSignature("m", takes, tuple(OutputPort(name, kind, SHAPE, Rows()) for name in outputs))


FORMS = (
    form("ab", "yz"),
    form("ba", "zy"),
    form("ba", "yz", "f64"),  # fits the others by name, and not by type
)
CLOSED = form("abc", "yz")
"""It fits no request of the others."""


@dataclass
class ChangingServer:
    """One process after the other at one address."""

    model: ModelSignature = FORMS[0]
    epoch: int = 1
    window: int = 512
    known: bool = False
    """Whether it knows the client."""
    numbers: dict[int, ModelSignature] = field(default_factory=dict)
    """All numbers of this process."""
    running: dict[int, RequestEntry] = field(default_factory=dict)
    replies: dict[int, tuple[RequestEntry, Entry]] = field(default_factory=dict)
    said: list[Entry] = field(default_factory=list)
    number: int = 0
    _next: count[int] = field(default_factory=lambda: count(7))

    def begin(self) -> None:
        """Give the present model its number."""
        self.number = next(self._next)
        self.numbers[self.number] = self.model

    def change(self, model: ModelSignature) -> None:
        """A reload: another model under a number of its own, of which the client is told."""
        if model != self.model:
            self.model = model
            self.begin()
            if self.known:
                self.said.append(self._opened())

    def break_off(self) -> None:
        """The connection ends, with all that was said and not heard; the session is forgotten."""
        self.known = False
        self.said.clear()

    def restart(self, model: ModelSignature) -> None:
        """Another process takes its place."""
        self.break_off()
        self.epoch, self.model = self.epoch + 1, model
        self.numbers.clear(), self.running.clear(), self.replies.clear()
        self.begin()

    def hear(self, entry: Entry) -> None:
        """Serve what the client says; requests wait for `answer`."""
        if isinstance(entry, Hello):
            self.known = True
            welcome = Welcome(
                epoch=bytes([self.epoch]),
                window_requests=self.window,
                window_bytes=1 << 20,
                heartbeat_ms=1000,
            )
            self.said.append(welcome)
        elif not self.known:
            self.said.append(Unknown())
        elif isinstance(entry, OpenModel):
            self.said.append(self._opened())
        elif isinstance(entry, RequestEntry):
            self._take(entry)

    def answer(self, sequence: int) -> None:
        """Answer a request under the number that it came with: by name where the model has changed since it was sent."""
        entry = self.running.pop(sequence)
        reply = self._reply(entry)
        self.replies[sequence] = entry, reply
        if self.known:
            self.said.append(reply)

    def _opened(self) -> ModelOpened:
        return ModelOpened(name="m", number=self.number, signature=self.model.to_dict())

    def _take(self, entry: RequestEntry) -> None:
        assert entry.model in self.numbers, "this process never told the number"
        before = self.running.get(entry.sequence) or self.replies.get(entry.sequence, (None,))[0]
        if before is not None:
            same = (before.model, before.tensors.layout) == (entry.model, entry.tensors.layout)
            assert same, "a number that came before stands for another request"
            if entry.sequence in self.replies:
                self.said.append(self.replies[entry.sequence][1])
            return
        self.running[entry.sequence] = entry

    def _reply(self, entry: RequestEntry) -> ResultEntry | Failure:
        told, model = self.numbers[entry.model], self.model
        kinds = {port.name: port.element_type for port in model.inputs}
        if {port.name: port.element_type for port in told.inputs} != kinds:
            return failure_of(entry.sequence, "invalid", "model 'm' has changed", retryable=False)
        values = {
            told.inputs[number].name: np.frombuffer(buffer, NUMPY[kind])
            for (number, kind, _), buffer in zip(entry.tensors.layout, entry.tensors.buffers, strict=True)
        }
        made = {"y": values["a"] - values["b"], "z": values["a"] + values["b"]}
        return result_of(entry.sequence, tensors_of([made[port.name] for port in told.outputs]))


def tensors_of(arrays: Sequence[np.ndarray]) -> Tensors:
    """Encoded by place."""
    kinds = {np.dtype(kind): name for name, kind in NUMPY.items()}
    layout = tuple((number, kinds[array.dtype], array.shape) for number, array in enumerate(arrays))
    return Tensors(layout=layout, buffers=[array.tobytes() for array in arrays])


class Talk:
    """A session and its server; what each says is heard by the other at once, or never."""

    def __init__(self, server: ChangingServer) -> None:
        self.now = 100.0
        self.server = server
        server.begin()
        self.session = Session(
            client=bytes(16), software="t", server="t://", settings=SETTINGS, now=self.now, new_model=Model
        )
        self.caller = Caller()
        self.asked: dict[RequestTicket, float] = {}
        """All requests, with their numbers."""
        self.ended: list[AnyTicket] = []
        self.session.connected(self.now)
        self.session.submit(OpenTicket(self.caller, name="m"))
        self.exchange()

    @property
    def model(self) -> Model:
        """The model as callers have it."""
        model = self.session.models["m"]
        assert isinstance(model, Model)
        return model

    def ask(self, model: Model | None = None) -> None:
        """One more request, whose answers are `y = 2 n` and `z = 0`; by a handle that may be an old one."""
        model, number = model or self.model, float(len(self.asked))
        tensors, nbytes = model.encode(
            {port.name: [number if port.name == "a" else -number] for port in model.signature.inputs}
        )
        ticket = RequestTicket(self.caller, model=model, tensors=tensors, nbytes=nbytes)
        self.asked[ticket] = number
        self.session.submit(ticket)

    def turn(self) -> None:
        """A turn of the session, whose words the server hears."""
        turn = self.session.turn(self.now)
        self.session.check_invariants()
        self.ended += turn.finished
        for entry in turn.entries:
            self.server.hear(entry)

    def exchange(self) -> None:
        """Both say all that they have to."""
        while True:
            self.turn()
            said, self.server.said = self.server.said, []
            if not said:
                return
            self.session.receive(said, self.now)

    def finish(self) -> None:
        """Answer everything, on a connection that holds; a heartbeat tells a session that was forgotten."""
        for _ in range(100):
            self.now += 1.5
            self.exchange()
            for sequence in sorted(self.server.running):
                self.server.answer(sequence)
            if len(self.ended) > len(self.asked) and not self.session.in_flight.tickets:
                return

    def outcomes(self) -> list[RequestTicket]:
        """The requests that ended: each once, and all of them."""
        ended = [ticket for ticket in self.ended if isinstance(ticket, RequestTicket)]
        assert sorted(self.asked.values()) == sorted(self.asked[ticket] for ticket in ended)
        return ended

    def is_right(self, ticket: RequestTicket) -> bool:
        """Whether a request was answered by its own numbers."""
        if not isinstance(ticket.outcome, ResultEntry):
            return False
        assert isinstance(ticket.model, Model)
        tensors = ticket.outcome.tensors
        rows = zip(tensors.layout, tensors.buffers, strict=True)
        got = {
            ticket.model.outputs[number]: np.frombuffer(buffer, NUMPY[kind])[0]
            for (number, kind, _), buffer in rows
        }
        return got == {"y": 2 * self.asked[ticket], "z": 0.0}
