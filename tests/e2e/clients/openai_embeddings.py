"""What openai's client can ask of /v1/embeddings, as JSON: openai_embeddings.py HOST:PORT."""

import asyncio
import json
import sys

import openai

SERVER = f"http://{sys.argv[1]}/v1"
TEXTS = json.load(sys.stdin)


def told(answer):
    """All that an answer has."""
    return {
        "vectors": [entry.embedding for entry in answer.data],
        "indices": [entry.index for entry in answer.data],
        "tokens": [answer.usage.prompt_tokens, answer.usage.total_tokens],
        "model": answer.model,
    }


def refused(client, **asked):
    """The kind and the fields of the error that a request gets."""
    try:
        client.embeddings.create(**{"model": "sentences", "input": TEXTS, **asked})
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.type, error.param, error.code]
    return "not refused"


async def asked_by_many():
    """The same texts, by requests that are under way together."""
    async with openai.AsyncOpenAI(base_url=SERVER, api_key="none") as client:
        answers = await asyncio.gather(
            *(client.embeddings.create(model="sentences", input=[text]) for text in TEXTS)
        )
    return [answer.data[0].embedding for answer in answers]


with openai.OpenAI(base_url=SERVER, api_key="none", max_retries=0) as sync:
    create = sync.embeddings.create
    print(
        json.dumps(
            {
                "models": [model.id for model in sync.models.list()],
                "model": sync.models.retrieve("sentences").id,
                "base64": told(create(model="sentences", input=TEXTS)),
                "float": told(create(model="sentences", input=TEXTS, encoding_format="float")),
                "one": told(create(model="sentences", input=TEXTS[0])),
                "cut": told(create(model="sentences", input=TEXTS, dimensions=3, user="me")),
                "tokens": told(create(model="sentences", input=[[1, *map(ord, text)] for text in TEXTS])),
                "one_of_tokens": told(create(model="sentences", input=[1, *map(ord, TEXTS[0])])),
                "many": asyncio.run(asked_by_many()),
                "unknown": refused(sync, model="nix"),
                "empty": refused(sync, input=[]),
                "too_many_dimensions": refused(sync, dimensions=9),
                "too_many_texts": refused(sync, input=["a"] * 2049),
            }
        )
    )
