"""Training at the server on its public set: `ServerOps`.

Inputs are not augmented, so a method can compute the logits of its teachers once and look them
up by an example's position in the public set.
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
from remanence.core.contexts import Context, Fit, PublicLoss, ServerOps
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree, weighted_mean
from remanence.core.rng import Key, fold_in_batch
from remanence.core.slots import Optimizer
from remanence.core.types import Batch, ClientStats, ModelState, Reply
from remanence.data.batches import BatchPlan, plan_batches
from remanence.training.gradients import grad_autograd
from remanence.training.server_capture import ServerTrainState, StepInputs, get_steps
from remanence.training.task import TrainingTask

CHECKS = 20  # validations within the patience


def make_server_ops(
    task: TrainingTask,
    optimizer_hparams: dict[str, float],
    key: Key,
    engine: Engine,
    local_models: Callable[[Reply], ModelState],
) -> ServerOps:
    """What server-side hooks may call.

    Args:
        task: The run's task.
        optimizer_hparams: The clients' learning rate and so on in this round.
        key: The randomness of this call.
        engine: Evaluates models on the public set.
        local_models: Maps replies to the clients' complete models, stacked.
    """
    ids = task.public.to(task.info.device)

    def predict_logits(models: ModelState) -> Tensor:
        return _predict_logits(task, engine, models, ids)

    return ServerOps(
        make_fit(task, optimizer_hparams, key, engine),
        predict_logits,
        task.train.labels(ids),
        local_models,
    )


def _predict_logits(task: TrainingTask, engine: Engine, models: ModelState, ids: Tensor) -> Tensor:
    """Logits [n, C] of one model, or [m, n, C] of a stack, on training examples."""
    name, value = next(iter(task.model.initial.params.items()))
    if models.params[name].dim() > value.dim():
        return engine.predict_logits(models, ids)
    stack = ModelState(*(pytree.broadcast(tree, 1) for tree in models))
    return engine.predict_logits(stack, ids)[0]


def make_fit(
    task: TrainingTask, optimizer_hparams: Mapping[str, float], key: Key, engine: Engine
) -> Fit:
    """`ops.fit`, see `remanence.core.contexts.Fit`. Every call draws its own batches."""
    calls = itertools.count()

    def fit(
        model: ModelState,
        loss: PublicLoss,
        loss_args: Tree,
        *,
        epochs: int = 0,
        steps: int = 0,
        batch: int = 0,
        optimizer: Optimizer | None = None,
        cosine: bool = False,
        validation: float = 0.0,
        patience: int = 0,
    ) -> ModelState:
        call_key, device = key.fold_in("call", next(calls)), task.info.device
        hparams = optimizer_hparams if optimizer is None else optimizer.hparams
        optimizer = optimizer or task.optimizer
        train_places, valid_places = _split_public(task, call_key, validation)
        plan = _plan(task, call_key, len(train_places), batch, epochs, steps)
        num_steps = len(plan.batch_sizes)
        public = task.public.to(device)
        inputs = StepInputs(
            start=model,
            loss_args=loss_args,
            public=public,
            places=torch.from_numpy(train_places[plan.indices]).to(device),
            keys=_step_keys(call_key, num_steps).to(device),
            rates=_rates(task, hparams, num_steps, cosine),
        )
        params = pytree.select_keys(model.params, task.communicated_params())
        state = ServerTrainState(params, model.buffers, optimizer.init(params))
        stepper = get_steps(
            task,
            partial(server_train_step, task, loss, optimizer),
            loss,
            optimizer,
            state,
            inputs,
            compile=engine.execution == "compiled" and device.type == "cpu",
        )
        stopper = None
        if patience and len(valid_places):
            valid_ids = public[torch.from_numpy(valid_places).to(device)]
            stopper = EarlyStopping(task, engine, valid_ids, patience, model)
        for step, batch_size in enumerate(plan.batch_sizes.tolist()):
            stepper.take(step, batch_size)
            if stopper is not None and stopper.is_due(step, num_steps):
                stopper.validate(step, _merge(model, stepper.read()))
                if step - stopper.best_step >= patience:
                    break
        return _merge(model, stepper.read()) if stopper is None else stopper.best

    return fit


class EarlyStopping:
    """Keeps the model with the most correct validation examples and the step it is from."""

    def __init__(
        self, task: TrainingTask, engine: Engine, ids: Tensor, patience: int, model: ModelState
    ):
        self.task, self.engine, self.ids, self.patience = task, engine, ids, patience
        self.best, self.best_correct, self.best_step = model, -1, 0

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the model is validated after this step."""
        return (step + 1) % max(1, self.patience // CHECKS) == 0 or step + 1 == num_steps

    def validate(self, step: int, model: ModelState) -> None:
        """Count correct predictions, and keep the model if it has more of them than the best."""
        logits = _predict_logits(self.task, self.engine, model, self.ids)
        correct = int((logits.argmax(dim=1) == self.task.train.labels(self.ids)).sum())
        if correct > self.best_correct:
            self.best, self.best_correct, self.best_step = model, correct, step


def server_train_step(
    task: TrainingTask,
    loss: PublicLoss,
    optimizer: Optimizer,
    inputs: StepInputs,
    state: ServerTrainState,
    step: Tensor,
    batch_size: int,
) -> ServerTrainState:
    """One step at the server.

    Args:
        task: The run's task.
        loss: The loss on the public set.
        optimizer: The optimizer of this training.
        inputs: What is fixed for all steps.
        state: The result of the step before.
        step: The step's number [1], on the device, so that the step can be captured.
        batch_size: How many entries of the step's row of `inputs.places` are used.
    """
    place = inputs.places.index_select(0, step)[0, :batch_size]
    ctx, batch = _make_context(task, inputs, step), _make_batch(task, inputs.public[place])
    fixed = {name: value for name, value in inputs.start.params.items() if name not in state.params}

    def loss_fn(params: Params) -> tuple[Tensor, Tree]:
        out, new_buffers = task.model.apply({**fixed, **params}, state.buffers, batch.x, ctx.key)
        return weighted_mean(loss(out, batch, place, inputs.loss_args), batch.weight), new_buffers

    grads, buffers = grad_autograd(loss_fn, state.params)
    params, opt_state = optimizer.step(state.params, grads, state.opt_state, ctx)
    return ServerTrainState(params, buffers, opt_state)


def _split_public(task: TrainingTask, key: Key, validation: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the public set: those to train on and those to validate on, both ascending."""
    if not len(task.public):
        raise InputError(
            "training at the server needs a public set: declare needs_public_data=True in the part"
            " that calls ops.fit, and add --public 1000 (data.public=1000)"
        )
    order = key.fold_in("validation").permutation(len(task.public))
    held_out = round(validation * len(order))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _plan(
    task: TrainingTask, key: Key, num_examples: int, batch: int, epochs: int, steps: int
) -> BatchPlan:
    size = min(batch or task.batch_size, num_examples)
    # batch norm cannot train on a last batch of one example
    last_has_one = task.model.depends_on_batch and size > 1 and num_examples % size == 1
    return plan_batches(
        key.fold_in("plan"), num_examples, size, epochs, steps, drop_last=last_has_one
    )


def _step_keys(key: Key, num_steps: int) -> Tensor:
    return torch.from_numpy(fold_in_batch(key, "step", np.arange(num_steps)).astype(np.int64))


def _rates(
    task: TrainingTask, hparams: Mapping[str, float], num_steps: int, cosine: bool
) -> dict[str, Tensor]:
    """The optimizer's hyper-parameters in every step, [steps] each."""
    decay = [(1 + math.cos(math.pi * step / num_steps)) / 2 for step in range(num_steps)]
    tables = {
        name: [value * factor if cosine and name == "lr" else value for factor in decay]
        for name, value in hparams.items()
    }
    return {
        name: torch.tensor(table, dtype=torch.float64).to(task.info.dtype).to(task.info.device)
        for name, table in tables.items()
    }


def _merge(model: ModelState, state: ServerTrainState) -> ModelState:
    """The model with its trained parameters and buffers."""
    return ModelState(model.params | state.params, state.buffers)


def _make_batch(task: TrainingTask, ids: Tensor) -> Batch:
    weight = torch.ones(len(ids), dtype=task.info.dtype, device=ids.device)
    return Batch(task.train.inputs(ids), task.train.labels(ids), weight, ids)


def _make_context(task: TrainingTask, inputs: StepInputs, step: Tensor) -> Context:
    """A context for the optimizer, which reads only its hyper-parameters: the server has no
    client number (-1) and no client statistics.
    """
    number = step.squeeze(0)
    return Context(
        client=torch.full_like(number, -1),
        round=number,
        start=inputs.start,
        broadcast={},
        client_state={},
        tracker_state={},
        stats=ClientStats(number, number),
        step=number,
        steps=number,
        hyper={},
        optimizer_hparams={
            name: table.index_select(0, step).squeeze(0) for name, table in inputs.rates.items()
        },
        key=inputs.keys.index_select(0, step).squeeze(0),
        info=task.info,
    )
