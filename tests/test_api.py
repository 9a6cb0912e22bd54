"""The Python API: names, objects, and finished runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import remanence as rem
from remanence.data import DATASETS
from remanence.losses import wsm
from remanence.methods import fedprox

QUICK: dict[str, Any] = {"rounds": 2, "clients": 4, "engine": "sequential", "quiet": True}


def test_five_lines() -> None:
    run = rem.run(method="fedavg+wsm", data="digits", **QUICK)
    assert run.metrics[-1]["round"] == 2
    assert run.accuracy == run.curve()[1][-1] != run.metrics[-1]["accuracy"]
    assert set(run.per_class) == {f"{digit}" for digit in range(10)}
    assert run.model()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert len(run.ledger.to_pandas()) == 2 * 2 * 10  # rounds x splits x classes


def test_an_experiment_file_changed_by_flags_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "exp.toml"
    file.write_text(
        'method = "fedprox(mu=0.5)"\nrounds = 7\n[local]\nbatch_size = 8\n[clients]\ncount = 4\n'
    )
    run = rem.run(file, rounds=1, set={"local.batch_size": 16}, engine="sequential", quiet=True)
    assert (run.config.method, run.config.rounds, run.config.local.batch_size) == (
        "fedprox(mu=0.5)",
        1,
        16,
    )


def test_method_objects_keep_their_numbers(tmp_path: Path) -> None:
    by_object = rem.run(method=fedprox(mu=0.3) + wsm(), out=tmp_path / "a", **QUICK)
    text = "fedprox(mu=0.3)+wsm(with_validation=false)"
    by_name = rem.run(method=text, out=tmp_path / "b", **QUICK)
    assert by_object.config.method == by_name.config.method == text
    assert by_object.curve() == by_name.curve()


def test_a_module_and_a_dataset_of_ones_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(400, 6)).astype(np.float32))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    before = [p.clone() for p in net.parameters()]
    run = rem.run(
        model=net, data=data, out=tmp_path / "r", partition="iid", lr=0.5, **{**QUICK, "rounds": 15}
    )
    assert run.curve()[1][-1] > 0.9
    # the user's module is left as it was
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    with pytest.raises(rem.InputError, match="model object"):
        run.model()
    trained = run.model(net)
    logits = trained((x - x.mean(0)) / x.std(0))
    assert (logits.argmax(1) == (x[:, 0] > 0).long()).float().mean() > 0.9
    more = rem.resume(tmp_path / "r", rounds=16, model=net, data=data, quiet=True)
    assert isinstance(more, rem.RunResult)
    assert more.metrics[-1]["round"] == 16


@pytest.mark.parametrize(
    "data",
    [
        "tokens(samples=300, classes=3, length=12, vocabulary=50)",
        "synthetic(samples=300, classes=3, features=4)",
    ],
)
def test_tokens_and_tables(data: str) -> None:
    run = rem.run(data=data, **QUICK)
    assert run.config.model in ("text", "mlp")
    assert run.metrics[-1]["accuracy"] is not None


def test_a_vocabulary_that_is_too_small_is_found_at_once() -> None:
    with pytest.raises(rem.InputError, match=r"text\(vocabulary="):
        rem.run(
            data="tokens(samples=300, classes=3, length=12, vocabulary=50)",
            model="text(vocabulary=10)",
            **QUICK,
        )


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(rem.InputError, match="no folder"):
        rem.load(tmp_path / "nothing")
    with pytest.raises(rem.InputError, match="neither a run nor a comparison"):
        rem.load(tmp_path)


def test_unknown_options_are_named() -> None:
    with pytest.raises(rem.InputError, match="did you mean rounds"):
        rem.run(round=3)
    with pytest.raises(AttributeError):
        _ = rem.nothing


def test_an_unknown_column_is_named() -> None:
    run = rem.run(quiet=True, rounds=1, clients=2, engine="sequential", model="mlp(hidden=4)")
    assert run.curve(value="attack_success") == ([], [])  # not of this run
    with pytest.raises(rem.InputError, match="unknown column 'acuracy': did you mean accuracy"):
        run.curve(value="acuracy")


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, remanence, remanence.cli.main; print('torch' in sys.modules, 'sklearn' in"
        " sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split() == ["False", "False"]


def test_the_tables_and_the_names_agree() -> None:
    assert set(dir(rem)) >= {"run", "compare", "load", "report", "resume"}
    assert all(getattr(rem, name) is not None for name in rem.__all__)
    assert all(callable(source) for source in DATASETS.values())
