"""Attack, gate and aggregator together, on real replies: what moves a mean does not move a
robust aggregator.
"""

from __future__ import annotations

import pytest
import torch

from remanence.aggregators.robust import (
    geometric_median,
    krum,
    median,
    multi_krum,
    norm_clip,
    trimmed_mean,
)
from remanence.attacks import Adversary, parse_attacks
from remanence.core import pytree
from remanence.core.rng import Key
from remanence.core.slots import Part
from remanence.engines.sequential import SequentialEngine
from remanence.methods import fedavg
from remanence.rounds.federated import make_work
from remanence.rounds.replies import reply_schema
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import EQUAL, small_experiment
from remanence.training import gate, server_step


def merge(made: Part, attack: str) -> tuple[dict[str, torch.Tensor], float]:
    """The model after one round of six equal clients, and the longest way of an honest one."""
    experiment = small_experiment(made, EQUAL | {"clients.sample": 6})
    task, state = experiment.task, first_state(experiment)
    job = make_work(experiment, state, 1)
    adversary = Adversary.select(parse_attacks(attack), task.info.num_clients, Key(0))
    chunks = list(SequentialEngine(task).train(job))
    longest = max(float(pytree.squared_norm(chunk.delta(job.start)).sqrt()) for chunk in chunks)
    replies, _ = gate.validate_replies(
        adversary.tamper_replies(chunks, job), reply_schema(experiment, job)
    )
    assert replies is not None
    return server_step.update(
        task, state.server, replies, 1, job.key, job.optimizer_hparams, SequentialEngine(task)
    ).server.model.params, longest


def way(made: Part, attack: str) -> tuple[float, float]:
    """How far the model is from where it would be without the attack, and the longest way of an
    honest client.
    """
    (attacked, longest), (clean, _) = merge(made, attack), merge(made, "")
    return float(pytree.squared_norm(pytree.sub(attacked, clean)).sqrt()), longest


ROBUST = [
    median(),
    trimmed_mean(fraction=0.2),
    krum(),
    multi_krum(),
    geometric_median(),
    norm_clip(),
]


@pytest.mark.parametrize("made", ROBUST, ids=[made.name for made in ROBUST])
@pytest.mark.parametrize(
    "attack",
    ['scaling(clients="2", factor=1e6)', 'gaussian(clients="2", std=1000)'],
    ids=["scaling", "gaussian"],
)
def test_one_of_six_moves_a_mean_and_no_robust_aggregator(made: Part, attack: str) -> None:
    """The mean takes a sixth of a way of thousands; an aggregator stays within what honest
    clients do, two of their longest ways.
    """
    moved, longest = way(made, attack)
    assert moved <= 2 * longest
    if made.name == "median":
        assert way(fedavg(), attack)[0] > 1000 * longest


def test_a_nan_client_is_as_if_it_had_not_been_asked() -> None:
    """FedAvg with the NaN reply refused equals the mean of the five others, with their weights."""
    experiment = small_experiment("fedavg", {"clients.sample": 6})
    task, state = experiment.task, first_state(experiment)
    job = make_work(experiment, state, 1)
    chunks = list(SequentialEngine(task).train(job))
    adversary = Adversary.select(parse_attacks('nan(clients="3")'), 6, Key(0))
    replies, refused = gate.validate_replies(
        adversary.tamper_replies(chunks, job), reply_schema(experiment, job)
    )
    others, _ = gate.validate_replies(
        [chunk for chunk in chunks if 3 not in chunk.client.tolist()], reply_schema(experiment, job)
    )
    assert [(refusal.client, refusal.code) for refusal in refused] == [(3, "not-finite")]
    assert replies is not None
    assert others is not None
    attacked, clean = (
        server_step.update(
            task, state.server, some, 1, job.key, job.optimizer_hparams, SequentialEngine(task)
        ).server.model.params
        for some in (replies, others)
    )
    for name, value in clean.items():
        assert torch.equal(attacked[name], value)
