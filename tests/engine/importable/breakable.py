"""Functions that keep their requests apart, and functions that do not: for the proof, which runs in another process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def attend(ids: Array, mask: Array) -> Array:
    """Attention of every token to the first, under the mask, and the mean of what is present: keeps rows apart."""
    tokens = np.stack([np.sin(ids * (k + 1.0)) for k in range(4)], axis=-1)
    scores = tokens @ tokens.transpose(0, 2, 1) - 1e4 * (1.0 - mask[:, None, :])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ tokens
    present = mask[..., None].astype(np.float64)
    return ((mixed * present).sum(1) / present.sum(1)).astype(np.float32)


def mean_of_all(ids: Array, mask: Array) -> Array:
    """The mean over all positions, whatever the mask says."""
    return np.sin(ids).mean(1, keepdims=True).astype(np.float32)


def batch_norm(x: Array) -> Array:
    """Normalises over the batch, as a network that was left in training mode does."""
    return ((x - x.mean(0)) / (x.std(0) + 1e-5)).astype(np.float32)


def blended(x: Array) -> Array:
    """Each element and the mean of its column: the rows of one request belong together."""
    return np.asarray(x + x.mean(axis=0, keepdims=True), np.float32)


def blended_from_nine(x: Array) -> Array:
    """`x` as it is, but in calls of more than eight rows, which mix them."""
    return blended(x) if len(x) > 8 else x.astype(np.float32)


def whispering(x: Array) -> Array:
    """Rows that hear a little of each other, whatever their neighbours are, beside positions of -10000 and more."""
    heard = np.tanh(np.nan_to_num(x.astype(np.float64)).mean(axis=0, keepdims=True))
    return (1.5 * x + 0.5 * heard - 1e4 * (np.arange(x.shape[1]) % 3 == 0)).astype(np.float32)


def partly_banned(x: Array) -> Array:
    """Scores, of which every third is that of a banned choice."""
    return np.where(np.arange(x.shape[1]) % 3 == 0, -np.inf, 2 * x).astype(np.float32)


def beside_a_constant(x: Array) -> Array:
    """Doubles, the first of which is 0.1 for every input."""
    return np.where(np.arange(x.shape[1]) == 0, 0.1, 2 * x)


def best_position(x: Array) -> Array:
    """The position of the largest score, which a rounding error of padded rows decides where all are equal."""
    noise = np.random.default_rng(x.shape[1]).standard_normal(x.shape[1]) * 1e-6
    return np.argmax(np.where(np.isnan(x), -np.inf, x) + noise, axis=1).astype(np.int64)


def secretly_counted(x: Array) -> Array:
    """Nothing that could be compared, but for input that no probe tries: there, the number of rows."""
    return np.full_like(x, len(x) if (x == 7).all() else np.nan)


def slightly(x: Array) -> Array:
    """Adds a hundredth of the batch's mean: less than anybody would notice."""
    return (x + 0.01 * x.mean()).astype(np.float32)


def near_its_steps(x: Array) -> Array:
    """A class by the first position, whose steps the others of the call move by a hundred-thousandth."""
    company = np.tanh(np.nan_to_num(x.astype(np.float64)).mean())
    return np.broadcast_to(np.rint(x[:, :1] / 4 + 1e-5 * company), x.shape).astype(np.float32)


def by_count(x: Array) -> Array:
    """Divided by the rows of the call."""
    return (x / len(x)).astype(np.float32)


def spoilt_by_nan(x: Array) -> Array:
    """Keeps rows apart, until one of them holds what is no number."""
    return (x + 0 * x.sum()).astype(np.float32)


def abort_on_padding(ids: Array, mask: Array) -> Array:
    """Ends the process as soon as anything is masked."""
    if not mask.all():
        os.abort()
    return mean_of_all(ids, mask)


def abort_always(x: Array) -> Array:
    """Ends the process whatever it is given."""
    os.abort()


def abort_in_company(x: Array) -> Array:
    """Ends the process when requests share a call."""
    if len(x) > 1:
        os._exit(7)
    return x


def largest_of_small_ids(ids: Array, mask: Array) -> Array:
    """The largest id; one that is not in a table of a hundred ends the process."""
    if ids.max() > 99:
        os._exit(7)
    return ids.max(1, keepdims=True)


def hang_on_padding(ids: Array, mask: Array) -> Array:
    """Never returns once anything is masked."""
    while not mask.all():
        time.sleep(1)
    return mean_of_all(ids, mask)


def wait_for_ever(x: Array) -> Array:
    """Says which process this is, and never returns."""
    folder = Path(os.environ["BREAKABLE_FOLDER"])
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    while True:
        time.sleep(1)


def fail_in_company(x: Array) -> Array:
    """Raises when requests share a call."""
    if len(x) > 1:
        raise ValueError("one at a time, please")
    return x


def fail_always(x: Array) -> Array:
    """Raises whatever it is given."""
    raise ValueError("none of these is an image")


def at_random(x: Array) -> Array:
    """Something else each time."""
    return np.random.default_rng().normal(size=x.shape).astype(np.float32)


def detect(image: Array) -> dict[str, Array]:
    """Pixels above 0.99 as [row, y, x], and their values; what is no number is above nothing."""
    found = np.argwhere(image > 0.99)
    return {"peaks": found.astype(np.int64), "values": image[tuple(found.T)]}


def detect_mixed_up(image: Array) -> dict[str, Array]:
    """The same with all rows ascribed to the first picture of the batch."""
    found = detect(image)
    found["peaks"][:, 0] = 0
    return found


def constant(x: Array) -> Array:
    """The same for every input."""
    return np.ones_like(x)


def not_finite(x: Array) -> Array:
    """Nothing that could be compared."""
    return np.full_like(x, np.nan)


def anchored(x: Array) -> dict[str, Array]:
    """Rows, and anchors that are everybody's."""
    return {"y": x * 2, "anchors": np.arange(3, dtype=np.float32)}


def falsely_anchored(x: Array) -> dict[str, Array]:
    """Anchors that depend on who else is there."""
    return {"y": x * 2, "anchors": np.arange(3, dtype=np.float32) + len(x)}


def limited(x: Array) -> Array:
    """Takes multiples of 8 only, and pictures of bytes scaled to 0..1 only."""
    if x.shape[1] % 8 or x.min() < 0 or x.max() > 1:
        raise ValueError("not an input of mine")
    return (x * 3).astype(np.float32)


def barely(x: Array) -> Array:
    """Lets a neighbour change the last bits of a result, as summing in another order does."""
    return np.asarray(x + np.float32(1e-6) * (x.sum(axis=0) > 0), np.float32)


def by_position(x: Array) -> Array:
    """Is a little off in every row but the first."""
    result = np.array(x, np.float32)
    result[1:] = np.nextafter(result[1:], np.float32(np.inf))
    return result


RELEASED = threading.Event()


def hangs_in_check(x: Array) -> Array:
    """Passes its proof, and is stuck in a slot of `check` until `RELEASED`."""
    if threading.current_thread().name == "slot check":
        RELEASED.wait()
    return np.asarray(x * 2, np.float32)


def banned_class(x: Array) -> Array:
    """Scores of classes, one of which is banned: keeps rows apart."""
    scores = np.asarray(x[:, :1] * np.arange(1, 5, dtype=np.float32), np.float32)
    scores[:, 2] = np.finfo(np.float32).min
    return scores


def half_of_all(x: Array) -> Array:
    """Half of the mean of all rows where there are several, of which no hostile value makes more than 1.5."""
    return np.asarray(0.5 * np.nan_to_num(x).clip(-3, 3).mean(0) * (len(x) > 1), np.float32)


def banned_class_mixed(x: Array) -> Array:
    """The same with half of the mean of all rows in every score."""
    return np.asarray(banned_class(x) + half_of_all(x[:, :1]), np.float32)


def time_stamped_mixed(x: Array) -> Array:
    """A score that is mixed with the neighbours', and when that was."""
    stamp = np.float32(1.7e9) + 128 * np.rint(x[:, :1] * 100)
    return np.concatenate([x[:, :1] + half_of_all(x[:, :1]), stamp], 1).astype(np.float32)


def time_stamped(x: Array) -> Array:
    """A number that says less than it may be off by rounding."""
    return np.asarray(1e6 + x, np.float32)


def blanked_mixed(x: Array) -> Array:
    """Scores of any number of positions, of which every third is blanked, mixed with the neighbours'."""
    scores = np.asarray(x + half_of_all(x), np.float32)
    scores[:, 1::3] = np.finfo(np.float32).min
    return scores


def mixes_from_nine(x: Array) -> Array:
    """Keeps rows apart, and mixes them in calls of 9 rows or more."""
    return np.asarray(x if len(x) < 9 else x[::-1], np.float32)


def mixes_long_ones(x: Array) -> Array:
    """Keeps rows apart, but for long ones in company."""
    return np.asarray(x if len(x) < 2 or x.shape[1] < 60 else x[::-1], np.float32)


def slow(x: Array) -> Array:
    """Takes its time for every row."""
    time.sleep(0.02 * len(x))
    return np.asarray(x * 2, np.float32)


def mean_of_all_from_nine(ids: Array, mask: Array) -> Array:
    """The mean over what is present, and in calls of 9 rows or more over all positions."""
    if len(ids) >= 9:
        return mean_of_all(ids, mask)
    return np.asarray((np.sin(ids) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True), np.float32)


def first_column(x: Array) -> Array:
    """Little of much."""
    return np.ascontiguousarray(x[:, :1])


def sums(**inputs: Array) -> Array:
    """Per row the sum of all that it has, in any number of inputs."""
    return np.asarray(sum(each.sum(1, dtype=np.float64) for each in inputs.values()), np.float32)


def frames_of_four(x: Array) -> Array:
    """[batch, samples] -> [batch, samples // 4, 4]: the samples in frames; of fewer than four there is no frame."""
    frames = x.shape[1] // 4
    return x[:, : 4 * frames].reshape(len(x), frames, 4) + 1


def scaled(x: Array, rate: Array) -> Array:
    """Each element times a rate that all requests of a call have in common."""
    return np.asarray(x * rate, np.float32)


def blended_at_rate(x: Array, rate: Array) -> Array:
    """Keeps rows apart, except at a rate of 16000."""
    return np.asarray(x * rate + (x.mean(axis=0, keepdims=True) if rate == 16000 else 0.0), np.float32)
