"""A mosec server of one OpenVINO file, or of an identity, for `peer.py`.

It runs in the peer's own environment, so it imports nothing of ours. Its environment variables say what to serve. A
request's body is that of `peer.py`: the tensor as raw bytes. An answer is the bytes of the first output's row. A worker
that is ready leaves a file in the folder PEER_READY.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from mosec import Server, Worker
from numpy.typing import NDArray

SIZE = struct.Struct("<II")
"""Height and width, before the pixels of a picture."""
WAIT_MS = 1
"""For more requests than are queued, before a batch that is not full: the least that mosec takes."""


class Rows(Worker):  # type: ignore[misc]  # where types are checked, there is no mosec
    """Rows of float32, each alone, which come back as they are: no model."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        Path(os.environ["PEER_READY"], str(os.getpid())).touch()

    def serialize(self, data: NDArray[Any]) -> bytes:
        """The bytes of a row."""
        return data.tobytes()

    def deserialize(self, data: bytes) -> NDArray[Any]:
        """A row [1, width]."""
        return np.frombuffer(data, np.float32)[None]

    def forward(self, data: Any) -> Any:
        """The row."""
        return data


class _Model(Rows):
    """The model on one thread; a process of the server has one."""

    def __init__(self) -> None:
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": 1,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "f32",
            # Pinned, two processes of one thread each would share a core.
            "ENABLE_CPU_PINNING": False,
        }
        compiled = ov.Core().compile_model(os.environ["PEER_MODEL"], "CPU", properties)
        self._request = compiled.create_infer_request()
        super().__init__()

    def _infer(self, *inputs: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = self._request.infer(list(inputs), share_inputs=True, share_outputs=True)[0]
        return found


class Pictures(_Model):
    """Pictures [channels, height, width], alone or padded with zeros to the largest of a batch."""

    def deserialize(self, data: bytes) -> NDArray[np.float32]:
        """The picture behind its height and width."""
        return np.frombuffer(data, np.float32, offset=SIZE.size).reshape(-1, *SIZE.unpack_from(data))

    def forward(self, data: Any) -> Any:
        """A row for the picture, or one for each of a list."""
        if self.max_batch_size == 1:
            return self._infer(data[None])[0]
        height, width = (max(picture.shape[axis] for picture in data) for axis in (1, 2))
        batch = np.zeros((len(data), len(data[0]), height, width), np.float32)
        for row, picture in zip(batch, data, strict=True):
            row[:, : picture.shape[1], : picture.shape[2]] = picture
        return list(self._infer(batch))


class Sentences(_Model):
    """Sentences as token ids, each alone."""

    def deserialize(self, data: bytes) -> NDArray[np.int64]:
        """Token ids [1, seq]."""
        return np.frombuffer(data, np.int64)[None]

    def forward(self, data: NDArray[np.int64]) -> NDArray[np.float32]:
        """The embedding."""
        row: NDArray[np.float32] = self._infer(data, np.ones_like(data))[0]
        return row


KINDS = {"pictures": Pictures, "rows": Rows, "sentences": Sentences}


def main() -> None:
    """Serve until ended."""
    server = Server()
    server.append_worker(
        KINDS[os.environ["PEER_KIND"]],
        num=int(os.environ["PEER_WORKERS"]),
        max_batch_size=int(os.environ["PEER_ROWS"]),
        max_wait_time=WAIT_MS,
    )
    server.run()


if __name__ == "__main__":
    main()
