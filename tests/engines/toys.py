"""Toy methods, one for each slot of a part or a few of them: small enough to be checked by
hand, written as an author would write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from remanence.core import pytree, rng
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, ServerContext, ServerOps
from remanence.core.declarations import Disclosure
from remanence.core.pytree import Params, Tree, weighted_mean
from remanence.core.slots import Aggregate, Method, Optimizer, Part, Phase, Transform
from remanence.core.types import Batch, ModelState, Output, Reply, TaskInfo
from remanence.losses import wsm
from remanence.methods import fedprox


def example_losses(out: Output, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(out.logits, batch.y, reduction="none")


def control_variates() -> Part:
    """SCAFFOLD, option II: client state, server state, broadcast, payload, a transform,
    on_client_end, update_server_state.
    """

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
        payload=lambda start, info: {"change": start.params},
        discloses={"change": Disclosure("model")},
        transforms=(Transform("correct", correct),),
        on_client_end=after,
        update_server_state=absorb,
    )


def loss_weighted() -> Part:
    """Weights a client by the loss of the model it received: on_client_start, payload,
    client_weights.
    """

    def before(ctx: Context, ops: ClientOps) -> tuple[Tree, Tree]:
        out, batch = ops.predict(ctx.start)
        return {}, {"loss": weighted_mean(example_losses(out, batch), batch.weight)}

    def extras(start: ModelState, info: TaskInfo) -> Tree:
        return {"loss": torch.zeros((), dtype=info.dtype)}

    return Part(
        "loss_weighted",
        on_client_start=before,
        payload=extras,
        discloses={"loss": Disclosure("examples")},
        client_weights=lambda replies, srv: replies.payload["loss_weighted"]["loss"],
    )


@part
def refined(*, hold: float = 0.1) -> Part:
    """Trains the merged model on the public set and keeps its logits near those of the previous
    one: server_train, fit.
    """

    def refine(
        merged: ModelState,
        previous: ModelState,
        replies: Reply,
        ops: ServerOps,
        srv: ServerContext,
    ) -> ModelState:
        previous_logits = ops.predict_logits(
            ModelState(*(pytree.map(lambda x: x.unsqueeze(0), tree) for tree in previous))
        )[0]
        return ops.fit(
            merged, hold_near, {"logits": previous_logits, "hold": srv.hyper["hold"]}, epochs=2
        )

    def hold_near(out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
        return example_losses(out, batch) + loss_args["hold"] * (
            (out.logits - loss_args["logits"][index]) ** 2
        ).sum(dim=1)

    return Part("refined", hyper={"hold": hold}, server_train=refine, needs_public_data=True)


def frozen_head() -> Part:
    return Part("frozen_head", frozen=lambda info: info.head)


def own_norms() -> Part:
    """FedBN: weights and statistics of normalization layers stay with their client: personal."""
    return Part("own_norms", personal=lambda info: info.norms + info.buffers)


@part
def tuned_head(*, margin: float = 0.0) -> Part:
    """A second phase trains the head alone and is kept where the validation loss falls by more
    than a margin: phases, trainable, accept.
    """

    def accept(ctx: Context, old: ModelState, new: ModelState, ops: ClientOps) -> Tensor:
        before, after = (
            weighted_mean(example_losses(out, batch), batch.weight)
            for out, batch in (ops.predict(old, "valid"), ops.predict(new, "valid"))
        )
        return after < before - ctx.hyper["margin"]

    def phases(phase: Phase) -> tuple[Phase, ...]:
        return phase, Phase(
            steps=2,
            trainable=lambda info, names: [name for name in names if name in info.head],
            accept=accept,
        )

    return Part("tuned_head", hyper={"margin": margin}, phases=phases)


@part
def close_to_start(*, strength: float = 0.05) -> Part:
    """Adds the squared distance from the received model's logits: a loss term that evaluates
    another model.
    """

    def term(out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
        return ctx.hyper["strength"] * ((out.logits - ops.forward(ctx.start).logits) ** 2).sum(
            dim=1
        )

    return Part("close_to_start", hyper={"strength": strength}, loss_terms=(term,))


@part
def look_ahead(*, size: float = 0.01) -> Part:
    """The gradient after one small step, on inputs moved by the sign of their gradient: gradient."""

    def gradient(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
        ahead = pytree.axpy(-ctx.optimizer_hparams["lr"], ops.grad(params, batch), params)
        moved = batch.x + ctx.hyper["size"] * ops.grad(params, batch, wrt="inputs").sign()
        result: Params = ops.grad(ahead, batch._replace(x=moved))
        return result

    return Part("look_ahead", hyper={"size": size}, gradient=gradient)


@part
def heavy_server(*, momentum: float = 0.5) -> Part:
    """The plain mean of the deltas, and momentum at the server: aggregate, server_update,
    server_state.
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

    def server(start: ModelState, info: TaskInfo) -> Tree:
        return {"velocity": pytree.zeros_like(start.params)}

    return Part(
        "heavy_server",
        hyper={"momentum": momentum},
        server_state=server,
        aggregate=Aggregate(partial, finish),
        server_update=apply,
    )


def signed() -> Part:
    """Steps by the sign of the gradient, with a counter: optimizer."""

    def step(params: Params, grads: Params, slots: Tree, ctx: Context) -> tuple[Params, Tree]:
        count = slots["count"] + 1
        return pytree.map(
            lambda w, g: w - ctx.optimizer_hparams["lr"] / count * torch.tanh(10 * g), params, grads
        ), {"count": count}

    def init(params: Params) -> Tree:
        return {"count": torch.zeros_like(next(iter(params.values())).sum())}

    return Part("signed", optimizer=Optimizer("signed", {"lr": 0.05}, init, step))


@part
def private(*, sigma: float = 0.01, bound: float = 0.1) -> Part:
    """Noisy and clipped gradients, listed in the wrong order: their stages put them in order. The
    noise comes from the step's key.
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
        hyper={"sigma": sigma, "bound": bound},
        transforms=(Transform("noise", add_noise), Transform("clip", clip)),
    )


@part
def near(*, radius: float = 0.05) -> Part:
    """After every step back into a ball around the received model: project."""

    def into_ball(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
        start = pytree.select_keys(ctx.start.params, params)
        away = pytree.sub(params, start)
        length = torch.sqrt(pytree.squared_norm(away)).clamp(min=1e-12)
        return pytree.axpy(torch.clamp(ctx.hyper["radius"] / length, max=1.0), away, start)

    return Part("near", hyper={"radius": radius}, project=into_ball)


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
    "near": near,
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
