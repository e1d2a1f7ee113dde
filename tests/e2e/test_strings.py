"""Strings from a client through a real server to functions and back: in process, in workers, by every face and port."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
import zmq
from tests.e2e.conftest import until
from tests.e2e.importable import wording
from tests.e2e.string_models import PLACES, SERVED

import shapestream
from shapestream import aio
from shapestream.client.opened_models import Result
from shapestream.errors import InvalidRequest, TooLarge
from shapestream.telemetry.trace import TraceReader

pytestmark = pytest.mark.e2e

ODD = [
    "",
    "a",
    "é",
    "😀 grin",
    "שלום עולם",
    "nul\0inside",
    "\0",
    "tab\tnew\nline",
    "a" * 300,
    "ß",
    "\u0301",
    "\U0010ffff",
]


@pytest.fixture(scope="module", params=PLACES)
def text_server(request: pytest.FixtureRequest, module_workplace: Any) -> Iterator[Any]:
    """The server, with the functions in its own process or in a worker's."""
    served = module_workplace.serve(SERVED + f"    {PLACES[request.param]}\n")
    served.wait_for("gateways ready")
    yield served
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def objects(elements: list[Any]) -> np.ndarray[Any, Any]:
    """An array of objects of one axis."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def check(result: Result, texts: list[str]) -> None:
    """Holds a result against the function alone."""
    expected = wording.shout(objects(texts))
    assert expected["loud"] == result["loud"].tolist()
    assert expected["back"].tolist() == result["back"].tolist()
    assert expected["sizes"].tolist() == result["sizes"].tolist()
    assert (object, (len(texts),), False) == (
        result["loud"].dtype,
        result["loud"].shape,
        result["loud"].flags.writeable,
    )


def random_text(chance: random.Random) -> str:
    """A text of any characters, seldom a long one."""
    if chance.random() < 0.3:
        return chance.choice(ODD)
    ranges = [(32, 126), (0x5D0, 0x5EA), (0x1F600, 0x1F64F), (0, 0xD7FF)]
    low, high = chance.choice(ranges)
    return "".join(chr(chance.randint(low, high)) for _ in range(int(2000 ** chance.random()) - 1))


def test_thousands_of_random_requests_equal_the_function_alone(text_server: Any) -> None:
    """In a stream, so that they share calls, whatever their lengths."""
    chance = random.Random(27)
    asked = [[random_text(chance) for _ in range(chance.choice([1, 1, 1, 2, 5]))] for _ in range(2000)]
    with (
        text_server.client() as client,
        client.stream("shout", ({"text": texts} for texts in asked)) as results,
    ):
        for texts, result in zip(asked, results, strict=True):
            check(result, texts)


def test_bytes_of_any_meaning_go_through(text_server: Any) -> None:
    """Also those that are no UTF-8, and a mebibyte; no rows at all."""
    chance = random.Random(28)
    rows = [[chance.randbytes(chance.randrange(200)) for _ in range(3)] for _ in range(4)]
    rows.append([b"\xff\xfe", b"", bytes(2**20)])
    with text_server.client() as client:
        found = client.infer("reverse", {"blob": rows})["reversed"]
        assert [[each[::-1] for each in row] for row in rows] == found.tolist()
        assert (0, 2) == client.infer("reverse", {"blob": np.zeros((0, 2), object)})["reversed"].shape
        assert [[b"ba"]] == client.infer("reverse", {"blob": np.array([[b"ab"]])})["reversed"].tolist()


def test_every_face_takes_and_gives_strings(text_server: Any) -> None:
    """Lists, arrays of every kind of strings; a stream."""
    kinds = [ODD, objects(ODD), np.array(["a", "é"]), np.array(["a", "é"], np.dtypes.StringDType())]
    with text_server.client() as client:
        for kind in kinds:
            check(client.infer("shout", {"text": kind}), np.asarray(kind, object).tolist())

    async def by_trio() -> Result:
        async with shapestream.connect(text_server.address) as client:
            return await client.infer("shout", {"text": ODD})

    async def by_asyncio() -> Result:
        async with aio.connect(text_server.address) as client:
            return await client.infer("shout", {"text": ODD})

    check(trio.run(by_trio), ODD)
    check(asyncio.run(by_asyncio()), ODD)


def test_one_text_without_an_axis_and_lists_of_words(text_server: Any) -> None:
    """A plain `str` is a tensor of rank 0; words come as a list of arrays, also none."""
    with text_server.client() as client:
        word = client.infer("first", {"text": "né two"})["word"]
        assert ((), "né") == (word.shape, word.item())
        assert "" == client.infer("first", {"text": ""})["word"].item()
        found = client.infer("words", {"text": ["a né", "", "three more words"]})["words"]
        assert [["a", "né"], [], ["three", "more", "words"]] == [each.tolist() for each in found]
        assert [] == client.infer("words", {"text": []})["words"]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (["a", "\ud800"], InvalidRequest, "'text'.*element 1.*surrogate"),
        ([b"a"], InvalidRequest, "'text'.*not bytes"),
        (np.array([b"a"]), InvalidRequest, "'text'.*not bytes"),
        ([1.5], InvalidRequest, "'text'.*not float"),
        (np.zeros(2), InvalidRequest, "'text'.*not float64"),
        (["a", None], InvalidRequest, "'text'.*not NoneType, as element 1 is"),
        ("a", InvalidRequest, "^invalid: input 'text' has 1 dimensions.*give a list or array of str"),
        ([["a"], ["b", "c"]], InvalidRequest, "'text'"),
        (["a", "b" * (2**20 + 1)], TooLarge, "'text', element 1: 1048577 bytes; at most 1048576"),
        (["b" * 2**20] * 9, TooLarge, "9437220 bytes of text"),
        ([""] * (2**16 + 1), TooLarge, "65537 strings"),
    ],
)
def test_what_is_no_text_is_refused_before_it_is_sent(
    text_server: Any, text: Any, error: Any, words: str
) -> None:
    """By the input, the element and the reason; the session goes on."""
    with text_server.client() as client:
        with pytest.raises(error, match=words):
            client.infer("shout", {"text": text})
        check(client.infer("shout", {"text": ["b" * 2**20]}), ["b" * 2**20])


class Raw:
    """A client that is written from docs/protocol.md alone."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.say([10, 0, bytes(range(16)), "raw"], [11, 0, "shout"])
        (opened,) = self.heard(22)
        self.model, self.signature = opened[3], opened[4]
        self.sequence = 0

    def say(self, *entries: list[Any]) -> None:
        """One message without frames."""
        self.socket.send(msgpack.packb([1, list(entries)]))

    def heard(self, *kinds: int) -> list[Any]:
        """The entries of these kinds of the first message that has some; each has its frames behind it."""
        for _ in range(100):
            assert self.socket.poll(60_000)
            header, *frames = self.socket.recv_multipart()
            found = [[*entry, frames] for entry in msgpack.unpackb(header)[1] if entry[0] in kinds]
            if found:
                return found
        raise AssertionError(f"no entry of {kinds}")

    def ask(self, shape: list[int], buffer: bytes) -> list[Any]:
        """The terminal reply to a request with one `str` tensor, inline or as a frame."""
        self.sequence += 1
        layout = msgpack.packb([[0, "str", shape]])
        frames = [buffer] if len(buffer) > 1024 else []
        inline = [None] if frames else [buffer]
        entry = [12, len(frames), self.sequence, self.model, None, 0, layout, inline]
        self.socket.send_multipart([msgpack.packb([1, [entry]]), *frames])
        (reply,) = self.heard(24, 25)
        return reply


def lengths(*numbers: int) -> bytes:
    """As the document says: unsigned integers of 32 bits, little-endian."""
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def test_a_client_of_the_document_alone(text_server: Any) -> None:
    """It sends and reads texts, and what it sends wrong is refused by the server itself."""
    raw = Raw(text_server.address)
    assert {"name": "text", "element_type": "str", "shape": "batch", "at_most_bytes": 2**20} == raw.signature[
        "inputs"
    ][0]
    reply = raw.ask([2, 3], lengths(3, 0) + "né".encode())
    layout, (loud, back, _) = msgpack.unpackb(reply[4]), reply[5]
    assert [[0, "str", [2, 3]], [1, "bytes", [2, 3]], [2, "i64", [2, 2]]] == layout
    assert (lengths(3, 0) + "NÉ".encode(), lengths(3, 0) + "én".encode()) == (loud, back)
    for shape, buffer, words in (
        ([2, 2], lengths(1, 1) + "é".encode(), "'text': element 1 is no UTF-8"),
        ([1, 1], lengths(1) + b"\xff", "'text': element 0 is no UTF-8"),
        ([1, 2], lengths(1) + b"ab", "'text': 1 strings have lengths of 1 bytes in all"),
        ([2, 2], lengths(3, 2**32 - 1) + b"ab", "lengths of 4294967298 bytes"),
        ([1, 2], lengths(2) + b"a", "has 5 bytes"),
        ([1], lengths(1) + b"a", "[batch], and the bytes"),
        ([0, 1], b"a", "there are none"),
        ([1, 2**63 - 1], b"", "overflows"),
    ):
        reply = raw.ask(shape, buffer)
        assert (25, "invalid") == (reply[0], reply[3]), (shape, reply)
        assert words in reply[4]
    for shape, buffer, words in (
        ([2, 2**20 + 1], lengths(0, 2**20 + 1) + b"a" * (2**20 + 1), "'text', element 1: 1048577 bytes"),
        ([2**16 + 1, 0], bytes(4 * (2**16 + 1)), "65537 strings"),
        ([9, 9 * 2**20], lengths(*[2**20] * 9) + b"a" * (9 * 2**20), "9437220 bytes of text"),
    ):
        reply = raw.ask(shape, buffer)
        assert (25, "too_large") == (reply[0], reply[3]), reply
        assert words in reply[4]
    assert 24 == raw.ask([1, 0], lengths(0))[0]
    raw.socket.close()


def test_texts_go_through_a_chain(text_server: Any) -> None:
    """Lists of words, one request per text, the texts of all of them as one batch; and no texts at all."""
    with text_server.client() as client:
        result = client.infer("hyphenate", {"text": ["a né", "", "three more words"]})
        assert ["a-né", "", "three-more-words"] == result["line"].tolist()
        assert ["A-NÉ", "", "THREE-MORE-WORDS"] == result["loud"].tolist()
        result = client.infer("hyphenate", {"text": []})
        assert [(0,), (0,)] == [result["line"].shape, result["loud"].shape]
        with pytest.raises(TooLarge, match=r"^too_large: input 'text', element 0"):
            client.infer("hyphenate", {"text": ["a" * (2**20 + 1)]})
        with pytest.raises(
            TooLarge, match="stage 'join', row 1: model 'join': input 'words', element 1: 65 bytes"
        ):
            client.infer("hyphenate", {"text": ["a", "b " + "a" * 65]})


def test_the_rows_of_a_chain_are_texts(text_server: Any) -> None:
    """Each runs for itself; one that fails is an empty text."""
    with text_server.client() as client:
        result = client.infer("by_row", {"text": ODD})
        assert [each.upper() for each in ODD] == result["loud"].tolist()
        assert [each[::-1].encode() for each in ODD] == result["back"].tolist()
        assert [(each.upper().split() or [""])[0] for each in ODD] == result["word"].tolist()
        assert [(0,)] * 3 == [value.shape for value in client.infer("by_row", {"text": []}).values()]
        result = client.infer("skipping", {"text": ["a b", "to fail", "né"]})
        assert (["a-b", "", "né"], [True, False, True]) == (result["line"].tolist(), result["ok"].tolist())


def test_http_gives_and_takes_json_and_binary_data(text_server: Any) -> None:
    """Strings as strings; each with its length before it."""
    (ready,) = text_server.events("http ready")
    connection = HTTPConnection("127.0.0.1", int(ready["address"].rpartition(":")[2]), timeout=120)

    def post(model: str, content: Any, binary: bytes = b"") -> tuple[int, Any, bytes]:
        head = json.dumps(content).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
        connection.request("POST", f"/v2/models/{model}/infer", head + binary, headers)
        answer = connection.getresponse()
        body = answer.read()
        length = int(answer.headers.get("Inference-Header-Content-Length", len(body)))
        return answer.status, json.loads(body[:length]), body[length:]

    texts = ODD[:8]
    entry = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    status, answer, _ = post("shout", {"inputs": [entry]})
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert (200, [each.upper() for each in texts]) == (status, outputs["loud"])
    assert [each[::-1] for each in texts] == outputs["back"]
    blobs = [b"\xff\0", b"", b"abc"]
    binary = b"".join(lengths(len(each)) + each for each in blobs)
    entry = {
        "name": "blob",
        "datatype": "BYTES",
        "shape": [1, 3],
        "parameters": {"binary_data_size": len(binary)},
    }
    ask = {"inputs": [entry], "parameters": {"binary_data_output": True}}
    status, answer, data = post("reverse", ask, binary)
    assert 200 == status
    assert {
        "name": "reversed",
        "datatype": "BYTES",
        "shape": [1, 3],
        "parameters": {"binary_data_size": 17},
    } == answer["outputs"][0]
    assert b"".join(lengths(len(each)) + each[::-1] for each in blobs) == data
    status, answer, _ = post("reverse", {"inputs": [entry]}, binary)
    assert 400 == status
    assert "ask for binary data" in answer["error"]
    bad = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    status, answer, _ = post("shout", {"inputs": [bad]}, lengths(1) + b"\xff")
    assert (400, True) == (status, "'text', element 0: no UTF-8" in answer["error"])
    connection.close()


def test_a_resent_request_shares_its_reply_and_texts_of_another_length_are_a_conflict(
    text_server: Any,
) -> None:
    """Kept replies are found by the layout, which has the bytes of the strings."""
    raw = Raw(text_server.address)
    first = raw.ask([1, 1], lengths(1) + b"a")
    raw.sequence -= 1
    assert first == raw.ask([1, 1], lengths(1) + b"a")
    raw.sequence -= 1
    assert [25, "conflict"] == raw.ask([1, 2], lengths(2) + b"bb")[::3][:2]
    raw.socket.close()


AUDITED = """\
    server: {listen: [ipc://s.sock]}
    models:
      - name: company
        function: wording:company
        inputs: {text: {shape: "batch:1..64", element_type: str}}
        outputs: {y: {rule: rows, shape: "batch", element_type: str}}
        audit: 1.0
        calibration_s: 0.2
    workers: [{count: 1, slots: 1}]
"""


def test_strings_are_audited_and_their_sizes_recorded(workplace: Any) -> None:
    """What company changes is found in service; `simulate` and `tune` play a recording, with texts of their own."""
    served = workplace.serve(AUDITED, record_trace=str(workplace.folder / "traffic.jsonl"))

    def ask(client: Any, texts: list[str]) -> list[str]:
        with client.stream("company", ({"text": [text]} for text in texts)) as results:
            return [result["y"].item() for result in results]

    def state(client: Any) -> Any:
        return client.statistics()["audit"]["company"]

    with served.client() as client:
        assert ["", "né", "a" * 100] == ask(client, ["", "né", "a" * 100])
        ask(client, ["a", "né"] * 15)
        until("the audits of what is right", lambda: state(client)["audited"] >= 5)
        assert 0 == state(client)["mismatches"]
        while not state(client)["stopped"]:
            assert state(client)["sampled"] < 3000
            ask(client, ["a", wording.RARE, "né"] * 10)
            until("the audits", lambda: state(client)["waiting"] == 0)
        assert ["a", wording.RARE] * 2 == ask(client, ["a", wording.RARE] * 2)
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    reader = TraceReader(workplace.folder / "traffic.jsonl")
    recorded = [request.sizes for request in reader]
    assert {"company": ("batch", "text.bytes")} == reader.models
    assert (1, 2 + 1) in recorded  # "né" has three bytes
    ran = workplace.run("simulate", "--trace", "traffic.jsonl", "--cost", "fixed_ms=1", "--json")
    assert 0 == ran.returncode, ran.stderr
    assert len(recorded) == json.loads(ran.stdout)["runs"][0]["done"]
