"""MiniLM's graph against an independent forward pass in NumPy, and under padding."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from examples.embeddings import model, reference
from examples.embeddings.corpus import Ids
from examples.embeddings.similarity import cosine
from examples.embeddings.tokens import SentenceTokenizer
from examples.embeddings.weights import BertWeights, load_weights, model_folder

from shapestream_engine.backends.openvino.runtime import core


@pytest.fixture(scope="module")
def weights() -> BertWeights:
    """The real ones."""
    return load_weights(model_folder())


@pytest.fixture(scope="module")
def compiled(weights: BertWeights) -> ov.CompiledModel:
    """The graph, run directly."""
    return core().compile_model(model.build(weights), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


@pytest.fixture(scope="module")
def sentences() -> list[Ids]:
    """Two that say the same, and a longer one that does not."""
    texts = [
        "Return the sum of two numbers.",
        "Add up a pair of integers.",
        "Delete a file from the disk, at once!",
    ]
    return SentenceTokenizer(model_folder()).encode(texts)


def embed(compiled: ov.CompiledModel, ids: Ids, mask: Ids) -> np.ndarray:
    """A copy of the output for ids and mask [batch, seq]."""
    return np.array(compiled({"input_ids": ids, "attention_mask": mask})["embedding"])


def test_equals_the_forward_pass_in_numpy(
    weights: BertWeights, compiled: ov.CompiledModel, sentences: list[Ids]
) -> None:
    """The embedding of a sentence is that of double-precision NumPy, to float32's precision, and of length 1."""
    ids = sentences[2]
    expected = reference.embed(weights, ids)
    vector = embed(compiled, ids[None], np.ones_like(ids)[None])[0]
    assert (384,) == vector.shape
    np.testing.assert_allclose(vector, expected, rtol=0, atol=2e-6)
    assert 1 == pytest.approx(np.linalg.norm(vector), abs=1e-6)


def test_masked_positions_have_no_influence(compiled: ov.CompiledModel, sentences: list[Ids]) -> None:
    """Padding, whatever it holds, and a longer neighbour leave a row as it is alone."""
    short, long = sentences[0], sentences[2]
    ids = np.full((2, len(long) + 9), 777, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate((short, long)):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    together = embed(compiled, ids, mask)
    for row, tokens in enumerate((short, long)):
        alone = embed(compiled, tokens[None], np.ones_like(tokens)[None])[0]
        np.testing.assert_allclose(together[row], alone, rtol=0, atol=2e-6)


def test_meaning_is_near(compiled: ov.CompiledModel, sentences: list[Ids]) -> None:
    """Two ways to say the same are nearer to each other than to something else: the weights are real."""
    total, sum_of_pair, delete = (embed(compiled, ids[None], np.ones_like(ids)[None])[0] for ids in sentences)
    assert cosine(total, sum_of_pair) > 0.5 > 0.3 > cosine(total, delete)
