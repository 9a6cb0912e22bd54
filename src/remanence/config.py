"""An experiment as data: TOML and flags in, one frozen and checked `Experiment` out. Nothing here imports
torch.

Every key has one name (`local.batch_size`); the flags of the command line are short names for these
keys, and `--set key=value` reaches all of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from remanence.core import expressions
from remanence.core.errors import InputError, nearest

LARGEST_FILE = 1_000_000  # bytes; an experiment file is something a person writes

Count = Annotated[StrictInt, Field(ge=1)]
Natural = Annotated[StrictInt, Field(ge=0)]
Number = StrictFloat | StrictInt


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(Section):
    # a source, with options: synthetic(samples=5000), npz(path="my.npz"); or a path
    name: StrictStr = "digits"
    dir: StrictStr = ""  # where data sets lie; empty: the environment variable REMANENCE_DATA
    partition: StrictStr = "dirichlet(alpha=0.1)"
    # share of each client's rows kept for validation
    validation: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    public: Natural = 0  # training rows held out for the server
    augment: tuple[StrictStr, ...] = ()  # crop, flip
    normalize: StrictBool = True  # to mean 0 and deviation 1, by channel or column


class ClientSettings(Section):
    count: Count | None = None  # None: as many as the partition makes, 10 where it does not say
    # a number of clients, or a fraction below 1; None: all
    sample: Annotated[StrictInt | StrictFloat, Field(gt=0)] | None = None
    # so many of them, or each by a coin of its own with the same chance
    sampling: Literal["fixed", "poisson"] = "fixed"
    availability: StrictStr = "always"  # who answers in which rounds, such as random(offline=0.1)
    speed: StrictStr = "equal"  # simulated seconds a local step takes, such as lognormal(sigma=0.5)


class DriftSettings(Section):
    # who is in which cluster, when, such as random(clusters=2); empty: nothing drifts
    schedule: StrictStr = ""
    time_steps: Count = 1  # time steps; with drift, `rounds` are those of one time step
    # what the data of each cluster are, such as label(groups="0 1 8 9|3 4 5 7"); empty: classes
    # divided evenly
    concepts: StrictStr = ""
    rows: Literal["pools", "partition"] = (
        # drawn from a pool for each cluster; or kept as data.partition gave them, seen differently
        "pools"
    )
    samples: Natural = 0  # training rows a client draws at a time step; 0: as many as need no reuse
    validation: Natural = 0  # validation rows it draws; 0: by data.validation
    # who draws new rows at a time step; empty: as the schedule's paper has it
    resample: Literal["", "changed", "everyone"] = ""


class PeerSettings(Section):
    topology: StrictStr = "full"  # who can reach whom, such as ring(neighbors=2)
    warmup: StrictBool = True  # every client trains once before the first exchange
    # a client stops after so many rounds without a lower validation loss, until its data change; 0:
    # never
    patience: Natural = 0


class LocalSettings(Section):
    epochs: Natural = 1
    steps: Natural = 0  # instead of epochs
    batch_size: Count = 32
    drop_last: StrictBool = False
    optimizer: StrictStr = "sgd(lr=0.1)"
    lr: Annotated[Number, Field(gt=0)] | None = None  # replaces the optimizer's own
    schedule: StrictStr = "constant"  # of the learning rate over rounds
    buffers: Literal["average", "local", "frozen"] = "average"  # batch norm's statistics


class RoundSettings(Section):
    min_replies: Count = 1  # with fewer good replies the round is abandoned
    # a client that claims more examples is refused
    weight_cap: Annotated[Number, Field(gt=0)] = 1e9
    # a client whose model moved further, in Euclidean length, is refused; 0: no limit
    max_norm: Annotated[Number, Field(ge=0)] = 0.0
    # so many times more clients are asked than answers are used: the first to answer
    over_selection: Annotated[Number, Field(ge=1)] = 1.0
    # simulated seconds (real ones with flower), such as 30, or quantile(share=0.8): who answers
    # later is late
    deadline: StrictStr = "none"
    # late answers: thrown away, or used in the round in which they come
    late: Literal["discard", "use"] = "discard"
    # a late answer weighs 1 / (1 + age) to this power
    staleness: Annotated[Number, Field(ge=0)] = 0.5


class RecordSettings(Section):
    every: Count = 1  # rounds between evaluations; the last round is always evaluated
    # also evaluate every client's model after local training (cost: one evaluation a client)
    local: StrictBool = False
    # with `local`: evaluate at most so many of a round's models on each other's validation rows; 0:
    # none
    cross: Natural = 20
    # also keep, for every training row of a round's clients, whether it was right before, after and
    # merged
    examples: StrictBool = False
    confusion: StrictBool = False  # also keep whole confusion matrices
    validation: StrictBool = True  # also evaluate the global model on all clients' validation rows
    # also evaluate personal models, where the method makes any, of at most so many clients, the
    # first by number
    personal: Natural = 100


class RaySettings(Section):
    address: StrictStr = (
        # of a running cluster; empty: the environment variable RAY_ADDRESS, and without it a
        # cluster on this machine alone
        ""
    )
    # the engine inside a worker; empty: the fastest there
    inner: Literal["", "sequential", "vectorized"] = ""
    cpus: Annotated[Number, Field(gt=0)] = 1  # cores of a worker
    # a worker's share of a GPU; 0: a whole one where device is cuda, else none
    gpus: Annotated[Number, Field(ge=0, le=1)] = 0
    # how often work that was lost with a worker is done again before the run fails
    retries: Natural = 3


class CheckpointSettings(Section):
    # at most one checkpoint in so many seconds; 0: after every round
    seconds: Annotated[Number, Field(ge=0)] = 5


class Experiment(Section):
    """All that an experiment is."""

    method: StrictStr = "fedavg"
    # empty: the default for the data; or a name, or package.module:Class(option=value)
    model: StrictStr = ""
    rounds: Count = 20  # with drift, of every time step
    seed: Natural = 0
    engine: Literal["auto", "sequential", "vectorized", "processes", "ray", "flower"] = "auto"
    stack_size: Natural = 0  # most clients in one stack, with processes of each worker; 0: chosen
    # how stacks and processes run steps: plainly, recorded, or fused too
    execution: Literal["auto", "eager", "captured", "compiled"] = "auto"
    workers: Natural = 0  # processes; 0: one a core
    # real seconds after which a worker that has not answered is given up on; 0: never
    timeout: Annotated[Number, Field(ge=0)] = 1800.0
    threads: Natural = 0  # 0: torch's own choice, written down
    device: StrictStr = "auto"
    precision: Literal["fp32", "fp64", "tf32", "bf16"] = "fp32"
    deterministic: StrictBool = False
    # what hostile clients do in this experiment, such as sign_flip(fraction=0.1); empty: nobody is
    # hostile
    attack: StrictStr = ""
    data: DataSettings = DataSettings()
    clients: ClientSettings = ClientSettings()
    drift: DriftSettings = DriftSettings()
    peers: PeerSettings = PeerSettings()
    local: LocalSettings = LocalSettings()
    round: RoundSettings = RoundSettings()
    record: RecordSettings = RecordSettings()
    ray: RaySettings = RaySettings()  # for engine = "ray"
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def total_rounds(self) -> int:
        """Rounds of all time steps together."""
        return self.rounds * self.drift.time_steps

    def time_step(self, round: int) -> int:
        """The time step, from 0, that a round, from 1, belongs to."""
        return (round - 1) // self.rounds


FLAGS = {
    "method": "method",
    "model": "model",
    "rounds": "rounds",
    "seed": "seed",
    "engine": "engine",
    "device": "device",
    "precision": "precision",
    "deterministic": "deterministic",
    "attack": "attack",
    "data": "data.name",
    "data_dir": "data.dir",
    "partition": "data.partition",
    "validation": "data.validation",
    "public": "data.public",
    "clients": "clients.count",
    "sample": "clients.sample",
    "availability": "clients.availability",
    "drift": "drift.schedule",
    "time_steps": "drift.time_steps",
    "concepts": "drift.concepts",
    "samples": "drift.samples",
    "topology": "peers.topology",
    "patience": "peers.patience",
    "epochs": "local.epochs",
    "steps": "local.steps",
    "batch_size": "local.batch_size",
    "optimizer": "local.optimizer",
    "lr": "local.lr",
    "schedule": "local.schedule",
    "buffers": "local.buffers",
    "min_replies": "round.min_replies",
    "record_every": "record.every",
    "record_local": "record.local",
}


def all_keys() -> dict[str, Any]:
    """Every key of a spec with its default."""
    return dict(_walk(Experiment().model_dump(), ""))


def read_file(path: Path, allow_code: bool = True) -> dict[str, Any]:
    """An experiment file as nested dictionaries, not yet checked; one that names Python code is
    refused where that is not allowed.
    """
    if path.is_dir():
        raise InputError(
            f"{path} is a folder, not an experiment file: to go on with a run, use remanence"
            f" resume {path}"
        )
    tree = read_toml(
        path,
        "an experiment file",
        "check the name, or give everything by flags (remanence run --help)",
    )
    if not allow_code:
        forbid_import_path(tree.get("model"), path)
    return tree


def forbid_import_path(model: object, path: Path) -> None:
    """A file or folder from somebody else must not decide which Python code is run: a network
    by import path needs the user's word.
    """
    if isinstance(model, str) and is_import_path(model):
        raise InputError(
            f"{path} imports and runs Python code ({model}): look at that code, then add"
            " --allow-code"
        )


def is_import_path(text: str) -> bool:
    """Is it an import path, package.module:Class(option=value), and not one of our names?"""
    return ":" in text.partition("(")[0]


def read_toml(path: Path, what: str, cure: str) -> dict[str, Any]:
    """A short text that a person wrote; `what` it is and what to do where there is none are
    told in words.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is larger than {LARGEST_FILE} bytes: {what} is a short text")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no {what.partition(' ')[2]} at {path}: {cure}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def parse_experiment(
    base: Mapping[str, Any] | None = None, changes: Mapping[str, Any] | None = None
) -> Experiment:
    """A checked spec from nested dictionaries and changes by dotted key."""
    tree = _copy(base or {})
    for key, value in (changes or {}).items():
        _put(tree, key, value)
    local = tree.get("local")
    if isinstance(local, dict) and local.get("steps") and "epochs" not in local:
        local["epochs"] = 0
    try:
        spec = Experiment.model_validate(tree)
    except ValidationError as error:
        raise InputError(_explain(error)) from None
    return _check_combinations(spec)


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """`local.batch_size=16` -> {"local.batch_size": 16}; values are TOML, and what is not TOML is a word."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"--set {text!r} has no value: write --set key=value, such as --set local.batch_size=16"
            )
        changes[key.strip()] = parse_value(value.strip())
    return changes


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def changes_from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags that were given, by the key each stands for."""
    unknown = [name for name in flags if name not in FLAGS]
    if unknown:
        raise InputError(f"unknown option {unknown[0]!r}: {nearest(unknown[0], FLAGS)}")
    return {FLAGS[name]: value for name, value in flags.items() if value is not None}


def write_toml(spec: Experiment, extra: Mapping[str, Any]) -> str:
    """The spec with everything that was chosen, as TOML."""
    return tomli_w.dumps(_without_none(spec.model_dump(mode="json")) | _without_none(extra))


def optimizer_call(spec: Experiment) -> expressions.Call:
    """The optimizer with its learning rate settled."""
    call = expressions.parse_call(spec.local.optimizer)
    return (
        call
        if spec.local.lr is None
        else expressions.Call(call.name, {**call.arguments, "lr": spec.local.lr})
    )


def _check_combinations(spec: Experiment) -> Experiment:
    if (spec.local.epochs > 0) == (spec.local.steps > 0):
        raise InputError(
            f"local.epochs={spec.local.epochs} and local.steps={spec.local.steps}: exactly one"
            " of them must be above 0"
        )
    sample = spec.clients.sample
    if isinstance(sample, float) and sample > 1:
        raise InputError(
            f"clients.sample={sample} is neither a whole number of clients nor a fraction of"
            " at most 1"
        )
    if isinstance(sample, int) and spec.clients.count is not None and sample > spec.clients.count:
        raise InputError(
            f"clients.sample={sample} is more than clients.count={spec.clients.count}: a"
            " round cannot ask more clients than there are"
        )
    if spec.clients.sampling == "poisson" and spec.round.over_selection > 1:
        raise InputError(
            "clients.sampling=poisson and round.over_selection cannot be combined: with"
            " coins no number of answers is waited for; leave one out"
        )
    if not spec.drift.schedule:
        given = next(
            (
                name
                for name, value in spec.drift.model_dump().items()
                if value != DriftSettings().model_dump()[name]
            ),
            None,
        )
        if given:
            raise InputError(
                f"drift.{given} means nothing where nothing drifts: add --drift"
                ' "random(clusters=2)" (drift.schedule), or leave it out'
            )
    return spec


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    if key not in all_keys():
        raise InputError(f"unknown key {key!r}: {nearest(key, all_keys())}")
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise InputError(f"{section} must be a section such as [{section}], not a value")
    tree[name] = value


def _walk(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copy(value) if isinstance(value, Mapping) else value for name, value in tree.items()
    }


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if value is not None
    }


def _explain(error: ValidationError) -> str:
    """The first complaint of pydantic as a sentence with thing, cause and cure."""
    first = error.errors()[0]
    place = [
        str(part)
        for part in first["loc"]
        if not (
            isinstance(part, str)
            and ("strict" in part or "[" in part or part in ("int", "float", "str"))
        )
    ]
    key, kind, value, about = (
        ".".join(place),
        first["type"],
        first.get("input"),
        first.get("ctx", {}),
    )
    if kind == "extra_forbidden":
        return f"unknown key {key!r}: {nearest(key, all_keys())}"
    wanted = {
        "greater_than_equal": f"at least {about.get('ge')}",
        "greater_than": f"above {about.get('gt')}",
        "less_than": f"below {about.get('lt')}",
        "less_than_equal": f"at most {about.get('le')}",
        "literal_error": f"one of {str(about.get('expected', '')).replace(chr(39), '')}",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "a text",
        "bool_type": "true or false",
        "tuple_type": 'a list such as ["crop", "flip"]',
        "model_type": f"a section such as [{key}]",
    }.get(kind, first["msg"])
    return f"{key} must be {wanted}, not {value!r}"


ENGINES = get_args(Experiment.model_fields["engine"].annotation)
