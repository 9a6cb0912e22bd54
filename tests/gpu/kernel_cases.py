"""The hand-written kernels on the GPU against torch in float64 on the CPU, alone and in steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu.cases import (
    Case,
    compare_runs,
    compare_with_sequential,
    counted,
    difference,
    on_cpu,
)
from kernels.test_winograd import is_left_to_torch
from torch import Tensor, nn
from torch.func import grad, vmap

from remanence.core import model
from remanence.core.model import init_module
from remanence.core.rng import Key
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.kernels import conv_channels_last, conv_per_client, grouped_conv, triton_conv
from remanence.testing.toy_task import all_slots_part, run_rounds, small_experiment

ONLY_GPU = "a CPU has no such precision"
# Of results relative to their largest value; bf16 keeps 8 bits, and tf32 multiplies 11.
CLOSE = {"float64": 1e-11, "float32": 1e-5, "tf32": 1e-2, "bfloat16": 5e-2}
# inputs, outputs, padding, bias
NARROW = (
    (2, 5, 0, False),
    (2, 5, 2, True),
    (3, 6, (1, 2), True),
    (6, 16, 0, True),
    (16, 32, 1, False),  # whole tiles of channels
)
# stride, padding, kernel
WIDE = ((1, 1, 3), (2, 1, 3), (2, 0, 1), (1, 0, 1), (1, 1, 1), (1, 2, 5))


def draw(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(Key(0).fold_in(name).generator().standard_normal(shape))


@contextlib.contextmanager
def precision(name: str) -> Iterator[torch.dtype]:
    """The dtype of a precision, with tf32 allowed or not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield torch.float32 if name == "tf32" else getattr(torch, name)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def gradients(convolve: Callable[..., Tensor], dims: Any, *values: Tensor) -> dict[str, Tensor]:
    """A stack's results, and the gradients of a loss that weighs outputs differently, so that none
    cancels.
    """

    def loss(*values: Tensor) -> Tensor:
        y = convolve(*values)
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device=y.device)
        return (y * weights.reshape(y.shape)).square().sum()

    each = vmap(grad(loss, tuple(range(len(values)))), dims)(*values)
    return {"y": vmap(convolve, dims)(*values)} | {str(place): x for place, x in enumerate(each)}


def relative(
    found: dict[str, Tensor], expected: dict[str, Tensor], close: float, what: str
) -> float:
    """The largest difference relative to the largest value of each tensor."""
    scale = {name: x.abs().max() for name, x in expected.items()}
    left, right = (
        {name: x.double().cpu() / scale[name] for name, x in each.items()}
        for each in (found, expected)
    )
    return difference(left, right, close, what)


def triton_convolutions(name: str, device: str) -> float:
    """Narrow layers: 3 models with 2 images of 7x6 each."""
    largest = 0.0
    for inputs, outputs, padding, bias in NARROW:
        values = (
            draw("x", 3, 2, inputs, 7, 6),
            draw("w", 3, outputs, inputs, 3, 3),
            *([draw("b", 3, outputs)] if bias else []),
        )

        def convolve(*values: Tensor, by: Any, padding: Any = padding) -> Tensor:
            return by(values[0], values[1], *values[2:], padding=padding)  # type: ignore[no-any-return]

        expected = gradients(partial(convolve, by=torch.conv2d), 0, *values)
        with precision(name) as dtype, counted(triton_conv, "conv_weight_grad") as calls:
            ours = [value.to(device, dtype) for value in values]
            found = gradients(partial(convolve, by=grouped_conv.convolve), 0, *ours)
        assert calls, "the Triton kernels were not reached"
        what = f"{inputs} to {outputs} channels with padding {padding}"
        largest = max(largest, relative(found, expected, CLOSE[name], what))
    return largest


def channels_last_convolutions(name: str, device: str) -> float:
    """Wide layers: 4 models, each with 5 images of its own or all with the same; every layer once
    as a grouped convolution and once as one for each model.
    """
    largest = 0.0
    for stride, padding, kernel in WIDE:
        for shared in (False, True):
            x, w = (
                draw("x", *(() if shared else (4,)), 5, 64, 8, 7),
                draw("w", 4, 72, 64, kernel, kernel),
            )
            sizes, dims = ((stride, stride), (padding, padding)), (None if shared else 0, 0)
            expected = gradients(
                lambda x, w, sizes=sizes: torch.conv2d(x, w, None, *sizes), dims, x, w
            )
            for deep in (64, 512):
                with precision(name) as dtype, mock.patch.object(conv_channels_last, "DEEP", deep):
                    found = gradients(
                        lambda x, w, sizes=sizes: conv_channels_last.convolve(x, w, *sizes),
                        dims,
                        x.to(device, dtype),
                        w.to(device, dtype),
                    )
                what = f"stride {stride}, padding {padding}, kernel {kernel}, deep from {deep}"
                largest = max(largest, relative(found, expected, CLOSE[name], what))
    return largest


def streams(name: str, device: str) -> float:
    """What streams write side by side is what one convolution after the other gives. cuDNN writes
    into a given tensor in some precisions only.
    """
    with precision(name) as dtype:
        x, w = (
            conv_channels_last._to_nhwc(draw(each, *shape).to(device, dtype))
            for each, shape in (("x", (6, 8, 64, 16, 16)), ("w", (6, 64, 64, 3, 3)))
        )
        y = conv_per_client.convolve(x, w, (2, 2), (1, 1))
        dy = conv_channels_last._to_nhwc(torch.ones_like(y))
        dx, dw = (
            conv_per_client.differentiate(dy, x, w, (2, 2), (1, 1), of_images)
            for of_images in (True, False)
        )
    largest = 0.0
    for client in range(6):
        images, weights = (
            values[client].double().cpu().contiguous().requires_grad_() for values in (x, w)
        )
        plain = torch.conv2d(images, weights, None, 2, 1)
        plain.sum().backward()
        assert images.grad is not None
        assert weights.grad is not None
        expected = {"y": plain.detach(), "dx": images.grad, "dw": weights.grad}
        found = {"y": y[client], "dx": dx[client], "dw": dw[client]}
        largest = max(largest, relative(found, expected, CLOSE[name], f"client {client}"))
    return largest


def batch_norms(training: bool, device: str) -> float:
    """Images with the channels last, mapped over a stack: results, gradients, and statistics."""
    values = (
        draw("x", 3, 5, 4, 4, 6).permute(0, 1, 4, 2, 3),
        draw("weight", 3, 6),
        draw("bias", 3, 6),
        draw("mean", 3, 6),
        draw("var", 3, 6).exp(),
    )

    def loss(normalize: Any, x: Tensor, weight: Tensor, bias: Tensor, *kept: Tensor) -> Any:
        mean, var = (value.clone() for value in kept)  # they are written in place
        y = normalize(x, mean, var, weight, bias, training, 0.3, 1e-3)
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device=y.device)
        return (y * weights.reshape(y.shape)).square().sum(), (y, mean, var)

    def answers(normalize: Any, *values: Tensor) -> dict[str, Tensor]:
        first, second = grad(partial(loss, normalize), (0, 1, 2), has_aux=True)(*values)
        return {str(place): x for place, x in enumerate((*first, *second))}

    ours = vmap(partial(answers, grouped_conv.stacked_batch_norm))(*(x.to(device) for x in values))
    largest = 0.0
    for client in range(3):
        alone = (value[client].contiguous() for value in values)
        expected = answers(nn.functional.batch_norm, *alone)
        found = {name: x[client] for name, x in ours.items()}
        largest = max(largest, relative(found, expected, 1e-10, f"client {client}"))
    return largest


def no_tiles_on_gpu(device: str) -> float:
    """The convolutions with fewer products are for a CPU."""
    x, w = (
        draw(name, *shape).to(device)
        for name, shape in (("x", (2, 64, 16, 16)), ("w", (64, 64, 3, 3)))
    )
    assert is_left_to_torch(x, w)
    return 0.0


# ----------------------------------------------------------------------------------------- in steps


class NarrowNet(nn.Module):
    """3x12x12 images through two layers of few channels, viewed as rows."""

    channels = (6, 16)

    def __init__(self) -> None:
        super().__init__()
        first, second = self.channels
        self.first, self.second = nn.Conv2d(3, first, 3), nn.Conv2d(first, second, 3, padding=1)
        self.head = nn.Linear(second * 25, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        logits: Tensor = self.head(torch.relu(self.second(x)).view(len(x), -1))
        return logits


class WideNet(NarrowNet):
    """The same with channels enough for the kernels of wide layers."""

    channels = (64, 64)


def viewing(network: type[nn.Module], method: Any, device: str, **changes: Any) -> BuiltExperiment:
    keys = {
        "data.name": "synthetic(samples=60, classes=4, shape='3x12x12', test=0.25)",
        "data.partition": "dirichlet(alpha=0.5, samples=10)",
        "clients.count": 4,
        "clients.sample": 3,
        "device": device,
    }
    return small_experiment(method, {**keys, **changes}, module=init_module(network, Key(0)))


def narrow_steps(name: str, execution: str, device: str) -> float:
    """The Triton kernels in captured and compiled steps; `sequential` runs in float32."""

    def make(where: str) -> BuiltExperiment:
        chosen = "fp32" if where == "cpu" else name
        return viewing(NarrowNet, "scaffold+wsm", where, precision=chosen)

    # SCAFFOLD divides by the learning rate, so that products of 11 bits leave more than 1e-3
    tolerance = {"fp32": 1e-5, "tf32": 1e-2}[name]
    with counted(triton_conv, "conv_weight_grad") as calls:
        largest = compare_with_sequential(make, device, execution, rounds=2, tolerance=tolerance)
    assert bool(calls) == (device != "cpu"), "the Triton kernels were not reached"
    return largest


def wide_steps(execution: str, device: str) -> float:
    """A network with `x.view(len(x), -1)`, whose compiled steps store images channels last."""
    make = partial(viewing, WideNet, "scaffold+wsm")
    assert make("cpu").task.model.uses_view
    with (
        counted(conv_channels_last, "convolve") as calls,
        counted(model, "ViewAsReshape") as views,
    ):
        largest = compare_with_sequential(make, device, execution, rounds=2)
    assert views, "the network was not called with reshape"
    assert bool(calls) == (device != "cpu" and execution == "compiled")
    return largest


def kernels_outside_steps(device: str) -> float:
    """Hooks and evaluation of a stack use the kernels where its steps, eager ones, do not."""
    make = partial(viewing, NarrowNet, all_slots_part(), precision="fp32")
    reference, experiment = make(device="cpu"), make(device=device)
    expected = run_rounds(reference, SequentialEngine(reference.task), 2)
    engine = VectorizedEngine(experiment.task, 64, "eager")
    engine.use_kernels = True  # as on a GPU
    with counted(triton_conv, "conv_forward") as calls:
        found = run_rounds(experiment, engine, 2)
    assert calls, "no hook reached the kernels"
    assert engine.use_kernels, engine.degraded_reason
    return compare_runs(found, expected, 1e-5)


def kernels_that_fail(device: str) -> float:
    """For a second derivative the kernels have no rule: torch computes it, once with a reason, and
    everything after it.
    """
    make = partial(viewing, NarrowNet, all_slots_part(), precision="fp32")
    reference, experiment = make(device="cpu"), make(device=device)
    engine = VectorizedEngine(experiment.task, 64, "eager")
    engine.use_kernels = True  # as on a GPU

    def slope(w: Tensor, x: Tensor) -> Tensor:
        first: Tensor = grad(lambda w: torch.conv2d(x, w).pow(3).sum())(w)
        return first.square().sum()

    curve = vmap(grad(slope))
    w, x = draw("w", 3, 5, 2, 3, 3), draw("x", 3, 2, 2, 7, 6)
    with counted(triton_conv, "conv_forward") as tried:
        found = engine.with_kernels(curve)(w.float().to(device), x.float().to(device))
    assert tried, "the kernels were not tried"
    assert engine.degraded_reason.startswith("convolutions are left to torch (")
    relative({"w": found}, {"w": curve(w, x)}, 1e-4, "a second derivative")
    with counted(triton_conv, "conv_forward") as tried:
        after = run_rounds(experiment, engine, 2)
    assert not tried, "the kernels were tried again"
    expected = run_rounds(reference, SequentialEngine(reference.task), 2)
    return compare_runs(after, expected, 1e-5)


def low_precision(execution: str, device: str) -> float:
    """A round in bf16 moves the model as a round in float32 does, up to rounding."""
    moved = []
    for where, name, engine_of in (
        ("cpu", "fp32", SequentialEngine),
        (device, "bf16", lambda task: VectorizedEngine(task, 64, execution)),
    ):
        experiment = viewing(NarrowNet, "fedavg", where, precision=name)
        engine = engine_of(experiment.task)
        state, _ = run_rounds(experiment, engine, 1)
        assert engine.degraded_reason == "", engine.degraded_reason
        start = on_cpu(experiment.task.model.initial.params)
        after = on_cpu(state.server.model.params)
        moved.append(torch.cat([(after[name] - start[name]).flatten() for name in start]))
    plain, low = moved
    error = float((low - plain).norm() / plain.norm())
    assert 0 < error <= 0.1, f"the model moved differently, by {error:.1e}"
    return error


def cases() -> Iterator[Case]:
    for name in ("float32", "tf32", "bfloat16"):
        needs = "" if name == "float32" else ONLY_GPU
        check = partial(triton_convolutions, name)
        yield Case(f"Triton convolutions, {name}", check, 20, needs, dtype=name)
    for name in CLOSE:
        needs = ONLY_GPU if name in ("tf32", "bfloat16") else ""
        check = partial(channels_last_convolutions, name)
        yield Case(f"channels-last convolutions, {name}", check, 5, needs, dtype=name)
        check = partial(streams, name)
        yield Case(f"convolutions by streams, {name}", check, 3, needs, dtype=name)
    for training in (True, False):
        title = "training" if training else "evaluation"
        yield Case(f"batch norm, channels last, {title}", partial(batch_norms, training))
    yield Case("no tiles on a GPU", no_tiles_on_gpu, 1, "tiles are for a CPU")
    for execution in ("captured", "compiled"):
        seconds = 30 if execution == "compiled" else 10
        for name in ("fp32", "tf32"):
            needs = "" if name == "fp32" else ONLY_GPU
            check = partial(narrow_steps, name, execution)
            yield Case(f"narrow layers, {name}, {execution}", check, seconds, needs, dtype=name)
        check = partial(low_precision, execution)
        yield Case(f"a round in bf16, {execution}", check, seconds, ONLY_GPU, dtype="bfloat16")
    for execution in ("eager", "captured", "compiled"):
        seconds = 30 if execution == "compiled" else 5
        check = partial(wide_steps, execution)
        yield Case(f"wide layers of a network with view, {execution}", check, seconds)
    yield Case("kernels outside the steps", kernels_outside_steps, 10, dtype="float32")
    yield Case("kernels that fail outside the steps", kernels_that_fail, 10, dtype="float32")
