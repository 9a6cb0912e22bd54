"""Training at the server, on its public set: what FedDF and Flashback borrow.

Inputs are used as they are, without augmentation, so that what teachers say about a row can be
computed once and looked up by its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import Engine
from remanence.core.pytree import Params, Tree, weighted_mean
from remanence.core.rng import Key, fold_in_batch
from remanence.core.slots import Context, Fit, Optimizer, PublicLoss, ServerOps
from remanence.core.types import Batch, ClientStats, ModelState, Reply
from remanence.data.batches import plan_batches
from remanence.training.gradients import grad_autograd
from remanence.training.server_capture import ServerTrainState, StepInputs, get_steps
from remanence.training.task import TrainingTask

CHECKS = 20  # how often within the patience the validation rows are looked at


def make_server_ops(
    task: TrainingTask,
    rule: dict[str, float],
    key: Key,
    engine: Engine,
    local_models: Callable[[Reply], ModelState],
) -> ServerOps:
    """What a server-side part may call; `rule` are the clients' numbers in this round."""
    ids = task.public.to(task.info.device)
    return ServerOps(
        make_fit(task, rule, key, engine),
        lambda models: engine.predict_logits(models, ids),
        task.train.labels(ids),
        local_models,
    )


def make_fit(task: TrainingTask, rule: Mapping[str, float], key: Key, engine: Engine) -> Fit:
    """The lent function itself; every call draws its own batches."""
    calls = itertools.count()

    def fit(
        model: ModelState,
        loss: PublicLoss,
        given: Tree,
        *,
        epochs: int = 0,
        steps: int = 0,
        batch: int = 0,
        optimizer: Optimizer | None = None,
        cosine: bool = False,
        validation: float = 0.0,
        patience: int = 0,
    ) -> ModelState:
        here, used = key.fold_in("call", next(calls)), optimizer or task.optimizer
        order = here.fold_in("validation").permutation(len(task.public))
        held = round(validation * len(order))
        places = np.sort(order[held:])
        size = min(batch or task.batch_size, len(places))
        # batch norm cannot train on a last batch of one row
        lonely = task.model.depends_on_batch and size > 1 and len(places) % size == 1
        plan = plan_batches(
            here.fold_in("plan"), len(places), size, epochs, steps, drop_last=lonely
        )
        total, device = len(plan.batch_sizes), task.info.device
        rates = _rates(task, rule if optimizer is None else optimizer.hparams, total, cosine)
        numbers = torch.from_numpy(
            fold_in_batch(here, "step", np.arange(total)).astype(np.int64)
        ).to(device)
        public = task.public.to(device)
        watched = public[torch.from_numpy(np.sort(order[:held])).to(device)]
        scene = StepInputs(
            model, given, public, torch.from_numpy(places[plan.indices]).to(device), numbers, rates
        )
        params = pytree.select_keys(model.params, task.communicated_params())
        moving = ServerTrainState(params, model.buffers, used.init(params))
        compiled = engine.execution == "compiled" and device.type == "cpu"
        walk = get_steps(
            task, partial(server_train_step, task, loss, used), loss, used, moving, scene, compiled
        )
        best, best_right, best_step = model, -1, 0
        for step, width in enumerate(plan.batch_sizes.tolist()):
            walk.take(step, width)
            if (
                patience
                and held
                and ((step + 1) % max(1, patience // CHECKS) == 0 or step + 1 == total)
            ):
                now = _whole(model, walk.read())
                right = _count_right(task, engine, now, watched)
                if right > best_right:
                    best, best_right, best_step = now, right, step
                elif step - best_step >= patience:
                    break
        return best if patience and held else _whole(model, walk.read())

    return fit


def server_train_step(
    task: TrainingTask,
    loss: PublicLoss,
    used: Optimizer,
    scene: StepInputs,
    moving: ServerTrainState,
    at: Tensor,
    width: int,
) -> ServerTrainState:
    """Step number `at` [1], on the device like everything else, so that it can be recorded."""
    place = scene.places.index_select(0, at)[0, :width]
    ctx, batch = _context(task, scene, at), _batch(task, scene.public[place])
    fixed = {name: value for name, value in scene.start.params.items() if name not in moving.params}

    def objective(params: Params) -> tuple[Tensor, Tree]:
        out, new = task.model.apply({**fixed, **params}, moving.buffers, batch.x, ctx.key)
        return weighted_mean(loss(out, batch, place, scene.loss_args), batch.weight), new

    grads, buffers = grad_autograd(objective, moving.params)
    params, slots = used.step(moving.params, grads, moving.opt_state, ctx)
    return ServerTrainState(params, buffers, slots)


def _whole(model: ModelState, moving: ServerTrainState) -> ModelState:
    return ModelState(model.params | moving.params, moving.buffers)


def _rates(
    task: TrainingTask, numbers: Mapping[str, float], total: int, cosine: bool
) -> dict[str, Tensor]:
    """An optimizer's numbers in every step. -> [steps] each"""
    falling = [(1 + math.cos(math.pi * step / total)) / 2 for step in range(total)]
    tables = {
        name: [value * share if cosine and name == "lr" else value for share in falling]
        for name, value in numbers.items()
    }
    return {
        name: torch.tensor(table, dtype=torch.float64).to(task.info.dtype).to(task.info.device)
        for name, table in tables.items()
    }


def _batch(task: TrainingTask, ids: Tensor) -> Batch:
    weight = torch.ones(len(ids), dtype=task.info.dtype, device=ids.device)
    return Batch(task.train.inputs(ids), task.train.labels(ids), weight, ids)


def _count_right(task: TrainingTask, engine: Engine, model: ModelState, ids: Tensor) -> int:
    said = engine.predict_logits(ModelState(*(pytree.broadcast(tree, 1) for tree in model)), ids)[0]
    return int((said.argmax(dim=1) == task.train.labels(ids)).sum())


def _context(task: TrainingTask, scene: StepInputs, at: Tensor) -> Context:
    """An optimizer asks only for its numbers; the server has no client and no facts."""
    step, nobody = at.squeeze(0), torch.full_like(at.squeeze(0), -1)
    rule = {name: table.index_select(0, at).squeeze(0) for name, table in scene.rates.items()}
    key = scene.keys.index_select(0, at).squeeze(0)
    return Context(
        nobody,
        step,
        scene.start,
        {},
        {},
        {},
        ClientStats(step, step),
        step,
        step,
        {},
        rule,
        key,
        task.info,
    )
