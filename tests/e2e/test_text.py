"""A folder with a text model, served: texts in, vectors out, as the tokenizer and the model by themselves give them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.text_encoders import table
from tests.text_folders import HIDDEN, VOCABULARY, write_folder

import shapestream
from shapestream.errors import InvalidRequest

pytestmark = pytest.mark.e2e

TEXTS = [
    "",
    "hello",
    "Hello WORLD",
    "compress a file",
    "compress a file hello world a a a",
    "😀 שלום \x00\x07",
    "what is not known",
    " a\ta\n",
]
YAML = """\
models:
  - name: texts
    path: texts
    engine: onnxruntime
    calibration_s: 0.2
workers: [{models: [texts], count: 2, slots: 1}]
"""


@pytest.fixture(scope="module")
def text_server(module_workplace: Any) -> Iterator[Any]:
    """The server of a folder."""
    write_folder(module_workplace.folder / "texts")
    served = module_workplace.serve(YAML)
    yield served
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def expected_of(folder: Any, text: str) -> np.ndarray[Any, Any]:
    """The vector of a text, by the formulas of the encoder, of the mean and of the length."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "texts" / "tokenizer.json"))
    words = table(VOCABULARY, HIDDEN)[tokenizer.encode(text).ids].astype(float)
    mean = (words + words.mean(axis=0) / 2).mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean))


def test_each_text_has_its_own_vector(text_server: Any, module_workplace: Any) -> None:
    """In one list, alone, and in many requests at a time, whatever shares their calls; and none of none."""
    expected = [expected_of(module_workplace.folder, text) for text in TEXTS]
    lists = [TEXTS[:count] for count in range(len(TEXTS) + 1)] * 4
    with shapestream.blocking.connect(text_server.address) as client:
        requests = ((number, {"text": texts}) for number, texts in enumerate(lists))
        with client.stream("texts", requests, max_in_flight=8) as results:
            seen = {result.key: result for result in results}
    assert len(lists) == len(seen)
    for number, texts in enumerate(lists):
        assert (len(texts), HIDDEN) == seen[number]["embedding"].shape
        for vector, wanted in zip(seen[number]["embedding"], expected, strict=False):
            np.testing.assert_allclose(vector, wanted, atol=1e-5)
    assert [2, 3, 4, 5, 10, 5, 6, 4] == seen[len(TEXTS)]["tokens"].tolist()


def test_a_text_that_is_too_long(text_server: Any) -> None:
    """The error names the text, its length and the limit; the next request is answered."""
    with shapestream.blocking.connect(text_server.address) as client:
        with pytest.raises(InvalidRequest, match="text 1 has 22 tokens, and the model takes at most 16"):
            client.infer("texts", {"text": ["a", "a " * 20]})
        assert [3] == client.infer("texts", {"text": ["a"]})["tokens"].tolist()
