"""The detector's model against the NumPy reference, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from examples.detector import kernels, model, reference

from shapestream_engine.backends.openvino.runtime import core

Detect = Callable[[npt.NDArray[np.uint8]], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@pytest.fixture(scope="module")
def detect() -> Detect:
    """The model, run directly."""
    compiled = core().compile_model(model.build(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(image: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        result = compiled([image])
        return result["peaks"].copy(), result["scores"].copy()

    return run


def noise(*shape: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Noise with bright and dark squares of several sizes, up to the ends of the range of pixels."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 60, shape, dtype=np.uint8)
    for row in image:
        for half, grey in ((24, 120), (12, 0), (10, 255), (3, 255)):
            y, x = rng.integers(0, shape[2]), rng.integers(0, shape[3])
            row[0, max(y - half, 0) : y + half, max(x - half, 0) : x + half] = grey
    return image


@pytest.mark.parametrize(
    "shape", [(1, 1, 16, 16), (1, 1, 33, 190), (1, 1, 200, 17), (3, 1, 96, 64), (1, 1, 16, 700)], ids=str
)
def test_equals_the_reference(detect: Detect, shape: tuple[int, ...]) -> None:
    """Peaks and scores are those of the integer reference, also where a picture is smaller than the kernels."""
    image = noise(*shape)
    expected_peaks, expected_scores = reference.detect(image)
    peaks, scores = detect(image)
    assert len(expected_peaks) > 0
    assert np.array_equal(expected_peaks, peaks)
    assert expected_scores.tobytes() == scores.tobytes()


def test_rows_do_not_depend_on_their_batch(detect: Detect) -> None:
    """A picture's detections are the same alone and between pictures that differ from it entirely."""
    image = np.concatenate(
        [noise(1, 1, 70, 90), np.full((1, 1, 70, 90), 255, np.uint8), noise(1, 1, 70, 90, seed=1)]
    )
    peaks, scores = detect(image)
    for row in range(3):
        alone_peaks, alone_scores = detect(image[row : row + 1])
        mine = peaks[:, 0] == row
        assert np.array_equal(alone_peaks[:, 1:], peaks[mine][:, 1:])
        assert alone_scores.tobytes() == scores[mine].tobytes()


@pytest.mark.parametrize("grey", [0, 128, 255])
def test_nothing_is_found_where_nothing_is(detect: Detect, grey: int) -> None:
    """An even picture gives peaks [0, 4] and scores [0], at the borders too."""
    peaks, scores = detect(np.full((2, 1, 60, 50), grey, np.uint8))
    assert (0, 4) == peaks.shape
    assert (0,) == scores.shape


@pytest.mark.parametrize("channel", range(kernels.CHANNELS))
def test_finds_a_disc_at_its_centre_and_size(detect: Detect, channel: int) -> None:
    """A bright disc of a channel's radius is one detection, in that channel, in its middle."""
    y, x = np.mgrid[:161, :181]
    disc = (y - 80) ** 2 + (x - 90) ** 2 <= kernels.blob_radius(channel) ** 2
    peaks, scores = detect(np.where(disc, 220, 30).astype(np.uint8)[None, None])
    assert [[0, channel, 80, 90]] == peaks.tolist()
    assert kernels.THRESHOLD < scores[0] < 190


def test_element_types_and_names() -> None:
    """The ports are those that configs/demo.yaml names, with u8, i32 and f32."""
    built = model.build()
    ports = [(port.any_name, port.element_type.get_type_name()) for port in (*built.inputs, *built.outputs)]
    assert [("image", "u8"), ("peaks", "i32"), ("scores", "f32")] == ports


def test_kernels_are_exact() -> None:
    """Each kernel is symmetric, not negative, rises to its middle, and sums so that no sum reaches 2^24."""
    for kernel in kernels.gaussian_kernels():
        assert 2 * kernels.RADIUS + 1 == len(kernel)
        assert kernels.KERNEL_SUM == kernel.sum()
        assert np.array_equal(kernel, kernel[::-1])
        assert kernel.min() >= 0
    assert 255 * kernels.RESPONSE_SCALE < 2**24
