"""Whether two requests are the same, by their bytes while those are here, and by a checksum later."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.serving.fingerprint import BLOCK_NBYTES, BLOCKS, WHOLE_NBYTES, checksum, same_tensors
from shapestream_engine.layout import Tensors


def tensors(*buffers: bytes) -> Tensors:
    """Tensors of these bytes."""
    return Tensors(
        layout=tuple((number, "u8", (len(buffer),)) for number, buffer in enumerate(buffers)), buffers=buffers
    )


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_small_tensors_are_summed_whole(buffers: list[bytes]) -> None:
    """The checksum is CRC-32 of all bytes, in their order."""
    assert crc32(b"".join(buffers)) == checksum(tensors(*buffers))


@pytest.mark.parametrize("at", [0, 1, WHOLE_NBYTES - 1])
def test_each_byte_of_a_tensor_up_to_the_limit_counts(at: int) -> None:
    """The first and the last, and those between."""
    data = bytearray(WHOLE_NBYTES)
    before = checksum(tensors(bytes(data)))
    data[at] = 1
    assert before != checksum(tensors(bytes(data)))


@pytest.mark.parametrize("nbytes", [WHOLE_NBYTES + 1, 1_000_003])
def test_of_a_larger_tensor_evenly_spaced_blocks_count(nbytes: int) -> None:
    """Its first and last bytes do, and as many bytes in all as of a small one; what lies between them does not."""
    whole = np.zeros(nbytes, np.uint8)
    before = checksum(tensors(whole.tobytes()))
    counted = []
    for at in range(0, nbytes, 997):
        whole[at] = 1
        counted.append(before != checksum(tensors(whole.tobytes())))
        whole[at] = 0
    share = BLOCKS * BLOCK_NBYTES / nbytes
    assert counted[0]
    assert sum(counted) == pytest.approx(share * len(counted), rel=0.1)
    whole[-1] = 1
    assert before != checksum(tensors(whole.tobytes()))


def test_arrays_of_any_kind_are_bytes() -> None:
    """In-memory peers hand over arrays; their bytes count, large or small, also without elements."""
    for shape in [(3, 4), (300, 400), (0, 4), ()]:
        array = np.ones(shape, np.float32)
        one = Tensors(layout=((0, "f32", shape),), buffers=(array,))
        other = Tensors(layout=((0, "f32", shape),), buffers=(array.tobytes(),))
        assert checksum(one) == checksum(other)
        assert same_tensors(one, other)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_tensors_are_the_same_when_layout_and_bytes_are(one: bytes, other: bytes) -> None:
    """Against the plain comparison."""
    assert (one == other) == same_tensors(tensors(one), tensors(other))


@pytest.mark.parametrize("at", [0, 70_000, 199_999])
def test_every_byte_of_a_large_tensor_is_compared(at: int) -> None:
    """Unlike the checksum, which may miss one."""
    data = bytearray(200_000)
    one = tensors(bytes(data))
    data[at] = 1
    assert not same_tensors(one, tensors(bytes(data)))
    data[at] = 0
    assert same_tensors(one, tensors(bytes(data)))
