"""Random, DAC, HAST, Oracle and Local against explicit loops over clients, over a drift
boundary; alone and with other parts.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from methods.client_models_task import (
    CASES,
    assert_as_the_reference,
    assert_moved,
    assert_stacks_agree,
    client_models,
    gap_of,
    make_world,
    model_of,
)
from methods.drifting_task import (
    CLASSES,
    CLIENTS,
    OPTIMIZERS,
    make_experiment,
    play_states,
    read_rows,
)
from reference import decentralized
from reference.federated import re_weighted_softmax
from reference.gossip import Loss, Rows, State, Training, clone, cross_entropy, equip
from torch import nn

from remanence.core.errors import InputError
from remanence.core.types import ModelState
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.testing.toy_task import max_rel_diff, state_tree


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_two_time_steps_equal_explicit_loops(case: str, optimizer: str) -> None:
    text, method = CASES[case]
    experiment = make_experiment(text, optimizer)
    history = decentralized.play(make_world(experiment, optimizer), method)
    states, lines = play_states(experiment, SequentialEngine(experiment.task))
    assert_moved(history)
    assert_as_the_reference(states, history, method.name in ("dac", "hast"))
    assert_stacks_agree(experiment, states)
    for line, wanted in zip(lines, history[1:], strict=True):
        assert line["replies"] == CLIENTS
        assert line["offline"] == line["early_stopped"] == 0
        used = [
            (k, j)
            for what in ("chosen", "chosen_similar")
            for k, peers in wanted[what].items()
            for j in peers
        ]
        cluster = experiment.task.population.at(wanted["step"]).cluster
        alike = [cluster[k] == cluster[j] for k, j in used]
        assert line["same_cluster_share"] == (
            pytest.approx(sum(alike) / len(alike)) if used else None
        )


def test_tuning_is_kept_by_some_and_refused_by_others() -> None:
    """Else the cases above would say little of what is kept."""
    experiment = make_experiment(CASES["hast"][0])
    history = decentralized.play(make_world(experiment, "sgd"), CASES["hast"][1])
    kept = [kept for record in history[1:] for kept in record["kept"].values()]
    assert {True, False} == set(kept)


@pytest.mark.parametrize("case", ["random", "hast"])
def test_batch_norm_is_mixed_like_weights(case: str) -> None:
    """Means and variances are averaged with the peers', counters take the largest; the
    classifier's mix leaves them alone.
    """
    text, method = CASES[case]
    same_size = {"drift.concepts": "swap"}
    experiment = make_experiment(text, kind="batch norm", **same_size)
    history = decentralized.play(make_world(experiment, "sgd", "batch norm"), method)
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    assert_as_the_reference(states, history, case == "hast")
    assert_stacks_agree(experiment, states)


# --------------------------------------------------------------------------------- with other parts


def test_hast_with_wsm() -> None:
    """The label shares of both time steps weigh the softmax, in training and in fine-tuning;
    what is kept is judged by plain cross-entropy.
    """
    experiment = make_experiment("hast(peers=2, tau=3, depth=1, finetune_epochs=2)+wsm")
    train = read_rows(experiment)("train")

    def loss(step: int, client: int) -> Loss:
        counts = np.bincount(train(step, client)[1], minlength=CLASSES).tolist()
        return lambda logits, labels: re_weighted_softmax(logits, labels, counts)

    history = decentralized.play(make_world(experiment, "sgd", loss=loss), CASES["hast"][1])
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    assert_moved(history)
    assert_as_the_reference(states, history, True)
    assert_stacks_agree(experiment, states)


class Proximal:
    """Training with FedProx's spring, by torch's own SGD: towards the mixed model, in
    fine-tuning too.
    """

    def __init__(self, mu: float):
        self.mu, self.anchor = mu, {}

    def __call__(
        self,
        net: nn.Module,
        state: State,
        batches: list[Rows],
        how: Training,
        round: int,
        names: list[str] | None = None,
        loss: Loss = cross_entropy,
    ) -> State:
        if names is None:
            self.anchor = clone(state)
        local = equip(net, state).train()
        trained = {
            name: weight
            for name, weight in local.named_parameters()
            if names is None or name in names
        }
        optimizer = torch.optim.SGD(
            trained.values(),
            lr=how.rate_of(round),
            momentum=how.momentum,
            weight_decay=how.weight_decay,
        )
        for x, y in batches:
            optimizer.zero_grad()
            springs = [
                ((weight - self.anchor[name]) ** 2).sum() for name, weight in trained.items()
            ]
            (loss(local(x), y) + self.mu / 2 * torch.stack(springs).sum()).backward()
            optimizer.step()
        return clone(local.state_dict())


def test_hast_with_fedprox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decentralized, "train", Proximal(0.5))
    experiment = make_experiment("hast(peers=2, tau=3, depth=1, finetune_epochs=2)+fedprox(mu=0.5)")
    history = decentralized.play(make_world(experiment, "sgd"), CASES["hast"][1])
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    assert_moved(history)
    assert_as_the_reference(states, history, True)
    assert_stacks_agree(experiment, states)


def test_depth_0_is_random_bit_by_bit() -> None:
    hast, random = (
        play_states(e, SequentialEngine(e.task))[0]
        for e in map(make_experiment, (CASES["hast, no layer"][0], CASES["random"][0]))
    )
    for mine, wanted in zip(hast, random, strict=True):
        for name in (
            "models",
            "best",
            "best_loss",
            "rounds_since_best",
            "early_stopped",
            "peer_counts",
        ):
            a, b = getattr(client_models(mine), name), getattr(client_models(wanted), name)
            assert (
                max_rel_diff(
                    {"x": a._asdict() if isinstance(a, ModelState) else a},
                    {"x": b._asdict() if isinstance(b, ModelState) else b},
                )[1]
                == 0
            )


def test_processes_agree_too() -> None:
    experiment = make_experiment(
        CASES["hast"][0], **{"clients.availability": "random(offline=0.4)"}
    )
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    with closing(ProcessEngine(experiment.task, workers=2)) as engine:
        others, _ = play_states(experiment, engine)
    for mine, wanted in zip(others, states, strict=True):
        assert max_rel_diff(state_tree(mine), state_tree(wanted))[1] <= 1e-12


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("random(peers=0)", "random: peers must be at least 1, not 0"),
        ("hast(peers=-2)", "hast: peers must be at least 1, not -2"),
        ("dac(tau=-1)", "dac: tau must be a number of at least 0"),
        ("hast(depth=-1)", "hast: depth must be a number of at least 0, not -1"),
        ("hast(peers=2)+fedadam", "fedadam works at a server, and hast has none"),
        ("random(peers=2)+dac(peers=2)", "both replace the choice of peers"),
        ("local+centralized", "centralized works at a server, and local has none"),
    ],
)
def test_refusals(method: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        make_experiment(method)


def test_a_graph_that_leaves_someone_alone_lets_it_train_alone(tmp_path: Any) -> None:
    (tmp_path / "graph.csv").write_text("0,1\n1,2\n2,3\n3,4\n")
    experiment = make_experiment(
        "random(peers=2)", **{"peers.topology": f"edges(path='{tmp_path / 'graph.csv'}')"}
    )
    alone = make_experiment("local")
    mine, wanted = (play_states(e, SequentialEngine(e.task))[0][-1] for e in (experiment, alone))
    assert (
        gap_of(model_of(client_models(mine).models, 5), model_of(client_models(wanted).models, 5))
        == 0
    )
    assert (
        gap_of(model_of(client_models(mine).models, 4), model_of(client_models(wanted).models, 4))
        > 0.01
    )
