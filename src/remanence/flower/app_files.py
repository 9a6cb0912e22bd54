"""`remanence flower init`: writes a Flower app around an experiment file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import tomli_w

from remanence.config import parse_experiment, read_file
from remanence.core.errors import InputError
from remanence.flower.server_app import DEFAULTS

# Flower may install what an app depends on. The app does not name Remanence, which every machine
# has installed by itself: a stranger cannot publish a package under the name and have sites run it.
FLOWER = "flwr>=1.41,<1.42"
SERVER = '''"""The ServerApp: runs the experiment files beside this one."""

from pathlib import Path

from remanence.flower.server_app import make_server_app

app = make_server_app(Path(__file__).parent)
'''
CLIENT = '''"""The ClientApp: passes every message to the site's daemon."""

from remanence.flower.client_app import make_client_app

app = make_client_app()
'''
SITE = """# The settings of a site. Copy the file to the site, next to its data, and start the
# SuperNode with --node-config 'site="/path/to/site.toml"'
# docs/flower.md of Remanence explains every line.
name = "site-0"
state = "state"                 # a folder for the clients' states; they never leave it

[data]                          # the site's clients, by number from 0, and the data of each
# or folder(path='images'), or package.module:function, or "share" for a trial
0 = "npz(path='data.npz')"

[policy]
label_counts = false            # send label counts and what reveals them: exact counts, losses
evaluate = true                 # send counts of predictions: exact ones if label_counts = true
epsilon = 0.0                   # above 0: counts with noise of this epsilon for a model and client
budget = 8.0                    # epsilon of all noised counts that ever leave about one client
suppress = 0                    # send counts below this as 0; guarantees nothing
min_examples = 8                # send no update from fewer training examples
min_steps = 2                   # or from fewer local steps
code = false                    # import and run a model class that an experiment names

[compute]
device = "auto"
"""


def write_app(
    folder: Path, experiments: list[Path], name: str = "", allow_code: bool = True
) -> list[Path]:
    """Write an app.

    Args:
        folder: Where to write it; must be empty or missing.
        experiments: Experiment files to copy into it.
        name: The app's name; empty: the folder's.
        allow_code: Accept experiments that name Python code to import.

    Returns:
        The files that were written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} exists and is not empty: choose another folder for the app")
    name = name or re.sub(r"[^a-z0-9-]+", "-", folder.resolve().name.lower()).strip("-")
    if not name or not experiments:
        raise InputError(
            f"{folder} does not name an app: use a folder with letters in its name, and give"
            " an experiment with --config"
        )
    for path in experiments:
        parse_experiment(
            read_file(path, allow_code)
        )  # rejects a wrong file before anything is written
    if len({path.name for path in experiments}) < len(experiments):
        raise InputError(
            "two of the experiment files have the same name: they go to the same folder of the"
            " app, so rename one"
        )
    package = name.replace("-", "_") + "_app"
    (folder / package).mkdir(parents=True)
    files = {
        "__init__.py": f'"""{name}: an experiment of Remanence as a Flower app."""\n',
        "server_app.py": SERVER,
        "client_app.py": CLIENT,
    }
    written = []
    for file, content in files.items():
        written.append(folder / package / file)
        written[-1].write_text(content)
    for path in experiments:
        written.append(folder / package / path.name)
        shutil.copyfile(path, written[-1])
    written.append(folder / "pyproject.toml")
    written[-1].write_text(
        tomli_w.dumps(describe_app(name, package, [path.name for path in experiments]))
    )
    written.append(folder / "site.toml.example")
    written[-1].write_text(SITE)
    return written


def describe_app(name: str, package: str, experiments: list[str]) -> dict[str, object]:
    """The contents of pyproject.toml, as Flower requires it."""
    config = DEFAULTS | {"experiment": " ".join(experiments), "out": f"runs/{name}"}
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": "An experiment of Remanence on real sites.",
            "license": "Apache-2.0",
            "dependencies": [FLOWER],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "remanence",
                    "components": {
                        "serverapp": f"{package}.server_app:app",
                        "clientapp": f"{package}.client_app:app",
                    },
                    "config": config,
                }
            },
        },
    }
