"""A user's nn.Module as a pure function of its parameters.

`Model.apply(params, buffers, x)` returns logits, features and new buffers and changes nothing. The
module itself is copied once and only ever serves as a template. Dropout is rewritten to draw from
keys; what cannot be made pure is refused with the cure.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from remanence.core import rng
from remanence.core.errors import InputError
from remanence.core.memory_format import ViewAsReshape, depends_on_layout
from remanence.core.pytree import SEPARATOR, Params
from remanence.core.rng import Key
from remanence.core.types import ModelState, Output

BatchNorms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
InstanceNorms = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
Norms = (*BatchNorms, *InstanceNorms, nn.GroupNorm, nn.LayerNorm)
Dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
KEY = "dropout_key"  # the buffer through which a keyed dropout receives its randomness


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of a key: the same on every engine, and on resume."""

    def __init__(self, p: float, whole_channels: bool, index: int):
        super().__init__()
        self.p, self.whole_channels, self.index = p, whole_channels, index
        self.register_buffer(KEY, torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else x.shape
        key = rng.fold_in(rng.fold_in(self.get_buffer(KEY), "dropout"), self.index)
        # in bf16 other numbers would come
        draw = rng.uniform(key, shape, torch.promote_types(x.dtype, torch.float32))
        # at p = 1 nothing is kept, and an infinite factor would leave NaN in the gradient
        kept = 1 / (1 - self.p) if self.p < 1 else 0.0
        return torch.where(draw < self.p, torch.zeros_like(x), x * kept)


@dataclass(frozen=True)
class Model:
    """A network, its initial values, and what its parts are called."""

    source_module: nn.Module  # as the user gave it
    train_module: nn.Module  # with keyed dropout, in training mode
    # the same in evaluation mode: switching modes at every call would cost more than small layers
    # do
    eval_module: nn.Module
    train_features: FeatureHook
    eval_features: FeatureHook
    initial: ModelState
    head: tuple[str, ...]  # parameter names of the classifier
    # parameter names of each parameterised layer, counted from the output
    layers: tuple[tuple[str, ...], ...]
    norms: tuple[str, ...]
    fixed: tuple[str, ...]  # parameters that came with requires_grad=False and stay as they are
    dropout_keys: tuple[str, ...]
    autocast: torch.dtype | None = None
    # may one tensor stand at several places? looking for that at every call costs small networks a
    # few percent
    has_tied_weights: bool = True
    uses_view: bool = (
        # does it view images as rows? With the channels innermost it cannot, and is called with
        # `reshape` instead: see memory_format.py
        False
    )

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
        out = self._call(self.train_module, self.train_features, values, x)
        return out, {name: values[name] for name in buffers}

    def predict(self, model: ModelState, x: Tensor) -> Output:
        """One pass in evaluation mode."""
        predict = partial(
            self._call, self.eval_module, self.eval_features, {**model.params, **model.buffers}, x
        )
        return predict() if self.autocast is None else _autocast_vmap_workaround(predict)

    def _call(
        self, module: nn.Module, tap: FeatureHook, values: dict[str, Tensor], x: Tensor
    ) -> Output:
        with ViewAsReshape() if self.uses_view else contextlib.nullcontext():
            if self.autocast is None:
                logits = functional_call(module, values, (x,), tie_weights=self.has_tied_weights)
            else:
                with torch.autocast(x.device.type, dtype=self.autocast):
                    logits = functional_call(
                        module, values, (x,), tie_weights=self.has_tied_weights
                    ).float()
        features = tap.release()
        return Output(logits, logits if features is None else features.to(logits.dtype))

    @property
    def depends_on_batch(self) -> bool:
        """Does a row's output in training depend on the other rows of its batch? With batch
        norm it does, unless it is frozen.
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
        """An ordinary nn.Module with these values, in evaluation mode."""
        module = copy.deepcopy(self.source_module).eval()
        # tied weights stand in a state dict twice
        module.load_state_dict({**model.params, **model.buffers}, strict=False)
        return module


class FeatureHook:
    """Remembers what last entered the head of a module."""

    def __init__(self, module: nn.Module, head_path: str | None):
        self.seen: Tensor | None = None
        if head_path is not None:
            module.get_submodule(head_path).register_forward_pre_hook(self.store)

    def store(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.seen = inputs[0]

    def release(self) -> Tensor | None:
        """What was seen, once: a tensor of a finished vmap must not be kept."""
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
    """Copy a module into a pure model, after checking it on a few rows. example: [2 or more,
    ...], already normalized.
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
        for layer in template.modules():
            if isinstance(layer, (*BatchNorms, *InstanceNorms)) and layer.track_running_stats:
                layer.eval()
                layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign]
    params = {name: p.detach().clone() for name, p in template.named_parameters()}
    names = {id(p): name for name, p in template.named_parameters()}  # a tied weight has one name
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
    dropout_keys = tuple(name for name, _ in template.named_buffers() if name.split(".")[-1] == KEY)
    buffers = {
        name: b.detach().clone() for name, b in template.named_buffers() if name not in dropout_keys
    }
    template.requires_grad_(False)
    head_path = _find_head(template, classes)
    layers = tuple(_layers_from_output(template, names))
    norms = [
        names[id(p)]
        for m in template.modules()
        if isinstance(m, Norms)
        for p in m.parameters(recurse=False)
    ]
    predict = copy.deepcopy(template).eval()
    model = Model(
        source_module=origin,
        train_module=template,
        eval_module=predict,
        train_features=FeatureHook(template, head_path),
        eval_features=FeatureHook(predict, head_path),
        initial=ModelState(params, buffers),
        head=()
        if head_path is None
        else tuple(names[id(p)] for p in template.get_submodule(head_path).parameters()),
        layers=layers,
        norms=tuple(norms),
        fixed=fixed,
        dropout_keys=dropout_keys,
        autocast=autocast,
        has_tied_weights=_has_tied_weights(template),
    )
    _check_calls(model, example.to(device), classes, type(module).__name__)
    _reject_hidden_randomness(model, example.to(device), type(module).__name__)
    return replace(
        model,
        uses_view=depends_on_layout(partial(model.predict, model.initial), example.to(device)),
    )


def _check_calls(model: Model, example: Tensor, classes: int, name: str) -> None:
    """The model must accept the data and name every class, before any work starts."""
    try:
        with torch.no_grad():
            logits = model.predict(model.initial, example).logits
    except InputError:
        raise
    except Exception as error:
        shape = "x".join(str(n) for n in example.shape[1:])
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {name} does not accept this data's examples of shape {shape}"
            f" ({example.dtype}): {reason}; choose a model that fits, or resize the data"
        ) from error
    if logits.shape != (len(example), classes):
        given = (
            f"model {name} gives outputs of shape {tuple(logits.shape)} for {len(example)} examples"
        )
        raise InputError(
            f"{given}, but the data have {classes} classes: its last layer must have {classes}"
            " outputs"
        )


def _reject_hidden_randomness(model: Model, example: Tensor, name: str) -> None:
    """A pass in training mode must not touch torch's generator: its draws could be repeated
    neither on resume nor on another engine.
    """

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
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise InputError(
                f"model {name} fails in training mode on {len(example)} examples: {reason}"
            ) from error
        after = states()
    if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise InputError(
            f"model {name} draws random numbers of its own in training (functional"
            " dropout?): use nn.Dropout layers, which draw from keys"
        )


def init_module(build: Any, key: Key) -> nn.Module:
    """Build a module with weights drawn from the key, leaving torch's global generator as it
    was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.value >> 1)  # torch.manual_seed: the GPUs' too
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
            f"layer {name} ({kind}) has momentum=None, which no stack of clients can follow:"
            " give it a number such as 0.1"
        )
    if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
        raise InputError(
            f"layer {name} ({kind}) drops out inside, out of our reach: set its dropout to 0"
            " and put an nn.Dropout after it"
        )
    if isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
        raise InputError(
            f"layer {name} ({kind}) drops out inside, out of our reach: set its dropout to 0"
        )
    if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout | nn.RReLU):
        raise InputError(
            f"layer {name} ({kind}) draws random numbers that cannot be repeated: use"
            " nn.Dropout, or leave it out"
        )


def make_dropout_keyed(module: nn.Module) -> None:
    """Replace every dropout below by one that draws from keys."""
    index = 0
    for parent in list(module.modules()):
        # named_children leaves out a module that stands at two places
        for name, child in list(parent._modules.items()):
            if isinstance(child, Dropouts):
                setattr(
                    parent, name, KeyedDropout(child.p, not isinstance(child, nn.Dropout), index)
                )
                index += 1


def norms_in_fp32(module: nn.Module, lower: torch.dtype) -> None:
    """Let batch and instance norms below compute in float32 and answer in the lower precision:
    so they do of themselves, but not mapped over a stack.
    """
    for layer in module.modules():
        if isinstance(layer, (*BatchNorms, *InstanceNorms)):
            layer.register_forward_pre_hook(_raise_precision)
            layer.register_forward_hook(partial(_lower_precision, lower))


def _autocast_vmap_workaround(compute: Callable[[], Output]) -> Output:
    """Mapped over a stack, autocast leaves convolutions and linear layers as they are, unless
    something is differentiated: so something is, on which nothing depends.
    """
    answer: Output = vjp(lambda _: compute(), torch.zeros(()))[0]
    return answer


def _raise_precision(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in inputs)


def _lower_precision(
    lower: torch.dtype, _: nn.Module, inputs: tuple[Tensor, ...], answer: Tensor
) -> Tensor:
    return answer.to(lower)


def depends_on_batch(layer: nn.Module) -> bool:
    """Does what this layer makes of a row depend on the other rows, or on how many batches it
    has seen?
    """
    if isinstance(layer, BatchNorms):
        return layer.training or not layer.track_running_stats
    return isinstance(layer, InstanceNorms) and layer.training and layer.track_running_stats


def _has_tied_weights(module: nn.Module) -> bool:
    """Does a parameter or buffer stand at two places, by itself or with a module that does?"""
    places = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return len(places) > len({id(tensor) for _, tensor in places})


def _find_head(module: nn.Module, classes: int) -> str | None:
    """The classifier: an attribute named head, else the last linear layer with one output a
    class, which may be the whole network.
    """
    if isinstance(getattr(module, "head", None), nn.Module):
        return "head"
    linear = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    return linear[-1] if linear else None


def _layers_from_output(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, ...]]:
    """Last layer first; a tied weight belongs to the one nearer to the output."""
    seen: set[str] = set()
    for layer in reversed(list(_parameter_layers(module, names))):
        new = tuple(name for name in layer if name not in seen)
        seen.update(new)
        if new:
            yield new


def _parameter_layers(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, ...]]:
    """Layers with weights, in order; a normalization belongs to the layer it follows, so that
    depth counts what people call layers.
    """
    current: list[str] = []
    for layer in module.modules():
        mine = [names[id(p)] for p in layer.parameters(recurse=False)]
        if not mine:
            continue
        if isinstance(layer, Norms) and current:
            current += mine
            continue
        if current:
            yield tuple(current)
        current = mine
    if current:
        yield tuple(current)
