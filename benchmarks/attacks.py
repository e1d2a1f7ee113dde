"""`python -m benchmarks.attacks`: what do honest callers of the gateways notice of one that attacks?

Beside honest callers over HTTP and gRPC, a child process attacks a gateway, or the server, in one way at a time: by as
much work as is legal, by requests that never end, by answers that it does not read. Some attacks have a token.
Quiet stretches and attacks alternate. The table has the p99 of an honest caller over the attacked protocol, its rate of
answers / that of the quiet stretch before, and the longest turn of an event loop, in CPU time between two waits: of the HTTP
gateway or of the server, whichever is longer. The honest caller's model has a worker of its own; a table of one row says
what it costs to share a slot with the attacker. Every honest answer is compared, and a refusal ends the benchmark.
`--profile` tells besides which functions took the time of a long turn.

With `--soak SECONDS` all attacks go on in turn for so long, each beside both honest callers, and the memory of every process
is compared between the end of the first round of attacks and the end.
"""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import os
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import grpc
import msgpack
import numpy as np
import psutil
import typer
import zmq
from rich.console import Console
from tests.tokenizer_files import write_tokenizer

from benchmarks.binary_infer import PATH, head_of, headers_of
from benchmarks.floods import hello, pack, request, table_of
from benchmarks.http_client import HOST, HttpClient
from benchmarks.processes import START_S, Child, child_process
from benchmarks.report import Figure, Report, print_reports
from benchmarks.turns import longest_turn_s, profiles_in
from shapestream.gateway import open_inference_pb2 as protocol

CONNECTIONS = (1, 16)
"""Connections of an attacker. The aims are for one."""
AIM_TURN_MS = 5.0
"""Longest turn of an event loop, in CPU time. The other aims are those of `benchmarks.floods`."""
HTTP_INTERVAL_S, GRPC_INTERVAL_S = 0.005, 0.02
"""Between two requests of an honest caller, whatever is answered."""
MOST_GROWTH_MB = 30.0
"""Growth of a process in a soak, at most: an allocator meets its worst moment late."""
WIDTH = 256
TIMEOUT_S = 60.0
_SETTLE_S = 0.5
_STARTS_S = 2.0
"""An attacker's process imports its libraries, and then attacks."""
_INFER = "/inference.GRPCInferenceService/"
_MOST_CONTAINERS = 49_000
_MEBIBYTE = 1 << 20
_HASTE = 2**31 - 1

_WIDE = "shape: 'batch:1..50000, width:0..1000000', element_type: f32"
_MODELS = f"""\
models:
  - {{name: small, function: 'benchmarks.models:identity', trust: true, calibration_s: 0,
     inputs: {{x: {{shape: 'batch:1..64, {WIDTH}', element_type: f32}}}},
     outputs: {{y: {{shape: 'batch:1..64, {WIDTH}', element_type: f32, rule: rows}}}}}}
  - {{name: beside, function: 'benchmarks.models:identity', trust: true, calibration_s: 0,
     inputs: {{x: {{shape: 'batch:1..64, {WIDTH}', element_type: f32}}}},
     outputs: {{y: {{shape: 'batch:1..64, {WIDTH}', element_type: f32, rule: rows}}}}}}
  - {{name: wide, function: 'benchmarks.models:identity', trust: true, calibration_s: 0, batching: {{max_batch: 50000}},
     inputs: {{x: {{{_WIDE}}}}}, outputs: {{y: {{{_WIDE}, rule: rows}}}}}}
  - {{name: slow, function: 'benchmarks.models:very_slow', trust: true, calibration_s: 0, batching: {{max_batch: 1}},
     inputs: {{x: {{shape: 'batch, 1', element_type: f32}}}}, outputs: {{y: {{shape: 'batch, 1', element_type: f32}}}}}}
  - {{name: words, function: 'benchmarks.models:lengths', trust: true, calibration_s: 0,
     inputs: {{x: {{shape: 'batch:1..65536', element_type: str}}}},
     outputs: {{y: {{shape: 'batch', element_type: i64}}}}}}
  - {{name: emit, function: 'benchmarks.models:many', trust: true, calibration_s: 0, batching: {{max_batch: 1}},
     inputs: {{x: {{shape: '1', element_type: i64}}}},
     outputs: {{items: {{rule: list, shape: 'width', element_type: f32}}}}}}
  - {{name: grow, function: 'benchmarks.models:grow', trust: true, calibration_s: 0, batching: {{max_batch: 1}},
     inputs: {{x: {{shape: 'batch, 1', element_type: f32}}}}, outputs: {{y: {{shape: 'batch, width', element_type: f32}}}}}}
  - {{name: tokens, tokenizer: {{path: tokenizer.json, max_tokens: 512}}}}
  - {{name: embed, function: 'benchmarks.models:embed', trust: true, calibration_s: 0,
     inputs: {{ids: {{shape: 'batch:1..64, length:1..512', element_type: i64}}}},
     outputs: {{y: {{shape: 'batch, 1', element_type: f32}}}}}}
chains:
  - name: lists
    inputs: {{x: emit.x}}
    stages:
      - {{name: emit, model: emit, inputs: {{x: x}}}}
      - {{name: run, model: wide, inputs: {{x: emit.items}}, each: item of emit.items, at_most: 64}}
    outputs: {{y: run.y}}
  - name: sentences
    inputs: {{text: tokens.text}}
    stages:
      - {{name: tokens, model: tokens, inputs: {{text: text}}}}
      - {{name: embed, model: embed, inputs: {{ids: tokens.input_ids}}, each: item of tokens.input_ids, at_most: 2048}}
    outputs: {{embedding: embed.y, tokens: tokens.counts}}
workers:
  - {{models: [small], slots: 1, threads: 1}}
  - {{models: [beside, wide, words, emit, grow, tokens, embed], slots: 1, threads: 1}}
  - {{models: [slow], slots: 1, threads: 1}}
logging: {{level: info, format: json}}
"""
_PATCH = '''\
"""Put beside the product's programs: it measures the turns of their event loops."""
import functools, os, sys
folder = os.environ.get("ATTACKS_TURNS")
if folder and {"gateway", "serve"} & set(sys.argv):
    import trio
    from pathlib import Path
    from benchmarks.turns import Turns
    kind = ("grpc" if "--grpc" in sys.argv else "http") if "gateway" in sys.argv else "serve"
    turns = Turns(Path(folder), f"{kind}-{os.getpid()}", profiles="ATTACKS_PROFILES" in os.environ)
    trio.run = functools.partial(trio.run, instruments=[turns])
'''

# ------------------------------------------------------------ attacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an attacker finds its victim, and who it is there."""

    http: int
    grpc: int
    ipc: str
    token: str

    def head(self, method: str, path: str, **headers: str | int) -> bytes:
        """The head of a request over HTTP with the attacker's token."""
        lines = {"Host": HOST, "Authorization": f"Bearer {self.token}", **headers}
        told = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{told}\r\n".encode()


Attack: TypeAlias = Callable[[Site, int], None]
"""Attack over so many connections, without an end."""


def _on_each(connections: int, attack: Callable[[], None]) -> None:
    """Attack in a thread for each connection, again and again, whatever ends it."""

    def go_on() -> None:
        while True:
            with suppress(OSError, http.client.HTTPException, grpc.RpcError):
                attack()
            time.sleep(0.01)

    threads = [threading.Thread(target=go_on, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _asks(
    make: Callable[[], bytes],
    path: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
    has_token: bool = True,
) -> Attack:
    """Ask for the same again and again."""

    def attack(site: Site, connections: int) -> None:
        body = make()
        told = dict(headers or {}) | ({"Authorization": f"Bearer {site.token}"} if has_token else {})

        def ask() -> None:
            connection = http.client.HTTPConnection(HOST, site.http, timeout=TIMEOUT_S)
            try:
                while True:
                    connection.request(method, path, body or None, told)
                    answer = connection.getresponse()
                    answer.read()
                    if answer.status >= 500 and answer.status != 503:
                        os._exit(answer.status - 400)  # the benchmark looks for it
            finally:
                connection.close()

        _on_each(connections, ask)

    return attack


def _infer(data: str, shape: str) -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":{shape},"data":{data}}}]}}'.encode()


def _numbers() -> bytes:
    """The most numbers that fit; the answer is JSON as well."""
    return _infer("[" + ",".join("1" * 1_000_000) + "]", "[1,1000000]")


def _lists() -> bytes:
    return _infer("[" + ",".join(["[1]"] * _MOST_CONTAINERS) + "]", f"[{_MOST_CONTAINERS},1]")


def _members() -> bytes:
    members = ",".join(f'"k{number}":{{}}' for number in range(_MOST_CONTAINERS))
    return b'{"inputs":[],' + members.encode() + b"}"


def _bomb() -> bytes:
    """64 MiB of zeros, the most that a body may have."""
    return gzip.compress(bytes(64 * _MEBIBYTE))


_STRINGS = 16_000_000
_STRINGS_HEAD = json.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "datatype": "BYTES",
                "shape": [_STRINGS],
                "parameters": {"binary_data_size": 4 * _STRINGS},
            }
        ]
    }
).encode()


def _empty_strings() -> bytes:
    return gzip.compress(_STRINGS_HEAD + bytes(4 * _STRINGS))


def _chain_of_lists() -> bytes:
    data = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [262_144]}]}
    return json.dumps(data).encode()


def _long_text() -> bytes:
    return json.dumps({"inputs": "hello " * 170_000}).encode()


def _many_texts() -> bytes:
    return json.dumps({"inputs": ["hello world " * 75] * 2048}).encode()


def _slow_bodies(site: Site, connections: int) -> None:
    """Send bodies byte by byte."""

    def send() -> None:
        with socket.create_connection((HOST, site.http), TIMEOUT_S) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.sendall(site.head("POST", PATH.format("small"), Content_Length=65536))
            for _ in range(65535):
                own.sendall(b" ")
                time.sleep(0.0002)

    _on_each(connections, send)


def _extensions(site: Site, connections: int) -> None:
    """Keep chunked bodies alive by extensions of their chunks: much is sent, and nothing of the body."""

    def send() -> None:
        with socket.create_connection((HOST, site.http), TIMEOUT_S) as own:
            own.sendall(site.head("POST", PATH.format("small"), Transfer_Encoding="chunked"))
            own.sendall(b"100000\r\n" + bytes(65536))
            while True:
                own.sendall(b"0")
                time.sleep(0.2)

    def extend() -> None:
        with socket.create_connection((HOST, site.http), TIMEOUT_S) as own:
            own.sendall(site.head("POST", PATH.format("small"), Transfer_Encoding="chunked"))
            while True:
                own.sendall(b"1;" + b"x" * 1000 + b"\r\n \r\n")
                time.sleep(0.002)

    for _ in range(8):
        threading.Thread(target=_on_each, args=(connections, send), daemon=True).start()
    _on_each(connections, extend)


def _without_a_token(site: Site, connections: int) -> None:
    """The same, of somebody unknown."""
    _extensions(Site(http=site.http, grpc=site.grpc, ipc=site.ipc, token="nobody"), connections)


def _slow_requests(site: Site, connections: int) -> None:
    """Many connections, each with one request of a slow model."""
    _asks(partial(_infer, "[1]", "[1,1]"), PATH.format("slow"))(site, 44 * connections)


def _channel(site: Site) -> grpc.Channel:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
    return grpc.insecure_channel(f"{HOST}:{site.grpc}", options)


def _calls_without_messages(site: Site, connections: int) -> None:
    """Begin calls that need no token, and never send their message."""

    def begin() -> None:
        over = threading.Event()

        def nothing() -> Iterator[bytes]:
            over.wait(TIMEOUT_S)
            yield from ()

        with _channel(site) as channel:
            calls = [channel.stream_unary(_INFER + "ServerLive").future(nothing()) for _ in range(64)]
            for call in calls:
                with suppress(grpc.RpcError):
                    call.result(TIMEOUT_S)
            over.set()

    _on_each(connections, begin)


def _calls_of_a_slow_model(site: Site, connections: int) -> None:
    """Keep 64 calls on each connection."""
    message = _message("slow", np.ones((1, 1), np.float32))
    metadata = [("authorization", f"Bearer {site.token}")]

    def call() -> None:
        with _channel(site) as channel:
            infer = channel.unary_unary(_INFER + "ModelInfer")
            calls = [infer.future(message, timeout=TIMEOUT_S, metadata=metadata) for _ in range(64)]
            for each in calls:
                with suppress(grpc.RpcError):
                    each.result(TIMEOUT_S)

    _on_each(connections, call)


def _unread_answers(site: Site, connections: int) -> None:
    """Ask for 60 answers of 4 MB, and read none. The frames of HTTP/2 are made here: no client's library does this."""
    message = _message("grow", np.ones((1, 1), np.float32))

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    def literal(name: str, value: str) -> bytes:
        return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    headers = b"".join(
        itertools.starmap(
            literal,
            {
                ":method": "POST",
                ":scheme": "http",
                ":path": _INFER + "ModelInfer",
                ":authority": "here",
                "te": "trailers",
                "content-type": "application/grpc",
                "authorization": f"Bearer {site.token}",
            }.items(),
        )
    )
    data = b"\0" + struct.pack(">I", len(message)) + message

    def ask() -> None:
        with socket.create_connection((HOST, site.grpc), TIMEOUT_S) as own:
            own.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
            for stream in range(1, 121, 2):
                own.sendall(frame(1, 4, stream, headers) + frame(0, 1, stream, data))
            time.sleep(TIMEOUT_S)

    _on_each(connections, ask)


def _haste(site: Site, connections: int) -> None:
    """Keep 256 requests of the highest priority in flight on each connection to the server."""
    context: zmq.Context[Any] = zmq.Context.instance()

    def ask() -> None:
        with context.socket(zmq.DEALER) as own:
            own.setsockopt(zmq.LINGER, 0)
            own.connect(site.ipc)
            own.send(pack([hello(os.urandom(16)), [11, 0, "small"]]))
            sequences = itertools.count()
            body = bytes(4 * WIDTH)

            def next_request(model: int) -> list[Any]:
                entry = request(next(sequences), model)
                entry[5], entry[6], entry[7] = _HASTE, _LAYOUT, [body]
                return entry

            model = None
            while True:
                for entry in _entries_of(own.recv_multipart()):
                    if entry[0] == 22:
                        model = entry[3]
                        own.send(pack([next_request(model) for _ in range(256)]))
                    elif entry[0] in (24, 25) and model is not None:
                        own.send(pack([next_request(model)]))

    _on_each(connections, ask)


def _entries_of(frames: list[bytes]) -> list[Any]:
    return list(msgpack.unpackb(frames[0])[1]) if frames[0] else []


_LAYOUT = b"\x91\x93\x00\xa3f32\x92\x01\xcd" + struct.pack(">H", WIDTH)
"""msgpack of [[0, "f32", [1, WIDTH]]]."""


def _message(model: str, x: np.ndarray[Any, Any]) -> bytes:
    tensor = protocol.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=x.shape)
    whole = protocol.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[x.tobytes()])
    return bytes(whole.SerializeToString())


HTTP_ATTACKS: dict[str, Attack] = {
    "two MB of numbers": _asks(_numbers, PATH.format("wide")),
    "49,000 lists": _asks(_lists, PATH.format("wide")),
    "49,000 members": _asks(_members, PATH.format("wide")),
    "gzip bombs": _asks(_bomb, PATH.format("small"), {"Content-Encoding": "gzip"}),
    "16 million empty strings": _asks(
        _empty_strings,
        PATH.format("words"),
        {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(_STRINGS_HEAD))},
    ),
    "wishes for codings": _asks(
        bytes, "/nowhere", {"Accept-Encoding": "a," * 29_000}, method="GET", has_token=False
    ),
    "slow bodies": _slow_bodies,
    "extensions of chunks": _extensions,
    "the same without a token": _without_a_token,
    "slow requests": _slow_requests,
    "262,144 arrays for a chain": _asks(_chain_of_lists, PATH.format("lists")),
    "a text of 1 MB": _asks(_long_text, "/tokenize"),
    "2,048 texts": _asks(_many_texts, "/tokenize"),
    "pages of counters": _asks(bytes, "/v2/models/stats", method="GET"),
    "checks of health": _asks(bytes, "/v2/health/ready", method="GET", has_token=False),
    "requests in a hurry": _haste,
}
GRPC_ATTACKS: dict[str, Attack] = {
    "calls without messages": _calls_without_messages,
    "calls of a slow model": _calls_of_a_slow_model,
    "unread answers": _unread_answers,
}
SHARED_SLOT = "2,048 texts, on the same slot"
"""The attack whose honest caller asks a model of the attacked worker: what does a shared slot cost?"""
ATTACKS = HTTP_ATTACKS | GRPC_ATTACKS | {SHARED_SLOT: HTTP_ATTACKS["2,048 texts"]}

SMOKE_ATTACKS = ("two MB of numbers", "checks of health", "calls without messages", SHARED_SLOT)
"""Of each protocol one, and of the shared slot."""

# ------------------------------------------------------------ honest callers


def over_http(port: int, token: str, requests: int, model: str) -> list[float]:
    """Seconds of each request from when it was due; every answer is compared."""
    head = head_of(WIDTH)
    rows = [np.full(WIDTH, number, np.float32).tobytes() for number in range(requests)]
    headers = headers_of(head) + f"Authorization: Bearer {token}\r\n"
    taken: list[float] = []
    with HttpClient(port, PATH.format(model), headers) as client:
        began, sent = time.perf_counter(), 0
        while len(taken) < requests:
            left = began + sent * HTTP_INTERVAL_S - time.perf_counter() if sent < requests else TIMEOUT_S
            if left <= 0:
                client.ask(head + rows[sent])
                sent += 1
                continue
            for number, answer in client.take(left):
                taken.append(time.perf_counter() - began - number * HTTP_INTERVAL_S)
                if not answer.endswith(rows[number]):
                    raise AssertionError("an answer differs")
    return taken


def over_grpc(port: int, token: str, requests: int, model: str) -> list[float]:
    """Ask by grpcio; what it returns is as `over_http` has it."""
    metadata = [("authorization", f"Bearer {token}")]
    ended: dict[int, float] = {}
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(f"{HOST}:{port}", options) as channel:
        infer = channel.unary_unary(_INFER + "ModelInfer")
        began, calls = time.perf_counter(), []
        for number in range(requests):
            time.sleep(max(0.0, began + number * GRPC_INTERVAL_S - time.perf_counter()))
            message = _message(model, np.full((1, WIDTH), number, np.float32))
            call = infer.future(message, timeout=TIMEOUT_S, metadata=metadata, wait_for_ready=True)
            call.add_done_callback(lambda _, number=number: ended.setdefault(number, time.perf_counter()))
            calls.append(call)
        for number, call in enumerate(calls):
            (raw,) = protocol.ModelInferResponse.FromString(call.result(TIMEOUT_S)).raw_output_contents
            if raw != np.full(WIDTH, number, np.float32).tobytes():
                raise AssertionError("an answer differs")
    while len(ended) < requests:
        time.sleep(0.001)  # the last callbacks
    return [ended[number] - began - number * GRPC_INTERVAL_S for number in range(requests)]


# ------------------------------------------------------------ the server, and what is measured


@dataclass(slots=True)
class Victim:
    """A running server with both gateways."""

    child: Child
    site: Site
    honest: str
    """The token of the honest callers."""
    turns: Path
    log: Path

    def ask(self, protocol_name: str, requests: int, model: str = "small") -> tuple[float, float]:
        """The p99 in seconds, and answers per second. Only `small` has a worker of its own."""
        began = time.perf_counter()
        caller, port = (over_http, self.site.http) if protocol_name == "http" else (over_grpc, self.site.grpc)
        taken = caller(port, self.honest, requests, model)
        return sorted(taken)[int(0.99 * (len(taken) - 1))], requests / (time.perf_counter() - began)

    def resident_mb(self) -> dict[str, float]:
        """The resident memory of each process, by what it is and its number."""
        whole = psutil.Process(self.child.pid)
        found = {f"server {whole.pid}": whole.memory_info().rss / 1e6}
        for each in whole.children(recursive=True):
            words = each.cmdline()
            kind = "worker" if "gateway" not in words else "gRPC" if "--grpc" in words else "HTTP"
            found[f"{kind} {each.pid}"] = each.memory_info().rss / 1e6
        return found

    @contextmanager
    def attacked(self, kind: str, connections: int) -> Iterator[None]:
        """Attack during the block."""
        own = self.site
        words = [kind, str(own.http), str(own.grpc), own.ipc, own.token, str(connections)]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.attacks", "--attack", *words]) as process:
            try:
                time.sleep(_STARTS_S)
                yield
                if process.poll() is not None:
                    raise AssertionError(f"the attack by {kind} ended early, with status {process.poll()}")
                if self.child.ended:
                    raise AssertionError(f"the server ended beside {kind}")
            finally:
                process.kill()


@contextmanager
def served(folder: Path, *, profiles: bool = False) -> Iterator[Victim]:
    """The server under attack."""
    turns, patch = folder / "turns", folder / "patch"
    turns.mkdir()
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(_PATCH)
    write_tokenizer(folder / "tokenizer.json")
    honest, token = secrets.token_hex(16), secrets.token_hex(16)
    tokens = folder / "tokens"
    tokens.write_text(f"honest {honest}\nattacker {token}\n")
    tokens.chmod(0o600)
    address = f"ipc://{folder}/attacked.sock"
    config, log = folder / "attacked.yaml", folder / "attacked.log"
    config.write_text(
        f"server:\n  listen: ['{address}']\n"
        f"  http: {{address: '{HOST}:0', token_file: tokens, texts: sentences}}\n"
        f"  grpc: {{address: '{HOST}:0', token_file: tokens}}\n" + _MODELS
    )
    paths = os.pathsep.join([str(patch), str(Path(__file__).parents[1])])
    environment = {"ATTACKS_TURNS": str(turns), "PYTHONPATH": paths}
    if profiles:
        environment["ATTACKS_PROFILES"] = "1"
    with child_process(
        ["-m", "shapestream_workers", "serve", str(config)], log=log, environment=environment
    ) as child:
        events = _wait_for(log, child, ("gateways ready", "workers ready", "http ready", "grpc ready"))
        ports = {
            kind: int(events[f"{kind} ready"]["address"].rpartition(":")[2]) for kind in ("http", "grpc")
        }
        site = Site(http=ports["http"], grpc=ports["grpc"], ipc=address, token=token)
        yield Victim(child, site, honest, turns, log)
        if child.ended:
            raise AssertionError(f"the server ended:\n{log.read_text(errors='replace')[-4000:]}")


def _wait_for(log: Path, child: Child, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    give_up_at = time.monotonic() + START_S
    while True:
        told = log.read_text(errors="replace")
        lines = [
            json.loads(line) for line in told.splitlines() if line.startswith("{") and line.endswith("}")
        ]
        found = {line.get("event", ""): line for line in lines}
        if all(name in found for name in names):
            return found
        if child.ended or time.monotonic() > give_up_at:
            raise RuntimeError(f"the server did not start:\n{told[-4000:]}")
        time.sleep(0.05)


def measure(
    folder: Path,
    *,
    requests: int,
    rounds: int,
    kinds: tuple[str, ...],
    connections: tuple[int, ...],
    profiles: bool = False,
) -> list[Report]:
    """The tables: medians over rounds. With `profiles` each attack's long turns are told besides."""
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    quiet: dict[str, list[float]] = {"http": [], "grpc": []}
    with served(folder, profiles=profiles) as victim:
        for _ in range(rounds):
            for kind in kinds:
                name = "grpc" if kind in GRPC_ATTACKS else "http"
                model = "beside" if kind == SHARED_SLOT else "small"
                for count in connections:
                    victim.ask(name, 20, model)  # what the last attack left is done before
                    time.sleep(_SETTLE_S)
                    p99_s, alone = victim.ask(name, requests, model)
                    quiet[name].append(p99_s)
                    longest_turn_s(victim.turns, reset=True)
                    with victim.attacked(kind, count):
                        p99_s, beside = victim.ask(name, requests, model)
                        longest_s, _ = longest_turn_s(victim.turns)
                        if not longest_s:
                            raise AssertionError("no event loop has told its turns")
                        if profiles:
                            tell_profiles(kind, count, victim.turns)
                    row = found.setdefault((kind, count), [])
                    row.append((p99_s * 1e3, beside / alone, longest_s * 1e3))
    alone_ms = {name: statistics.median(found) * 1e3 for name, found in quiet.items() if found}
    told = ", ".join(f"{name} {value:.1f} ms" for name, value in alone_ms.items())
    title = f"honest callers of the gateways beside an attack (p99 alone: {told})"
    apart = {key: figures for key, figures in found.items() if key[0] != SHARED_SLOT}
    shared = {key: figures for key, figures in found.items() if key[0] == SHARED_SLOT}
    tables = [table_of(title, "attack", apart, connections, turn_ms=AIM_TURN_MS)] if apart else []
    if shared:
        title = "an honest caller whose model shares its only slot with the attacker's"
        tables.append(table_of(title, "attack", shared, connections, has_aims=False))
    return tables


def tell_profiles(kind: str, connections: int, turns: Path) -> None:
    """Print the functions of the longest turn of each event loop, where it was long."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for name, told in profiles_in(turns).items():
        console.print(f"{kind}, {connections} conn., {name}: {told}", markup=False)


def soak(
    folder: Path, *, seconds: float, kinds: tuple[str, ...], connections: int, each_s: float
) -> list[Report]:
    """All attacks in turn; the table has the memory of each process after the first round, and at the end."""
    amounts = {"http": int(each_s / HTTP_INTERVAL_S), "grpc": int(each_s / GRPC_INTERVAL_S)}
    answered = 0
    with served(folder) as victim:
        until_s = time.monotonic() + seconds
        after_first: dict[str, float] = {}
        rounds = 0
        while time.monotonic() < until_s or rounds < 2:
            for kind in kinds:
                with victim.attacked(kind, connections), ThreadPoolExecutor(2) as pool:
                    asked = {
                        pool.submit(victim.ask, name, requests): requests
                        for name, requests in amounts.items()
                    }
                    for call, requests in asked.items():
                        call.result()
                        answered += requests
            rounds += 1
            time.sleep(_SETTLE_S)
            if rounds == 1:
                after_first = victim.resident_mb()
        at_end = victim.resident_mb()
    if set(after_first) != set(at_end):
        raise AssertionError(f"processes were replaced: {sorted(after_first)}, {sorted(at_end)}")
    report = Report(
        title=f"{rounds} rounds of {len(kinds)} attacks; all of {answered:,} honest answers were right",
        columns=("process", "MB after one round", "MB at the end", "growth"),
    )
    for name, first in after_first.items():
        report.rows.append(
            (
                name,
                Figure(first, "MB"),
                Figure(at_end[name], "MB"),
                Figure(at_end[name] - first, "MB", at_most=MOST_GROWTH_MB),
            )
        )
    return [report]


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
    only: Annotated[list[str] | None, typer.Option("--only", help="These attacks.")] = None,
    soak_s: Annotated[float, typer.Option("--soak", help="All attacks in turn for so many seconds.")] = 0.0,
    one: Annotated[bool, typer.Option("--one", help="Attack over one connection only.")] = False,
    profiles: Annotated[
        bool,
        typer.Option("--profile", help="Tell what long turns did, and how long; turns take longer then."),
    ] = False,
    attack: Annotated[bool, typer.Option("--attack", hidden=True)] = False,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Measure honest callers of the gateways beside attacks, and the turns of event loops; checks every answer."""
    if attack:
        kind, http_port, grpc_port, ipc, token, count = words or []
        site = Site(http=int(http_port), grpc=int(grpc_port), ipc=ipc, token=token)
        ATTACKS[kind](site, int(count))
        return
    kinds = tuple(only or (SMOKE_ATTACKS if smoke else ATTACKS))
    if unknown := set(kinds) - set(ATTACKS):
        Console(stderr=True).print(
            f"no such attack: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}"
        )
        raise typer.Exit(2)
    if soak_s:
        run = partial(soak, seconds=soak_s, kinds=kinds, connections=4, each_s=1.0 if smoke else 5.0)
    else:
        run = partial(
            measure,
            requests=20 if smoke else 400,
            rounds=1 if smoke else rounds,
            kinds=kinds,
            connections=(1,) if one or smoke else CONNECTIONS,
            profiles=profiles,
        )
    print_reports(run, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
