"""`python -m benchmarks.text`: texts to vectors, of 16 callers with 64 texts in each call.

MiniLM in f32 on two cores; docstrings of Python's library, of up to 256 tokens. A folder is served over HTTP
(`/v1/embeddings`) and by sockets (the SDK); with `--peer` also by a FastAPI server around sentence-transformers, in the
environment that `make text-peer` sets up. All take turns, round by round. Every vector is compared with the model's alone.
"""

from __future__ import annotations

import base64
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import psutil
import typer
from examples.embeddings import model as minilm
from examples.embeddings.docstrings import collect
from examples.embeddings.folder import ensure
from examples.embeddings.tokens import MAX_TOKENS
from examples.embeddings.weights import load_weights, model_folder
from examples.model_file import write
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.http_client import HOST, HttpClient
from benchmarks.peer import free_port, listens
from benchmarks.processes import START_S, Child, child_process, cpu_s, wait_for_slots
from benchmarks.report import Figure, Report, median_ratio, print_reports
from shapestream import blocking

CALLERS = 16
TEXTS = 64
CORES = 2
# Aims of issue 27.
AIM_PEER = 1.3
AIM_SDK = 0.9
AIM_TOKENISING = 0.1
CLOSE = 0.99999
"""Least cosine between a vector and the model's own of that text alone."""
PATH = "/v1/embeddings"
HEADERS = "Content-Type: application/json\r\n"
_ENVIRONMENT = Path(__file__).parents[1] / ".venv-text-peer"
_SERVER = Path(__file__).with_name("text_peer_server.py")
_POLL_S = 0.05

Vectors: TypeAlias = Sequence[NDArray[np.float32]]
Call: TypeAlias = list[str]


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to embed all calls of a round, and its figures by round."""

    name: str
    run: Callable[[Sequence[Call]], Iterator[tuple[int, Vectors]]]
    """Embed the calls, 16 at a time; yields the place of each with its vectors."""
    processes: tuple[int, ...] = ()
    per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def measure(self, calls: Sequence[Call], right: Sequence[NDArray[np.float32]]) -> None:
        """One round."""
        texts = sum(map(len, calls))
        used_s, began = sum(map(cpu_s, self.processes)), time.perf_counter()
        answers = list(self.run(calls))
        self.per_s.append(texts / (time.perf_counter() - began))
        self.cpu_us.append((sum(map(cpu_s, self.processes)) - used_s) / texts * 1e6)
        for place, vectors in answers:
            cosines = np.einsum("ij,ij->i", np.array(vectors), right[place])
            if len(cosines) != len(calls[place]) or cosines.min() < CLOSE:
                raise AssertionError(f"{self.name}: a vector of call {place} differs: {cosines.min()}")


# ------------------------------------------------------------ the contenders


def serve(stack: ExitStack, folder: Path, model: Path) -> tuple[Child, str, int]:
    """Serve the folder of a model; the server, its address and its HTTP port."""
    address, port = f"ipc://{folder}/text.sock", free_port()
    path, log = folder / "text.yaml", folder / "text.log"
    path.write_text(
        f"server:\n  listen: ['{address}']\n  http: {{address: '{HOST}:{port}', texts: minilm}}\n"
        f"models:\n  - {{name: minilm, path: {json.dumps(str(model))}, engine: openvino}}\n"
        f"in_process: {{slots: {CORES}, threads: 1}}\nlogging: {{level: warning}}\n"
    )
    child = stack.enter_context(child_process(["-m", "shapestream_workers", "serve", str(path)], log=log))
    wait_for_slots(child, address, CORES, log)
    _until_listening(child, port, log)
    return child, address, port


def _by_http(port: int) -> Callable[[Sequence[Call]], Iterator[tuple[int, Vectors]]]:
    def run(calls: Sequence[Call]) -> Iterator[tuple[int, Vectors]]:
        bodies = [
            json.dumps({"model": "minilm", "input": call, "encoding_format": "base64"}).encode()
            for call in calls
        ]
        with HttpClient(port, PATH, HEADERS) as client:
            for place, body in client.stream(bodies, CALLERS):
                rows = json.loads(body)["data"]
                yield place, [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows]

    return run


def _by_sdk(client: blocking.Client) -> Callable[[Sequence[Call]], Iterator[tuple[int, Vectors]]]:
    def run(calls: Sequence[Call]) -> Iterator[tuple[int, Vectors]]:
        items = ({"text": call} for call in calls)
        with client.stream("minilm", items, max_in_flight=CALLERS) as results:
            for place, result in enumerate(results):
                yield place, list(result["embedding"])

    return run


def _peer(stack: ExitStack, folder: Path, weights: Path) -> Contender:
    port, ready, log = free_port(), folder / "peer-ready", folder / "peer.log"
    child = stack.enter_context(
        child_process(
            ["-P", str(_SERVER), str(weights), str(port), str(ready), str(CORES)],
            log=log,
            environment={"HF_HUB_OFFLINE": "1"},
            python=_ENVIRONMENT / "bin/python",
        )
    )
    _until_listening(child, port, log)
    return Contender(name="FastAPI, sentence-transformers", run=_by_http(port), processes=(child.pid,))


def _until_listening(child: Child, port: int, log: Path) -> None:
    give_up_at = time.monotonic() + START_S
    while not listens(port):
        if child.ended or time.monotonic() > give_up_at:
            raise RuntimeError(f"a server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(_POLL_S)


# ------------------------------------------------------------ the measurement


def _calls(texts: Sequence[str], count: int, each: int, seed: int) -> list[Call]:
    """So many calls, of so many texts each, drawn at random."""
    chosen = np.random.default_rng(seed).choice(len(texts), (count, each))
    return [[texts[number] for number in row] for row in chosen.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A folder to serve, the same model without a tokenizer, and texts that it does not cut."""

    weights: Path
    folder: Path
    model: Path
    tokenizer: Tokenizer
    texts: list[str]


def prepare(folder: Path) -> Prepared:
    """Make the files in a folder."""
    weights, served, model = model_folder(), folder / "minilm", folder / "pooled.xml"
    ensure(served)
    write(minilm.build(load_weights(weights)), model)
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = [docstring.text for docstring in collect()]
    lengths = map(len, tokenizer.encode_batch(texts))
    texts = [text for text, length in zip(texts, lengths, strict=True) if length <= MAX_TOKENS]
    return Prepared(weights=weights, folder=served, model=model, tokenizer=tokenizer, texts=texts)


class Alone:
    """The model without a server: what each text's vector must be."""

    def __init__(self, prepared: Prepared) -> None:
        import openvino as ov

        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": CORES, "INFERENCE_PRECISION_HINT": "f32"}
        self._request = ov.Core().compile_model(prepared.model, "CPU", properties).create_infer_request()
        self._tokenizer = prepared.tokenizer
        self._known: dict[str, NDArray[np.float32]] = {}

    def vectors(self, calls: Sequence[Call]) -> list[NDArray[np.float32]]:
        """The vectors of each call, every text in a batch of its own."""
        missing = sorted({text for call in calls for text in call} - self._known.keys())
        for text, encoded in zip(missing, self._tokenizer.encode_batch(missing), strict=True):
            ids, mask = np.array([[encoded.ids], [[1] * len(encoded.ids)]], np.int64)
            self._known[text] = self._request.infer([ids, mask], share_inputs=True)[0][0].copy()
        return [np.array([self._known[text] for text in call]) for call in calls]


def measure(folder: Path, *, calls: int, each: int, rounds: int, with_peer: bool) -> list[Report]:
    """Run everything in interleaved rounds; `calls` of `each` so many texts, of each contender and round."""
    prepared = prepare(folder)
    with ExitStack() as stack:
        alone = Alone(prepared)
        server, address, port = serve(stack, folder, prepared.folder)
        client = stack.enter_context(blocking.connect(address))
        processes = (server.pid, *[each.pid for each in psutil.Process(server.pid).children(recursive=True)])
        http = Contender(name="shapestream, HTTP", run=_by_http(port), processes=processes)
        sdk = Contender(name="shapestream, SDK", run=_by_sdk(client), processes=processes)
        peers = [_peer(stack, folder, prepared.weights)] if with_peer else []
        everyone = [http, sdk, *peers]
        tokenising_us: list[float] = []
        for seed in range(-1, rounds):
            of_round = _calls(prepared.texts, calls, each, seed + 1)
            right = alone.vectors(of_round)
            for contender in everyone:
                contender.measure(of_round, right)
            if seed < 0:
                for contender in everyone:
                    contender.per_s.clear()
                    contender.cpu_us.clear()
            else:
                tokenising_us.append(_tokenising_us(prepared.tokenizer, of_round))
        return [_report(http, sdk, peers, tokenising_us)]


def _tokenising_us(tokenizer: Tokenizer, calls: Sequence[Call]) -> float:
    """CPU of the tokenizer alone, per text; with all of its threads."""
    began = time.process_time()
    for call in calls:
        tokenizer.encode_batch(call)
    return (time.process_time() - began) / sum(map(len, calls)) * 1e6


def _report(
    http: Contender,
    sdk: Contender,
    peers: Sequence[Contender],
    tokenising_us: Sequence[float],
) -> Report:
    report = Report(title=f"{TEXTS} texts per call, {CALLERS} callers")
    report.columns = ("way", "texts per s", "HTTP / it", "CPU us per text", "tokenising, share of it")
    aims = {id(sdk): AIM_SDK, **{id(peer): AIM_PEER for peer in peers}}
    for each in (http, sdk, *peers):
        ratio: Figure | str = ""
        if each is not http:
            ratio = Figure(median_ratio(http.per_s, each.per_s), "x", at_least=aims.get(id(each)))
        share: Figure | str = ""
        if each is http:
            share = Figure(median_ratio(tokenising_us, http.cpu_us), "x", at_most=AIM_TOKENISING)
        rate = Figure(statistics.median(each.per_s), "/s")
        report.rows.append((each.name, rate, ratio, Figure(statistics.median(each.cpu_us), "us"), share))
    return report


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    with_peer: Annotated[
        bool, typer.Option("--peer", help="FastAPI with sentence-transformers, too.")
    ] = False,
) -> None:
    """Embed docstrings over HTTP, beside other ways to batch them."""
    if with_peer and not (_ENVIRONMENT / ".ready").exists():
        raise typer.BadParameter("the peer has an environment of its own, which `make text-peer` sets up")
    calls, each, rounds = (CALLERS, 4, 1) if smoke else (CALLERS, TEXTS, rounds)
    print_reports(
        partial(measure, calls=calls, each=each, rounds=rounds, with_peer=with_peer), as_json=as_json
    )


if __name__ == "__main__":
    typer.run(main)
