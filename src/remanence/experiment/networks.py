"""Makes the network of an experiment: by name or import path, with a method's changes applied."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import nn

from remanence.config import Experiment
from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.core.imports import import_constructor, is_import_path
from remanence.core.model import Model, functionalize, init_module
from remanence.core.rng import Key
from remanence.core.slots import Method
from remanence.data.dataset import ArrayDataset
from remanence.models import MODELS


def make_model(
    config: Experiment,
    name: str,
    module: nn.Module | None,
    method: Method,
    dataset: ArrayDataset,
    example_inputs: torch.Tensor,
    dtype: torch.dtype,
    key: Key,
) -> Model:
    """The network as pure functions, with weights drawn from the key.

    Args:
        config: The experiment.
        name: A network of ours or an import path, used where no module is given.
        module: The user's own network, or None.
        method: May change the network.
        dataset: Its shape and classes determine the network's inputs and outputs.
        example_inputs: Two inputs, on the device of the experiment.
        dtype: Floating-point type of parameters and buffers.
        key: The experiment's.
    """
    classes = len(dataset.classes)
    if module is None:
        module = init_module(
            lambda: build_module(name, dataset.shape, classes), key.fold_in("model")
        )
    module = apply_model_changes(method, module, classes, key)
    _check_vocabulary(module, dataset)
    return functionalize(
        module,
        example_inputs,
        classes,
        dtype=dtype,
        device=example_inputs.device,
        freeze_buffers=config.local.buffers == "frozen",
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
    )


def build_module(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of ours by name, or the user's by import path (`package.module:Class(width=3)`)."""
    call = expressions.parse_call(name)
    if not is_import_path(call.name):
        built: nn.Module = expressions.instantiate(call, MODELS, "model", shape, classes)
        return built
    make = import_constructor(call.name, "model")
    accepted = inspect.signature(make).parameters
    known = {
        name: value
        for name, value in {"shape": shape, "classes": classes}.items()
        if name in accepted
    }
    try:
        return make(**known | dict(call.arguments))  # type: ignore[no-any-return]
    except TypeError as error:
        raise InputError(f"model {call.name} cannot be built: {error}") from error


def apply_model_changes(method: Method, module: nn.Module, classes: int, key: Key) -> nn.Module:
    """The network as the method's parts need it; new layers draw their weights from keys of
    their own.
    """
    for p in method.parts:
        if p.modify_model is not None:
            module = init_module(
                partial(p.modify_model, module, classes), key.fold_in("adapt", p.name)
            )
    return module


def _check_vocabulary(module: nn.Module, dataset: ArrayDataset) -> None:
    vocabulary = getattr(module, "vocabulary", None)
    if dataset.kind == "tokens" and isinstance(vocabulary, int):
        largest = int(max(dataset.train.x.max(), dataset.test.x.max()))
        if largest >= vocabulary:
            raise InputError(
                f"the data hold token {largest}, but the model knows {vocabulary} tokens: use"
                f" text(vocabulary={largest + 1})"
            )
