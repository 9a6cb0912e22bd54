"""A user's nn.Module as a pure function of its parameters.

`Model.apply(params, buffers, x)` returns logits, features and new buffers and changes nothing. The
module is copied and serves as a template only. Dropout layers are replaced by layers that draw from
keys. A module that draws in another way, such as attention with dropout, draws from torch's
generator, which is seeded from the key for each call: it trains one client after the other. A
module that cannot be made pure is rejected, and the error says what to change.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from remanence.core.errors import InputError, first_line
from remanence.core.memory_format import ViewAsReshape, depends_on_layout
from remanence.core.model_layers import (
    KEY,
    BatchNorms,
    depends_on_batch,
    find_head,
    freeze_statistics,
    layers_from_output,
    make_dropout_keyed,
    norm_params,
    norms_in_fp32,
)
from remanence.core.model_outputs import are_probabilities, logits_of, seeded_generator
from remanence.core.pytree import SEPARATOR, Params
from remanence.core.rng import Key
from remanence.core.types import ModelState, Output


@dataclass(frozen=True)
class Model:
    """A network as a pure function, its initial values, and the names of its parts."""

    source_module: nn.Module  # as the user gave it
    train_module: nn.Module  # with keyed dropout, in training mode
    # the same in evaluation mode: switching modes at every call takes longer than a small layer
    eval_module: nn.Module
    train_features: FeatureHook
    eval_features: FeatureHook
    initial: ModelState
    head: tuple[str, ...]  # parameter names of the classifier
    # parameter names of each layer with parameters, counted from the output
    layers: tuple[tuple[str, ...], ...]
    norms: tuple[str, ...]
    fixed: tuple[str, ...]  # parameters that had requires_grad=False: they are not trained
    dropout_keys: tuple[str, ...]
    autocast: torch.dtype | None = None
    # is one tensor used by several modules? Stored, since finding it out at every call costs small
    # networks a few percent
    has_tied_weights: bool = True
    # does it fail on channels-last images, because it calls `view`? See memory_format.py
    uses_view: bool = False
    # does it draw from torch's generator in training? Then only one client at a time can train
    draws_unkeyed: bool = False
    gives_probabilities: bool = False  # does it end in softmax?

    def apply(
        self, params: Params, buffers: Params, x: Tensor, key: Tensor | None = None
    ) -> tuple[Output, Params]:
        """One pass in training mode -> output, new buffers."""
        # batch norm writes in place
        values: dict[str, Tensor] = {
            **params,
            **{name: value.clone() for name, value in buffers.items()},
        }
        if self.dropout_keys:
            assert key is not None
            values |= dict.fromkeys(self.dropout_keys, key)
        with self._generator(key):
            out = self._call(self.train_module, self.train_features, values, x)
        return out, {name: values[name] for name in buffers}

    def _generator(self, key: Tensor | None) -> contextlib.AbstractContextManager[None]:
        if not self.draws_unkeyed:
            return contextlib.nullcontext()
        assert key is not None
        return seeded_generator(key)

    def predict(self, model: ModelState, x: Tensor) -> Output:
        """One pass in evaluation mode."""
        predict = partial(
            self._call, self.eval_module, self.eval_features, {**model.params, **model.buffers}, x
        )
        return predict() if self.autocast is None else _autocast_vmap_workaround(predict)

    def _call(
        self, module: nn.Module, hook: FeatureHook, values: dict[str, Tensor], x: Tensor
    ) -> Output:
        with ViewAsReshape() if self.uses_view else contextlib.nullcontext():
            if self.autocast is None:
                output = functional_call(module, values, (x,), tie_weights=self.has_tied_weights)
                logits = logits_of(output)
            else:
                with torch.autocast(x.device.type, dtype=self.autocast):
                    output = functional_call(
                        module, values, (x,), tie_weights=self.has_tied_weights
                    )
                    logits = logits_of(output).float()
        features = hook.release()
        return Output(logits, logits if features is None else features.to(logits.dtype))

    @property
    def depends_on_batch(self) -> bool:
        """Whether an example's output in training depends on the other examples of its batch, as
        with batch norm that is not frozen.
        """
        return any(depends_on_batch(module) for module in self.train_module.modules())

    @property
    def has_convolutions(self) -> bool:
        return any(isinstance(module, nn.Conv2d) for module in self.train_module.modules())

    def group(self, depth: int) -> tuple[str, ...]:
        """The parameters of the last `depth` layers."""
        if not 0 <= depth <= len(self.layers):
            raise InputError(
                f"an aggregation depth of {depth} does not fit this model: it has"
                f" {len(self.layers)} layers with parameters; use 0 to {len(self.layers)}"
            )
        return tuple(name for layer in self.layers[:depth] for name in layer)

    def to_module(self, model: ModelState) -> nn.Module:
        """A copy of the user's module with these values, in evaluation mode."""
        module = copy.deepcopy(self.source_module).eval()
        # not strict: tied weights are twice in a state dict
        module.load_state_dict({**model.params, **model.buffers}, strict=False)
        return module


class FeatureHook:
    """Stores the input of the head of a module."""

    def __init__(self, module: nn.Module, head_path: str | None):
        self.seen: Tensor | None = None
        if head_path is not None:
            module.get_submodule(head_path).register_forward_pre_hook(self.store)

    def store(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.seen = inputs[0]

    def release(self) -> Tensor | None:
        """Return the input and delete it: a tensor of a finished vmap must not be kept."""
        seen, self.seen = self.seen, None
        return seen


def functionalize(
    module: nn.Module,
    example: Tensor,
    classes: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    freeze_buffers: bool = False,
    autocast: torch.dtype | None = None,
) -> Model:
    """Make a pure model from a module, and check it on a few examples.

    Args:
        module: The user's module; it is copied.
        example: Normalized inputs, [2 or more, ...].
        classes: The number of classes.
        dtype: The dtype of parameters and buffers.
        device: Where they are stored.
        freeze_buffers: Whether norms with running statistics stay in evaluation mode.
        autocast: The lower precision of forward passes; None: `dtype`.
    """
    for name, layer in module.named_modules():
        _reject_impure(name, layer)
    origin = copy.deepcopy(module).to(dtype=dtype, device=device)
    fixed = tuple(name for name, p in origin.named_parameters() if not p.requires_grad)
    template = copy.deepcopy(origin).train()
    make_dropout_keyed(template)
    if autocast is not None:
        norms_in_fp32(template, autocast)
    if freeze_buffers:
        freeze_statistics(template)
    _check_names(template)
    names = {id(p): name for name, p in template.named_parameters()}  # a tied weight has one name
    dropout_keys = tuple(name for name, _ in template.named_buffers() if name.split(".")[-1] == KEY)
    initial = state_of(template, dropout_keys)
    template.requires_grad_(False)
    head_path = find_head(template, classes)
    predict = copy.deepcopy(template).eval()
    model = Model(
        source_module=origin,
        train_module=template,
        eval_module=predict,
        train_features=FeatureHook(template, head_path),
        eval_features=FeatureHook(predict, head_path),
        initial=initial,
        head=()
        if head_path is None
        else tuple(names[id(p)] for p in template.get_submodule(head_path).parameters()),
        layers=tuple(layers_from_output(template, names)),
        norms=norm_params(template, names),
        fixed=fixed,
        dropout_keys=dropout_keys,
        autocast=autocast,
        has_tied_weights=_has_tied_weights(template),
    )
    return _check_on_example(model, example.to(device), classes)


def _check_on_example(model: Model, example: Tensor, classes: int) -> Model:
    """Check that a model accepts the data, and note what only a call shows."""
    name = type(model.source_module).__name__
    logits = _check_calls(model, example, classes, name)
    return replace(
        model,
        draws_unkeyed=_draws_unkeyed(model, example, name),
        gives_probabilities=are_probabilities(logits),
        uses_view=depends_on_layout(partial(model.predict, model.initial), example),
    )


def state_of(module: nn.Module, without: Sequence[str] = ()) -> ModelState:
    """A copy of a module's parameters and buffers; a tied weight appears once.

    Args:
        module: The module.
        without: Names of buffers that are left out.
    """
    return ModelState(
        {name: p.detach().clone() for name, p in module.named_parameters()},
        {name: b.detach().clone() for name, b in module.named_buffers() if name not in without},
    )


def _check_names(template: nn.Module) -> None:
    params = [name for name, _ in template.named_parameters()]
    for kind, name in [("parameter", name) for name in params] + [
        ("buffer", name) for name, _ in template.named_buffers()
    ]:
        if SEPARATOR in name:
            raise InputError(
                f"{kind} {name} has a {SEPARATOR} in its name, which separates levels in our"
                " files: rename that module"
            )
    if not params:
        raise InputError("the model has no parameters: there is nothing to train")


def _check_calls(model: Model, example: Tensor, classes: int, name: str) -> Tensor:
    """Check that the model accepts the data and has one output for each class; -> logits"""
    try:
        with torch.no_grad():
            logits = model.predict(model.initial, example).logits
    except InputError as error:
        raise InputError(f"model {name}: {error}") from error
    except Exception as error:
        shape = "x".join(str(n) for n in example.shape[1:])
        raise InputError(
            f"model {name} does not accept this data's examples of shape {shape}"
            f" ({example.dtype}): {first_line(error)}; choose a model that fits, or resize the data"
        ) from error
    if logits.shape != (len(example), classes):
        raise InputError(
            f"model {name} gives outputs of shape {tuple(logits.shape)} for {len(example)}"
            f" examples, but the data have {classes} classes: its last layer must have {classes}"
            " outputs"
        )
    return logits


def _draws_unkeyed(model: Model, example: Tensor, name: str) -> bool:
    """Whether a pass in training mode uses torch's generator; an error where the pass fails."""

    def states() -> list[Tensor]:
        return [
            torch.get_rng_state(),
            *([torch.cuda.get_rng_state(example.device)] if example.device.type == "cuda" else []),
        ]

    before = states()
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[example.device] if example.device.type == "cuda" else []),
    ):
        try:
            model.apply(
                *model.initial, example, torch.zeros((), dtype=torch.int64, device=example.device)
            )
        except Exception as error:
            raise InputError(
                f"model {name} fails in training mode on {len(example)} examples:"
                f" {first_line(error)}"
            ) from error
        after = states()
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def init_module(build: Callable[[], Any], key: Key) -> nn.Module:
    """Build a module with weights drawn from the key; torch's global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which also seeds the generators of GPUs
        torch.default_generator.manual_seed(key.value >> 1)
        module = build()
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, not {type(module).__name__}")
    return module


def _reject_impure(name: str, layer: nn.Module) -> None:
    kind, name = type(layer).__name__, name or "of the model itself"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise InputError(
            f"layer {name} ({kind}) has no shape yet: run the model once on an example before"
            " handing it over"
        )
    if isinstance(layer, BatchNorms) and layer.momentum is None:
        raise InputError(
            f"layer {name} ({kind}) has momentum=None, which cannot be computed for a stack of"
            " clients: give it a number such as 0.1"
        )
    if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
        raise InputError(
            f"layer {name} ({kind}) has dropout inside, which cannot draw from keys: set its"
            " dropout to 0 and put an nn.Dropout after it"
        )


def _autocast_vmap_workaround(compute: Callable[[], Output]) -> Output:
    """Differentiate with respect to an unused scalar: under vmap, autocast changes convolutions and
    linear layers only where something is differentiated.
    """
    answer: Output = vjp(lambda _: compute(), torch.zeros(()))[0]
    return answer


def _has_tied_weights(module: nn.Module) -> bool:
    """Whether a parameter or buffer is used at two places, by itself or within a module."""
    places = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return len(places) > len({id(tensor) for _, tensor in places})
