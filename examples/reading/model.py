"""The recogniser in OpenVINO: `crop [batch, 1, height, width]` in, `edges [batch, 4]` out, for crops of any size.

Four kernels answer to edges that run across, up the slope, upright and down it. Their mean strength over a crop says which
way what is in it runs.

    python -m examples.reading.model OUT.xml     writes the model that configs/reading.yaml serves
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as op

from examples.model_file import write

DIRECTIONS = ("across", "rising", "upright", "falling")
# Prewitt's kernels (1970): the difference of three pixels on either side of a line in each direction.
KERNELS = np.array(
    [
        [[-1, -1, -1], [0, 0, 0], [1, 1, 1]],
        [[-1, -1, 0], [-1, 0, 1], [0, 1, 1]],
        [[-1, 0, 1], [-1, 0, 1], [-1, 0, 1]],
        [[0, 1, 1], [-1, 0, 1], [-1, -1, 0]],
    ],
    np.float32,
)[:, None]


def build() -> ov.Model:
    """The model: u8 crops in, f32 strengths in grey levels out."""
    crop = op.parameter([-1, 1, -1, -1], np.uint8, name="crop")
    crop.output(0).set_names({"crop"})
    answers = op.convolution(op.convert(crop, "f32"), op.constant(KERNELS), [1, 1], [1, 1], [1, 1], [1, 1])
    edges = op.reduce_mean(op.abs(answers), op.constant(np.array([2, 3])))
    edges.output(0).set_names({"edges"})
    return ov.Model([op.result(edges)], [crop], "recogniser")


if __name__ == "__main__":
    write(build(), Path(sys.argv[1]))
