"""BlazeFL: its FedAvg, set as in its own benchmark; threads where Python has no global lock,
processes elsewhere. Images are read, mirrored, cropped and normalized one by one by a data loader,
as there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgPartitionType,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode, ModelSelector, PartitionedDataset
from blazefl.reproducibility import setup_reproducibility
from published_networks import make_network, set_precision
from published_task import PublishedTask, begin, versions_of
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

CENTERED = [transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
AUGMENTED = [
    CENTERED[0],
    transforms.RandomHorizontalFlip(),
    transforms.RandomCrop(32, padding=4),
    CENTERED[1],
]
SEED = 42


class Images(Dataset):
    """Pixels and labels, transformed one by one. x: uint8 [n, 3, 32, 32]"""

    def __init__(self, x: np.ndarray, y: np.ndarray, transform: transforms.Compose):
        self.x, self.y, self.transform = x.transpose(0, 2, 3, 1), y, transform

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.x[index]), int(self.y[index])


class TaskData(PartitionedDataset):
    """The job's files; a worker gets the folder and reads its client's examples."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get_dataset(self, type_: FedAvgPartitionType, cid: int | None) -> Dataset:
        task = PublishedTask(self.folder)
        if type_ == FedAvgPartitionType.TEST:
            return Images(task.test_x, task.test_y, transforms.Compose(CENTERED))
        return Images(
            *task.client(cid), transforms.Compose(AUGMENTED if task.augment else CENTERED)
        )

    def set_dataset(self, type_: FedAvgPartitionType, cid: int | None, dataset: Dataset) -> None:
        """Nothing changes."""

    def get_dataloader(
        self,
        type_: FedAvgPartitionType,
        cid: int | None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> DataLoader:
        dataset = self.get_dataset(type_, cid)
        return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)


class Selector(ModelSelector):
    def __init__(self, task: PublishedTask):
        self.network, self.classes = task.network, task.classes

    def select_model(self, model_name: str) -> nn.Module:
        return make_network(self.network, self.classes)


def main() -> None:
    task, reports = begin()
    set_precision(task.precision)
    setup_reproducibility(SEED)
    multiprocessing.set_start_method("spawn")
    workers = int(os.environ["PEER_WORKERS"])
    common = {
        "model_selector": Selector(task),
        "model_name": task.network,
        "dataset": TaskData(task.folder),
        "device": task.device,
        "num_clients": task.clients,
        "batch_size": task.batch,
        "seed": SEED,
    }
    handler = FedAvgBaseServerHandler(
        **common, global_round=task.rounds, sample_ratio=task.cohort / task.clients
    )
    training = common | {"epochs": task.epochs, "lr": task.lr, "num_parallels": workers}
    if threads := not getattr(sys, "_is_gil_enabled", lambda: True)():
        trainer = FedAvgThreadPoolClientTrainer(**training)
    else:
        trainer = FedAvgProcessPoolClientTrainer(
            **training,
            state_dir=task.folder / "blazefl-state",
            share_dir=task.folder / "blazefl-share",
            ipc_mode=IPCMode.SHARED_MEMORY,
        )
    reports.start(
        versions_of("blazefl", "torch"),
        f"{workers} {'threads' if threads else 'processes'}",
    )
    while not handler.if_stop():
        cohort = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), cohort)
        for package in trainer.uplink_package():
            handler.load(package)
        summary = handler.get_summary() if task.evaluates(handler.round) else {}
        reports.round(handler.round, summary.get("server_loss"), summary.get("server_acc"))


if __name__ == "__main__":
    main()
