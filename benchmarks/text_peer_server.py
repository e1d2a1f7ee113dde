"""A FastAPI server around sentence-transformers, as tutorials write it: POST /v1/embeddings, vectors in base64.

It runs in an environment of its own (`make text-peer`), so it imports nothing of ours. Arguments: the model's folder, the
port, the file that it leaves once it is ready, and the threads of PyTorch.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class Texts(BaseModel):
    """The body of a request, without options."""

    input: list[str]


def main() -> None:
    """Serve until ended."""
    folder, port, ready, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = SentenceTransformer(folder, device="cpu")
    application = FastAPI()

    def embeddings(texts: Texts) -> dict[str, Any]:
        """Embed the texts of one call; FastAPI runs it in a thread."""
        vectors = model.encode(texts.input)
        data = [{"embedding": base64.b64encode(vector.tobytes()).decode()} for vector in vectors]
        return {"data": data}

    application.post("/v1/embeddings")(embeddings)
    model.encode(["ready"])
    Path(ready).touch()
    uvicorn.run(application, host="127.0.0.1", port=int(port), log_level="warning", timeout_keep_alive=600)


if __name__ == "__main__":
    main()
