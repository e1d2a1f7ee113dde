"""MiniLM as a folder, as sentence-transformers and optimum lay one out: an IR, its tokenizer, and their settings.

    python -m examples.embeddings.folder FOLDER     writes the folder that configs/text.yaml serves

The IR gives the vectors of all tokens, as optimum exports a model; the server pools them as the folder's files say.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from examples import model_file
from examples.embeddings import model
from examples.embeddings.weights import load_weights, model_folder

IR = "openvino/openvino_model.xml"
DOCUMENTS = (
    "config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "1_Pooling/config.json",
)


def ensure(folder: Path) -> None:
    """Writes the folder, unless it is there and not older than the code that makes the IR."""
    source = model_folder()
    for name in DOCUMENTS:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, place)
    model_file.ensure(folder / IR, model, lambda: model.build(load_weights(source), pooled=False))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [out]:
            ensure(Path(out))
        case _:
            sys.exit(__doc__)
