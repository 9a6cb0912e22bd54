"""Every row's gradient is clipped by itself: by hand, against Opacus, on every engine; and what
would let a row be felt otherwise is refused.
"""

from __future__ import annotations

import copy
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from remanence.config import parse_experiment
from remanence.core import pytree
from remanence.core.compose import parse_method
from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import InputError
from remanence.core.model import init_module
from remanence.core.pytree import Params
from remanence.core.rng import Key
from remanence.core.slots import Part
from remanence.core.types import Batch, Output
from remanence.data.batches import plan_batches
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.networks import build_module
from remanence.methods import PARTS, dp_sgd, fedavg
from remanence.privacy.dp_sgd import clipped_sum
from remanence.rounds.federated import make_work
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import (
    EQUAL,
    SMALL,
    LayerNormNet,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)

needs_opacus = pytest.mark.skipif(
    find_spec("opacus") is None,
    reason="the package opacus is not installed (the extra remanence-fl[dp])",
)
IMAGES = {
    "data.name": "synthetic(samples=96, classes=4, shape='2x6x6', test=0.25)",
    "data.partition": "dirichlet(alpha=100)",
}
ONE_STEP = {
    "local.steps": 1,
    "local.batch_size": 6,
    "local.optimizer": "sgd(lr=1.0)",
    "data.normalize": False,
}


class GroupNormNet(nn.Module):
    """Convolutions, group norm and biases: a layer of every kind whose rows do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Conv2d(2, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Linear(4 * 16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.body(x))).flatten(1))  # [B, 4]
        return logits


# ------------------------------------------------------------------------------------- clip and sum


@given(numbers=st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=8), limit=st.floats(1e-3, 10))
def test_no_row_moves_the_sum_further_than_the_clip(numbers: list[float], limit: float) -> None:
    """The promise rests on this: with and without any one row, the sums differ by at most the
    clip.
    """
    rows = {
        "a": torch.tensor(numbers[:4]).double().reshape(2, 2),
        "b": torch.tensor(numbers[4:]).double().reshape(2, 1, 2),
    }
    clip = torch.tensor(limit, dtype=torch.float64)
    both, one = (
        clipped_sum(rows, torch.tensor(weight, dtype=torch.float64), clip)
        for weight in ([1.0, 1.0], [1.0, 0.0])
    )
    assert float(pytree.squared_norm(pytree.sub(both, one)).sqrt()) <= limit * (1 + 1e-9)


def test_a_row_without_a_gradient_is_no_division_by_zero() -> None:
    rows = {"w": torch.tensor([[0.0, 0.0], [0.6, 0.8]])}
    assert clipped_sum(rows, torch.ones(2), torch.tensor(0.5))["w"].tolist() == pytest.approx(
        [0.3, 0.4]
    )


def gradients_of(part: Part, rows: Tensor, weight: Tensor, keys: int) -> Tensor:
    """What a part makes of rows' gradients [B, n], for many keys. -> [keys, n]"""
    batch = Batch(torch.empty(0), torch.empty(0), weight, torch.empty(0))
    ops: Any = SimpleNamespace(
        per_example_grad=lambda params, batch: ({"w": rows}, {"w": torch.zeros(rows.shape[1])})
    )
    assert part.gradient is not None
    found = []
    for number in range(keys):
        hyper = {name: torch.tensor(value) for name, value in part.hyper.items()}
        ctx: Any = SimpleNamespace(hyper=hyper, key=Key(number).tensor())
        found.append(part.gradient({"w": rows[0]}, batch, ops, ctx)["w"])
    return torch.stack(found)


def test_the_noise_is_the_clips_and_divided_by_the_rows_that_count() -> None:
    """z * clip / b = 1.5 * 2 / 3: the fourth row is padding. 600 keys of 4 numbers know a
    deviation to 1 / sqrt(2 * 2400) = 1.4%; four times that.
    """
    rows, weight = (
        torch.tensor([[4.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0], [9.0, 9, 9, 9]]),
        torch.tensor([1.0, 1, 1, 0]),
    )
    drawn = gradients_of(dp_sgd(clip=2, noise=1.5), rows, weight, 600)
    assert float((drawn - drawn.mean(dim=0)).std()) == pytest.approx(1.5 * 2 / 3, rel=0.058)
    assert drawn.mean(dim=0).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=4 / math.sqrt(600))
    correlation = torch.corrcoef(drawn.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 4 / math.sqrt(600)
    plain = gradients_of(dp_sgd(clip=2, noise=0), rows, weight, 1)
    assert plain[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])


# ----------------------------------------------------------------------------------- against Opacus


def first_gradients(
    experiment: BuiltExperiment, engine: SequentialEngine | VectorizedEngine
) -> list[dict[str, Tensor]]:
    """Of the first step of every client of round 1: at rate 1 a step is the gradient."""
    job = make_work(experiment, first_state(experiment), 1)
    moved = [
        pytree.sub(pytree.broadcast(job.start.params, reply.num_clients), reply.params)
        for reply in engine.train(job)
    ]
    return [
        pytree.take(stack, row) for stack in moved for row in range(len(next(iter(stack.values()))))
    ]


@needs_opacus
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("kind", ["convolutions", "dense"])
@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_the_same_as_opacus(kind: str, limit: float) -> None:
    """Opacus computes the gradient of every row by hooks of its own; clipped and averaged, they
    are ours.
    """
    from opacus import GradSampleModule

    changes = {**ONE_STEP, **(IMAGES if kind == "convolutions" else {})}
    module = init_module(
        GroupNormNet if kind == "convolutions" else lambda: LayerNormNet((5,), 4), Key(3)
    )
    experiment = small_experiment(fedavg() + dp_sgd(clip=limit, noise=0), changes, module=module)
    task, job = experiment.task, make_work(experiment, first_state(experiment), 1)
    ours = [
        first_gradients(experiment, engine)
        for engine in (SequentialEngine(task), VectorizedEngine(task, 3))
    ]
    for place, client in enumerate(job.clients.tolist()):
        ids = task.population.at(0).train.for_client(client)
        plan = plan_batches(job.key.fold_in("client", client, "plan", 0), len(ids), 6, steps=1)
        rows = torch.from_numpy(ids[plan.indices[0, : plan.batch_sizes[0]]])
        network = copy.deepcopy(module).double()
        network.load_state_dict(job.start.params)
        sampled = GradSampleModule(network, loss_reduction="sum")
        nn.functional.cross_entropy(
            sampled(task.train.inputs(rows)), task.train.labels(rows), reduction="sum"
        ).backward()
        theirs = {
            name.removeprefix("_module."): parameter.grad_sample
            for name, parameter in sampled.named_parameters()
        }
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in theirs.values()]).norm(dim=0)
        factors = (limit / norms).clamp(max=1.0)
        assert (factors < 1).all() == (limit < 1)  # one limit clips everybody, the other nobody
        for name, each in theirs.items():
            wanted = torch.einsum("b,b...->...", factors, each) / len(rows)
            for engine in ours:
                assert float((engine[place][name] - wanted).abs().max()) < 1e-10


@needs_opacus
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["mlp", "lenet", "cnn", "resnet18", "resnet18(norm='group')", "shallow_resnet", "densenet121"],
)
def test_models_are_refused_where_opacus_would_refuse_them(name: str) -> None:
    from opacus.validators import ModuleValidator

    module = init_module(lambda: build_module(name, (3, 32, 32), 4), Key(0))
    changes = {
        "data.name": "synthetic(samples=48, classes=4, shape='3x32x32', test=0.25)",
        "data.partition": "dirichlet(alpha=100)",
    }
    if ModuleValidator.is_valid(module):
        small_experiment("fedavg+dp_sgd", changes, module=module)
    else:
        with pytest.raises(
            InputError, match="batch norm mixes examples: use a model with group norm"
        ):
            small_experiment("fedavg+dp_sgd", changes, module=module)


def test_a_clip_that_nobody_feels_leaves_plain_training() -> None:
    states = []
    for method in ("fedprox(mu=0.5)+dp_sgd(clip=1e6, noise=0)", "fedprox(mu=0.5)"):
        experiment = small_experiment(method)
        states.append(
            run_rounds(experiment, SequentialEngine(experiment.task), 2)[0].server.model.params
        )
    assert max_rel_diff(*states)[1] <= TOLERANCE


# -------------------------------------------------------------------------------- in the round loop


@pytest.mark.parametrize(
    "method",
    [
        "fedavg+dp_sgd(noise=0.1)",
        "fedprox(mu=0.1)+moon+dp_sgd",
        "flashback+dp_sgd+dp_counts",
        "wsm+dp_sgd+dp_counts",
        "fedwavg(noise=3)+dp_sgd",
        "scaffold+dp_sgd",
        "fednova+dp_sgd",
    ],
)
def test_equal_on_every_engine(method: str) -> None:
    experiment = small_experiment(method)
    oracle, lines = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    assert not any(line["abandoned"] for line in lines)
    state, _ = run_rounds(experiment, VectorizedEngine(experiment.task, 3), 2)
    assert max_rel_diff(state_tree(state), state_tree(oracle))[1] <= TOLERANCE


def test_it_resumes_exactly(tmp_path: Path) -> None:
    """Noise is a function of round, client and step: there is no generator whose state could be
    lost.
    """
    method = "flashback+dp_sgd+dp_counts"
    config = parse_experiment(
        {}, SMALL | {"method": method, "data.public": 8, "local.steps": 2, "rounds": 2}
    )
    start_run(config.model_copy(update={"rounds": 1}), tmp_path / "broken")
    runs = start_run(config, tmp_path / "straight"), resume_run(tmp_path / "broken", rounds=2)
    reported = [
        [(line["split"], line["loss"], line["epsilon_example"]) for line in run.metrics]
        for run in runs
    ]
    assert reported[0] == reported[1]
    assert reported[0][-1][2] is not None


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "flashback+dp_sgd",
            "dp_sgd and flashback cannot be combined: flashback sends label counts; add dp_counts",
        ),
        (
            "fedavg+wsm+dp_sgd",
            "dp_sgd and wsm cannot be combined: wsm weighs every example by the label counts of"
            " all; add dp_counts",
        ),
        (
            "fedwavg+dp_sgd",
            r"fedwavg sends the number of forgotten examples; write fedwavg\(noise=5\)",
        ),
        ("scaffold(option=1)+dp_sgd", r"write scaffold\(option=2\)"),
        ("hast+dp_sgd", "hast evaluates models on a client's examples"),
        ("feddrift+dp_sgd", "feddrift evaluates models on a client's examples"),
        ("fedreg+dp_sgd", "both replace the computation of the gradient"),
    ],
)
def test_what_would_let_a_row_be_felt_is_refused(method: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        small_experiment(parse_method(method, PARTS))


def test_a_change_after_the_noise_is_refused() -> None:
    """It would read examples that nothing protects."""
    late = Part("late", project=lambda params, batch, ops, ctx: ops.grad(params, batch))
    with pytest.raises(
        InputError,
        match="dp_sgd and late cannot be combined: late changes the model after the noise is added",
    ):
        small_experiment(late + dp_sgd())


def test_batch_norm_is_refused_unless_it_is_frozen() -> None:
    with pytest.raises(
        InputError,
        match="dp_sgd clips the gradient of every single example, and batch norm mixes examples",
    ):
        small_experiment("fedavg+dp_sgd", EQUAL, module=batch_norm_net())
    experiment = small_experiment(
        "fedavg+dp_sgd", EQUAL | {"local.buffers": "frozen"}, module=batch_norm_net()
    )
    run_rounds(experiment, SequentialEngine(experiment.task), 1)


def test_a_users_loss_or_regularizer_cannot_read_the_label_counts() -> None:
    def base(out: Output, batch: Batch, ctx: Context) -> Tensor:
        return nn.functional.cross_entropy(
            out.logits / ctx.stats.label_counts.sum(), batch.y, reduction="none"
        )

    def penalty(params: Params, ctx: Context) -> Tensor:
        return ctx.stats.label_counts.sum() * pytree.squared_norm(params)

    for mine in (Part("mine", loss=base), Part("mine", regularizers=(penalty,))):
        experiment = small_experiment(mine + dp_sgd())
        with pytest.raises(
            InputError, match=r"reads a statistic of all of a client's examples \(label_counts\)"
        ):
            run_rounds(experiment, SequentialEngine(experiment.task), 1)


def test_a_users_payload_is_refused() -> None:
    def after(ctx: Context, trained: Any, ops: ClientOps) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"seen": ctx.stats.size}

    mine = Part(
        "mine",
        on_client_end=after,
        payload=lambda start, info: {"seen": torch.zeros((), dtype=info.dtype)},
    )
    with pytest.raises(
        InputError, match="dp_sgd and mine cannot be combined: mine sends more than its model"
    ):
        small_experiment(mine + dp_sgd())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clip": 0}, "dp_sgd: clip must be a number above 0, not 0"),
        ({"noise": -1}, "dp_sgd: noise"),
        ({"delta": 1}, "dp_sgd: delta"),
        ({"budget": -1}, "dp_sgd: budget"),
        ({"noise": 0, "budget": 3}, "dp_sgd: a budget of 3 cannot be kept without noise"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        dp_sgd(**arguments)
