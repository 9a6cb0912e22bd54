"""fluke: CentralizedFL with its own client and a server that weights by examples; evaluation is
turned off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from driver import PeerJob, Turns, begin
from torch import Tensor, nn
from torch_job import Epochs, make_model, weights_of
from torchvision_stand_in import replace_torchvision

replace_torchvision()

from fluke import FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402

ENDLESS = 1_000_000


class PlannedLoader(FastDataLoader):
    """A client's batches in the order of the plan."""

    def __init__(self, job: PeerJob, client: int):
        self._epochs = Epochs(job, client)
        super().__init__(
            self._epochs.x, self._epochs.y, num_labels=job.classes, batch_size=job.batch
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._epochs)


class FixedCohort(Server):
    """A server that always calls on the same clients."""

    def __init__(self, job: PeerJob, clients: Sequence[Client]):
        super().__init__(make_model(job), None, clients, weighted=True)
        self._cohort = [clients[number] for number in job.cohort]

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return self._cohort


class TakeTurns(FederationObserver):
    def __init__(self, turns: Turns, server: Server):
        self._turns, self._server = turns, server

    def start_round(self, round: int, global_model: nn.Module) -> None:
        self._turns.wait()

    def end_round(self, round: int) -> None:
        self._turns.done(lambda: weights_of(self._server.model))


def main() -> None:
    job, turns = begin()
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer = OptimizerConfigurator({"name": job.optimizer, **job.optimizer_hparams})
    loaders = {client: PlannedLoader(job, client) for client in job.cohort}
    clients = [
        # Who is not in the cohort never trains, and so needs no data. Without persistency an
        # optimizer lives for one round, as the job wants it.
        Client(
            number,
            loaders.get(number),
            None,
            optimizer,
            nn.CrossEntropyLoss(),
            local_epochs=job.epochs,
            persistency=False,
        )
        for number in range(job.clients)
    ]
    server = FixedCohort(job, clients)
    federation = CentralizedFL(len(clients), None, {}, clients=clients, server=server)
    federation.set_callbacks(TakeTurns(turns, server))
    turns.ready("fluke-fl", "torch", note=f"1 process, {torch.get_num_threads()} threads")
    federation.run(n_rounds=ENDLESS, eligible_perc=len(job.cohort) / len(clients))


if __name__ == "__main__":
    main()
