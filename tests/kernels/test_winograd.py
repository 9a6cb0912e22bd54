"""Convolutions with fewer products equal torch's own, with their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from remanence.core.model import functionalize
from remanence.engines import compiled_eval
from remanence.engines.compiled_eval import CompiledEvalModel, compile_for_eval
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.kernels import trace, winograd
from remanence.kernels.winograd import to_channels_last
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import max_rel_diff, run_rounds, small_experiment, state_tree

library = torch.ops.aten
IMAGES = {"data.name": "synthetic(samples=64, classes=4, shape='2x10x9', test=0.25)"}


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Graphs run without being compiled, which would take long."""
    with without_compiler(), ExitStack() as patches:
        for module in (trace, compiled_eval):
            patches.enter_context(mock.patch.object(module, "compile_graph", lambda graph: graph))
        yield


def without_compiler() -> Any:
    return mock.patch.object(
        winograd,
        "call_compiled",
        lambda function, *tensors, **numbers: function(*tensors, **numbers),
    )


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def two_layers() -> nn.Module:
    """The second layer uses it, the first has too few channels."""
    return nn.Sequential(
        nn.Conv2d(2, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 3, 4),
    )


def operations(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


# -------------------------------------------------------------------------------------- the numbers


def test_four_outputs_by_hand() -> None:
    """The filter 1 2 3 along 1 ... 6 gives 1+4+9, 2+6+12, 3+8+15, 4+10+18. The filter is the
    polynomial 1 + 2t + 3t^2: 1 at 0, 6 at 1, 2 at -1 and 3 at infinity, up to a scale each; six
    products are enough.
    """
    sums = winograd.winograd_matrices(3)
    at_points = sums.filter @ [1.0, 2.0, 3.0]
    scale = sums.filter[:, 0]  # at each point but infinity the constant's coefficient is 1
    np.testing.assert_allclose((at_points / np.where(scale, scale, 1.0))[:3], [1.0, 6.0, 2.0])
    products = at_points * (sums.image @ [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert len(products) == 6
    np.testing.assert_allclose(sums.back @ products, [14.0, 20.0, 26.0, 32.0], rtol=1e-13)


@settings(max_examples=60, deadline=None)
@given(
    side=st.sampled_from([3, 5]),
    sizes=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(1, 3),
    zeros=st.integers(0, 4),
    has_bias=st.booleans(),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_it_equals_torchs_convolution(
    side: int,
    sizes: tuple[int, int],
    channels: tuple[int, int],
    batch: int,
    zeros: int,
    has_bias: bool,
    wanted: tuple[bool, bool, bool],
) -> None:
    zeros = min(zeros, side - 1)
    sizes = (max(sizes[0], side - 2 * zeros), max(sizes[1], side - 2 * zeros))
    x, w, bias = (
        draw(batch, channels[0], *sizes),
        draw(channels[1], channels[0], side, side),
        draw(channels[1]),
    )
    plain = ([1, 1], [zeros, zeros], [1, 1], False, [0, 0], 1)
    with without_compiler(), mock.patch.object(winograd, "MIN_SPEEDUP", 0.0):
        y = winograd.convolve(x, w, bias if has_bias else None, *plain)
        expected = torch.conv2d(x, w, bias if has_bias else None, padding=zeros)
        assert_close(y, expected)
        dy = draw(*y.shape)
        found = winograd.differentiate(dy, x, w, [channels[1]], *plain, wanted)
    right = library.convolution_backward(dy, x, w, [channels[1]], *plain, list(wanted))
    for mine, torchs, is_wanted in zip(found, right, wanted, strict=True):
        assert (mine is not None) == is_wanted
        if is_wanted:
            assert_close(mine, torchs)


def assert_close(found: Tensor, right: Tensor) -> None:
    assert found.shape == right.shape
    assert float((found - right).abs().max()) <= 1e-12 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("side", [3, 5])
def test_rounding_in_float32(side: int) -> None:
    x, w, dy = draw(8, 32, 16, 16), draw(64, 32, side, side), draw(8, 64, 16, 16)
    exact = [torch.conv2d(x, w, padding=side // 2), *_gradients(dy, x, w)]
    x, w, dy = x.float(), w.float(), dy.float()
    with without_compiler():
        found = [
            winograd.convolve_tiles(x, w, side // 2),
            *_gradients(dy, x, w, winograd.differentiate),
        ]
    for mine, right in zip(found, exact, strict=True):
        assert 0 < float((mine - right).std() / right.std()) < 1e-5


def _gradients(
    dy: Tensor, x: Tensor, w: Tensor, differentiate: Any = library.convolution_backward
) -> tuple[Tensor, Tensor]:
    padding = w.shape[2] // 2
    dx, dw, _ = differentiate(
        dy, x, w, None, [1, 1], [padding, padding], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return dx, dw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_agree_with_their_fake_versions(dtype: torch.dtype) -> None:
    """The compiler relies on the strides."""
    x, w, dy = (
        to_channels_last(draw(*shape, dtype=dtype))
        for shape in ((2, 3, 7, 6), (4, 3, 3, 3), (2, 4, 7, 6))
    )
    with without_compiler():
        torch.library.opcheck(winograd.convolve_tiles, (x, w, 1))
        torch.library.opcheck(winograd.differentiate_tiles, (dy, x, 3, 1))


# --------------------------------------------------------------------------------------- who has it


def is_left_to_torch(x: Tensor, w: Tensor, **other: Any) -> bool:
    usual = {
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": 1,
    }
    return winograd.convolve(x, w, None, **usual | other) is NotImplemented


def test_plain_convolutions_of_many_channels_use_it(uncompiled: None) -> None:
    assert not is_left_to_torch(draw(2, 64, 16, 16), draw(64, 64, 3, 3))
    assert not is_left_to_torch(
        draw(2, 64, 16, 16).float(), draw(64, 64, 5, 5).float(), padding=[2, 2]
    )


@pytest.mark.parametrize(
    "other",
    [
        {"stride": [2, 2]},
        {"padding": [3, 3]},
        {"padding": [0, 1]},
        {"dilation": [2, 2]},
        {"groups": 2},
        {"transposed": True},
    ],
)
def test_other_convolutions_are_left_to_torch(other: dict[str, Any]) -> None:
    assert is_left_to_torch(
        draw(2, 64, 16, 16), draw(64, 64 // other.get("groups", 1), 3, 3), **other
    )


@pytest.mark.parametrize(
    ("images", "filters", "dtype"),
    [
        ((2, 64, 16, 16), (64, 64, 3, 3), torch.bfloat16),
        ((2, 64, 16), (64, 64, 3), torch.float32),  # sound
        ((2, 64, 16, 16), (64, 64, 1, 1), torch.float32),
        ((2, 64, 16, 16), (64, 64, 5, 3), torch.float32),
        ((2, 3, 32, 32), (32, 3, 5, 5), torch.float32),  # the first layer of a CNN
        ((2, 6, 14, 14), (16, 6, 5, 5), torch.float32),  # the second of a LeNet
        ((2, 64, 5, 5), (64, 64, 3, 3), torch.float32),  # most of the tiles would stick out
    ],
)
def test_other_layers_are_left_to_torch(
    images: tuple[int, ...], filters: tuple[int, ...], dtype: torch.dtype
) -> None:
    sides = len(filters) - 2
    settings = {
        "stride": [1] * sides,
        "padding": [1] * sides,
        "dilation": [1] * sides,
        "output_padding": [0] * sides,
    }
    assert is_left_to_torch(draw(*images).to(dtype), draw(*filters).to(dtype), **settings)


# ----------------------------------------------------------------------------------------- in steps


def test_a_compiled_step_uses_it(uncompiled: None) -> None:
    experiment = small_experiment("fedavg", IMAGES, module=two_layers())
    oracle, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    engine = FastSequentialEngine(experiment.task, "compiled")
    state, _ = run_rounds(experiment, engine, 2)
    assert engine.degraded_reason == ""
    assert max_rel_diff(state_tree(state), state_tree(oracle))[1] <= TOLERANCE
    ((step,),) = engine.traced.values()
    done = operations(step.run)
    tiles = torch.ops.remanence
    assert [
        done.count(each)
        for each in (tiles.convolve_tiles.default, tiles.differentiate_tiles.default)
    ] == [2, 1]
    assert [
        done.count(each)
        for each in (library.convolution.default, library.convolution_backward.default)
    ] == [1, 1]


def test_compiled_evaluation_uses_it(uncompiled: None) -> None:
    x = draw(compiled_eval.ROWS["cpu"], 2, 10, 9)
    model = functionalize(two_layers(), x, 4, dtype=torch.float64)
    quick = compile_for_eval(model, True, [])
    assert isinstance(quick, CompiledEvalModel)
    assert_close(quick.predict(model.initial, x).logits, model.predict(model.initial, x).logits)
    (written,) = quick.traced.values()
    assert operations(written).count(torch.ops.remanence.convolve_tiles.default) == 1


def test_traced_steps_do_not_use_it() -> None:
    """Without the compiler the sums would cost more than the products they save."""
    experiment = small_experiment("fedavg", IMAGES, module=two_layers())
    engine = FastSequentialEngine(experiment.task, "captured")
    run_rounds(experiment, engine, 1)
    for step, *_ in engine.traced.values():
        assert not [each for each in operations(step.run) if "remanence" in str(each)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_workers_compile_it() -> None:
    experiment = small_experiment("fedavg", IMAGES, module=two_layers())
    oracle, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    with closing(ProcessEngine(experiment.task, 2, execution="compiled")) as engine:
        state, _ = run_rounds(experiment, engine, 2)
        assert engine.degraded_reason == ""
    assert max_rel_diff(state_tree(state), state_tree(oracle))[1] <= TOLERANCE
