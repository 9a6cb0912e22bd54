"""The settings as keyword arguments, for editors and type checkers.

Written by `tests/settings_arguments.py` from the settings; change those, and run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from remanence.config.settings import (
    CheckpointSettings,
    ClientSettings,
    DataSettings,
    DriftSettings,
    LocalSettings,
    PeerSettings,
    RaySettings,
    RecordSettings,
    RoundSettings,
)


class CommonSettings(TypedDict, total=False):
    """What all runs of a comparison share."""

    data_dir: str | None
    """Folder of the datasets. Default: the environment variable REMANENCE_DATA."""

    clients: int | ClientSettings | Mapping[str, Any] | None
    """Number of clients. Default: what the partition defines, otherwise 10."""

    partition: str | None
    """Partition of the examples over clients, such as iid or dirichlet(alpha=0.1). Default:
    by_group where the data name their sites, otherwise dirichlet(alpha=0.1).
    """

    sample: float | None
    """Clients sampled in each round: a number, or a fraction such as 0.1. Default: all."""

    availability: str | None
    """Model of which clients are available in which rounds, such as random(offline=0.1). Default:
    always.
    """

    drift: str | DriftSettings | Mapping[str, Any] | None
    """Schedule of which client is in which cluster at which time step, such as random(clusters=2).
    Empty: no drift.
    """

    time_steps: int | None
    """Number of time steps; the data may change between two of them. Default: 1."""

    concepts: str | None
    """Data of each cluster, such as label(groups='0 1|2 3'). Empty: the classes are divided evenly
    among the clusters.
    """

    samples: int | None
    """Training examples that a client draws at each time step. 0: as many as are possible without
    drawing an example twice. Default: 0.
    """

    topology: str | None
    """Graph of which clients can exchange models without a server, such as ring(neighbors=2).
    Default: full.
    """

    patience: int | None
    """Early stopping without a server: a client pauses after more than this many rounds without a
    lower validation loss, until its data change. 0: never. Default: 0.
    """

    epochs: int | None
    """Local epochs in each round. Default: 1."""

    steps: int | None
    """Local steps in each round, instead of epochs. Default: 0."""

    batch_size: int | None
    """Examples in a batch. Default: 32."""

    lr: float | None
    """Learning rate of the clients; replaces the one of the optimizer."""

    optimizer: str | None
    """Optimizer of the clients: sgd, adam or adamw, such as sgd(momentum=0.9). Default:
    sgd(lr=0.1).
    """

    schedule: str | None
    """Schedule of the learning rate over rounds, such as exponential(decay=0.99). Default:
    constant.
    """

    buffers: Literal["average", "local", "frozen"] | None
    """Statistics of batch normalization: average them over clients, keep them local to each client,
    or keep them frozen. Default: average.
    """

    rounds: int | None
    """Rounds to train; with drift, in each time step. Default: 20."""

    validation: float | None
    """Fraction of each client's examples kept for validation. Default: 0.1."""

    public: int | None
    """Number of training examples held out for the server as public data. Default: 0."""

    min_replies: int | None
    """Abandon a round with fewer valid replies than this. Default: 1."""

    record_every: int | None
    """Rounds between two evaluations. The last round is always evaluated. Default: 1."""

    record_local: bool | None
    """Also evaluate every client's model after local training (one more evaluation for each
    client). Default: off.
    """

    attack: str | None
    """Attack by hostile clients, such as sign_flip(fraction=0.1). Empty: none."""

    engine: Literal["auto", "sequential", "vectorized", "processes", "ray", "flower"] | None
    """Engine: auto, sequential, vectorized, processes, ray or flower (see remanence list engines).
    Default: auto.
    """

    device: str | None
    """Device: auto, cpu or cuda. Default: auto."""

    precision: Literal["fp32", "fp64", "tf32", "bf16"] | None
    """Numeric precision: fp32, fp64, tf32 or bf16. Default: fp32."""

    deterministic: bool | None
    """Use deterministic CUDA operators only: the same bits in every run. Default: off."""

    stack_size: int | None
    """Maximum number of clients in one batched computation (of each worker, with processes). 0:
    chosen automatically. Default: 0.
    """

    execution: Literal["auto", "eager", "captured", "compiled"] | None
    """Execution of steps by the engines vectorized and processes: eager, captured (replayed without
    Python) or compiled (captured with fused operators). Default: auto.
    """

    workers: int | None
    """Number of processes of the engine processes. 0: one for each core. Default: 0."""

    timeout: float | None
    """Seconds of wall time after which a worker that does not answer is replaced. 0: never.
    Default: 1800.0.
    """

    threads: int | None
    """Threads of torch. 0: 1 beside worker processes, else torch's default. Default: 0."""

    peers: PeerSettings | Mapping[str, Any] | None
    """Decentralized learning, as a section."""

    local: LocalSettings | Mapping[str, Any] | None
    """Local training, as a section."""

    round: RoundSettings | Mapping[str, Any] | None
    """Replies and stragglers, as a section."""

    record: RecordSettings | Mapping[str, Any] | None
    """Evaluation and recording, as a section."""

    ray: RaySettings | Mapping[str, Any] | None
    """The engine ray, as a section."""

    checkpoint: CheckpointSettings | Mapping[str, Any] | None
    """Checkpoints, as a section."""


class RunSettings(CommonSettings, total=False):
    """What `rem.run` takes, besides objects."""

    seed: int | None
    """Seed of all random numbers. Default: 0."""


class Settings(RunSettings, total=False):
    """All settings of an `Experiment`."""

    method: str | None
    """Method and losses joined by +, such as fedprox(mu=0.1)+wsm. Default: fedavg."""

    model: str | None
    """Model: mlp, cnn, lenet, resnet18 ... or package.module:Class(option=value). Default: by the
    data.
    """

    data: str | DataSettings | Mapping[str, Any] | None
    """Dataset, such as digits or synthetic(samples=5000), a file such as
    patients.csv(label=outcome) or scans.npz, or a folder of images. Default: digits.
    """
