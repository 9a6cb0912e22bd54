"""`remanence flower quickstart`: a whole federation on this machine by one command, secured as
a real one would be.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from remanence.config import parse_experiment, write_toml
from remanence.core.errors import InputError, RunFailed
from remanence.core.files import create_output_dir
from remanence.flower.app_files import write_app
from remanence.flower.processes import HOST, Federation
from remanence.results.run import SPEC

MARK = "quickstart.toml"  # tells our folders from others, so that --overwrite deletes nothing else
LONGEST = 3600.0


def run_quickstart(
    out: Path,
    method: str,
    rounds: int,
    sites: int,
    secure: bool,
    overwrite: bool,
    say: Callable[[str], None],
) -> Path:
    """Certificates, keys, a SuperLink, sites, a run on digits, and the end of all of them. ->
    the run folder
    """
    if sites < 1:
        raise InputError(f"--sites {sites}: a federation needs one site at least")
    clients = 2 * sites
    spec = parse_experiment(
        {},
        {
            "method": method,
            "rounds": rounds,
            "engine": "flower",
            "data.name": "digits",
            "data.partition": "dirichlet(alpha=0.3)",
            "clients.count": clients,
            "local.epochs": 2,
            "local.batch_size": 16,
            "device": "cpu",
        },
    )
    _check(method)
    create_output_dir(out, overwrite, (MARK,))
    out = out.resolve()
    (out / MARK).write_text(write_toml(spec, {}))
    write_app(
        out / "app", [_copy(out / MARK, out / "files" / "experiment.toml")], name="quickstart"
    )
    federation = Federation(
        out, secure=secure, environment={"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    )
    try:
        federation.start()
        guarded = (
            "TLS, and only registered keys may join"
            if secure
            else "WITHOUT TLS and authentication, so for this machine alone"
        )
        say(f"SuperLink at {HOST}:{federation.port}: {guarded}")
        for number in range(sites):
            name = f"site-{number}"
            federation.add_site(
                name, write_site(out / name, name, range(2 * number, 2 * number + 2))
            )
            say(f"{name} with clients {2 * number} and {2 * number + 1}")
        watch(federation, federation.run(out / "app", name="run"), say)
    finally:
        federation.stop()
    folder = out / "runs" / "quickstart"
    if not (folder / SPEC).exists():
        raise RunFailed(
            f"the run did not start: {out / 'run.log'} and {out / 'superlink.log'} say why"
        )
    return folder


def write_site(folder: Path, name: str, clients: range) -> Path:
    """A site file for a trial: its clients have shares of the experiment's data."""
    folder.mkdir(parents=True)
    path = folder / "site.toml"
    tree = {
        "name": name,
        "data": {str(client): "share" for client in clients},
        "policy": {"label_counts": True},
        "compute": {"threads": 1},
    }
    path.write_text(tomli_w.dumps(tree))
    return path


def watch(federation: Federation, run: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    """Pass on what the coordinator says until the run has ended."""
    shown, end = 0, time.monotonic() + LONGEST
    while True:
        over = run.poll() is not None
        lines = _own_lines(federation.log("run").read_text(errors="replace"))
        for line in lines[shown:]:
            say(line)
        shown = len(lines)
        if over:
            return
        if time.monotonic() > end:
            raise RunFailed(
                f"the run did not end in {LONGEST:g} s: look into {federation.log('run')}"
            )
        time.sleep(0.5)


def _own_lines(text: str) -> list[str]:
    """What our coordinator said, without Flower's own lines and without what is still being
    written.
    """
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [
        line.strip()
        for line in whole
        if line.startswith(
            ("site ", "clients ", "round ", "new run", "done", "after ", "remanence:")
        )
        or ": round " in line
    ]


def _check(method: str) -> None:
    """Refuse a wrong method before anything is started."""
    from remanence.core.compose import parse_method
    from remanence.methods import PARTS

    if any(p.needs_public_data for p in parse_method(method, PARTS).parts):
        raise InputError(
            f"{method} needs a public set, and the quickstart has none: try fedavg,"
            " scaffold+wsm or hast"
        )


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    return target
