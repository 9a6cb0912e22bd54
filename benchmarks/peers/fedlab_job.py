"""FedLab: its standalone simulation, a serial trainer and a synchronous server; the average is
weighted, as FedLab leaves to its users.
"""

from __future__ import annotations

from typing import Any

import torch
from driver import PeerJob, begin
from torch import Tensor
from torch_job import Epochs, make_model, make_optimizer, weights_of
from torchvision_stand_in import replace_torchvision

replace_torchvision()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.utils import Aggregators, SerializationTool  # noqa: E402

ENDLESS = 1_000_000


class PlannedDataset(FedDataset):
    """Clients whose batches come in the order of the plan."""

    def __init__(self, job: PeerJob):
        super().__init__()
        self.num = job.clients
        self._held = {client: Epochs(job, client) for client in job.cohort}

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Epochs:
        return self._held[id]


class Trainer(SGDSerialClientTrainer):
    """Says how many examples a client has, and begins with a fresh optimizer for each."""

    def __init__(self, job: PeerJob):
        super().__init__(make_model(job), job.clients)
        self._job = job
        self.setup_dataset(PlannedDataset(job))
        self.setup_optim(job.epochs, job.batch, job.optimizer_hparams["lr"])

    def train(self, model_parameters: Tensor, train_loader: Any) -> list[Tensor]:
        self.optimizer = make_optimizer(self._job, self.model.parameters())
        return [*super().train(model_parameters, train_loader), torch.tensor(len(train_loader.y))]


class Server(SyncServerHandler):
    def __init__(self, job: PeerJob):
        super().__init__(make_model(job), ENDLESS, len(job.cohort) / job.clients)
        self.num_clients = job.clients
        self._cohort = job.cohort

    @property
    def num_clients_per_round(self) -> int:
        return len(self._cohort)

    def sample_clients(self) -> list[int]:
        return self._cohort

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        parameters, sizes = zip(*buffer, strict=True)
        SerializationTool.deserialize_model(
            self._model, Aggregators.fedavg_aggregate(list(parameters), torch.stack(sizes))
        )


def main() -> None:
    job, turns = begin()
    trainer, server = Trainer(job), Server(job)
    turns.ready("fedlab", "torch", note=f"1 process, {torch.get_num_threads()} threads")
    while not server.if_stop:
        turns.wait()
        trainer.local_process(server.downlink_package, server.sample_clients())
        for package in trainer.uplink_package:
            server.load(package)
        turns.done(lambda: weights_of(server.model))


if __name__ == "__main__":
    main()
