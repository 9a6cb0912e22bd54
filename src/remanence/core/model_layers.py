"""The layers of a user's network: keyed dropout, norms in float32, the head, the layers' order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from remanence.core import rng

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
        # in bf16 the numbers would differ
        draw = rng.uniform(key, shape, torch.promote_types(x.dtype, torch.float32))
        # at p = 1 nothing is kept, and an infinite factor would make the gradient NaN
        kept = 1 / (1 - self.p) if self.p < 1 else 0.0
        return torch.where(draw < self.p, torch.zeros_like(x), x * kept)


def make_dropout_keyed(module: nn.Module) -> None:
    """Replace every dropout layer of a module by one that draws from keys."""
    index = 0
    for parent in list(module.modules()):
        # named_children omits a module that is used twice
        for name, child in list(parent.named_modules(remove_duplicate=False)):
            if name and "." not in name and isinstance(child, Dropouts):
                setattr(
                    parent, name, KeyedDropout(child.p, not isinstance(child, nn.Dropout), index)
                )
                index += 1


def norms_in_fp32(module: nn.Module, lower: torch.dtype) -> None:
    """Make batch and instance norms compute in float32 and return the lower precision, as autocast
    does without vmap.
    """
    for layer in module.modules():
        if isinstance(layer, (*BatchNorms, *InstanceNorms)):
            layer.register_forward_pre_hook(_raise_precision)
            layer.register_forward_hook(partial(_lower_precision, lower))


def _raise_precision(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in inputs)


def _lower_precision(
    lower: torch.dtype, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    return output.to(lower)


def depends_on_batch(layer: nn.Module) -> bool:
    """Whether the layer's output for an example depends on the other examples of the batch, or on
    earlier batches.
    """
    if isinstance(layer, BatchNorms):
        return layer.training or not layer.track_running_stats
    return isinstance(layer, InstanceNorms) and layer.training and layer.track_running_stats


def freeze_statistics(module: nn.Module) -> None:
    """Keep batch and instance norms with running statistics in evaluation mode."""
    for layer in module.modules():
        if isinstance(layer, (*BatchNorms, *InstanceNorms)) and layer.track_running_stats:
            layer.eval()
            layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign]


def norm_params(module: nn.Module, names: dict[int, str]) -> tuple[str, ...]:
    """The parameters of normalization layers."""
    return tuple(
        names[id(p)]
        for layer in module.modules()
        if isinstance(layer, Norms)
        for p in layer.parameters(recurse=False)
    )


def find_head(module: nn.Module, classes: int) -> str | None:
    """The path of the classifier: the attribute `head`, otherwise the last linear layer with one
    output for each class, which may be the whole network ("").
    """
    if isinstance(getattr(module, "head", None), nn.Module):
        return "head"
    linear = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    return linear[-1] if linear else None


def layers_from_output(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, ...]]:
    """Parameter names of each layer, last layer first; a tied weight belongs to the layer nearer to
    the output.
    """
    seen: set[str] = set()
    for layer in reversed(list(_parameter_layers(module, names))):
        new = tuple(name for name in layer if name not in seen)
        seen.update(new)
        if new:
            yield new


def _parameter_layers(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, ...]]:
    """Layers with parameters, in order; a normalization belongs to the layer that it follows and
    does not count as a layer.
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
