"""Checks of a worker's report against the model's signature and the batch that it was sent.

The codec has checked element types against its allow-list, and byte lengths against shapes. These checks need the model. A
layout that was found good for a request's sizes is remembered, so that it is checked once.
"""

from __future__ import annotations

from math import prod

from shapestream.wire.string_limits import check_outputs
from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.layout import Layout
from shapestream_engine.output_rules import With
from shapestream_engine.ports import OutputPort
from shapestream_engine.signature import ModelSignature

MAX_REMEMBERED = 4096
"""Layouts that are remembered per worker. Beyond it all are forgotten and checked again."""
MAX_TIME_S = 30 * 86_400.0
MAX_CALLS = 1 << 20
MAX_ELEMENTS = 1 << 53
"""More than any honest batch takes, and so little that sums over years still fit in messages."""


class ReportRefused(Exception):
    """The report contradicts the signature or the batch; the message says where."""


class ReportCheck:
    """Checks the reports of one model of one worker."""

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._gives_strings = any(port.is_string for port in signature.outputs)
        self._good: set[tuple[tuple[int, ...], Layout]] = set()

    def check(self, batch: BatchInputs, report: BatchReport) -> None:
        """Raise ReportRefused unless each member has its outputs, or lacks them because its deadline had passed."""
        outputs = report.outputs or ()
        self._check_calls(batch, report)
        if len(outputs) != len(batch.members):
            raise ReportRefused(f"{len(outputs)} results for {len(batch.members)} requests")
        start_before = batch.start_before
        for index, tensors in enumerate(outputs):
            if tensors is None:
                if start_before is None or start_before[index] is None:
                    raise ReportRefused(f"member {index} has no result, but no deadline could have passed")
                continue
            key = (batch.shapes[index].sizes, tensors.layout)
            if key not in self._good:
                self._check_layout(*key)
                if len(self._good) >= MAX_REMEMBERED:
                    self._good.clear()
                self._good.add(key)
            if self._gives_strings:
                try:
                    check_outputs(self._signature.outputs, tensors)
                except ValueError as error:
                    raise ReportRefused(str(error)) from None

    def _check_calls(self, batch: BatchInputs, report: BatchReport) -> None:
        """Check times and calls, which statistics and costs use. Each call runs a row that no other call runs."""
        signature, calls = self._signature, report.calls
        preparations, reallocations = report.preparations, report.reallocations
        if max(report.gather_s, report.run_s, report.busy_s) > MAX_TIME_S:
            text = f"it ran for {report.run_s:.0f} s and was busy for {report.busy_s:.0f} s"
            raise ReportRefused(f"{text}; at most {MAX_TIME_S:.0f} s are allowed")
        total = 0
        for count, sizes in calls:
            if count < 1 or len(sizes) != len(signature.dimensions):
                raise ReportRefused(
                    f"{count} calls of {list(sizes)}; the dimensions are {list(signature.dimensions)}"
                )
            if count * prod(sizes) > MAX_ELEMENTS:
                raise ReportRefused(f"{count} calls of {list(sizes)} are more than {MAX_ELEMENTS} elements")
            total += count
        total = total or 1
        most = max(batch.sizes[0] if signature.has_batch else 1, len(batch.members))
        if total > min(most, MAX_CALLS):
            raise ReportRefused(f"{total} calls for {most} rows")
        if preparations > total:
            raise ReportRefused(f"{preparations} preparations in {total} calls")
        if reallocations > total * (len(signature.inputs) + len(signature.outputs)):
            raise ReportRefused(f"{reallocations} reallocations in {total} calls")

    def _check_layout(self, sizes: tuple[int, ...], layout: Layout) -> None:
        signature = self._signature
        if len(layout) != len(signature.outputs):
            raise ReportRefused(f"{len(layout)} outputs; the model has {len(signature.outputs)}")
        own = dict(zip(signature.dimensions, sizes, strict=True))
        leading: dict[str, int] = {}
        for number, (port, (reported, element_type, shape)) in enumerate(
            zip(signature.outputs, layout, strict=True)
        ):
            if reported != number:
                raise ReportRefused(f"output {number} has the number {reported}")
            if element_type != port.element_type:
                raise ReportRefused(f"output {port.name!r} is {element_type}, not {port.element_type}")
            _check_shape(port, shape, own)
            leading[port.name] = shape[0] if port.shape.rank else 0
        for port in signature.outputs:
            if isinstance(port.rule, With) and leading[port.name] != leading[port.rule.output]:
                text = f"{leading[port.name]} rows, {port.rule.output!r} has {leading[port.rule.output]}"
                raise ReportRefused(f"output {port.name!r} has {text}")


def _check_shape(port: OutputPort, shape: tuple[int, ...], own: dict[str, int]) -> None:
    """Check that dimensions follow the request's sizes, or lie within the signature's bounds.

    Of the axis along which the data decides a request may have any part, nothing included. The shape of strings ends with
    their bytes, which may be any.
    """
    if port.is_string:
        shape = shape[:-1]
    if len(shape) != port.shape.rank:
        raise ReportRefused(f"output {port.name!r} has shape {list(shape)}, not [{port.shape}]")
    for axis, (size, wanted, admitted) in enumerate(
        zip(shape, port.own_sizes(own), port.shape.dimensions, strict=True)
    ):
        if axis == port.data_axis:
            most = admitted.maximum if wanted is None else wanted
            if most is not None and size > most:
                raise ReportRefused(f"output {port.name!r} has {size} along axis {axis}, at most {most} fit")
        elif wanted is not None and size != wanted:
            follows = port.shape.names[axis] or str(port.extents[axis])
            raise ReportRefused(
                f"output {port.name!r} has {size} along {follows!r}; its request has {wanted}"
            )
        elif wanted is None and size not in admitted:
            raise ReportRefused(f"output {port.name!r} has shape {list(shape)}, not [{port.shape}]")
