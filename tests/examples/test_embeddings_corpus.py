"""Docstrings are collected without importing, and tokenised as MiniLM expects."""

from __future__ import annotations

import email
from pathlib import Path

import numpy as np
import pytest
from examples.embeddings.corpus import make_corpus
from examples.embeddings.docstrings import Docstring, collect
from examples.embeddings.similarity import nearest
from examples.embeddings.tokens import MAX_TOKENS, SentenceTokenizer
from examples.embeddings.weights import model_folder

SOURCE = '''"""About this module."""
raise RuntimeError("imported")

class Shape:
    """A shape."""
    def area(self):
        """Its area."""
    def _secret(self):
        """Not for readers."""

async def fetch():
    "Fetch it."

def bare(): pass
'''


@pytest.fixture(scope="module")
def tokenizer() -> SentenceTokenizer:
    """MiniLM's own."""
    return SentenceTokenizer(model_folder())


def test_docstrings_are_read_not_run(tmp_path: Path) -> None:
    """Modules, classes, methods and coroutines are found by their dotted names; the module never runs."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(SOURCE)
    expected = {
        "pack": "About this module.",
        "pack.Shape": "A shape.",
        "pack.Shape.area": "Its area.",
        "pack.fetch": "Fetch it.",
    }
    assert expected == {found.name: found.text for found in collect(tmp_path)}


def test_duplicates_tests_and_private_modules_are_left_out(tmp_path: Path) -> None:
    """Of equal texts the first, by path, stays; tests, installed packages and private modules do not count."""
    for name in ("a.py", "b.py", "_c.py", "test/d.py", "site-packages/e.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'"""Same text."""\ndef f():\n    """Only in {name}."""\n')
    assert ["a", "a.f", "b.f"] == sorted(found.name for found in collect(tmp_path))


def test_order_is_shuffled_and_repeatable() -> None:
    """A package's docstrings come in a mixed order that is the same each time."""
    package = Path(email.__path__[0])
    found = collect(package)
    assert found == collect(package)
    modules = [docstring.name.partition(".")[0] for docstring in found[:30]]
    assert len(set(modules)) > 5


def test_tokens_are_those_of_the_vocabulary(tokenizer: SentenceTokenizer) -> None:
    """A sentence is framed by its two special tokens, lower-cased, and not padded."""
    assert [[101, 7592, 2088, 102], [101, 7592, 102]] == [
        ids.tolist() for ids in tokenizer.encode(["Hello world", "hello"])
    ]


def test_corpus_keeps_what_is_long_enough(tokenizer: SentenceTokenizer) -> None:
    """Texts of fewer than four tokens are left out, long ones cut off, and no more are taken than asked for."""
    texts = ["hello", "hello world", "hello " * 1000, "one more of them"]
    docstrings = [Docstring(name=str(number), text=text) for number, text in enumerate(texts)]
    corpus = make_corpus(docstrings, tokenizer, 2)
    assert ["1", "2"] == [docstring.name for docstring in corpus.docstrings]
    assert [4, MAX_TOKENS] == corpus.lengths.tolist()


def test_nearest_are_in_order() -> None:
    """The nearest unit vectors come first, with their cosines."""
    vectors = [np.array(vector, np.float32) for vector in ([1, 0], [0, 1], [0.6, 0.8])]
    found = nearest(np.array([0, 1], np.float32), vectors, 2)
    assert [1, 2] == [neighbour.number for neighbour in found]
    assert [1.0, 0.8] == pytest.approx([neighbour.cosine for neighbour in found])
