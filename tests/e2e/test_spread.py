"""Clients of several servers at a time: one drains, dies, comes late or differs; every answer comes once, and is right."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio
from tests.e2e.conftest import PATIENCE_S, ROOT, Served, Workplace, until

import shapestream
from shapestream import aio, blocking
from shapestream.client import look_ups
from shapestream.client.look_ups import addresses_of
from shapestream.client.opened_models import Failed
from shapestream.errors import InvalidRequest, Unavailable, WorkerLost

pytestmark = pytest.mark.e2e

MODEL = """\
    server: {{listen: [ipc://{name}.sock], heartbeat_s: 0.2}}
    models:
      - name: double
        function: gated:{function}
        inputs: {{x: {{shape: "batch:1..8, n:1..{most}", element_type: f32}}}}
        outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
        batching: {{max_batch: {max_batch}}}
        idempotent: {idempotent}
        trust: true
        calibration_s: 0
    in_process: {{slots: 1}}
"""


def serve(
    workplace: Workplace,
    name: str,
    *,
    function: str = "double_in_silence",
    most: int = 64,
    idempotent: bool = True,
) -> Served:
    """Start a server of this name."""
    text = MODEL.format(
        name=name,
        function=function,
        most=most,
        idempotent=str(idempotent).lower(),
        max_batch=4 if idempotent else 1,
    )
    return workplace.serve(workplace.write(text, f"{name}.yaml"))


def address(workplace: Workplace, name: str) -> str:
    """Where the server of this name is, or would be."""
    return f"ipc://{workplace.folder}/{name}.sock"


def connect(workplace: Workplace, *names: str, **options: Any) -> blocking.Client:
    """A client that spreads over these."""
    found = [address(workplace, name) for name in names]
    return blocking.connect(found, spread=True, connect_timeout=PATIENCE_S, **options)


def rows(count: int) -> Iterator[dict[str, Any]]:
    """So many requests; none is of the numbers that the model dislikes."""
    return ({"x": np.full((1, 1 + number % 5), 100 + number, np.float32)} for number in range(count))


def is_right(number: int, result: Any) -> bool:
    """Whether this is the answer to that request."""
    return bool((result["y"] == 2 * (100 + number)).all()) and result["y"].shape == (1, 1 + number % 5)


def under_a_name(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Served], dict[str, str], list[str]]:
    """Start the servers a and b; returns them, their TCP addresses, and the list that any look-up of a name answers."""
    servers = {}
    for name in ("a", "b"):
        text = MODEL.format(name=name, function="double_in_silence", most=64, idempotent="true", max_batch=4)
        text = text.replace(f"ipc://{name}.sock", f'ipc://{name}.sock, "tcp://127.0.0.1:0"')
        servers[name] = workplace.serve(workplace.write(text, f"{name}.yaml"))
    place = {name: served.events("server ready")[0]["listen"][1] for name, served in servers.items()}
    found: list[str] = []
    monkeypatch.setattr(look_ups, "addresses_of", lambda _: list(found))
    return servers, place, found


def all_there(client: blocking.Client, count: int) -> None:
    """Wait until so many servers answer a client."""
    until(f"{count} servers", lambda: count == len(client.statistics()["servers"]))


def test_four_servers_share_the_requests_of_a_stream(workplace: Workplace) -> None:
    """One drains, one is killed, and a late one gets its part: no error, no answer twice, none wrong, no server idle."""
    names = ["a", "b", "c", "d"]
    servers = {name: serve(workplace, name) for name in names[:3]}
    by_server: Counter[str] = Counter()
    with connect(workplace, *names) as client:
        all_there(client, 3)
        seen = late = 0
        with client.stream("double", rows(6000), max_in_flight=24) as results:
            for number, result in enumerate(results):
                assert is_right(number, result)
                by_server[result.request_id.partition("-")[0]] += 1
                seen += 1
                if number == 1000:
                    assert 3 == len(by_server)
                    assert min(by_server.values()) >= 100
                    servers["a"].kill()
                if number == 2000:
                    servers["b"].send(signal.SIGTERM)
                if number == 3000:
                    servers["d"] = serve(workplace, "d")
                    all_there(client, 2)
                    before = set(by_server)
                if 3000 < number <= 4100 and result.request_id.partition("-")[0] not in before:
                    late += 1
        assert 6000 == seen
        assert late >= 100
        assert {address(workplace, "c"), address(workplace, "d")} == set(client.statistics()["servers"])
        assert {address(workplace, "c"), address(workplace, "d")} >= {
            story["server"] for story in client.stories(slowest=8)
        }
    assert 0 == servers["b"].wait()


def test_a_poison_does_not_end_every_server(workplace: Workplace) -> None:
    """The last server is spared; requests beside the poison are answered, and one that equals it is refused at once."""
    for name in ("a", "b", "c"):
        serve(workplace, name)
    poison = {"x": np.full((1, 2), 13, np.float32)}
    with connect(workplace, "a", "b", "c", unavailable_after=8.0) as client:
        all_there(client, 3)
        items = [*rows(40), poison, *rows(40)]
        with client.stream("double", items, max_in_flight=8, on_error="yield") as results:
            ends = [result.error.code if isinstance(result, Failed) else "ok" for result in results]
        assert ["ok"] * 40 + ["poisoned"] + ["ok"] * 40 == ends
        with pytest.raises(shapestream.RequestError, match="ended the servers that ran it"):
            client.infer("double", poison, deadline=PATIENCE_S)
        assert 1 == len(client.statistics()["servers"])


def test_what_may_not_run_twice_is_lost_with_its_server(workplace: Workplace) -> None:
    """And nothing else is."""
    first = serve(workplace, "a", function="noted_when_open", idempotent=False)
    inputs = [{"x": np.full((1, 2), number, np.float32)} for number in (1, 2)]

    def end_of(client: blocking.Client, one: dict[str, Any]) -> Any:
        try:
            return client.infer("double", one)["y"].tolist()
        except WorkerLost as error:
            return error

    with connect(workplace, "a", "b") as client, ThreadPoolExecutor() as pool:
        all_there(client, 1)
        ends = [pool.submit(end_of, client, one) for one in inputs]
        until("one runs", lambda: (workplace.folder / "begun").exists())
        first.kill()
        workplace.open_gate()
        serve(workplace, "b", function="noted_when_open", idempotent=False)
        # The one that ran is lost. The other was at the first server, and is lost too, or was not, and is answered.
        lost = [isinstance(end.result(PATIENCE_S), WorkerLost) for end in ends]
        assert any(lost)
        begun = (workplace.folder / "begun").read_text().split()
        assert len(begun) == len(set(begun)), "what the first server had is not run by the second"
        assert [[6.0, 6.0]] == end_of(client, {"x": np.full((1, 2), 3, np.float32)})


def test_a_server_with_another_signature_gets_nothing(workplace: Workplace) -> None:
    """Requests were checked against the first one."""
    serve(workplace, "a")
    serve(workplace, "b", most=4)
    with connect(workplace, "a", "b") as client:
        all_there(client, 2)
        with client.stream("double", rows(400), on_error="yield") as results:
            found = Counter(
                "error" if isinstance(result, Failed) else result.request_id.partition("-")[0]
                for result in results
            )
    assert 400 == found.total()
    assert 1 == len(found.keys() - {"error"})


def test_a_stream_keeps_the_signature_that_it_began_with(workplace: Workplace) -> None:
    """Also when a server with another one comes meanwhile, whose address stands before."""
    serve(workplace, "b", most=8)
    with connect(workplace, "a", "b") as client:

        def some() -> Iterator[dict[str, Any]]:
            yield from rows(20)
            serve(workplace, "a")
            all_there(client, 2)
            yield from rows(200)

        with client.stream("double", some(), max_in_flight=4) as results:
            servers = Counter(result.request_id.partition("-")[0] for result in results)
    assert [220] == [*servers.values()]


def test_servers_with_other_model_files_are_told_once(
    workplace: Workplace, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a rollout: both answer, a warning names both, and each result says by which files it was computed."""
    exported = ROOT / "tests" / "zoo" / "torch"
    for name, file in (("a", "encoder.onnx"), ("b", "encoder-legacy.onnx")):
        text = (
            f"server: {{listen: [ipc://{name}.sock]}}\n"
            f"models: [{{name: m, path: {exported / file}, trust: true, calibration_s: 0}}]\nin_process: true\n"
        )
        workplace.serve(workplace.write(text, f"{name}.yaml"))
    inputs = {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.array([[1, 1, 1]])}
    digests: set[str | None] = set()
    with connect(workplace, "a", "b") as client:
        all_there(client, 2)
        while len(digests) < 2:
            digests.add(client.infer("m", inputs, deadline=PATIENCE_S).timings.digest)
        for _ in range(20):
            client.infer("m", inputs, deadline=PATIENCE_S)
    (told,) = [
        record.getMessage() for record in caplog.records if "has other files at" in record.getMessage()
    ]
    assert all(digest is not None and digest[:12] in told for digest in digests)


def test_a_server_that_is_gone_does_not_say_what_a_model_takes(workplace: Workplace) -> None:
    """Its successor elsewhere has another signature, and requests are checked against that."""
    first = serve(workplace, "a")
    x = {"x": np.full((1, 3), 100, np.float32)}
    with connect(workplace, "a", "b") as client:
        client.infer("double", x)
        first.kill()
        serve(workplace, "b", most=4)
        until("the other one", lambda: [address(workplace, "b")] == list(client.statistics()["servers"]))
        assert [[200.0] * 3] == client.infer("double", x, deadline=PATIENCE_S)["y"].tolist()
        with pytest.raises(InvalidRequest, match="n"):
            client.infer("double", {"x": np.zeros((1, 5), np.float32)})


def test_errors_of_a_caller_are_those_of_one_server(workplace: Workplace) -> None:
    """An unknown model, a deadline without a server, and a client that is closed."""
    served = serve(workplace, "a")
    with connect(workplace, "a", "b") as client:
        all_there(client, 1)
        with pytest.raises(InvalidRequest, match="nothing"):
            client.signature("nothing", deadline=PATIENCE_S)
        assert is_right(0, client.infer("double", next(rows(1))))
        served.kill()
        with pytest.raises(shapestream.DeadlineExceeded):
            client.infer("double", next(rows(1)), deadline=1.0)
    with pytest.raises(shapestream.Cancelled, match="closed"):
        client.infer("double", next(rows(1)))
    with pytest.raises(Unavailable, match="no server answered"):
        blocking.connect([address(workplace, "a"), address(workplace, "b")], spread=True, connect_timeout=0.5)
    with pytest.raises(ValueError, match="no address"):
        blocking.connect([], spread=True)


def test_the_faces_of_trio_and_asyncio_spread_too(workplace: Workplace) -> None:
    """Calls side by side, a stream, and a call that is cancelled."""
    for name in ("a", "b"):
        serve(workplace, name)
    addresses = [address(workplace, name) for name in ("a", "b")]

    async def by_trio() -> set[str]:
        ids = set()
        async with shapestream.connect(addresses, spread=True, connect_timeout=PATIENCE_S) as client:
            with trio.move_on_after(0):
                await client.infer("double", next(rows(1)))
            async with client.stream("double", rows(300), max_in_flight=16) as results:
                number = 0
                async for result in results:
                    assert is_right(number, result)
                    ids.add(result.request_id.partition("-")[0])
                    number += 1
        return ids

    async def by_asyncio() -> set[str]:
        async with aio.connect(addresses, spread=True, connect_timeout=PATIENCE_S) as client:
            known: set[str] = set()
            while len(known) < 2:  # the second server may come, and open the model, a moment later
                known.add((await client.infer("double", next(rows(1)))).request_id.partition("-")[0])
            asked = [client.infer("double", each) for each in rows(100)]
            results = await asyncio.gather(*asked)
        assert all(is_right(number, result) for number, result in enumerate(results))
        return {result.request_id.partition("-")[0] for result in results}

    assert 2 >= len(trio.run(by_trio)) >= 1
    assert 2 == len(asyncio.run(by_asyncio()))


def test_two_addresses_of_one_server_are_one(workplace: Workplace) -> None:
    """Its counters are there once, and it is given each request once."""
    text = MODEL.format(name="a", function="double_in_silence", most=64, idempotent="true", max_batch=4)
    served = workplace.serve(
        workplace.write(text.replace("ipc://a.sock]", "ipc://a.sock, ipc://b.sock]"), "a.yaml")
    )
    with connect(workplace, "a", "b") as client:
        all_there(client, 1)
        with client.stream("double", rows(200)) as results:
            ids = {result.request_id.partition("-")[0] for result in results}
        assert 1 == len(ids)
        (counted,) = client.statistics()["servers"].values()
    assert 200 == counted["results"]
    served.kill()


def test_the_addresses_of_a_name_come_and_go(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one gets its part; one that is gone from the answer goes with its server; no answer changes nothing."""
    servers, place, found = under_a_name(workplace, monkeypatch)
    monkeypatch.setattr(look_ups, "LOOK_UP_S", 0.05)
    found.append(place["a"])
    with blocking.connect("tcp://servers.test:1", spread=True, connect_timeout=PATIENCE_S) as client:
        assert [place["a"]] == list(client.statistics()["servers"])
        found.append(place["b"])
        all_there(client, 2)
        found.clear()
        with client.stream("double", rows(200)) as results:
            assert all(is_right(number, result) for number, result in enumerate(results))
        assert set(place.values()) == set(client.statistics()["servers"])
        found.append(place["b"])
        servers["a"].kill()
        until("the other one", lambda: [place["b"]] == list(client.statistics()["servers"]))


def test_a_name_is_looked_up_when_its_server_goes(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the time until the next look-up: what waits goes to the server that has taken its place."""
    servers, place, found = under_a_name(workplace, monkeypatch)
    monkeypatch.setattr(look_ups, "LOOK_UP_S", 10 * PATIENCE_S)
    found.append(place["a"])
    with blocking.connect("tcp://servers.test:1", spread=True, connect_timeout=PATIENCE_S) as client:
        assert is_right(0, client.infer("double", next(rows(1))))
        found[:] = [place["b"]]
        servers["a"].send(signal.SIGTERM)
        assert 0 == servers["a"].wait()
        assert is_right(0, client.infer("double", next(rows(1))))
        assert [place["b"]] == list(client.statistics()["servers"])


def test_a_name_without_addresses_is_told_and_looked_up_again(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting fails with the name; a client that has other addresses goes on, and finds the name's later."""
    found: list[str] = []
    text = MODEL.format(name="a", function="double_in_silence", most=64, idempotent="true", max_batch=4)
    text = text.replace("ipc://a.sock", 'ipc://a.sock, "tcp://127.0.0.1:0"')
    later = workplace.serve(workplace.write(text, "a.yaml")).events("server ready")[0]["listen"][1]
    serve(workplace, "b")

    def look_up(name: str) -> list[str]:
        if not found:
            raise OSError("no such name")
        return list(found)

    monkeypatch.setattr(look_ups, "addresses_of", look_up)
    monkeypatch.setattr(look_ups, "LOOK_UP_S", 0.05)
    name = "tcp://servers.test:1"
    with pytest.raises(Unavailable, match=rf"no server answered at .*no address was found for {name}"):
        blocking.connect(name, spread=True, connect_timeout=0.2)
    fixed = address(workplace, "b")
    with blocking.connect([name, fixed], spread=True, connect_timeout=PATIENCE_S) as client:
        assert is_right(0, client.infer("double", next(rows(1))))
        assert [fixed] == list(client.statistics()["servers"])
        found.append(later)
        all_there(client, 2)


def test_a_name_is_looked_up() -> None:
    """Each of its addresses, with the port; IPv4, as everywhere else."""
    assert "tcp://127.0.0.1:5555" in addresses_of("tcp://localhost:5555")
    with pytest.raises(OSError, match=r".+"):
        addresses_of("tcp://no-such-host.invalid:5555")
