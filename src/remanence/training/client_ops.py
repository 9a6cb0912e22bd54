"""The functions that client-side hooks of a method may call: `ClientOps`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.contexts import ClientOps, Context, Forward, Grad, PerExampleGrad, Predict
from remanence.core.pytree import Params, Tree
from remanence.core.types import Batch, ModelState, Output
from remanence.training.gradients import Differentiate, grad_func
from remanence.training.loss import LossFn, make_loss_fn
from remanence.training.per_example import make_per_example_grad
from remanence.training.task import ClientIndices, TrainingTask

PREDICT_BATCH = 1000  # examples in one forward pass over a whole split
GRADIENT_BATCH = 500  # examples in one chunk of a gradient over all training examples


def make_client_ops(
    task: TrainingTask,
    differentiate: Differentiate,
    fixed: Params,
    buffers: Params,
    x: Tensor | None,
    indices: ClientIndices,
    ctx: Context,
) -> ClientOps:
    """The functions that hooks may call at one point of a client's training.

    Args:
        task: The run's task.
        differentiate: `grad_autograd` or `grad_func`.
        fixed: Parameters that this phase does not train.
        buffers: The model's buffers at this point.
        x: Inputs of the current batch; None outside a step.
        indices: The client's examples.
        ctx: The client's context, not yet scoped to a part.
    """

    def loss_fn_on(
        differentiate: Differentiate, x: Tensor, ctx: Context, **options: bool
    ) -> LossFn:
        # loss terms read the batch that the loss is taken on
        ops = make_client_ops(task, differentiate, fixed, buffers, x, indices, ctx)
        return make_loss_fn(task, fixed, buffers, ops, ctx, **options)

    grad = _make_grad(
        differentiate,
        lambda x: loss_fn_on(differentiate, x, ctx),
        lambda x: loss_fn_on(differentiate, x, ctx, training=False),
    )
    return ClientOps(
        grad=grad,
        full_grad=lambda params: full_gradient(grad, params, _all_examples(task, indices, "train")),
        forward=_make_forward(task, x),
        predict=_make_predict(task, indices),
        effective_steps=_make_effective_steps(task, differentiate, ctx),
        per_example_grad=_make_per_example(
            task,
            differentiate,
            lambda ctx, x: loss_fn_on(grad_func, x, ctx, regularized=False),
            ctx,
        ),
    )


def _make_grad(
    differentiate: Differentiate,
    loss_fn_on: Callable[[Tensor], LossFn],
    eval_loss_fn_on: Callable[[Tensor], LossFn],
) -> Grad:
    """`ops.grad`: the gradient of the whole loss on any batch."""

    def input_grad(params: Params, batch: Batch) -> Tensor:
        loss_fn = eval_loss_fn_on(batch.x)
        grad: Tensor = differentiate(lambda x: loss_fn(params, batch._replace(x=x)), batch.x)[0]
        return grad

    def grad(params: Params, batch: Batch, wrt: str = "params") -> Any:
        if wrt == "inputs":
            return torch.cat(
                [share * input_grad(params, chunk) for share, chunk in _gradient_chunks(batch)]
            )
        loss_fn = loss_fn_on(batch.x)
        return differentiate(lambda p: loss_fn(p, batch), params)[0]

    return grad


def full_gradient(grad: Grad, params: Params, data: Batch) -> Params:
    """The mean gradient over all examples, in chunks."""
    total = pytree.zeros_like(params)
    for share, chunk in _gradient_chunks(data):
        total = pytree.axpy(share, grad(params, chunk), total)
    return total


def _gradient_chunks(data: Batch) -> Iterator[tuple[Tensor, Batch]]:
    """Examples in chunks of about the same size: batch norm cannot train on a last chunk of one
    example.

    Yields:
        The share of a chunk in the weight of all examples, and the chunk.
    """
    num_chunks = -(-len(data.weight) // GRADIENT_BATCH)
    for fields in zip(*(torch.tensor_split(field, num_chunks) for field in data), strict=True):
        chunk = Batch(*fields)
        weight = chunk.weight.sum()  # 0 where the chunk is all padding
        some = torch.where(weight > 0, chunk.weight, torch.ones_like(chunk.weight))
        yield weight / data.weight.sum(), chunk._replace(weight=some)


def _all_examples(task: TrainingTask, indices: ClientIndices, split: str) -> Batch:
    """All of the client's examples of a split, without augmentation."""
    ids, weight = (
        (indices.train, indices.train_weight)
        if split == "train"
        else (indices.valid, indices.valid_weight)
    )
    return Batch(task.train.inputs(ids), task.train.labels(ids), weight, ids)


def _make_forward(task: TrainingTask, batch_x: Tensor | None) -> Forward:
    """`ops.forward`: another model on the current batch, computed once a step, or on other
    inputs.
    """
    cache: dict[int, tuple[ModelState, Output]] = {}

    def forward(model: ModelState, x: Tensor | None = None) -> Output:
        if x is not None or batch_x is None:
            assert x is not None, "outside a step there is no batch: pass x"
            return _predict_in_chunks(task, model, x)
        # the cache keeps the model alive, so that no other object gets its id
        if id(model.params) not in cache:
            with torch.no_grad():
                cache[id(model.params)] = (model, task.model.predict(model, batch_x))
        return cache[id(model.params)][1]

    return forward


def _make_predict(task: TrainingTask, indices: ClientIndices) -> Predict:
    """`ops.predict`: a model on all of the client's examples of a split."""

    def predict(model: ModelState, split: str = "train") -> tuple[Output, Batch]:
        batch = _all_examples(task, indices, split)
        return _predict_in_chunks(task, model, batch.x), batch

    return predict


def _predict_in_chunks(task: TrainingTask, model: ModelState, x: Tensor) -> Output:
    """A model on any number of inputs, in evaluation mode and without a gradient."""
    with torch.no_grad():
        outputs = [task.model.predict(model, chunk) for chunk in torch.split(x, PREDICT_BATCH)]
    return Output(torch.cat([o.logits for o in outputs]), torch.cat([o.features for o in outputs]))


def _make_effective_steps(
    task: TrainingTask, differentiate: Differentiate, ctx: Context
) -> Callable[[Tree | None], Tree]:
    """`ops.effective_steps`: how many plain gradient steps the local steps amount to.

    The same optimizer and regularizers update a scalar that starts at 0 and always has a
    gradient of 1. After the local steps its distance from 0, divided by the learning rate, is
    the number that FedNova divides by. Called with None it returns the first state, called with
    a state the next one.
    """
    regularizers = task.method.hooks("regularizers")

    def effective_steps(state: Tree | None) -> Tree:
        if state is None:
            zero = {"u": torch.zeros_like(ctx.optimizer_hparams["lr"])}
            return {"at": zero, "slots": task.optimizer.init(zero)}
        origin = ctx._replace(start=ModelState(pytree.zeros_like(state["at"]), {}))

        def linear_loss(at: Params) -> tuple[Tensor, dict[str, Any]]:
            terms = [at["u"], *(regularizer(at, origin) for regularizer in regularizers)]
            return torch.stack(terms).sum(), {}

        grads, _ = differentiate(linear_loss, state["at"])
        at, opt_state = task.optimizer.step(state["at"], grads, state["slots"], ctx)
        return {"at": at, "slots": opt_state}

    return effective_steps


def _make_per_example(
    task: TrainingTask,
    differentiate: Differentiate,
    loss_fn_at: Callable[[Context, Tensor], LossFn],
    ctx: Context,
) -> PerExampleGrad:
    """`ops.per_example_grad`, with the gradient of the regularizers."""
    regularizers = task.method.hooks("regularizers")

    def regularizer_grad(params: Params, ctx: Context) -> Params:
        if not regularizers:
            return pytree.zeros_like(params)
        grads: Params = differentiate(
            lambda p: (torch.stack([hook(p, ctx) for hook in regularizers]).sum(), {}), params
        )[0]
        return grads

    return make_per_example_grad(
        loss_fn_at,
        regularizer_grad,
        ctx,
        stats_are_private=task.method.part_filling("privatize_stats") is not None,
    )
