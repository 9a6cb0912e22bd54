"""What cannot be made pure is refused, with the cure."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.core.model import Model, functionalize, init_module
from remanence.core.rng import Key

CLASSES = 3


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fresh(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    return init_module(build, Key(seed))


def wrap_double(module: nn.Module, *shape: int, **options: bool) -> Model:
    return functionalize(module, rows(2, *shape), CLASSES, dtype=torch.float64, **options)


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


class Wrapped(nn.Module):
    """Returns its logits in some wrapping."""

    def __init__(self, wrap: Callable[[Tensor], object]):
        super().__init__()
        self.wrap, self.out = wrap, nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.out(x))


class Slashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.ModuleDict({"a/b": nn.Linear(5, CLASSES)})

    def forward(self, x: Tensor) -> Tensor:
        return self.out["a/b"](x)


REFUSALS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch norm without momentum": (
        lambda: nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, CLASSES)
        ),
        (5,),
        r"layer 1 \(BatchNorm1d\) has momentum=None.*give it a number such as 0.1",
    ),
    "a lazy layer": (
        lambda: nn.Sequential(nn.LazyLinear(CLASSES)),
        (5,),
        r"layer 0 \(LazyLinear\) has no shape yet: run the model once",
    ),
    "a lazy norm": (
        lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(5, CLASSES)),
        (5,),
        r"layer 0 \(LazyBatchNorm1d\) has no shape yet: run the model once",
    ),
    "an LSTM with dropout": (
        lambda: Sequence(nn.LSTM(5, 4, 2, batch_first=True, dropout=0.1)),
        (6, 5),
        r"layer layer \(LSTM\) has dropout inside.*set its dropout to 0 and put an"
        r" nn.Dropout after it",
    ),
    "a separator in a name": (
        Slashed,
        (5,),
        "parameter out.a/b.weight has a / in its name.*rename that module",
    ),
    "no tensor": (
        lambda: Wrapped(lambda logits: {"loss": 1}),
        (5,),
        "model Wrapped: the model returns dict without a tensor of logits: wrap it in a module",
    ),
    "no parameters": (
        lambda: nn.Sequential(nn.ReLU()),
        (CLASSES,),
        "the model has no parameters: there is nothing to train",
    ),
    "too many outputs": (
        lambda: nn.Sequential(nn.Linear(5, 4)),
        (5,),
        r"model Sequential gives outputs of shape \(2, 4\) for 2 examples, but the data"
        r" have 3 classes: its last layer must have 3 outputs",
    ),
    "outputs for every position": (
        lambda: nn.Linear(5, CLASSES),
        (6, 5),
        r"gives outputs of shape \(2, 6, 3\)",
    ),
    "the wrong input": (
        lambda: nn.Sequential(nn.Linear(4, CLASSES)),
        (5,),
        r"model Sequential does not accept this data's examples of shape 5"
        r" \(torch.float64\): .*; choose a model that fits, or resize the data",
    ),
    "an image where a table is wanted": (
        lambda: nn.Sequential(nn.Linear(64, CLASSES)),
        (1, 8, 8),
        "examples of shape 1x8x8",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_made_pure_is_refused_with_the_cure(case: str) -> None:
    build, shape, complaint = REFUSALS[case]
    random = torch.get_rng_state()
    module = fresh(build)
    with pytest.raises(InputError, match=complaint) as caught:
        functionalize(module, rows(2, *shape), CLASSES, dtype=torch.float64)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_recurrent_network_without_dropout_is_fine() -> None:
    model = functionalize(
        fresh(lambda: Sequence(nn.GRU(5, 4, 2, batch_first=True))),
        rows(2, 6, 5),
        CLASSES,
        dtype=torch.float64,
    )
    assert model.predict(model.initial, rows(3, 6, 5)).logits.shape == (3, CLASSES)


def test_a_lazy_network_that_has_run_is_fine() -> None:
    module = nn.Sequential(nn.LazyLinear(CLASSES))
    module(torch.zeros(2, 5))
    assert set(wrap_double(module, 5).initial.params) == {"0.weight", "0.bias"}
