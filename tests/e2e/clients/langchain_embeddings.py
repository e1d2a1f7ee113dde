"""What langchain-openai's client asks of /v1/embeddings, as JSON: langchain_embeddings.py HOST:PORT.

By default it sends tokens, of an encoding that it would download. Here the encoding is one of bytes.
"""

import asyncio
import json
import sys

import tiktoken
from langchain_openai import OpenAIEmbeddings

TEXTS = json.load(sys.stdin)
OPTIONS = {"base_url": f"http://{sys.argv[1]}/v1", "api_key": "none", "model": "sentences"}
tiktoken.registry.ENCODINGS["cl100k_base"] = tiktoken.Encoding(
    name="cl100k_base",
    pat_str=r"(?s:.)",
    mergeable_ranks={bytes([number]): number for number in range(256)},
    special_tokens={},
)
texts = OpenAIEmbeddings(**OPTIONS, check_embedding_ctx_length=False)
tokens = OpenAIEmbeddings(**OPTIONS)
print(
    json.dumps(
        {
            "documents": texts.embed_documents(TEXTS),
            "in_chunks": texts.embed_documents(TEXTS, chunk_size=2),
            "query": texts.embed_query(TEXTS[0]),
            "awaited": asyncio.run(texts.aembed_documents(TEXTS)),
            "tokens": tokens.embed_documents([text for text in TEXTS if text]),
        }
    )
)
