"""MOON: a contrastive loss pulls features towards the global model's and away from those of the
client's own last model.

Li, He, Song, "Model-contrastive federated learning", CVPR 2021, algorithm 1.

    step                                        slot           function
    projection head before the classifier       modify_model   project
    l_con (equation 3), added to the loss       loss_terms     contrast
    w_prev <- the trained model                 on_client_end  store_model
    average by number of examples               (default)
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import InputError
from remanence.core.pytree import Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch, ClientStats, ModelState, Output, TaskInfo


@part
def moon(*, mu: float = 5.0, temperature: float = 0.5, projection: int = 0) -> Part:
    """mu * -log(exp(sim(z, z_glob) / T) / (exp(sim(z, z_glob) / T) + exp(sim(z, z_prev) / T)))
    added to the loss.

    z, z_glob and z_prev are the features (the input of the classifier) of the model in training, of
    the one the client received and of the one the client ended its last round with, both in
    evaluation mode; sim is the cosine similarity. In a client's first round there is no last model,
    and the term is 0. The authors' code does the same in round 1, and compares a client that joins
    in a later round with an untrained network. Every client keeps a whole model between its rounds
    and sends only its trained model.

    Args:
        mu: Weight of the contrastive loss, 5 as for CIFAR-10; 0 is FedAvg.
        temperature: T.
        projection: Width of a projection head d-d-projection before the classifier, 256 in the
            paper; 0 for none. It changes the network, so compare it with a method on the same one.
            It needs a network with features(x) and a linear layer called head.
    """
    check_range(mu >= 0, "moon", "mu", "of at least 0", mu)
    check_range(temperature > 0, "moon", "temperature", "above 0", temperature)
    check_range(projection >= 0, "moon", "projection", "of at least 0", projection)

    def add_projection(network: nn.Module, classes: int) -> nn.Module:
        return project(network, classes, projection)

    return Part(
        "moon",
        hyper={"mu": mu, "temperature": temperature},
        static=("projection",),
        client_state=init_client_state,
        loss_terms=(contrast,),
        on_client_end=store_model,
        modify_model=add_projection if projection else None,
    )


def init_client_state(start: ModelState, stats: ClientStats, info: TaskInfo) -> Tree:
    return {
        "params": start.params,
        "buffers": start.buffers,
        "seen": torch.zeros((), dtype=info.dtype, device=info.device),
    }


def contrast(out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
    previous = ModelState(ctx.client_state["params"], ctx.client_state.get("buffers", {}))
    # [B, 2, d]
    others = torch.stack(
        [ops.forward(model).features.flatten(1) for model in (ctx.start, previous)], dim=1
    )
    # [B, 2]
    similar = (
        cosine_similarity(out.features.flatten(1).unsqueeze(1), others, dim=2)
        / ctx.hyper["temperature"]
    )
    seen: Tensor = ctx.client_state["seen"]
    return seen * ctx.hyper["mu"] * (torch.logsumexp(similar, dim=1) - similar[:, 0])


def store_model(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    return {
        "params": trained.params,
        "buffers": trained.buffers,
        "seen": torch.ones_like(ctx.client_state["seen"]),
    }, {}


class Projected(nn.Module):
    """A network with a projection head: two linear layers between its features and a new
    classifier.
    """

    def __init__(self, network: nn.Module, width: int, classes: int):
        super().__init__()
        self.body = copy.deepcopy(network)
        num_features: int = self.body.head.in_features  # type: ignore[union-attr, assignment]
        # an unused classifier would still be averaged and stored
        self.body.head = nn.Identity()
        self.projection = nn.Sequential(
            nn.Linear(num_features, num_features), nn.ReLU(), nn.Linear(num_features, width)
        )
        self.head = nn.Linear(width, classes)
        if hasattr(network, "vocabulary"):
            self.vocabulary = network.vocabulary  # compared with the tokens of the data

    def features(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, width]"""
        features: Tensor = self.projection(self.body.features(x))  # type: ignore[operator]
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def project(network: nn.Module, classes: int, width: int) -> nn.Module:
    """The network with a projection head; raises InputError where it cannot have one."""
    if not callable(getattr(network, "features", None)) or not isinstance(
        getattr(network, "head", None), nn.Linear
    ):
        raise InputError(
            f"moon cannot put a projection head into {type(network).__name__}: give it a"
            " method features(x) and a linear layer called head,"
            " or use projection=0"
        )
    return Projected(network, width, classes)
