from __future__ import annotations

import torch

from remanence.models import mlp


def test_two_hidden_layers_have_the_published_count() -> None:
    """McMahan et al. state 199,210 for their "2NN": 784*200+200 = 157,000; 200*200+200 =
    40,200; 200*10+10 = 2,010.
    """
    assert sum(p.numel() for p in mlp((1, 28, 28), 10, hidden="200,200").parameters()) == 199_210


def test_numbers_by_hand() -> None:
    """With x = (1, -2):

    hidden = relu([[1, 1], [2, -1]] x + (0, 1)) = relu((-1, 5)) = (0, 5)
    logits = [[1, 1], [3, -1]] (0, 5) + (1, 0) = (6, -5)
    """
    model = mlp((2,), 2, hidden="2")
    values = {
        "body.0.weight": [[1.0, 1.0], [2.0, -1.0]],
        "body.0.bias": [0.0, 1.0],
        "head.weight": [[1.0, 1.0], [3.0, -1.0]],
        "head.bias": [1.0, 0.0],
    }
    model.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    assert model.features(torch.tensor([[1.0, -2.0]])).tolist() == [[0.0, 5.0]]
    assert model(torch.tensor([[1.0, -2.0]])).tolist() == [[6.0, -5.0]]


def test_no_hidden_layer_is_logistic_regression() -> None:
    model = mlp((2, 3), 4, hidden="")
    assert [tuple(p.shape) for p in model.parameters()] == [(4, 6), (4,)]
    x = torch.arange(6.0).reshape(1, 2, 3)
    assert model.features(x).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_a_number_for_hidden_means_one_layer() -> None:
    assert [p.shape[0] for p in mlp((3,), 2, hidden=7).parameters()] == [7, 7, 2, 2]
