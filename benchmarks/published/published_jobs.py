"""The jobs that others published, what their sources say, and how they are written for all
contenders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remanence.config import parse_experiment
from remanence.experiment.build import build


@dataclass(frozen=True)
class PublishedJob:
    """One job.

    Args:
        about: What it is, for the table.
        network: A name in `published_networks.NETWORKS`.
        settings: The experiment's settings, by dotted key.
        target: The test accuracy to which the time is given, unless another one is asked for.
        peer: Whose job it is: the package beside which it runs.
        published: What was published, with its hardware.
        sources: Where the job and its numbers were read.
        differs: In what we differ from the source.
    """

    about: str
    network: str
    settings: dict[str, Any]
    target: float
    peer: str
    published: str
    sources: tuple[str, ...]
    differs: str


SHARED: dict[str, Any] = {
    "method": "fedavg",
    "data.validation": 0,
    "record.personal": 0,
    "record.validation": False,
    "local.optimizer": "sgd(lr=0.1)",
}
BLAZEFL = SHARED | {
    "data.partition": "shards(per_client=2)",
    "data.augment": ["crop", "flip"],
    "data.normalize": False,  # the network begins with pixels / 127.5 - 1
    "clients.count": 100,
    "local.epochs": 5,
    "local.batch_size": 50,
    "rounds": 5,
}
PFL = SHARED | {
    "data.partition": "iid",
    "clients.count": 1000,
    "clients.sample": 50,
    "local.epochs": 1,
    "local.batch_size": 10,
    "rounds": 1500,
    "record.every": 10,
}
BLAZEFL_SOURCES = (
    "github.com/kitsuyaazuma/blazefl, commit 6dcb310: benchmarks/blazefl-case/main.py (clients,"
    " rounds, shards, epochs, batch, rate), src/blazefl/contrib/fedavg.py (SGD, evaluation),"
    " examples/quickstart-fedavg/dataset/dataset.py (preprocessing), models/selector.py (networks)",
    "the same, README.md and docs/imgs/benchmark_*.png: hardware and times, read off the plots",
)
BLAZEFL_DIFFERS = (
    "all contenders have our draw of the shards; ours, the plain loop and the others share their"
    " first weights"
)

JOBS: dict[str, PublishedJob] = {
    "blazefl-cnn": PublishedJob(
        "CNN of PyTorch's tutorial: 100 of 100 clients of 500 CIFAR-10 images in two shards each,"
        " mirrored and cropped, batch 50, 5 epochs, SGD 0.1, evaluated after each of 5 rounds",
        "tutorial_cnn",
        BLAZEFL,
        0.3,
        "blazefl",
        "BlazeFL 25 s with 16 threads, 91 s with 8 processes; Flower 65 s with 16 workers (4 x"
        " Quadro RTX 6000, EPYC 7542)",
        BLAZEFL_SOURCES,
        BLAZEFL_DIFFERS,
    ),
    "blazefl-resnet18": PublishedJob(
        "torchvision's ResNet-18 on the data and settings of blazefl-cnn",
        "imagenet_resnet18",
        BLAZEFL,
        0.3,
        "blazefl",
        "BlazeFL 127 s with 8 threads, 156 s with 8 processes; Flower 147 s with 16 workers (4 x"
        " Quadro RTX 6000, EPYC 7542)",
        BLAZEFL_SOURCES,
        BLAZEFL_DIFFERS,
    ),
    "pfl-cnn": PublishedJob(
        "pfl-research's simple_cnn with dropout: 50 of 1,000 users of 50 CIFAR-10 images, iid, batch"
        " 10, 1 epoch, SGD 0.1, server rate 1, evaluated every 10 of 1,500 rounds",
        "pfl_cnn",
        PFL,
        0.6,
        "pfl",
        "Table 1 of arXiv:2404.06430 (one A100 of 40 GB, 10 cores), not repeated here",
        (
            "github.com/apple/pfl-research, commit c9d1f32:"
            " benchmarks/image_classification/configs/baseline.yaml (settings) and"
            " pytorch/train.py (optimizers, weights), benchmarks/model/pytorch/cnn.py (network),"
            " benchmarks/dataset/cifar10 (split, preprocessing), benchmarks/README.md",
        ),
        "its script reads the pixels of an image, which are stored color after color, as if they"
        " were stored pixel after pixel; all contenders here get the image as it is. Its users are"
        " drawn with replacement and keep the order of their examples, as pfl itself does here;"
        " ours and the plain loop draw without replacement and shuffle",
    ),
}


def settings_of(
    job: PublishedJob, rounds: int | None, data: str, data_dir: str, device: str, precision: str
) -> dict[str, Any]:
    """The settings of our experiment.

    Args:
        job: The job.
        rounds: Another number of rounds than the published one, or None.
        data: The dataset: cifar10, or a synthetic one of its shape.
        data_dir: Where it is; empty: the folder that REMANENCE_DATA names.
        device: cpu or cuda.
        precision: fp32 or tf32.
    """
    place = {"data.name": data, "data.dir": data_dir, "device": device, "precision": precision}
    return job.settings | place | ({"rounds": rounds} if rounds else {})


def write_task(job: PublishedJob, settings: dict[str, Any], folder: Path) -> None:
    """The files of a job, as `published_task.PublishedTask` reads them."""
    experiment = build(parse_experiment({}, settings | {"device": "cpu"}))
    task, config = experiment.task, experiment.config
    split, clients = task.population.at(0).train, range(task.info.num_clients)
    numbers = {
        "network": job.network,
        "classes": task.info.num_classes,
        "rounds": config.rounds,
        "every": config.record.every,
        "clients": len(clients),
        "cohort": config.clients.sample or len(clients),
        "batch": config.local.batch_size,
        "epochs": config.local.epochs,
        "lr": task.optimizer.hparams["lr"],
        "augment": bool(config.data.augment),
        "device": settings["device"],
        "precision": config.precision,
        "experiment": settings,
    }
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(numbers))
    mean, std = (
        np.full((1, 1, 1), 127.5) if given is None else given.numpy()
        for given in (task.train.mean, task.train.std)
    )
    rows = {f"rows_{client}": split.for_client(client) for client in clients}
    np.savez(folder / "arrays.npz", mean=mean.astype("f4"), std=std.astype("f4"), **rows)
    for name, examples in (("train", task.train), ("test", task.test)):
        np.save(folder / f"{name}_x.npy", examples.x.numpy())
        np.save(folder / f"{name}_y.npy", examples.y.numpy())
