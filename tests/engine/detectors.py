"""Detectors as OpenVINO graphs, under any names, and what NumPy says of their answers: for tests of output rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

PORTS = ("image", "selected", "confidence", "total", "boxes", "scores", "anchors", "found", "count")
"""What may be named: all ports of all detectors."""

IOU, SCORE = np.float32(0.4), np.float32(0.55)
CLASSES = 2
STRIDE = 4
ROOM = 6
"""Detections that a padded table has room for."""


def pictures(random: np.random.Generator, rows: int, height: int, width: int) -> Array:
    """Noise, on which the detectors find a few things each; every fourth picture is black."""
    images = random.normal(size=(rows, 1, height, width)).astype(np.float32)
    images[random.random(rows) < 0.25] = 0
    return images


def ssd(names: Mapping[str, str]) -> ov.Model:
    """A single-shot detector: convolutions, anchors, and NonMaxSuppression sorted by score across the batch.

    `[batch, 1, height, width]` -> `boxes` and `scores` of all anchors, the `anchors`, and the three outputs of the
    operator: `selected` and `confidence`, both with the batch index in column 0, and `total` over the batch.
    """
    image = _image(names)
    boxes, scores, anchors = _heads(image)
    nms = op.non_max_suppression(
        boxes,
        scores,
        op.constant(np.int64(100)),
        op.constant(IOU),
        op.constant(SCORE),
        sort_result_descending=True,
        output_type="i32",
    )
    outputs = {
        "selected": nms.output(0),
        "confidence": nms.output(1),
        "total": nms.output(2),
        "boxes": boxes.output(0),
        "scores": scores.output(0),
        "anchors": anchors.output(0),
    }
    return _model(image, outputs, names)


def multiclass(names: Mapping[str, str]) -> ov.Model:
    """The same heads with MulticlassNms: `found` of all pictures one after the other, and `count` per picture."""
    image = _image(names)
    boxes, scores, _ = _heads(image)
    nms = op.multiclass_nms(
        boxes,
        scores,
        sort_result_type="score",
        output_type="i32",
        iou_threshold=float(IOU),
        score_threshold=float(SCORE),
    )
    return _model(image, {"found": nms.output(0), "count": nms.output(2)}, names)


def padded(names: Mapping[str, str]) -> ov.Model:
    """No suppression: the best `ROOM` anchors of the first class in tables, and `count`, how many are good enough."""
    image = _image(names)
    boxes, scores, _ = _heads(image)
    first = op.squeeze(_sliced(scores, 1, 0, 1), op.constant(np.array([1])))
    best = op.topk(first, op.constant(np.int64(ROOM)), 1, "max", "value", index_element_type="i64")
    good = op.convert(op.greater(best.output(0), op.constant(SCORE)), "i32")
    outputs = {
        "boxes": op.gather(boxes, best.output(1), op.constant(np.int64(1)), batch_dims=1).output(0),
        "scores": best.output(0),
        "count": op.reduce_sum(good, op.constant(np.array([1]))).output(0),
    }
    return _model(image, outputs, names)


def selection_by_hand(boxes: Array, scores: Array) -> list[tuple[int, int, int, float]]:
    """Row, class, box and score of what stays, best first: greedy suppression per row and class, one box at a time."""
    kept: list[tuple[int, int, int, float]] = []
    for row, kind in np.ndindex(scores.shape[:2]):
        own: list[int] = []
        for box in np.argsort(-scores[row, kind], kind="stable"):
            good = scores[row, kind, box] > SCORE
            if good and all(_iou(boxes[row, box], boxes[row, other]) <= IOU for other in own):
                own.append(int(box))
        kept += [(row, kind, box, float(scores[row, kind, box])) for box in own]
    return sorted(kept, key=lambda found: -found[3])


def _iou(a: Array, b: Array) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    shared = float(np.prod(np.clip(high - low, 0, None)))
    return shared / float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - shared)


def _image(names: Mapping[str, str]) -> Any:
    image = op.parameter([-1, 1, -1, -1], np.float32)
    image.output(0).get_tensor().set_names({names["image"]})
    return image


def _model(image: Any, outputs: Mapping[str, Any], names: Mapping[str, str]) -> ov.Model:
    for name, output in outputs.items():
        output.get_tensor().set_names({names[name]})
    return ov.Model([op.result(output) for output in outputs.values()], [image])


def _heads(image: Any) -> tuple[Any, Any, Any]:
    """Boxes `[batch, anchors, 4]`, scores `[batch, classes, anchors]`, and the anchors `[anchors, 4]` themselves."""
    random = np.random.default_rng(5)
    features = op.relu(_convolution(image, random.normal(size=(8, 1, STRIDE, STRIDE)) / 2, STRIDE))
    moves = op.tanh(_convolution(features, random.normal(size=(4, 8, 1, 1)) / 3, 1))
    logits = _convolution(features, random.normal(size=(CLASSES, 8, 1, 1)) / 2, 1)
    flat = op.constant(np.array([0, 0, -1]))
    scores = op.sigmoid(op.reshape(logits, flat, True))
    anchors = _anchors(op.shape_of(features))
    per_anchor = op.transpose(op.reshape(moves, flat, True), op.constant(np.array([0, 2, 1])))
    return op.add(anchors, op.multiply(per_anchor, op.constant(np.float32(0.4)))), scores, anchors


def _convolution(data: Any, weights: Array, stride: int) -> Any:
    return op.convolution(
        data, op.constant(weights.astype(np.float32)), [stride, stride], [0, 0], [0, 0], [1, 1]
    )


def _anchors(shape: Any) -> Any:
    """A box of 2 x 2 around each place of the feature map: they depend on the size of the picture alone."""
    zero, one = op.constant(np.int64(0)), op.constant(np.int64(1))
    height, width = (op.gather(shape, op.constant(np.int64(axis)), zero) for axis in (2, 3))
    places = op.range(zero, op.multiply(height, width), one, "i64")
    y, x = op.divide(places, width), op.mod(places, width)
    corners = [op.unsqueeze(op.convert(each, "f32"), one) for each in (y, x)]
    low = op.concat(corners, 1)
    return op.concat([low, op.add(low, op.constant(np.float32(2)))], 1)


def _sliced(data: Any, axis: int, start: int, stop: int) -> Any:
    first, last, step, along = (op.constant(np.array([value])) for value in (start, stop, 1, axis))
    return op.slice(data, first, last, step, along)
