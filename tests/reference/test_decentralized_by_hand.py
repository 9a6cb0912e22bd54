"""The references of Random, DAC, HAST, Oracle and Local against numbers computed by hand.

Most tests use the network of `one_number`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import decentralized
from reference.dac import (
    chances,
    first_similarities,
    similarity_of,
    temperature,
    two_hop,
    update_similarities,
)
from reference.decentralized import Method, Scenario, play, update_early_stopping
from reference.gossip import (
    Rows,
    State,
    Training,
    mean_error,
    mean_loss,
    mix,
    names_of_last_layers,
    train,
)
from reference.one_number import PLAIN, make_net, number, rows, softplus, state_of
from torch import Tensor, nn


def numbers(states: Sequence[State]) -> Any:
    return pytest.approx([number(state) for state in states])


def make_scenario(**changes: Any) -> Scenario:
    """Three clients with 1, 2 and 1 examples of label 0, whose models after the warm-up are 1, 2 and
    3; no client trains after that.

    From u = 0 both labels have probability 1/2: the gradient of one example (x, label 0) is (-x/2,
    x/2), so a step at rate 1 leads to u = x/2. Uniform draws select the next client first, weighted
    draws the previous one.
    """
    labels = [(0,), (0, 0), (0,)]
    given: dict[str, Any] = {
        "net": make_net(),
        "clients": 3,
        "steps": 1,
        "rounds": 1,
        "batches": lambda round, client, phase: (
            [rows(0, x=2.0 * (client + 1))] if phase == "warmup" else []
        ),
        "train": lambda step, client: rows(*labels[client]),
        "valid": lambda step, client: rows(0),
        "choose_uniform": lambda round, client, candidates, count: sorted(
            candidates, key=lambda j: (j - client) % 3
        )[:count],
        "choose_weighted": lambda round, client, candidates, p, count: sorted(
            candidates, key=lambda j: (client - j) % 3
        )[:count],
        "training": PLAIN,
    }
    return Scenario(**given | changes)


def two_layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).double()


# one client


def test_a_step_of_sgd_with_momentum() -> None:
    # Step 1 from u = 0 on (x = 2, label 0): gradient -1, u = 1. Step 2: p(label 1) = 1 / (1 + e^4),
    # gradient -2p, velocity .5 * (-1) - 2p, u = 1.5 + 2p.
    trained = train(
        make_net(), state_of(0.0), [rows(0, x=2.0)] * 2, Training("sgd", lr=1.0, momentum=0.5), 1
    )
    assert number(trained) == pytest.approx(1.5 + 2 / (1 + math.exp(4)))


def test_the_first_step_of_adam() -> None:
    # The unbiased moments of one gradient g are g and g^2, so the step is lr * g / (|g| + eps);
    # here g = -1 and eps = 1.
    trained = train(
        make_net(), state_of(0.0), [rows(0, x=2.0)], Training("adam", lr=0.1, eps=1.0), 1
    )
    assert number(trained) == pytest.approx(0.1 / 2)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimizers_are_torchs(name: str) -> None:
    net, batches = two_layers(), [rows(0, 1, x=0.5), rows(1, x=-2.0), rows(0, 0, 1, x=1.5)]
    how = Training(name, lr=0.1, momentum=0.9, weight_decay=0.1, rate=lambda round: 0.01 * round)
    found = train(net, net.state_dict(), batches, how, 3)
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=0.1),
        "adam": lambda: torch.optim.Adam(net.parameters(), lr=0.03, weight_decay=0.1),
    }
    optimizer = kinds[name]()
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    for name, wanted in net.state_dict().items():
        assert torch.allclose(found[name], wanted, rtol=0, atol=1e-14)


def test_fine_tuning_moves_the_classifier_alone() -> None:
    net = two_layers()
    start = net.state_dict()
    assert names_of_last_layers(net, 1) == ["2.weight", "2.bias"]
    tuned = train(net, start, [rows(0)], PLAIN, 1, names_of_last_layers(net, 1))
    assert [name for name in start if not torch.equal(tuned[name], start[name])] == [
        "2.weight",
        "2.bias",
    ]


def test_layers_are_counted_from_the_output() -> None:
    net = two_layers()
    assert names_of_last_layers(net, 0) == []
    assert (
        names_of_last_layers(net, 2)
        == names_of_last_layers(net, 5)
        == ["0.weight", "0.bias", "2.weight", "2.bias"]
    )


def test_looking_at_rows() -> None:
    # u = 1 says label 0 for x = 1: right on two of three rows. The mean loss is softplus(-2) + 2/3.
    assert mean_loss(make_net(), state_of(1.0), rows(0, 0, 1)) == pytest.approx(
        softplus(-2) + 2 / 3
    )
    assert mean_error(make_net(), state_of(1.0), rows(0, 0, 1)) == pytest.approx(1 / 3)


def test_a_mix_of_two_clients() -> None:
    # 3 rows say 1, 1 row says 5: (3 * 1 + 1 * 5) / 4 = 2; a name that is not asked for stays mine.
    def of(a: float, b: float, seen: int) -> dict[str, Tensor]:
        return {"a": torch.tensor(a), "b": torch.tensor(b), "seen": torch.tensor(seen)}

    mixed = mix(of(1.0, 7.0, 4), [of(5.0, 3.0, 9)], 3, [1])
    assert {name: value.item() for name, value in mixed.items()} == {"a": 2.0, "b": 6.0, "seen": 9}
    mixed = mix(of(1.0, 7.0, 4), [of(5.0, 3.0, 9)], 3, [1], ["a"])
    assert {name: value.item() for name, value in mixed.items()} == {"a": 2.0, "b": 7.0, "seen": 4}


def test_patience_counts_rounds_without_improvement() -> None:
    # best .5, patience 1. A loss of .4 is better; .4 again is no improvement (1), nor is .6 (2 >
    # 1: stop).
    assert update_early_stopping(0.5, 1, 0.4, 1) == (True, 0, False)
    assert update_early_stopping(0.4, 0, 0.4, 1) == (False, 1, False)
    assert update_early_stopping(0.4, 1, 0.6, 1) == (False, 2, True)
    assert update_early_stopping(0.4, 99, 0.6, None) == (False, 100, False)


# similarity


def test_chances_by_hand() -> None:
    # tau = 2 ln 2. Of three candidates with similarities 1/2, 1 and 2 the powers are 2^1, 2^2, 2^4:
    # 2 : 4 : 16 of 22.
    tau = 2 * math.log(2)
    assert chances([0.0, 0.5, 1.0, 2.0], [1, 2, 3], tau) == pytest.approx([2 / 22, 4 / 22, 16 / 22])
    assert chances([0.0, 0.5, 1.0, 2.0], [1, 3], tau) == pytest.approx([2 / 18, 16 / 18])


def test_chances_are_clipped_and_cannot_overflow() -> None:
    assert chances([1e10, 20.0, 19.9], [0, 1, 2], 1000.0) == pytest.approx(
        [0.5, 0.5, 0.0], abs=1e-40
    )


def test_temperature_grows_within_a_time_step() -> None:
    # t = 0: 2 tau / 2 - tau + 1 = 1. t = 5: exp(-.2 * 5) = 1/e. In the limit: tau + 1.
    assert temperature(30, 0, published=True) == 1
    assert temperature(30, 5, published=True) == pytest.approx(60 / (1 + 1 / math.e) - 29)
    assert temperature(30, 1000, published=True) == pytest.approx(31)
    assert temperature(30, 0, published=False) == 30


def test_two_hop_on_four_clients() -> None:
    """Client 0 probes 1 and 2 and has never met 3.

    The losses .5 and .25 make 2 (similarity 4) likelier than 1 (similarity 2), although the old
    similarities are in the opposite order; so the estimate is that of 2: .1. If 2 has not met 3, it
    is that of client 1: .8. If no peer has met 3, nothing changes: .3. A peer that 0 has met needs
    no estimate: .3.
    """
    old = [[0.0, 9.0, 0.2, 0.3], [1.0, 0.0, 1.0, 0.8], [1.0, 1.0, 0.0, 0.1], [1.0, 1.0, 1.0, 0.0]]
    losses = {1: 0.5, 2: 0.25}
    assert update_similarities(0, losses, old, [False] * 4) == (
        [0.0, 2.0, 4.0, 0.1],
        [False, True, True, False],
    )
    # where hearsay wins, 1 has 2's value for it and 2 has 1's; a peer that was met has its own
    assert update_similarities(0, losses, old, [False] * 4, True)[0] == [0.0, 1.0, 1.0, 0.1]
    assert update_similarities(0, losses, old, [False, True, True, False], True)[0] == [
        0.0,
        2.0,
        4.0,
        0.1,
    ]
    old[2][3] = 0.0
    assert update_similarities(0, losses, old, [False] * 4)[0] == [0.0, 2.0, 4.0, 0.8]
    old[1][3] = 0.0
    assert update_similarities(0, losses, old, [False] * 4)[0] == [0.0, 2.0, 4.0, 0.3]
    old[1][3] = 0.8
    assert update_similarities(0, losses, old, [False, False, False, True])[0] == [
        0.0,
        2.0,
        4.0,
        0.3,
    ]
    assert two_hop(0, [0.0, 2.0, 4.0, 0.3], old, [False, True, True, False], [1]) == {3: 0.8}


def test_similarity_starts_even_and_stays_finite() -> None:
    assert first_similarities(3) == [[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]
    assert similarity_of(0.25) == 4
    assert similarity_of(0.0) == pytest.approx(1e10)


# rounds


def test_random_reads_the_models_of_the_previous_round() -> None:
    # Sizes 1, 2, 1. 0 asks 1: (1 * 1 + 2 * 2) / 3. 1 asks 2: (2 * 2 + 1 * 3) / 3. 2 asks 0,
    # with the model before the round, 1: (3 + 1) / 2.
    history = play(make_scenario(), Method("random", peers=1))
    assert numbers(history[0]["models"]) == [1, 2, 3]
    assert history[1]["chosen"] == {0: [1], 1: [2], 2: [0]}
    assert numbers(history[1]["models"]) == [5 / 3, 7 / 3, 2]


def test_dac_learns_similarities() -> None:
    # 0 asks 2 (model 3), 1 asks 0 (model 1), 2 asks 1 (model 2) and evaluates it on its own training
    # examples: 1 / softplus(-2u) for clients 0 and 2 with label 0, 1 / softplus(2u) for client 1 with
    # label 1. The similarity of the third client, never met, is that of the selected peer: 1/2.
    labels = [(0,), (1, 1), (0,)]
    record = play(
        make_scenario(train=lambda step, client: rows(*labels[client])), Method("dac", peers=1)
    )[1]
    assert record["chosen"] == {0: [2], 1: [0], 2: [1]}
    assert record["chances"][0] == pytest.approx([0.5, 0.5])
    wanted = [[0, 0.5, 1 / softplus(-6)], [1 / softplus(2), 0, 0.5], [0.5, 1 / softplus(-4), 0]]
    assert record["similarities"] == [pytest.approx(row) for row in wanted]
    assert record["met"] == [[False, False, True], [True, False, False], [False, True, False]]
    # (1 * 1 + 1 * 3) / 2, (2 * 2 + 1 * 1) / 3, (1 * 3 + 2 * 2) / 3
    assert numbers(record["models"]) == [2, 5 / 3, 7 / 3]


def test_hast_mixes_twice() -> None:
    # First as Random above, then with the other client's model before the round: 0 with 2: (5/3 + 3) / 2;
    # 1 with 0: (2 * 7/3 + 1) / 3; 2 with 1: (2 + 2 * 2) / 3.
    record = play(make_scenario(), Method("hast", peers=1, depth=1))[1]
    assert numbers(record["mixed_1"]) == [5 / 3, 7 / 3, 2]
    assert numbers(record["mixed_2"]) == [7 / 3, 17 / 9, 2]
    assert record["chosen_similar"] == {0: [2], 1: [0], 2: [1]}
    # Only the random one was probed, both were met.
    assert list(record["probes"][0]) == [1]
    assert record["similarities"][0] == pytest.approx([0, 1 / softplus(-4), 0.5])
    assert record["met"][0] == [False, True, True]


def test_hasts_second_choice_goes_by_old_or_fresh_similarities() -> None:
    # Before round 1 all are alike; after its probe client 0 has 1 / softplus(-4) for client 1 and
    # 1/2 for client 2, and tau = 1/10.
    assert play(make_scenario(), Method("hast", peers=1, depth=1, tau=0.1))[1]["chances"][
        0
    ] == pytest.approx([0.5, 0.5])
    one, two = math.exp(0.1 * 20), math.exp(0.1 * 0.5)  # 1 / softplus(-4) = 55 is clipped to 20
    found = play(make_scenario(), Method("hast", peers=1, depth=1, tau=0.1, fresh=True))[1][
        "chances"
    ][0]
    assert found == pytest.approx([one / (one + two), two / (one + two)])


def test_hast_mixes_and_tunes_its_classifier_alone() -> None:
    # One example of each label to train on after the warm-up, so that bodies differ too; the
    # fine-tuned classifier is evaluated on label 0 only.
    def batches(round: int, client: int, phase: int | str) -> list[Rows]:
        return {"warmup": [rows(0, x=client + 1.0)], 0: [rows(0, 1)], 1: [rows(client % 2)]}[phase]

    scenario = make_scenario(net=two_layers(), batches=batches, rounds=2)
    history = play(scenario, Method("hast", peers=1, depth=1))
    for before, record in itertools.pairwise(history):
        for name in ("0.weight", "0.bias"):
            assert torch.equal(record["mixed_2"][0][name], record["mixed_1"][0][name])
            assert torch.equal(record["tuned"][0][name], record["trained"][0][name])
        for name in ("2.weight", "2.bias"):
            wanted = (
                record["mixed_1"][0][name] + before["models"][2][name]
            ) / 2  # one example each
            assert torch.allclose(record["mixed_2"][0][name], wanted, rtol=0, atol=1e-15)
        # Clients 0 and 2 tune on label 0, on which they are evaluated, and improve; client 1 tunes on
        # label 1 and gets worse.
        assert record["kept"] == {0: True, 1: False, 2: True}
        for k, kept in record["kept"].items():
            assert torch.equal(
                record["models"][k]["2.bias"], record["tuned" if kept else "trained"][k]["2.bias"]
            )
        assert record["best_loss"][0] < record["best_loss_before"][0]
        assert torch.equal(record["best_models"][0]["2.bias"], record["tuned"][0]["2.bias"])


def test_hast_of_depth_0_is_random() -> None:
    def batches(round: int, client: int, phase: int | str) -> list[Rows]:
        return [rows(client % 2, x=round + 1.0)]

    scenario = make_scenario(net=two_layers(), batches=batches, rounds=3)
    hast, random = (
        play(scenario, Method("hast", peers=1, depth=0)),
        play(scenario, Method("random", peers=1)),
    )
    assert all(
        torch.equal(a[name], b[name])
        for a, b in zip(hast[-1]["models"], random[-1]["models"], strict=True)
        for name in a
    )


def test_oracle_asks_its_own_cluster_and_local_no_peer() -> None:
    # Clients 0 and 2 are one cluster: (1 + 3) / 2 for both; client 1 is alone with its 2.
    record = play(
        make_scenario(cluster=lambda step, client: client % 2), Method("oracle", peers=2)
    )[1]
    assert record["chosen"] == {0: [2], 1: [], 2: [0]}
    assert numbers(record["models"]) == [2, 2, 2]
    assert numbers(play(make_scenario(), Method("local"))[1]["models"]) == [1, 2, 3]


def test_offline_clients_neither_ask_nor_answer() -> None:
    # Client 1 is offline: 0 and 2 ask each other, (1 + 3) / 2. On a path 0 - 1 - 2 they reach no
    # client.
    record = play(make_scenario(online=lambda round: [0, 2]), Method("random", peers=2))[1]
    assert record["active"] == [0, 2]
    assert numbers(record["models"]) == [2, 2, 2]
    path = [[1], [0, 2], [1]]
    record = play(
        make_scenario(online=lambda round: [0, 2], neighbors=lambda client: path[client]),
        Method("random", peers=2),
    )[1]
    assert record["chosen"] == {0: [], 2: []}


def test_a_stopped_client_pauses_until_the_data_change_and_still_answers() -> None:
    """No client trains or asks a peer, so no loss ever falls: with patience 1 all stop after the
    second round of a time step.

    Validation has label 0 in time step 0 and label 1 in time step 1, where the best model, still
    that of the warm-up, is evaluated again.
    """
    scenario = make_scenario(steps=2, rounds=3, valid=lambda step, client: rows(step))
    history = play(scenario, Method("local", patience=1))
    assert [record["patience"] for record in history[1:]] == [[1] * 3, [2] * 3, [2] * 3] * 2
    assert [record["active"] for record in history[1:]] == [[0, 1, 2], [0, 1, 2], []] * 2
    assert history[3]["best_loss"] == pytest.approx([softplus(-2), softplus(-4), softplus(-6)])
    assert history[4]["best_loss_before"] == pytest.approx([softplus(2), softplus(4), softplus(6)])
    # Random makes 0 better and 2 worse (5/3 and 2, above): with patience 0 client 2 stops at once,
    # and 1 still asks it in round 2.
    history = play(make_scenario(rounds=2), Method("random", peers=1, patience=0))
    assert history[1]["stopped"] == [False, False, True]
    assert history[2]["chosen"] == {0: [1], 1: [2]}
    # (1 * 5/3 + 2 * 7/3) / 3 and (2 * 7/3 + 1 * 2) / 3; client 2 keeps its 2, but 3 was its best.
    assert numbers(history[2]["models"]) == [19 / 9, 20 / 9, 2]
    assert numbers(history[2]["best_models"]) == [19 / 9, 7 / 3, 3]


def test_the_warm_up_counts_only_if_it_is_evaluated() -> None:
    history = play(make_scenario(), Method("random", peers=1, evaluate_warmup=False))
    assert history[0]["best_loss"] == [math.inf] * 3
    assert numbers(history[1]["best_models"]) == [5 / 3, 7 / 3, 2]
    assert numbers(play(make_scenario(), Method("random", peers=1))[1]["best_models"]) == [
        5 / 3,
        7 / 3,
        3,
    ]


def test_training_descends_on_the_loss_it_is_given() -> None:
    scenario = make_scenario(
        loss=lambda step, client: (
            lambda logits, labels: 2 * nn.functional.cross_entropy(logits, labels)
        )
    )
    # twice the gradient, twice the distance from 0
    assert numbers(decentralized.start(scenario, Method("local")).models) == [2, 4, 6]
