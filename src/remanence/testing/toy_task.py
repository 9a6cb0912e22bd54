"""Small experiments on a toy task, and functions that compare their results: used by the checkers
of this package and by our own tests.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remanence.config import parse_experiment
from remanence.core import pytree
from remanence.core.compose import parse_method
from remanence.core.contexts import ClientOps, Context, ServerContext
from remanence.core.engine import ClientWork, Engine
from remanence.core.errors import InputError
from remanence.core.model import init_module
from remanence.core.pytree import Params, Tree, weighted_mean
from remanence.core.rng import Key
from remanence.core.slots import Method, Part, Transform
from remanence.core.types import ClientStats, ModelState, Reply, TaskInfo
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.data_setup import load_data
from remanence.methods import PARTS
from remanence.results import checkpoint_codec
from remanence.rounds.setup import first_state, make_round
from remanence.training.state import RunState

# Six clients of about 30 to 1 training examples, four of them in a round: there is always one with
# a single example, and most lack a class.
SMALL: dict[str, Any] = {
    "data.name": "synthetic(samples=76, classes=4, features=5, test=0.25)",
    "data.partition": "quantity(power=2.5, minimum=1)",
    "data.validation": 0.2,
    "clients.count": 6,
    "clients.sample": 4,
    "model": "remanence.testing.toy_task:LayerNormNet",
    "local.batch_size": 4,
    "local.optimizer": "sgd(lr=0.05, momentum=0.5)",
    "precision": "fp64",
    "device": "cpu",
    "engine": "sequential",
}
# Equal clients of 6 training examples, for batch norm: the last batch is equally short for all, so
# that it needs no padding.
EQUAL: dict[str, Any] = {"data.partition": "dirichlet(alpha=0.5, samples=8)"}

# Equal clients of 4 training examples, in two clusters that disagree on two labels. In every round,
# which is a time step here, every client changes its cluster.
DRIFTING: dict[str, Any] = {
    "drift.schedule": "rotation(clusters=2)",
    "drift.concepts": "swap",
    "drift.samples": 4,
    "drift.validation": 2,
    "rounds": 1,
}


# Arguments for methods whose defaults would take minutes on the built-in task, or would make each
# client average with all others. A small learning rate for feddf, because Adam turns rounding
# errors into steps.
FAST_CONFIGS = {
    "dac": "dac(peers=2)",
    "feddf": "feddf(steps=6, patience=4, lr=1e-05)",
    "hast": "hast(peers=2, depth=2, finetune_epochs=1)",
    "oracle": "oracle(peers=2)",
    "random": "random(peers=2)",
}


def fast_config(name: str) -> str:
    """A method with arguments that are fast on the built-in task, where it has an entry."""
    return FAST_CONFIGS.get(name, name)


class LayerNormNet(nn.Module):
    """A small network with a normalization that treats every example alone, so that it can always
    be stacked.
    """

    def __init__(self, shape: tuple[int, ...], classes: int):
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(shape[0], 6),
            nn.LayerNorm(6),
            nn.Linear(6, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.body(x))))  # [B, classes]
        return logits


class BatchNormNet(nn.Module):
    """The smallest network with buffers, for the built-in task."""

    def __init__(self, inputs: int = 5, classes: int = 4):
        super().__init__()
        # no bias before batch norm: its gradient would be pure rounding, which Adam turns into
        # steps
        self.body, self.norm, self.head = (
            nn.Linear(inputs, 6, bias=False),
            nn.BatchNorm1d(6),
            nn.Linear(6, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.body(x))))  # [B, classes]
        return logits


def batch_norm_net() -> nn.Module:
    """The same weights every time."""
    return init_module(BatchNormNet, Key(0))


def as_method(method: str | Method | Part) -> Method:
    if isinstance(method, str):
        return parse_method(method, PARTS)
    return Method((method,)) if isinstance(method, Part) else method


def small_experiment(
    method: str | Method | Part = "fedavg",
    changes: Mapping[str, Any] | None = None,
    *,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> BuiltExperiment:
    """A method on the built-in task, changed by dotted keys; a public set is there where the method
    needs one.

    >>> small_experiment("fedavg", {"local.batch_size": 2}).task.info.num_clients
    6
    """
    made = as_method(method)
    public = {"data.public": 8} if any(p.needs_public_data for p in made.parts) else {}
    return build(
        parse_experiment({}, SMALL | public | dict(changes or {})),
        method=made,
        module=module,
        source=source,
    )


def drifting_experiment(
    method: str | Method | Part, steps: int, changes: Mapping[str, Any] | None = None
) -> BuiltExperiment:
    """A method on the built-in task while the data drift, a round a time step.

    >>> drifting_experiment("fedavg", 2).task.population.at(1).cluster.tolist()
    [1, 1, 1, 0, 0, 0]
    """
    return small_experiment(method, DRIFTING | {"drift.time_steps": steps} | dict(changes or {}))


def drop_class(label: int) -> ArrayDataset:
    """The built-in data, with no training example of a class."""
    source = load_data(parse_experiment({}, SMALL))
    return replace(source, train=source.train.select(np.flatnonzero(source.train.y != label)))


def dataset_for(module: nn.Module, shape: tuple[int, ...], classes: int) -> ArrayDataset:
    """Random examples of the kind a network reads."""
    draw = Key(0).fold_in("source_for").generator()
    embeddings = [
        layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)
    ]
    kind = "image" if len(shape) == 3 else "tokens" if embeddings else "table"
    splits = []
    for count in (48, 8):
        x: np.ndarray
        if kind == "table":
            x = draw.standard_normal((count, *shape), dtype=np.float32)
        elif kind == "image":
            x = draw.integers(0, 256, (count, *shape)).astype(np.uint8)
        else:
            x = draw.integers(0, embeddings[0], (count, *shape))
        splits.append(DatasetSplit(x, np.arange(count, dtype=np.int64) % classes))
    return ArrayDataset(
        "random", kind, tuple(str(label) for label in range(classes)), splits[0], splits[1]
    )


def run_rounds(
    experiment: BuiltExperiment, engine: Engine, rounds: int
) -> tuple[RunState, list[dict[str, Any]]]:
    """The whole round loop on an engine -> the state after the rounds, and the metrics of
    each.
    """
    if rounds > experiment.config.total_rounds:
        raise InputError(
            f"the experiment has {experiment.config.total_rounds} rounds, and {rounds} are asked"
            " for: set its rounds"
        )
    state, lines = first_state(experiment), []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(make_round(experiment, engine, Path(folder))) as round,
    ):
        for _ in range(rounds):
            state, line = round.run(state)
            lines.append(line)
    return state, lines


def with_client_models(work: ClientWork) -> ClientWork:
    """The same round with a model of its own for each client: the head's weights times numbers
    from 0.5 to 1.5.
    """
    k = len(work.clients)
    params, buffers = (pytree.clone(pytree.broadcast(tree, k)) for tree in work.start)
    factors = torch.linspace(0.5, 1.5, k, dtype=torch.float64)
    params["head.weight"] = params["head.weight"] * factors.to(params["head.weight"]).reshape(
        -1, 1, 1
    )
    return work._replace(start=ModelState(params, buffers), per_client_start=True)


def work_tree(work: ClientWork) -> Tree:
    """All tensors of a work as one tree."""
    return {
        "start": {"params": work.start.params, "buffers": work.start.buffers},
        "broadcast": work.broadcast,
        "client_state": work.client_state,
        "stats": work.stats._asdict(),
    }


def state_tree(state: RunState) -> Tree:
    """All tensors of a run as one tree."""
    own = {str(client): kept for client, kept in sorted(state.client_states.items())}
    return checkpoint_codec.as_tree(state) | {"client_states": own}


def max_rel_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, float]:
    """Where two trees differ most, and by how much relative to the larger of 1 and the value;
    infinity where they cannot be compared.

    >>> max_rel_diff({"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 5.0])})
    ('w', 0.2)
    """
    left, right = pytree.flatten(a), pytree.flatten(b)
    if odd := sorted(set(left) ^ set(right)):
        return odd[0], float("inf")
    worst, distance = "", 0.0
    for name, x in left.items():
        y = right[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return name, float("inf")
        gap = (x.double() - y.double()).abs() / y.double().abs().clamp(min=1.0)
        # infinity, where both have yet to measure something, is equal too
        gap = torch.where(x == y, 0.0, gap)
        here = float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0
        if here > distance:
            worst, distance = name, here
    return worst, distance


def all_slots_part() -> Part:
    """A part that reads and returns everything that passes between an engine and a client, so that
    a value that an engine leaves out changes the results.
    """

    def client_state(start: ModelState, stats: ClientStats, info: TaskInfo) -> Tree:
        number = torch.zeros((), dtype=torch.int64)
        return {
            "moved": pytree.zeros_like(start.params),
            "seen": torch.zeros_like(stats.label_counts),
            "key": number,
            "steps": number,
        }

    def payload(start: ModelState, info: TaskInfo) -> Tree:
        return {"gradient": start.params, "loss": torch.zeros((), dtype=info.dtype)}

    def on_client_start(ctx: Context, ops: ClientOps) -> tuple[Tree, Tree]:
        out, batch = ops.predict(ctx.start)
        losses = nn.functional.cross_entropy(out.logits, batch.y, reduction="none")
        return {"seen": ctx.client_state["seen"] + ctx.stats.label_counts}, {
            "loss": weighted_mean(losses, batch.weight)
        }

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return pytree.map(
            lambda g, mine, all: g + ctx.hyper["pull"] * (mine + all),
            grads,
            ctx.client_state["moved"],
            ctx.broadcast["gradient"],
        )

    def on_client_end(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        moved = pytree.sub(trained.params, ctx.start.params)
        return {"moved": moved, "key": ctx.key, "steps": ctx.steps}, {
            "gradient": ops.grad(trained.params, ops.predict(trained)[1])
        }

    def update_server_state(replies: Reply, srv: ServerContext) -> Tree:
        return {
            "gradient": pytree.map(
                lambda x: x.mean(dim=0), replies.payload["all_slots_part"]["gradient"]
            )
        }

    return Part(
        "all_slots_part",
        hyper={"pull": 0.1},
        reads_label_counts=True,
        transforms=(Transform("correct", correct),),
        on_client_start=on_client_start,
        on_client_end=on_client_end,
        update_server_state=update_server_state,
        client_state=client_state,
        payload=payload,
        server_state=lambda start, info: {"gradient": pytree.zeros_like(start.params)},
        broadcast=lambda srv: srv.state,
    )
