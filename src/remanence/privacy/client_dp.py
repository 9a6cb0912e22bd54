"""Client-level differential privacy: every client's update is clipped to a norm, and noise hides
whether any one client took part.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR
2018. Adaptive clipping: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning
with adaptive clipping", NeurIPS 2021. `accountant.py` computes the epsilon.

It is joined by `+`: `fedavg+dp`, `fedprox(mu=0.1)+wsm+dp(noise=0.8)`, `fedadam+dp`. A method cannot
be combined with it if it has no server or several global models, if its clients send more than the
model, or if its server reads or stores single updates. The server clips
the updates when it aggregates them, so in a simulation it sees them unclipped, and the noise is
drawn from the experiment's seed: the model is what a private run would give, but the run is not
private.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from remanence.core import pytree, rng
from remanence.core.compose import part
from remanence.core.contexts import ServerContext
from remanence.core.declarations import AT_SERVER, CLIENT, EACH_ROUND, MODEL, Mechanism
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Aggregate, Part
from remanence.core.types import ModelState, Reply, TaskInfo
from remanence.privacy.accountant import require_accounting

NAME = "dp"
RATE = 0.2  # the paper's eta_C: learning rate of the clip
# the paper's sigma_b over the number of replies: noise on the share of updates within the clip
COUNT_NOISE = 1 / 20


@part
def dp(
    *,
    clip: float = 1.0,
    noise: float = 1.0,
    delta: float = 1e-5,
    adaptive: bool = False,
    quantile: float = 0.5,
    budget: float = 0.0,
) -> Part:
    """x <- x + 1/k (sum_i min(1, clip / ||y_i - x||) (y_i - x) + N(0, (noise * clip)^2))

    Adaptive: clip <- clip * exp(-0.2 (b - quantile)), where b is the share of the round's updates
    within the clip, plus noise (`split_noise`). k is the number of replies; with
    clients.sampling=poisson the expected number.

    Args:
        clip: Largest norm of a client's update; where it adapts, the first value.
        noise: Noise multiplier z; 0: no guarantee.
        delta: At which epsilon is reported.
        adaptive: Let the clip follow a quantile of the updates' norms.
        quantile: Which quantile.
        budget: Epsilon not to exceed; 0: none.
    """
    check_arguments(clip, noise, delta, adaptive, quantile, budget)

    def limit(srv: ServerContext) -> Tensor:
        return srv.state["clip"] if adaptive else srv.hyper["clip"]

    def clip_and_sum(weights: Tensor, replies: Reply, srv: ServerContext) -> Tree:
        reject_unprotected(replies)
        factors = clip_factors(norms_of(replies.delta(srv.start)), limit(srv))
        return pytree.weighted_sum(weights * factors.to(weights), replies.delta(srv.start))

    def add_noise(total: Tree, srv: ServerContext) -> Params:
        came = srv.num_replies
        k = srv.info.expected_cohort or came
        deviation = (split_noise(noise, k)[0] if adaptive else noise) * limit(srv).double() / k
        return {
            name: came / k * move + deviation.to(move) * draw_noise(srv, name, move)
            for name, move in total.items()
        }

    def first_clip(start: ModelState, info: TaskInfo) -> Tree:
        return {"clip": torch.tensor(clip, dtype=torch.float64).to(info.dtype)}

    follow = functools.partial(follow_quantile, noise, quantile)
    return Part(
        NAME,
        hyper={"clip": clip},
        client_weights=uniform_weights,
        aggregate=Aggregate(clip_and_sum, add_noise, is_decomposable=True),
        server_state=first_clip if adaptive else None,
        update_server_state=follow if adaptive else None,
        static=("noise", "delta", "adaptive", "quantile", "budget"),
        mechanisms=(Mechanism(CLIENT, MODEL, AT_SERVER, noise, EACH_ROUND, 1, delta, budget),),
    )


def check_arguments(
    clip: float, noise: float, delta: float, adaptive: bool, quantile: float, budget: float
) -> None:
    check_range(clip > 0, NAME, "clip", "above 0", clip)
    check_range(noise >= 0, NAME, "noise", "of at least 0", noise)
    check_range(0 < delta < 1, NAME, "delta", "between 0 and 1", delta)
    check_range(0 < quantile < 1, NAME, "quantile", "between 0 and 1", quantile)
    check_range(budget >= 0, NAME, "budget", "of at least 0", budget)
    if not isinstance(adaptive, bool):
        raise InputError(f"dp: adaptive must be true or false, not {adaptive!r}")
    if budget and not noise:
        raise InputError(
            f"dp: a budget of {budget:g} cannot be kept without noise: give noise, such as"
            " noise=1, or leave the budget out"
        )
    if budget:
        require_accounting()


def follow_quantile(noise: float, quantile: float, replies: Reply, srv: ServerContext) -> Tree:
    """One step of the clip towards the quantile of the updates' norms."""
    inside = norms_of(replies.delta(srv.start)) <= srv.state["clip"]  # [k]
    k = srv.info.expected_cohort or replies.num_clients
    # their share of the replies; with Poisson sampling, of the expected number of replies
    within = 0.5 + (inside.double() - 0.5).sum() / k
    share = within + split_noise(noise, k)[1] * draw_noise(srv, "share", within)
    return {"clip": srv.state["clip"] * torch.exp(-RATE * (share - quantile)).to(srv.state["clip"])}


def uniform_weights(replies: Reply, srv: ServerContext) -> Tensor:
    """Weights by numbers of examples would raise a client's share, and reveal its size."""
    return torch.ones_like(replies.weight)


def norms_of(delta: Params) -> Tensor:
    """The norm of each client's whole update. [k, ...] -> [k] float64"""
    squares = [move.double().flatten(1).square().sum(dim=1) for move in delta.values()]
    return torch.stack(squares).sum(dim=0).sqrt()


def clip_factors(norms: Tensor, limit: Tensor) -> Tensor:
    """The factor by which each update is scaled down.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0]), torch.tensor(2.0))
    tensor([1.0000, 1.0000, 0.5000])
    """
    return torch.where(norms > limit, limit.to(norms) / norms, 1.0)


def split_noise(noise: float, count: float) -> tuple[float, float]:
    """With an adaptive clip: the noise multiplier of the updates, and the standard deviation of the
    noise on the share within the clip.

    A client changes the number within the clip, counted from one half, by 1/2: the two together are
    one Gaussian mechanism with multiplier `noise` if z_updates^-2 + (2 sigma_b)^-2 = noise^-2. The
    paper's sigma_b = k/20 needs k > 10 noise; below that we take sigma_b = noise.
    """
    if noise == 0:
        return 0.0, 0.0
    sigma = max(COUNT_NOISE * count, noise)
    return float((noise**-2 - (2 * sigma) ** -2) ** -0.5), sigma / count


def draw_noise(srv: ServerContext, name: str, like: Tensor) -> Tensor:
    """Standard normal numbers of the shape of a tensor, from a key of their own."""
    return rng.normal(
        srv.key.fold_in(NAME, name).tensor().to(like.device), like.shape, torch.float64
    ).to(like)


def reject_unprotected(replies: Reply) -> None:
    """A second check of what `experiment.privacy_checks` refuses before a run."""
    if replies.buffers or next(pytree.leaves(replies.payload), None) is not None:
        raise InputError(
            "dp clips the model's update only, and clients sent more than that: use a method"
            " without a payload and a model without averaged buffers"
        )
