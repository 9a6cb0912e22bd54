"""site.toml: what a site holds, where it keeps its state, what it computes with and what it allows.
Nothing here imports torch.

    name = "ward-7"
    state = "state"                       # a folder, beside this file unless the path is absolute

    [data]                                # the clients that live here, by number, each with its
    data 0 = "npz(path='ward-7.npz')" 1 = "my_package.wards:load"           # a function without
    arguments that gives a Dataset or a Source

    [policy]
    label_counts = false
    suppress = 5

For trials, "share" in place of data: what the experiment's own partition of its own data gives this
client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr, ValidationError

from remanence.config import Natural, Number, Section, read_toml
from remanence.core.errors import InputError, nearest

SIMULATED_SHARE = "share"


class Policy(Section):
    """What a site allows. Whatever it does not allow it refuses, by name and with the code
    `policy`.
    """

    # may the counts of its labels go up, where a method asks for them?
    label_counts: StrictBool = False
    evaluate: StrictBool = True  # may counts of right and wrong predictions go up?
    suppress: Natural = 0  # counts below this go up as 0
    # counts go up with two-sided geometric noise of this epsilon an answer; 0: as they are
    epsilon: Annotated[Number, Field(ge=0)] = 0.0
    # may an experiment name a model of its own, package.module:Class, to import and run here?
    code: StrictBool = False
    # the only parts it takes part in, such as fedavg and wsm; empty: any
    methods: tuple[StrictStr, ...] = ()


class Compute(Section):
    device: StrictStr = "auto"
    threads: Natural = 0  # 0: torch's own choice
    engine: Literal["auto", "sequential", "vectorized"] = (
        "auto"  # how this site runs its own clients
    )
    # keep one process with the data in memory between messages; false: a fresh one for every
    # message
    daemon: StrictBool = True


class SiteSettings(Section):
    name: Annotated[StrictStr, Field(min_length=1, max_length=100)]
    state: Annotated[StrictStr, Field(min_length=1)] = "state"
    # where a client's kept state is lost, begin with a first one instead of refusing
    restart: StrictBool = False
    data: Annotated[dict[str, StrictStr], Field(min_length=1)]
    policy: Policy = Policy()
    compute: Compute = Compute()


class SiteFile:
    """A site's settings, and where they lie: paths in them are meant from there."""

    def __init__(self, path: Path, settings: SiteSettings):
        self.path, self.settings = path, settings

    @property
    def clients(self) -> dict[int, str]:
        """By number of the client, ascending: its data, or `share`."""
        return {
            number: self.settings.data[str(number)]
            for number in sorted(int(number) for number in self.settings.data)
        }

    @property
    def state(self) -> Path:
        return (self.path.parent / self.settings.state).resolve()

    def make_state(self) -> Path:
        """The site's own folder, made where it is missing, for its owner alone."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.state


def read_site(path: Path) -> SiteFile:
    """Read and check a site's settings."""
    tree = read_toml(
        path, "a site file", "start the SuperNode with --node-config 'site=\"/path/to/site.toml\"'"
    )
    try:
        settings = SiteSettings.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from None
    wrong = next(
        (
            number
            for number in settings.data
            if not (number.isascii() and number.isdigit() and str(int(number)) == number)
        ),
        None,
    )
    if wrong is not None:
        raise InputError(
            f"{path}: data.{wrong} does not name a client: clients are numbered from 0, such"
            " as 3 = \"npz(path='mine.npz')\""
        )
    if settings.data and len({source == SIMULATED_SHARE for source in settings.data.values()}) > 1:
        raise InputError(
            f'{path}: some clients have data of their own and some a "share" of the'
            " experiment's: a site is for one or the other"
        )
    return SiteFile(path.resolve(), settings)


def _explain(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [
            *SiteSettings.model_fields,
            *(f"policy.{name}" for name in Policy.model_fields),
            *(f"compute.{name}" for name in Compute.model_fields),
        ]
        return f"unknown key {key!r}: {nearest(key, known)}"
    return f"{key} cannot be used ({first['msg'].lower()})"
