"""The settings of an experiment: one pydantic model, with a section for each table of the file.

The description of a field is its only documentation: the help texts of the command line, the
keyword arguments of `rem.run` (`keywords`) and `remanence list settings` are made from it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

# the most that readers of a run accept, since measures allocate tables for them
MAX_ROUNDS, MAX_TIME_STEPS = 100_000_000, 100_000

# where data name no sites; see `data.partition`
DEFAULT_PARTITION = "dirichlet(alpha=0.1)"

Count = Annotated[StrictInt, Field(ge=1)]
Natural = Annotated[StrictInt, Field(ge=0)]
Number = StrictFloat | StrictInt
Share = Annotated[Number, Field(ge=0, lt=1)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]


class Section(BaseModel):
    """A frozen table of settings that accepts no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(Section):
    """The dataset and its partition over clients."""

    name: StrictStr = Field(
        default="digits",
        description="Dataset, such as digits or synthetic(samples=5000), a file such as"
        " patients.csv(label=outcome) or scans.npz, or a folder of images.",
    )
    dir: StrictStr = Field(
        default="",
        description="Folder of the datasets. Default: the environment variable REMANENCE_DATA.",
    )
    max_bytes: Annotated[Number, Field(ge=0, lt=math.inf)] = Field(
        default=0,
        description="Maximum memory that reading the data may take, in bytes, such as 4e9. 0: the"
        " environment variable REMANENCE_MAX_BYTES, otherwise three quarters of the machine's"
        " memory.",
    )
    partition: StrictStr = Field(
        default="",
        description="Partition of the examples over clients, such as iid or dirichlet(alpha=0.1)."
        " Default: by_group where the data name their sites, otherwise dirichlet(alpha=0.1).",
    )
    limit: Natural = Field(
        default=0,
        description="Maximum number of training examples, drawn in proportion to classes and sites."
        " 0: all.",
    )
    test_limit: Natural = Field(
        default=0,
        description="Maximum number of test examples, drawn likewise. 0: all.",
    )
    validation: Share = Field(
        default=0.1, description="Fraction of each client's examples kept for validation."
    )
    public: Natural = Field(
        default=0, description="Number of training examples held out for the server as public data."
    )
    augment: tuple[Literal["crop", "flip", "cutout"], ...] = Field(
        default=(), description="Augmentations of training images: crop, flip, cutout."
    )
    normalize: StrictBool | Literal["range"] = Field(
        default=True,
        description="Normalize inputs to mean 0 and standard deviation 1, by channel or column."
        " range: scale them to between -1 and 1, by the smallest and the largest training input.",
    )


class ClientSettings(Section):
    """The clients: how many there are, which are sampled and how fast they are."""

    count: Count | None = Field(
        default=None,
        description="Number of clients. Default: what the partition defines, otherwise 10.",
    )
    sample: Annotated[StrictInt | StrictFloat, Field(gt=0)] | None = Field(
        default=None,
        description="Clients sampled in each round: a number, or a fraction such as 0.1."
        " Default: all.",
    )
    sampling: Literal["fixed", "poisson"] = Field(
        default="fixed",
        description="Sampling of clients: fixed draws a fixed number without replacement, poisson"
        " draws every client independently with the same probability. Replies are weighted by"
        " numbers of examples either way, unless the method has other weights.",
    )
    availability: StrictStr = Field(
        default="always",
        description="Model of which clients are available in which rounds, such as"
        " random(offline=0.1).",
    )
    speed: StrictStr = Field(
        default="equal",
        description="Model of the simulated seconds that a local step takes, such as"
        " lognormal(sigma=0.5).",
    )


class DriftSettings(Section):
    """Changes of the clients' data over time."""

    schedule: StrictStr = Field(
        default="",
        description="Schedule of which client is in which cluster at which time step, such as"
        " random(clusters=2). Empty: no drift.",
    )
    time_steps: Annotated[Count, Field(le=MAX_TIME_STEPS)] = Field(
        default=1, description="Number of time steps; the data may change between two of them."
    )
    concepts: StrictStr = Field(
        default="",
        description="Data of each cluster, such as label(groups='0 1|2 3'). Empty: the classes are"
        " divided evenly among the clusters.",
    )
    source: Literal["pools", "partition"] = Field(
        default="pools",
        description="Source of a client's examples: pools draws them from a pool of its cluster,"
        " partition keeps those of data.partition and changes their appearance or labels.",
    )
    samples: Natural = Field(
        default=0,
        description="Training examples that a client draws at each time step. 0: as many as are"
        " possible without drawing an example twice.",
    )
    validation: Natural = Field(
        default=0,
        description="Validation examples that a client draws at each time step. 0: the fraction"
        " data.validation.",
    )
    resample: Literal["", "changed", "everyone"] = Field(
        default="",
        description="Clients that draw new examples at a time step: those whose cluster changed,"
        " or everyone. Empty: what the paper of the schedule does.",
    )


class PeerSettings(Section):
    """Decentralized learning: training without a server."""

    topology: StrictStr = Field(
        default="full",
        description="Graph of which clients can exchange models without a server, such as"
        " ring(neighbors=2).",
    )
    warmup: StrictBool = Field(
        default=True, description="Train every client once before the first exchange."
    )
    patience: Natural = Field(
        default=0,
        description="Early stopping without a server: a client pauses after more than this many"
        " rounds without a lower validation loss, until its data change. 0: never.",
    )


class LocalSettings(Section):
    """Local training of a client."""

    epochs: Natural = Field(default=1, description="Local epochs in each round.")
    steps: Natural = Field(default=0, description="Local steps in each round, instead of epochs.")
    batch_size: Count = Field(default=32, description="Examples in a batch.")
    drop_last: StrictBool = Field(
        default=False, description="Drop the last batch if it is incomplete."
    )
    optimizer: StrictStr = Field(
        default="sgd(lr=0.1)",
        description="Optimizer of the clients: sgd, adam or adamw, such as sgd(momentum=0.9).",
    )
    lr: Positive | None = Field(
        default=None, description="Learning rate of the clients; replaces the one of the optimizer."
    )
    schedule: StrictStr = Field(
        default="constant",
        description="Schedule of the learning rate over rounds, such as exponential(decay=0.99).",
    )
    buffers: Literal["average", "local", "frozen"] = Field(
        default="average",
        description="Statistics of batch normalization: average them over clients, keep them local"
        " to each client, or keep them frozen.",
    )


class RoundSettings(Section):
    """What the server requires of replies, and how it treats stragglers."""

    min_replies: Count = Field(
        default=1, description="Abandon a round with fewer valid replies than this."
    )
    weight_cap: Positive = Field(
        default=1e9, description="Reject a reply that claims a larger weight (number of examples)."
    )
    max_norm: NonNegative = Field(
        default=0.0,
        description="Reject a reply whose model moved further, in Euclidean norm. 0: no limit.",
    )
    over_selection: Annotated[Number, Field(ge=1)] = Field(
        default=1.0,
        description="Sample this many times more clients than replies are used; the first to reply"
        " are used.",
    )
    deadline: StrictStr = Field(
        default="none",
        description="Deadline of a round, after which a reply is late: simulated seconds (real ones"
        " with the engine flower), such as 30, or quantile(share=0.8).",
    )
    late: Literal["discard", "use"] = Field(
        default="discard",
        description="Late replies: discard them, or use them in the round in which they arrive"
        " (or, if it is abandoned because of too few replies, in the next).",
    )
    staleness: NonNegative = Field(
        default=0.5,
        description="Exponent of 1 / (1 + age)^staleness, the factor of a late reply's weight, with"
        " its age in rounds.",
    )


class RecordSettings(Section):
    """What is evaluated and recorded."""

    every: Count = Field(
        default=1, description="Rounds between two evaluations. The last round is always evaluated."
    )
    first: Natural = Field(
        default=0,
        description="First round of a time step that is evaluated: 1 with record.every=5 evaluates"
        " its rounds 1, 6, 11 and so on, and its last one. 0: every round that record.every"
        " divides.",
    )
    local: StrictBool = Field(
        default=False,
        description="Also evaluate every client's model after local training (one more evaluation"
        " for each client).",
    )
    local_every: Natural = Field(
        default=0,
        description="With record.local: rounds between two evaluations of the clients' models."
        " The first and the last round are always evaluated. 0: as often as record.every.",
    )
    cross: Natural = Field(
        default=20,
        description="With record.local: evaluate at most this many clients' models of a round on"
        " each other's validation examples. 0: none.",
    )
    examples: StrictBool = Field(
        default=False,
        description="Also record for every training example of a round's clients whether the model"
        " was correct before local training, after it and after aggregation.",
    )
    confusion: StrictBool = Field(
        default=False, description="Also record whole confusion matrices."
    )
    validation: StrictBool = Field(
        default=True,
        description="Also evaluate the global model on all clients' validation examples.",
    )
    personal: Natural = Field(
        default=100,
        description="Evaluate the personal models of at most this many clients, where the method"
        " has personal models.",
    )


class RaySettings(Section):
    """The engine ray."""

    address: StrictStr = Field(
        default="",
        description="Address of a running cluster. Default: the environment variable RAY_ADDRESS,"
        " otherwise a cluster on this machine.",
    )
    inner: Literal["", "sequential", "vectorized"] = Field(
        default="", description="Engine inside a worker. Empty: the fastest one there."
    )
    cpus: Positive = Field(default=1, description="CPU cores of a worker.")
    gpus: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0,
        description="Fraction of a GPU for each worker. 0: a whole GPU where the device is cuda,"
        " otherwise none.",
    )
    retries: Natural = Field(
        default=3, description="Number of times that work lost with a worker is repeated."
    )


class CheckpointSettings(Section):
    """Checkpoints of a run."""

    seconds: NonNegative = Field(
        default=5,
        description="Minimum seconds between two checkpoints; more where writing one takes over a"
        " tenth of it. 0: one after every round.",
    )


class ExperimentSettings(Section):
    """The fields of `Experiment`, by section."""

    model_config = ConfigDict(defer_build=True)  # only `Experiment` is made: importing stays fast

    method: StrictStr = Field(
        default="fedavg", description="Method and losses joined by +, such as fedprox(mu=0.1)+wsm."
    )
    model: StrictStr = Field(
        default="",
        description="Model: mlp, cnn, lenet, resnet18 ... or package.module:Class(option=value)."
        " Default: by the data.",
    )
    rounds: Annotated[Count, Field(le=MAX_ROUNDS)] = Field(
        default=20, description="Rounds to train; with drift, in each time step."
    )
    seed: Natural = Field(default=0, description="Seed of all random numbers.")
    engine: Literal["auto", "sequential", "vectorized", "processes", "ray", "flower"] = Field(
        default="auto",
        description="Engine: auto, sequential, vectorized, processes, ray or flower (see remanence"
        " list engines).",
    )
    stack_size: Natural = Field(
        default=0,
        description="Maximum number of clients in one batched computation (of each worker, with"
        " processes). 0: chosen automatically.",
    )
    execution: Literal["auto", "eager", "captured", "compiled"] = Field(
        default="auto",
        description="Execution of steps by the engines vectorized and processes: eager, captured"
        " (replayed without Python) or compiled (captured with fused operators).",
    )
    workers: Natural = Field(
        default=0, description="Number of processes of the engine processes. 0: one for each core."
    )
    timeout: NonNegative = Field(
        default=1800.0,
        description="Seconds of wall time after which a worker that does not answer is replaced."
        " 0: never.",
    )
    threads: Natural = Field(
        default=0,
        description="Threads of torch. 0: 1 beside worker processes, else torch's default.",
    )
    device: StrictStr = Field(default="auto", description="Device: auto, cpu or cuda.")
    precision: Literal["fp32", "fp64", "tf32", "bf16"] = Field(
        default="fp32", description="Numeric precision: fp32, fp64, tf32 or bf16."
    )
    deterministic: StrictBool = Field(
        default=False,
        description="Use deterministic CUDA operators only: the same bits in every run.",
    )
    attack: StrictStr = Field(
        default="",
        description="Attack by hostile clients, such as sign_flip(fraction=0.1). Empty: none.",
    )
    data: DataSettings = Field(default=DataSettings(), description="Dataset and partition.")
    clients: ClientSettings = Field(default=ClientSettings(), description="Clients.")
    drift: DriftSettings = Field(
        default=DriftSettings(), description="Changes of the data over time."
    )
    peers: PeerSettings = Field(default=PeerSettings(), description="Decentralized learning.")
    local: LocalSettings = Field(default=LocalSettings(), description="Local training.")
    round: RoundSettings = Field(default=RoundSettings(), description="Replies and stragglers.")
    record: RecordSettings = Field(
        default=RecordSettings(), description="Evaluation and recording."
    )
    ray: RaySettings = Field(default=RaySettings(), description="The engine ray.")
    checkpoint: CheckpointSettings = Field(default=CheckpointSettings(), description="Checkpoints.")

    @property
    def total_rounds(self) -> int:
        """Rounds of all time steps together."""
        return self.rounds * self.drift.time_steps

    def time_step(self, round: int) -> int:
        """The time step (counted from 0) of a round (counted from 1)."""
        return (round - 1) // self.rounds


ENGINES: tuple[str, ...] = get_args(ExperimentSettings.model_fields["engine"].annotation)
