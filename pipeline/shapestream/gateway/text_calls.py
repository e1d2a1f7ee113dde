"""Texts, or their tokens, to the server and back: one request of a chain for all texts of a caller.

Tokens that the caller has made are requests of the chain's encoder, one for each text, so that each is scheduled by its own
length. They are all under way at once, up to a number, and within the caller's quota of requests in flight.

A model of texts takes `str [texts]`, gives a vector for each, and perhaps the number of each text's tokens. An encoder
takes tokens that a caller has made, and gives vectors. A tokenizer takes texts, and gives the tokens of each. Inputs and
outputs are found in the model's signature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from shapestream.client.async_face import Client
from shapestream.client.opened_models import Result
from shapestream.errors import InvalidRequest, RequestError
from shapestream.gateway.errors import OWN_ID, NotGiven, UnknownModel
from shapestream.gateway.infer_tensors import own_id
from shapestream.gateway.model_pages import signature_of
from shapestream.gateway.options import TextService
from shapestream.gateway.text_bodies import Matrix, Texts, TokenLists, VectorForm, check_dimensions, matrix_of
from shapestream.web.messages import HttpRequest
from shapestream.web.quotas import BeyondQuota, Quotas
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import value
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature

MOST_IN_FLIGHT = 256
"""Requests of one caller's request at the server at once: half of the share of one caller."""


@value
class Embedded:
    """The vectors of a caller's texts."""

    vectors: Matrix
    tokens: int
    """Tokens of all texts together; 0 where the model does not count them."""
    request_id: str


class TextCalls:
    """Calls of one service's models."""

    def __init__(self, client: Client, service: TextService, in_flight: Quotas) -> None:
        """`in_flight`: of the requests of all callers."""
        self._client = client
        self._in_flight = in_flight
        self._service = service

    async def embed(self, inputs: Texts | TokenLists, form: VectorForm, request: HttpRequest) -> Embedded:
        """Return a vector for each text. Raises `RequestError`."""
        match inputs:
            case Texts():
                return await self._embed_texts(inputs, form, request)
            case TokenLists():
                return await self._embed_tokens(inputs, form, request)

    async def _embed_texts(self, inputs: Texts, form: VectorForm, request: HttpRequest) -> Embedded:
        ports = text_ports(await signature_of(self._client, self._service.name))
        if ports.size is not None:
            check_dimensions(form, ports.size)
        result = await self._infer(self._service.name, {ports.text: inputs.texts}, request)
        vectors = matrix_of(result[ports.embedding], len(inputs))
        check_dimensions(form, vectors.shape[1])
        return Embedded(
            vectors=vectors,
            tokens=int(np.sum(result[TOKENS])) if ports.counts_tokens else 0,
            request_id=result.request_id,
        )

    async def embed_sparse(self, inputs: Texts | TokenLists, request: HttpRequest) -> Embedded:
        """Return a vector for each text, of which most numbers are 0. Raises `RequestError`."""
        name = self._service.name
        ports = text_ports(await signature_of(self._client, name))
        if not ports.is_sparse:
            raise NotGiven(f"{name!r} gives no sparse vectors: it needs an output `{SPARSE}` [texts, size]")
        if isinstance(inputs, TokenLists):
            raise NotGiven("sparse vectors are made of texts only")
        result = await self._infer(name, {ports.text: inputs.texts}, request)
        return Embedded(
            vectors=matrix_of(result[SPARSE], len(inputs)), tokens=0, request_id=result.request_id
        )

    async def tokenize(self, inputs: Texts, request: HttpRequest) -> tuple[Sequence[npt.NDArray[Any]], str]:
        """Return the tokens of each text, and the request's id. Raises `RequestError`."""
        name = self._service.tokenizer
        text = tokenizer_input(await self._signature_of_part(name, "tokenizer"))
        result = await self._infer(name, {text: inputs.texts}, request)
        return result[IDS], result.request_id

    # ---------------------------------------------------------------- tokens

    async def _embed_tokens(self, inputs: TokenLists, form: VectorForm, request: HttpRequest) -> Embedded:
        ports = await self.encoder()
        self._check_tokens(inputs)
        results = await self._all_tokens(inputs, ports, request)
        vectors = matrix_of([result[ports.embedding] for result in results], len(inputs))
        check_dimensions(form, vectors.shape[1])
        return Embedded(vectors=vectors, tokens=sum(map(len, inputs.lists)), request_id=results[0].request_id)

    def _check_tokens(self, inputs: TokenLists) -> None:
        """Raise `InvalidRequest` for tokens that the encoder does not know: engines read any row of their table for them."""
        most = self._service.largest_token
        for index, tokens in enumerate(inputs.lists):
            if most is not None and tokens.max() > most:
                raise InvalidRequest(
                    f"text {index} has the token {tokens.max()}, and {self._service.name!r} knows those up to {most}: "
                    "they are another model's; send the text (LangChain: check_embedding_ctx_length=False)"
                )

    async def encoder(self) -> EncoderPorts:
        """Return the ports of the model that embeds tokens. Raises `NotGiven` where none is known."""
        return encoder_ports(await self._signature_of_part(self._service.encoder, "encoder"))

    async def _signature_of_part(self, model: str, role: str) -> Any:
        try:
            return await signature_of(self._client, model)
        except UnknownModel:
            raise NotGiven(f"no {role} of {self._service.name!r} is known here: send texts") from None

    async def _all_tokens(
        self, inputs: TokenLists, ports: EncoderPorts, request: HttpRequest
    ) -> Sequence[Result]:
        results: dict[int, Result] = {}
        failures: list[RequestError] = []
        unsent = deque(enumerate(inputs.lists))
        async with trio.open_nursery() as nursery:

            async def work() -> None:
                while unsent:
                    index, tokens = unsent.popleft()
                    try:
                        results[index] = await self._infer(
                            self._service.encoder, ports.inputs_of(tokens), request
                        )
                    except BeyondQuota as error:
                        if len(nursery.child_tasks) > 1:
                            unsent.append((index, tokens))  # for those that are under way
                            return
                        failures.append(error)
                        return
                    except RequestError as error:
                        failures.append(error)
                        nursery.cancel_scope.cancel()  # withdraws the others
                        return

            for _ in range(min(len(inputs), MOST_IN_FLIGHT)):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(inputs))]

    async def _infer(self, model: str, inputs: Mapping[str, Any], request: HttpRequest) -> Result:
        with self._in_flight.one(request.peer):
            return await self._client.infer(
                model,
                inputs,
                request_id=own_id(request.headers.get(OWN_ID)),
                trace=request.headers,
                caller=request.peer,
            )


TEXT = "str"
"""The element type of texts."""
FLOATS = ("f32", "f16", "bf16", "f64")
EMBEDDING = ("embedding", "sentence_embedding")
"""Names of the output with the vectors, the first of which the model has."""
TOKENS = "tokens"
"""The output with the number of tokens of each text. Without it, a usage of 0 is told."""
SPARSE = "sparse"
"""The output with vectors that are mostly 0, for TEI's `/embed_sparse`."""
IDS = "input_ids"
"""The encoder's input, and the tokenizer's output, with the numbers of tokens."""
FILLED = {"attention_mask": 1, "token_type_ids": 0}
"""Inputs of encoders that follow from the tokens alone: each number of them."""
TEXT_MODEL = (
    "it needs one input of element type str and shape [texts], and an output `embedding` of floating numbers with a "
    "vector for each text"
)


@value
class TextPorts:
    """The ports of a model of texts."""

    text: str
    embedding: str
    element_type: str
    size: int | None
    """Numbers of a vector; None where the signature does not tell."""
    counts_tokens: bool
    is_sparse: bool


def text_ports(signature: ModelSignature) -> TextPorts:
    """Return the ports of a model of texts; raises `NotGiven` for other models, and says what it needs."""
    output = _embedding(signature.outputs)
    text = text_input(signature)
    if text is None or output is None:
        raise NotGiven(f"{signature.name!r} embeds no texts: {TEXT_MODEL}")
    last = output.shape.dimensions[-1] if output.item is None else output.item.dimensions[-1]
    names = [port.name for port in signature.outputs]
    return TextPorts(
        text=text,
        embedding=output.name,
        element_type=output.element_type,
        size=None if last.is_dynamic else last.minimum,
        counts_tokens=TOKENS in names,
        is_sparse=SPARSE in names,
    )


def text_input(signature: ModelSignature) -> str | None:
    """Return the name of the only input, if it takes texts."""
    match signature.inputs:
        case [port] if port.element_type == TEXT and port.shape.rank == 1:
            return port.name
        case _:
            return None


def _embedding(outputs: Iterable[OutputPort]) -> OutputPort | None:
    """Return the output with the vectors: by its name, or as the only one that can have them."""
    found = [port for port in outputs if port.element_type in FLOATS and _has_vectors(port)]
    named = [port for name in EMBEDDING for port in found if port.name == name]
    if named:
        return named[0]
    return found[0] if len(found) == 1 else None


def _has_vectors(port: OutputPort) -> bool:
    if port.item is not None:
        return port.item.rank in (1, 2)
    return port.shape.rank == 2


@value
class EncoderPorts:
    """The ports of an encoder."""

    ids: InputPort
    filled: Mapping[str, tuple[npt.DTypeLike, int]]
    """The inputs that have the same number for each token: its type, and the number."""
    embedding: str
    most_tokens: int | None
    """Tokens of one text, at most."""

    def inputs_of(self, tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the inputs for the tokens of one text. The SDK refuses numbers that the encoder's type lacks."""
        ids = tokens[np.newaxis]
        return {
            self.ids.name: ids,
            **{name: np.full(ids.shape, number, dtype) for name, (dtype, number) in self.filled.items()},
        }


def encoder_ports(signature: ModelSignature) -> EncoderPorts:
    """Return the ports of an encoder; raises `NotGiven` for other models."""
    ids = [port for port in signature.inputs if port.name == IDS and port.shape.rank == 2]
    others = [port for port in signature.inputs if port.name != IDS and port.mask_of is None]
    strange = [port.name for port in others if port.name not in FILLED]
    output = _embedding(signature.outputs)
    if not ids or strange or output is None:
        needs = f"it needs the input {IDS} [batch, tokens] and an output with a vector for each row"
        unknown = f", and nobody has its input {strange[0]}" if strange else ""
        raise NotGiven(f"{signature.name!r} embeds no tokens: {needs}{unknown}")
    filled = {port.name: (dtype_of(port.element_type), FILLED[port.name]) for port in others}
    return EncoderPorts(
        ids=ids[0],
        filled=filled,
        embedding=output.name,
        most_tokens=ids[0].shape.dimensions[1].maximum,
    )


def tokenizer_input(signature: ModelSignature) -> str:
    """Return the input of a tokenizer; raises `NotGiven` for other models."""
    text = text_input(signature)
    if text is None or all(port.name != IDS or port.item is None for port in signature.outputs):
        raise NotGiven(
            f"{signature.name!r} is no tokenizer: it needs one input of element type str and an output {IDS}, a list of "
            f"arrays"
        )
    return text
