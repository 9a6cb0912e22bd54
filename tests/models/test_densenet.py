"""densenet121: its size against the published network's, its shapes, and that layers see all
that came before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remanence.core.errors import InputError
from remanence.models.densenet import densenet121


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_as_many_parameters_as_published() -> None:
    """DenseNet-121 for ImageNet has 7,978,856. Without its stem (7x7x3x64 = 9,408 and a norm of
    128) and its classifier (1,025 x 1,000) 6,944,320 are left for blocks, transitions and the last
    norm; ours adds a stem of 3x3x3x64 = 1,728 and a classifier of 1,025 x 10.
    """
    published = 7_978_856 - 9_408 - 128 - 1_025 * 1_000
    with torch.device("meta"):
        assert (
            count(densenet121((3, 32, 32), 10))
            == published + 3 * 3 * 3 * 64 + 1_025 * 10
            == 6_956_298
        )
        assert count(densenet121((1, 28, 28), 10)) == published + 3 * 3 * 64 + 1_025 * 10


def test_121_layers() -> None:
    """A stem, (6 + 12 + 24 + 16) layers of two convolutions, three transitions, one classifier:
    1 + 116 + 3 + 1.
    """
    with torch.device("meta"):
        model = densenet121((3, 32, 32), 10)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 121


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 9, 11)])
def test_widths_and_maps(shape: tuple[int, ...]) -> None:
    """Growth 4, two layers a block: 8 -> 16 | 8 -> 16 | 8 -> 16 | 8 -> 16 channels at the end;
    three halvings, rounded up.
    """
    model = densenet121(shape, 5, growth=4, blocks="2,2,2,2").eval()
    x = torch.zeros(2, *shape)
    assert model.body(x).shape == (2, 16, -(-shape[1] // 8), -(-shape[2] // 8))
    assert model.features(x).shape == (2, 16)
    assert model(x).shape == (2, 5)


def test_a_layer_puts_its_output_beside_its_input() -> None:
    model = densenet121((1, 9, 9), 2, growth=3, blocks="2,1,1,1").eval()
    maps = torch.randn(1, 6, 9, 9, generator=torch.Generator().manual_seed(0))
    after = model.body.block0_0(maps)
    assert after.shape[1] == 9
    assert torch.equal(after[:, :6], maps)


def test_it_trains_on_a_batch_of_one() -> None:
    model = densenet121((1, 9, 9), 2, growth=2, blocks="1,1,1,1").train()
    model(torch.randn(1, 1, 9, 9, generator=torch.Generator().manual_seed(0))).sum().backward()


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((1, 8, 8), {}, "too small for three halvings"),
        ((3, 32, 32), {"blocks": "6,12"}, "names 2 blocks, not 4"),
        ((3, 32, 32), {"growth": 0}, "growth=0 is below 1"),
        ((10,), {}, "not an image"),
    ],
)
def test_what_cannot_be_built_is_a_sentence(
    shape: tuple[int, ...], options: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        densenet121(shape, 10, **options)  # type: ignore[arg-type]
