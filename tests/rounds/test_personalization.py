"""Personal models: who has them, what they are made of, that they are scored on their owners'
rows, and that they change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.small_task import make_experiment, make_net
from torch import Tensor, nn

from remanence.core.compose_checks import check
from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import InputError
from remanence.core.progress import LogProgress
from remanence.core.slots import Method, Part, Phase
from remanence.core.types import ModelState
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses import wsm
from remanence.methods import fedavg, fedprox
from remanence.methods.fedbabu import fedbabu
from remanence.methods.fedbn import fedbn
from remanence.methods.frozen_head import frozen_head
from remanence.results.run import Run
from remanence.rounds import personalization
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.personalization import finetune_task
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import (
    EQUAL,
    as_method,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)
from remanence.training.task import TrainingTask

TUNED = fedbabu(finetune_epochs=1)
EVERYONE = np.arange(6)


def run(
    folder: Path,
    method: Part | Method,
    changes: dict[str, Any] | None = None,
    module: nn.Module | None = None,
) -> Run:
    config = small_experiment(method, {"rounds": 2} | (changes or {}), module=module).config
    return start_run(config, folder, method=as_method(method), module=module)


def personal_lines(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["model"] == "personal"]


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def tune(experiment: BuiltExperiment) -> ModelState:
    """The personal models of all clients before the first round."""
    return personalization.make_models(
        experiment,
        personalization.make_finetune_engine(experiment),
        first_state(experiment),
        EVERYONE,
    )


def test_fine_tuning_runs_as_the_settings_say() -> None:
    changes = EQUAL | {"engine": "vectorized", "execution": "captured"}
    tuner = personalization.make_finetune_engine(small_experiment(TUNED, changes))
    assert isinstance(tuner, VectorizedEngine)
    assert tuner.execution == "captured"


def test_why_fine_tuning_is_slower_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Complaining(SequentialEngine):
        def __init__(self, task: TrainingTask):
            super().__init__(task)
            self.degraded_reasons = ["fine-tuning is slow"]

    monkeypatch.setattr(
        personalization, "make_finetune_engine", lambda e: Complaining(finetune_task(e.task))
    )
    config = small_experiment(TUNED, {"rounds": 2}).config
    found = start_run(config, tmp_path / "run", method=as_method(TUNED), progress=LogProgress())
    assert capsys.readouterr().err.count("slower than asked for: fine-tuning is slow") == 1
    assert found.metadata["engine"].endswith("fine-tuning is slow")


def test_only_methods_that_make_personal_models_have_them(tmp_path: Path) -> None:
    for number, method in enumerate((fedavg(), frozen_head(), fedprox() + wsm())):
        plain = run(tmp_path / str(number), method)
        assert personal_lines(plain) == []
        assert len(plain.ledger.select(moment="personal")) == 0


def test_local_buffers_make_personal_models(tmp_path: Path) -> None:
    """`local.buffers = "local"` leaves the global model with its initial statistics: the
    clients' own models are those to look at.
    """
    done = run(tmp_path / "run", fedavg(), EQUAL | {"local.buffers": "local"}, batch_norm_net())
    assert [line["round"] for line in personal_lines(done)] == [1, 2]


def test_the_line_is_the_sum_of_the_ledger(tmp_path: Path) -> None:
    """Each model on its owner's validation rows alone; the global model's validation line has
    the same rows all together.
    """
    done = run(tmp_path / "run", TUNED)
    valid = small_experiment(TUNED).task.population.at(0).valid
    holders = np.flatnonzero(valid.sizes)
    assert 1 < len(holders) < 6, "somebody has no validation rows and is left out"
    for line in personal_lines(done):
        records = done.ledger.select(moment="personal", split="valid")
        records = records[records["round"] == line["round"]]
        assert records["model"].tolist() == records["owner"].tolist() == holders.tolist()
        assert records["total"].sum(axis=1).tolist() == valid.sizes[holders].tolist()
        assert line["accuracy"] == records["correct"].sum() / len(valid.ids)
        assert line["loss"] == pytest.approx(records["loss"].sum() / len(valid.ids), abs=1e-14)
        assert set(line) == set(done.metrics[0])


@pytest.mark.parametrize(("limit", "wanted"), [(0, 0), (2, 2), (100, 5)])
def test_at_most_so_many_clients(tmp_path: Path, limit: int, wanted: int) -> None:
    done = run(tmp_path / "run", TUNED, {"record.personal": limit, "rounds": 1})
    holders = np.flatnonzero(small_experiment(TUNED).task.population.at(0).valid.sizes)
    assert len(holders) == 5
    assert done.ledger.select(moment="personal")["model"].tolist() == holders[:wanted].tolist()
    assert len(personal_lines(done)) == (limit > 0)


def test_only_at_recorded_rounds_and_only_with_validation_rows(tmp_path: Path) -> None:
    assert [
        line["round"]
        for line in personal_lines(run(tmp_path / "few", TUNED, {"record.every": 2, "rounds": 5}))
    ] == [2, 4, 5]
    assert personal_lines(run(tmp_path / "none", TUNED, {"data.validation": 0.0})) == []


@pytest.mark.parametrize("method", [TUNED, fedbn() + TUNED])
def test_the_training_does_not_notice(method: Part | Method) -> None:
    """All tensors of the run have the same bits with and without personal models."""
    trees = []
    for limit in (0, 100):
        experiment = small_experiment(
            method, EQUAL | {"record.personal": limit}, module=batch_norm_net()
        )
        trees.append(state_tree(run_rounds(experiment, SequentialEngine(experiment.task), 2)[0]))
    assert max_rel_diff(*trees)[1] == 0


def test_engines_agree_and_a_resumed_run_repeats_the_lines(tmp_path: Path) -> None:
    method = fedbn() + TUNED
    runs = {
        engine: run(
            tmp_path / engine, method, EQUAL | {"engine": engine, "workers": 2}, batch_norm_net()
        )
        for engine in ("sequential", "vectorized", "processes")
    }
    oracle = runs["sequential"].ledger.select(moment="personal")
    for other in runs.values():
        records = other.ledger.select(moment="personal")
        assert np.array_equal(records["correct"], oracle["correct"])
        assert records["loss"] == pytest.approx(oracle["loss"], abs=1e-12)
    broken = run(tmp_path / "broken", method, EQUAL | {"rounds": 1}, batch_norm_net())
    resumed = resume_run(broken.folder, rounds=2, method=as_method(method), module=batch_norm_net())
    assert without_time(resumed.metrics) == without_time(runs["sequential"].metrics)
    assert np.array_equal(resumed.ledger.records, runs["sequential"].ledger.records)


def test_a_personal_model_has_the_client_s_own_part() -> None:
    """FedBN alone: the server's model, the normalization of those who took part, the initial
    one of those who did not.
    """
    experiment = small_experiment(fedbn(), EQUAL, module=batch_norm_net())
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    models = personalization.make_models(
        experiment, personalization.make_finetune_engine(experiment), state, EVERYONE
    )
    assert len(state.client_states) == 4
    for client in range(6):
        mine = (
            state.client_states[client]["personal"]
            if client in state.client_states
            else {"params": {}, "buffers": {}}
        )
        for found, server, own in zip(
            models, state.server.model, (mine["params"], mine["buffers"]), strict=True
        ):
            for name, value in {**server, **own}.items():
                assert torch.equal(found[name][client], value)


def test_fine_tuning_starts_from_the_client_s_own_part() -> None:
    """With a rate of almost nothing the fine-tuned weights are those it began with; the
    statistics of batch norm move on all the same.
    """
    experiment = small_experiment(
        fedbn() + TUNED, EQUAL | {"local.optimizer": "sgd(lr=0.5)"}, module=batch_norm_net()
    )
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    still = small_experiment(
        fedbn() + TUNED, EQUAL | {"local.optimizer": "sgd(lr=1e-13)"}, module=batch_norm_net()
    )
    clients = np.array(sorted(state.client_states))
    models = personalization.make_models(
        still, personalization.make_finetune_engine(still), state, clients
    )
    for place, client in enumerate(clients.tolist()):
        mine = state.client_states[client]["personal"]
        assert torch.allclose(
            models.params["norm.weight"][place], mine["params"]["norm.weight"], rtol=0, atol=1e-11
        )
        assert not torch.allclose(
            mine["params"]["norm.weight"],
            state.server.model.params["norm.weight"],
            rtol=0,
            atol=1e-4,
        )
        steps = (
            models.buffers["norm.num_batches_tracked"][place]
            - mine["buffers"]["norm.num_batches_tracked"]
        )
        assert int(steps) == 2  # 6 rows at batch 4


def test_fine_tuning_keeps_the_loss_and_drops_what_serves_the_aggregation() -> None:
    plain = tune(small_experiment(TUNED))
    assert (
        max_rel_diff(
            tune(small_experiment(TUNED + fedprox(mu=5.0) + frozen_head())).params, plain.params
        )[1]
        == 0
    )
    assert max_rel_diff(tune(small_experiment(TUNED + wsm())).params, plain.params)[1] > 1e-3


def test_a_phase_may_accept_and_sees_its_own_part() -> None:
    """A fine-tuning that is kept only where a number of its part says so."""

    def keep(ctx: Context, old: ModelState, new: ModelState, ops: ClientOps) -> Tensor:
        return ctx.hyper["keep"] > 0

    for number in (0.0, 1.0):
        picky = Part("picky", hyper={"keep": number}, personalize=Phase(steps=2, accept=keep))
        for engine in ("sequential", "vectorized"):
            experiment = small_experiment(picky, {"engine": engine})
            start, models = experiment.task.model.initial.params, tune(experiment).params
            assert all(
                torch.equal(models[name][0], value) == (number == 0)
                for name, value in start.items()
            )


def test_where_only_the_fine_tuning_cannot_be_stacked_it_is_looped(tmp_path: Path) -> None:
    """The first step of a round takes 4 rows of everybody; the last of an epoch does not, and
    padding would enter batch norm's statistics.
    """
    changes = {
        "engine": "vectorized",
        "local.steps": 1,
        "local.epochs": 0,
        "data.partition": "quantity(power=1.2, minimum=8)",
        "rounds": 1,
    }
    experiment = make_experiment(TUNED, "conv", **changes)
    tuner = personalization.make_finetune_engine(experiment)
    assert tuner is not None
    assert tuner.name == "sequential"
    assert (
        len(
            personal_lines(
                start_run(
                    experiment.config, tmp_path / "run", method=TUNED, module=make_net("conv")
                )
            )
        )
        == 1
    )


def test_two_ways_to_personalize_are_refused() -> None:
    other = Part("other", personalize=Phase(epochs=1))
    with pytest.raises(
        InputError,
        match="fedbabu and other cannot be combined: both replace the fine-tuning of personal"
        " models; keep one of them",
    ):
        check(fedbabu() + other)
