"""The page of the admin port and its events, read byte by byte. tests/tools/page.py looks at it with a browser."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest
from tests.e2e.admin import ADMIN, METERED, MODELS, connected, get, port_of
from tests.e2e.conftest import PATIENCE_S, temporary_workplace, until
from tests.secret_files import write_secret

from shapestream.errors import ModelError

pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
pytestmark = pytest.mark.e2e

ASK = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
MOST_VIEWERS = 16


class Viewer:
    """A connection that reads events."""

    def __init__(self, port: int, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.connection.request("GET", "/events", headers=headers)
        self.answer = self.connection.getresponse()

    def next(self) -> dict[str, Any]:
        """The next event."""
        assert (200, "text/event-stream") == (self.answer.status, self.answer.headers.get_content_type())
        line, end = self.answer.readline(), self.answer.readline()
        assert (b"data: ", b"\n") == (line[:6], end)
        event: dict[str, Any] = json.loads(line[6:])
        return event

    def close(self) -> None:
        """Leave, in order."""
        self.connection.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that answered three requests in three batches, and failed one; nothing below may be a surprise to it."""
    for place in temporary_workplace(tmp_path_factory):
        served = place.serve(METERED)
        with served.client() as client:
            for rows in (1, 2, 3):
                client.infer("other", {"x": np.ones((rows, 2), np.float32)})
            with pytest.raises(ModelError):
                client.infer("other", {"x": np.full((1, 2), 14, np.float32)})
        yield served
        assert [] == served.events("admin port failed") + served.events("page not read")


@pytest.fixture
def port(watched: Any) -> int:
    """Its port."""
    return port_of(watched)


def page(port: int, **headers: str) -> tuple[str, http.client.HTTPMessage]:
    """The page and its headers."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/", headers=headers)
        answer = connection.getresponse()
        assert (200, "text/html") == (answer.status, answer.headers.get_content_type())
        return answer.read().decode(), answer.headers


def test_the_page_allows_its_own_script_and_styles_and_nothing_else(port: int) -> None:
    """The policy names their digests; nothing is loaded from elsewhere, and nothing is written as HTML."""
    html, headers = page(port)
    policy = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"'sha256-{digest}'" == policy.pop(f"{tag}-src")
    assert ("'none'", "'self'", "data:") == tuple(
        policy.pop(f"{key}-src") for key in ("default", "connect", "img")
    )
    assert {"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"} == policy
    assert [] == re.findall(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", html)
    assert [] == re.findall(r"\bon[a-z]+=|\bstyle=|@import|url\((?!#)", html)
    links = set(re.findall(r"https?://[^'\" )]+", html))
    assert {"http://www.w3.org/2000/svg"} == links


def test_events_tell_what_happened(port: int) -> None:
    """Counters, batches, the error and the slots, as plain JSON; the next event brings only batches that are new."""
    with closing(Viewer(port)) as viewer:
        event = viewer.next()
        state = event["state"]
        assert (4, 3) == (state["statistics"]["requests"], state["statistics"]["results"])
        assert {"model_error": 1} == state["statistics"]["failures"]
        assert 3 == event["batches_in_all"]
        assert [("other", 1, rows, 2 * rows, [rows, 2]) for rows in (1, 2, 3)] == [
            (model, requests, rows, useful, sizes)
            for _, _, _, model, requests, rows, useful, _, _, sizes in event["batches"]
        ]
        for started, ended, slot, *_ in event["batches"]:
            assert started <= ended <= state["now"]
            assert "local/0" == slot
        ((_, model, code, message, request_id),) = state["errors"]
        assert ("other", "model_error") == (model, code)
        assert "fourteen is not to my liking" in message
        assert re.fullmatch("[0-9a-f]{32}-[0-9]+", request_id)
        ((slot),) = state["slots"]
        assert ("local/0", "local", "idle", 3, []) == tuple(
            slot[key] for key in ("slot", "worker", "state", "batches", "running")
        )
        assert ({}, []) == (state["queues"], state["notices"])
        later = viewer.next()
        assert [] == later["batches"]
        assert later["state"]["now"] > state["now"]


def test_all_viewers_share_a_reading(port: int) -> None:
    """Two that came at different times see the same times."""
    with closing(Viewer(port)) as one, closing(Viewer(port)) as other:
        times = [{viewer.next()["state"]["now"] for _ in range(4)} for viewer in (one, other)]
    assert len(times[0] & times[1]) >= 3


def test_the_queue_is_counted_by_size_while_it_waits(workplace: Any) -> None:
    """Behind a running batch, by the lower ends of bins; rows are no size; the slot says what it runs."""
    served = workplace.serve(MODELS.replace("SERVER", ADMIN))
    viewer = Viewer(port_of(served))
    with served.client() as client, ThreadPoolExecutor() as beside, closing(viewer):

        def send(rows: int, n: int) -> Future[Any]:
            return beside.submit(client.infer, "gated", {"x": np.ones((rows, n), np.float32)})

        running = send(1, 2)
        workplace.wait_entered()
        waiting = [send(2, n) for n in (5, 5, 13, 60)]

        def waits() -> Any:
            state = viewer.next()["state"]
            return state if state["queues"].get("gated", [0])[0] == len(waiting) else None

        state = until("the queue", waits)
        assert [4, ["n"], [[4, 2], [12, 1], [48, 1]]] == state["queues"]["gated"]
        (slot,) = state["slots"]
        assert "gated" == slot["running"][0][0]
        workplace.open_gate()
        for future in [running, *waiting]:
            future.result()


def test_a_dead_worker_is_told_with_its_last_words(workplace: Any) -> None:
    """By its entry of `workers`: how its process ended, while it is missing and after; given up where none can start."""
    served = workplace.serve(METERED.replace("in_process: true", "workers: [{count: 1}, {count: 1}]"))
    served.wait_for("workers ready")
    with closing(Viewer(port_of(served))) as viewer:

        def worker_when(told: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
            while not told((state := viewer.next()["state"])["workers"][1]):
                pass
            return state, state["workers"][1]

        state, _ = worker_when(lambda worker: worker["presence"] == "serving")
        assert [("w0", 0, "serving", ""), ("w1", 1, "serving", "")] == [
            (one["worker"], one["entry"], one["presence"], one["last_end"]) for one in state["workers"]
        ]
        os.kill(served.workers()["w1"], signal.SIGKILL)
        state, worker = worker_when(lambda worker: worker["last_end"] != "")
        assert ("SIGKILL", "") == (worker["last_end"], worker["why"])
        assert worker["ended_at"] <= state["now"]
        _, worker = worker_when(lambda worker: worker["presence"] == "serving")
        assert ("SIGKILL", 1) == (worker["last_end"], worker["restarts"])
        served.config.write_text("models: 3")
        os.kill(served.workers()["w1"], signal.SIGKILL)
        state, worker = worker_when(lambda worker: worker["presence"] == "given up")
        assert "status 3" == worker["last_end"]
        assert "configuration" in worker["why"]
        assert worker["since"] <= worker["ended_at"] <= state["now"]
        assert "worker w1 of entry 1 is given up" in state["notices"]
        served.send(signal.SIGHUP)
        served.wait_for("reload ended")
        words = "the last reload was refused: "
        until("the notice", lambda: any(text.startswith(words) for text in viewer.next()["state"]["notices"]))
        assert ["serving", "given up"] == [one["presence"] for one in state["workers"]]
        assert 1 == len(state["slots"])


@pytest.mark.parametrize("wrong", [{}, {"Authorization": "Bearer no"}])
def test_with_a_token_the_page_shows_and_the_events_do_not(
    module_workplace: Any, wrong: dict[str, str]
) -> None:
    """The page holds no data and asks for the token; names of hosts do not matter then."""
    if not module_workplace.commands:
        write_secret(module_workplace.folder / "token", "secret-word\n")
        server = "{listen: [ipc://s.sock], admin: {address: 127.0.0.1:0, token_file: token}}"
        module_workplace.serve(MODELS.replace("SERVER", server))
    port = port_of(module_workplace.commands[0])
    assert "gated" not in page(port, Host="a.example", **wrong)[0]
    assert 401 == get(port, "/events", **wrong)[0]
    with closing(Viewer(port, Authorization="Bearer secret-word")) as viewer:
        assert ["gated"] == viewer.next()["state"]["statistics"]["models"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LocalHost:1"}, 200),
        ({"Host": "127.0.0.1:9090"}, 200),
        ({"Host": "[::1]:9090"}, 200),
        ({"Host": "10.1.2.3:9090"}, 200),
        ({"Host": "rebound.example"}, 421),
        ({"Host": "rebound.example:9090"}, 421),
        ({"Host": "localhost.example"}, 421),
        ({"Host": "127.0.0.1.example:9090"}, 421),
        ({"Host": "[::1].example"}, 421),
        ({"Host": ""}, 421),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 421),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/", "/health/live", "/statistics"])
def test_pages_from_elsewhere_are_not_answered(
    port: int, path: str, headers: dict[str, str], status: int
) -> None:
    """A browser calls for them by a name that is theirs (DNS rebinding), or says so."""
    assert status == get(port, path, **headers)[0]


def test_only_reading_is_allowed(port: int) -> None:
    """The head of the stream has no events after it."""
    assert (405, 405) == (get(port, "/events", "POST")[0], get(port, "/", "DELETE")[0])
    assert (200, {}) == get(port, "/events", "HEAD")


def looking(port: int, ask: bytes) -> socket.socket | None:
    """A viewer that asked so; None where there is no room for it."""
    viewer = connected(port)
    viewer.sendall(ask)
    if b" 200 " in viewer.recv(100):
        return viewer
    viewer.close()
    return None


def test_viewers_are_limited_and_those_that_vanish_make_room(watched: Any, port: int) -> None:
    """By an orderly end, by a reset, with requests sent ahead; health checks have no part in it."""
    files = psutil.Process(watched.pid).num_fds()
    for ask, linger in ((ASK, (0, 0)), (ASK, (1, 0)), (3 * ASK, (1, 0)), (3 * ASK, (0, 0))):
        viewers = [
            until("room for one more", lambda ask=ask: looking(port, ask)) for _ in range(MOST_VIEWERS)
        ]
        assert 503 == get(port, "/events")[0]
        assert 200 == get(port, "/health/live")[0]
        for viewer in viewers:
            viewer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
            viewer.close()
        until("their end", lambda: psutil.Process(watched.pid).num_fds() <= files)


def test_the_end_of_a_server_ends_its_streams(workplace: Any) -> None:
    """A viewer holds up neither drain nor end."""
    served = workplace.serve(MODELS.replace("SERVER", ADMIN))
    with closing(Viewer(port_of(served))) as viewer:
        assert "stalled" not in viewer.next()["state"]
        served.send(signal.SIGTERM)
        assert 0 == served.wait()
        while viewer.answer.readline():
            pass
