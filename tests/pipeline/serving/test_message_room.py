"""Batches of models with many or large tensors fit one message to a worker and back, however they are made up."""

from __future__ import annotations

import pytest
import structlog
from tests.entries import BatchDone, Entry, Execute, Role
from tests.pipeline.serving.echo_model import model_settings

from shapestream.serving.model_profiles import DEFAULT_BATCH_BYTES, most_rows
from shapestream.serving.served_models import ServedModel
from shapestream.wire.codec import decode, pack_messages
from shapestream.wire.limits import MAX_INLINE_BYTES, MAX_INTEGER, MAX_RANK, WORKER_LIMITS, Limits
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SMALL = Limits(max_frames=600, max_header_bytes=512 * 1024, max_members=150)
"""The same in small, so that a test need not build what a worker would have to carry."""
UNBOUND = Limits(max_frames=10**9, max_header_bytes=10**9, max_members=10**9)


def model(inputs: int, outputs: int, rank: int = 2) -> ModelSignature:
    """So many tensors, each with a batch axis and so many axes in all."""
    shape = NamedShape.parse(", ".join(["batch:1..1000000", "?", *["1"] * (rank - 2)]))
    return ModelSignature(
        name="many",
        inputs=tuple(InputPort(f"x{number}", "u8", shape) for number in range(inputs)),
        outputs=tuple(OutputPort(f"y{number}", "u8", shape, Rows()) for number in range(outputs)),
    )


def tensors(ports: int, nbytes: int, rank: int) -> Tensors:
    """One row of so many bytes per tensor."""
    layout = tuple((port, "u8", (1, nbytes, *[1] * (rank - 2))) for port in range(ports))
    return Tensors(layout=layout, buffers=[bytes(nbytes)] * ports)


def entries(rows: int, inputs: int, outputs: int, nbytes: int, rank: int) -> list[tuple[Role, Entry]]:
    """A batch of so many requests, and its answer, with the largest numbers that may stand beside the tensors."""
    execute = Execute(
        batch=MAX_INTEGER,
        session=MAX_INTEGER,
        slot=1023,
        sent_us=MAX_INTEGER,
        model="m" * 512,
        sizes=(MAX_INTEGER,) * 64,
        members=(tensors(inputs, nbytes, rank),) * rows,
        start_before=(MAX_INTEGER / 1e6,) * rows,
    )
    report = BatchReport(
        batch=MAX_INTEGER,
        gather_s=1e12,
        run_s=1e12,
        busy_s=1e12,
        reallocations=MAX_INTEGER,
        preparations=MAX_INTEGER,
        calls=((MAX_INTEGER, (MAX_INTEGER,) * 64),) * 64,
        outputs=(tensors(outputs, nbytes, rank),) * rows,
    )
    done = BatchDone(session=MAX_INTEGER, report=report)
    return [(Role.WORKER, execute), (Role.SERVER_OF_WORKERS, done)]


@pytest.mark.parametrize(
    "nbytes", [1, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1], ids=["tiny", "inline", "framed"]
)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [(1, 1, 2), (64, 1, 2), (1, 64, 2), (64, 64, 2), (8, 3, MAX_RANK)],
)
def test_the_largest_batch_fits_one_message(inputs: int, outputs: int, rank: int, nbytes: int) -> None:
    """Also when every row is a request of its own, with tensors as large as a header takes, or just too large for it."""
    rows = most_rows(model(inputs, outputs, rank), SMALL)
    for role, entry in entries(rows, inputs, outputs, nbytes, rank):
        (frames,) = pack_messages([entry], limits=SMALL)
        envelope = decode(frames, role=role, limits=SMALL)
        assert ([], 1) == (envelope.bad, len(envelope.entries))


def test_it_is_not_far_from_what_would_not_fit() -> None:
    """The bound by frames is exact, the one by the header within a tenth for tensors of its largest."""
    frames_only = Limits(max_frames=600, max_header_bytes=10**9, max_members=10**6)
    assert 600 // 64 == most_rows(model(64, 1), frames_only)
    assert SMALL.max_members == most_rows(model(1, 1), SMALL)
    header_only = Limits(max_frames=10**6, max_header_bytes=8 * 1024 * 1024, max_members=10**6)
    rows = most_rows(model(8, 1), header_only)
    (_, execute), _ = entries(rows, 8, 1, MAX_INLINE_BYTES, 2)
    ((header, *_),) = pack_messages([execute], limits=UNBOUND)
    assert 0.9 < memoryview(header).nbytes / header_only.max_header_bytes <= 1.0


def test_a_model_with_few_tensors_is_not_restricted() -> None:
    """The default of 64 rows, and a thousand, are far below the bounds of the protocol."""
    assert WORKER_LIMITS.max_members == most_rows(model(3, 1))
    assert 1000 == ServedModel(0, "many", model(3, 1), model_settings(max_batch=1000)).profile.max_batch


def test_a_model_with_many_tensors_gets_smaller_batches_and_says_so() -> None:
    """4,000 rows of 64 inputs would be 256,000 frames: the worker would be cut off for what it was never sent."""
    with structlog.testing.capture_logs() as logs:
        profile = ServedModel(0, "many", model(64, 1), model_settings(max_batch=4000)).profile
    assert profile.max_batch == most_rows(model(64, 1)) < 4000
    assert profile.max_batch * 64 <= WORKER_LIMITS.max_frames
    (line,) = logs
    assert ("batches are smaller", 4000, profile.max_batch) == (
        line["event"],
        line["wanted"],
        line["max_batch"],
    )


def test_the_bound_of_the_model_file_is_capped_as_well() -> None:
    """Nobody configured a million rows; the file merely does not exclude them."""
    assert most_rows(model(64, 1)) == ServedModel(0, "many", model(64, 1), model_settings()).profile.max_batch


def test_a_limit_in_bytes_reaches_the_scheduler() -> None:
    """From the configuration to what the planner keeps."""
    options = model_settings(max_batch_bytes=4096)
    assert 4096 == ServedModel(0, "many", model(1, 1), options).profile.max_batch_bytes
    assert (
        DEFAULT_BATCH_BYTES == ServedModel(0, "many", model(1, 1), model_settings()).profile.max_batch_bytes
    )
