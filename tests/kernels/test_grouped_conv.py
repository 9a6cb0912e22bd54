"""Narrow convolutions by the Triton kernels equal torch's, with their gradients, alone and in a
stack; here the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
from functools import partial
from operator import itemgetter
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed")

import torch
from engines.test_captured_steps import assert_captured_equals_sequential
from engines.test_equal_engines import CASES, EVERYTHING
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import batch_norm
from torch.utils import _pytree as pytree

from remanence.core import pytree as trees
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.engines import captured_steps
from remanence.engines.evaluation import predict_logits_stacked
from remanence.kernels import grouped_conv, triton_conv
from remanence.kernels.grouped_conv import conv_forward, conv_weight_grad, convolve
from remanence.testing.toy_task import small_experiment

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}


def draw(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(Key(0).fold_in(name).generator().standard_normal(shape)).to(dtype)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 and wide layers use the Triton kernels too."""
    monkeypatch.setattr(grouped_conv, "use_triton", lambda x, weight, padding: True)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("inputs", "outputs", "padding", "bias", "dtype"),
    [
        (2, 5, 0, False, torch.float64),
        (2, 5, 2, True, torch.float64),
        (2, 5, (1, 2), True, torch.float32),
        (32, 20, 0, True, torch.float64),  # whole tiles of channels
        (32, 20, (1, 2), False, torch.float64),
        (32, 20, 1, False, torch.float32),
        (3, 33, 1, False, torch.float64),  # two tiles of outputs
    ],
)
def test_a_stack_of_convolutions(
    inputs: int, outputs: int, padding: Any, bias: bool, dtype: torch.dtype
) -> None:
    """3 models, 2 images of 7x6, kernels of 3x3; the loss weighs outputs differently, so that
    no gradient cancels.
    """
    x, w, b = (
        draw(*argument, dtype=dtype)
        for argument in (
            ("x", 3, 2, inputs, 7, 6),
            ("w", 3, outputs, inputs, 3, 3),
            ("b", 3, outputs),
        )
    )

    def gradients(convolution: Any) -> Any:
        def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = convolution(x, w, b if bias else None, padding=padding)
            return (
                (y * torch.linspace(0.5, 1.5, y.numel(), dtype=dtype).reshape(y.shape))
                .square()
                .sum()
            )

        return torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(x, w, b)

    for ours, theirs in zip(gradients(convolve), gradients(torch.conv2d), strict=True):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=EXACT[dtype],
            atol=EXACT[dtype] * float(theirs.abs().max().clamp(min=1)),
        )


@pytest.mark.usefixtures("everywhere")
def test_sums_over_pixels_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = draw("x", 1, 4, 2, 14, 14), draw("dy", 1, 4, 5, 12, 12)
    whole = torch.nn.grad.conv2d_weight(x[0], (5, 2, 3, 3), dy[0])
    for programs in (1, 100):  # one part of 576 rows, and four
        monkeypatch.setattr(triton_conv, "PROGRAMS", programs)
        torch.testing.assert_close(
            conv_weight_grad(x, dy, 3, 3, 0, 0, False)[0].permute(3, 2, 0, 1),
            whole,
            rtol=1e-10,
            atol=1e-10,
        )


@pytest.mark.usefixtures("everywhere")
def test_a_convolution_by_hand() -> None:
    """The image 1 2 3 and the filter 10 1 give 12 and 23; with bias 0.5."""
    y = convolve(
        torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[10.0, 1.0]]]]), torch.tensor([0.5])
    )
    assert y.tolist() == [[[[12.5, 23.5]]]]


@pytest.mark.parametrize("channels", [4, 16])
def test_operators_agree_with_their_fake_versions(channels: int) -> None:
    """Shapes and strides, with few channels and with the channels last."""
    x, w = (
        draw("x", 2, 2, 3, 6, 6, dtype=torch.float32),
        draw("w", 2, 3, 3, 3, channels, dtype=torch.float32),
    )
    torch.library.opcheck(
        conv_forward, (x, w, 1, 1, False), test_utils=("test_schema", "test_faketensor")
    )
    dy = conv_forward(x, w, 1, 1, False)
    torch.library.opcheck(
        conv_weight_grad, (x, dy, 3, 3, 1, 1, False), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2},
        {"groups": 2},
        {"padding": "same"},
        {"padding": 3},
        {"outputs": 33},
        {"inputs": 18},
        {"dtype": torch.float64},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_what_is_left_to_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_conv._Convolution, "apply", None)
    sizes = {
        name: options.pop(name, usual)
        for name, usual in (("outputs", 4), ("inputs", 4), ("dtype", torch.float32))
    }
    groups = options.get("groups", 1)
    x = draw("x", 2, sizes["inputs"], 8, 8, dtype=sizes["dtype"])
    w = draw("w", sizes["outputs"], sizes["inputs"] // groups, 3, 3, dtype=sizes["dtype"])
    assert torch.equal(convolve(x, w, **options), torch.conv2d(x, w, **options))


def test_autocast_lowers_the_precision_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no bfloat16, so torch convolves instead."""
    monkeypatch.setattr(
        grouped_conv._Convolution,
        "apply",
        lambda x, w, above, beside, tf32: torch.conv2d(x, w, padding=(above, beside)),
    )
    x, w = draw("x", 1, 1, 4, 4, dtype=torch.float32), draw("w", 2, 1, 3, 3, dtype=torch.float32)
    lowered = torch.conv2d(x.bfloat16(), w.bfloat16(), padding=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(convolve(x, w, torch.zeros(2), padding=1), lowered)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("case", ["max pooling", "group norm", "batch norm", "dropout"])
def test_convolutions_of_networks_are_replaced(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with the eager step in place of its graph."""
    seen: list[tuple[int, ...]] = []
    apply = grouped_conv._Convolution.apply

    def spy(x: Tensor, w: Tensor, *settings: Any) -> Tensor:
        seen.append(tuple(w.shape))
        result: Tensor = apply(x, w, *settings)  # type: ignore[no-untyped-call]
        return result

    monkeypatch.setattr(
        captured_steps,
        "TracedFunction",
        lambda step_all, example, compile=False: grouped_conv.with_convolutions(
            step_all, fused=False
        ),
    )
    changes, make_module = CASES[case]
    assert make_module is not None
    module = make_module()
    with monkeypatch.context() as patch:
        patch.setattr(grouped_conv._Convolution, "apply", spy)
        assert_captured_equals_sequential(
            small_experiment(EVERYTHING, changes, module=module), stack=64
        )
    assert {
        tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, nn.Conv2d)
    } <= set(seen)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("each", [None, 0])
def test_stacked_predictions(each: int | None) -> None:
    """All models on the same examples, or each on its own."""
    changes, make_module = CASES["max pooling"]
    assert make_module is not None
    task = small_experiment("fedavg", changes, module=make_module()).task
    models = ModelState(
        *(
            trees.map(lambda x: torch.stack([x, 0.5 * x, 2 * x]), tree)
            for tree in task.model.initial
        )
    )
    x = task.train.inputs(torch.arange(4) if each is None else torch.arange(12).reshape(3, 4))
    with torch.no_grad():
        ours, plain = (
            predict(task, models, x, each)
            for predict in (
                grouped_conv.with_convolutions(predict_logits_stacked),
                predict_logits_stacked,
            )
        )
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def test_batch_norms_of_networks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*values: Any, training: bool, **more: Any) -> Tensor:
        seen.append(training)
        return batch_norm(*values, training=training, **more)

    monkeypatch.setattr(grouped_conv, "stacked_batch_norm", spy)
    normalize: Any = nn.BatchNorm2d(3)
    grouped_conv.with_convolutions(normalize, fused=True)(
        draw("x", 2, 3, 4, 4, dtype=torch.float32)
    )  # type: ignore[call-arg, arg-type]
    assert seen == [True]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_channels_last_images(training: bool) -> None:
    """Mapped over a stack whose images have the channels last: torch's answer, its
    gradients, and what it remembers.
    """
    values = (
        draw("x", 3, 5, 4, 4, 6).permute(0, 1, 4, 2, 3),
        draw("mean", 3, 6),
        draw("var", 3, 6).exp(),
        draw("weight", 3, 6),
        draw("bias", 3, 6),
    )

    def loss(
        normalize: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor
    ) -> Any:
        mean, var = mean.clone(), var.clone()  # what is remembered is written in place
        y = normalize(x, mean, var, weight, bias, training, 0.3, 1e-3)
        return (
            y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
        ).square().sum(), (y, mean, var)

    ours = vmap(grad(partial(loss, grouped_conv.stacked_batch_norm), (0, 3, 4), has_aux=True))(
        *values
    )
    for client in range(3):
        theirs = grad(partial(loss, batch_norm), (0, 3, 4), has_aux=True)(
            *(value[client].contiguous() for value in values)
        )
        torch.testing.assert_close(
            pytree.tree_map(itemgetter(client), ours), theirs, rtol=1e-10, atol=1e-10
        )


def test_batch_norm_of_a_single_value() -> None:
    with pytest.raises(ValueError, match="more than one value a channel"):
        grouped_conv.stacked_batch_norm(torch.ones(1, 3, 1, 1), None, None, training=True)


@pytest.mark.usefixtures("everywhere")
def test_kernels_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a compiled step on CUDA: traced once, then called with other tensors."""
    trace = captured_steps.TracedFunction
    monkeypatch.setattr(
        captured_steps,
        "TracedFunction",
        lambda step_all, example, compile=False: trace(
            grouped_conv.with_convolutions(step_all, fused=False), example, compile
        ),
    )
    changes, make_module = CASES["max pooling"]
    assert make_module is not None
    assert_captured_equals_sequential(
        small_experiment("fedavg", {**changes, "data.partition": "iid"}, module=make_module()),
        stack=64,
    )
