"""The detector in OpenVINO: `image [batch, 1, height, width]` in, `peaks [n, 4]` and `scores [n]` out.

n depends on the content. A row of `peaks` is (batch index, channel, y, x); the channel says how large the
blob is.

    python -m examples.detector.model OUT.xml     writes the model that configs/demo.yaml serves
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as op

from examples.detector.kernels import CHANNELS, RADIUS, RESPONSE_SCALE, THRESHOLD, WINDOW, gaussian_kernels
from examples.model_file import write


def build() -> ov.Model:
    """The model: u8 image in, i32 peaks and f32 scores (contrast in grey levels) out.

    Scores are exact: integers times 2^-16.
    """
    image = op.parameter([-1, 1, -1, -1], np.uint8, name="image")
    image.output(0).set_names({"image"})

    blurred = _blur(op.convert(image, "f32"))
    narrow = op.slice(blurred, [0], [CHANNELS], [1], [1])
    wide = op.slice(blurred, [1], [CHANNELS + 1], [1], [1])
    response = op.subtract(narrow, wide)

    strongest = op.reduce_max(response, [1], keep_dims=True)
    neighbourhood = op.max_pool(
        strongest,
        [1, 1],
        [1, 1],
        [0, 0],
        [0, 0],
        [WINDOW, WINDOW],
        rounding_type="floor",
        auto_pad="same_upper",
    ).output(0)
    is_peak = op.logical_and(
        op.equal(response, neighbourhood), op.greater(response, np.float32(THRESHOLD * RESPONSE_SCALE))
    )

    peaks = op.transpose(op.non_zero(is_peak, "i32"), [1, 0])
    scores = op.multiply(op.gather_nd(response, peaks), np.float32(1 / RESPONSE_SCALE))
    peaks.output(0).set_names({"peaks"})
    scores.output(0).set_names({"scores"})
    return ov.Model([op.result(peaks), op.result(scores)], [image], "detector")


def _blur(image: ov.Node) -> ov.Node:
    """All Gaussians at once, [batch, 1, h, w] -> [batch, 5, h, w]; the border pixels repeat outwards.

    The rows come first: the other way round, the second pass would be a depthwise convolution with a wide
    kernel, which never returns on OpenVINO 2026.4 when it runs in bfloat16.
    """
    kernels = gaussian_kernels().astype(np.float32)
    count, taps = kernels.shape
    margin = [0, 0, RADIUS, RADIUS]
    padded = op.pad(image, margin, margin, "edge")
    along_x = op.convolution(padded, kernels.reshape(count, 1, 1, taps), [1, 1], [0, 0], [0, 0], [1, 1])
    return op.group_convolution(
        along_x, kernels.reshape(count, 1, 1, taps, 1), [1, 1], [0, 0], [0, 0], [1, 1]
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case [out]:
            write(build(), Path(out))
        case _:
            sys.exit(__doc__)
