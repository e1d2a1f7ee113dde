"""Grants of memory, without a server: who gets how much, and when; never more than there is, and all comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.errors import DeadlineExceeded, Overloaded, TooLarge
from shapestream.serving.grants import (
    LEAST_BYTES_PER_S,
    UNASKED_BYTES,
    UNUSED_S,
    Grant,
    Grants,
    GrantState,
    room_of,
)
from shapestream.settings import ServerSettings

MIB = 1 << 20
GIB = 1 << 30


class Server:
    """Grants, and the time."""

    def __init__(self, most: int = 100, largest: int = 100, waiting: int = 1000) -> None:
        self.grants = Grants(most, largest, waiting)
        self.now = 0.0
        self.asked = 0

    def ask(self, owner: int, nbytes: int, deadline: float | None = None) -> Grant:
        """The next question of a client."""
        self.asked += 1
        grant = self.grants.ask(None, owner, self.asked, nbytes, deadline, self.now)
        self.grants.check_invariants()
        return grant

    def give(self) -> list[int]:
        """The questions that are granted now, by their numbers."""
        given = self.grants.give(self.now)
        self.grants.check_invariants()
        return [grant.sequence for grant in given]

    def end(self, *grants: Grant) -> None:
        """These requests are answered."""
        for grant in grants:
            grant.end()
        self.grants.check_invariants()


def test_grants_are_given_in_the_order_of_asking_as_far_as_there_is_room() -> None:
    """What came back is given to the one that has waited longest."""
    server = Server()
    first, _, _, _ = [server.ask(owner, 40) for owner in range(4)]
    assert [1, 2] == server.give()
    assert [] == server.give()
    server.end(first)
    assert [3] == server.give()


def test_a_client_that_asks_for_much_lets_one_that_asks_for_one_pass() -> None:
    """Each client has one grant in its turn; a newcomer stands behind the others."""
    server = Server()
    greedy = [server.ask(1, 30) for _ in range(100)]
    assert [1] == server.give(), "a client that holds something leaves as much free"
    server.ask(2, 30)
    assert [101] == server.give()
    server.end(greedy[0])
    assert [2] == server.give()


def test_a_large_one_is_reached_though_small_ones_would_fit() -> None:
    """Where the first does not fit, nothing behind it is granted."""
    server = Server()
    small = server.ask(1, 20)
    server.give()
    server.ask(2, 90)
    server.ask(3, 20)
    assert [] == server.give()
    server.end(small)
    assert [2] == server.give()


def test_a_client_at_its_quota_is_passed_and_has_its_turn_when_it_has_given_back() -> None:
    """Its large request waits for its own small one, and holds nobody up."""
    server = Server()
    small = server.ask(1, 20)
    server.give()
    server.ask(1, 90)
    other = server.ask(2, 50)
    assert [3] == server.give()
    server.end(small, other)
    assert [2] == server.give()


def test_a_request_that_is_larger_than_all_memory_is_refused_with_advice() -> None:
    """It says how much is taken."""
    server = Server(largest=80)
    with pytest.raises(TooLarge, match="takes at most 80") as caught:
        server.ask(1, 81)
    assert "send fewer rows" in caught.value.message
    assert [1, 2] == [server.ask(1, 80).sequence - 1, server.asked]


def test_too_many_that_wait_are_refused_with_a_time_to_ask_again() -> None:
    """The queue of those that ask has a bound."""
    server = Server(waiting=2)
    for owner in range(2):
        server.ask(owner, 100)
    with pytest.raises(Overloaded) as caught:
        server.ask(2, 100)
    assert caught.value.retry_after_s is not None
    assert [1] == server.give()
    assert 4 == server.ask(2, 100).sequence


def test_a_client_leaves_places_in_the_queue_to_others() -> None:
    """Alone it may have half of them; what it leaves is for others."""
    server = Server(waiting=10)
    for _ in range(5):
        server.ask(1, 100)
    with pytest.raises(Overloaded, match="5 of them of this client"):
        server.ask(1, 100)
    for owner in range(2, 7):
        server.ask(owner, 100)
    with pytest.raises(Overloaded):
        server.ask(7, 100)


def learned() -> Server:
    """A server at which 100 bytes come back each second, and are held by one that is granted."""
    server = Server()
    for owner in range(8):
        server.ask(owner, 100)
    for _ in range(7):
        (grant,) = server.grants.give(server.now)
        server.now += 1.0
        server.end(grant)
    server.give()
    return server


def test_a_wait_beyond_the_deadline_is_refused_with_that_wait() -> None:
    """Two are before it, each of which takes a second."""
    server = learned()
    server.ask(9, 100)
    assert pytest.approx(2.0) == server.grants.wait_s(10, 100)
    with pytest.raises(Overloaded) as caught:
        server.ask(10, 100, deadline=server.now + 1.9)
    assert pytest.approx(2.0) == caught.value.retry_after_s
    assert GrantState.WAITING is server.ask(10, 100, deadline=server.now + 2.1).state


def test_the_first_in_turn_is_tried_whatever_is_predicted() -> None:
    """So a prediction that is too long is corrected."""
    server = learned()
    tried = server.ask(9, 100, deadline=server.now + 0.1)
    assert pytest.approx(2.0) == server.grants.wait_s(10, 100)
    assert [] == server.grants.hopeless(server.now)
    server.now += 0.1
    ((late, error),) = server.grants.hopeless(server.now)
    assert (tried, DeadlineExceeded) == (late, type(error))


def test_what_waits_and_will_be_late_is_told_before_it_is_late() -> None:
    """When they asked, no pace was known. The deadline itself ends the first one in turn."""
    server = Server()
    running = server.ask(0, 100)
    server.give()
    waiting = [server.ask(owner, 100, deadline=5.0) for owner in range(1, 9)]
    assert [] == server.grants.hopeless(server.now)
    server.now = 1.0
    server.end(running)
    server.give()
    late = server.grants.hopeless(server.now)
    assert [7, 8, 9] == [grant.sequence for grant, _ in late]
    assert {Overloaded} == {type(error) for _, error in late}
    for grant, _ in late:
        grant.end()
    server.now = 5.0
    assert [(grant, DeadlineExceeded) for grant in waiting[1:5]] == [
        (grant, type(error)) for grant, error in server.grants.hopeless(server.now)
    ]


def test_a_grant_whose_request_does_not_come_is_found_in_time() -> None:
    """The time is for the way and for sending at a low rate; one that is used has none."""
    server = Server(10 * MIB, 10 * MIB)
    unused, used = server.ask(1, 4 * MIB), server.ask(2, 4 * MIB)
    server.give()
    used.use()
    server.now = UNUSED_S + 4 * MIB / LEAST_BYTES_PER_S
    assert [unused] == server.grants.unused(server.now)
    server.now -= 0.001
    assert [] == server.grants.unused(server.now)


@pytest.mark.parametrize(
    ("memory", "queued", "window", "expected"),
    [
        pytest.param(
            900_000_000, 2 * GIB, 512 * MIB, (112_500_000, 112_500_000, 28_125_000), id="a container"
        ),
        pytest.param(64 * GIB, 2 * GIB, 512 * MIB, (2 * GIB, 512 * MIB, 512 * MIB), id="a large machine"),
        pytest.param(64 * GIB, 64 * MIB, 512 * MIB, (64 * MIB, 64 * MIB, 16 * MIB), id="a small queue"),
        pytest.param(900_000_000, 2 * GIB, MIB, (112_500_000, MIB, MIB), id="a small window"),
        pytest.param(4 * MIB, 2 * GIB, 512 * MIB, (MIB, MIB, UNASKED_BYTES), id="next to nothing"),
    ],
)
def test_the_room_follows_from_memory_and_settings(
    memory: int, queued: int, window: int, expected: tuple[int, int, int]
) -> None:
    """All grants, the largest one, and what is sent without one."""
    room = room_of(memory, queued, window)
    assert expected == (room.grants, room.largest, room.unasked)


questions = st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 100))
steps = st.one_of(
    questions,
    st.tuples(st.sampled_from(["give", "use", "end", "wait"]), st.integers(0, 50), st.just(0)),
)


@given(st.lists(steps, max_size=80))
def test_never_above_the_bound_nothing_starves_and_all_comes_back(played: list[tuple[str, int, int]]) -> None:
    """Random questions and ends; then all that is granted ends, until nothing waits: each was granted once."""
    server = Server(largest=100)
    every: list[Grant] = []
    for step, number, nbytes in played:
        server.now += 0.01
        living = [grant for grant in every if grant.state is not GrantState.OVER]
        match step:
            case "ask":
                every.append(server.ask(number, nbytes))
            case "give":
                server.give()
            case "use":
                for grant in living[number : number + 1]:
                    if grant.state is GrantState.OPEN:
                        grant.use()
            case "end":
                server.end(*living[number : number + 1])
            case _:
                server.now += number
    asked = {grant for grant in every if grant.state is GrantState.WAITING}
    granted: list[Grant] = []
    while server.grants.waiting:
        server.give()
        held = [grant for grant in every if grant.state in (GrantState.OPEN, GrantState.USED)]
        assert held, "something waits, and nothing that would come back is granted"
        granted += [grant for grant in held if grant in asked]
        server.end(*held)
    assert asked == set(granted)
    for owner in range(4):
        own = [grant.sequence for grant in granted if grant.owner == owner]
        assert sorted(own) == own
    server.end(*every)
    assert (0, 0) == (server.grants.held_bytes, server.grants.waiting)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 100)), min_size=1, max_size=40))
def test_between_two_turns_of_a_client_each_other_has_one(asked: list[tuple[int, int]]) -> None:
    """While a client waits and holds nothing, no other is granted twice."""
    server = Server()
    waiting: dict[int, list[Grant]] = {}
    for owner, nbytes in asked:
        waiting.setdefault(owner, []).append(server.ask(owner, nbytes))
    passed: dict[int, set[int]] = {owner: set() for owner in waiting}
    while server.grants.waiting:
        given = server.grants.give(server.now)
        holding: set[int] = set()
        for grant in given:
            assert grant is waiting[grant.owner].pop(0)
            for owner in waiting.keys() - holding - {grant.owner}:
                if waiting[owner]:
                    assert grant.owner not in passed[owner]
                    passed[owner].add(grant.owner)
            passed[grant.owner].clear()
            holding.add(grant.owner)
        server.end(*given)


def test_the_document_has_the_numbers() -> None:
    """The table of docs/capacity.md, by the same rule as the server: of 900 MB, and of 16 GiB."""
    page = (Path(__file__).parents[3] / "docs" / "capacity.md").read_text(encoding="utf-8")
    table = page.partition("\n## Memory\n")[2].partition("\nThe log line")[0]
    rows = [line.strip("| ").split(" | ")[-2:] for line in table.splitlines() if line.startswith("| ")][1:]
    settings = ServerSettings()
    for place, memory in enumerate((900_000_000, 16 * GIB)):
        room = room_of(memory, settings.max_queued_bytes, settings.window_bytes)
        expected = [room.grants, room.grants // 2, room.largest, room.unasked, room.unasked]
        assert expected == [
            pytest.approx(int(number) * {"MiB": MIB, "GiB": GIB}[unit], rel=0.02)
            for number, unit in (row[place].split() for row in rows)
        ]
