"""The API of text-embeddings-inference (TEI), as its clients speak it: bodies of requests and answers, and errors.

Nothing here waits or asks. https://huggingface.github.io/text-embeddings-inference has the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import (
    Draining,
    InvalidRequest,
    ModelError,
    Overloaded,
    Poisoned,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.gateway.errors import (
    OWN_ID,
    STATUSES,
    EmptyList,
    NotGiven,
    UnusableVectors,
    WrongField,
    http_error,
)
from shapestream.gateway.json_text import type_name
from shapestream.gateway.text_bodies import (
    MOST_TEXTS,
    Matrix,
    Texts,
    TokenLists,
    VectorForm,
    read_dimensions,
    read_flag,
    read_texts,
    reads_object,
    written_rows,
)
from shapestream.gateway.text_ports import ScorePorts
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
from shapestream.web.messages import HttpError, HttpResponse
from shapestream_engine.layout import value

TEI_STATUSES = {
    **STATUSES,
    InvalidRequest: 422,
    WrongField: 422,
    Overloaded: 429,
    NotGiven: 424,
    ModelError: 422,
    UnusableVectors: 424,
    Poisoned: 424,
}
"""Statuses of errors, as TEI has them. A model's error is about the text: it is too long, for one."""


@value
class EmbedRequest:
    """The body of `POST /embed` and `/embed_sparse`."""

    inputs: Texts | TokenLists
    form: VectorForm
    truncate: bool | None
    """False: a text that is too long is refused. Else the tokenizer's settings decide."""


@reads_object
def read_embed(content: dict[str, Any]) -> Slices[EmbedRequest]:
    """Read the body of a request. Raises `WrongField`.

    Vectors have length 1 unless `normalize` is false.
    """
    truncate = _truncate(content)
    normalize = read_flag(content, "normalize")
    form = VectorForm(dimensions=read_dimensions(content), normalize=normalize is not False)
    return EmbedRequest(inputs=(yield from _inputs(content)), form=form, truncate=truncate)


@value
class RerankRequest:
    """The body of `POST /rerank`."""

    pairs: Pairs
    raw_scores: bool
    return_text: bool


@value
class PredictRequest:
    """The body of `POST /predict`."""

    pairs: Pairs
    raw_scores: bool
    is_list: bool
    """False: one text, or one pair, and the answer is no list of answers."""


@reads_object
def read_rerank(content: dict[str, Any]) -> Slices[RerankRequest]:
    """Read the body of a request. Raises `WrongField`."""
    texts = read_list(content, "texts")
    if set(map(type, texts)) != {str}:
        raise WrongField("texts", '"texts" is a list of texts, and of nothing else')
    yield
    return RerankRequest(
        pairs=Pairs(queries=(read_text(content, "query"),), texts=texts, truncate=_truncate(content)),
        raw_scores=read_flag(content, "raw_scores") is True,
        return_text=read_flag(content, "return_text") is True,
    )


@reads_object
def read_predict(content: dict[str, Any]) -> Slices[PredictRequest]:
    """Read the body of a request. Raises `WrongField`.

    `inputs` is a text, a list with a text or with the two of a pair, or a list of such lists.
    """
    inputs = content.get("inputs")
    is_list = isinstance(inputs, list) and bool(inputs) and not isinstance(inputs[0], str)
    rows = read_list(content, "inputs") if is_list else [[inputs] if isinstance(inputs, str) else inputs]
    pairs = [_row(row) for row in rows]
    yield
    if len({len(pair) for pair in pairs}) > 1:
        raise WrongField("inputs", '"inputs" has texts alone and pairs of texts: send them in two requests')
    return PredictRequest(
        pairs=Pairs(
            queries=[pair[0] for pair in pairs if len(pair) == 2],
            texts=[pair[-1] for pair in pairs],
            truncate=_truncate(content),
        ),
        raw_scores=read_flag(content, "raw_scores") is True,
        is_list=is_list,
    )


def _row(row: Any) -> list[str]:
    """Return a text, or the two of a pair."""
    match row:
        case [str(first), *rest] if len(rest) < 2 and all(isinstance(each, str) for each in rest):
            return [first, *rest]
        case []:
            raise EmptyList("inputs", '"inputs" has an empty list: send at least one text')
        case _:
            but = f"a list of {len(row)} entries" if isinstance(row, list) else type_name(row)
            raise WrongField(
                "inputs",
                '"inputs" is a text, a list with one text or the two of a pair, or a list of such lists, '
                f"not {but}",
            )


def _truncate(content: dict[str, Any]) -> bool | None:
    """Return the field `truncate`. Raises `WrongField`, also where texts are to be cut at their beginning."""
    truncate = read_flag(content, "truncate")
    match content.get("truncation_direction"):
        case None | "right" | "Right":
            pass
        case "left" | "Left":
            if truncate is not False:
                raise WrongField(
                    "truncation_direction",
                    'texts are cut at their end here: leave "truncation_direction" out, or forbid the cut '
                    '("truncate": false)',
                )
        case _:
            raise WrongField("truncation_direction", '"truncation_direction" is "right" or "left"')
    return truncate


@reads_object
def read_tokenize(content: dict[str, Any]) -> Slices[Texts]:
    """Read the body of `POST /tokenize`. Raises `WrongField`."""
    if read_flag(content, "add_special_tokens") is False:
        raise WrongField(
            "add_special_tokens", '"add_special_tokens" is the tokenizer\'s setting here: leave it out'
        )
    inputs = yield from _inputs(content)
    if isinstance(inputs, TokenLists):
        raise WrongField("inputs", '"inputs" has tokens already: send a text, or a list of texts')
    return inputs


def _inputs(content: dict[str, Any]) -> Slices[Texts | TokenLists]:
    if content.get("prompt_name") is not None:
        raise WrongField(
            "prompt_name", 'there are no prompts here: send the whole text, and no "prompt_name"'
        )
    if "inputs" not in content:
        raise WrongField("inputs", '"inputs" is missing: a text, or a list of texts')
    return (yield from read_texts("inputs", content["inputs"]))


# ---------------------------------------------------------------- answers


def embed_response(request: EmbedRequest, vectors: Matrix, request_id: str) -> Slices[HttpResponse]:
    """Return a list of vectors, written in slices."""
    rows = yield from written_rows(vectors, request.form, lambda _, part: part)
    return HttpResponse(body=(b"[", *rows, b"]"), headers=((OWN_ID, request_id),))


def embed_sparse_response(vectors: Matrix, request_id: str) -> Slices[HttpResponse]:
    """Return a list with the numbers of each vector that are not 0, and their places, written in slices."""

    def plain(_: int, part: Matrix) -> list[Any]:
        return [[{"index": int(index), "value": row[index]} for index in np.flatnonzero(row)] for row in part]

    rows = yield from written_rows(vectors, VectorForm(), plain)
    return HttpResponse(body=(b"[", *rows, b"]"), headers=((OWN_ID, request_id),))


def rerank_response(request: RerankRequest, logits: Matrix, request_id: str) -> Slices[HttpResponse]:
    """Return the number and the score of each text, the best one first, written in slices."""
    scores = finite(logits) if request.raw_scores else probabilities(finite(logits))
    order = ranked(scores[:, 0])

    def result(place: int) -> dict[str, Any]:
        index = order[place]
        text = {"text": request.pairs.texts[index]} if request.return_text else {}
        return {"index": index, "score": scores[index, 0], **text}

    pieces = yield from written(result, len(order))
    return HttpResponse(body=(b"[", *pieces, b"]"), headers=((OWN_ID, request_id),))


def predict_response(
    request: PredictRequest, logits: Matrix, labels: Sequence[str], request_id: str
) -> Slices[HttpResponse]:
    """Return the labels of each text with their scores, the best one first, written in slices."""
    scores = finite(logits) if request.raw_scores else probabilities(finite(logits))
    known = labels_of(labels, scores.shape[1])

    def answer(row: int) -> list[dict[str, Any]]:
        own = scores[row]
        return [{"score": own[label], "label": known[label]} for label in ranked(own)]

    pieces = yield from written(answer, len(scores), scores.shape[1])
    body = (b"[", *pieces, b"]") if request.is_list else (*pieces,)
    return HttpResponse(body=body, headers=((OWN_ID, request_id),))


def labels_of(labels: Sequence[str], count: int) -> Sequence[str]:
    """Return so many labels: those that are known, or as transformers calls them where none are."""
    return labels if len(labels) == count else [f"LABEL_{number}" for number in range(count)]


def tokenize_response(tokens: Sequence[npt.NDArray[Any]], request_id: str) -> Slices[HttpResponse]:
    """Return the tokens of each text by their numbers. Their texts and places are not known here, and null."""
    begin, end = '{"id":', ',"text":null,"special":null,"start":null,"stop":null}'
    between = f"{end},{begin}"
    pieces: list[bytes] = []
    lists: list[str] = []
    tokens_of_slice = 0
    for numbers in tokens:
        written = between.join(map(str, numbers.reshape(-1).tolist()))
        lists.append(f"[{begin}{written}{end}]" if written else "[]")
        tokens_of_slice += numbers.size + 1
        if tokens_of_slice > SLICE_TOKENS:
            pieces += (",".join(lists).encode(), b",")
            lists, tokens_of_slice = [], 0
            yield
    pieces += [",".join(lists).encode()] if lists else []
    if pieces[-1:] == [b","]:
        pieces.pop()
    return HttpResponse(body=(b"[", *pieces, b"]"), headers=((OWN_ID, request_id),))


SLICE_TOKENS = 8 * 1024
"""Tokens that are written at a time, in about 1 ms. Those of one text are written at once, whatever their number."""


def info_page(
    name: str, element_type: str, model_type: dict[str, Any], max_tokens: int | None, version: str
) -> dict[str, Any]:
    """Return what is known of the model; `max_tokens`: of one text. Fields of TEI's own engine are null."""
    unknown = ("model_sha", "max_concurrent_requests", "max_batch_tokens", "max_batch_requests")
    return {
        "model_id": name,
        "served_model_name": name,
        "model_dtype": _DTYPES.get(element_type, element_type),
        "model_type": model_type,
        "max_input_length": max_tokens,
        "max_client_batch_size": MOST_TEXTS,
        "auto_truncate": None,
        "version": version,
        **dict.fromkeys((*unknown, "tokenization_workers", "sha", "docker_label")),
    }


EMBEDS = {"embedding": {"pooling": None}}
"""The type of a model that embeds texts. How it pools is not known here."""


def scoring_type(ports: ScorePorts, labels: Sequence[str]) -> dict[str, Any]:
    """Return the type of a model that scores texts, with its labels."""
    named = dict(enumerate(labels if ports.labels is None else labels_of(labels, ports.labels)))
    told = {
        "id2label": {str(number): label for number, label in named.items()},
        "label2id": {label: number for number, label in named.items()},
    }
    return {"reranker" if ports.labels == 1 else "classifier": told}


_DTYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}


# ---------------------------------------------------------------- errors


def tei_error(error: RequestError | HttpError) -> HttpError:
    """Return an error in TEI's form: {"error": message, "error_type": type}."""
    found = http_error(error, TEI_STATUSES) if isinstance(error, RequestError) else error
    content = {"error": found.message, "error_type": _type(error, found.status)}
    return HttpError(found.status, found.message, found.headers, content=content)


def _type(error: RequestError | HttpError, status: int) -> str:
    match error:
        case EmptyList():
            return "Empty"
        case NotGiven() | UnusableVectors():
            return "Backend"
        case InvalidRequest() | TooLarge() | ModelError():
            return "Validation"
        case Overloaded():
            return "Overloaded"
        case Draining() | Unavailable() | WorkerLost():
            return "Unhealthy"
        case RequestError():
            return "Backend"
        case _:
            return "Unhealthy" if status >= 500 else "Validation"
