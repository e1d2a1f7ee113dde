"""Texts over HTTP at a real server, its gateway and its workers: many callers, and bodies that nobody should send."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from examples.embeddings.folder import ensure
from tests.e2e.text_chain import SERVED, TEXTS, expected, tokens, words
from tests.secret_files import write_secret

pytestmark = pytest.mark.e2e

TIMEOUT_S = 120.0


def start(workplace: Any, text: str) -> Any:
    """A server whose gateway and workers are ready."""
    served = workplace.serve(text)
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


@pytest.fixture(scope="module")
def text_server(module_workplace: Any) -> Iterator[Any]:
    """A server of a chain that embeds texts."""
    served = start(module_workplace, SERVED)
    yield served
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def ask(
    served: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """The status and the content of an answer."""
    (line,) = served.events("http ready")
    with closing(http.client.HTTPConnection(line["address"], timeout=TIMEOUT_S)) as connection:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else None


def openai(texts: Any, **more: Any) -> dict[str, Any]:
    """A body for `/v1/embeddings`."""
    return {"model": "sentences", "input": texts, **more}


def vectors_of(content: Any) -> Any:
    """The vectors of OpenAI's answer."""
    return np.array([entry["embedding"] for entry in content["data"]], np.float32)


def test_many_callers_get_the_vectors_of_their_own_texts(text_server: Any) -> None:
    """Of any lengths, while all of them ask at once, by texts and by tokens, of both APIs."""
    random = np.random.default_rng(1)

    def call(number: int) -> None:
        lengths = np.random.default_rng(number).integers(0, 60, 40).tolist()
        texts = [chr(97 + number) * length for length in lengths]
        lists = [[words.FIRST, *map(ord, text)] for text in texts]
        for given in (texts, lists):
            status, content = ask(text_server, "POST", "/v1/embeddings", openai(given))
            assert 200 == status, content
            np.testing.assert_array_equal(expected(texts), vectors_of(content))
            assert tokens(texts) == content["usage"]["total_tokens"]
            status, content = ask(text_server, "POST", "/embed", {"inputs": given, "normalize": False})
            assert 200 == status, content
            np.testing.assert_array_equal(expected(texts), np.array(content, np.float32))

    with ThreadPoolExecutor(8) as threads:
        assert 16 == len([*threads.map(call, random.permutation(16).tolist())])


def test_as_many_texts_as_a_call_may_have(text_server: Any) -> None:
    """In one request of the chain; one more is refused."""
    texts = [f"{number} {'x' * (number % 7)}" for number in range(2048)]
    status, content = ask(text_server, "POST", "/v1/embeddings", openai(texts))
    assert 200 == status
    np.testing.assert_array_equal(expected(texts), vectors_of(content))
    status, content = ask(text_server, "POST", "/v1/embeddings", openai([*texts, "one more"]))
    assert (400, "input") == (status, content["error"]["param"])


def test_texts_are_tokenised(text_server: Any) -> None:
    """By the model of the chain's first stage, which the gateway was told of."""
    status, content = ask(text_server, "POST", "/tokenize", {"inputs": TEXTS})
    assert 200 == status
    assert [[words.FIRST, *map(ord, text)] for text in TEXTS] == [
        [token["id"] for token in text] for text in content
    ]


def test_what_the_model_does_not_give_is_told(text_server: Any) -> None:
    """Sparse vectors, here."""
    status, content = ask(text_server, "POST", "/embed_sparse", {"inputs": "a"})
    assert (424, "Backend") == (status, content["error_type"])


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (b'{"model": "sentences", "input": "\\ud800", "inputs": "\\ud800"}', (400, 400)),
        (b'{"model": "sentences", "input": ["a", "\xed\xa0\x80"], "inputs": "\xed\xa0\x80"}', (400, 400)),
        (json.dumps({**openai("x" * 5000), "inputs": "x" * 5000}).encode(), (400, 422)),
        (json.dumps({**openai("x" * (1 << 20)), "inputs": "x" * 10}).encode(), (400, 200)),
        (
            json.dumps({**openai("x" * (1 + (1 << 20))), "inputs": ["", "x" * (1 + (1 << 20))]}).encode(),
            (413, 413),
        ),
        (json.dumps({**openai("x" * (1 << 21)), "inputs": 1}).encode(), (413, 413)),
        (json.dumps({**openai([1] * 5000), "inputs": [[1], [1] * 5000]}).encode(), (400, 422)),
    ],
    ids=["lone surrogate", "its bytes", "too many tokens", "1 MiB", "more", "2 MiB", "too many ids"],
)
def test_bodies_that_nobody_should_send(text_server: Any, text: bytes, statuses: tuple[int, int]) -> None:
    """Each API refuses them in its form, and the gateway answers the next caller."""
    status, content = ask(text_server, "POST", "/v1/embeddings", text)
    assert (statuses[0], ["message", "type", "param", "code"]) == (status, [*content["error"]])
    status, content = ask(text_server, "POST", "/embed", text)
    assert statuses[1] == status, content
    if status != 200:
        assert ["error", "error_type"] == [*content]
    assert 200 == ask(text_server, "POST", "/v1/embeddings", openai("next"))[0]


def test_callers_are_asked_for_tokens_but_for_health(workplace: Any) -> None:
    """In the form of each API; a balancer reads health without one."""
    write_secret(workplace.folder / "callers.txt", "shop secret\n")
    served = start(workplace, SERVED.replace('"127.0.0.1:0",', '"127.0.0.1:0", token_file: callers.txt,'))
    for path in ("/health", "/"):
        assert (200, None) == ask(served, "GET", path)
    status, content = ask(served, "POST", "/", {"inputs": "a"})
    assert (401, "Validation") == (status, content["error_type"])
    status, content = ask(served, "POST", "/v1/embeddings", openai("a"))
    assert (401, "invalid_api_key") == (status, content["error"]["code"])
    known = {"Authorization": "Bearer secret"}
    assert 200 == ask(served, "POST", "/v1/embeddings", openai("a"), known)[0]


def test_check_takes_the_chain(workplace: Any) -> None:
    """And refuses its encoder, which takes no texts, in its place."""
    ran = workplace.invoke("check", str(workplace.write(SERVED)))
    assert 0 == ran.exit_code, ran.output
    ran = workplace.invoke(
        "check", str(workplace.write(SERVED.replace("texts: sentences", "texts: encoder")))
    )
    assert 3 == ran.exit_code
    assert (
        "server.http.texts[0]: 'encoder' embeds no texts: it needs one input of element type str"
        in ran.output
    )


FOLDER = """\
    server:
      listen: [ipc://s.sock]
      http: {address: "127.0.0.1:0", texts: sentences}
    models: [{name: sentences, path: FOLDER, calibration_s: 0, trust: true}]  # what proves it is tested elsewhere
    workers: [{count: 1, slots: 1}]
"""


def test_a_folder_is_served_to_clients_of_texts(workplace: Any) -> None:
    """MiniLM: vectors as the SDK has them, tokens counted, its tokenizer and bounds known. Other tokens are refused."""
    folder = workplace.folder / "minilm"
    ensure(folder)
    served = start(workplace, FOLDER.replace("FOLDER", str(folder)))
    with served.client() as client:
        result = client.infer("sentences", {"text": TEXTS[:5]})
        wanted, counts = result["embedding"], result["tokens"]
    status, content = ask(served, "POST", "/v1/embeddings", openai(TEXTS[:5]))
    assert 200 == status, content
    assert int(counts.sum()) == content["usage"]["total_tokens"]
    np.testing.assert_allclose(vectors_of(content), wanted, atol=1e-5)
    status, content = ask(served, "POST", "/tokenize", {"inputs": TEXTS[:5]})
    lists = [[token["id"] for token in text] for text in content]
    assert counts.tolist() == [*map(len, lists)]
    status, content = ask(served, "POST", "/embed", {"inputs": lists})
    assert 200 == status, content
    np.testing.assert_allclose(np.array(content, np.float32), wanted, atol=1e-5)
    assert 256 == ask(served, "GET", "/info")[1]["max_input_length"]
    long = "word " * 300
    status, content = ask(served, "POST", "/v1/embeddings", openai(["short", long]))
    assert (400, "invalid") == (status, content["error"]["code"])
    assert "text 1 has 302 tokens" in content["error"]["message"]
    assert 422 == ask(served, "POST", "/embed", {"inputs": long})[0]
    status, content = ask(served, "POST", "/v1/embeddings", openai([101, 50_256, 102]))
    assert (400, True) == (status, "knows those up to 30521" in content["error"]["message"])
