"""What a worker may say of itself, and what it is told when that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.serving.echo_model import SIGNATURE

from shapestream.serving.worker_port import GreetingRefused, check_form, read_offer
from shapestream.wire.messages import WorkerHello


def hello(**said: Any) -> WorkerHello:
    """A greeting that is in order, but for what is said here."""
    sound: dict[str, Any] = {"worker": "w-1", "pid": 42, "slots": 1, "models": {"echo": SIGNATURE.to_dict()}}
    return WorkerHello(**(sound | said))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"worker": "w" * 201}, "a worker's name is printable, of at most 200 characters"),
        ({"worker": "w\n1"}, "a worker's name is printable, of at most 200 characters"),
        ({"slots": 0}, "it has 0 slots; 1 to 256 it may have"),
        ({"slots": 257}, "it has 257 slots; 1 to 256 it may have"),
    ],
)
def test_a_name_that_cannot_be_shown_and_an_impossible_number_of_slots_are_refused(
    said: dict[str, Any], why: str
) -> None:
    """The text says what may be."""
    with pytest.raises(GreetingRefused) as refused:
        check_form(hello(**said))
    assert why == str(refused.value)


def test_an_offer_is_what_was_said() -> None:
    """The model's signature, as it was when it was made plain data."""
    offer = read_offer(hello())
    assert {"echo": SIGNATURE.to_dict()} == {name: model.to_dict() for name, model in offer.models.items()}
    assert {} == offer.costs


@pytest.mark.parametrize("name", ["other", "echo"])
def test_costs_belong_to_a_model_of_the_same_greeting_and_its_dimensions(name: str) -> None:
    """Costs of a model that is not offered, and costs by a dimension that the model does not have."""
    costs = {name: {"key": "", "dimensions": ["nonsense"], "points": []}}
    with pytest.raises(GreetingRefused, match=f"its costs of '{name}' are not those of a model"):
        read_offer(hello(costs=costs))


@pytest.mark.parametrize(
    "digests", [{"other": "a" * 64}, {"echo": "a" * 63}, {"echo": "A" * 64}, {"echo": ""}]
)
def test_digests_belong_to_a_model_of_the_same_greeting(digests: dict[str, str]) -> None:
    """And are 64 hexadecimal digits: people read them in logs, and clients are told them."""
    assert {"echo": "a1" * 32} == read_offer(hello(digests={"echo": "a1" * 32})).digests
    with pytest.raises(GreetingRefused, match=r"its digest of '[a-z]+' is not that of a model"):
        read_offer(hello(digests=digests))
