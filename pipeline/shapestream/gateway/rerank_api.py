"""The API to rank texts that clients of Cohere and Jina speak: the body of a request, and its answer.

Nothing here waits or asks. https://docs.cohere.com/reference/rerank and https://jina.ai/reranker have the APIs. The two
differ in the wishes that they send; what only one of them has is taken from either.
"""

from __future__ import annotations

from typing import Any

from shapestream.gateway.errors import OWN_ID, WrongField
from shapestream.gateway.json_text import dropped_after, read_object, type_name, write_json
from shapestream.gateway.text_bodies import FEWER_TEXTS, Matrix, read_flag
from shapestream.gateway.text_scores import (
    SLICE_SCORES,
    Pairs,
    finite,
    probabilities,
    ranked,
    read_list,
    read_text,
)
from shapestream.slices import Slices
from shapestream.web.messages import Buffer, HttpResponse
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


def read_ranking(body: Buffer) -> Slices[RankingRequest]:
    """Read the body of a request. Raises `HttpError` for one that is no JSON, and `WrongField`.

    Fields that neither API has are ignored.
    """
    content = yield from read_object(body, FEWER_TEXTS)
    return (yield from dropped_after(len(body), content, _ranking(content)))


def _ranking(content: dict[str, Any]) -> Slices[RankingRequest]:
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
    pieces: list[Buffer] = []
    for begin in range(0, len(order), SLICE_SCORES):
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]}
            for index in order[begin : begin + SLICE_SCORES]
        ]
        if request.return_documents:
            for result in results:
                result["document"] = {"text": request.pairs.texts[result["index"]]}
        pieces += (b"," if begin else b"", write_json(results)[1:-1])
        yield
    told = {
        "id": request_id,
        "model": request.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    begin_of_answer = write_json(told)[:-1] + b',"results":['
    return HttpResponse(body=(begin_of_answer, *pieces, b"]}"), headers=((OWN_ID, request_id),))
