"""Dropout that draws from keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from remanence.core import rng
from remanence.core.model import Model, functionalize
from remanence.core.model_layers import KeyedDropout
from remanence.core.rng import Key

CLASSES = 3


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def wrap_double(module: nn.Module, *shape: int, **options: bool) -> Model:
    return functionalize(module, rows(2, *shape), CLASSES, dtype=torch.float64, **options)


def key_of(number: int) -> Tensor:
    return Key(number).tensor()


def dropped(module: nn.Module, x: Tensor, key: Tensor) -> Tensor:
    """What a head that copies its input would see: the features."""
    model = functionalize(
        nn.Sequential(module, nn.Flatten(), nn.Linear(x[0].numel(), CLASSES)),
        x[:2],
        CLASSES,
        dtype=x.dtype,
    )
    return model.apply(*model.initial, x, key)[0].features.reshape(x.shape)


def test_dropout_zeroes_a_share_and_scales_the_rest() -> None:
    """p = 1/4 of 40 000: 10 000 zeros, deviation sqrt(40000 * 1/4 * 3/4) = 87; what stays is
    divided by 3/4.
    """
    x = torch.full((200, 200), 3.0, dtype=torch.float64)
    seen = dropped(nn.Dropout(0.25), x, key_of(0))
    assert set(seen.unique().tolist()) == {0.0, 4.0}
    assert abs(int((seen == 0).sum()) - 10_000) < 5 * 87


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d(), (50, 40, 3)),
        (nn.Dropout2d(), (50, 40, 2, 2)),
        (nn.Dropout3d(), (50, 40, 1, 2, 2)),
    ],
)
def test_channel_dropout_takes_whole_channels(layer: nn.Module, shape: tuple[int, ...]) -> None:
    seen = dropped(layer, torch.ones(shape), key_of(0)).reshape(*shape[:2], -1)
    assert torch.equal(seen.amin(dim=2), seen.amax(dim=2))
    zeros = int((seen[:, :, 0] == 0).sum())
    assert abs(zeros - 1000) < 5 * 22.4  # of 2000 channels a half; sqrt(2000 / 4) = 22.4
    assert set(seen.unique().tolist()) == {0.0, 2.0}


def test_masks_are_a_function_of_the_key() -> None:
    x = torch.ones(20, 20)
    first, again, other = (dropped(nn.Dropout(), x, key_of(number)) for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_same_mask_in_every_precision() -> None:
    masks = [
        dropped(nn.Dropout(), torch.ones(20, 20, dtype=dtype), key_of(3)) == 0
        for dtype in (torch.float32, torch.float64)
    ]
    assert torch.equal(*masks)
    # under autocast a layer is handed bf16, in which draws near 0.3 would be rounded across it
    layer = KeyedDropout(0.3, False, 0).train()
    wide = torch.ones(300, 300)
    assert torch.equal(layer(wide) == 0, layer(wide.bfloat16()) == 0)


def test_a_stack_draws_what_each_client_would() -> None:
    model = wrap_double(nn.Sequential(nn.Dropout(), nn.Linear(6, CLASSES)), 6)
    x, client_keys = rows(3, 5, 6), torch.stack([key_of(client) for client in range(3)])
    together = vmap(lambda x, key: model.apply(*model.initial, x, key)[0].features)(x, client_keys)
    for client in range(3):
        assert torch.equal(
            together[client],
            model.apply(*model.initial, x[client], client_keys[client])[0].features,
        )


def test_layers_draw_independently() -> None:
    model = wrap_double(
        nn.Sequential(nn.Dropout(), nn.Identity(), nn.Dropout(), nn.Linear(400, CLASSES)), 400
    )
    seen = model.apply(*model.initial, torch.ones(100, 400, dtype=torch.float64), key_of(0))[
        0
    ].features
    survivors = int((seen > 0).sum())
    # of 40 000 a quarter survives both; with one mask for two a half would
    assert abs(survivors - 10_000) < 5 * 87


def test_one_dropout_at_two_places_of_a_network_draws_from_keys_at_both() -> None:
    drop = nn.Dropout()
    model = wrap_double(nn.Sequential(drop, nn.Identity(), drop, nn.Linear(6, CLASSES)), 6)
    assert not any(isinstance(layer, nn.Dropout) for layer in model.train_module.modules())
    first, again = (model.apply(*model.initial, rows(5, 6), key_of(0))[0].logits for _ in range(2))
    assert torch.equal(first, again)


def test_dropout_is_off_when_judging_and_where_p_is_0() -> None:
    model, x = wrap_double(nn.Sequential(nn.Dropout(), nn.Linear(6, CLASSES)), 6), rows(5, 6)
    assert torch.equal(model.predict(model.initial, x).features, x)
    assert torch.equal(dropped(nn.Dropout(0.0), x, key_of(0)), x)


def test_dropping_everything_gives_zeros_and_no_nan() -> None:
    """torch.nn.Dropout(1) has a gradient of zero."""
    layer = KeyedDropout(1.0, False, 0)
    x = rows(2, 3).requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(layer(x), torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(x.grad, torch.zeros(2, 3, dtype=torch.float64))


def test_dropout_comes_back_in_an_ordinary_module() -> None:
    model = wrap_double(
        nn.Sequential(
            nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.2)), nn.Flatten(), nn.Linear(8, CLASSES)
        ),
        2,
        2,
        2,
    )
    module = model.to_module(model.initial)
    assert (type(module[0]), module[0].p) == (nn.Dropout, 0.3)
    assert (type(module[1][0]), module[1][0].p) == (nn.Dropout2d, 0.2)
    assert set(module.state_dict()) == {"3.weight", "3.bias"}  # no keys in what a user saves


def test_masks_do_not_repeat_what_augmentation_draws() -> None:
    """The step's key serves several purposes: dropout folds in a word of its own."""
    layer = KeyedDropout(0.5, False, 0).double()
    layer.dropout_key = key_of(4)
    mask = layer(torch.ones(1000, dtype=torch.float64)) == 0
    plain = rng.uniform(rng.fold_in(key_of(4), 0), (1000,), torch.float64) < 0.5
    assert not torch.equal(mask, plain)
