"""A server that says anything, at any time: the client's session stays sound, and each of its callers gets one answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.entries import Entry, Failure, ModelOpened, ModelRefused, ResultEntry, Role
from tests.pipeline.client.bench import Bench
from tests.pipeline.wire.strategies import BY_ROLE


def _likely(entry: Entry, number: int) -> Entry:
    """The same, about something that the client has asked for: a request with a small number, the model `m`."""
    if isinstance(entry, ResultEntry | Failure):
        return replace(entry, sequence=number)
    if isinstance(entry, ModelOpened | ModelRefused):
        return replace(entry, name="m")
    return entry


said = st.one_of(BY_ROLE[Role.CLIENT])
likely = st.builds(_likely, said, st.integers(0, 6))
steps = st.lists(
    st.one_of(
        st.lists(st.one_of(said, likely), max_size=4),
        st.sampled_from(["submit", "later", "connected", "unreadable", "cancel"]),
    ),
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(steps)
def test_no_server_can_break_a_session(script: list[Any]) -> None:
    """Nothing is raised, the invariants hold after each step, and every ticket comes back once, at the latest at the end."""
    bench = Bench()
    model = bench.open()
    tickets = [bench.submit(model, timeout=30.0 if n % 2 else None) for n in range(3)]
    unheard: set[int] = set()
    for step in script:
        match step:
            case "submit":
                tickets.append(bench.submit(model))
            case "later":
                bench.now += 3.0
            case "connected":
                bench.session.connected(bench.now)
            case "unreadable":
                bench.session.unreadable("not msgpack", bench.now)
            case "cancel":
                # Whoever withdraws does not wait for the end.
                withdrawn = tickets[len(tickets) // 2]
                bench.session.cancel(withdrawn)
                unheard.add(id(withdrawn))
            case _:
                bench.receive(*step)
        bench.turn()
    bench.finished += bench.session.close().finished
    ends = Counter(id(ticket) for ticket in bench.finished)
    assert [] == [ticket for ticket in tickets if ends[id(ticket)] > 1]
    assert [] == [ticket for ticket in tickets if not ends[id(ticket)] and id(ticket) not in unheard]
