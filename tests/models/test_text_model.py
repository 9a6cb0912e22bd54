from __future__ import annotations

import pytest
import torch

from remanence.models import text


def test_numbers_by_hand() -> None:
    """Tokens 0 2 2 0:

    mean of (1, 0), (5, -4), (5, -4), (1, 0) is (3, -2)
    hidden = relu((3, -2) + (-1, 1)) = (2, 0)
    logits = (2*2 + 1, -2 + 0) = (5, -2)
    """
    model = text((4,), 2, width=2, vocabulary=3)
    values = {
        "embedding.weight": [[1.0, 0.0], [9.0, 9.0], [5.0, -4.0]],
        "hidden.weight": [[1.0, 0.0], [0.0, 1.0]],
        "hidden.bias": [-1.0, 1.0],
        "head.weight": [[2.0, 7.0], [-1.0, 7.0]],
        "head.bias": [1.0, 0.0],
    }
    model.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    tokens = torch.tensor([[0, 2, 2, 0], [2, 0, 0, 2]])
    assert model.features(tokens).tolist() == [[2.0, 0.0], [2.0, 0.0]]  # order does not matter
    assert model(tokens).tolist() == [[5.0, -2.0], [5.0, -2.0]]


def test_vocabulary_bounds_the_token_ids() -> None:
    model = text((1,), 2, vocabulary=11)
    assert model.vocabulary == 11
    assert model(torch.tensor([[10]])).shape == (1, 2)
    with pytest.raises(IndexError):
        model(torch.tensor([[model.vocabulary]]))


def test_defaults() -> None:
    """1000*32 embeddings, 32*32+32 hidden, 32*4+4 classifier: 32,000 + 1,056 + 132."""
    assert sum(p.numel() for p in text((20,), 4).parameters()) == 33_188
