"""The coordinator's end of a Flower app.

The file that `remanence flower init` writes says `app = make_server_app(Path(__file__).parent)`;
settings are in the app's pyproject.toml, under [tool.flwr.app.config], and can be changed for one
run with `flwr run -c`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from remanence.config import parse_experiment, parse_value, read_file
from remanence.core.errors import InputError, RemanenceError
from remanence.flower.session import Timeouts
from remanence.flower.transport import GridTransport

DEFAULTS: dict[str, Any] = {
    # in the app; several, separated by spaces, are run one after the other
    "experiment": "experiment.toml",
    # the run folder, seen from where the SuperLink was started; of several experiments, their
    # parent
    "out": "runs/experiment",
    "set": "",  # changes by dotted key, separated by semicolons: rounds=5; local.lr=0.05
    **Timeouts()._asdict(),
}


def make_server_app(folder: Path) -> Any:
    """A Flower ServerApp around the experiment files in that folder."""
    from flwr.serverapp import ServerApp

    app: Any = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        run_app(folder, grid, dict(context.run_config))

    return app


def run_app(folder: Path, grid: Any, given: dict[str, Any]) -> None:
    """Run every experiment the settings name; a mistake in them is one sentence in the log, and
    the run fails.
    """
    from remanence.core.progress import LogProgress
    from remanence.flower.coordinator import run_experiment

    try:
        settings = read_settings(given)
        changes = parse_changes(str(settings["set"]))
        names = str(settings["experiment"]).split()
        specs = {name: parse_experiment(read_file(folder / name), changes) for name in names}
        patience = Timeouts(*(float(settings[name]) for name in Timeouts._fields))
        for name, spec in specs.items():
            out = Path(str(settings["out"])).expanduser()
            run_experiment(
                spec,
                out if len(names) == 1 else out / Path(name).stem,
                GridTransport(grid),
                patience,
                LogProgress(),
            )
    except RemanenceError as error:
        print(f"remanence: {error}", file=sys.stderr, flush=True)
        raise


def read_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The app's settings with their defaults; an unknown one is refused, a wrong number too."""
    from remanence.core.errors import nearest

    unknown = next((name for name in given if name not in DEFAULTS), None)
    if unknown is not None:
        raise InputError(
            f"unknown setting {unknown!r} in [tool.flwr.app.config]: {nearest(unknown, DEFAULTS)}"
        )
    settings = DEFAULTS | given
    for name in Timeouts._fields:
        if (
            isinstance(settings[name], bool)
            or not isinstance(settings[name], int | float)
            or not settings[name] > 0
        ):
            raise InputError(
                f"{name} in [tool.flwr.app.config] must be a number of seconds above 0, not"
                f" {settings[name]!r}"
            )
    return settings


def parse_changes(text: str) -> dict[str, Any]:
    """`rounds=5; local.lr=0.05`

    >>> parse_changes("rounds=5; method=fedavg+wsm")
    {'rounds': 5, 'method': 'fedavg+wsm'}
    """
    changes = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"set in [tool.flwr.app.config] has {part!r}, which has no value: write set ="
                ' "rounds=5; local.lr=0.05"'
            )
        changes[key.strip()] = parse_value(value.strip())
    return changes
