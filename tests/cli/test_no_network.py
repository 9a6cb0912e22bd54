"""No command opens a network socket unless its help says so.

All other commands run one after the other in a new process with an audit hook, which sees every
socket that Python makes, also in the worker processes of an engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from remanence.cli.main import app
from remanence.engines.table import ENGINES

HOOK = """
import os, sys

def _record(event, arguments):
    if event == "socket.__new__" and int(arguments[1]) in (2, 10, 30):  # AF_INET, AF_INET6
        command = os.environ["COMMAND"]
        with open(os.environ["SOCKETS"], "a") as file:
            file.write(f"{command}: a socket of the family {arguments[1]}\\n")
    elif event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        if not isinstance(address, (bytes, str)) or event == "socket.getaddrinfo":
            with open(os.environ["SOCKETS"], "a") as file:
                file.write(f"{os.environ['COMMAND']}: {event} {address}\\n")

sys.addaudithook(_record)
"""

DRIVER = """
import os, shlex, sys, warnings
from remanence.cli.main import app

for line in open(sys.argv[1]):
    os.environ["COMMAND"] = line.strip()
    code = app(shlex.split(line), standalone_mode=False) or 0
    print("exit code", code, "of", line.strip(), flush=True)
"""

QUICK = (
    '--data "synthetic(samples=200, classes=3, features=4)" --model "mlp(hidden=4)" --clients 4'
    " --rounds 1 --quiet"
)
COMMANDS = f"""
run {QUICK} --engine sequential --out run
run {QUICK} --engine processes --out workers --set workers=2
run {QUICK} --out automatic
resume run --rounds 2 --quiet
compare --methods "fedavg; fedavg+wsm" {QUICK} --engine vectorized --out comparison
search --method fedavg --around 0.1 {QUICK} --engine sequential --out search
report run comparison --out page.html
diagnose run
evaluate run
export run
list methods
data list
data check digits
data show --clients 4
reproduce
reproduce wsm/table-3.2 --plan
reproduce wsm/table-3.2 --scale smoke --only FedAvg --out result --quiet
results result --out pages
flower init app --config experiment.toml
flower check site.toml experiment.toml
flower audit site.toml experiment.toml
demo --rounds 1 --out demo --quiet
bench --help
"""
# what these connect to is in their help
NETWORK = {
    "watch": "loopback network interface",
    "data fetch": "over the network",
    "flower quickstart": "loopback network interface",
}
# they only write files, but need the package flwr, which takes seconds to import
FILES_ONLY = {"flower certificates", "flower key"}

SITE = """name = "one"
state = "state"
[data]
0 = "share"
"""
EXPERIMENT = """engine = "flower"
rounds = 1
[data]
name = "digits"
[clients]
count = 1
"""


def command_names(group: Any, prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, command in group.commands.items():
        if hasattr(command, "commands"):  # a group, of click or of typer's copy of it
            names |= command_names(command, f"{prefix}{name} ")
        else:
            names.add(f"{prefix}{name}")
    return names


def test_every_command_is_run_here_or_says_what_it_connects_to() -> None:
    root: Any = typer.main.get_command(app)
    names = command_names(root)
    run = {name for name in names if any(f"{line} ".startswith(f"{name} ") for line in lines())}
    assert run | set(NETWORK) | FILES_ONLY == names
    assert not run & set(NETWORK)
    for name, words in NETWORK.items():
        command = root
        for part in name.split():
            command = command.commands[part]
        assert words in " ".join((command.help or "").split()), name
    for engine in ("ray", "flower"):
        assert "network" in ENGINES[engine].description


def test_no_other_command_opens_a_network_socket(tmp_path: Path) -> None:
    for name, text in (
        ("sitecustomize.py", HOOK),
        ("driver.py", DRIVER),
        ("commands.txt", "\n".join(lines())),
        ("site.toml", SITE),
        ("experiment.toml", EXPERIMENT),
    ):
        (tmp_path / name).write_text(text)
    sockets = tmp_path / "sockets.txt"
    environment = {
        **{key: value for key, value in os.environ.items() if key != "REMANENCE_DATA"},
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "SOCKETS": str(sockets),
        "COMMAND": "import",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "driver.py", "commands.txt"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert [line.removeprefix("exit code 0 of ") for line in ends] == lines(), done.stderr[-3000:]
    assert not sockets.exists(), sockets.read_text()


def test_the_hook_sees_a_socket(tmp_path: Path) -> None:
    """Also one of a child process."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    sockets = tmp_path / "sockets.txt"
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.close();"
        " socket.socket(socket.AF_UNIX).close()"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SOCKETS": str(sockets)}
    subprocess.run(
        [sys.executable, "-c", child], env=environment | {"COMMAND": "child"}, check=True
    )
    assert sockets.read_text().splitlines() == [
        "child: a socket of the family 2",
        "child: socket.bind ('127.0.0.1', 0)",
    ]


def lines() -> list[str]:
    return COMMANDS.strip().splitlines()
