"""From the command to the first round: with an empty compiler cache, with a filled one, and for the
second method of a comparison.

    python benchmarks/starts.py [--networks lenet,cnn,resnet18] [--device cuda] [--precision bf16]
    [--rounds 500] [--execution auto]

Every number starts the command as a user does, in a process of its own, and waits until a round's
metrics are in the run folder. `auto` decides for `--rounds` rounds; the process is ended after the
first of them. The second method's number is the time from the first method's only round to its own,
in a comparison that began with an empty cache; `--execution compiled` measures it with compiling.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from choices import NETWORKS

LIMIT_S = 400.0
TARGETS = {"resnet18": (45.0, 10.0, 10.0), "lenet": (15.0, None, None), "cnn": (15.0, None, None)}
SECOND_METHOD = "fedprox(mu=0.1)"


def settings_of(network: str, options: argparse.Namespace, rounds: int) -> list[str]:
    """The flags of a network's job."""
    settings: dict[str, Any] = {
        **NETWORKS[network],
        "device": options.device,
        "precision": options.precision,
        "rounds": rounds,
        "record.every": 1,
    }
    if options.execution != "auto":
        settings |= {"engine": "vectorized", "execution": options.execution}
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def seconds_until(
    command: Sequence[str], folder: Path, names: Sequence[str], cache: Path
) -> list[float]:
    """Seconds from the start of a command to the first line of each named run's metrics. The
    command is ended after the last of them.

    Args:
        command: What to run.
        folder: Its output folder.
        names: A part of the name of each run's folder; "" for the output folder itself.
        cache: Where compiled code is kept.
    """
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    begin, found = time.perf_counter(), dict.fromkeys(names, 0.0)
    with folder.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen([*command, "--out", str(folder)], env=environment, stderr=log)
        try:
            while not all(found.values()) and time.perf_counter() - begin < LIMIT_S:
                ended = process.poll() is not None
                for name in names:
                    if not found[name] and has_round(folder, name):
                        found[name] = time.perf_counter() - begin
                if ended:
                    break
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        if not all(found.values()):
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}: no round was seen\n{log.read()[-2_000:]}")
    return list(found.values())


def has_round(folder: Path, name: str) -> bool:
    """Whether the metrics of a run have a line."""
    return any(
        path.read_bytes().count(b"\n") > 0
        for path in folder.rglob("metrics.jsonl")
        if name in path.relative_to(folder).as_posix()
    )


def measure(network: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds to the first round: with an empty cache, with a filled one, and from the first
    method's only round to the second method's.
    """
    command = [sys.executable, "-m", "remanence"]
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch, "cache")
        run = [*command, "run", *settings_of(network, options, options.rounds), "-qq"]
        (cold,) = seconds_until(run, Path(scratch, "cold"), [""], cache)
        (warm,) = seconds_until(run, Path(scratch, "warm"), [""], cache)
        compare = [*command, "compare", "--methods", f"fedavg,{SECOND_METHOD}", "--batch-runs", "1"]
        compare += [*settings_of(network, options, 1), "-qq"]
        names, other = ("fedavg", "fedprox"), Path(scratch, "other_cache")
        first, second = seconds_until(compare, Path(scratch, "two"), names, other)
    return cold, warm, second - first


def row(network: str, seconds: tuple[float, float, float]) -> str:
    targets: Mapping[str, Any] = TARGETS
    cells = []
    for value, target in zip(seconds, targets.get(network, (None,) * 3), strict=True):
        cells.append(f"{value:.1f} s" + (f" (target {target:.0f})" if target else ""))
    return f"| {network} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--networks", default="lenet,cnn,resnet18" if cuda else "mlp,lenet,cnn")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--precision", default="bf16" if cuda else "fp32")
    parser.add_argument("--rounds", type=int, default=500, help="rounds the engine decides for")
    parser.add_argument("--execution", default="auto", help="auto, eager, captured or compiled")
    options = parser.parse_args(arguments)
    print("| network | cold | warm | second method |\n|---|--:|--:|--:|", flush=True)
    for network in options.networks.split(","):
        print(row(network, measure(network, options)), flush=True)


if __name__ == "__main__":
    main()
