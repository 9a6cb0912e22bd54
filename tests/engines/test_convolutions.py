"""Convolutions as products equal torch's own, with their gradients, alone and in a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines.test_equal_engines import CASES, EVERYTHING
from engines.test_recorded_steps import assert_recorded_equals_loop
from torch import Tensor, nn

from remanence.engines import convolutions, graphs
from remanence.engines.convolutions import NARROW, convolve
from remanence.keys import Key
from remanence.trial import small_experiment


def draw(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(Key(0).fold(name).generator().standard_normal(shape))


@pytest.mark.parametrize("padding", [0, 2, (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_stack_of_convolutions(padding: Any, bias: bool) -> None:
    """3 models, 2 images of 2x7x6, kernels of 3x2, 5 outputs; the loss weighs outputs differently, so that no gradient cancels."""
    x, w, b = draw("x", 3, 2, 2, 7, 6), draw("w", 3, 5, 2, 3, 2), draw("b", 3, 5)

    def gradients(convolution: Any) -> Any:
        def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = convolution(x, w, b if bias else None, padding=padding)
            return (y * torch.arange(y.numel()).reshape(y.shape).to(y)).square().sum()

        return torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(x, w, b)

    for ours, theirs in zip(gradients(convolve), gradients(torch.conv2d), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_convolution_by_hand() -> None:
    """1 2 3 under 10 1 is 12 and 23; with bias 0.5."""
    y = convolve(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[10.0, 1.0]]]]), torch.tensor([0.5]))
    assert y.tolist() == [[[[12.5, 23.5]]]]


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": "same"}, {"outputs": 2 * NARROW}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_left_to_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions._Product, "apply", None)
    outputs, groups = options.pop("outputs", 4), options.get("groups", 1)
    x, w = draw("x", 2, 4, 8, 8), draw("w", outputs, 4 // groups, 3, 3)
    assert torch.equal(convolve(x, w, **options), torch.conv2d(x, w, **options))


def test_lower_precision_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions._Product, "apply", None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolve(draw("x", 1, 1, 4, 4).float(), draw("w", 2, 1, 3, 3).float(), torch.zeros(2)).dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["max pooling", "group norm", "batch norm", "dropout"])
def test_networks_are_reached(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with the plain step in place of its graph."""
    seen: list[tuple[int, ...]] = []
    apply = convolutions._Product.apply

    def spy(x: Tensor, w: Tensor) -> Tensor:
        seen.append(tuple(w.shape))
        result: Tensor = apply(x, w)  # type: ignore[no-untyped-call]
        return result

    monkeypatch.setattr(convolutions._Product, "apply", spy)
    monkeypatch.setattr(graphs, "trace_step", lambda step_all, example, compile: convolutions.with_products(step_all))
    changes, make_module = CASES[case]
    assert make_module is not None
    module = make_module()
    assert_recorded_equals_loop(small_experiment(EVERYTHING, changes, module=module), stack=64)
    assert set(seen) == {tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, nn.Conv2d)}


def test_products_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiled step on CUDA has them: written down once, then called with other numbers."""
    trace = graphs.trace_step
    monkeypatch.setattr(
        graphs, "trace_step", lambda step_all, example, compile: trace(convolutions.with_products(step_all), example, compile)
    )
    changes, make_module = CASES["max pooling"]
    assert make_module is not None
    assert_recorded_equals_loop(small_experiment("fedavg", {**changes, "data.partition": "iid"}, module=make_module()), stack=64)
