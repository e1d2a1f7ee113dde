"""MiniLM as an OpenVINO model, from safetensors: token ids and mask in, one L2-normalised vector per row out.

`input_ids [batch, seq]` and `attention_mask [batch, seq]`, both i64; `embedding [batch, 384]`, f32. Positions
whose mask is 0 have no influence: their attention weight is exactly zero, and the mean leaves them out. Without the
pooling, the output is `last_hidden_state [batch, seq, 384]`; folder.py writes that, as a folder for a server that pools.

    python -m examples.embeddings.model OUT.xml     writes the model that configs/embeddings.yaml serves
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as op

from examples.embeddings.weights import BertWeights, load_weights, model_folder
from examples.model_file import write

# Added to the score of a masked position: exp(-10000) is 0 in float32.
MASKED_SCORE = np.float32(-10_000.0)


def build(weights: BertWeights, *, pooled: bool = True) -> ov.Model:
    """The encoder; if `pooled`, with mean pooling under the mask, and normalisation."""
    ids = op.parameter([-1, -1], np.int64, name="input_ids")
    mask = op.parameter([-1, -1], np.int64, name="attention_mask")
    for parameter in (ids, mask):
        parameter.output(0).set_names({parameter.friendly_name})
    present = op.convert(mask, "f32")
    encoder = _Encoder(weights)
    hidden = encoder.embed(ids)
    # [batch, seq] -> [batch, 1, 1, seq]: the same for every head and every query position.
    bias = op.multiply(op.unsqueeze(op.subtract(np.float32(1), present), [1, 2]), MASKED_SCORE)
    for layer in range(weights.layers):
        hidden = encoder.layer(f"encoder.layer.{layer}", hidden, bias)
    if not pooled:
        result = op.result(hidden)
        result.output(0).set_names({"last_hidden_state"})
        return ov.Model([result], [ids, mask], "minilm")

    column = op.unsqueeze(present, [2])
    total = op.reduce_sum(op.multiply(hidden, column), [1], keep_dims=False)
    count = op.maximum(op.reduce_sum(column, [1], keep_dims=False), np.float32(1e-9))
    embedding = op.normalize_l2(op.divide(total, count), [1], eps=1e-12, eps_mode="max")
    embedding.output(0).set_names({"embedding"})
    return ov.Model([op.result(embedding)], [ids, mask], "minilm")


class _Encoder:
    """Adds the layers of a BERT encoder to a graph; shapes are [batch, seq, hidden] unless said otherwise."""

    def __init__(self, weights: BertWeights) -> None:
        self._weights = weights

    def embed(self, ids: ov.Node) -> ov.Node:
        """Token, position and (all zero) segment embeddings, normalised."""
        length = op.gather(op.shape_of(ids, "i64"), [1], 0)
        words = op.gather(self._tensor("embeddings.word_embeddings.weight"), ids, 0)
        positions = op.slice(self._tensor("embeddings.position_embeddings.weight"), [0], length, [1], [0])
        segment = self._tensor("embeddings.token_type_embeddings.weight")[0]
        return self._norm("embeddings.LayerNorm", op.add(op.add(words, positions), segment))

    def layer(self, name: str, hidden: ov.Node, bias: ov.Node) -> ov.Node:
        """Self-attention and the feed-forward network, each added to its input and normalised."""
        attended = self._linear(f"{name}.attention.output.dense", self._attention(name, hidden, bias))
        hidden = self._norm(f"{name}.attention.output.LayerNorm", op.add(hidden, attended))
        expanded = op.gelu(self._linear(f"{name}.intermediate.dense", hidden), "erf")
        return self._norm(
            f"{name}.output.LayerNorm", op.add(hidden, self._linear(f"{name}.output.dense", expanded))
        )

    def _attention(self, name: str, hidden: ov.Node, bias: ov.Node) -> ov.Node:
        query, key, value = (
            self._split_heads(self._linear(f"{name}.attention.self.{role}", hidden))
            for role in ("query", "key", "value")
        )
        mixed = op.scaled_dot_product_attention(query, key, value, bias)
        return op.reshape(op.transpose(mixed, [0, 2, 1, 3]), [0, 0, -1], special_zero=True)

    def _split_heads(self, hidden: ov.Node) -> ov.Node:
        """[batch, seq, hidden] -> [batch, heads, seq, hidden / heads]; 0 keeps a dimension as it is."""
        return op.transpose(
            op.reshape(hidden, [0, 0, self._weights.heads, -1], special_zero=True), [0, 2, 1, 3]
        )

    def _linear(self, name: str, hidden: ov.Node) -> ov.Node:
        product = op.matmul(hidden, self._tensor(f"{name}.weight"), transpose_a=False, transpose_b=True)
        return op.add(product, self._tensor(f"{name}.bias"))

    def _norm(self, name: str, hidden: ov.Node) -> ov.Node:
        centred = op.mvn(
            hidden, [-1], normalize_variance=True, eps=self._weights.layer_norm_eps, eps_mode="inside_sqrt"
        )
        return op.add(op.multiply(centred, self._tensor(f"{name}.weight")), self._tensor(f"{name}.bias"))

    def _tensor(self, name: str) -> np.ndarray:
        return self._weights.tensors[name]


if __name__ == "__main__":
    match sys.argv[1:]:
        case [out]:
            write(build(load_weights(model_folder())), Path(out))
        case _:
            sys.exit(__doc__)
