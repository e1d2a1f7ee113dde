"""The API to rank texts that clients of Cohere and Jina speak: the body of a request, and its answer.

Nothing here waits or asks. https://docs.cohere.com/reference/rerank and https://jina.ai/reranker have the APIs. The two
differ in the wishes that they send; what only one of them has is taken from either.
"""

from __future__ import annotations

from typing import Any

from shapestream.gateway.errors import OWN_ID, WrongField
from shapestream.gateway.json_text import type_name, write_json
from shapestream.gateway.text_bodies import Matrix, read_flag, reads_object
from shapestream.gateway.text_scores import (
    Pairs,
    finite,
    probabilities,
    ranked,
    read_list,
    read_text,
    written,
)
from shapestream.slices import Slices
from shapestream.web.messages import HttpResponse
from shapestream_engine.layout import value

LENGTHS = ("max_tokens_per_doc", "max_chunks_per_doc")
"""Fields that say how long a text may be, or into how many parts it is divided."""


@value
class RankingRequest:
    """The body of `POST /v1/rerank` and `/v2/rerank`."""

    model: str
    pairs: Pairs
    top_n: int | None
    """Results of the answer, at most; None: all."""
    return_documents: bool


@reads_object
def read_ranking(content: dict[str, Any]) -> Slices[RankingRequest]:
    """Read the body of a request. Raises `WrongField`. Fields that neither API has are ignored."""
    top_n = content.get("top_n")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise WrongField("top_n", '"top_n" is an integer from 1 on')
    for field in LENGTHS:
        if content.get(field) is not None:
            raise WrongField(
                field, f'"{field}": the tokenizer\'s settings say how long a text may be: leave it out'
            )
    if content.get("rank_fields") not in (None, ["text"]):
        raise WrongField("rank_fields", 'documents are ranked by their "text": leave "rank_fields" out')
    texts = [_document(index, entry) for index, entry in enumerate(read_list(content, "documents"))]
    yield
    return RankingRequest(
        model=read_text(content, "model"),
        pairs=Pairs(queries=(read_text(content, "query"),), texts=texts),
        top_n=top_n,
        return_documents=read_flag(content, "return_documents") is True,
    )


def _document(index: int, entry: Any) -> str:
    """Return the text of a document: a text, or an object that has one."""
    match entry:
        case str(text) | {"text": str(text)}:
            return text
        case _:
            raise WrongField(
                "documents",
                f'"documents" is a list of texts, or of objects with a "text"; entry {index} is {type_name(entry)}',
            )


def ranking_response(
    request: RankingRequest, logits: Matrix, tokens: int, request_id: str
) -> Slices[HttpResponse]:
    """Return the number and the probability of each text, the best one first, written in slices."""
    scores = probabilities(finite(logits))[:, 0]
    order = ranked(scores)[: request.top_n]

    def result(place: int) -> dict[str, Any]:
        index = order[place]
        document = {"document": {"text": request.pairs.texts[index]}} if request.return_documents else {}
        return {"index": index, "relevance_score": scores[index], **document}

    pieces = yield from written(result, len(order))
    told = {
        "id": request_id,
        "model": request.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    begin_of_answer = write_json(told)[:-1] + b',"results":['
    return HttpResponse(body=(begin_of_answer, *pieces, b"]}"), headers=((OWN_ID, request_id),))
