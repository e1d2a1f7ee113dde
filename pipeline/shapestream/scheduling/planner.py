"""How a batch is cut: which requests keep the one that must go company, and how many.

Nothing here changes a queue. The scheduler asks for the next request of a model (`next_anchor`), for its
share of what waits (`fair_share`), and for its company (`cut`), and then takes them out itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from shapestream.scheduling.lanes import Bucket
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Request, Slot

REACH = 16
"""Neighbouring buckets, on either side, that are looked at for company. It bounds the planning time."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch that has not been started."""

    members: Sequence[Request]
    rows: int
    shape: tuple[int, ...]
    """The call's sizes without the batch axis: the largest of any member."""
    padding: int = 0
    """Elements that are computed only as padding."""

    def sizes(self, has_batch: bool) -> tuple[int, ...]:
        """The call's size of each of the model's dimensions."""
        return (self.rows, *self.shape) if has_batch else self.shape


def together(members: Sequence[Request]) -> Cut:
    """The batch of exactly these requests.

    The elements of a request are its rows times the product of its dynamic dimensions. Where dimensions
    belong to different inputs that is no count of anything; as a share of padding it errs upwards.
    """
    shape = tuple(map(max, *[request.shape for request in members])) if len(members) > 1 else members[0].shape
    rows = sum([request.rows for request in members])
    real = sum([request.rows * prod(request.shape) for request in members])
    return Cut(members, rows, shape, rows * prod(shape) - real)


def fair_share(queue: ModelQueue, slot: Slot) -> int:
    """Rows that `slot` should take at most: the rows that it could serve, divided by the model's free slots.

    So that the queue is not emptied into the first of several free slots. A model that waits for company
    (`max_delay_s`) is not divided: it asked for large batches.
    """
    free = len(queue.free)
    if free < 2 or queue.delay_s:
        return queue.profile.max_batch
    waiting = sum(other.rows for other in slot.queues)
    return min(queue.profile.max_batch, -(-waiting // free))


def next_up(queues: Iterable[ModelQueue], now: float) -> Request | None:
    """The request that goes next, of all models that have a free slot; None if all wait, or nothing does.

    What must be run again goes before everything else; then the first by rank.
    """
    best: Request | None = None
    best_key: tuple[bool, float, int] = (True, 0.0, 0)
    for queue in queues:
        if not queue.free:
            continue
        again = queue.rerun_count > 0
        request = queue.next_rerun()[0] if again else next_anchor(queue, now)
        if request is not None:
            key = (not again, request.rank, request.order)
            if best is None or key < best_key:
                best, best_key = request, key
    return best


def next_anchor(queue: ModelQueue, now: float) -> Request | None:
    """The request of this model that goes next, or None while all of them may wait for company.

    Without a delay that is the first by rank. With one, nothing goes until some request's delay has ended
    or a batch would be full.
    """
    first = queue.oldest.first()
    if first is None:
        return None
    if queue.delay_s:
        due = queue.due.first()
        if due is None or due[0] > now:
            return _first_of_full(queue, first[2])
    return first[2]


def _first_of_full(queue: ModelQueue, first: Request) -> Request | None:
    """A request whose batch would be full: the head of a full bucket, or else `first` with its neighbours."""
    max_batch = queue.profile.max_batch
    if queue.rows < max_batch:
        return None
    if queue.full:
        heads = [bucket.first() for bucket in queue.full.values()]
        return min(heads, key=lambda request: (request.rank, request.order))
    return first if cut(first, max_batch).rows >= max_batch else None


def cut(anchor: Request, max_rows: int) -> Cut:
    """The batch that `anchor` goes in: as many rows as fit, from its own lane.

    The anchor must be the first of its bucket. From every bucket only the first by rank are taken, so
    nobody overtakes an equal. Requests of other sizes come along only as far as the call's padding ratio
    stays within the model's `max_padding_ratio`.
    """
    bucket = anchor.bucket
    queue = anchor.queue
    if not queue.has_batch or anchor.rows >= max_rows:
        return Cut([anchor], anchor.rows, anchor.shape)
    members = bucket.prefix(max_rows)
    rows = sum([request.rows for request in members])
    if rows >= max_rows or len(bucket.lane.buckets) == 1:
        return Cut(members, rows, anchor.shape)
    ratio = queue.profile.max_padding_ratio
    return _cut_with_neighbours(anchor, max_rows, 0.125 if ratio is None else ratio)


def _cut_with_neighbours(anchor: Request, max_rows: int, max_padding_ratio: float) -> Cut:
    """The most rows over every shape that the anchor and one neighbour span; of equals the smallest shape.

    For requests of one row each and one padded dimension this is the optimum over the `REACH` nearest
    buckets: with the call's shape fixed, the least padding for any number of members is had by taking the
    largest first.
    """
    window = anchor.bucket.lane.near(anchor.bucket, REACH)
    candidates = [(bucket, bucket.prefix(max_rows)) for bucket in reversed(window)]
    targets = {tuple(map(max, anchor.shape, bucket.shape)) for bucket in window}
    best: list[Request] = []
    best_score = (-1, 0)
    for target in sorted(targets, key=lambda shape: (prod(shape), shape)):
        members, rows = _fill(anchor, target, candidates, max_rows, max_padding_ratio)
        # Requests may have no rows at all; then their number decides.
        if (rows, len(members)) > best_score:
            best, best_score = members, (rows, len(members))
            if rows == max_rows:
                break
    return together(best)


def _fill(
    anchor: Request,
    target: tuple[int, ...],
    candidates: Sequence[tuple[Bucket, Sequence[Request]]],
    max_rows: int,
    max_padding_ratio: float,
) -> tuple[list[Request], int]:
    """The anchor and, largest first, what fits under `target`; as many as keep the padding in bounds."""
    filled = 1.0 - max_padding_ratio
    area = prod(target) * filled
    members, rows, real = [anchor], anchor.rows, anchor.rows * prod(anchor.shape)
    allowed, allowed_rows = (1, rows) if area * rows <= real else (0, 0)
    for bucket, requests in candidates:
        elements = prod(bucket.shape)
        if elements < area and area * rows > real:
            break  # too much padding, of which this and all that follow have more
        if tuple(map(max, bucket.shape, target)) != target:
            continue
        for request in requests:
            if request is anchor:
                continue
            if rows + request.rows > max_rows or len(members) == max_rows:
                break
            members.append(request)
            rows += request.rows
            real += request.rows * elements
            if area * rows <= real:
                allowed, allowed_rows = len(members), rows
    return members[:allowed], allowed_rows
