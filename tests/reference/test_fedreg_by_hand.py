"""The reference of FedReg against numbers computed by hand.

The network has logits (a x, -a x) for a vector a of two numbers and an input x [2], so that p =
sigmoid(2 a x) is the probability of label 0, and the gradient of an example's loss with respect to
a, taken by one half of the weights, is (p - share of label 0) x. Everything starts at a = (1, 0):
there the loss of label 0 grows towards (-1, 0), that of label 1 towards (1, 0).
"""

from __future__ import annotations

import math

import pytest
import torch
from reference.fedreg import Memory, ascend, between, local_step, make_memory, without
from torch import Tensor, nn


def make_net() -> nn.Module:
    net = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    return net


def example(x: tuple[float, float], label: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([x], dtype=torch.float64), torch.tensor([label])


def memory_of(x: tuple[float, float], label: int) -> Memory:
    return make_memory(make_net(), *example(x, label), 0.1, 0.001, 1)


def weights(a: tuple[float, float]) -> Tensor:
    return torch.tensor([*a, *(-number for number in a)], dtype=torch.float64)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def step(
    x: tuple[float, float],
    label: int,
    memory: Memory,
    lr: float = 1.0,
    at: tuple[float, float] = (1.0, 0.0),
) -> list[float]:
    """a after one step from `at`, where the round started at (1, 0)."""
    w_old = weights((1.0, 0.0))
    w = local_step(make_net(), weights(at), w_old, *example(x, label), memory, lr, 0.5, 0.5)
    assert torch.allclose(w[:2], -w[2:], rtol=0, atol=1e-15)
    return w[:2].tolist()


def test_examples_climb_ten_times() -> None:
    # ten steps of .1 along the first axis, downwards for label 0; the second has no gradient
    for label, wanted in ((0, [0.0, 5.0]), (1, [2.0, 5.0])):
        climbed = ascend(make_net(), *example((1.0, 5.0), label), 0.1)
        assert climbed[0].tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_memory_of_an_example() -> None:
    x, y = example((1.0, 5.0), 1)
    memory = make_memory(make_net(), x, y, 0.1, 0.001, 1)
    assert memory.pseudo[0].tolist() == pytest.approx([2.0, 5.0])
    assert memory.perturbed[0].tolist() == pytest.approx([1.01, 5.0])
    assert memory.soft_labels[0].tolist() == pytest.approx([sigmoid(4), sigmoid(-4)])
    assert memory.labels.tolist() == [1]
    assert x[0].tolist() == [1.0, 5.0], "the client's own example must stay as it is"


def test_a_way_keeps_what_lowers_a_loss() -> None:
    way = torch.tensor([3.0, 4.0])
    assert without(way, torch.tensor([2.0, 0.0])).tolist() == [0.0, 4.0]
    assert without(way, torch.tensor([-2.0, 0.0])).tolist() == [3.0, 4.0]
    assert without(way, torch.zeros(2)).tolist() == [3.0, 4.0]


def test_a_point_between_two_models() -> None:
    assert between(torch.tensor(5.0), torch.tensor(1.0), 0.25).item() == 2.0


def test_a_step_against_the_pseudo_example_is_projected() -> None:
    # The step alone is c (1, 1) with c = lr sigmoid(-2). The pseudo example is (0, 1), of which the
    # received model says (.5, .5); any way along the second axis raises its loss, so (c, 0) is
    # left. That lowers the loss of the perturbed example (.99, 1), label 0, and stays.
    found = step((1.0, 1.0), 0, memory_of((1.0, 1.0), 0), lr=0.5)
    assert found == pytest.approx([1 + 0.5 * sigmoid(-2), 0.0], abs=1e-12)


def test_a_step_against_both_examples_is_projected_twice() -> None:
    # The step on (1, 1) with label 1 is -c (1, 1), c = sigmoid(2). The pseudo example (0, 2) leaves
    # (-c, 0); it raises the loss of the perturbed (.99, 2), label 0, whose gradient has the
    # direction of -(.99, 2).
    c, square = sigmoid(2), 0.99**2 + 4
    found = step((1.0, 1.0), 1, memory_of((1.0, 2.0), 0))
    wanted = [1 - c + c * 0.99 * 0.99 / square, c * 0.99 * 2 / square]
    assert found == pytest.approx(wanted, abs=1e-12)


def test_a_later_step_is_taken_between_the_models() -> None:
    # From a = (3, 0) the gradient is taken at (2, 0). The pseudo example (0, 0), which is met
    # up to rounding, has no gradient, and the way lowers the loss of the perturbed one.
    found = step((1.0, 0.0), 0, memory_of((1.0, 0.0), 0), at=(3.0, 0.0))
    assert found == pytest.approx([3 + sigmoid(-4), 0.0], abs=1e-12)


def test_the_whole_way_is_projected_not_the_step() -> None:
    # From a = (1, 1) the step on (1, 0) moves along the first axis alone, and yet the way of the
    # steps before along the second axis is taken back.
    found = step((1.0, 0.0), 0, memory_of((1.0, 1.0), 0), at=(1.0, 1.0))
    assert found == pytest.approx([1 + sigmoid(-2), 0.0], abs=1e-12)
