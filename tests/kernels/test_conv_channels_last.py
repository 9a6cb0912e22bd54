"""Convolutions with the channels last equal torch's, with their gradients; in a stack their
results are not copied.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.test_captured_steps import assert_captured_equals_sequential
from engines.test_equal_engines import CASES, EVERYTHING
from torch import Tensor, nn
from torch.func import grad, vmap

from remanence.core.rng import Key
from remanence.engines import captured_steps
from remanence.kernels import conv_channels_last, grouped_conv
from remanence.testing.toy_task import small_experiment


def draw(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(Key(0).fold_in(name).generator().standard_normal(shape))


@pytest.mark.parametrize(
    ("stride", "padding", "kernel"),
    [(1, 1, 3), (2, 1, 3), (2, 0, 1), (1, 0, 1), (1, 1, 1), (1, 2, 5)],
)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_a_stack(
    stride: int,
    padding: int,
    kernel: int,
    shared: bool,
    deep: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 models, each with 5 images of its own or all with the same; the loss weighs outputs
    differently, so that no gradient cancels.
    """
    monkeypatch.setattr(conv_channels_last, "DEEP", 6 if deep else 512)
    x, w = (
        draw("x", 5, 6, 8, 7) if shared else draw("x", 4, 5, 6, 8, 7),
        draw("w", 4, 9, 6, kernel, kernel),
    )

    def answers(convolve: Any) -> list[Tensor]:
        def loss(x: Tensor, w: Tensor) -> Tensor:
            y = convolve(x, w, (stride, stride), (padding, padding))
            return (
                (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape))
                .square()
                .sum()
            )

        dims = (None if shared else 0, 0)
        return [
            vmap(convolve, in_dims=(*dims, None, None))(x, w, (stride, stride), (padding, padding)),
            *vmap(grad(loss, (0, 1)), dims)(x, w),
        ]

    for ours, theirs in zip(
        answers(conv_channels_last.convolve),
        answers(lambda x, w, *sizes: torch.conv2d(x, w, None, *sizes)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * float(theirs.abs().max()))


def test_a_single_model() -> None:
    """The image 1 2 3 and the filter 10 1 give 12 and 23."""
    x, w = (
        torch.tensor([[[[1.0, 2.0, 3.0]]]], requires_grad=True),
        torch.tensor([[[[10.0, 1.0]]]], requires_grad=True),
    )
    y = conv_channels_last.convolve(x, w, (1, 1), (0, 0))
    assert y.tolist() == [[[[12.0, 23.0]]]]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[[[10.0, 11.0, 1.0]]]]
    assert w.grad is not None
    assert w.grad.tolist() == [[[[3.0, 5.0]]]]


def test_layouts_are_converted_once() -> None:
    """The result of one convolution is the input of the next without a copy."""
    y = vmap(conv_channels_last.convolve, in_dims=(0, 0, None, None))(
        draw("x", 3, 2, 4, 8, 8), draw("w", 3, 6, 4, 3, 3), (1, 1), (1, 1)
    )
    assert y.shape == (3, 2, 6, 8, 8)
    assert y.stride(2) == 1  # channels innermost
    assert conv_channels_last._to_grouped(y).data_ptr() == y.data_ptr()
    assert conv_channels_last._to_grouped(y.relu()).shape == (2, 18, 8, 8)
    strided = vmap(conv_channels_last.convolve, in_dims=(0, 0, None, None))(
        y, draw("v", 3, 5, 6, 3, 3), (2, 2), (1, 1)
    )
    assert strided.shape == (3, 2, 5, 4, 4)
    assert conv_channels_last._to_nhwc(strided).data_ptr() == strided.data_ptr()


def test_one_convolution_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuDNN would cut a grouped one into pieces: strides, and layers with many channels
    on both sides.
    """
    monkeypatch.setattr(conv_channels_last, "DEEP", 8)
    assert not conv_channels_last._is_separate(torch.empty(3, 8, 7, 3, 3), (1, 1))
    assert conv_channels_last._is_separate(torch.empty(3, 8, 8, 3, 3), (1, 1))
    assert conv_channels_last._is_separate(torch.empty(3, 4, 4, 3, 3), (1, 2))


@pytest.mark.parametrize(
    ("channels", "dtype", "tf32", "cuda", "expected"),
    [
        ((64, 64), torch.float32, True, True, True),
        # without tensor cores the layout does not pay
        ((64, 64), torch.float32, False, True, False),
        ((64, 64), torch.bfloat16, False, True, True),
        ((64, 63), torch.bfloat16, True, True, False),
        ((32, 64), torch.bfloat16, True, True, False),
        # what is compared with the plain loop is what runs
        ((64, 64), torch.float64, False, True, True),
        ((64, 64), torch.float32, True, False, False),
    ],
)
def test_which_layers_use_channels_last(
    channels: tuple[int, int],
    dtype: torch.dtype,
    tf32: bool,
    cuda: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    images: Any = SimpleNamespace(is_cuda=cuda)
    assert (
        grouped_conv.use_channels_last(images, torch.zeros(*channels, 3, 3, dtype=dtype))
        is expected
    )


@pytest.mark.parametrize("fused", [True, False])
def test_only_compiled_steps_use_the_layout(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_conv, "use_channels_last", lambda x, weight: True)
    monkeypatch.setattr(grouped_conv, "use_triton", lambda x, weight, padding: False)
    monkeypatch.setattr(
        conv_channels_last, "convolve", lambda x, w, stride, padding: torch.full((1, 1, 1, 1), 7.0)
    )
    y = grouped_conv.convolve(
        torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.tensor([0.5]), fused=fused
    )
    assert y.item() == (7.5 if fused else 1.5)


@pytest.mark.parametrize("case", ["max pooling", "batch norm", "dropout"])
def test_convolutions_of_networks_are_replaced(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with the traced step in place of its graph. Group norm is not mapped over
    this layout on a CPU; the GPU suite compares it.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    seen: list[tuple[int, ...]] = []

    def spy(x: Tensor, w: Tensor, *sizes: Any) -> Tensor:
        seen.append(tuple(w.shape))
        return convolve(x, w, *sizes)

    convolve = conv_channels_last.convolve
    monkeypatch.setattr(grouped_conv, "use_channels_last", lambda x, weight: True)
    monkeypatch.setattr(grouped_conv, "use_triton", lambda x, weight, padding: False)
    monkeypatch.setattr(conv_channels_last, "convolve", spy)
    trace = captured_steps.TracedFunction
    monkeypatch.setattr(
        captured_steps,
        "TracedFunction",
        lambda step_all, example, compile=False: trace(
            grouped_conv.with_convolutions(step_all, fused=True), example, compile
        ),
    )
    changes, make_module = CASES[case]
    assert make_module is not None
    module = make_module()
    assert_captured_equals_sequential(
        small_experiment(EVERYTHING, changes, module=module), stack=64
    )
    assert {
        tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, nn.Conv2d)
    } <= set(seen)
