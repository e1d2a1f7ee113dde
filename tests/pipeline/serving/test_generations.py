"""Generations of a served model: numbers on the wire, what a reload may change, and what is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shapestream.errors import ConfigurationError, InvalidRequest
from shapestream.serving.served_models import MOST_OLD_NUMBERS, ServedModel, ServedModels
from shapestream.settings import ModelSettings
from shapestream.settings.model_settings import BatchingSettings
from shapestream.slices import at_once
from shapestream.versions import Versions
from shapestream_engine import InputPort, ModelSignature, NamedShape, OutputPort, Rows


def signature(*inputs: str, n: int = 64, output: str = "y") -> ModelSignature:
    """Of the model `m`, with these inputs."""
    shape = NamedShape.parse(f"batch:1..8, n:1..{n}")
    ports = tuple(InputPort(name, "f32", shape) for name in inputs or ("x",))
    return ModelSignature("m", ports, (OutputPort(output, "f32", shape, Rows()),))


def settings(**batching: float) -> ModelSettings:
    """Of the model `m`."""
    return ModelSettings(name="m", batching=BatchingSettings(**batching))


def with_one() -> tuple[ServedModels, ServedModel]:
    """The models of a server, with one that a worker has brought."""
    models = ServedModels({"m": settings()})
    return models, at_once(models.add_all({"m": signature()})).models["m"]


def reloaded(models: ServedModels, new: ModelSignature) -> ServedModel:
    """The model after a reload, whose worker brings this signature and has joined."""
    models.expect("m", settings(), may_change=True)
    (found,) = at_once(models.add_all({"m": new})).models.values()
    models.promote(found)
    return found


def test_another_signature_has_a_number_of_its_own_from_the_first_slot_on() -> None:
    """Not from the greeting: a worker that ends before its slots have joined changes nothing."""
    models, first = with_one()
    models.expect("m", settings(), may_change=True)
    (second,) = at_once(models.add_all({"m": signature(n=32)})).models.values()
    assert models.by_name["m"] is first
    assert [second] == models.promote(second)
    assert (0, 1, None) == (first.number, second.number, second.like)
    assert ("m", "m~2") == (first.key, second.key)
    assert models.by_number == {0: first, 1: second}
    assert [] == models.promote(second) == models.promote(first)


def test_only_a_reload_changes_a_signature() -> None:
    """A worker that has read another file by itself is refused; one of the old signature that comes back is not."""
    models, first = with_one()
    with pytest.raises(ConfigurationError, match=r"n:1\.\.64.*n:1\.\.32.*reload the server"):
        at_once(models.add_all({"m": signature(n=32)}))
    reloaded(models, signature(n=32))
    models.expect("m", settings())
    assert {"m": first} == at_once(models.add_all({"m": signature()})).models


def test_requests_under_an_old_number_of_a_name_with_versions_are_mapped_by_name() -> None:
    """Also to a version that comes after the one with the new number, and whose ports stand in another order."""
    models = ServedModels({}, versions={"m": Versions.of("m", [("1", None)])})
    bounds = {"1": ("a", "b", 64), "2": ("b", "a", 32), "3": ("a", "c", 32)}
    routes = []
    for version, (first, second, n) in bounds.items():
        models.expect(f"m@{version}", settings())
        models.change_versions({"m": Versions.of("m", [(version, None)])})
        offered = replace(signature(first, second, n=n), name=f"m@{version}")
        at_once(models.add_all({offered.name: offered}))
        models.joined(offered.name, None)
        announced = models.by_number[1].announced
        assert announced is not None
        if version != "3":
            model, fit = announced.route(b"c" * 16, 0, models.is_live)
            routes.append((model, fit.inputs))
    assert [("m@1", None), ("m@2", (1, 0))] == routes
    with pytest.raises(
        InvalidRequest, match="'m' has changed: version '3': it has no input 'b'; open it again"
    ):
        announced.route(b"c" * 16, 0, models.is_live)


def test_old_signatures_of_a_name_with_versions_are_forgotten_too() -> None:
    """Each version that replaces the rest brings a bound that the one before does not have."""
    models = ServedModels({}, versions={"m": Versions.of("m", [("0", None)])})
    for number in range(2 * MOST_OLD_NUMBERS):
        name = f"m@{number}"
        models.expect(name, settings())
        models.change_versions({"m": Versions.of("m", [(str(number), None)])})
        at_once(models.add_all({name: replace(signature(n=64 - number), name=name)}))
        models.withdraw(name)
        if number:
            models.forget(f"m@{number - 1}")
    assert ["m@15"] == list(models.by_name)
    assert MOST_OLD_NUMBERS + 2 == len(models.by_number)


def test_how_a_model_is_batched_changes_at_once_and_keeps_number_and_slots() -> None:
    """Keys that workers read wait for a worker; the same settings change nothing."""
    models, first = with_one()
    assert [] == models.expect("m", settings())
    (second,) = models.expect("m", settings(max_delay_ms=3))
    assert (0, "m", 0.003) == (second.number, second.like, second.profile.max_delay_s)
    assert first.latest() is second is models.by_number[0]
    assert [] == models.expect("m", settings(max_delay_ms=3, max_batch=4), may_change=True)
    (third,) = at_once(models.add_all({"m": signature()})).models.values()
    assert [third] == models.promote(third)
    assert (0, 4) == (third.number, third.profile.max_batch)


def test_requests_under_an_old_number_are_mapped_by_name() -> None:
    """Ports in another order are; a new name is told, and a client opens the model again."""
    models = ServedModels({"m": settings()})
    (first,) = at_once(models.add_all({"m": signature("a", "b")})).models.values()
    second = reloaded(models, signature("b", "a"))
    model, fit = first.present()
    assert (second, (1, 0), None) == (model, fit.inputs, fit.outputs)
    reloaded(models, signature("b", "a", output="z"))
    for old in (first, second):
        with pytest.raises(
            InvalidRequest, match=r"model 'm' has changed: it has no output 'y'; open it again"
        ):
            old.present()


def test_nothing_is_kept_of_a_generation_without_requests() -> None:
    """Its number is mapped while it is one of the last ones, and never used again."""
    models, _ = with_one()
    for n in range(2, 40):
        reloaded(models, signature(n=n))
        models.retire(lambda model: True)
    assert {} == models.retiring
    assert MOST_OLD_NUMBERS + 1 == len(models.by_number)
    assert 38 == models.by_name["m"].number
    models.withdraw("m")
    assert models.by_number[38] is models.forget("m")
    assert ({}, {}, []) == (models.by_name, models.by_number, models.names)
    (again,) = at_once(models.add_all({"m": signature()})).added
    assert 39 == again.number


def test_workers_that_come_together_bring_one_generation() -> None:
    """The second one's is that of the first."""
    models, _ = with_one()
    models.expect("m", settings(), may_change=True)
    found = [at_once(models.add_all({"m": signature(n=32)})).models["m"] for _ in range(2)]
    assert [found[0]] == models.promote(found[0])
    assert [] == models.promote(found[1])
    assert found[1].number < 0
