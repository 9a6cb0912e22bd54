"""Slow clients: who is used, who is thrown away, who comes later; and the whole of it resumed
exactly.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounds.test_decentralized import Dying
from rounds.test_resume import contents

from remanence.config import parse_experiment
from remanence.core.engine import Rejection
from remanence.core.errors import AggregationFailed, InputError
from remanence.core.rng import Key
from remanence.core.types import Reply
from remanence.engines.client_plan import expected_steps
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import build
from remanence.experiment.system import response_times
from remanence.rounds.client_sampling import sample_clients
from remanence.rounds.federated import make_work, update_servers
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.setup import first_state, make_round
from remanence.rounds.stragglers import split_stragglers
from remanence.testing.toy_task import run_rounds
from remanence.training import server_step
from remanence.training.state import StaleReply

SLOW: dict[str, Any] = {
    "data.name": "synthetic(samples=300, classes=4, features=5, test=0.25)",
    "data.partition": "iid",
    "clients.count": 10,
    "clients.sample": 5,
    "clients.speed": "lognormal(sigma=1.0)",
    "local.batch_size": 8,
    "rounds": 6,
    "precision": "fp64",
    "engine": "sequential",
    "device": "cpu",
    "checkpoint.seconds": 0,
}


def test_the_first_to_answer_are_used() -> None:
    """Five answers are wanted and seven clients asked: the two slowest, by the times drawn for
    them, are left out.
    """
    experiment = build(parse_experiment({}, SLOW | {"round.over_selection": 1.3, "rounds": 1}))
    job = make_work(experiment, first_state(experiment), 1)
    times = response_times(
        job.clients, expected_steps(experiment.task, job), experiment.step_seconds, job.key
    )
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert (lines[0]["invited"], lines[0]["replies"], lines[0]["late"]) == (7, 5, 2)
    first = np.sort(job.clients[np.argsort(times)[:5]])
    assert lines[0]["simulated_seconds"] == pytest.approx(np.sort(times)[4])
    # the same round with only these five clients asked gives the same model
    sizes = experiment.task.population.at(0).train.sizes[first]
    replies = [
        reply
        for reply in SequentialEngine(experiment.task).train(job)
        if int(reply.client) in first
    ]
    for name, value in state.server.model.params.items():
        mean = sum(
            size / sizes.sum() * reply.params[name][0]
            for size, reply in zip(sizes, replies, strict=True)
        )
        assert torch.allclose(value, torch.as_tensor(mean), rtol=0, atol=1e-12)


def test_late_answers_come_with_less_weight_and_nobody_is_asked_while_under_way() -> None:
    experiment = build(
        parse_experiment({}, SLOW | {"round.deadline": "quantile(share=0.6)", "round.late": "use"})
    )
    asked: list[set[int]] = []
    inner = SequentialEngine(experiment.task)

    class Listening(SequentialEngine):
        def train(self, job: Any) -> Any:
            asked.append(set(job.clients.tolist()))
            yield from inner.train(job)

    seen: list[tuple[int, StaleReply]] = []
    lines: list[dict[str, Any]] = []
    engine, state = Listening(experiment.task), first_state(experiment)
    with tempfile.TemporaryDirectory() as folder:
        round = make_round(experiment, engine, Path(folder))
        for number in range(1, 7):
            state, line = round.run(state)
            seen += [(number, late) for late in state.stale if int(late.reply.round) == number]
            lines.append(line)
        round.close()
    assert len(seen) >= 6
    assert sum(line["stale_used"] for line in lines) >= 3
    for line in lines:
        assert line["replies"] == line["invited"] - line["late"] + line["stale_used"]
    assert all(late.arrival_round > 6 for late in state.stale)
    # nobody is asked in the rounds between the one it began in and the one its answer comes in
    for number, late in seen:
        client = int(late.reply.client)
        assert client not in set().union(*asked[number : late.arrival_round - 1])


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("after", [2, 4])
def test_answers_under_way_survive_a_kill(tmp_path: Path, method: str, after: int) -> None:
    config = parse_experiment(
        {}, SLOW | {"method": method, "round.deadline": "quantile(share=0.6)", "round.late": "use"}
    )
    start_run(config, tmp_path / "straight")
    with pytest.raises(ConnectionAbortedError):
        start_run(config, tmp_path / "killed", progress=Dying(after))
    resume_run(tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")


def test_over_selection_makes_good_for_drop_out() -> None:
    """A tenth of the clients is gone in every round: asking 30% more, no round has fewer
    answers than wanted.
    """
    changes = {
        "clients.count": 40,
        "clients.sample": 10,
        "clients.availability": "random(offline=0.1)",
        "round.over_selection": 1.3,
    }
    experiment = build(
        parse_experiment(
            {},
            SLOW
            | changes
            | {
                "data.name": "synthetic(samples=800, classes=4, features=5, test=0.25)",
                "rounds": 10,
            },
        )
    )
    _, lines = run_rounds(experiment, SequentialEngine(experiment.task), 10)
    assert all(
        line["replies"] == 10 and line["invited"] == 13 and not line["abandoned"] for line in lines
    )


class Broken(SequentialEngine):
    """Replies of some clients hold NaN in some rounds."""

    def __init__(self, task: Any, clients: set[int], rounds: range = range(99)):
        super().__init__(task)
        self.clients, self.rounds = clients, rounds

    def train(self, work: Any) -> Any:
        for reply in super().train(work):
            if work.round in self.rounds and int(reply.client) in self.clients:
                nan = {name: torch.full_like(x, torch.nan) for name, x in reply.params.items()}
                reply = reply._replace(params=nan, loss=torch.full_like(reply.loss, torch.inf))
            yield reply


def test_a_rejected_reply_takes_no_slot() -> None:
    """Seven clients are sampled and five valid replies wanted: the fastest two are rejected, so
    the other five are used, and none of them is late.
    """
    experiment = build(parse_experiment({}, SLOW | {"round.over_selection": 1.3, "rounds": 1}))
    work = make_work(experiment, first_state(experiment), 1)
    times = response_times(
        work.clients, expected_steps(experiment.task, work), experiment.step_seconds, work.key
    )
    fastest = set(work.clients[np.argsort(times)[:2]].tolist())
    _, lines = run_rounds(experiment, Broken(experiment.task, fastest), 1)
    assert (lines[0]["invited"], lines[0]["replies"], lines[0]["late"]) == (7, 5, 0)
    assert {rejection["client"] for rejection in lines[0]["rejected"]} == fastest
    assert lines[0]["simulated_seconds"] == pytest.approx(times.max())
    assert lines[0]["train_loss"] > 0  # infinite losses of rejected replies are not in the mean


def test_stale_replies_are_used_where_no_new_one_is_valid() -> None:
    changes = {"round.deadline": "quantile(share=0.6)", "round.late": "use"}
    experiment = build(parse_experiment({}, SLOW | changes))
    _, before = run_rounds(experiment, SequentialEngine(experiment.task), 6)
    arrival = next(line["round"] for line in before if line["stale_used"])
    engine = Broken(experiment.task, set(range(10)), range(arrival, arrival + 1))
    _, lines = run_rounds(experiment, engine, arrival)
    line = lines[-1]
    assert line["stale_used"] == line["replies"] > 0
    assert not line["abandoned"]


def test_a_stale_reply_of_an_abandoned_round_is_used_in_the_next() -> None:
    changes = {"round.deadline": "quantile(share=0.6)", "round.late": "use"}
    experiment = build(parse_experiment({}, SLOW | changes | {"round.min_replies": 5}))
    engine, state = SequentialEngine(experiment.task), first_state(experiment)
    waiting: dict[int, StaleReply] = {}  # by client
    postponed = 0
    with tempfile.TemporaryDirectory() as folder:
        round = make_round(experiment, engine, Path(folder))
        for number in range(1, 7):
            arriving = {client for client, x in waiting.items() if x.arrival_round == number}
            state, line = round.run(state)
            after = {int(late.reply.client): late for late in state.stale}
            if line["abandoned"]:
                assert line["stale_used"] == 0
                assert all(after[client].arrival_round == number + 1 for client in arriving)
                postponed += len(arriving)
            else:
                assert line["stale_used"] == len(arriving)
                assert not arriving & set(after)
            waiting = after
        round.close()
    assert postponed >= 1


def test_a_stale_reply_is_not_tried_again_after_a_failed_aggregation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise AggregationFailed("no aggregate")

    changes = {"round.deadline": "quantile(share=0.6)", "round.late": "use"}
    experiment = build(parse_experiment({}, SLOW | changes))
    _, before = run_rounds(experiment, SequentialEngine(experiment.task), 6)
    arrival = next(line["round"] for line in before if line["stale_used"])
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), arrival - 1)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(server_step, "update", fail)
        round = make_round(experiment, SequentialEngine(experiment.task), Path(folder))
        after, line = round.run(state)
        round.close()
    assert (line["problem"], line["stale_used"]) == ("no aggregate", 0)
    assert all(late.arrival_round > arrival for late in after.stale)
    assert any(late.arrival_round == arrival for late in state.stale)


@pytest.mark.parametrize("method", ["fedavg", "scaffold(equal=true)"])
def test_a_stale_reply_has_less_weight_whatever_gives_the_weights(method: str) -> None:
    """The weights of the first round with stale replies, by hand: the method's own, times
    1 / (1 + age)^staleness, summing to 1.
    """
    changes = {"method": method, "round.deadline": "quantile(share=0.6)", "round.late": "use"}
    experiment = build(parse_experiment({}, SLOW | changes | {"round.staleness": 2.0}))
    _, lines = run_rounds(experiment, SequentialEngine(experiment.task), 6)
    number = next(line["round"] for line in lines if line["stale_used"])
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), number - 1)
    work = make_work(experiment, state, number)
    replies = Reply.concat(list(SequentialEngine(experiment.task).train(work)))
    split = split_stragglers(experiment, state, work, replies)
    assert split.replies is not None
    born = {int(late.reply.client): int(late.reply.round) for late in split.arrived}
    clients, sizes = split.replies.client.tolist(), experiment.task.population.at(0).train.sizes
    raw = np.array(
        [
            (1.0 if "equal" in method else sizes[client])
            / (1 + number - born.get(client, number)) ** 2
            for client in clients
        ]
    )
    assert born
    assert len(clients) > len(born)
    engine = SequentialEngine(experiment.task)
    updates, _ = update_servers(experiment, engine, state, work, split.replies, split.discount)
    assert updates[0].weights.tolist() == pytest.approx((raw / raw.sum()).tolist(), rel=1e-12)


def test_client_privacy_refuses_late_replies_of_less_weight() -> None:
    """Weights sum to 1, so replies on time would weigh more than the noise is made for."""
    late = {"method": "fedavg+dp", "round.deadline": "30", "round.late": "use"}
    with pytest.raises(InputError, match=r"dp needs replies of equal weight.*round\.staleness=0"):
        build(parse_experiment({}, SLOW | late))
    build(parse_experiment({}, SLOW | late | {"round.staleness": 0.0}))


def test_bytes_count_what_was_sent() -> None:
    """Seven clients: the two late replies are sent, too; those of two clients that decline, and of
    one that is rejected, are two less.
    """

    class Declining(Broken):
        def train(self, work: Any) -> Any:
            self.gone = set(work.clients[:2].tolist())
            yield from (r for r in super().train(work) if int(r.client) not in self.gone)

        def pop_declined(self) -> list[Rejection]:
            return [Rejection(client, "away", "its site is not connected") for client in self.gone]

    experiment = build(parse_experiment({}, SLOW | {"round.over_selection": 1.3, "rounds": 1}))
    rejected = int(make_work(experiment, first_state(experiment), 1).clients[2])
    model = sum(x.numel() * 8 for x in experiment.task.model.initial.params.values())
    for engine, sent in (
        (SequentialEngine(experiment.task), 7),
        (Declining(experiment.task, {rejected}), 5),
    ):
        _, lines = run_rounds(experiment, engine, 1)
        assert lines[0]["bytes_up"] == sent * (model + 8)
        assert len(lines[0]["rejected"]) == (0 if sent == 7 else 3)


def test_without_a_server_who_is_late_keeps_its_average_untrained() -> None:
    """One round of gossip without a warm-up: whoever answers within the deadline ends with the
    trained model of a run without one, the others with the mix.

    The first mix averages equal initial models, so a late client still has the initial model after
    round 1.
    """
    changes = SLOW | {"method": "random(peers=2)", "peers.warmup": False, "rounds": 2}
    timely = build(parse_experiment({}, changes))
    free, _ = run_rounds(timely, SequentialEngine(timely.task), 1)
    experiment = build(parse_experiment({}, changes | {"round.deadline": "quantile(share=0.6)"}))
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    key = Key(experiment.config.seed).fold_in("round", 1)
    clients = sample_clients(experiment, 1, key)
    sizes = experiment.task.population.at(0).train.sizes[clients]
    # one epoch in batches of 8
    times = response_times(clients, np.ceil(sizes / 8), experiment.step_seconds, key)
    assert (lines[0]["invited"], lines[0]["late"], lines[0]["replies"]) == (5, 2, 3)
    assert lines[0]["simulated_seconds"] == pytest.approx(np.sort(times)[2])
    in_time = set(clients[np.argsort(times)[:3]].tolist())
    assert state.client_models is not None
    assert free.client_models is not None
    for client in range(10):
        for name, value in experiment.task.model.initial.params.items():
            wanted = free.client_models.models.params[name][client] if client in in_time else value
            assert torch.allclose(
                state.client_models.models.params[name][client], wanted, rtol=0, atol=1e-14
            )


def test_several_global_models_wait_too() -> None:
    config = parse_experiment(
        {},
        SLOW
        | {
            "method": "feddrift",
            "round.over_selection": 1.3,
            "round.deadline": "quantile(share=0.6)",
        },
    )
    experiment = build(config)
    _, lines = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    # 0.6 of 7 is 4.2, so 5 are in time
    assert all((line["invited"], line["late"], line["replies"]) == (7, 2, 5) for line in lines)


def test_what_cannot_wait_is_refused() -> None:
    for method, waiting in (
        ("random(peers=2)", {"round.deadline": "30"}),
        ("feddrift", {"round.deadline": "30"}),
        ("feddrift", {"round.over_selection": 1.3}),
    ):
        changes = SLOW | waiting | {"method": method, "round.late": "use"}
        with pytest.raises(
            InputError, match=r"round\.late=use is for methods with one server model"
        ):
            build(parse_experiment({}, changes))
    with pytest.raises(InputError, match="over_selection has no meaning without a server"):
        build(
            parse_experiment({}, SLOW | {"method": "random(peers=2)", "round.over_selection": 1.3})
        )
    with pytest.raises(InputError, match="min_replies has no meaning without a server"):
        build(parse_experiment({}, SLOW | {"method": "random(peers=2)", "round.min_replies": 3}))
    with pytest.raises(InputError, match="over_selection must be at least 1"):
        parse_experiment({}, {"round.over_selection": 0.5})
