"""What the drivers of PyTorch peers share: the network, the optimizer, a client's batches, and
the plainest local training there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from driver import PeerJob
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from remanence.models import MODELS


def make_model(job: PeerJob) -> nn.Module:
    """Our network with the weights that all contenders start from."""
    model = MODELS[job.model](job.shape, job.classes)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in job.start().items()})
    return model.train()


def make_optimizer(
    job: PeerJob, parameters: Iterable[nn.Parameter], **changes: float
) -> torch.optim.Optimizer:
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, job.optimizer)
    return kind(parameters, **{**job.optimizer_hparams, **changes})


class Epochs:
    """A client's data, held in memory; each pass over it is the next epoch of the plan, and
    after the last one comes the first.
    """

    def __init__(self, job: PeerJob, client: int):
        x, y = job.examples(client)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self._batches = [torch.from_numpy(order).split(job.batch) for order in job.orders(client)]
        self._passes = 0

    def __len__(self) -> int:
        return len(self._batches[0])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._batches[self._passes % len(self._batches)]
        self._passes += 1
        for rows in batches:
            yield self.x[rows], self.y[rows]


def fit(model: nn.Module, job: PeerJob, data: Epochs) -> None:
    """All local steps of one client."""
    optimizer = make_optimizer(job, model.parameters())
    for _ in range(job.epochs):
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def weights_of(model: nn.Module, prefix: str = "") -> dict[str, np.ndarray]:
    """Under the names of our own network, which a wrapper may have put a prefix before."""
    return {
        name.removeprefix(prefix): value.detach().numpy().copy()
        for name, value in model.named_parameters()
    }
