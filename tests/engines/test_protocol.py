"""Every engine keeps the whole protocol, and there is one table of engines."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from remanence import config
from remanence.bench.plain_engine import PlainEngine
from remanence.cli.listing import entries
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.engines import table
from remanence.engines.base import BaseEngine
from remanence.engines.processes import ProcessEngine
from remanence.engines.ray.engine import RayEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.engines.table import ENGINES, EngineOptions
from remanence.engines.vectorized import VectorizedEngine
from remanence.flower.engine import FlowerEngine
from remanence.sweeps.shared_engine import EngineProxy
from remanence.testing.toy_task import small_experiment

METHODS = sorted(name for name, value in vars(Engine).items() if inspect.isfunction(value))
METHODS = [name for name in METHODS if not name.startswith("_")]
KINDS: list[type[BaseEngine]] = [
    BaseEngine,
    SequentialEngine,
    FastSequentialEngine,
    VectorizedEngine,
    ProcessEngine,
    RayEngine,
    FlowerEngine,
    EngineProxy,
    PlainEngine,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_parameters_have_the_same_names_and_defaults(kind: type[Any], method: str) -> None:
    def form(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters]

    assert form(getattr(kind, method)) == form(getattr(Engine, method))


def test_the_configuration_and_the_listing_follow_the_table() -> None:
    assert ("auto", *ENGINES) == config.ENGINES
    listed = {entry["name"]: entry["description"] for entry in entries("engines")}
    assert list(listed) == ["auto", *ENGINES]
    assert {name: listed[name] for name in ENGINES} == {
        name: entry.description for name, entry in ENGINES.items()
    }


@pytest.mark.parametrize("name", ["sequential", "vectorized", "processes"])
def test_an_engine_is_checked_without_being_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("built")

    for kind in ("SequentialEngine", "VectorizedEngine", "ProcessEngine"):
        monkeypatch.setattr(table, kind, fail)
    task = small_experiment("fedavg").task
    ENGINES[name].check(task, EngineOptions(stack=4))
    with pytest.raises(AssertionError, match="built"):
        ENGINES[name].make(task, EngineOptions())


def test_outside_a_flower_app_the_engine_flower_is_refused() -> None:
    with pytest.raises(InputError, match="inside a Flower app"):
        ENGINES["flower"].check(small_experiment("fedavg").task, EngineOptions())
