"""A run of the image's own command, inside the image, as its user. `make image` (tests/tools/image.py) puts it there.

It sees the installed distribution and no source tree. Its arguments are the Dockerfile's words: the entry point with its
default command, and the health check. It prints `image: N passed, 0 failed`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from shapestream.gateway import open_inference_pb2 as protocol

COMMAND, HEALTH = map(shlex.split, sys.argv[1:3])
USER = int(sys.argv[3])
PATIENCE_S = 300.0
TOKEN = "secret-word"
WIDTH = 64
"""Of the model `scaling`, which multiplies by 3."""


class Server:
    """The image's default command. Its log is read until the gateways are ready, and then thrown away."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True)
        self.places: dict[str, str] = {}
        """HOST:PORT by the kind of gateway."""
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.daemon = True
        timer.start()
        lines = iter(self.process.stderr or ())
        seen = []
        for line in lines:
            seen.append(line)
            event = json.loads(line) if line.startswith("{") else {"event": line}
            if event["event"] in ("http ready", "grpc ready"):
                self.places[event["event"].partition(" ")[0]] = event["address"]
            if len(self.places) == 2 and any('"workers ready"' in one for one in seen):
                break
        else:
            raise AssertionError("".join(seen))
        timer.cancel()
        threading.Thread(target=lambda: list(lines), daemon=True).start()

    def post(self, path: str, body: Any) -> Any:
        """The JSON of a good answer."""
        connection = http.client.HTTPConnection(self.places["http"], timeout=PATIENCE_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            assert 200 == answer.status, found
            return found


def runs_as_nobody(_: Server) -> None:
    """As the image's user, without a home, and with the group of its secrets beside its own."""
    assert (USER, USER) == (os.getuid(), os.getgid())
    assert "HOME" not in os.environ
    assert os.stat("secrets/tokens").st_gid in os.getgroups(), os.getgroups()
    assert (0, 0o440) == (os.stat("secrets/tokens").st_uid, os.stat("secrets/tokens").st_mode & 0o777)


def can_write(folder: str) -> bool:
    """Whether a file can be made in a folder; it is removed."""
    try:
        with open(f"{folder}/written", "x"):
            os.remove(f"{folder}/written")
    except OSError:
        return False
    return True


def writes_nowhere_else(_: Server) -> None:
    """The root file system is read-only; volumes and /tmp are not."""
    for folder in ("/", "/usr", os.path.dirname(protocol.__file__), "."):
        assert not can_write(folder), folder
    for folder in ("/tmp", "/run/shapestream", "/var/cache/shapestream"):
        assert can_write(folder), folder


def checks(_: Server) -> None:
    """`check` compiles and proves both models."""
    done = subprocess.run([COMMAND[0], "check", COMMAND[-1]], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


def answers_over_http(server: Server) -> None:
    """The Open Inference Protocol's /v2."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [1.0] * WIDTH}
    answer = server.post("/v2/models/scaling/infer", {"inputs": [entry]})
    assert [3.0] * WIDTH == answer["outputs"][0]["data"]


def answers_over_grpc(server: Server) -> None:
    """The same model, with raw contents."""
    entry = protocol.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, WIDTH])
    request = protocol.ModelInferRequest(
        model_name="scaling", inputs=[entry], raw_input_contents=[np.ones(WIDTH, np.float32).tobytes()]
    )
    with grpc.insecure_channel(server.places["grpc"]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        metadata = [("authorization", f"Bearer {TOKEN}")]
        answer = protocol.ModelInferResponse.FromString(
            call(request.SerializeToString(), metadata=metadata, timeout=PATIENCE_S, wait_for_ready=True)
        )
    assert [3.0] * WIDTH == np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()


def answers_texts(server: Server) -> None:
    """OpenAI's /v1/embeddings, by the folder of a sentence-transformer."""
    answer = server.post("/v1/embeddings", {"model": "sentences", "input": ["the cat", "a dog"]})
    vectors = [each["embedding"] for each in answer["data"]]
    assert 2 == len(vectors)
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors), vectors


def is_healthy(_: Server) -> None:
    """The image's health check, as it stands."""
    done = subprocess.run(HEALTH, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


def ends_by_sigterm(server: Server) -> None:
    """With status 0."""
    server.process.terminate()
    assert 0 == server.process.wait(PATIENCE_S)


CHECKS: list[Callable[[Server], None]] = [
    runs_as_nobody,
    writes_nowhere_else,
    checks,
    answers_over_http,
    answers_over_grpc,
    answers_texts,
    is_healthy,
    ends_by_sigterm,
]


def main() -> int:
    """Runs every check on one server."""
    failures = []
    server = Server()
    for check in CHECKS:
        try:
            check(server)
        except Exception as error:  # noqa: BLE001 - every failure is reported, and decides the exit code
            failures.append({"check": check.__name__, "error": repr(error)})
    server.process.kill()
    for failure in failures:
        print(json.dumps(failure))
    print(f"image: {len(CHECKS) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
