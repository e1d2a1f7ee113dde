"""The supervisor's decisions, without a process or a clock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_workers.supervisor.core import (
    Action,
    GiveUp,
    KeepWorker,
    KillWorker,
    LeaveRequested,
    MoveTraffic,
    ReplacementWanted,
    Restarted,
    RestartRequested,
    StartWorker,
    StopNow,
    StopRequested,
    Supervisor,
    TellToLeave,
    TerminateWorker,
    WakeupDue,
    WorkerExited,
    WorkerReady,
)
from shapestream_workers.supervisor.replacements import ProcessState, RestartPolicy

POLICY = RestartPolicy(
    backoff_initial_s=1.0,
    backoff_factor=2.0,
    backoff_max_s=5.0,
    jitter=0.5,
    max_crashes=5,
    window_s=100.0,
    healthy_s=10.0,
)


def started(*workers: str) -> Supervisor:
    """A supervisor whose workers all run."""
    supervisor = Supervisor(workers, POLICY)
    supervisor.begin()
    return supervisor


def ended(supervisor: Supervisor, start: int, now: float) -> Restarted | None:
    """The result of a restart of all."""
    return supervisor.restarted_since(start, now, RestartRequested(), supervisor.roles)


def crash(supervisor: Supervisor, now: float, *, status: int = -9, jitter: float = 0.0) -> list[Action]:
    """The worker `a` dies."""
    return supervisor.handle(WorkerExited(worker="a", status=status), now, jitter=jitter)


def test_every_worker_is_started_once() -> None:
    """`begin` starts them all; asking again starts nothing."""
    supervisor = Supervisor(["a", "b"], POLICY)
    expected = [StartWorker(worker=name, attempt=0, role=name) for name in ("a", "b")]
    assert expected == supervisor.begin()
    assert [] == supervisor.begin()
    assert "<Supervisor 2 running>" == repr(supervisor)


def test_a_dead_worker_comes_back_after_the_backoff() -> None:
    """It is restarted at the time that `next_wakeup` names, not before."""
    supervisor = started("a", "b")
    assert [] == crash(supervisor, 10.0)
    assert 11.0 == supervisor.next_wakeup()
    assert "<Supervisor 1 running, 1 waiting>" == repr(supervisor)
    assert [] == supervisor.handle(WakeupDue(), 10.9)
    assert [StartWorker(worker="a", attempt=1, role="a")] == supervisor.handle(WakeupDue(), 11.0)
    assert supervisor.next_wakeup() is None


def test_the_backoff_grows_to_its_limit_and_takes_jitter() -> None:
    """1, 2, 4 and then 5 seconds, plus at most half of it."""
    supervisor = started("a")
    waits = []
    for _ in range(4):
        crash(supervisor, 0.0, jitter=0.5)
        waits.append(supervisor.next_wakeup())
        supervisor.handle(WakeupDue(), 99.0)
    assert [1.25, 2.5, 5.0, 6.25] == waits


def test_a_worker_that_dies_too_often_is_given_up() -> None:
    """The fifth crash within the window is the last, and the reason says so."""
    supervisor = started("a")
    for now in range(4):
        assert [] == crash(supervisor, float(now))
        supervisor.handle(WakeupDue(), now + 50.0)
    (action,) = crash(supervisor, 60.0)
    reason = "it ended 5 times within 100 s, at last by signal 9"
    assert GiveUp(worker="a", reason=reason, configuration=False) == action
    assert supervisor.hopeless
    assert supervisor.finished
    assert supervisor.next_wakeup() is None


def test_a_worker_that_cannot_be_started_is_given_up_with_the_reason() -> None:
    """Clients are told it: it is no crash of the model."""
    supervisor = started("a")
    exited = WorkerExited(
        worker="a", status=127, said="cannot be started: [Errno 13] Permission denied: 'python'"
    )
    for now in range(4):
        supervisor.handle(exited, float(now), jitter=0.0)
        supervisor.handle(WakeupDue(), now + 50.0)
    (action,) = supervisor.handle(exited, 60.0, jitter=0.0)
    assert isinstance(action, GiveUp)
    assert action.reason.endswith(
        "at last with status 127: cannot be started: [Errno 13] Permission denied: 'python'"
    )


def test_crashes_outside_the_window_are_forgotten() -> None:
    """A worker that dies every two minutes is restarted for ever, at once."""
    supervisor = started("a")
    for round_ in range(20):
        now = round_ * 120.0
        assert [] == crash(supervisor, now)
        assert now + 1.0 == supervisor.next_wakeup()
        supervisor.handle(WakeupDue(), now + 1.0)


def test_a_worker_that_served_for_a_while_starts_with_a_clean_slate() -> None:
    """Killing a sound worker again and again never wears out the supervisor's patience."""
    supervisor = started("a")
    for round_ in range(20):
        now = round_ * 12.0
        supervisor.handle(WorkerReady(worker="a"), now)
        assert [] == crash(supervisor, now + 10.0)
        assert now + 11.0 == supervisor.next_wakeup()
        supervisor.handle(WakeupDue(), now + 11.0)


def test_a_configuration_error_is_final_at_once() -> None:
    """Exit status 3 says that another try would end the same way."""
    supervisor = started("a", "b")
    (action,) = crash(supervisor, 0.0, status=3)
    assert GiveUp(worker="a", reason="its configuration cannot be used", configuration=True) == action
    assert not supervisor.hopeless
    assert ProcessState.RUNNING is supervisor.state_of("b")


def test_an_unasked_clean_exit_is_followed_by_a_restart() -> None:
    """Somebody sent SIGTERM to one worker: the server still wants it."""
    supervisor = started("a")
    assert [] == crash(supervisor, 0.0, status=0)
    assert ProcessState.WAITING is supervisor.state_of("a")


def test_stopping_asks_first_and_kills_when_the_time_is_up() -> None:
    """SIGTERM to all, SIGKILL to those that are still there after the grace."""
    supervisor = started("a", "b")
    assert [TerminateWorker(worker="a"), TerminateWorker(worker="b")] == supervisor.handle(
        StopRequested(grace_s=5.0), 10.0
    )
    assert [] == crash(supervisor, 11.0, status=0)
    assert 15.0 == supervisor.next_wakeup()
    assert [KillWorker(worker="b")] == supervisor.handle(WakeupDue(), 15.0)
    assert supervisor.next_wakeup() is None
    assert not supervisor.finished
    supervisor.handle(WorkerExited(worker="b", status=-9), 15.1)
    assert supervisor.finished
    assert "<Supervisor 2 stopped>" == repr(supervisor)


def test_a_worker_that_waits_for_its_restart_is_not_started_while_stopping() -> None:
    """Stopping wins over restarting."""
    supervisor = started("a")
    crash(supervisor, 0.0)
    assert [] == supervisor.handle(StopRequested(grace_s=5.0), 0.5)
    assert supervisor.finished
    assert [] == supervisor.handle(WakeupDue(), 100.0)


def test_leaving_starts_nothing_and_ends_what_has_not_begun_to_serve() -> None:
    """Processes that serve are told, and end by themselves or when they are asked to."""
    supervisor = started("a", "b", "waits", "starts")
    for worker in ("a", "b"):
        supervisor.handle(WorkerReady(worker=worker), 1.0)
    crash_of_waits = WorkerExited(worker="waits", status=-9)
    supervisor.handle(crash_of_waits, 2.0)
    told = [TellToLeave(worker="a"), TellToLeave(worker="b"), TerminateWorker(worker="starts")]
    assert told == supervisor.handle(LeaveRequested(), 2.01)
    assert [] == supervisor.handle(WorkerExited(worker="a", status=0), 3.0)
    assert [] == supervisor.handle(WorkerExited(worker="starts", status=0), 3.0)
    assert [] == supervisor.handle(WakeupDue(), 100.0)
    assert not supervisor.finished
    assert [TerminateWorker(worker="b")] == supervisor.handle(StopRequested(grace_s=5.0), 101.0)
    supervisor.handle(WorkerExited(worker="b", status=0), 102.0)
    assert supervisor.finished


def test_stop_now_kills_what_runs_and_what_was_asked_before() -> None:
    """The second SIGTERM does not wait."""
    supervisor = started("a", "b")
    supervisor.handle(StopRequested(grace_s=60.0), 0.0)
    supervisor.handle(WorkerExited(worker="b", status=0), 1.0)
    assert [KillWorker(worker="a")] == supervisor.handle(StopNow(), 2.0)
    supervisor.handle(WorkerExited(worker="a", status=-9), 2.1)
    assert supervisor.finished


def test_no_workers_is_finished_but_not_hopeless() -> None:
    """A server whose workers dial in has nothing to supervise."""
    supervisor = Supervisor([], POLICY)
    assert [] == supervisor.begin()
    assert supervisor.finished
    assert not supervisor.hopeless
    assert "<Supervisor without workers>" == repr(supervisor)


def serving(*workers: str, start_s: float = 2.0) -> Supervisor:
    """A supervisor whose workers all became ready `start_s` after their start."""
    supervisor = started(*workers)
    for worker in workers:
        supervisor.handle(WorkerReady(worker=worker), start_s)
    return supervisor


def want(supervisor: Supervisor, worker: str, now: float) -> list[Action]:
    """The process has passed its memory limit."""
    return supervisor.handle(ReplacementWanted(worker=worker), now)


def test_a_replacement_is_ready_before_the_old_process_is_asked_to_finish() -> None:
    """It has the same command line and a name of its own; when the old one has ended there is one again."""
    supervisor = serving("a", "b")
    assert [StartWorker(worker="a+1", attempt=0, role="a")] == want(supervisor, "a", 50.0)
    assert "<Supervisor 3 running>" == repr(supervisor)
    assert [TerminateWorker(worker="a")] == supervisor.handle(WorkerReady(worker="a+1"), 52.0)
    assert [] == supervisor.handle(WorkerReady(worker="a+1"), 52.5)
    assert [] == supervisor.handle(WorkerExited(worker="a", status=0), 53.0)
    assert "<Supervisor 2 running>" == repr(supervisor)
    assert ("a", None) == (supervisor.role_of("a+1"), supervisor.next_wakeup())
    assert [StartWorker(worker="a+2", attempt=0, role="a")] == want(supervisor, "a+1", 90.0)


def test_one_process_is_replaced_at_a_time() -> None:
    """The next one's turn comes when the old process has ended, not when the new one is ready; asking twice is once."""
    supervisor = serving("a", "b")
    want(supervisor, "a", 50.0)
    assert [] == want(supervisor, "b", 50.0)
    assert [] == want(supervisor, "a", 51.0)
    supervisor.handle(WorkerReady(worker="a+1"), 52.0)
    assert [] == supervisor.handle(WakeupDue(), 52.5)
    assert [StartWorker(worker="b+2", attempt=0, role="b")] == supervisor.handle(
        WorkerExited(worker="a", status=0), 53.0
    )


def test_a_limit_that_is_too_low_does_not_eat_the_time_up() -> None:
    """A process that took 2 s to start serves for 8 s at least before it is replaced."""
    supervisor = serving("a", start_s=2.0)
    assert [] == want(supervisor, "a", 3.0)
    assert 10.0 == supervisor.next_wakeup()
    assert [] == supervisor.handle(WakeupDue(), 9.9)
    assert [StartWorker(worker="a+1", attempt=0, role="a")] == supervisor.handle(WakeupDue(), 10.0)


def test_an_old_process_that_does_not_finish_is_killed() -> None:
    """After its grace; its replacement serves meanwhile."""
    supervisor = serving("a")
    want(supervisor, "a", 50.0)
    supervisor.handle(WorkerReady(worker="a+1"), 52.0)
    assert 82.0 == supervisor.next_wakeup()
    assert [KillWorker(worker="a")] == supervisor.handle(WakeupDue(), 82.0)
    assert [] == supervisor.handle(WorkerExited(worker="a", status=-9), 82.1)
    assert "<Supervisor 1 running>" == repr(supervisor)


def test_a_process_that_dies_while_it_is_replaced_is_not_restarted() -> None:
    """Its replacement takes its place, and is restarted like any other worker."""
    supervisor = serving("a")
    want(supervisor, "a", 50.0)
    assert [] == crash(supervisor, 51.0)
    assert "<Supervisor 1 running>" == repr(supervisor)
    supervisor.handle(WorkerExited(worker="a+1", status=-9), 52.0)
    assert [StartWorker(worker="a+1", attempt=1, role="a")] == supervisor.handle(WakeupDue(), 53.0)


def test_a_process_that_dies_before_its_turn_loses_it() -> None:
    """A restarted process is fresh; only if it asks itself is it replaced."""
    supervisor = serving("a", "b")
    want(supervisor, "b", 50.0)
    want(supervisor, "a", 50.0)
    crash(supervisor, 51.0)
    supervisor.handle(WorkerReady(worker="b+1"), 52.0)
    supervisor.handle(WorkerExited(worker="b", status=0), 53.0)
    supervisor.handle(WakeupDue(), 54.0)
    supervisor.handle(WorkerReady(worker="a"), 55.0)
    assert [] == supervisor.handle(WakeupDue(), 1000.0)


def test_a_replacement_that_crashes_is_tried_again_beside_the_old_process() -> None:
    """With the backoff of any worker; the old one serves on."""
    supervisor = serving("a")
    want(supervisor, "a", 50.0)
    assert [] == supervisor.handle(WorkerExited(worker="a+1", status=1), 51.0)
    assert [StartWorker(worker="a+1", attempt=1, role="a")] == supervisor.handle(WakeupDue(), 52.0)
    assert [TerminateWorker(worker="a")] == supervisor.handle(WorkerReady(worker="a+1"), 54.0)


def test_a_replacement_that_cannot_be_had_leaves_the_old_process_in_its_place() -> None:
    """The model's file is gone, say: one that is too large is better than none. It is not tried for ever."""
    supervisor = serving("a", "b")
    want(supervisor, "a", 50.0)
    want(supervisor, "b", 50.0)
    keep, start = supervisor.handle(WorkerExited(worker="a+1", status=3), 51.0)
    assert KeepWorker(worker="a", reason="its configuration cannot be used") == keep
    assert StartWorker(worker="b+2", attempt=0, role="b") == start
    assert [] == want(supervisor, "a", 60.0)
    assert ProcessState.RUNNING is supervisor.state_of("a")
    assert not supervisor.hopeless


def test_nothing_is_replaced_while_stopping() -> None:
    """Old and new are asked to end, and what waits for its turn is forgotten."""
    supervisor = serving("a", "b")
    want(supervisor, "a", 50.0)
    want(supervisor, "b", 50.0)
    stops = supervisor.handle(StopRequested(grace_s=5.0), 51.0)
    assert [TerminateWorker(worker=name) for name in ("a", "b", "a+1")] == stops
    for name in ("a", "b", "a+1"):
        assert [] == supervisor.handle(WorkerExited(worker=name, status=0), 52.0)
    assert supervisor.finished
    assert supervisor.next_wakeup() is None


def killed_by_a_request(supervisor: Supervisor, now: float, answered_at: float | None) -> list[Action]:
    """The worker `a` dies in the middle of a batch."""
    return supervisor.handle(WorkerExited(worker="a", status=-9, busy=True, answered_at=answered_at), now)


def test_a_worker_that_answers_is_not_given_up_for_what_kills_it() -> None:
    """Requests that kill are dealt with elsewhere: after ten of them it still comes back, within a second or so."""
    supervisor = started("a")
    for now in range(10):
        assert [] == killed_by_a_request(supervisor, float(now), now - 0.5 if now == 0 else None)
        wakeup = supervisor.next_wakeup()
        assert wakeup is not None
        assert now + 1.0 == wakeup
        assert [StartWorker(worker="a", attempt=now + 1, role="a")] == supervisor.handle(WakeupDue(), wakeup)


def test_a_worker_that_never_answers_is_given_up_though_it_dies_of_what_it_runs() -> None:
    """Its device may be broken: then every request would seem to kill."""
    supervisor = started("a")
    for now in range(4):
        assert [] == killed_by_a_request(supervisor, float(now), None)
        supervisor.handle(WakeupDue(), now + 50.0)
    (action,) = killed_by_a_request(supervisor, 60.0, None)
    assert isinstance(action, GiveUp)


def test_what_was_answered_long_ago_excuses_nothing() -> None:
    """After a window without an answer its deaths count again."""
    supervisor = started("a")
    killed_by_a_request(supervisor, 1.0, 0.5)
    supervisor.handle(WakeupDue(), 2.0)
    for number in range(4):
        assert [] == killed_by_a_request(supervisor, 101.0 + number, None)
        supervisor.handle(WakeupDue(), 110.0 + number)
    (action,) = killed_by_a_request(supervisor, 115.0, None)
    assert isinstance(action, GiveUp)


def test_a_restart_replaces_every_worker_one_after_the_other() -> None:
    """However short they have served; the second one's turn comes when the first old process has ended.

    A process that was being started at a second restart may have read the configuration before: it ends, and starts anew.
    """
    supervisor = serving("a", "b")
    assert [StartWorker(worker="a+1", attempt=0, role="a")] == supervisor.handle(RestartRequested(), 3.0)
    kill = KillWorker(worker="a+1", why="a newer reload replaces it")
    assert [kill] == supervisor.handle(RestartRequested(), 3.5)
    assert [StartWorker(worker="a+2", attempt=0, role="a")] == supervisor.handle(
        WorkerExited(worker="a+1", status=-9), 3.6
    )
    assert [TerminateWorker(worker="a")] == supervisor.handle(WorkerReady(worker="a+2"), 5.0)
    assert [StartWorker(worker="b+3", attempt=0, role="b")] == supervisor.handle(
        WorkerExited(worker="a", status=0), 5.5
    )
    assert [TerminateWorker(worker="b")] == supervisor.handle(WorkerReady(worker="b+3"), 7.0)
    assert [] == supervisor.handle(WorkerExited(worker="b", status=0), 8.0)
    assert "<Supervisor 2 running>" == repr(supervisor)


def test_a_restart_is_over_when_each_worker_was_replaced() -> None:
    """The last old process has ended, too; what was restarted after a death is new as well."""
    supervisor = serving("a", "b")
    before = supervisor.starts
    supervisor.handle(RestartRequested(), 3.0)
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    supervisor.handle(WorkerExited(worker="b", status=-9), 5.0)
    supervisor.handle(WakeupDue(), 7.0)
    supervisor.handle(WorkerReady(worker="b"), 8.0)
    assert ended(supervisor, before, 8.0) is None
    supervisor.handle(WorkerExited(worker="a", status=0), 9.0)
    expected = Restarted(replaced=("b", "a"), kept={}, given_up={}, starting={})
    assert expected == ended(supervisor, before, 9.0)
    assert ended(supervisor, supervisor.starts, 9.0) is None


def test_a_restart_is_over_where_old_processes_go_on_or_none_can_start() -> None:
    """It says why; at the next restart both are tried again."""
    supervisor = serving("a", "b")
    supervisor.handle(WorkerExited(worker="b", status=3), 2.0)
    before = supervisor.starts
    supervisor.handle(RestartRequested(), 3.0)
    supervisor.handle(WorkerExited(worker="a+1", status=3, said="x.yaml:1:2: no"), 4.0)
    assert ended(supervisor, before, 4.0) is None
    supervisor.handle(WorkerExited(worker="b", status=3), 5.0)
    why = "its configuration cannot be used"
    expected = Restarted(replaced=(), kept={"a": f"{why}: x.yaml:1:2: no"}, given_up={"b": why}, starting={})
    assert expected == ended(supervisor, before, 5.0)
    before = supervisor.starts
    supervisor.handle(RestartRequested(), 6.0)
    assert ended(supervisor, before, 6.0) is None


@pytest.mark.parametrize(("start_s", "late_at"), [(2.0, 110.0), (50.0, 210.0)])
def test_a_restart_ends_where_a_process_neither_comes_up_nor_ends(start_s: float, late_at: float) -> None:
    """After the window, or four start-up times of the old process. It says which; when it comes up, the others follow."""
    supervisor = serving("a", "b", start_s=start_s)
    before = supervisor.starts
    supervisor.handle(RestartRequested(), start_s)
    started_at = late_at - max(POLICY.window_s, 4.0 * start_s)
    supervisor.handle(WorkerExited(worker="a+1", status=-9), started_at - 1.0)
    supervisor.handle(WakeupDue(), started_at)
    assert late_at == supervisor.next_late(started_at)
    assert ended(supervisor, before, late_at - 0.1) is None
    starting = {
        "a": f"a+1 is not ready after {late_at - started_at:.0f} s; end it to try again",
        "b": "it is replaced after a+1 is ready or has ended",
    }
    expected = Restarted(replaced=(), kept={}, given_up={}, starting=starting)
    assert expected == ended(supervisor, before, late_at)
    supervisor.handle(WorkerReady(worker="a+1"), late_at + 1.0)
    assert [StartWorker(worker="b+2", attempt=0, role="b")] == supervisor.handle(
        WorkerExited(worker="a", status=0), late_at + 2.0
    )
    assert ended(supervisor, before, late_at + 2.0) is None


def test_a_restart_ends_where_a_process_was_late_before_it() -> None:
    """It never came up since the server started: there is none that serves, and none that is given up."""
    supervisor = started("a")
    before = supervisor.starts
    supervisor.handle(RestartRequested(), 500.0)
    restarted = ended(supervisor, before, 500.0)
    assert restarted is not None
    assert ["a"] == list(restarted.starting)


def test_a_restart_starts_workers_again_that_were_given_up() -> None:
    """With a clean slate."""
    supervisor = started("a", "b")
    crash(supervisor, 0.0, status=3)
    start_a, *_ = supervisor.handle(RestartRequested(), 1.0)
    assert StartWorker(worker="a", attempt=1, role="a") == start_a
    assert [] == crash(supervisor, 2.0)
    assert 3.0 == supervisor.next_wakeup()


def test_a_restart_tries_again_where_a_replacement_had_failed() -> None:
    """Somebody has put the model's file back, say."""
    supervisor = serving("a")
    want(supervisor, "a", 50.0)
    supervisor.handle(WorkerExited(worker="a+1", status=3), 51.0)
    assert [] == want(supervisor, "a", 60.0)
    assert [StartWorker(worker="a+2", attempt=0, role="a")] == supervisor.handle(RestartRequested(), 61.0)


def test_what_a_process_read_before_a_restart_does_not_give_it_up() -> None:
    """It ends because of a configuration that was replaced meanwhile; its next start reads the new one."""
    supervisor = started("a", "b")
    supervisor.handle(RestartRequested(), 1.0)
    assert [] == crash(supervisor, 2.0, status=3)
    assert [StartWorker(worker="a", attempt=1, role="a")] == supervisor.handle(WakeupDue(), 3.0)
    (given_up,) = crash(supervisor, 4.0, status=3)
    assert isinstance(given_up, GiveUp)


def test_roles_come_at_once_and_go_when_the_others_serve() -> None:
    """A role that was removed serves until the new one is ready; what is not named is left alone."""
    supervisor = serving("a", "b")
    before, asked = supervisor.starts, RestartRequested(roles=("a", "c"), fresh=frozenset("c"))
    assert [StartWorker(worker="c", attempt=0, role="c")] == supervisor.handle(asked, 3.0)
    assert ("a", "c") == supervisor.roles
    assert supervisor.restarted_since(before, 4.0, asked, ("a", "b")) is None
    assert [TerminateWorker(worker="b")] == supervisor.handle(WorkerReady(worker="c"), 5.0)
    assert supervisor.restarted_since(before, 5.0, asked, ("a", "b")) is None
    assert [] == supervisor.handle(WorkerExited(worker="b", status=0), 6.0)
    expected = Restarted(
        replaced=(), added=("c",), unchanged=("a",), removed=("b",), kept={}, given_up={}, starting={}
    )
    assert expected == supervisor.restarted_since(before, 6.0, asked, ("a", "b"))
    assert supervisor.next_wakeup() is None


def test_a_removed_role_stays_while_no_other_serves() -> None:
    """The new one was given up: better the old one than none."""
    supervisor = serving("a")
    supervisor.handle(RestartRequested(roles=("b",), fresh=frozenset("b")), 3.0)
    assert isinstance(supervisor.handle(WorkerExited(worker="b", status=3), 4.0)[0], GiveUp)
    assert ProcessState.RUNNING is supervisor.state_of("a")
    assert not supervisor.hopeless


def test_a_restart_into_no_roles_waits_for_the_next_one() -> None:
    """All its workers dial in now, say."""
    supervisor = serving("a")
    assert [TerminateWorker(worker="a")] == supervisor.handle(
        RestartRequested(roles=(), fresh=frozenset()), 3.0
    )
    supervisor.handle(WorkerExited(worker="a", status=0), 4.0)
    assert not supervisor.finished
    supervisor.handle(RestartRequested(roles=("a",), fresh=frozenset("a")), 5.0)
    assert ("a",) == supervisor.roles
    supervisor.handle(StopRequested(grace_s=1.0), 6.0)
    supervisor.handle(WorkerExited(worker="a", status=0), 6.5)
    assert supervisor.finished


@pytest.mark.parametrize("crashes", [0, 1])
def test_a_process_that_is_not_ready_in_time_is_killed_and_the_old_one_stays(crashes: int) -> None:
    """Whether it hangs, or crashes and waits for its next start."""
    supervisor = serving("a")
    before, asked = supervisor.starts, RestartRequested(start_s=5.0)
    supervisor.handle(asked, 10.0)
    why = "it was not ready within 5 s (server.reload_s)"
    if crashes:
        for at, wait_s in ((11.0, 1.0), (13.0, 2.0)):
            supervisor.handle(WorkerExited(worker="a+1", status=-9, said="no memory"), at)
            if at + wait_s < 15.0:
                supervisor.handle(WakeupDue(), at + wait_s)
        why += ": no memory"
        assert [KeepWorker(worker="a", reason=why)] == supervisor.handle(WakeupDue(), 15.0)
    else:
        assert 15.0 == supervisor.next_wakeup()
        (kill,) = supervisor.handle(WakeupDue(), 15.0)
        assert KillWorker(worker="a+1", why="it was not ready in time") == kill
        assert [KeepWorker(worker="a", reason=why)] == supervisor.handle(
            WorkerExited(worker="a+1", status=-9), 15.5
        )
    found = supervisor.restarted_since(before, 16.0, asked, ("a",))
    assert found is not None
    assert {"a": why} == found.kept
    assert supervisor.next_wakeup() is None


ALL = RestartRequested(at_once=True, start_s=30.0)
NEVER = "its configuration cannot be used"


def preparing(*workers: str, asked: RestartRequested = ALL) -> Supervisor:
    """A supervisor that replaces all workers at once, none of which is ready; `a+1` is the successor of `a`, and so on."""
    supervisor = serving(*workers)
    names = [f"{role}+{number}" for number, role in enumerate(workers, 1)]
    started_at_once = [
        StartWorker(worker=name, attempt=0, role=role) for name, role in zip(names, workers, strict=True)
    ]
    assert started_at_once == supervisor.handle(asked, 3.0)[-len(workers) :]
    return supervisor


def test_traffic_moves_to_all_new_processes_at_once() -> None:
    """Those that are ready first are held; the old ones finish when the last one is ready."""
    supervisor = preparing("a", "b")
    assert [] == supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    assert supervisor.is_held("a+1")
    assert [] == supervisor.handle(WakeupDue(), 6.0)
    assert [
        MoveTraffic(workers=("a+1", "b+2")),
        TerminateWorker(worker="a"),
        TerminateWorker(worker="b"),
    ] == supervisor.handle(WorkerReady(worker="b+2"), 7.0)
    assert not supervisor.is_held("a+1")
    assert ended(supervisor, 2, 7.0) is None
    for name in ("a", "b"):
        assert [] == supervisor.handle(WorkerExited(worker=name, status=0), 8.0)
    expected = Restarted(replaced=("a", "b"), kept={}, given_up={}, starting={})
    assert expected == ended(supervisor, 2, 8.0)
    assert supervisor.next_wakeup() is None


def test_nothing_moves_where_one_process_does_not_come_up() -> None:
    """Those that are ready end, with those that start; every old process goes on, and the result says why."""
    supervisor = preparing("a", "b", "c")
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    why = f"nothing moves, since b cannot be replaced: {NEVER}"
    assert [
        KeepWorker(worker="b", reason=NEVER),
        KillWorker(worker="a+1", why=why),
        KillWorker(worker="c+3", why=why),
    ] == supervisor.handle(WorkerExited(worker="b+2", status=3), 6.0)
    assert [] == supervisor.handle(WorkerReady(worker="c+3"), 6.1)  # it was ready before it was killed
    for old, new in (("a", "a+1"), ("c", "c+3")):
        assert ended(supervisor, 3, 6.2) is None
        kept = KeepWorker(worker=old, reason=why)
        assert [kept] == supervisor.handle(WorkerExited(worker=new, status=-9), 6.2)
    expected = Restarted(replaced=(), kept={"a": why, "b": NEVER, "c": why}, given_up={}, starting={})
    assert expected == ended(supervisor, 3, 6.5)
    assert "<Supervisor 3 running>" == repr(supervisor)
    assert 3 == len(supervisor.handle(ALL, 7.0))


def test_nothing_moves_where_one_process_is_not_ready_in_time() -> None:
    """`start_s` holds for one that was ready, died while it was held, and is started again, too."""
    supervisor = preparing("a", "b")
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    supervisor.handle(WorkerExited(worker="a+1", status=-9), 20.0)
    assert [StartWorker(worker="a+1", attempt=1, role="a")] == supervisor.handle(WakeupDue(), 21.0)
    assert [KillWorker(worker="b+2", why="it was not ready in time")] == supervisor.handle(WakeupDue(), 33.0)
    late = "it was not ready within 30 s (server.reload_s)"
    why = f"nothing moves, since b cannot be replaced: {late}"
    assert [KeepWorker(worker="b", reason=late), KillWorker(worker="a+1", why=why)] == supervisor.handle(
        WorkerExited(worker="b+2", status=-9), 33.1
    )


def test_a_process_that_dies_while_it_is_held_is_started_again_and_awaited() -> None:
    """The traffic moves when it is ready again."""
    supervisor = preparing("a", "b")
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    supervisor.handle(WorkerExited(worker="a+1", status=-9), 6.0)
    assert [] == supervisor.handle(WorkerReady(worker="b+2"), 6.5)
    supervisor.handle(WakeupDue(), 7.0)
    assert MoveTraffic(workers=("a+1", "b+2")) == supervisor.handle(WorkerReady(worker="a+1"), 9.0)[0]


def test_an_old_process_that_dies_before_the_move_is_not_started_again() -> None:
    """Its successor is on the way; where nothing moves, that one is let in, since its role would have none."""
    supervisor = preparing("a", "b")
    assert [] == supervisor.handle(WorkerExited(worker="a", status=-9), 4.0)
    assert [] == supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    assert [
        KeepWorker(worker="b", reason=NEVER),
        MoveTraffic(workers=("a+1",)),
    ] == supervisor.handle(WorkerExited(worker="b+2", status=3), 6.0)
    expected = Restarted(replaced=("a",), kept={"b": NEVER}, given_up={}, starting={})
    assert expected == ended(supervisor, 2, 6.0)


def test_an_old_process_that_dies_while_what_is_called_off_ends_is_followed_by_that() -> None:
    """It is started once more: else its role would have none."""
    supervisor = preparing("a", "b")
    supervisor.handle(WorkerExited(worker="b+2", status=3), 6.0)
    assert [] == supervisor.handle(WorkerExited(worker="a", status=-9), 6.1)
    start = StartWorker(worker="a+1", attempt=1, role="a")
    assert [start] == supervisor.handle(WorkerExited(worker="a+1", status=-9), 6.2)
    assert not supervisor.is_held("a+1")


def test_a_held_process_without_predecessor_has_no_more_time_than_others() -> None:
    """The others move without it."""
    supervisor = preparing("a", "b")
    supervisor.handle(WorkerExited(worker="a", status=-9), 4.0)
    supervisor.handle(WorkerReady(worker="b+2"), 5.0)
    assert 33.0 == supervisor.next_wakeup()
    supervisor.handle(WakeupDue(), 33.0)
    given_up, move, _ = supervisor.handle(WorkerExited(worker="a+1", status=-9), 33.1)
    assert isinstance(given_up, GiveUp)
    assert MoveTraffic(workers=("b+2",)) == move


def test_a_process_is_not_replaced_before_its_predecessor_has_ended() -> None:
    """Of a role there are two at most, also where a process was just replaced for its memory."""
    supervisor = serving("a")
    want(supervisor, "a", 50.0)
    supervisor.handle(WorkerReady(worker="a+1"), 52.0)
    assert [] == supervisor.handle(ALL, 53.0)
    start = StartWorker(worker="a+2", attempt=0, role="a")
    assert [start] == supervisor.handle(WorkerExited(worker="a", status=0), 54.0)


def test_a_newer_restart_ends_all_that_is_held_before_it_starts_anything() -> None:
    """Also those that were ready. One after the other, if it asks for that."""
    why = "a newer reload replaces it"
    for asked, names in ((ALL, ["a+3", "b+4"]), (RestartRequested(), ["a+3"])):
        supervisor = preparing("a", "b")
        supervisor.handle(WorkerReady(worker="a+1"), 5.0)
        kills = [KillWorker(worker=name, why=why) for name in ("a+1", "b+2")]
        assert kills == supervisor.handle(asked, 6.0)
        assert [] == supervisor.handle(WorkerExited(worker="a+1", status=-9), 6.1)
        starts = supervisor.handle(WorkerExited(worker="b+2", status=-9), 6.2)
        assert names == [start.worker for start in starts if isinstance(start, StartWorker)]


def test_a_restart_that_comes_while_processes_of_the_last_one_end_replaces_all_the_same() -> None:
    """Nothing moved, and what was killed for that has not ended."""
    supervisor = preparing("a", "b")
    supervisor.handle(WorkerExited(worker="b+2", status=3), 6.0)
    assert [] == supervisor.handle(ALL, 6.1)
    assert [
        StartWorker(worker="a+3", attempt=0, role="a"),
        StartWorker(worker="b+4", attempt=0, role="b"),
    ] == supervisor.handle(WorkerExited(worker="a+1", status=-9), 6.2)


def test_new_roles_move_with_the_others_and_hold_nothing_up() -> None:
    """One that cannot start is given up. Removed roles finish at the move."""
    asked = RestartRequested(roles=("a", "new", "bad"), fresh=frozenset(("a", "new", "bad")), at_once=True)
    supervisor = serving("a", "gone")
    supervisor.handle(asked, 3.0)
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    supervisor.handle(WorkerReady(worker="new"), 6.0)
    assert isinstance(supervisor.handle(WorkerExited(worker="bad", status=3), 7.0)[0], GiveUp)
    assert not supervisor.is_held("new")
    assert ProcessState.STOPPING is supervisor.state_of("a")
    assert ProcessState.STOPPING is supervisor.state_of("gone")
    for name in ("a", "gone"):
        supervisor.handle(WorkerExited(worker=name, status=0), 8.0)
    found = supervisor.restarted_since(2, 8.0, asked, ("a", "gone"))
    assert found is not None
    assert (("a",), ("new",), ("gone",), {"bad": NEVER}) == (
        found.replaced, found.added, found.removed, found.given_up,
    )  # fmt: skip


def test_new_roles_end_where_nothing_moves() -> None:
    """They would take all the traffic of a model that has changed."""
    asked = RestartRequested(roles=("a", "new"), at_once=True)
    supervisor = serving("a")
    supervisor.handle(asked, 3.0)
    supervisor.handle(WorkerReady(worker="new"), 5.0)
    kept, killed = supervisor.handle(WorkerExited(worker="a+1", status=3), 6.0)
    assert ("a", "new") == (kept.worker, killed.worker)  # type: ignore[union-attr]  # both have one
    assert isinstance(supervisor.handle(WorkerExited(worker="new", status=-9), 6.1)[0], GiveUp)
    assert not supervisor.hopeless


def test_a_held_process_is_ended_where_the_server_leaves_or_stops() -> None:
    """It serves nobody, so it has nothing to finish. Nothing moves any more."""
    supervisor = preparing("a", "b")
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    assert [
        TellToLeave(worker="a"),
        TellToLeave(worker="b"),
        TerminateWorker(worker="a+1"),
        TerminateWorker(worker="b+2"),
    ] == supervisor.handle(LeaveRequested(), 6.0)
    assert [] == supervisor.handle(WorkerReady(worker="b+2"), 6.1)


def test_a_move_that_waits_for_a_late_process_takes_place_when_that_is_ready() -> None:
    """The restart ends before, and names them."""
    supervisor = preparing("a", "b", asked=RestartRequested(at_once=True))
    supervisor.handle(WorkerReady(worker="a+1"), 5.0)
    expected = {
        "a": "a+1 gets requests after b+2 is ready or has ended",
        "b": "b+2 is not ready after 100 s; end it to try again",
    }
    assert Restarted(replaced=(), kept={}, given_up={}, starting=expected) == ended(supervisor, 2, 103.0)
    assert MoveTraffic(workers=("a+1", "b+2")) == supervisor.handle(WorkerReady(worker="b+2"), 200.0)[0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "exit",
                    "exit",
                    "ready",
                    "ready",
                    "replace",
                    "replace",
                    "restart",
                    "restart all",
                    "restart all",
                    "time",
                    "leave",
                    "stop",
                    "now",
                ]
            ),
            st.integers(0, 2),
            st.floats(0.0, 20.0),
            st.sampled_from([0, 1, 3, -9]),
        ),
        max_size=60,
    )
)
def test_whatever_happens_a_worker_never_runs_twice_and_nothing_starts_after_a_stop(
    steps: list[tuple[str, int, float, int]],
) -> None:
    """Over random histories: one process per role and one replacement, no start once stopping, and an end after it.

    Of a role that is replaced at once there are two at most. Once all come up, none is held.
    """
    supervisor = Supervisor(["a", "b"], POLICY)
    running = {action.worker for action in supervisor.begin()}
    now, stopping, at_once = 0.0, False, False
    for kind, which, wait_s, status in steps:
        now += wait_s
        worker = sorted(running)[which] if which < len(running) else ""
        if kind in ("exit", "ready", "replace") and not worker:
            continue
        stopping |= kind in ("leave", "stop", "now")
        running -= {worker} if kind == "exit" else set()
        event = {
            "exit": WorkerExited(
                worker=worker, status=status, busy=status == -9, answered_at=now - 1 if which else None
            ),
            "restart": RestartRequested(),
            "restart all": ALL,
            "ready": WorkerReady(worker=worker),
            "replace": ReplacementWanted(worker=worker),
            "time": WakeupDue(),
            "leave": LeaveRequested(),
            "stop": StopRequested(grace_s=5.0),
            "now": StopNow(),
        }[kind]
        for action in supervisor.handle(event, now, jitter=0.5):
            match action:
                case StartWorker():
                    assert not stopping
                    assert action.worker not in running
                    running.add(action.worker)
                case TellToLeave() | TerminateWorker() | KillWorker():
                    assert action.worker in running
                case GiveUp():
                    assert action.worker not in running
                case KeepWorker():
                    assert action.worker in running
                case MoveTraffic():
                    assert running >= set(action.workers)
                    assert not any(map(supervisor.is_held, running))
        at_once |= kind == "restart all"
        assert len(running) <= 3 or at_once, "more than one process in addition"
        assert {1, 2} >= set(Counter(map(supervisor.role_of, running)).values()), (
            "more than two processes of a role"
        )
        wakeup = supervisor.next_wakeup()
        assert wakeup is None or wakeup > now or kind != "time", "a wakeup in the past would be a busy loop"
    for _ in range(20 if not stopping else 0):
        now += 40.0
        for worker in sorted(running):
            ends = supervisor.state_of(worker) is ProcessState.STOPPING
            event = WorkerExited(worker=worker, status=0) if ends else WorkerReady(worker=worker)
            running -= {worker} if ends else set()
            actions = [*supervisor.handle(event, now), *supervisor.handle(WakeupDue(), now)]
            running |= {action.worker for action in actions if isinstance(action, StartWorker)}
    assert stopping or not any(map(supervisor.is_held, running))
    supervisor.handle(StopNow(), now)
    for worker in running:
        supervisor.handle(WorkerExited(worker=worker, status=-9), now)
    assert supervisor.finished
    assert supervisor.next_wakeup() is None


def test_a_worker_of_other_files_is_not_started_again_before_it_is_asked_for() -> None:
    """Its first refusal ends the attempts, whatever it has crashed before; a restart of all tries it again."""
    supervisor = started("a", "b")
    (given_up,) = crash(supervisor, 1.0, status=4)
    assert isinstance(given_up, GiveUp)
    assert ("a", False) == (given_up.worker, given_up.configuration)
    assert supervisor.next_wakeup() is None
    (start, *_) = supervisor.handle(RestartRequested(), 2.0)
    assert StartWorker(worker="a", attempt=1, role="a") == start


def test_a_worker_that_served_before_it_was_refused_is_started_again_and_has_not_crashed() -> None:
    """Its files were replaced while it ran, and what it reads next are those that are served."""
    supervisor = started("a")
    now = 0.0
    for _ in range(2 * POLICY.max_crashes):
        supervisor.handle(WorkerReady(worker="a"), now)
        assert [] == crash(supervisor, now + 1.0, status=4)
        wakeup = supervisor.next_wakeup()
        assert now + 1.0 + POLICY.backoff_initial_s == wakeup
        (start,) = supervisor.handle(WakeupDue(), now + 2.0)
        assert isinstance(start, StartWorker)
        now += 3.0


def test_a_replacement_of_other_files_leaves_the_old_process_in_its_place() -> None:
    """A worker past its memory limit goes on when its successor is refused."""
    supervisor = started("a")
    supervisor.handle(WorkerReady(worker="a"), 1.0)
    supervisor.handle(ReplacementWanted(worker="a"), 50.0)
    keep, *_ = supervisor.handle(WorkerExited(worker="a+1", status=4), 51.0)
    assert isinstance(keep, KeepWorker)
    assert "a" == keep.worker
