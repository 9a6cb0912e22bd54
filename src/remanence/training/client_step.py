"""Local training of one client, in the order in which a round runs it.

`client_init` prepares the client, `train_step` takes one step after `init_train_state`,
`accept_or_rollback` may undo a phase, and `client_final` makes what the client keeps and sends.
All are pure functions of one client's tensors: the sequential engine calls them client by client
with autograd, the vectorized engine maps them over a stack of clients with `torch.func`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import check_pair
from remanence.core.contexts import Context
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Accept
from remanence.core.types import Batch, ModelState
from remanence.training.client_ops import make_client_ops
from remanence.training.gradients import Differentiate
from remanence.training.loss import make_loss_fn
from remanence.training.task import PERSONAL, ClientIndices, TrainingTask

RETURNS = "client_state, payload"  # of the slots on_client_start and on_client_end


def client_init(
    task: TrainingTask, differentiate: Differentiate, indices: ClientIndices, ctx: Context
) -> tuple[ModelState, Tree, Tree]:
    """Put the client's personal parameters and buffers in place, and run the `on_client_start`
    hooks, before the first step.

    Returns:
        The model that the client starts from, the client's state, and the payload so far.
    """
    client_state, payload = dict(ctx.client_state), {}
    personal = client_state.get(PERSONAL, {})
    start = ModelState(
        {**ctx.start.params, **personal.get("params", {})},
        {**ctx.start.buffers, **personal.get("buffers", {})},
    )
    ctx = ctx._replace(start=start)
    ops = make_client_ops(task, differentiate, {}, ctx.start.buffers, None, indices, ctx)
    for hook in task.method.hooks("on_client_start"):
        returned = hook(ctx._replace(client_state=client_state), ops)
        changed, payload[hook.name] = check_pair(hook, "on_client_start", returned, RETURNS)
        client_state[hook.name] = {**client_state.get(hook.name, {}), **changed}
    return start, client_state, payload


class TrainState(NamedTuple):
    """What one local step passes to the next."""

    params: Params  # the trained ones
    buffers: Params
    opt_state: Tree
    tracker_state: Tree  # by part


def init_train_state(
    task: TrainingTask,
    differentiate: Differentiate,
    params: Params,
    fixed: Params,
    buffers: Params,
    indices: ClientIndices,
    ctx: Context,
) -> TrainState:
    """The state before the first step of a phase. Trackers continue from the phase before.

    Args:
        task: The run's task.
        differentiate: `grad_autograd` or `grad_func`.
        params: Parameters that this phase trains.
        fixed: Parameters that it does not train.
        buffers: The model's buffers.
        indices: The client's examples.
        ctx: The client's context in this phase.
    """
    ops = make_client_ops(task, differentiate, fixed, buffers, None, indices, ctx)
    tracker_state = {
        hook.name: ctx.tracker_state[hook.name]
        if hook.name in ctx.tracker_state
        else hook(ctx, ops)
        for hook in task.method.trackers("init")
    }
    return TrainState(params, buffers, task.optimizer.init(params), tracker_state)


def train_step(
    task: TrainingTask,
    differentiate: Differentiate,
    state: TrainState,
    fixed: Params,
    batch: Batch,
    indices: ClientIndices,
    ctx: Context,
) -> tuple[TrainState, Tensor]:
    """One local step: forward pass, loss, gradient, gradient transforms, optimizer, projection,
    trackers.

    Args:
        task: The run's task.
        differentiate: `grad_autograd` or `grad_func`.
        state: The result of the step before.
        fixed: Parameters that this phase does not train.
        batch: The step's batch, already augmented.
        indices: The client's examples.
        ctx: The client's context, with the number and the key of this step.

    Returns:
        The next state, and the loss on the batch before the update.
    """
    ctx = ctx._replace(tracker_state=state.tracker_state)
    ops = make_client_ops(task, differentiate, fixed, state.buffers, batch.x, indices, ctx)
    loss_fn = make_loss_fn(task, fixed, state.buffers, ops, ctx)

    gradient_hook = task.method.hook("gradient")
    if gradient_hook is None:
        grads, aux = differentiate(lambda params: loss_fn(params, batch), state.params)
    else:
        grads = gradient_hook(state.params, batch, ops, ctx)
        # the hook may compute its gradient elsewhere; this pass gives the buffers and the loss
        with torch.no_grad():
            _, aux = loss_fn(state.params, batch)
    for transform in task.method.transforms():
        grads = transform(grads, state.params, ctx)

    params, opt_state = task.optimizer.step(state.params, grads, state.opt_state, ctx)
    project = task.method.hook("project")
    if project is not None:
        params = project(params, batch, ops, ctx)

    before = ModelState({**fixed, **state.params}, state.buffers)
    after = ModelState({**fixed, **params}, aux["buffers"])
    tracker_state = {
        hook.name: hook(state.tracker_state[hook.name], before, after, batch, ops, ctx)
        for hook in task.method.trackers("step")
    }
    return TrainState(params, aux["buffers"], opt_state, tracker_state), aux["loss"]


def accept_or_rollback(
    task: TrainingTask,
    differentiate: Differentiate,
    accept: Accept,
    indices: ClientIndices,
    old: ModelState,
    new: ModelState,
    ctx: Context,
) -> ModelState:
    """The model after a phase if the phase's `accept` returns True, else the model before it."""
    ops = make_client_ops(task, differentiate, {}, new.buffers, None, indices, ctx)
    accepted = accept(ctx, old, new, ops)
    return ModelState(
        pytree.where(accepted, new.params, old.params),
        pytree.where(accepted, new.buffers, old.buffers),
    )


def client_final(
    task: TrainingTask,
    differentiate: Differentiate,
    indices: ClientIndices,
    trained: ModelState,
    payload: Tree,
    initial_state: Tree,
    ctx: Context,
) -> tuple[Tree, Tree]:
    """Run the `on_client_end` hooks, after the last step.

    Args:
        task: The run's task.
        differentiate: `grad_autograd` or `grad_func`.
        indices: The client's examples.
        trained: The client's model after all phases.
        payload: The payload that `client_init` returned.
        initial_state: The client's state before the round, which fixes names, shapes and dtypes.
        ctx: The client's context, with the state that `client_init` returned.

    Returns:
        The state that the client keeps, and the payload that it sends.
    """
    client_state, payload = dict(ctx.client_state), dict(payload)
    ops = make_client_ops(task, differentiate, {}, trained.buffers, None, indices, ctx)
    for hook in task.method.hooks("on_client_end"):
        returned = hook(ctx._replace(client_state=client_state), trained, ops)
        changed, more = check_pair(hook, "on_client_end", returned, RETURNS)
        # what the part keeps, and what on_client_start added for this round
        known = {**client_state.get(hook.name, {}), **initial_state.get(hook.name, {})}
        if unknown := sorted(set(pytree.flatten(changed)) - set(pytree.flatten(known))):
            raise TypeError(
                f"{hook.name}: on_client_end returns the state {unknown[0]}, which its client_state"
                " does not have"
            )
        client_state[hook.name] = {**client_state.get(hook.name, {}), **changed}
        payload[hook.name] = {**payload.get(hook.name, {}), **more}
    client_state[PERSONAL] = task.personal_state(trained)
    return _check_client_state(client_state, initial_state), _check_payload(
        {name: tree for name, tree in payload.items() if tree}, task
    )


def _check_client_state(client_state: Tree, initial_state: Tree) -> Tree:
    """The entries that the client keeps: those of its initial state, in the same shapes and
    dtypes. Other entries exist only until the end of the round and are left out.
    """

    def check(path: str, new: Tensor, old: Tensor) -> Tensor:
        if new.shape != old.shape or new.dtype != old.dtype:
            was, now = f"{tuple(old.shape)} {old.dtype}", f"{tuple(new.shape)} {new.dtype}"
            raise TypeError(
                f"a client's state must keep its shapes and dtypes: {path} was {was} and became"
                f" {now}"
            )
        return new

    flat = pytree.flatten(client_state)
    return pytree.unflatten(
        {path: check(path, flat[path], old) for path, old in pytree.flatten(initial_state).items()}
    )


def _check_payload(payload: Tree, task: TrainingTask) -> Tree:
    """Raise unless the payload has exactly the declared entries in their shapes and dtypes: the
    gate, sites, the count of bytes and `remanence list methods` rely on the declaration.
    """
    declared, sent = pytree.flatten(task.payload_spec()), pytree.flatten(payload)
    for path in sorted({*declared, *sent}):
        if path not in sent:
            problem = "declared but not returned"
        elif path not in declared:
            problem = "returned but not declared"
        else:
            was, now = (
                f"{tuple(tree[path].shape)} {tree[path].dtype}" for tree in (declared, sent)
            )
            problem = "" if was == now else f"declared as {was} and returned as {now}"
        if problem:
            raise TypeError(
                f"a part must return exactly the payload it declares: {path} is {problem}"
            )
    return payload
