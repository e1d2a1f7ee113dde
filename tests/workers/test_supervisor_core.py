"""The supervisor's decisions, without a process or a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shapestream_workers.supervisor.core import RestartPolicy, State, Supervisor
from shapestream_workers.supervisor.events import (
    Action,
    GiveUp,
    KillWorker,
    StartWorker,
    StopNow,
    StopRequested,
    TerminateWorker,
    TimePassed,
    WorkerExited,
    WorkerReady,
)

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


def crash(supervisor: Supervisor, now: float, *, status: int = -9, jitter: float = 0.0) -> list[Action]:
    """The worker `a` dies."""
    return supervisor.handle(WorkerExited(worker="a", status=status), now, jitter=jitter)


def test_every_worker_is_started_once() -> None:
    """`begin` starts them all; asking again starts nothing."""
    supervisor = Supervisor(["a", "b"], POLICY)
    assert [StartWorker(worker="a", attempt=0), StartWorker(worker="b", attempt=0)] == supervisor.begin()
    assert [] == supervisor.begin()
    assert "<Supervisor 2 running>" == repr(supervisor)


def test_a_dead_worker_comes_back_after_the_backoff() -> None:
    """It is restarted at the time that `next_wakeup` names, not before."""
    supervisor = started("a", "b")
    assert [] == crash(supervisor, 10.0)
    assert 11.0 == supervisor.next_wakeup()
    assert "<Supervisor 1 running, 1 waiting>" == repr(supervisor)
    assert [] == supervisor.handle(TimePassed(), 10.9)
    assert [StartWorker(worker="a", attempt=1)] == supervisor.handle(TimePassed(), 11.0)
    assert supervisor.next_wakeup() is None


def test_the_backoff_grows_to_its_limit_and_takes_jitter() -> None:
    """1, 2, 4 and then 5 seconds, plus at most half of it."""
    supervisor = started("a")
    waits = []
    for _ in range(4):
        crash(supervisor, 0.0, jitter=0.5)
        waits.append(supervisor.next_wakeup())
        supervisor.handle(TimePassed(), 99.0)
    assert [1.25, 2.5, 5.0, 6.25] == waits


def test_a_worker_that_dies_too_often_is_given_up() -> None:
    """The fifth crash within the window is the last, and the reason says so."""
    supervisor = started("a")
    for now in range(4):
        assert [] == crash(supervisor, float(now))
        supervisor.handle(TimePassed(), now + 50.0)
    (action,) = crash(supervisor, 60.0)
    assert GiveUp(worker="a", reason="it ended 5 times within 100 s", configuration=False) == action
    assert supervisor.hopeless
    assert supervisor.finished
    assert supervisor.next_wakeup() is None


def test_crashes_outside_the_window_are_forgotten() -> None:
    """A worker that dies every two minutes is restarted for ever, at once."""
    supervisor = started("a")
    for round_ in range(20):
        now = round_ * 120.0
        assert [] == crash(supervisor, now)
        assert now + 1.0 == supervisor.next_wakeup()
        supervisor.handle(TimePassed(), now + 1.0)


def test_a_worker_that_served_for_a_while_starts_with_a_clean_slate() -> None:
    """Killing a sound worker again and again never wears out the supervisor's patience."""
    supervisor = started("a")
    for round_ in range(20):
        now = round_ * 12.0
        supervisor.handle(WorkerReady(worker="a"), now)
        assert [] == crash(supervisor, now + 10.0)
        assert now + 11.0 == supervisor.next_wakeup()
        supervisor.handle(TimePassed(), now + 11.0)


def test_a_configuration_error_is_final_at_once() -> None:
    """Exit status 3 says that another try would end the same way."""
    supervisor = started("a", "b")
    (action,) = crash(supervisor, 0.0, status=3)
    assert GiveUp(worker="a", reason="its configuration cannot be used", configuration=True) == action
    assert not supervisor.hopeless
    assert State.RUNNING is supervisor.state_of("b")


def test_an_unasked_clean_exit_is_followed_by_a_restart() -> None:
    """Somebody sent SIGTERM to one worker: the server still wants it."""
    supervisor = started("a")
    assert [] == crash(supervisor, 0.0, status=0)
    assert State.WAITING is supervisor.state_of("a")


def test_stopping_asks_first_and_kills_when_the_time_is_up() -> None:
    """SIGTERM to all, SIGKILL to those that are still there after the grace."""
    supervisor = started("a", "b")
    assert [TerminateWorker(worker="a"), TerminateWorker(worker="b")] == supervisor.handle(
        StopRequested(grace_s=5.0), 10.0
    )
    assert [] == crash(supervisor, 11.0, status=0)
    assert 15.0 == supervisor.next_wakeup()
    assert [KillWorker(worker="b")] == supervisor.handle(TimePassed(), 15.0)
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
    assert [] == supervisor.handle(TimePassed(), 100.0)


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


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["exit a", "exit b", "ready a", "time", "stop", "now"]),
            st.floats(0.0, 20.0),
            st.sampled_from([0, 1, 3, -9]),
        ),
        max_size=60,
    )
)
def test_whatever_happens_a_worker_never_runs_twice_and_nothing_starts_after_a_stop(
    steps: list[tuple[str, float, int]],
) -> None:
    """Over random histories: one process per name, no start once stopping, and an end after it."""
    supervisor = Supervisor(["a", "b"], POLICY)
    running = {action.worker for action in supervisor.begin()}
    now, stopping = 0.0, False
    for what, wait_s, status in steps:
        now += wait_s
        kind, _, worker = what.partition(" ")
        if kind == "exit" and worker not in running:
            continue
        stopping |= kind in ("stop", "now")
        running -= {worker} if kind == "exit" else set()
        event = {
            "exit": WorkerExited(worker=worker, status=status),
            "ready": WorkerReady(worker="a"),
            "time": TimePassed(),
            "stop": StopRequested(grace_s=5.0),
            "now": StopNow(),
        }[kind]
        for action in supervisor.handle(event, now, jitter=0.5):
            match action:
                case StartWorker():
                    assert not stopping
                    assert action.worker not in running
                    running.add(action.worker)
                case TerminateWorker() | KillWorker():
                    assert action.worker in running
                case GiveUp():
                    assert action.worker not in running
    supervisor.handle(StopNow(), now)
    for worker in running:
        supervisor.handle(WorkerExited(worker=worker, status=-9), now)
    assert supervisor.finished
    assert supervisor.next_wakeup() is None
