"""Dotted keys of settings, and the short names that flags and keyword arguments have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo

from remanence.config.settings import ExperimentSettings, Section

# Short names of the most used keys: the flags of the command line and the keyword arguments of
# `remanence.run`. Every other key is reached by --set or `set=`.
FLAGS = {
    "method": "method",
    "data": "data.name",
    "data_dir": "data.dir",
    "model": "model",
    "clients": "clients.count",
    "partition": "data.partition",
    "sample": "clients.sample",
    "availability": "clients.availability",
    "drift": "drift.schedule",
    "time_steps": "drift.time_steps",
    "concepts": "drift.concepts",
    "samples": "drift.samples",
    "topology": "peers.topology",
    "patience": "peers.patience",
    "epochs": "local.epochs",
    "steps": "local.steps",
    "batch_size": "local.batch_size",
    "lr": "local.lr",
    "optimizer": "local.optimizer",
    "schedule": "local.schedule",
    "buffers": "local.buffers",
    "rounds": "rounds",
    "seed": "seed",
    "validation": "data.validation",
    "public": "data.public",
    "min_replies": "round.min_replies",
    "record_every": "record.every",
    "record_local": "record.local",
    "attack": "attack",
    "engine": "engine",
    "device": "device",
    "precision": "precision",
    "deterministic": "deterministic",
}


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """The sections of an experiment by name."""
    fields = ExperimentSettings.model_fields.items()
    return {name: type(f.default) for name, f in fields if isinstance(f.default, Section)}


@functools.cache
def all_settings() -> Mapping[str, FieldInfo]:
    """Every setting of an experiment by its dotted key, such as `local.batch_size`."""
    found: dict[str, FieldInfo] = {}
    for name, field in ExperimentSettings.model_fields.items():
        if name in sections():
            inner = sections()[name].model_fields
            found |= {f"{name}.{key}": setting for key, setting in inner.items()}
        else:
            found[name] = field
    return MappingProxyType(found)


def all_keys() -> dict[str, Any]:
    """Every dotted key of an experiment with its default value."""
    return {key: field.default for key, field in all_settings().items()}


def describe(setting: FieldInfo) -> str:
    """The description of a setting with its default, unless it states the default in words."""
    text, default = setting.description or "", setting.default
    if default in (None, "", ()) or "Default:" in text:
        return text
    return f"{text} Default: {'off' if default is False else default}."
