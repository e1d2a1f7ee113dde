"""The same stages in one process, by plain OpenVINO: the answers that the chain must give, and what it is measured by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from examples.ocr import models, stages

Cut = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The boxes and texts that were read on a page."""

    boxes: npt.NDArray[np.int32]
    """[lines, 4, 2]: corners clockwise from the top left, x before y, in pixels."""
    turned: npt.NDArray[np.float32]
    """[lines, 2]: the probabilities of 0 and of 180 degrees."""
    labels: Sequence[npt.NDArray[np.int32]]
    likely: Sequence[npt.NDArray[np.float32]]
    texts: Sequence[str]
    scores: npt.NDArray[np.float32]


class Plain:
    """The three models in this process, with so many threads a call."""

    def __init__(self, threads: int) -> None:
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
        core = ov.Core()
        self._detector, self._classifier, self._recogniser = (
            core.compile_model(path, "CPU", properties).create_infer_request()
            for path in (models.DETECTOR, models.CLASSIFIER, models.RECOGNISER)
        )

    def read(self, image: npt.NDArray[np.uint8], cut: Cut = stages.cut_lines) -> Reading:
        """Read a page, one line of text at a time."""
        boxes, turned, lines = self.lines(image, cut)
        results = [self.recognise(line[None]) for line in lines]
        texts = [stages.decode(label[0], likely[0]) for label, likely in results]
        return Reading(
            boxes=boxes,
            turned=turned,
            labels=[label[0] for label, _ in results],
            likely=[likely[0] for _, likely in results],
            texts=[str(each["text"]) for each in texts],
            scores=np.array([each["score"] for each in texts], np.float32),
        )

    def lines(
        self, image: npt.NDArray[np.uint8], cut: Cut = stages.cut_lines
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], list[npt.NDArray[np.float32]]]:
        """Find the boxes of a page, whether they are upside down, and its lines for the recogniser."""
        found = stages.find_boxes(image, self.detect(stages.prepare(image)["picture"]))
        boxes = found["boxes"]
        turned = np.empty((0, 2), np.float32)
        if len(boxes):
            turned = np.concatenate([self._first(self._classifier, face[None]) for face in found["faces"]])
        return boxes, turned, cut(image, boxes, turned)["lines"]

    def detect(self, picture: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The probability of text at each pixel of a prepared page."""
        return self._first(self._detector, picture)

    def recognise(
        self, lines: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Label and probability of each step of lines of one width."""
        results = self._recogniser.infer({0: lines})
        return results["label"].copy(), results["likely"].copy()

    @staticmethod
    def _first(request: Any, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        result: npt.NDArray[np.float32] = request.infer({0: values})[0].copy()
        return result
