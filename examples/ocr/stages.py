"""The functions between the three models of rapidocr-onnxruntime, in the order in which a page passes them.

Each decides as the package does with its own settings (config.yaml of 1.4.4), so that boxes and texts can be compared.
Pages have sides of 32 to 2000 pixels and are at most 8 times as wide as high: others the package scales or pads first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pyclipper

from examples.ocr.models import CHARACTERS

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SHORT_SIDE = 736  # pixels: smaller pages are enlarged for the detector
LIKELY, BOX_LIKELY = 0.3, 0.5  # of a pixel, and of the mean over a box
GROWTH = 1.6  # a box grows by this times its area / its circumference
LINE_HEIGHT = 48  # pixels, of the classifier's and the recogniser's inputs
FACE_WIDTH = 192  # pixels that the classifier sees of a line
TURNED = 0.9  # from this probability on, a line is turned by 180 degrees
WIDTH_STEP = 8  # pixels per step of the recogniser's output
GROUP, GROUP_WIDTH = 6, 320  # the package's groups of lines, and the least width of each


def prepare(image: Pixels) -> dict[str, Any]:
    """The detector's input: sides of multiples of 32, values of -1 to 1."""
    scale = max(1.0, SHORT_SIDE / min(image.shape[:2]))
    height, width = (32 * round(int(side * scale) / 32) for side in image.shape[:2])
    return {"picture": _values(cv2.resize(image, (width, height)))[None]}


def find_boxes(image: Pixels, likely: Floats) -> dict[str, Any]:
    """Corners of each line of text, clockwise from the top left, and its beginning for the classifier."""
    mask = cv2.dilate((likely[0, 0] > LIKELY).astype(np.uint8), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(255 * mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    scale = np.array(image.shape[1::-1]) / likely.shape[:1:-1]
    found = []
    for box in _grown_boxes(contours[:1000], likely[0, 0]):
        corners = np.clip(np.round(box * scale).astype(np.int32), 0, np.array(image.shape[1::-1]) - 1)
        left, right = np.split(corners[np.argsort(corners[:, 0], kind="stable")], 2)
        (top_left, bottom_left), (top_right, bottom_right) = (
            side[np.argsort(side[:, 1], kind="stable")] for side in (left, right)
        )
        if min(np.linalg.norm(top_left - top_right), np.linalg.norm(top_left - bottom_left)) >= 4:
            found.append((top_left, top_right, bottom_right, bottom_left))
    boxes = np.array(sorted(found, key=lambda box: (box[0][1], box[0][0])), np.int32).reshape(-1, 4, 2)
    faces = [_line(crop, min(FACE_WIDTH, _width(crop)), FACE_WIDTH) for crop in _crops(image, boxes)]
    return {"boxes": boxes, "faces": np.array(faces, np.float32).reshape(-1, 3, LINE_HEIGHT, FACE_WIDTH)}


def cut_lines(image: Pixels, boxes: npt.NDArray[np.int32], turned: Floats) -> dict[str, Any]:
    """Each line upright, as wide as it is, to the next step of the recogniser."""
    crops = _upright(image, boxes, turned)
    widths = [WIDTH_STEP * max(1, round(_width(crop) / WIDTH_STEP)) for crop in crops]
    return {"lines": [_line(crop, width, width) for crop, width in zip(crops, widths, strict=True)]}


def cut_padded_lines(image: Pixels, boxes: npt.NDArray[np.int32], turned: Floats) -> dict[str, Any]:
    """Each line upright, filled up as the package does: to the widest of its six neighbours by width, at least 320."""
    crops = _upright(image, boxes, turned)
    ratios = np.array([crop.shape[1] / crop.shape[0] for crop in crops])
    lines = dict[int, Floats]()
    order = np.argsort(ratios)
    for group in (order[first : first + GROUP] for first in range(0, len(order), GROUP)):
        width = int(LINE_HEIGHT * max(GROUP_WIDTH / LINE_HEIGHT, ratios[group].max()))
        lines |= {each: _line(crops[each], min(width, _width(crops[each])), width) for each in group}
    return {"lines": [lines[each] for each in range(len(crops))]}


def decode(label: npt.NDArray[np.int32], likely: Floats) -> dict[str, Any]:
    """The text of a line, by CTC: repeated labels count once, label 0 is none; and the mean of its probabilities."""
    kept = (label != 0) & (label != np.concatenate([[0], label[:-1]]))
    text = "".join(_characters()[number] for number in label[kept])
    return {"text": np.array(text, object), "score": np.array(likely[kept].mean() if text else 0, np.float32)}


def _grown_boxes(contours: Sequence[Any], likely: Floats) -> Iterator[Floats]:
    """The rectangle around each contour that is likely enough, grown: the detector was taught shrunken ones."""
    for contour in contours:
        inner = cv2.minAreaRect(contour)
        corners = cv2.boxPoints(inner)
        if min(inner[1]) < 3 or _mean_within(likely, corners) < BOX_LIKELY:
            continue
        growth = GROWTH * cv2.contourArea(corners) / cv2.arcLength(corners, True)
        offset = pyclipper.PyclipperOffset()
        offset.AddPath(corners, pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
        outer = cv2.minAreaRect(np.array(offset.Execute(growth)[0], np.int32))
        if min(outer[1]) >= 5:
            yield cv2.boxPoints(outer)


def _mean_within(likely: Floats, corners: Floats) -> float:
    limit = np.array(likely.shape[::-1]) - 1
    low = np.clip(np.floor(corners.min(0)).astype(np.int32), 0, limit)
    high = np.clip(np.ceil(corners.max(0)).astype(np.int32), 0, limit) + 1
    inside = np.zeros(tuple((high - low)[::-1]), np.uint8)
    cv2.fillPoly(inside, [(corners - low).astype(np.int32)], 1)
    return float(cv2.mean(likely[low[1] : high[1], low[0] : high[0]], inside)[0])


def _crops(image: Pixels, boxes: npt.NDArray[np.int32]) -> Iterator[Pixels]:
    """Each box as an upright rectangle; one that is much higher than wide is laid on its side."""
    for corners in boxes.astype(np.float32):
        top, right, bottom, left = (np.linalg.norm(corners[side] - corners[side - 3]) for side in range(4))
        width, height = int(max(top, bottom)), int(max(left, right))
        target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        way = cv2.getPerspectiveTransform(corners, target)
        crop = cv2.warpPerspective(
            image, way, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
        )
        yield np.rot90(crop) if height >= 1.5 * width else crop


def _upright(image: Pixels, boxes: npt.NDArray[np.int32], turned: Floats) -> list[Pixels]:
    """The crops, those that are upside down turned around."""
    pairs = zip(_crops(image, boxes), turned[:, 1] > TURNED, strict=True)
    return [crop[::-1, ::-1] if upside_down else crop for crop, upside_down in pairs]


def _width(crop: Pixels) -> int:
    """The columns of a crop that is as high as a line."""
    height, width = crop.shape[:2]
    columns: int = math.ceil(LINE_HEIGHT * (width / height))
    return columns


def _line(crop: Pixels, width: int, room: int) -> Floats:
    """The crop as `width` columns of a line of `room`; what is left of it is grey."""
    line = np.zeros((3, LINE_HEIGHT, room), np.float32)
    line[:, :, :width] = _values(cv2.resize(crop, (width, LINE_HEIGHT)))
    return line


def _values(pixels: Pixels) -> Floats:
    values: Floats = (pixels.astype(np.float32).transpose(2, 0, 1) / np.float32(255) - 0.5) / 0.5
    return values


@cache
def _characters() -> list[str]:
    return CHARACTERS.read_text(encoding="utf-8").split("\n")
