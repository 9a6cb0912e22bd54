"""Layers with statistics: what they return, what freezing does, and which of them look across
the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from remanence.core import pytree
from remanence.core.model import Model, functionalize, init_module
from remanence.core.pytree import Params
from remanence.core.rng import Key
from remanence.core.types import ModelState

CLASSES = 3


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fresh(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    return init_module(build, Key(seed))


def wrap_double(module: nn.Module, *shape: int, **options: bool) -> Model:
    return functionalize(module, rows(2, *shape), CLASSES, dtype=torch.float64, **options)


class Net(nn.Module):
    """Convolution, norm, dropout, a hidden layer as wide as there are classes, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(16, CLASSES)
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1))))


def key_of(number: int) -> Tensor:
    return Key(number).tensor()


def test_batch_norm_returns_what_torch_would_have_written() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Linear(4, CLASSES)
        ).double()

    plain, x = fresh(build), rows(7, 5)
    model = wrap_double(plain, 5)
    out, new = model.apply(*model.initial, x)
    logits = plain.train()(x)
    torch.testing.assert_close(out.logits, logits, rtol=1e-12, atol=1e-12)
    assert list(new) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for name, value in plain.named_buffers():
        torch.testing.assert_close(new[name], value, rtol=1e-12, atol=1e-12)
    assert int(new["1.num_batches_tracked"]) == 1
    with torch.no_grad():
        judged = model.predict(ModelState(model.initial.params, new), x).logits
        torch.testing.assert_close(judged, plain.eval()(x), rtol=1e-12, atol=1e-12)


def test_frozen_buffers_are_used_and_stay() -> None:
    model, x = wrap_double(fresh(Net), 1, 4, 4, freeze_buffers=True), rows(8, 1, 4, 4)
    model.initial.buffers["norm.running_mean"] += 3
    params = model.initial.params | {
        "head.weight": torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    }
    _, new = model.apply(params, model.initial.buffers, x, key_of(0))
    assert all(torch.equal(new[name], value) for name, value in model.initial.buffers.items())
    no_dropout = wrap_double(
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
        5,
        freeze_buffers=True,
    )
    trained, judged = (
        no_dropout.apply(*no_dropout.initial, rows(6, 5))[0],
        no_dropout.predict(no_dropout.initial, rows(6, 5)),
    )
    # the same statistics in both modes
    torch.testing.assert_close(trained.logits, judged.logits, rtol=1e-12, atol=1e-12)


def test_frozen_buffers_stay_in_every_norm_that_has_them() -> None:
    module = nn.Sequential(
        nn.Unflatten(1, (4, 2)),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    model = wrap_double(module, 8, freeze_buffers=True)
    _, new = model.apply(*model.initial, rows(5, 8))
    assert all(torch.equal(new[name], value) for name, value in model.initial.buffers.items())


def loss_and_buffers(model: Model) -> Callable[..., tuple[Tensor, Params]]:
    def loss(params: Params, buffers: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        out, new = model.apply(params, buffers, x, key)
        return out.logits.square().sum(), new

    return loss


def test_a_stack_of_clients_equals_a_loop_with_dropout_and_batch_norm() -> None:
    """Gradients by torch.func over the stack, by plain autograd in the loop."""
    model = wrap_double(fresh(Net), 1, 4, 4)
    starts = [pytree.scale(model.initial.params, 1 + 0.1 * client) for client in range(3)]
    buffers = [
        model.initial.buffers | {"norm.running_mean": torch.full((4,), float(client)).double()}
        for client in range(3)
    ]
    x, client_keys = rows(3, 6, 1, 4, 4), torch.stack([key_of(client) for client in range(3)])
    step = torch.func.grad(loss_and_buffers(model), has_aux=True)
    grads, new = vmap(step)(pytree.stack(starts), pytree.stack(buffers), x, client_keys)
    for client in range(3):
        leaves = {name: value.clone().requires_grad_() for name, value in starts[client].items()}
        loss, expected = loss_and_buffers(model)(
            leaves, buffers[client], x[client], client_keys[client]
        )
        for name, gradient in zip(
            leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True
        ):
            torch.testing.assert_close(grads[name][client], gradient, rtol=1e-12, atol=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(new[name][client], value, rtol=1e-12, atol=1e-12)


def test_layers_whose_batch_statistics_padding_would_spoil_are_known() -> None:
    """Engines pad batches of unequal width only where no layer looks across rows."""

    def mixes(layer: nn.Module, **options: bool) -> bool:
        module = nn.Sequential(nn.Unflatten(1, (4, 2)), layer, nn.Flatten(), nn.Linear(8, CLASSES))
        return wrap_double(module, 8, **options).depends_on_batch

    assert mixes(nn.BatchNorm1d(4))
    assert not mixes(nn.BatchNorm1d(4), freeze_buffers=True)
    assert not mixes(nn.GroupNorm(2, 4))
    assert not mixes(nn.InstanceNorm1d(4))


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4, track_running_stats=True)],
    ids=["batch norm without running statistics", "instance norm with running statistics"],
)
def test_less_common_norms_that_look_across_rows_are_known_too(layer: nn.Module) -> None:
    """The first normalizes by the batch; the second averages its statistics over it."""
    model = wrap_double(
        nn.Sequential(nn.Unflatten(1, (4, 2)), layer, nn.Flatten(), nn.Linear(8, CLASSES)), 8
    )
    x = rows(3, 8)
    padded = torch.cat([x, x[:1]])
    out, new = model.apply(*model.initial, x)
    out_padded, new_padded = model.apply(*model.initial, padded)
    spoiled = not torch.allclose(out.logits, out_padded.logits[:3]) or not all(
        torch.allclose(new[name], new_padded[name]) for name in new
    )
    assert spoiled  # else the name would not matter
    assert model.depends_on_batch


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4)],
    ids=lambda norm: type(norm).__name__,
)
def test_lower_precision_in_a_stack(norm: nn.Module) -> None:
    """As torch's own autocast has it, to the last bit; the gradients of a stack are those of
    every model alone, as far as bfloat16 goes.
    """
    module = fresh(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
        )
    )
    model, x = (
        functionalize(module, rows(2, 1, 6, 6).float(), CLASSES, autocast=torch.bfloat16),
        rows(3, 5, 1, 6, 6).float(),
    )
    assert model.initial.params["4.weight"].dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = module.train()(x[0]).float()
    assert torch.equal(model.apply(*model.initial, x[0])[0].logits, plain)

    def gradient(params: Params, buffers: Params, x: Tensor) -> Params:
        return grad(lambda params: model.apply(params, buffers, x)[0].logits.square().mean())(
            params
        )

    stacked = vmap(gradient, in_dims=(None, 0, 0))(
        model.initial.params, pytree.clone(pytree.broadcast(model.initial.buffers, 3)), x
    )
    for number in range(3):
        for name, alone in gradient(*model.initial, x[number]).items():
            torch.testing.assert_close(
                stacked[name][number], alone, rtol=0, atol=0.02 * float(alone.abs().max())
            )


@pytest.mark.parametrize("shared", [True, False])
def test_lower_precision_in_a_stack_that_is_judged(shared: bool) -> None:
    """Every layer answers in the precision in which it does for one model alone, also where
    nothing is differentiated.
    """
    module = fresh(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3),
            nn.Flatten(),
            nn.Linear(16, CLASSES),
        )
    )
    model, x = (
        functionalize(module, rows(2, 1, 6, 6).float(), CLASSES, autocast=torch.bfloat16),
        rows(3, 5, 1, 6, 6).float(),
    )
    seen: list[torch.dtype] = []
    for layer in model.eval_module:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda layer, inputs, answer: seen.append(answer.dtype))
    stack = ModelState(*(pytree.clone(pytree.broadcast(tree, 3)) for tree in model.initial))
    with torch.no_grad():
        stacked = vmap(model.predict, in_dims=(0, None if shared else 0))(
            stack, x[0] if shared else x
        )
        in_stack = seen.copy()
        for number in range(3):
            seen.clear()
            alone = model.predict(model.initial, x[0 if shared else number])
            assert seen == in_stack
            torch.testing.assert_close(
                stacked.logits[number],
                alone.logits,
                rtol=0,
                atol=0.02 * float(alone.logits.abs().max()),
            )
    assert set(seen) == {torch.bfloat16}
    assert not stacked.logits.requires_grad
