"""Texts, or their tokens, to the server and back: one request of a chain for all texts of a caller.

Tokens that the caller has made are requests of the chain's encoder, one for each text, so that each is scheduled by its own
length. They are all under way at once, up to a number, and within the caller's quota of requests in flight.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
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
from shapestream.gateway.options import TextService, of_version
from shapestream.gateway.text_bodies import Matrix, Texts, TokenLists, VectorForm, check_dimensions, matrix_of
from shapestream.gateway.text_ports import (
    IDS,
    QUERY,
    SCORE,
    SPARSE,
    TOKENS,
    UNCUT,
    EncoderPorts,
    ScorePorts,
    TextPorts,
    encoder_ports,
    most_tokens,
    score_ports,
    scores_texts,
    text_ports,
    tokenizer_input,
)
from shapestream.gateway.text_scores import Pairs, check_number
from shapestream.web.messages import HttpRequest
from shapestream.web.quotas import BeyondQuota, Quotas
from shapestream_engine.layout import value

PRIORITY, TIMEOUT_MS = "x-request-priority", "x-request-timeout-ms"
"""Headers of a caller's request: its priority among the caller's own, and milliseconds until its answer is of no use."""

MOST_IN_FLIGHT = 256
"""Requests of one caller's request at the server at once: half of the share of one caller."""


@value
class Embedded:
    """The vectors of a caller's texts."""

    vectors: Matrix
    tokens: int
    """Tokens of all texts together; 0 where the model does not count them."""
    request_id: str


@value
class Scored:
    """The logits of a caller's texts."""

    logits: Matrix
    """A row for each text, a column for each label."""
    tokens: int
    """Tokens of all rows together, with their queries; 0 where the model does not count them."""
    request_id: str


@value
class Terms:
    """What a caller's headers say of its request."""

    due: float | None
    """When its answer is of no use any more, by trio's clock."""
    priority: int

    @classmethod
    def of(cls, request: HttpRequest) -> Terms:
        """Read the headers. Raises `InvalidRequest`."""
        timeout_ms = _number(request, TIMEOUT_MS)
        if timeout_ms is not None and timeout_ms <= 0:
            raise InvalidRequest(
                f"the header {TIMEOUT_MS} is a number of milliseconds from 1, not {timeout_ms}"
            )
        due = None if timeout_ms is None else trio.current_time() + timeout_ms / 1e3
        return cls(due=due, priority=_number(request, PRIORITY) or 0)


def _number(request: HttpRequest, header: str) -> int | None:
    """Return a header that is an integer, None where the request has none. Raises `InvalidRequest`."""
    text = request.headers.get(header)
    if text is None:
        return None
    if _INTEGER.fullmatch(text) is None:
        raise InvalidRequest(f"the header {header} is an integer of at most 9 digits, not {text[:40]!r}")
    return int(text)


def _check_cuts(result: Result, with_query: str = "") -> None:
    """Raise `InvalidRequest` where a text was cut."""
    kept, uncut = result[TOKENS], result[UNCUT]
    for index in np.flatnonzero(kept < uncut).tolist():
        raise InvalidRequest(
            f"text {index} has {uncut[index]} tokens{with_query}, and the model takes at most {kept[index]} "
            '("truncate": true cuts it)'
        )


_INTEGER = re.compile("-?[0-9]{1,9}", re.ASCII)


class TextCalls:
    """Calls of one service's models."""

    def __init__(self, client: Client, service: TextService, in_flight: Quotas) -> None:
        """`in_flight`: of the requests of all callers."""
        self._client = client
        self._in_flight = in_flight
        self._service = service

    def of_version(self, version: str) -> TextCalls:
        """Return the calls of one version of these models."""
        return TextCalls(self._client, of_version(self._service, version), self._in_flight)

    async def embed(
        self,
        inputs: Texts | TokenLists,
        form: VectorForm,
        request: HttpRequest,
        *,
        truncate: bool | None = None,
    ) -> Embedded:
        """Return a vector for each text. Raises `RequestError`, also for one that is too long if `truncate` is false."""
        match inputs:
            case Texts():
                return await self._embed_texts(inputs, form, request, truncate)
            case TokenLists():
                return await self._embed_tokens(inputs, form, request)

    async def _embed_texts(
        self, inputs: Texts, form: VectorForm, request: HttpRequest, truncate: bool | None
    ) -> Embedded:
        ports = text_ports(await signature_of(self._client, self._service.name))
        self._check_tells_cuts(ports, truncate)
        if ports.size is not None:
            check_dimensions(form, ports.size)
        result = await self._infer(self._service.name, {ports.text: inputs.texts}, request)
        if truncate is False:
            _check_cuts(result)
        vectors = matrix_of(result[ports.embedding], len(inputs))
        check_dimensions(form, vectors.shape[1])
        return Embedded(
            vectors=vectors,
            tokens=int(np.sum(result[TOKENS])) if ports.counts_tokens else 0,
            request_id=result.request_id,
        )

    async def embed_sparse(
        self, inputs: Texts | TokenLists, request: HttpRequest, *, truncate: bool | None = None
    ) -> Embedded:
        """Return a vector for each text, of which most numbers are 0. Raises `RequestError`."""
        name = self._service.name
        ports = text_ports(await signature_of(self._client, name))
        if not ports.is_sparse:
            raise NotGiven(f"{name!r} gives no sparse vectors: it needs an output `{SPARSE}` [texts, size]")
        if isinstance(inputs, TokenLists):
            raise NotGiven("sparse vectors are made of texts only")
        self._check_tells_cuts(ports, truncate)
        result = await self._infer(name, {ports.text: inputs.texts}, request)
        if truncate is False:
            _check_cuts(result)
        return Embedded(
            vectors=matrix_of(result[SPARSE], len(inputs)), tokens=0, request_id=result.request_id
        )

    async def scoring(self) -> ScorePorts | None:
        """Return the ports of the model if it scores texts; None if it does something else."""
        signature = await signature_of(self._client, self._service.name)
        return score_ports(signature) if scores_texts(signature) else None

    async def score(self, pairs: Pairs, request: HttpRequest, *, only_one: bool = False) -> Scored:
        """Return the scores of each text. Raises `RequestError`; also where there are several, and `only_one` is wanted."""
        name = self._service.name
        ports = score_ports(await signature_of(self._client, name))
        self._check_tells_cuts(ports, pairs.truncate)
        self._check_labels(ports.labels, len(pairs.texts), only_one)
        result = await self._infer(name, {ports.text: pairs.texts, QUERY: pairs.queries}, request)
        logits = matrix_of(result[SCORE], len(pairs.texts))
        self._check_labels(logits.shape[1], len(pairs.texts), only_one)
        if pairs.truncate is False:
            _check_cuts(result, " with its query" if pairs.queries else "")
        return Scored(
            logits=logits,
            tokens=int(np.sum(result[TOKENS])) if ports.counts_tokens else 0,
            request_id=result.request_id,
        )

    def _check_tells_cuts(self, ports: TextPorts | ScorePorts, truncate: bool | None) -> None:
        """Raise `NotGiven` where a caller forbids that texts are cut, and the model does not tell whether it does."""
        if truncate is False and not ports.tells_cuts:
            raise NotGiven(f'{self._service.name!r} does not tell whether it cuts texts: send no "truncate"')

    def _check_labels(self, labels: int | None, texts: int, only_one: bool) -> None:
        if labels is None:
            return
        if only_one and labels != 1:
            raise NotGiven(
                f"{self._service.name!r} gives {labels} scores for each text, and to rank needs one"
            )
        check_number(labels, texts)

    @property
    def labels(self) -> Sequence[str]:
        """The names of the scores, as far as they are known."""
        return self._service.labels

    async def tokenize(self, inputs: Texts, request: HttpRequest) -> tuple[Sequence[npt.NDArray[Any]], str]:
        """Return the tokens of each text, and the request's id. Raises `RequestError`."""
        name = self._service.tokenizer
        signature = await self._signature_of_part(name, "tokenizer")
        alone = {QUERY: ()} if len(signature.inputs) > 1 else {}
        result = await self._infer(name, {tokenizer_input(signature): inputs.texts, **alone}, request)
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

    async def most_tokens(self) -> int | None:
        """Return how many tokens of one text the encoder takes at most; None where that is not known."""
        try:
            return most_tokens(await self._signature_of_part(self._service.encoder, "encoder"))
        except NotGiven:
            return None

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
        terms = Terms.of(request)
        unsent = deque(enumerate(inputs.lists))
        async with trio.open_nursery() as nursery:

            async def work() -> None:
                while unsent:
                    index, tokens = unsent.popleft()
                    try:
                        results[index] = await self._infer(
                            self._service.encoder,
                            ports.inputs_of(tokens),
                            request,
                            terms,
                            together=len(inputs),
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

    async def _infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        request: HttpRequest,
        terms: Terms | None = None,
        *,
        together: int = 1,
    ) -> Result:
        terms = terms or Terms.of(request)
        with self._in_flight.one(request.peer):
            return await self._client.infer(
                model,
                inputs,
                deadline=None if terms.due is None else max(0.0, terms.due - trio.current_time()),
                priority=terms.priority,
                request_id=own_id(request.headers.get(OWN_ID)),
                trace=request.headers,
                caller=request.peer,
                together=together,
            )
