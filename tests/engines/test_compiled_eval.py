"""Looking at rows by a network that was made quick, beside the network itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from remanence.core.model import functionalize
from remanence.engines import compiled_eval
from remanence.engines.compiled_eval import CompiledEvalModel, compile_for_eval
from remanence.models.lenet import lenet


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "rows",
    [1, compiled_eval.ROWS["cpu"] - 3, compiled_eval.ROWS["cpu"], compiled_eval.ROWS["cpu"] + 3],
)
def test_the_logits_are_the_same(compiled: bool, rows: int) -> None:
    x = torch.randn(rows + 1, 3, 16, 16, dtype=torch.float64)
    model = functionalize(lenet((3, 16, 16), 4), x, 4, dtype=torch.float64)
    problems: list[str] = []
    quick = compile_for_eval(model, compiled, problems)
    assert isinstance(quick, CompiledEvalModel)
    for some in (x, x[:0]):
        for mine, plain in zip(
            quick.predict(model.initial, some),
            model.predict(model.initial, some),
            strict=True,
        ):
            torch.testing.assert_close(mine, plain)
    assert None not in quick.traced.values()
    # a single row would be filled up with 49 more
    assert bool(quick.traced) == (compiled and rows > 1)
    assert problems == []


class Moody(nn.Module):
    """Cannot be traced: what it computes depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y if y.sum() > 0 else -y


def test_a_network_that_cannot_be_compiled_runs_eagerly() -> None:
    x = torch.randn(compiled_eval.ROWS["cpu"], 3)
    model, problems = functionalize(Moody(), x, 2), list[str]()
    quick = compile_for_eval(model, True, problems)
    assert isinstance(quick, CompiledEvalModel)
    assert torch.equal(
        quick.predict(model.initial, x).logits, model.predict(model.initial, x).logits
    )
    assert list(quick.traced.values()) == [None]
    quick.predict(model.initial, x)
    (problem,) = problems  # said once
    assert problem.startswith("evaluation could not be compiled (")


def test_batches_whose_examples_influence_each_other_are_not_cut() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 1),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    x = torch.randn(2 * compiled_eval.ROWS["cpu"], 1, 2, 2)
    model = functionalize(network, x, 2)
    quick = compile_for_eval(model, True, [])
    torch.testing.assert_close(
        quick.predict(model.initial, x).logits, model.predict(model.initial, x).logits
    )
