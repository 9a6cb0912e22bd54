"""`remanence flower quickstart`: a federation on this machine, with TLS and registered keys."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from remanence.config import Experiment, parse_experiment, write_toml
from remanence.core.compose import parse_method
from remanence.core.errors import InputError, RunFailed
from remanence.core.files import create_output_dir
from remanence.core.safe_path import SafePath
from remanence.flower.app_files import write_app
from remanence.flower.processes import HOST, Federation
from remanence.methods import PARTS
from remanence.results.run import EXPERIMENT

MARK = "quickstart.toml"  # marks a quickstart folder: --overwrite deletes no other
TIMEOUT_S = 3600.0
POLICY_NOTE = """# A trial with published digits: nothing about the examples is secret. With data of
# your own leave label_counts out, and exact counts and losses stay at the site.
"""


def run_quickstart(
    out: Path,
    method: str,
    rounds: int,
    sites: int,
    secure: bool,
    overwrite: bool,
    log: Callable[[str], None],
) -> Path:
    """Make certificates and keys, start a SuperLink and sites, train on digits, and end everything.

    Args:
        out: The folder for all files.
        method: A method that needs no public set.
        rounds: How many rounds.
        sites: How many sites, with two clients each.
        secure: With TLS and node authentication.
        overwrite: Replace an earlier quickstart.
        log: Called with one sentence for each event.

    Returns:
        The run folder.
    """
    if sites < 1:
        raise InputError(f"--sites {sites}: a federation needs one site at least")
    config = _make_config(method, rounds, 2 * sites)
    create_output_dir(out, overwrite, (MARK,))
    out = out.resolve()
    content = write_toml(config, {})
    experiment = out / "files" / "experiment.toml"
    experiment.parent.mkdir()
    for path in (out / MARK, experiment):
        path.write_text(content)
    write_app(out / "app", [experiment], name="quickstart")
    environment = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    federation = Federation(out, secure=secure, environment=environment)
    try:
        federation.start()
        security = (
            "TLS, and only registered keys may join"
            if secure
            else "WITHOUT TLS and authentication, so for this machine alone"
        )
        log(f"SuperLink at {HOST}:{federation.port}: {security}")
        for number in range(sites):
            name, clients = f"site-{number}", range(2 * number, 2 * number + 2)
            federation.add_site(name, write_site(out / name, name, clients))
            log(f"{name} with clients {clients[0]} and {clients[1]}")
        follow_log(federation, federation.run(out / "app", name="run"), log)
    finally:
        federation.stop()
    folder = out / "runs" / "quickstart"
    if not (SafePath(folder) / EXPERIMENT).is_regular_file():
        raise RunFailed(f"the run did not start: see {out / 'run.log'} and {out / 'superlink.log'}")
    return folder


def _make_config(method: str, rounds: int, clients: int) -> Experiment:
    if any(p.needs_public_data for p in parse_method(method, PARTS).parts):
        raise InputError(
            f"{method} needs a public set, and the quickstart has none: try fedavg,"
            " scaffold+wsm or hast"
        )
    settings = {
        "method": method,
        "rounds": rounds,
        "engine": "flower",
        "data.name": "digits",
        "data.partition": "dirichlet(alpha=0.3)",
        "clients.count": clients,
        "local.epochs": 2,
        "local.batch_size": 16,
        "device": "cpu",
    }
    return parse_experiment({}, settings)


def write_site(folder: Path, name: str, clients: range) -> Path:
    """Write a site file for a trial, whose clients have shares of the experiment's data."""
    folder.mkdir(parents=True)
    path = folder / "site.toml"
    tree = {
        "name": name,
        "data": {str(client): "share" for client in clients},
        "policy": {"label_counts": True, "min_examples": 1, "min_steps": 1},
        "compute": {"threads": 1},
    }
    path.write_text(f"{POLICY_NOTE}{tomli_w.dumps(tree)}")
    return path


def follow_log(
    federation: Federation, run: subprocess.Popen[bytes], log: Callable[[str], None]
) -> None:
    """Pass on the coordinator's log until the run has ended."""
    shown, end = 0, time.monotonic() + TIMEOUT_S
    while True:
        over = run.poll() is not None
        lines = _coordinator_lines(federation.log("run").read_text(errors="replace"))
        for line in lines[shown:]:
            log(line)
        shown = len(lines)
        if over:
            return
        if time.monotonic() > end:
            raise RunFailed(f"the run did not end in {TIMEOUT_S:g} s: see {federation.log('run')}")
        time.sleep(0.5)


def _coordinator_lines(text: str) -> list[str]:
    """Complete lines of the coordinator, without those of Flower."""
    starts = ("site ", "clients ", "round ", "new run", "done", "after ", "remanence:")
    return [
        line.strip()
        for line in text[: text.rfind("\n") + 1].splitlines()
        if line.startswith(starts) or ": round " in line
    ]
