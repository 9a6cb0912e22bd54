"""site.toml: the clients of a site, their data, what the site allows and its devices. Imports no
torch.

    name = "ward-7"
    state = "state"                # a folder for client states, relative to this file

    [data]                         # the site's clients, by number, and the data of each
    0 = "npz(path='ward-7.npz')"
    1 = "my_package.wards:load"    # a function without arguments that returns a torch Dataset

    [policy]
    label_counts = false
    epsilon = 0.1

For trials, write "share" in place of data: the client gets its share of the experiment's own data
set.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, ValidationError

from remanence.config import Natural, Number, Section, read_toml
from remanence.core.errors import InputError, nearest
from remanence.flower.budget_file import prepare_budget

SIMULATED_SHARE = "share"


class Policy(Section):
    """What a site allows. It declines everything else, with the code `policy`."""

    # send label counts, to methods that ask for them, and what they can be computed from: exact
    # counts of predictions, losses, payloads that may reveal single examples
    label_counts: StrictBool = False
    # send counts of correct and wrong predictions; exact ones are label counts, others need epsilon
    evaluate: StrictBool = True
    suppress: Natural = 0  # counts below this are sent as 0; this guarantees nothing
    # add two-sided geometric noise of this epsilon to the counts of one model on one client's
    # examples; 0: no noise
    epsilon: Annotated[Number, Field(ge=0, lt=float("inf"))] = 0.0
    # the epsilon of all counts that ever leave about one client
    budget: Annotated[Number, Field(ge=0, lt=float("inf"))] = 8.0
    # the least training examples and local steps of an update that leaves
    min_examples: Annotated[StrictInt, Field(ge=1)] = 8
    min_steps: Annotated[StrictInt, Field(ge=1)] = 2
    # import and run a model class that an experiment names as package.module:Class
    code: StrictBool = False
    # the only parts that this site accepts, such as fedavg and wsm; empty: all
    methods: tuple[StrictStr, ...] = ()


class Compute(Section):
    device: StrictStr = "auto"
    threads: Natural = 0  # 0: torch's own choice
    engine: Literal["auto", "sequential", "vectorized"] = "auto"  # for the site's own clients
    # keep a process with the data in memory; false: load everything again for every message
    daemon: StrictBool = True


class SiteSettings(Section):
    name: Annotated[StrictStr, Field(min_length=1, max_length=100)]
    state: Annotated[StrictStr, Field(min_length=1)] = "state"
    # give a client whose state is lost a first state, instead of declining
    restart: StrictBool = False
    data: Annotated[dict[str, StrictStr], Field(min_length=1)]
    policy: Policy = Policy()
    compute: Compute = Compute()


class SiteFile:
    """A site's settings and the path of their file, to which paths in them are relative."""

    def __init__(self, path: Path, settings: SiteSettings):
        self.path, self.settings = path, settings

    @property
    def clients(self) -> dict[int, str]:
        """By client number, ascending: its data, or `share`."""
        return {
            number: self.settings.data[str(number)]
            for number in sorted(int(number) for number in self.settings.data)
        }

    @property
    def state(self) -> Path:
        return (self.path.parent / self.settings.state).resolve()

    def make_state(self) -> Path:
        """Create the state folder, which only its owner can read, with nothing spent."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        prepare_budget(self.state)
        return self.state


def read_site(path: Path) -> SiteFile:
    """Read and validate a site file."""
    tree = read_toml(
        path, "a site file", "start the SuperNode with --node-config 'site=\"/path/to/site.toml\"'"
    )
    try:
        settings = SiteSettings.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from None
    invalid = next(
        (
            number
            for number in settings.data
            if not (number.isascii() and number.isdigit() and str(int(number)) == number)
        ),
        None,
    )
    if invalid is not None:
        raise InputError(
            f"{path}: data.{invalid} does not name a client: clients are numbered from 0, such"
            " as 3 = \"npz(path='mine.npz')\""
        )
    if settings.data and len({source == SIMULATED_SHARE for source in settings.data.values()}) > 1:
        raise InputError(
            f'{path}: some clients have data of their own and some have "share": use one or the'
            " other"
        )
    policy = settings.policy
    if policy.epsilon > policy.budget:
        raise InputError(
            f"{path}: policy.epsilon = {policy.epsilon:g} is above policy.budget ="
            f" {policy.budget:g}, so no counts could leave: raise the budget, or lower epsilon"
        )
    return SiteFile(path.resolve(), settings)


def exact_number(value: float) -> Fraction:
    """A number of a site file as it is written there: ten times 0.1 is 1."""
    return Fraction(str(value))


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
