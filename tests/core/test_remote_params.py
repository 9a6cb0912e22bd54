"""Models that stay where they were trained: what the gate and the server do without fetching
them, and that whoever reads one has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import parse_method
from remanence.core.contexts import ServerContext
from remanence.core.engine import ClientWork
from remanence.core.remote_params import RemoteParams, to_meta
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.engines.sequential import SequentialEngine
from remanence.methods import PARTS
from remanence.rounds.federated import make_work
from remanence.rounds.replies import reply_schema
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import max_rel_diff, run_rounds, small_experiment
from remanence.training import gate
from remanence.training.server_step import Server, aggregator_of, local_models, update


class Holder:
    """Keeps the replies of a round in shards; counts how often models are fetched."""

    def __init__(self, task: Any, shards: Sequence[Reply]):
        self.task, self.shards, self.fetched = task, shards, 0

    def fetch(self, shards: Sequence[int]) -> list[dict[str, Tensor]]:
        self.fetched += len(shards)
        return [dict(self.shards[number].params) for number in shards]

    def partial_sum(self, shard: Tensor, index: Tensor, weights: Tensor, srv: ServerContext) -> Any:
        sums = [
            aggregator_of(self.task.method).partial(
                weights[shard == number], self.shards[number].select(index[shard == number]), srv
            )
            for number in torch.unique(shard).tolist()
        ]
        total = sums[0]
        for other in sums[1:]:
            total = pytree.add(total, other)
        return total


class FarEngine(SequentialEngine):
    """A loop that keeps the models of every two clients, the last ones first."""

    def train(self, job: ClientWork) -> Any:
        replies = list(super().train(job))
        pieces = [Reply.concat(replies[first : first + 2]) for first in range(0, len(replies), 2)]
        self.holder = Holder(self.task, pieces)
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            form = pytree.take(piece.params, 0)
            moved = (
                torch.stack(
                    [x.flatten(1).square().sum(dim=1) for x in piece.delta(job.start).values()]
                )
                .sum(dim=0)
                .sqrt()
            )
            finite = pytree.finite({"params": dict(piece.params)}, piece.num_clients)
            far = RemoteParams(
                self.holder,
                form,
                torch.full((piece.num_clients,), number),
                torch.arange(piece.num_clients),
                finite,
                moved.double(),
            )
            yield piece._replace(params=far)


def far_and_near(method: str, **changes: Any) -> tuple[FarEngine, Any, Any]:
    experiment = small_experiment(parse_method(method, PARTS), {"clients.sample": 5} | changes)
    engine = FarEngine(experiment.task)
    state, _ = run_rounds(experiment, engine, 2)
    oracle, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    return engine, state, oracle


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold+wsm", "fednova", "fedadam", "fedavg+dp(noise=0.5)", "fedwavg"]
)
def test_a_sum_fetches_nothing(method: str) -> None:
    engine, state, oracle = far_and_near(method)
    assert max_rel_diff(state.server.model.params, oracle.server.model.params)[1] <= TOLERANCE
    assert engine.holder.fetched == 0


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg+median", {}),
        ("flashback", {"data.public": 8}),
        ("fedavg+dp(adaptive=true)", {}),
        ("fedavg", {"record.local": True}),
        ("fedavg", {"attack": "sign_flip(fraction=0.2)"}),
        ("fedavg", {"round.deadline": "quantile(share=0.5)", "round.late": "use"}),
    ],
)
def test_whoever_reads_a_model_has_it_fetched(method: str, changes: dict[str, Any]) -> None:
    """Robust aggregators, refinement, records, attacks and late answers need no word of it."""
    engine, state, oracle = far_and_near(method, **changes)
    assert max_rel_diff(state.server.model.params, oracle.server.model.params)[1] <= TOLERANCE
    assert engine.holder.fetched > 0


@pytest.mark.parametrize(("limit", "refused"), [(0.0, 0), (1e-9, 5)])
def test_the_gate_sees_every_reply(limit: float, refused: int) -> None:
    """The worker that holds a model reports names, shapes, finiteness and the norm of the update."""
    experiment = small_experiment("fedavg", {"clients.sample": 5, "round.max_norm": limit})
    job = make_work(experiment, first_state(experiment), 1)
    engine = FarEngine(experiment.task)
    replies, refusals = gate.validate_replies(engine.train(job), reply_schema(experiment, job))
    assert len(refusals) == refused
    assert all(refusal.code == "norm" for refusal in refusals)
    if not refused:
        assert replies is not None
        assert replies.client.tolist() == job.clients.tolist()
        assert isinstance(replies.params, RemoteParams)
    assert engine.holder.fetched == 0


def chunk_of(job: ClientWork, engine: FarEngine) -> Reply:
    return next(iter(engine.train(job)))


def test_the_gate_refuses_what_is_told_to_be_bad() -> None:
    experiment = small_experiment("fedavg", {"clients.sample": 5})
    job = make_work(experiment, first_state(experiment), 1)
    chunk = chunk_of(job, FarEngine(experiment.task))
    assert isinstance(chunk.params, RemoteParams)
    far = chunk.params
    unsound = RemoteParams(
        far.store, far.form, far.shard, far.index, torch.zeros_like(far.finite), far.update_norm
    )
    odd = RemoteParams(
        far.store,
        {**far.form, "head.bias": torch.zeros(9)},
        far.shard,
        far.index,
        far.finite,
        far.update_norm,
    )
    for bad, code in ((unsound, "not-finite"), (odd, "shape")):
        _, refusals = gate.validate_replies(
            [chunk._replace(params=bad)], reply_schema(experiment, job)
        )
        assert {refusal.code for refusal in refusals} == {code}


def test_picked_and_joined_they_are_the_same_models() -> None:
    experiment = small_experiment("fedavg", {"clients.sample": 5})
    job = make_work(experiment, first_state(experiment), 1)
    near = Reply.concat(list(SequentialEngine(experiment.task).train(job)))
    engine = FarEngine(experiment.task)
    chunks = list(engine.train(job))
    joined = Reply.concat(chunks)
    order = torch.argsort(joined.client)
    some = joined.select(order).select(torch.tensor([4, 0, 2]))
    assert isinstance(some.params, RemoteParams)
    assert {name: value.shape for name, value in to_meta(some.params).items()} == {
        n: (3, *v.shape[1:]) for n, v in near.params.items()
    }
    assert engine.holder.fetched == 0
    assert max_rel_diff(
        dict(some.params), pytree.take(dict(near.params), torch.tensor([4, 0, 2]))
    ) == ("", 0.0)
    assert engine.holder.fetched > 0
    assert max_rel_diff(
        local_models(job.start, some).params,
        local_models(job.start, near.select(torch.tensor([4, 0, 2]))).params,
    ) == (
        "",
        0.0,
    )
    mixed = Reply.concat([chunks[0], near.select(slice(0, 1))])  # far and near together are near
    assert not isinstance(mixed.params, RemoteParams)


def test_a_method_that_looks_at_all_models_at_once_says_so() -> None:
    assert aggregator_of(small_experiment("fedavg").task.method).is_decomposable
    for name in (
        "median",
        "trimmed_mean(fraction=0.2)",
        "krum(byzantine=1)",
        "geometric_median",
        "norm_clip",
    ):
        assert not aggregator_of(
            small_experiment(f"fedavg+{name}", {"clients.sample": 6}).task.method
        ).is_decomposable


def test_an_update_of_far_models_alone() -> None:
    """Two clients of weights 1 and 3 that moved by 4 and 8: 1/4 * 4 + 3/4 * 8 = 7."""
    task = small_experiment("fedavg").task
    start = ModelState({"w": torch.zeros(1, dtype=torch.float64)}, {})
    one = torch.tensor([1])
    reply = Reply(
        one,
        one,
        {"w": torch.tensor([[4.0]]).double()},
        {},
        {},
        torch.tensor([1.0]).double(),
        {},
        torch.zeros(1),
    )
    other = reply._replace(
        client=one + 1,
        params={"w": torch.tensor([[8.0]]).double()},
        weight=torch.tensor([3.0]).double(),
    )
    holder = Holder(task, [reply, other])
    form, sound = {"w": torch.zeros(1, dtype=torch.float64)}, torch.ones(2, dtype=torch.bool)
    far = RemoteParams(
        holder, form, torch.tensor([0, 1]), torch.tensor([0, 0]), sound, torch.tensor([4.0, 8.0])
    )
    done = update(
        task,
        Server(start, {}),
        Reply.concat([reply, other])._replace(params=far),
        1,
        Key(0),
        {"lr": 0.1},
        SequentialEngine(task),
    )
    assert done.server.model.params["w"].tolist() == [7.0]
    assert holder.fetched == 0
