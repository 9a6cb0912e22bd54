"""Flashback: against its reference, and its label counts by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods.small_task import (
    CLASSES,
    Plain,
    in_plain_tensors,
    largest_gap,
    make_experiment,
    make_net,
    play_all,
)
from reference import flashback as reference

from remanence.core.errors import InputError
from remanence.engines.sequential import SequentialEngine
from remanence.losses import wsm
from remanence.methods import fedavg
from remanence.methods.flashback import flashback, update_label_counts
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds, small_experiment


def run_reference(
    kind: str, plain: Plain, gamma: float, epochs: int
) -> tuple[Any, list[float], list[int]]:
    x, y, rows, public, setting = plain
    return reference.train(make_net(kind), x, y, CLASSES, rows, public, setting, gamma, epochs)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_it_equals_algorithm_1(kind: str) -> None:
    """Three rounds, with gamma = 0.6: from its second round on a client adds nothing to pi."""
    experiment = make_experiment(flashback(gamma=0.6, server_epochs=2), kind, **{"data.public": 10})
    state = play_all(experiment)
    wanted, pi, r = run_reference(kind, in_plain_tensors(experiment), 0.6, 2)
    assert max(r) >= 2, "without a client that comes back the limit of gamma is not tried"
    assert largest_gap(state, wanted, kind) < 1e-10
    kept = state.server.state["flashback"]
    assert torch.allclose(kept["pi"], torch.tensor(pi, dtype=torch.float64), rtol=0, atol=1e-10)
    assert kept["r"].tolist() == r


def test_the_reference_tells_its_parts_apart() -> None:
    """More epochs, another gamma, a larger public set: each gives another model, so the
    agreement above is no accident.
    """
    experiment = make_experiment(
        flashback(gamma=0.6, server_epochs=2), "mlp", **{"data.public": 10}
    )
    state, plain = play_all(experiment), in_plain_tensors(experiment)
    for gamma, epochs, public in ((0.6, 1, 10), (0.3, 2, 10), (0.6, 2, 9)):
        wanted, _, _ = run_reference(
            "mlp", plain._replace(public=plain.public[:public]), gamma, epochs
        )
        assert largest_gap(state, wanted, "mlp") > 1e-6


@pytest.mark.parametrize(
    "method",
    [flashback(server_epochs=1), flashback(gamma=1.0, server_epochs=2) + wsm()],
    ids=["alone", "wsm"],
)
def test_it_keeps_the_contract(method: Any) -> None:
    check_method(method)


def test_pi_by_hand() -> None:
    """gamma = 0.5: a client is counted in its first two rounds.

    Client 0 has labels (4, 0), client 2 has (2, 6). Round 1, both: pi = 0.5 * (4, 0) + 0.5 * (2, 6)
    = (3, 3). Round 2, client 0: (5, 3). Round 3, both: r_0 = 3, and 1.5 > 1, so only client 2 adds:
    (6, 6). Round 4, client 2: r_2 = 3, nothing: (6, 6).
    """
    labels = {0: [4.0, 0.0], 2: [2.0, 6.0]}
    state = {"pi": torch.zeros(2, dtype=torch.float64), "r": torch.zeros(3, dtype=torch.int64)}
    seen = []
    for cohort in ([0, 2], [0], [0, 2], [2]):
        counts = torch.tensor([labels[k] for k in cohort], dtype=torch.float64)
        replies: Any = SimpleNamespace(
            client=torch.tensor(cohort), payload={"flashback": {"label_counts": counts}}
        )
        srv: Any = SimpleNamespace(
            state=state, hyper={"gamma": torch.tensor(0.5, dtype=torch.float64)}
        )
        state = update_label_counts(replies, srv)
        seen.append(state["pi"].tolist())
    assert seen == [[3, 3], [5, 3], [6, 6], [6, 6]]
    assert state["r"].tolist() == [3, 0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("times", [1, 3, 10, 30, 49])
def test_a_client_counts_once_in_full(times: int, dtype: torch.dtype) -> None:
    """gamma = 1/n: after n rounds pi holds the client's counts, and never more; no rounding of
    gamma * r_k loses the last round.
    """
    state = {"pi": torch.zeros(1, dtype=dtype), "r": torch.zeros(1, dtype=torch.int64)}
    replies: Any = SimpleNamespace(
        client=torch.tensor([0]),
        payload={"flashback": {"label_counts": torch.tensor([[7.0]], dtype=dtype)}},
    )
    for _ in range(times + 5):
        srv: Any = SimpleNamespace(
            state=state, hyper={"gamma": torch.tensor(1 / times, dtype=torch.float64).to(dtype)}
        )
        state = update_label_counts(replies, srv)
    assert float(state["pi"]) == pytest.approx(7, abs=1e-4)


def test_order_of_updates() -> None:
    """What goes down in round t is pi after round t-1; the clients of round 1 train as FedAvg's
    do, for pi is 0 until then.
    """
    experiment = make_experiment(
        flashback(gamma=1.0, server_epochs=1), "mlp", **{"data.public": 10}
    )
    plain = make_experiment(fedavg(), "mlp", **{"data.public": 10})
    first = make_work(experiment, first_state(experiment), 1)
    assert first.broadcast["flashback"]["pi"].tolist() == [0.0] * CLASSES
    for mine, theirs in zip(
        SequentialEngine(experiment.task).train(first),
        SequentialEngine(plain.task).train(first._replace(broadcast={})),
        strict=True,
    ):
        assert all(torch.equal(mine.params[name], theirs.params[name]) for name in theirs.params)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    second = make_work(experiment, state, 2)
    assert torch.equal(second.broadcast["flashback"]["pi"], first.stats.label_counts.sum(dim=0))
    taught, alone = (
        next(SequentialEngine(task).train(second)) for task in (experiment.task, plain.task)
    )
    assert any(not torch.equal(taught.params[name], alone.params[name]) for name in alone.params)


@pytest.mark.parametrize(
    "options", [{"gamma": 0.0}, {"gamma": 1.5}, {"gamma": float("nan")}, {"server_epochs": 0}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"flashback: {next(iter(options))} must be a number"):
        flashback(**options)


def test_it_needs_a_public_set() -> None:
    with pytest.raises(InputError, match="flashback trains at the server and needs a public set"):
        small_experiment(flashback(), {"data.public": 0})


def test_it_says_what_it_sends() -> None:
    made = flashback()
    assert "label counts" in made.payload_description
    assert "sensitive" in made.payload_description
