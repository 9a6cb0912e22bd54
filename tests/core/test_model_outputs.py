"""Networks that return more than logits, that draw random numbers of their own, or end in softmax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remanence as rem
from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.core.model import Model, functionalize, init_module
from remanence.core.rng import Key
from remanence.experiment.build import build
from remanence.experiment.hints import find_hints

CLASSES = 3
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any] = lambda out: out, noise: Any = None):
        super().__init__()
        self.wrap, self.noise, self.out = wrap, noise, nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Any:
        if self.noise is not None:
            x = self.noise(x, training=self.training)
        return self.wrap(self.out(x))


class Attention(nn.Module):
    """A transformer with torch's default dropout of 0.1, also within its attention."""

    def __init__(self, dropout: float = 0.1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(dim=1))


def fresh(build: Callable[[], nn.Module]) -> nn.Module:
    return init_module(build, Key(0))


def wrap(module: nn.Module, example: Tensor = X) -> Model:
    return functionalize(module, example, CLASSES)


WRAPPINGS: dict[str, Callable[[Tensor], Any]] = {
    "a tuple": lambda out: (out, None),
    "a list": lambda out: [out],
    "a dictionary": lambda out: {"loss": None, "logits": out, "hidden": out * 2},
    "a dictionary without that name": lambda out: {"loss": None, "scores": out},
    "an object": lambda out: SimpleNamespace(logits=out, hidden=None),
}


@pytest.mark.parametrize("case", WRAPPINGS)
def test_logits_are_found_in(case: str) -> None:
    plain, wrapped = wrap(fresh(Net)), wrap(fresh(lambda: Net(WRAPPINGS[case])))
    key = torch.zeros((), dtype=torch.int64)
    for model in (plain, wrapped):
        assert not model.draws_unkeyed
    assert torch.equal(
        wrapped.predict(wrapped.initial, X).logits, plain.predict(plain.initial, X).logits
    )
    assert torch.equal(
        wrapped.apply(*wrapped.initial, X, key)[0].logits,
        plain.apply(*plain.initial, X, key)[0].logits,
    )


def test_a_network_may_return_more_in_training() -> None:
    class TwoFaced(Net):
        def forward(self, x: Tensor) -> Any:
            return (self.out(x), x) if self.training else self.out(x)

    model = wrap(fresh(TwoFaced))
    key = torch.zeros((), dtype=torch.int64)
    assert model.apply(*model.initial, X, key)[0].logits.shape == (4, CLASSES)


NOISES: dict[str, Any] = {
    "functional dropout": lambda x, training: functional.dropout(x, 0.5, training),
    "a random activation": lambda x, training: functional.rrelu(x, 0.1, 0.9, training),
    "alpha dropout": lambda x, training: functional.alpha_dropout(x, 0.5, training),
}


@pytest.mark.parametrize("case", NOISES)
def test_other_draws_follow_from_the_key(case: str) -> None:
    model = wrap(fresh(lambda: Net(noise=NOISES[case])))
    assert model.draws_unkeyed
    state = torch.get_rng_state()

    def out(key: int) -> Tensor:
        return model.apply(*model.initial, X, torch.tensor(key))[0].logits

    assert torch.equal(out(10), out(10))
    assert not torch.equal(out(10), out(12))
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_of_a_stack_are_refused() -> None:
    model = wrap(fresh(lambda: Net(noise=NOISES["functional dropout"])))
    with pytest.raises(InputError, match=r"use engine=sequential, or layers of nn\.Dropout"):
        torch.func.vmap(lambda key: model.apply(*model.initial, X, key)[0].logits)(torch.arange(3))


SEQUENCES = (torch.randn(60, 6, 4), torch.arange(60) % CLASSES)


def run_attention(folder: Path, **changes: Any) -> rem.RunResult:
    return rem.run(
        model=fresh(Attention), data=SEQUENCES, out=folder, quiet=True, partition="iid",
        **({"clients": 3, "rounds": 2, "epochs": 2} | changes),
    )  # fmt: skip


def test_attention_with_dropout_trains_sequentially_and_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    whole = run_attention(tmp_path / "whole", rounds=3)
    assert whole.config.engine == "sequential"
    assert "attention with dropout" in whole.metadata["engine"]
    run_attention(tmp_path / "part", rounds=2)
    again = rem.resume(
        tmp_path / "part", rounds=3, model=fresh(Attention), data=SEQUENCES, quiet=True
    )
    assert isinstance(again, rem.RunResult)
    first, second = (
        run.model(module=fresh(Attention)).state_dict() for run in (whole, again)
    )  # fmt: skip
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(InputError, match="engine vectorized cannot train this model"):
        run_attention(tmp_path / "vectorized", engine="vectorized")
    assert not (tmp_path / "vectorized").exists()
    with pytest.raises(InputError, match="set that dropout to 0"):
        run_attention(tmp_path / "private", method="fedavg+dp_sgd(noise=1, clip=1)")


def test_what_is_unusual_about_a_network_is_said() -> None:
    changes = {"clients.count": 3, "data.partition": "iid"}
    config = parse_experiment({}, changes)
    source = rem.from_dataset(SEQUENCES)

    def hints(module: nn.Module) -> str:
        return " ".join(find_hints(build(config, module=module, source=source)))

    assert "attention_dropout=0" in hints(fresh(Attention))
    assert hints(fresh(lambda: Attention(0.0))) == ""
    ends = nn.Sequential(nn.Flatten(), nn.Linear(24, CLASSES), nn.Softmax(dim=1))
    assert "ends in softmax" in hints(ends)
    assert "softmax" not in hints(nn.Sequential(nn.Flatten(), nn.Linear(24, CLASSES)))


def test_a_wrapped_network_is_evaluated(tmp_path: Path) -> None:
    made = fresh(lambda: Net(WRAPPINGS["an object"]))
    data = (torch.randn(60, 5), torch.arange(60) % CLASSES)
    run = rem.run(
        model=made, data=data, rounds=1, clients=2, partition="iid", out=tmp_path / "r", quiet=True
    )
    from remanence.exports import evaluate

    source = rem.from_dataset(data)
    found = evaluate(run, source, module=fresh(lambda: Net(WRAPPINGS["an object"])))
    assert found["accuracy"] is not None
