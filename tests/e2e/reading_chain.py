"""A chain of three functions (importable/reading.py): its YAML, without the place where they run, and what it answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "importable"))
import reading

MODELS = """\
    server: {listen: [ipc://s.sock], http: "127.0.0.1:0"}
    models:
      - name: finder
        function: reading:find
        inputs: {image: {shape: "height:8..64, width:8..64, 3", element_type: u8}}
        outputs: {boxes: {shape: "?, 4", element_type: i64}}
        batching: {max_batch: 1}
        calibration_s: 0
      - name: cropper
        function: reading:crop
        inputs:
          image: {shape: "height:8..64, width:8..64, 3", element_type: u8}
          boxes: {shape: "boxes, 4", element_type: i64}
        outputs: {images: {rule: list, shape: "height, width, 3", element_type: u8}}
        batching: {max_batch: 1}
        calibration_s: 0
      - name: reader
        function: reading:read
        inputs: {image: {shape: "batch:1..16, height:1..64, width:1..64, 3", element_type: u8}}
        outputs: {text: {shape: "batch, 2", element_type: f32}}
        probe: {image: {integers: [0, 200]}}
        calibration_s: 0
    chains:
      - name: reading
        inputs: {image: find.image}
        stages:
          - {name: find, model: finder, inputs: {image: image}}
          - {name: crop, model: cropper, inputs: {image: image, boxes: find.boxes}}
          - {name: read, model: reader, inputs: {image: crop.images}, each: item of crop.images, at_most: 150}
        outputs: {boxes: find.boxes, text: read.text}
"""
PLACES = {"in process": "in_process: {slots: 2}", "workers": "workers: [{count: 2, slots: 1}]"}
Array = np.ndarray[Any, Any]


def picture(seed: int, boxes: int) -> Array:
    """A picture in which so many boxes are found. No channel of it is `BAD`."""
    random = np.random.default_rng(seed)
    size = random.integers(8, 65, 2)
    image = random.integers(0, 200, (*size, 3)).astype(np.uint8)
    image[0, 0, 0] = boxes
    return image


def expected(image: Array) -> tuple[Array, Array]:
    """The boxes and the texts, each stage run alone, one crop after the other."""
    boxes = reading.find(image)
    crops = reading.crop(image, boxes)["images"]
    return boxes, np.array([reading.read(crop[None])[0] for crop in crops], np.float32).reshape(len(crops), 2)
