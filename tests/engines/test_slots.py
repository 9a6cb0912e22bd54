"""Slot by slot: each toy does what its slot promises, against numbers worked out beside it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.toys import (
    control_variates,
    frozen_head,
    heavy_server,
    look_ahead,
    loss_weighted,
    near,
    own_norms,
    private,
    refined,
    tuned_head,
)
from torch import Tensor, nn

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.errors import AggregationFailed, InputError
from remanence.core.pytree import Params
from remanence.core.slots import Method, Part, StepTracker
from remanence.core.types import Reply
from remanence.data.batches import plan_batches
from remanence.engines.client_plan import plan_phase
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.methods import fedprox
from remanence.rounds.federated import make_work
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.setup import first_state
from remanence.testing import check_method
from remanence.testing.toy_task import (
    EQUAL,
    as_method,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
)
from remanence.training import server_step
from remanence.training.server_step import ServerResult


def with_norms(method: Part | Method, **changes: Any) -> BuiltExperiment:
    return small_experiment(method, EQUAL | changes, module=batch_norm_net())


def play_by_hand(experiment: BuiltExperiment) -> tuple[ClientWork, Reply, ServerResult]:
    state = first_state(experiment)
    job = make_work(experiment, state, 1)
    replies = Reply.concat(list(SequentialEngine(experiment.task).train(job)))
    return (
        job,
        replies,
        server_step.update(
            experiment.task,
            state.server,
            replies,
            1,
            job.key,
            job.optimizer_hparams,
            SequentialEngine(experiment.task),
        ),
    )


@pytest.mark.parametrize("kind", ["params", "buffers"])
def test_a_model_that_is_not_finite_is_not_used(kind: str) -> None:
    experiment = with_norms(fedprox())
    state = first_state(experiment)
    job = make_work(experiment, state, 1)
    replies = Reply.concat(list(SequentialEngine(experiment.task).train(job)))
    broken: Any = {name: x.clone() for name, x in getattr(replies, kind).items()}
    name = next(name for name, x in broken.items() if x.is_floating_point())
    broken[name][0] = torch.inf
    replies = replies._replace(**{kind: broken})
    engine = SequentialEngine(experiment.task)
    with pytest.raises(AggregationFailed, match="NaN or infinity"):
        server_step.update(
            experiment.task, state.server, replies, 1, job.key, job.optimizer_hparams, engine
        )


def test_a_buffer_that_is_not_sent_may_hold_infinity() -> None:
    """Such as a mask."""

    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 4)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(x) * (self.mask[0] + 1)
            return logits

    experiment = small_experiment(fedprox(), {"local.buffers": "frozen"}, module=Masked().double())
    _, lines = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    assert not any(line["abandoned"] or line["rejected"] for line in lines)


def test_control_variates_are_remembered() -> None:
    """c starts at 0 and moves by the sum of the clients' changes over K, so it is always the
    mean of all c_i, those who never came counting 0.
    """
    experiment = with_norms(control_variates())
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    assert 4 < len(state.client_states) <= 6
    mean = pytree.scale(
        pytree.map(
            lambda *c: torch.stack(c).sum(dim=0),
            *(kept["control_variates"]["c"] for kept in state.client_states.values()),
        ),
        1 / 6,
    )
    assert max_rel_diff(state.server.state["control_variates"]["c"], mean)[1] < 1e-14
    assert float(pytree.squared_norm(mean)) > 0


def test_control_variates_of_plain_gradients_are_their_mean() -> None:
    """Option II with plain SGD: x - y = lr * (sum of corrected gradients), so with c = c_i = 0 in
    round 1, c_i is the mean gradient over the local steps.

    6 examples at batch 4 for two epochs are 4 steps; all four gradients are taken again here, by
    autograd on the module.
    """
    experiment = small_experiment(
        control_variates(), EQUAL | {"local.optimizer": "sgd(lr=0.1)", "local.epochs": 2}
    )
    job, replies, _ = play_by_hand(experiment)
    task = experiment.task
    for place, client in enumerate(job.clients.tolist()):
        plan, ids = (
            plan_phase(task, job, client, 0, task.phases[0]),
            torch.from_numpy(task.population.at(0).train.for_client(client)),
        )
        module = task.model.to_module(task.model.initial).train()
        total = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
        assert len(plan.batch_sizes) == 4
        for positions, width in zip(plan.indices, plan.batch_sizes, strict=True):
            rows = ids[positions[:width]]
            module.zero_grad()
            nn.functional.cross_entropy(
                module(task.train.inputs(rows)), task.train.labels(rows)
            ).backward()
            with torch.no_grad():
                for name, value in module.named_parameters():
                    assert value.grad is not None
                    total[name] += value.grad / 4
                    value -= 0.1 * value.grad
        mine = pytree.take(replies.client_state["control_variates"]["c"], place)
        assert (
            max_rel_diff(mine, {name: value.detach() for name, value in total.items()})[1] < 1e-13
        )


def test_weights_come_from_the_clients() -> None:
    """By hand: the losses of the received model, normalized, and the sum of weight times
    parameters.
    """
    experiment = small_experiment(loss_weighted())
    job, replies, update = play_by_hand(experiment)
    task = experiment.task
    module, rows = task.model.to_module(task.model.initial), task.population.at(0).train
    losses = []
    for client in job.clients.tolist():
        ids = torch.from_numpy(rows.for_client(client))
        losses.append(
            nn.functional.cross_entropy(
                module(task.train.inputs(ids)), task.train.labels(ids)
            ).item()
        )
    weights = [loss / sum(losses) for loss in losses]
    assert update.weights.tolist() == pytest.approx(weights, rel=1e-12)
    for name, value in update.server.model.params.items():
        by_hand = sum(weight * replies.params[name][place] for place, weight in enumerate(weights))
        assert torch.allclose(value, by_hand, rtol=0, atol=1e-14)


def test_refinement_is_plain_training_on_the_public_rows() -> None:
    """Against torch.optim.SGD on the same batches; batch norm's statistics go on from the
    merged ones.
    """
    experiment = with_norms(refined())
    job, _, update = play_by_hand(experiment)
    task = experiment.task
    module, previous = (
        copy.deepcopy(task.model.to_module(update.merged)).train(),
        task.model.to_module(task.model.initial),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    plan = plan_batches(job.key.fold_in("server", "fit", "call", 0, "plan"), 8, 4, epochs=2)
    for positions in plan.indices:
        ids = task.public[torch.from_numpy(positions)]
        x, y = task.train.inputs(ids), task.train.labels(ids)
        logits = module(x)
        hold = ((logits - previous(x).detach()) ** 2).sum(dim=1).mean()
        optimizer.zero_grad()
        (nn.functional.cross_entropy(logits, y) + 0.1 * hold).backward()
        optimizer.step()
    model = update.server.model
    assert (
        max_rel_diff(
            {**model.params, **model.buffers},
            {name: value.detach() for name, value in module.state_dict().items()},
        )[1]
        < 1e-12
    )
    assert max_rel_diff(model.params, update.merged.params)[1] > 1e-3


def test_a_frozen_head_keeps_its_bits_and_does_not_travel() -> None:
    experiment, whole = with_norms(frozen_head()), with_norms(fedprox(mu=0))
    (state, lines), (_, more) = (
        run_rounds(made, SequentialEngine(made.task), 2) for made in (experiment, whole)
    )
    for name in experiment.task.info.head:
        assert torch.equal(
            state.server.model.params[name], experiment.task.model.initial.params[name]
        )
    head_bytes = 8 * (6 * 4 + 4)
    assert more[0]["bytes_up"] - lines[0]["bytes_up"] == 4 * head_bytes
    assert more[0]["bytes_down"] - lines[0]["bytes_down"] == 4 * head_bytes


def test_personal_layers_stay_with_their_client() -> None:
    experiment = with_norms(own_norms())
    first = experiment.task.model.initial
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    world, model = experiment.task.info, state.server.model
    assert (world.norms, world.buffers) == (
        ("norm.weight", "norm.bias"),
        ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    )
    assert all(torch.equal(model.params[name], first.params[name]) for name in world.norms)
    assert all(torch.equal(model.buffers[name], first.buffers[name]) for name in world.buffers)
    for kind, name in (("params", "norm.weight"), ("buffers", "norm.running_mean")):
        kept = [tuple(own["personal"][kind][name].tolist()) for own in state.client_states.values()]
        assert len(set(kept)) == len(kept) >= 4
    # the next round starts from them: a learning rate that no weight can feel returns the weights
    # that were kept
    job = make_work(experiment, state, 3)._replace(
        optimizer_hparams={**experiment.optimizer_hparams(3), "lr": 1e-300}
    )
    for place, reply in enumerate(SequentialEngine(experiment.task).train(job)):
        assert torch.equal(
            reply.client_state["personal"]["params"]["norm.weight"][0],
            job.client_state["personal"]["params"]["norm.weight"][place],
        )
        assert not {*reply.params, *reply.buffers} & {*world.norms, *world.buffers}


def test_a_phase_that_is_not_accepted_leaves_no_trace() -> None:
    """With a margin no loss can reach, the two-phase method is the one-phase method; with one
    that all reach, only the head differs.
    """
    never, always, plain = (
        with_norms(part)
        for part in (tuned_head(margin=1e9), tuned_head(margin=-1e9), fedprox(mu=0))
    )
    job = make_work(plain, first_state(plain), 1)
    body = [name for name in plain.task.model.initial.params if name not in plain.task.info.head]
    for reverted, kept, one_phase in zip(
        *(SequentialEngine(made.task).train(job) for made in (never, always, plain)), strict=True
    ):
        assert max_rel_diff(reverted.params, one_phase.params) == ("", 0.0)
        assert max_rel_diff(
            pytree.select_keys(kept.params, body), pytree.select_keys(one_phase.params, body)
        ) == ("", 0.0)
        assert all(
            not torch.equal(kept.params[name], one_phase.params[name])
            for name in plain.task.info.head
        )


def test_a_phase_with_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="leaves nothing to train"):
        with_norms(frozen_head() + tuned_head())


def test_a_gradient_rule_by_hand() -> None:
    """One step of SGD: w - lr * g(w - lr * g(w), x + size * sign(dl/dx)), all three gradients
    by autograd on the module.
    """
    experiment = small_experiment(
        look_ahead(), EQUAL | {"local.steps": 1, "local.optimizer": "sgd(lr=0.1)"}
    )
    job, replies, _ = play_by_hand(experiment)
    task = experiment.task
    for place, client in enumerate(job.clients.tolist()):
        ids = torch.from_numpy(task.population.at(0).train.for_client(client))[
            plan_phase(task, job, client, 0, task.phases[0]).indices[0]
        ]
        x, y = task.train.inputs(ids).requires_grad_(), task.train.labels(ids)
        module = task.model.to_module(task.model.initial)
        weights = list(module.parameters())
        *grads, towards = torch.autograd.grad(
            nn.functional.cross_entropy(module(x), y), [*weights, x]
        )
        old = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w -= 0.1 * g
        second = torch.autograd.grad(
            nn.functional.cross_entropy(module(x.detach() + 0.01 * towards.sign()), y), weights
        )
        wanted = {
            name: w - 0.1 * g
            for (name, _), w, g in zip(module.named_parameters(), old, second, strict=True)
        }
        assert max_rel_diff(pytree.take(replies.params, place), wanted)[1] < 1e-13


def test_a_projection_is_where_the_next_step_starts() -> None:
    """Steps of any size end on the ball of radius 0.05, and what follows the optimizer, such as a
    tracker, sees the models on it.
    """
    longest = StepTracker(
        lambda ctx, ops: {"longest": torch.zeros((), dtype=ctx.info.dtype)},
        lambda seen, before, after, batch, ops, ctx: {
            "longest": torch.maximum(seen["longest"], length_of(after.params, ctx.start.params))
        },
    )
    watch = Part(
        "watch",
        step_tracker=longest,
        on_client_end=lambda ctx, trained, ops: ({}, dict(ctx.tracker_state)),
        payload=lambda start, info: {"longest": torch.zeros((), dtype=info.dtype)},
    )
    experiment = small_experiment(
        near() + watch, EQUAL | {"local.steps": 3, "local.optimizer": "sgd(lr=1, momentum=0.9)"}
    )
    job, replies, _ = play_by_hand(experiment)
    for place in range(replies.num_clients):
        end = length_of(pytree.take(replies.params, place), job.start.params)
        assert float(end) == pytest.approx(0.05, rel=1e-12)
    assert replies.payload["watch"]["longest"].tolist() == pytest.approx([0.05] * 4, rel=1e-12)


def length_of(params: Params, start: Params) -> Tensor:
    """The distance of a model from another."""
    return torch.sqrt(pytree.squared_norm(pytree.sub(params, start)))


def test_transforms_run_by_stage_and_draw_from_the_key() -> None:
    """One step of SGD at lr 1 without noise moves by at most the bound of 0.1; with noise on
    top, by the same draws every time, by more.
    """
    changes = EQUAL | {"local.steps": 1, "local.optimizer": "sgd(lr=1)"}
    noisy, again, quiet = (
        small_experiment(part, changes)
        for part in (private(), private(), replace(private(), hyper={"sigma": 0.0, "bound": 0.1}))
    )
    moves = []
    for experiment in (noisy, again, quiet):
        job, replies, _ = play_by_hand(experiment)
        moves.append(
            [pytree.take(replies.delta(job.start), place) for place in range(replies.num_clients)]
        )
    for first, second, clipped in zip(*moves, strict=True):
        assert max_rel_diff(first, second) == ("", 0.0)
        # all gradients here are longer than the bound
        assert float(pytree.squared_norm(clipped)) == pytest.approx(0.1**2, rel=1e-12)
        noise = pytree.sub(clipped, first)
        count = sum(value.numel() for value in noise.values())
        # sigma^2, from some 60 draws
        assert float(pytree.squared_norm(noise)) / count == pytest.approx(0.01**2, rel=0.5)


def test_a_server_of_ones_own_by_hand() -> None:
    """v_1 = mean(w_k) - w_0 and w_1 = w_0 + v_1, whatever the clients' sizes; the momentum is
    remembered for round 2.
    """
    experiment = small_experiment(heavy_server())
    _, replies, update = play_by_hand(experiment)
    start = experiment.task.model.initial.params
    for name, value in update.server.model.params.items():
        assert torch.allclose(value, replies.params[name].mean(dim=0), rtol=0, atol=1e-14)
        assert torch.allclose(
            update.server.state["heavy_server"]["velocity"][name],
            value - start[name],
            rtol=0,
            atol=1e-14,
        )


def test_what_is_sent_must_be_announced() -> None:
    part = Part("secretive", on_client_end=lambda ctx, trained, ops: ({}, {"size": ctx.stats.size}))
    with pytest.raises(AssertionError, match=r"secretive with unequal clients.*not declared"):
        check_method(part)


def test_what_is_kept_must_not_change_its_form() -> None:
    part = Part(
        "growing",
        client_state=lambda *_: {"n": torch.zeros(1)},
        on_client_end=lambda ctx, trained, ops: ({"n": torch.zeros(2)}, {}),
    )
    with pytest.raises(AssertionError, match=r"growing with unequal clients.*must keep its shapes"):
        check_method(part)


def test_a_part_that_keeps_nothing_beside_one_that_does() -> None:
    """Newcomers and those who came before must fit into one stack."""
    counter = Part(
        "counter",
        client_state=lambda *_: {"n": torch.zeros(())},
        on_client_end=lambda ctx, *_: ({"n": ctx.client_state["n"] + 1}, {}),
    )
    experiment = small_experiment(counter + loss_weighted(), {"clients.sample": 3})
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 4)
    assert sum(int(kept["counter"]["n"]) for kept in state.client_states.values()) == 4 * 3


def test_after_knows_how_many_steps_were_made() -> None:
    """6 examples at batch 4 for two epochs are 2 * 2 steps, and the second phase adds 2."""
    steps = Part(
        "steps",
        client_state=lambda *_: {"n": torch.zeros((), dtype=torch.int64)},
        on_client_end=lambda ctx, *_: ({"n": ctx.steps}, {}),
    )
    experiment = small_experiment(steps + tuned_head(), EQUAL | {"local.epochs": 2})
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert {int(kept["steps"]["n"]) for kept in state.client_states.values()} == {6}


def test_weights_that_sum_to_nothing_do_no_harm() -> None:
    """The round is abandoned, the model stays."""
    experiment = small_experiment(
        Part("silent", client_weights=lambda replies, srv: replies.weight * 0)
    )
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert lines[0]["abandoned"]
    assert max_rel_diff(state.server.model.params, experiment.task.model.initial.params) == (
        "",
        0.0,
    )


def test_local_buffers_of_a_model_without_any_resume(tmp_path: Path) -> None:
    config = small_experiment(
        "fedavg", {"local.buffers": "local", "clients.sample": 2, "rounds": 1}
    ).config
    start_run(config, tmp_path / "run")
    assert resume_run(tmp_path / "run", rounds=5).finished


def test_an_extended_run_still_asks_for_its_method(tmp_path: Path) -> None:
    """Else it would silently go on as something else."""
    method = as_method(fedprox(mu=5.0))
    start_run(small_experiment(method, {"rounds": 1}).config, tmp_path / "run", method=method)
    resume_run(tmp_path / "run", rounds=2, method=method)
    with pytest.raises(InputError, match="started from Python with its own method"):
        resume_run(tmp_path / "run", rounds=3)
