"""The calls that run at one gateway for gRPC: how many each caller has, and until when each must move on.

       headers             first message                       answer               sent
    ───────────▶ WAITING ─────────────────▶ the handler runs ───────────▶ SENDING ────────▶ over
                    │ message_s, transfer_s                                  │ transfer_s
                    ▼                                                        ▼
                cancelled                                                cancelled

Each call has a thread of gRPC's pool. A call with a caller, whose token or address is known by its headers, is entered
before its message is read, and counts in its caller's quota of `max_calls`. So callers that send no messages, or whose model
is slow, leave threads to others.

Calls that ask for no token have no caller. They are counted apart, `OPEN_CALLS` of them: the oldest one that still waits for
its message gives way to a new one. The message of an honest one comes with its headers, so a probe is answered whatever
strangers do. Those that ask the server too, which takes up to a second, are counted by address.

A message counts in its caller's quota of bytes while its call runs, and an answer until gRPC has handed all of it to the
system: an answer whose peer does not read waits in gRPC's memory, without a thread. Beyond the quota it is dropped, and the
call refused. What has come of a message that has not ended is not counted: gRPC does not tell.

Nor does it tell how much of an answer has left. So a call has a time for each, and `end_overdue` looks for those whose time
is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from math import inf

import grpc

from shapestream.errors import InvalidRequest
from shapestream.serving.allocator import give_back_freed_memory
from shapestream.web.quotas import One, Quotas, held_at_most

OPEN_CALLS = 16
"""Calls without a caller that wait for their message at once, and as many that ask the server. Probes come one by one; so
many threads cost 2 MiB."""
REFUSING_THREADS = 8
"""Threads besides those of calls that were let in. They refuse the others, and wait for nothing."""
MESSAGE_S = 2.0
"""Seconds from the headers of a call for a page to the end of its message, of 64 KiB at most."""
TRANSFER_S = 60.0
"""Seconds from the headers to the end of the first message with tensors, and for an answer to leave. 64 MiB at 10 Mbit/s
take 54 s. nginx waits as long for a peer (`send_timeout`)."""
MOST_MESSAGES = 8
"""Messages and answers of all calls have at most the bytes of so many of the largest messages, as bodies over HTTP."""
PEAK_BYTES = 64 * 1024 * 1024
"""Bytes of messages and answers after which, once none is left, freed memory goes back to the kernel. gRPC copies them, and
the allocator kept 450 MB after answers of 240 MB; to look takes milliseconds."""
LOOK_S = 0.25
"""Seconds between two looks for calls whose time is over."""


class CallPhase(Enum):
    """What a call waits for."""

    WAITING = auto()
    """Its first message."""
    RUNNING = auto()
    """Its handler."""
    SENDING = auto()
    """The reader of its answer."""


class RunningCall:
    """One call, from its headers on."""

    __slots__ = ("_due", "caller", "context", "phase")

    def __init__(self, context: grpc.ServicerContext, caller: str, due: float) -> None:
        self.context = context
        self.caller = caller
        self.phase = CallPhase.WAITING
        self._due = due

    def read(self, messages: Iterator[bytes]) -> bytes:
        """Return the call's first message. Raises `InvalidRequest` where there is none, and gRPC's error if cancelled."""
        message = next(messages, None)
        self.phase = CallPhase.RUNNING
        if message is None:
            raise InvalidRequest("the call has no message")
        return message

    def begin_to_send(self, due: float) -> None:
        """Note that an answer leaves, and until when it must have left."""
        self._due = due
        self.phase = CallPhase.SENDING

    def has_sent(self) -> None:
        """Note that an answer of a stream has left."""
        self.phase = CallPhase.RUNNING

    def is_overdue(self, now: float) -> bool:
        """Tell whether the time of its phase is over, on the clock of `RunningCalls`."""
        return self.phase is not CallPhase.RUNNING and self._due <= now

    def cancel(self) -> None:
        """End it by CANCELLED. The thread that waits for its messages goes on, and its bytes are freed."""
        self.context.cancel()


class RunningCalls:
    """All calls of one gateway."""

    def __init__(
        self,
        max_calls: int,
        max_message_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        give_back: Callable[[], object] = give_back_freed_memory,
    ) -> None:
        """`give_back` returns freed memory to the kernel."""
        self._clock = clock
        self._give_back = give_back
        self._peak_bytes = 0
        """The most bytes that were seen since memory was given back."""
        self.last_begun_at = -inf
        """The time of the last call's headers, on the clock."""
        self.max_message_bytes = max_message_bytes
        most_bytes = held_at_most(MOST_MESSAGES, max_message_bytes)
        self.held_bytes_of_one = most_bytes // 2
        """Bytes that a caller may hold while there is no other."""
        self.held_bytes = Quotas(lambda: most_bytes, "bytes")
        """Bytes of messages that were read, and of answers that have not left."""
        self._by_caller = Quotas(lambda: max_calls, "calls")
        self._by_address = Quotas(lambda: OPEN_CALLS, "calls without a token")
        self._changing = threading.Lock()
        self._calls: dict[RunningCall, None] = {}
        """Those whose handler runs, or whose answer leaves. The values have no meaning."""
        self._waiting_open: dict[RunningCall, None] = {}
        """Calls without a caller that wait for their message, the oldest first."""

    @staticmethod
    def threads(max_calls: int) -> int:
        """Return the number of threads that let each call run that is let in, and refuse the others."""
        return max_calls + 2 * OPEN_CALLS + REFUSING_THREADS

    def _begun(self, context: grpc.ServicerContext, caller: str, message_s: float) -> RunningCall:
        self.last_begun_at = now = self._clock()
        return RunningCall(context, caller, now + message_s)

    @contextmanager
    def of(self, caller: str, context: grpc.ServicerContext, message_s: float) -> Iterator[RunningCall]:
        """Let a caller's call in for the block. Raises `BeyondQuota`. Its message has `message_s` seconds."""
        call = self._begun(context, caller, message_s)
        with self._by_caller.one(caller):
            self._calls[call] = None
            try:
                yield call
            finally:
                if call.phase is not CallPhase.SENDING:
                    del self._calls[call]

    @contextmanager
    def holding(self, call: RunningCall, nbytes: int) -> Iterator[None]:
        """Count bytes of a call's message during the block. Raises `BeyondQuota`."""
        self.held_bytes.take(call.caller, nbytes)
        try:
            yield
        finally:
            self.held_bytes.give_back(call.caller, nbytes)

    def sends(self, call: RunningCall, answer: bytes) -> bytes:
        """Count the only answer of a call, from now until it has left. Return it. Raises `BeyondQuota`."""
        nbytes = len(answer)
        self.held_bytes.take(call.caller, nbytes)
        self.begin_to_send(call)

        def left() -> None:
            del self._calls[call]
            self.held_bytes.give_back(call.caller, nbytes)

        if not call.context.add_callback(left):
            left()  # the call is over already
        return answer

    def begin_to_send(self, call: RunningCall) -> None:
        """Give an answer `TRANSFER_S` seconds to leave."""
        call.begin_to_send(self._clock() + TRANSFER_S)

    def read_open(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Return the message of a call without a caller, and let the oldest that waits for its own give way to it."""
        call = self._begun(context, "", MESSAGE_S)
        with self._changing:
            oldest = None
            if len(self._waiting_open) >= OPEN_CALLS:
                oldest = next(iter(self._waiting_open))
                del self._waiting_open[oldest]
            self._waiting_open[call] = None
        self._calls[call] = None
        try:
            if oldest is not None:
                oldest.cancel()
            return call.read(messages)
        finally:
            del self._calls[call]
            with self._changing:
                self._waiting_open.pop(call, None)

    @property
    def open_calls(self) -> int:
        """Calls without a caller that wait for their message."""
        return len(self._waiting_open)

    def asks_the_server(self, address: str) -> One:
        """Count a call without a caller, which asks the server during a block. Raises `BeyondQuota` at its beginning."""
        return self._by_address.one(address)

    def end_overdue(self) -> None:
        """Cancel the calls whose time is over."""
        now = self._clock()
        for call in list(self._calls):
            if call.is_overdue(now):
                call.cancel()

    def give_back_after_a_peak(self) -> None:
        """Return freed memory to the kernel where many bytes were held, and none is now."""
        held = self.held_bytes.held
        self._peak_bytes = max(self._peak_bytes, held)
        if not held and self._peak_bytes >= PEAK_BYTES:
            self._peak_bytes = 0
            self._give_back()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End overdue calls during the block, and give back memory after peaks, in a thread of its own."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                self.end_overdue()
                self.give_back_after_a_peak()

        thread = threading.Thread(target=watch, name="overdue-calls", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
