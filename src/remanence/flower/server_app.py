"""The coordinator's Flower ServerApp.

`remanence flower init` writes a file with `app = make_server_app(Path(__file__).parent)`. The
settings are in the app's pyproject.toml, under [tool.flwr.app.config]; `flwr run -c` changes them
for one run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from remanence.config import parse_experiment, parse_value, read_file
from remanence.core.errors import InputError, RemanenceError, nearest
from remanence.flower.session import Timeouts
from remanence.flower.transport import GridTransport

DEFAULTS: dict[str, Any] = {
    # experiment files in the app, separated by spaces; they run one after the other
    "experiment": "experiment.toml",
    # the run folder, relative to where the SuperLink was started; with several experiments, the
    # parent of their run folders
    "out": "runs/experiment",
    "set": "",  # changes by dotted key, separated by semicolons: rounds=5; local.lr=0.05
    **Timeouts()._asdict(),
}


def make_server_app(folder: Path) -> Any:
    """A Flower ServerApp for the experiment files in a folder."""
    from flwr.serverapp import ServerApp

    app: Any = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        run_app(folder, grid, dict(context.run_config))

    return app


def run_app(folder: Path, grid: Any, run_config: dict[str, Any]) -> None:
    """Run every experiment that the settings name. A mistake in them is one sentence in the log,
    and the run fails.
    """
    from remanence.core.progress import LogProgress
    from remanence.flower.coordinator import run_experiment

    try:
        settings = read_settings(run_config)
        changes = parse_changes(str(settings["set"]))
        names = str(settings["experiment"]).split()
        configs = {name: parse_experiment(read_file(folder / name), changes) for name in names}
        timeouts = Timeouts(*(float(settings[name]) for name in Timeouts._fields))
        out = Path(str(settings["out"])).expanduser()
        for name, config in configs.items():
            run_folder = out if len(names) == 1 else out / Path(name).stem
            progress = LogProgress()
            run = run_experiment(config, run_folder, GridTransport(grid), timeouts, progress)
            for text in run.warnings:
                progress.log(f"Warning: the run {text}")
    except RemanenceError as error:
        print(f"remanence: {error}", file=sys.stderr, flush=True)
        raise


def read_settings(run_config: dict[str, Any]) -> dict[str, Any]:
    """The app's settings with their defaults; unknown names and wrong numbers are rejected."""
    unknown = next((name for name in run_config if name not in DEFAULTS), None)
    if unknown is not None:
        raise InputError(
            f"unknown setting {unknown!r} in [tool.flwr.app.config]: {nearest(unknown, DEFAULTS)}"
        )
    settings = DEFAULTS | run_config
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
    """Parse the setting `set`.

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
