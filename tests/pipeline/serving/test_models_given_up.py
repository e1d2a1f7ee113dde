"""Models that nobody serves any more: whoever waits for one is told so, until a worker comes."""

from __future__ import annotations

from tests.entries import (
    Execute,
    Failure,
    Goodbye,
    ModelOpened,
    ModelRefused,
    OpenModel,
    ResultEntry,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import model_settings, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import verdict
from trio.testing import wait_all_tasks_blocked

TWO_MODELS = {"echo": model_settings(), "later": model_settings()}


@virtual_time
async def test_a_model_whose_workers_were_given_up_is_unavailable_at_once() -> None:
    """What waits for it, what comes, and whoever opens it are told why; other models are not concerned."""
    async with memory_serving(models=TWO_MODELS) as running:
        client, worker = await running.client_and_worker()
        waiter = await running.greeted(b"d" * 16, model=None)
        waiter.say(OpenModel(name="later"))
        client.say(request(1))
        await worker.hear(Execute)
        client.say(request(2))
        await wait_all_tasks_blocked()
        running.server.model_given_up("echo", "its workers die")
        await wait_all_tasks_blocked()
        assert {} == running.server.statistics()["unavailable"], "it is served yet"
        worker.say(Goodbye())
        answers = {(await client.hear(Failure)).sequence for _ in range(2)}
        assert {1, 2} == answers
        client.say(request(3), OpenModel(name="echo"))
        failure = await client.hear(Failure)
        assert (3, "unavailable", True) == verdict(failure)
        assert "its workers die" in failure.message
        assert "unavailable" == (await client.hear(ModelRefused)).code
        assert ["echo"] == list(running.server.statistics()["unavailable"])
        running.server.model_given_up("later", "it never came up")
        refused = await waiter.hear(ModelRefused)
        assert ("later", "unavailable") == (refused.name, refused.code)


@virtual_time
async def test_a_worker_that_dials_in_makes_its_model_available_again() -> None:
    """Whatever was said before."""
    async with memory_serving(models=TWO_MODELS) as running:
        client, worker = await running.client_and_worker()
        worker.say(Goodbye())
        await wait_all_tasks_blocked()
        running.server.model_given_up("echo", "its workers die")
        client.say(request(1))
        assert "unavailable" == (await client.hear(Failure)).code
        other = await running.joined("other")
        client.say(OpenModel(name="echo"), request(2))
        assert "echo" == (await client.hear(ModelOpened)).name
        await other.run_next()
        assert 2 == (await client.hear(ResultEntry)).sequence
        assert {} == running.server.statistics()["unavailable"]
