"""MiniLM's forward pass in NumPy, for one sentence without padding: an independent check of the graph."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from examples.embeddings.weights import BertWeights

_erf = np.vectorize(math.erf, otypes=[np.float64])


def embed(weights: BertWeights, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The normalised embedding of token ids [seq], in double precision."""
    tensors = weights.tensors
    hidden = (
        tensors["embeddings.word_embeddings.weight"][ids].astype(np.float64)
        + tensors["embeddings.position_embeddings.weight"][: len(ids)]
        + tensors["embeddings.token_type_embeddings.weight"][0]
    )
    hidden = _norm(weights, "embeddings.LayerNorm", hidden)
    for layer in range(weights.layers):
        name = f"encoder.layer.{layer}"
        attended = _linear(weights, f"{name}.attention.output.dense", _attention(weights, name, hidden))
        hidden = _norm(weights, f"{name}.attention.output.LayerNorm", hidden + attended)
        expanded = _linear(weights, f"{name}.intermediate.dense", hidden)
        expanded = expanded * 0.5 * (1 + _erf(expanded / math.sqrt(2)))
        hidden = _norm(
            weights, f"{name}.output.LayerNorm", hidden + _linear(weights, f"{name}.output.dense", expanded)
        )
    mean = hidden.mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean))


def _attention(weights: BertWeights, name: str, hidden: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """All heads, one after the other: [seq, hidden] -> [seq, hidden]."""
    query, key, value = (
        np.split(_linear(weights, f"{name}.attention.self.{role}", hidden), weights.heads, axis=1)
        for role in ("query", "key", "value")
    )
    heads = []
    for q, k, v in zip(query, key, value, strict=True):
        scores = q @ k.T / math.sqrt(q.shape[1])
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(heads, axis=1)


def _linear(weights: BertWeights, name: str, hidden: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(hidden @ weights.tensors[f"{name}.weight"].T + weights.tensors[f"{name}.bias"])


def _norm(weights: BertWeights, name: str, hidden: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    centred = hidden - hidden.mean(axis=1, keepdims=True)
    deviation = np.sqrt(hidden.var(axis=1, keepdims=True) + weights.layer_norm_eps)
    return np.asarray(
        centred / deviation * weights.tensors[f"{name}.weight"] + weights.tensors[f"{name}.bias"]
    )
