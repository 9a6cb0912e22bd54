"""Toy methods, one for each slot of a part or a few of them: small enough to be checked by
hand, written as an author would write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from remanence.core import pytree, rng
from remanence.core.declarations import Disclosure
from remanence.core.pytree import Params, Tree, weighted_mean
from remanence.core.slots import (
    Aggregate,
    ClientOps,
    Context,
    Method,
    Optimizer,
    Part,
    Phase,
    ServerContext,
    ServerOps,
    Transform,
)
from remanence.core.types import Batch, ModelState, Output, Reply, TaskInfo
from remanence.losses import wsm
from remanence.methods import fedprox


def rows_loss(out: Output, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(out.logits, batch.y, reduction="none")


def control_variates() -> Part:
    """SCAFFOLD, option II: own, server, share, extras, a correction, after, absorb."""

    def zeros(start: ModelState, *_: Any) -> Tree:
        return {"c": pytree.zeros_like(start.params)}

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return pytree.map(
            lambda g, c_i, c: g - c_i + c, grads, ctx.client_state["c"], ctx.broadcast["c"]
        )

    def after(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        def renew(c_i: Tensor, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return c_i - c + (x - y) / ctx.steps / ctx.optimizer_hparams["lr"]

        new = pytree.map(
            renew, ctx.client_state["c"], ctx.broadcast["c"], ctx.start.params, trained.params
        )
        return {"c": new}, {"change": pytree.sub(new, ctx.client_state["c"])}

    def absorb(replies: Reply, srv: ServerContext) -> Tree:
        change = replies.payload["control_variates"]["change"]
        return {
            "c": pytree.map(
                lambda c, d: c + d.sum(dim=0) / srv.info.num_clients, srv.state["c"], change
            )
        }

    return Part(
        "control_variates",
        client_state=zeros,
        server_state=zeros,
        broadcast=lambda srv: srv.state,
        payload=lambda start, world: {"change": start.params},
        discloses={"change": Disclosure("model")},
        transforms=(Transform("correct", correct),),
        on_client_end=after,
        update_server_state=absorb,
    )


def loss_weighted() -> Part:
    """Weighs a client by the loss of the model it received: before, extras, weigh."""

    def before(ctx: Context, ops: ClientOps) -> tuple[Tree, Tree]:
        out, batch = ops.predict(ctx.start)
        return {}, {"loss": weighted_mean(rows_loss(out, batch), batch.weight)}

    def extras(start: ModelState, world: TaskInfo) -> Tree:
        return {"loss": torch.zeros((), dtype=world.dtype)}

    return Part(
        "loss_weighted",
        on_client_start=before,
        payload=extras,
        discloses={"loss": Disclosure("examples")},
        client_weights=lambda replies, srv: replies.payload["loss_weighted"]["loss"],
    )


def refined() -> Part:
    """Trains the merged model on the public set and holds it near the previous one: refine, fit."""

    def refine(
        merged: ModelState,
        previous: ModelState,
        replies: Reply,
        ops: ServerOps,
        srv: ServerContext,
    ) -> ModelState:
        said = ops.predict_logits(
            ModelState(*(pytree.map(lambda x: x.unsqueeze(0), tree) for tree in previous))
        )[0]
        return ops.fit(merged, hold_near, {"said": said, "hold": srv.hyper["hold"]}, epochs=2)

    def hold_near(out: Output, batch: Batch, place: Tensor, given: Tree) -> Tensor:
        return rows_loss(out, batch) + given["hold"] * (
            (out.logits - given["said"][place]) ** 2
        ).sum(dim=1)

    return Part("refined", hyper={"hold": 0.1}, server_train=refine, needs_public_data=True)


def frozen_head() -> Part:
    return Part("frozen_head", frozen=lambda world: world.head)


def own_norms() -> Part:
    """FedBN: normalization layers, weights and statistics, stay with their client: personal."""
    return Part("own_norms", personal=lambda world: world.norms + world.buffers)


def tuned_head(margin: float = 0.0) -> Part:
    """A second phase trains the head alone and is kept where the validation loss falls by more
    than a margin: phases, trainable, accept.
    """

    def accept(ctx: Context, old: ModelState, new: ModelState, ops: ClientOps) -> Tensor:
        before, after = (
            weighted_mean(rows_loss(out, batch), batch.weight)
            for out, batch in (ops.predict(old, "valid"), ops.predict(new, "valid"))
        )
        return after < before - ctx.hyper["margin"]

    def phases(phase: Phase) -> tuple[Phase, ...]:
        return phase, Phase(
            steps=2,
            trainable=lambda world, names: [name for name in names if name in world.head],
            accept=accept,
        )

    return Part("tuned_head", hyper={"margin": margin}, phases=phases)


def close_to_start() -> Part:
    """Adds the squared distance from the received model's logits: a term that asks for another
    model's output.
    """

    def term(out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
        return ctx.hyper["strength"] * ((out.logits - ops.forward(ctx.start).logits) ** 2).sum(
            dim=1
        )

    return Part("close_to_start", hyper={"strength": 0.05}, loss_terms=(term,))


def look_ahead() -> Part:
    """The gradient one small step further: a gradient rule that asks for two gradients, one of
    them on moved inputs.
    """

    def gradient(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
        ahead = pytree.axpy(-ctx.optimizer_hparams["lr"], ops.grad(params, batch), params)
        moved = batch.x + ctx.hyper["size"] * ops.grad(params, batch, wrt="inputs").sign()
        result: Params = ops.grad(ahead, batch._replace(x=moved))
        return result

    return Part("look_ahead", hyper={"size": 0.01}, gradient=gradient)


def heavy_server() -> Part:
    """The median-free minimum of a server of one's own: the plain mean of the deltas, and
    momentum: combine, apply, server.
    """

    def partial(weights: Tensor, replies: Reply, srv: ServerContext) -> Tree:
        return {
            "sum": pytree.map(lambda d: d.sum(dim=0), replies.delta(srv.start)),
            "count": torch.tensor(float(replies.num_clients), dtype=srv.info.dtype),
        }

    def finish(total: Tree, srv: ServerContext) -> Params:
        return pytree.map(lambda d: d / total["count"], total["sum"])

    def apply(params: Params, delta: Params, srv: ServerContext) -> tuple[Params, Tree]:
        velocity = pytree.map(
            lambda d, v: srv.hyper["momentum"] * v + d, delta, srv.state["velocity"]
        )
        moved = params | pytree.add(velocity, params)
        return moved, {"velocity": srv.state["velocity"] | velocity}

    def server(start: ModelState, world: TaskInfo) -> Tree:
        return {"velocity": pytree.zeros_like(start.params)}

    return Part(
        "heavy_server",
        hyper={"momentum": 0.5},
        server_state=server,
        aggregate=Aggregate(partial, finish),
        server_update=apply,
    )


def signed() -> Part:
    """Steps by the sign of the gradient, with a counter: an optimizer of one's own."""

    def step(params: Params, grads: Params, slots: Tree, ctx: Context) -> tuple[Params, Tree]:
        count = slots["count"] + 1
        return pytree.map(
            lambda w, g: w - ctx.optimizer_hparams["lr"] / count * torch.tanh(10 * g), params, grads
        ), {"count": count}

    def init(params: Params) -> Tree:
        return {"count": torch.zeros_like(next(iter(params.values())).sum())}

    return Part("signed", optimizer=Optimizer("signed", {"lr": 0.05}, init, step))


def private() -> Part:
    """Clipped and noisy gradients, given in the wrong order: the stages put them right.
    Randomness comes from the step's key.
    """

    def add_noise(grads: Params, params: Params, ctx: Context) -> Params:
        draws = {
            name: rng.normal(rng.fold_in(ctx.key, f"noise {name}"), g.shape, g.dtype)
            for name, g in grads.items()
        }
        return pytree.axpy(ctx.hyper["sigma"], draws, grads)

    def clip(grads: Params, params: Params, ctx: Context) -> Params:
        length = torch.sqrt(pytree.squared_norm(grads))
        return pytree.scale(
            grads, torch.clamp(ctx.hyper["bound"] / length.clamp(min=1e-12), max=1.0)
        )

    return Part(
        "private",
        hyper={"sigma": 0.01, "bound": 0.1},
        transforms=(Transform("noise", add_noise), Transform("clip", clip)),
    )


TOYS: dict[str, Callable[[], Part | Method]] = {
    "control_variates": control_variates,
    "loss_weighted": loss_weighted,
    "refined": refined,
    "frozen_head": frozen_head,
    "own_norms": own_norms,
    "tuned_head": tuned_head,
    "close_to_start": close_to_start,
    "look_ahead": look_ahead,
    "heavy_server": heavy_server,
    "signed": signed,
    "private": private,
    "many at once": lambda: (
        control_variates()
        + loss_weighted()
        + refined()
        + own_norms()
        + tuned_head()
        + close_to_start()
        + private()
        + fedprox(mu=0.1)
        + wsm()
    ),
}
