"""The round loop as a user sees it: refusals change nothing, abandoned rounds change nothing,
what is written is what happened.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remanence.config import Experiment, parse_experiment
from remanence.core import pytree
from remanence.core.engine import ClientWork, ConfusionCounts, Engine, PairCounts
from remanence.core.errors import InputError
from remanence.core.progress import LogProgress, NullProgress
from remanence.core.types import ModelState, Reply
from remanence.engines.base import BaseEngine
from remanence.engines.captured_steps import CapturedPhase
from remanence.engines.table import make_engine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.metrics.phase_decomposition import phase_decomposition
from remanence.results.checkpoint import CheckpointStore
from remanence.results.run import EXPERIMENT, METRICS, load
from remanence.rounds import loop
from remanence.rounds.client_sampling import sample_clients
from remanence.rounds.loop import start_run
from remanence.rounds.setup import first_state, make_round
from remanence.training.state import RunState


def config_of(**changes: Any) -> Experiment:
    keys = {
        "data.name": "synthetic(samples=400, classes=4, features=6)",
        "data.partition": "dirichlet_by_class(alpha=0.5, minimum=5)",
        "clients.count": 10,
        "rounds": 4,
        "engine": "sequential",
        "model": "mlp(hidden=8)",
        "precision": "fp64",
    }
    return parse_experiment({}, keys | changes)


class Tampered(BaseEngine):
    """An engine whose replies are tampered with before the gate."""

    name = "tampered"

    def __init__(self, inner: Engine, tamper: Any):
        super().__init__()
        self.inner, self.tamper = inner, tamper

    def train(self, work: ClientWork) -> Iterator[Reply]:
        for chunk in self.inner.train(work):
            for place in range(chunk.num_clients):
                yield from self.tamper(chunk.select(slice(place, place + 1)))

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        return self.inner.score(models, split, owners, time_step)

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        return self.inner.score_pairs(models, which, owners, split, time_step, examples)

    def predict_logits(self, models: ModelState, ids: torch.Tensor) -> torch.Tensor:
        return self.inner.predict_logits(models, ids)

    def close(self) -> None:
        self.inner.close()


def play(
    experiment: BuiltExperiment, engine: Engine, folder: Path
) -> tuple[RunState, list[dict[str, Any]]]:
    """All rounds -> the last state and the lines on the test set."""
    folder.mkdir()
    rounds, state = make_round(experiment, engine, folder), first_state(experiment)
    lines = []
    while state.round < experiment.config.rounds:
        state, line = rounds.run(state)
        lines.append(line)
    rounds.close()
    engine.close()
    return state, lines


def poison(reply: Reply) -> Iterator[Reply]:
    """Client 3 sends NaN in one weight."""
    if int(reply.client) == 3:
        params = pytree.clone(reply.params)
        next(iter(params.values())).view(-1)[0] = float("nan")
        reply = reply._replace(params=params)
    yield reply


def silence(reply: Reply) -> Iterator[Reply]:
    """Client 3 sends nothing."""
    if int(reply.client) != 3:
        yield reply


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
def test_one_nan_client_of_ten_leaves_the_model_of_the_nine(tmp_path: Path, engine: str) -> None:
    experiment = build(config_of())
    poisoned, lines = play(
        experiment, Tampered(make_engine(engine, experiment.task), poison), tmp_path / "poisoned"
    )
    without, _ = play(
        experiment, Tampered(make_engine(engine, experiment.task), silence), tmp_path / "without"
    )
    for name, value in without.server.model.params.items():
        assert torch.equal(poisoned.server.model.params[name], value)
        assert torch.isfinite(value).all()
    for line in lines:
        assert [(refusal["client"], refusal["code"]) for refusal in line["rejected"]] == [
            (3, "not-finite")
        ]
        assert line["replies"] == 9
        assert not line["abandoned"]


def test_too_few_replies_abandon_the_round(tmp_path: Path) -> None:
    experiment = build(config_of(**{"round.min_replies": 10}))
    state, lines = play(
        experiment, Tampered(make_engine("sequential", experiment.task), poison), tmp_path / "run"
    )
    assert all(line["abandoned"] and line["replies"] == 9 for line in lines)
    initial = experiment.task.model.initial
    assert all(
        torch.equal(state.server.model.params[name], value)
        for name, value in initial.params.items()
    )
    assert state.round == 4


def test_nobody_answers(tmp_path: Path) -> None:
    experiment = build(config_of(rounds=2))
    _, lines = play(
        experiment,
        Tampered(make_engine("sequential", experiment.task), lambda reply: iter(())),
        tmp_path / "run",
    )
    assert [(line["abandoned"], line["replies"], line["bytes_up"]) for line in lines] == [
        (True, 0, 0)
    ] * 2


def test_nobody_is_there(tmp_path: Path) -> None:
    """Clients that keep something between rounds, and all of them offline: the round is
    abandoned, not the run.
    """
    everybody = " ".join(map(str, range(10)))
    experiment = build(
        config_of(
            rounds=2, method="scaffold", **{"clients.availability": f"never(clients='{everybody}')"}
        )
    )
    state, lines = play(experiment, make_engine("sequential", experiment.task), tmp_path / "run")
    assert [(line["abandoned"], line["replies"]) for line in lines] == [(True, 0)] * 2
    assert all(
        torch.equal(state.server.model.params[name], value)
        for name, value in experiment.task.model.initial.params.items()
    )


def test_what_is_written(tmp_path: Path) -> None:
    run = start_run(
        config_of(**{"clients.sample": 0.5, "record.every": 2, "rounds": 5}), tmp_path / "run"
    )
    lines = run.metrics
    keys = (
        "round time_step model split accuracy per_class loss macro_f1 rejected bytes_up"
        " bytes_down seconds"
    )
    assert all(set(keys.split()) <= set(line) for line in lines)
    # rounds 1 and 3 are not evaluated; 2 and 4 are due, 5 is the last
    assert [(line["round"], line["split"], line["accuracy"] is None) for line in lines] == [
        (1, "test", True),
        (2, "test", False),
        (2, "valid", False),
        (3, "test", True),
        (4, "test", False),
        (4, "valid", False),
        (5, "test", False),
        (5, "valid", False),
    ]
    # mlp 6-8-4 has 6*8+8 + 8*4+4 = 92 numbers of 8 bytes; five clients; up also 8 bytes for the
    # number of examples
    assert {(line["bytes_down"], line["bytes_up"]) for line in lines} == {
        (5 * 92 * 8, 5 * (92 * 8 + 8))
    }
    assert run.metadata["parameters"] == 92
    assert run.finished
    assert run.config.clients.count == 10


def test_the_ledger_and_the_metrics_tell_the_same(tmp_path: Path) -> None:
    run = start_run(config_of(**{"record.local": True}), tmp_path / "run")
    rounds, per_class = run.ledger.per_class()
    shown = [line["per_class"] for line in run.metrics if line["split"] == "test"]
    np.testing.assert_allclose(per_class, np.array(shown, dtype=float), atol=1e-15)
    assert rounds.tolist() == [1, 2, 3, 4]
    local = run.ledger.select(moment="local", split="test")
    assert len(local) == 4 * 10
    for round in range(1, 5):
        assert local[local["round"] == round]["weight"].sum() == pytest.approx(1.0)
    # what a round starts from is what the round before ended with
    before, merged = (
        run.ledger.select(moment="before", split="test"),
        run.ledger.select(moment="merged", split="test"),
    )
    np.testing.assert_array_equal(before["correct"][1:], merged["correct"][:-1])


def test_clients_models_can_be_evaluated_less_often(tmp_path: Path) -> None:
    settings = {"record.local": True, "rounds": 7, "record.every": 2}
    run = start_run(config_of(**settings, **{"record.local_every": 3}), tmp_path / "run")
    # local models: round 1, every third, the last; the global model also every second
    for moment in ("before", "local"):
        rounds = run.ledger.select(moment=moment, split="test")["round"]
        assert sorted(set(rounds.tolist())) == [1, 3, 6, 7]
    merged = run.ledger.select(moment="merged", split="test")["round"]
    assert merged.tolist() == [1, 2, 3, 4, 6, 7]
    assert phase_decomposition(run.ledger).round.tolist() == [1, 3, 6, 7]
    always = start_run(config_of(**settings), tmp_path / "always")
    rounds, accuracy = run.curve()
    same = [place for place, round in enumerate(rounds) if round in (2, 4, 6, 7)]
    assert [accuracy[place] for place in same] == always.curve()[1]


def test_the_same_seed_gives_the_same_run_and_methods_share_their_draws(tmp_path: Path) -> None:
    first = start_run(config_of(), tmp_path / "a")
    again = start_run(config_of(), tmp_path / "b")
    other = start_run(config_of(seed=1), tmp_path / "c")
    assert first.curve() == again.curve()
    assert first.curve() != other.curve()
    a, b = build(config_of(method="fedavg")), build(config_of(method="fedprox(mu=0.5)+wsm"))
    from remanence.core.rng import Key

    for round in range(1, 20):
        key = Key(0).fold_in("round", round)
        one, other_one = (sample_clients(e, round, key) for e in (a, b))
        np.testing.assert_array_equal(one, other_one)
    np.testing.assert_array_equal(
        a.task.population.at(0).train.ids, b.task.population.at(0).train.ids
    )


def test_an_engine_that_cannot_do_what_was_asked_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Once, and the run keeps it; nothing else of what is written about the run changes."""

    def fail(*_: Any) -> None:
        raise ValueError("no such kernel\nand more")

    monkeypatch.setattr(CapturedPhase, "run", fail)
    config = config_of(engine="vectorized", execution="captured", rounds=3)
    start_run(config, tmp_path / "run", progress=LogProgress())
    reason = "steps could not be captured (no such kernel)"
    assert capsys.readouterr().err.count(f"slower than asked for: {reason}") == 1
    slow, plain = (
        load(tmp_path / "run"),
        start_run(config_of(engine="vectorized", execution="eager", rounds=3), tmp_path / "plain"),
    )
    assert slow.metadata["engine"] == f"vectorized: as asked; {reason}"
    assert slow.metadata | {"engine": ""} == plain.metadata | {"engine": ""}
    assert [line["loss"] for line in slow.metrics] == [line["loss"] for line in plain.metrics]


def test_a_second_reason_is_said_without_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    train = VectorizedEngine.train

    def complain(engine: VectorizedEngine, *rest: Any) -> Any:
        engine.degraded_reasons += ["one thing", "another"][
            len(engine.degraded_reasons) : len(engine.degraded_reasons) + 1
        ]
        return train(engine, *rest)

    monkeypatch.setattr(VectorizedEngine, "train", complain)
    start_run(
        config_of(engine="vectorized", execution="eager", rounds=3),
        tmp_path / "run",
        progress=LogProgress(),
    )
    logged = [
        line.partition(": ")[2]
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("slower than asked for")
    ]
    assert logged == ["one thing", "another"]
    assert load(tmp_path / "run").metadata["engine"] == "vectorized: as asked; one thing; another"


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="choose another --out"):
            start_run(config_of(rounds=1), tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    start_run(config_of(rounds=1), tmp_path / "run")
    with pytest.raises(InputError, match="remanence resume"):
        start_run(config_of(rounds=1), tmp_path / "run")
    start_run(config_of(rounds=2), tmp_path / "run", overwrite=True)
    assert (
        len(json.loads((tmp_path / "run" / METRICS).read_text().splitlines()[0])["per_class"]) == 4
    )


def test_bad_experiments_leave_no_folder(tmp_path: Path) -> None:
    for changes, words in [
        ({"clients.count": 4000}, "clients"),
        ({"model": "lenet"}, "model"),
        ({"data.name": "synthetic(samples=400, classes=4, features=6, color=3)"}, "color"),
        ({"engine": "vectorized", "model": "test_run:BatchNormNet"}, "batch norm"),
        ({"local.optimizer": "sgd(lr=-1)"}, "lr must be"),
        ({"method": "fedprox(mu=-1)"}, "mu must be"),
        ({"round.min_replies": 7, "clients.sample": 3}, "can never be reached"),
        ({"data.augment": ["crop"]}, "images"),
    ]:
        with pytest.raises(InputError, match=words):
            start_run(config_of(**changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()


class BatchNormNet(torch.nn.Module):
    """A user's network, named by its import path."""

    def __init__(self, classes: int, shape: tuple[int, ...]):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(shape[0], 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU()
        )
        self.out = torch.nn.Linear(5, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x))


def test_a_users_network_by_import_path(tmp_path: Path) -> None:
    run = start_run(config_of(model="test_run:BatchNormNet", engine="auto"), tmp_path / "run")
    assert run.config.engine == "sequential"  # batch norm with clients of different sizes
    assert "batch norm" in run.metadata["engine"]
    loaded = load(tmp_path / "run")
    assert loaded == run
    assert isinstance(run.model(), BatchNormNet)
    assert (tmp_path / "run" / EXPERIMENT).read_text().count("test_run:BatchNormNet") == 1


def test_the_memory_of_a_federation_does_not_grow_with_its_clients() -> None:
    """Everybody beside everybody else would be 64 MB; the rows themselves are half a megabyte."""
    config = parse_experiment(
        {},
        {
            "data.name": "synthetic(samples=18000, features=8)",
            "clients.count": 8_000,
            "clients.sample": 10,
            "rounds": 1,
        },
    )
    tracemalloc.start()
    try:
        experiment = build(config)
        first_state(experiment)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6
    assert experiment.topology is None


@pytest.mark.parametrize(
    ("seconds", "takes", "saved"),
    [
        (5, 0.125, [0, 5, 10, 12]),
        (5, 0.75, [0, 5, 12]),  # the second is due after 7.5 seconds
        (0, 0.75, list(range(13))),
    ],
)
def test_checkpoints_that_take_long_are_further_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, takes: float, saved: list[int]
) -> None:
    """A round takes a second, on a clock that only rounds and checkpoints advance."""
    clock, rounds = [0.0], list[int]()
    save = CheckpointStore.save

    def slow(store: CheckpointStore, state: RunState) -> None:
        save(store, state)
        rounds.append(state.round)
        clock[0] += takes

    class Second(NullProgress):
        def round(self, line: dict[str, Any]) -> None:
            clock[0] += 1

    monkeypatch.setattr(CheckpointStore, "save", slow)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    config = config_of(rounds=12, **{"checkpoint.seconds": seconds})
    start_run(config, tmp_path / "run", progress=Second())
    assert rounds == saved
