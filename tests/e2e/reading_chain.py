"""The YAML of a chain of three functions (importable/reading.py), without the place where they run."""

from __future__ import annotations

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
          - {name: find, model: finder, in: {image: image}}
          - {name: crop, model: cropper, in: {image: image, boxes: find.boxes}}
          - {name: read, model: reader, in: {image: crop.images}, each: item of crop.images, at_most: 150}
        outputs: {boxes: find.boxes, text: read.text}
"""
PLACES = {"in process": "in_process: {slots: 2}", "workers": "workers: [{count: 2, slots: 1}]"}
