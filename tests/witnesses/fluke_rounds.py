"""Rounds of fluke on an experiment of ours: its clients, server and methods, with our draws of
clients and batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from methods.small_task import BATCH, CLASSES, COHORT, ROUNDS, SEED
from torch import Tensor, nn
from witnesses.libraries import load

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

LR = 0.1


def make_loader(x: Tensor, y: Tensor, client: int, epochs: int) -> Any:
    """fluke's loader, whose batches are those of our round."""
    base = load("fluke.data").FastDataLoader

    class PlannedLoader(base):  # type: ignore[misc]
        round, epoch = 1, 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            key = Key(SEED).fold_in("round", self.round).fold_in("client", client, "plan", 0)
            plan = plan_batches(key, len(y), BATCH, epochs=epochs)
            steps = len(plan.batch_sizes) // epochs
            first, self.epoch = self.epoch * steps, (self.epoch + 1) % epochs
            for step in range(first, first + steps):
                rows = plan.indices[step][: plan.batch_sizes[step]]
                yield x[rows], y[rows]

        def __len__(self) -> int:
            return -(-len(y) // BATCH)

    return PlannedLoader(x, y, num_labels=CLASSES, batch_size=BATCH, skip_singleton=False)


def cohort_of(round: int, clients: int, cohort: int) -> list[int]:
    key = Key(SEED).fold_in("round", round).fold_in("cohort")
    return sorted(key.permutation(clients)[:cohort].tolist())


@contextmanager
def doubles() -> Iterator[None]:
    """Numbers that fluke makes without naming their type are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class EncoderNet(nn.Module):
    """A sequence as fluke's MOON wants it: an encoder, and the last layer as its head."""

    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.encoder, self.head = copy.deepcopy(layers[:-1]), copy.deepcopy(layers[-1])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x))
        return logits

    def in_sequence(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values under the names that they have in the sequence."""
        head = f"{len(self.encoder)}."  # type: ignore[arg-type]
        return {
            name.replace("encoder.", "").replace("head.", head): value
            for name, value in state.items()
        }


def play(
    name: str,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    *,
    epochs: int = 1,
    cohort: int = COHORT,
    weighted: bool = True,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Any]]:
    """The global state dict after all rounds of a method of fluke, and its clients.

    Args:
        name: Module and class of the method, `fedavg.FedAvg`.
        net: The network with its first weights.
        x: All examples, [n, ...].
        y: Their labels, [n].
        rows: Each client's training examples.
        epochs: Of local training.
        cohort: Clients in a round.
        weighted: Whether clients are weighted by their numbers of examples.
        options: Of the clients of the method.
    """
    module, _, kind = name.partition(".")
    algorithm = getattr(load(f"fluke.algorithms.{module}"), kind)
    configure = load("fluke.config").OptimizerConfigurator
    maker = algorithm.__new__(algorithm)  # for the classes that it names
    with doubles():
        clients = [
            maker.get_client_class()(
                index=client,
                train_set=make_loader(x[mine], y[mine], client, epochs),
                test_set=None,
                optimizer_cfg=configure({"name": "SGD", "lr": LR}),
                loss_fn=nn.CrossEntropyLoss(),
                local_epochs=epochs,
                **options,
            )
            for client, mine in enumerate(rows)
        ]
    server = maker.get_server_class()(
        model=copy.deepcopy(net), test_set=None, clients=clients, weighted=weighted
    )
    for client in clients:
        client.set_channel(server.channel)
    for round in range(1, ROUNDS + 1):
        chosen = [clients[index] for index in cohort_of(round, len(clients), cohort)]
        server.broadcast_model(chosen)
        for client in chosen:
            client.train_set.round = round
            client.local_update(round)
        server.aggregate(chosen, server.receive_client_models(chosen, state_dict=False))
    return {
        name: value.detach().clone() for name, value in server.model.state_dict().items()
    }, clients
